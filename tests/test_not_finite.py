"""What is no number is told, or marked if asked: never answered with class 0."""

import math
from typing import Any

import pytest
import torch
from networks import Mlp, small
from torch import Tensor, nn

import lpbnn
from lpbnn import methods

BAD = (math.nan, math.inf, -math.inf)


def made(method: str, **options: Any) -> lpbnn.UncertainModel:
    model = lpbnn.build(Mlp(), method, num_data=10, **options)
    if method == "tradi":
        model.loss(torch.randn(6, 5), torch.randint(3, (6,)))["loss"].backward()
        model.after_step(lr=0.1)
        model.after_fit([])
    return model.eval()


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("method", methods.names())
def test_an_input_that_is_no_number_is_an_error(method: str, value: float) -> None:
    x = torch.randn(4, 5)
    x[2, 1] = value
    with pytest.raises(ValueError, match=r"inputs of 1 of 4 examples are NaN or infinite: .* 2\."):
        lpbnn.predict(made(method), x)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("method", methods.names())
def test_it_can_be_marked_instead(method: str, value: float) -> None:
    """It gets no class and passes no threshold; the others are predicted as ever."""
    model, x = made(method), torch.randn(4, 5)
    expected = lpbnn.predict(model, x, seed=0)
    x[2, 1] = value
    p = lpbnn.predict(model, x, seed=0, allow_not_finite=True)
    assert p.probs[2].isnan().all()
    assert p.ood_score[2] == math.inf
    assert p.total[2].isnan()
    rest = [0, 1, 3]
    torch.testing.assert_close(p.probs[rest], expected.probs[rest])
    torch.testing.assert_close(p.ood_score[rest], expected.ood_score[rest])


class Bounded(nn.Module):
    """Squashes its inputs, so that infinite ones have finite outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.tanh())


def test_an_infinite_input_is_marked_though_its_outputs_are_finite() -> None:
    model, x = lpbnn.build(Bounded(), "mcp"), torch.randn(4, 5)
    x[2, 1] = math.inf
    p = lpbnn.predict(model, x, allow_not_finite=True)
    assert p.probs.isnan().any(1).tolist() == [False, False, True, False]
    assert p.ood_score.isinf().tolist() == [False, False, True, False]


@pytest.mark.parametrize("method", methods.names())
def test_weights_that_have_diverged_are_an_error(method: str) -> None:
    model = made(method)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
    with pytest.raises(ValueError, match=r"outputs of 4 of 4 examples are NaN .*diverged"):
        lpbnn.predict(model, torch.randn(4, 5))


def test_finite_outputs_whose_sum_overflows_are_predicted() -> None:
    outputs = torch.full((1, 4, 1), 3e38)
    found = lpbnn.Prediction.from_outputs(outputs, lpbnn.likelihoods.Gaussian(variance=1.0))
    assert torch.equal(found.mean, outputs[0])


def test_a_variance_that_overflows_is_an_error() -> None:
    model = lpbnn.build(
        small(classes=2), "mcp", likelihood=lpbnn.likelihoods.Gaussian("log"), check=False
    )
    x = torch.randn(4, 5)
    with torch.no_grad():
        model.net[-1].bias[1] = 1e4
    with pytest.raises(ValueError, match="outputs of 4 of 4"):
        lpbnn.predict(model, x)


PARTLY_BAD: dict[str, tuple[lpbnn.likelihoods.Likelihood, tuple[int, ...]]] = {
    "one pixel of a map": (lpbnn.likelihoods.Segmentation(), (2, 3, 4, 5, 5)),
    "one of several labels": (lpbnn.likelihoods.MultiLabel(), (2, 3, 4)),
    "one of several numbers": (lpbnn.likelihoods.Gaussian(), (2, 3, 4)),
}


@pytest.mark.parametrize("case", PARTLY_BAD)
def test_a_single_output_that_is_no_number_is_an_error(case: str) -> None:
    likelihood, shape = PARTLY_BAD[case]
    outputs = torch.randn(shape)
    outputs[0, 1].flatten()[0] = math.nan
    with pytest.raises(ValueError, match=r"outputs of 1 of 3 examples are NaN .* 1\."):
        lpbnn.Prediction.from_outputs(outputs, likelihood)
    p = lpbnn.Prediction.from_outputs(outputs, likelihood, allow_not_finite=True)
    for values, mark in (
        (p.values, torch.isnan),
        (p.total, torch.isnan),
        (p.ood_score, torch.isinf),
    ):
        assert [bool(mark(part).all()) for part in values] == [False, True, False]
        assert values[[0, 2]].isfinite().all()


def test_a_bad_first_batch_does_not_make_the_model_fall_back() -> None:
    model = made("batchensemble")
    with pytest.raises(ValueError, match="NaN or infinite"):
        lpbnn.predict(model, torch.full((4, 5), math.nan))
    assert model.execution == "unchecked"


def test_a_mask_may_hold_infinity() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor, added: Tensor) -> Tensor:
            return self.fc(x) + added

    model = lpbnn.build(Masked(), "batchensemble")
    added = torch.zeros(4, 3)
    added[:, 0] = -math.inf
    p = lpbnn.predict(model, (torch.randn(4, 5), added))
    assert (p.probs[:, 0] == 0).all()
    added[1, 1] = math.nan
    with pytest.raises(ValueError, match="inputs of 1 of 4"):
        lpbnn.predict(model, (torch.randn(4, 5), added))


@pytest.mark.parametrize("scale", [1e3, 1e10, 1e20, 1e30, 1e38])
def test_duq_is_finite_for_finite_inputs(scale: float) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model = lpbnn.build(net, "duq")
    x = scale * torch.randn(50, 5).clamp(-3, 3)
    p = lpbnn.predict(model, x)
    assert p.probs.isfinite().all()
    assert p.ood_score.isfinite().all()
    assert p.ood_score.mean() > 0.5


def test_batches_of_a_loader_are_checked_one_by_one() -> None:
    x = torch.randn(4, 5)
    x[3] = math.nan
    with pytest.raises(ValueError, match="inputs of 1 of 2"):
        lpbnn.predict(made("mcp"), iter(x.split(2)))
    p = lpbnn.predict(made("mcp"), iter(x.split(2)), allow_not_finite=True)
    assert p.ood_score.isinf().tolist() == [False, False, False, True]
