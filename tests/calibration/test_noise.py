"""The noise scale: the size of the posterior's noise at which the fitted temperature is one."""

from typing import Any

import pytest
import torch
from networks import small
from torch import Tensor, nn

import lpbnn
from lpbnn.calibration import calibrate, fit_noise_scale
from lpbnn.calibration.held_out import Cells
from lpbnn.calibration.noise import log_temperature_slope
from lpbnn.methods.mcdropout import ActiveDropout

POSTERIORS = ("lpbnn", "rank1", "meanfield", "mcdropout")


OPTIONS: dict[str, dict[str, Any]] = {
    "lpbnn": {"init_std": 0.1},
    "rank1": {"init_std": 0.1, "std": 0.2},
    "meanfield": {"std": 0.1},
    "mcdropout": {"rate": 0.1},
}


def model_and_data(method: str, noise: float) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A model, and labels drawn from its own predictions at another noise."""
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight *= 2
    model: Any = lpbnn.build(net, method, members=4, num_data=100, **OPTIONS[method])
    if method == "lpbnn":
        with torch.no_grad():
            for layer in model.layers:
                layer.factors.encoder.bias[layer.factors.latent :] += 1
    x = torch.randn(3000, 6)
    model.set_noise_scale(noise)
    probs = lpbnn.predict(model, x, samples=32, seed=1).probs
    model.set_noise_scale(1.0)
    return model, [(x, probs.multinomial(1).squeeze(1))]


@pytest.mark.parametrize("method", POSTERIORS)
def test_the_fitted_temperature_is_one_at_the_scale_found(method: str) -> None:
    model, data = model_and_data(method, 1.5)
    fit_noise_scale(model, data, samples=4)
    assert calibrate(model, data, samples=4).temperature == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("method", POSTERIORS)
def test_the_scale_that_made_the_labels_is_found(method: str) -> None:
    model, data = model_and_data(method, 1.5)
    assert fit_noise_scale(model, data, samples=16) == pytest.approx(1.5, abs=0.35)


@pytest.mark.parametrize("method", POSTERIORS)
def test_no_noise_makes_all_members_draws_equal(method: str) -> None:
    model, [(x, _)] = model_and_data(method, 1.0)
    model.set_noise_scale(0.0)
    first, second = (lpbnn.predict(model, x, seed=seed).probs for seed in (0, 1))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("method", POSTERIORS)
def test_scale_one_is_the_model_as_trained(method: str) -> None:
    model, [(x, _)] = model_and_data(method, 1.0)
    before = lpbnn.predict(model, x, seed=0).probs
    model.set_noise_scale(3.0)
    model.set_noise_scale(1.0)
    assert torch.equal(lpbnn.predict(model, x, seed=0).probs, before)


@pytest.mark.parametrize("method", POSTERIORS)
def test_the_scale_travels_with_the_state_dict(method: str) -> None:
    model, [(x, _)] = model_and_data(method, 1.0)
    twin, _ = model_and_data(method, 1.0)
    model.set_noise_scale(2.0)
    twin.load_state_dict(model.state_dict())
    expected = lpbnn.predict(model, x, seed=0).probs
    assert torch.equal(lpbnn.predict(twin, x, seed=0).probs, expected)


def test_the_standard_deviation_of_a_dropout_mask_is_multiplied() -> None:
    for scale in (0.5, 2.0):
        dropout = ActiveDropout(nn.Dropout(0.3))
        before = dropout(torch.ones(200_000)).std()
        dropout.noise_scale = scale
        mask = dropout(torch.ones(200_000))
        assert mask.mean() == pytest.approx(1, abs=0.02)
        assert mask.std() / before == pytest.approx(scale, rel=0.02)


def test_the_noise_scale_and_a_temperature_combine() -> None:
    model, data = model_and_data("lpbnn", 1.5)
    x = data[0][0]
    model.set_noise_scale(0.5)
    t = calibrate(model, data, samples=4).temperature
    assert t > 1.02  # less noise than the labels': the temperature takes the rest
    noisy = lpbnn.predict(model, x, seed=0).members
    model.likelihood.scaling = None
    plain = lpbnn.predict(model, x, seed=0).members
    assert noisy is not None
    assert plain is not None
    torch.testing.assert_close(noisy, (plain.log() / t).softmax(-1), rtol=1e-3, atol=1e-5)


def test_fitting_the_noise_removes_a_scaling_of_the_old_noise() -> None:
    model, data = model_and_data("rank1", 1.5)
    calibrate(model, data)
    fit_noise_scale(model, data, samples=4)
    assert model.likelihood.scaling is None


def test_a_frozen_model_keeps_the_scaled_noise() -> None:
    model, [(x, _)] = model_and_data("lpbnn", 1.0)
    model.set_noise_scale(2.0)
    frozen = lpbnn.freeze(model, samples=3, seed=4)
    expected = lpbnn.predict(model, x, samples=3, seed=4).probs
    torch.testing.assert_close(lpbnn.predict(frozen, x).probs, expected)


# Bad input


@pytest.mark.parametrize("method", ["mcp", "ensemble", "batchensemble", "edl"])
def test_a_method_without_noise_names_the_temperature(method: str) -> None:
    with pytest.raises(TypeError, match="no noise to scale.*calibrate"):
        fit_noise_scale(lpbnn.build(small(), method), [(torch.randn(5, 4), torch.zeros(5))])


@pytest.mark.parametrize("method", POSTERIORS)
def test_a_refused_model_keeps_its_noise_and_its_scaling(method: str) -> None:
    model, [(x, y)] = model_and_data(method, 1.0)
    right = lpbnn.predict(model, x, samples=8).labels
    model.set_noise_scale(0.5)
    scaling = calibrate(model, [(x, y)])
    for batches, error, message in (
        ([(x, right)], ValueError, "not overconfident"),
        ([(x, y + 99)], IndexError, "labels are 0 to"),
        ([x], TypeError, "expected batches"),
        ([(x * torch.nan, y)], ValueError, "not all finite"),
    ):
        with pytest.raises(error, match=message):
            fit_noise_scale(model, batches)
        assert model.noise_scale == 0.5
        assert model.likelihood.scaling is scaling


def test_a_model_that_no_noise_helps_is_refused() -> None:
    model = lpbnn.build(small(), "meanfield", num_data=10, std=1e-6)
    x = torch.randn(500, 5)
    y = lpbnn.predict(model, x).probs.sqrt().multinomial(1).squeeze(1)
    with pytest.raises(ValueError, match="does not make the temperature one"):
        fit_noise_scale(model, [(x, y)])


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_amount_is_refused(scale: float) -> None:
    model = lpbnn.build(small(), "lpbnn", num_data=10)
    with pytest.raises(ValueError, match="expected a finite number of at least 0"):
        model.set_noise_scale(scale)


def test_the_slope_by_the_temperature_is_that_of_double_precision() -> None:
    cells = Cells(torch.randn(3, 50, 4), torch.arange(50) % 4)
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    probs = (cells.outputs.double() / log_t.exp()).softmax(-1).mean(0)
    nll = -probs.gather(1, cells.labels[:, None]).log().mean()
    (expected,) = torch.autograd.grad(nll, log_t)
    with torch.no_grad():  # it turns gradients on for itself
        assert log_temperature_slope(cells) == pytest.approx(expected.item(), rel=1e-12)
