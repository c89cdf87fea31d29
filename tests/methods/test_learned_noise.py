"""The noise that LP-BNN learns: the weight of the KL, and where likelihood and KL balance."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn.draws import PrivateDraws
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior


def built(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, **options).double()


def penalties(**options: Any) -> Any:
    model = built(**options)
    return model.penalties(model.posterior())


def test_the_weight_of_the_kl_can_be_given() -> None:
    for weighting in ("balanced", "equation", "authors"):
        given = penalties(kl_weight=0.25, weighting=weighting)
        own = penalties(weighting=weighting)
        torch.testing.assert_close(given["kl"], penalties(weighting="authors")["kl"] / 4)
        torch.testing.assert_close(given["reconstruction"], own["reconstruction"])


def test_the_noise_comes_to_rest_where_the_docstring_says() -> None:
    """An error of curvature h_i along z_i, and a KL of weight a: sigma_i^2 = a / (a + h_i)."""
    torch.manual_seed(0)
    factors = LatentFactors(2, 16, 3, latent=4).double()
    a, steepness = 0.1, 3.0
    optimizer = torch.optim.LBFGS(
        factors.encoder.parameters(),
        max_iter=1000,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        posterior = LatentPosterior([factors])
        kl, squared = posterior.kl(), posterior.squared_error(of_samples=True)
        total = (0.5 * steepness * squared + a * kl).sum()
        total.backward()
        return total

    optimizer.step(loss)
    curvature = steepness * factors.decoder.weight.square().sum(0) / factors.latent
    expected = (a / (a + curvature)).expand(2, -1)
    variance = LatentPosterior([factors]).sigma[0].square()
    torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)
    assert expected.max() > 1.5 * expected.min()  # directions differ, and so does their noise


def test_the_loss_runs_sampled_factors_and_keeps_their_mean() -> None:
    factors = LatentFactors(2, 16, 3, latent=4)
    posterior = LatentPosterior([factors])
    [(mean, _)] = posterior.mean()
    [(r, _)] = posterior.sample(rows_per_member=1)
    assert (r - mean).abs().max() > 0.01
    assert posterior.center is not None
    torch.testing.assert_close(posterior.center[0][0], mean)


@pytest.mark.parametrize("method", ["lpbnn", "rank1"])
def test_the_noise_scale_multiplies_the_standard_deviation(method: str) -> None:
    model: Any = lpbnn.build(nn.Linear(3, 2), method, members=2, num_data=100)

    def noise(scale: float) -> Tensor:
        model.set_noise_scale(scale)
        with PrivateDraws(0):
            (drawn,) = model.sample(5).layers
        ((mean, _),) = model.posterior().mean()
        return drawn.r - mean.repeat(5, 1)

    whole = noise(1.0)
    assert whole.abs().max() > 1e-3
    for scale in (0.0, 0.5, 3.0):
        torch.testing.assert_close(noise(scale), scale * whole)


def test_a_training_loss_draws_with_the_noise_scale() -> None:
    model, x, y = built(), torch.randn(6, 3).double(), torch.tensor([0, 1, 0, 1, 0, 1])
    model.set_noise_scale(0.0)
    assert torch.equal(model.loss(x, y)["nll"], model.loss(x, y)["nll"])
    model.set_noise_scale(1.0)
    assert not torch.equal(model.loss(x, y)["nll"], model.loss(x, y)["nll"])
