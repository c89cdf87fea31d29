"""Mixture NLL, RMSE and coverage against torch.distributions and scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from lpbnn import metrics
from lpbnn.metrics import RegressionMetrics


def make(seed: int, members: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    means = torch.randn(members, n, generator=rng, dtype=torch.float64) * 2
    variances = torch.rand(members, n, generator=rng, dtype=torch.float64) + 0.05
    return means, variances, torch.randn(n, generator=rng, dtype=torch.float64) * 2


def interval(means: np.ndarray, variances: np.ndarray, tail: float) -> tuple[float, float]:
    """The central interval of one mixture, by searching for its quantiles."""

    def below(y: float, q: float) -> float:
        return norm.cdf(y, means, np.sqrt(variances)).mean() - q

    return brentq(below, -99, 99, (tail,)), brentq(below, -99, 99, (1 - tail,))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 12))
def test_equals_distributions_and_searched_quantiles(seed: int, members: int, n: int) -> None:
    means, variances, targets = make(seed, members, n)
    mixture = MixtureSameFamily(
        Categorical(torch.ones(n, members, dtype=torch.float64)),
        Normal(means.T, variances.sqrt().T),
    )
    inside = []
    for mu, var, y in zip(means.T.numpy(), variances.T.numpy(), targets.tolist(), strict=True):
        low, high = interval(mu, var, 0.025)
        inside.append(low <= y <= high)
    expected = {
        "nll": -float(mixture.log_prob(targets).mean()),
        "rmse": float((targets - mixture.mean).square().mean().sqrt()),
        "coverage": np.mean(inside),
    }
    measured = RegressionMetrics()
    measured.update(means, variances, targets)
    assert measured.compute() == pytest.approx(expected)
    assert metrics.mixture_nll(means, variances, targets) == pytest.approx(expected["nll"])
    assert metrics.rmse(means, targets) == pytest.approx(expected["rmse"])
    assert metrics.coverage(means, variances, targets) == pytest.approx(expected["coverage"])


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_a_true_model_is_covered_as_often_as_promised(level: float) -> None:
    means, variances, _ = make(0, 3, 20_000)
    member = torch.randint(3, (1, 20_000))
    targets = torch.normal(means.gather(0, member), variances.gather(0, member).sqrt())[0]
    assert metrics.coverage(means, variances, targets, level=level) == pytest.approx(
        level, abs=0.01
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_and_several_outputs(dtype: torch.dtype) -> None:
    means, variances, targets = (x.to(dtype) for x in make(0, 2, 12))
    measured, flat = RegressionMetrics(), RegressionMetrics()
    measured.update(means.view(2, 4, 3), variances.view(2, 4, 3), targets.view(4, 3))
    flat.update(means.double(), variances.double(), targets.double())
    assert measured.compute() == pytest.approx(flat.compute())


def test_a_far_target_costs_a_finite_nll() -> None:
    far = metrics.mixture_nll(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([1000.0]))
    assert far == pytest.approx(500_000.9189, rel=1e-9)


ONE = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("means", "variances", "targets", "message"),
    [
        (ONE, ONE, torch.ones(3), r"means has shape \(1, 2\).* targets has shape \(3,\); expected"),
        (ONE[0], ONE[0], ONE[0], r"for a single Gaussian pass means\[None\]"),
        (ONE, torch.ones(2, 2), ONE[0], r"variances has shape \(2, 2\)"),
        (ONE, -ONE, ONE[0], r"2 variances are not positive and finite; .* softplus"),
        (ONE, ONE * 0, ONE[0], r"2 variances are not positive"),
        (ONE * torch.nan, ONE, ONE[0], r"2 means or targets are not finite"),
        (ONE, ONE, ONE[0] * torch.nan, r"2 means or targets are not finite"),
        (ONE, ONE, ONE[0] * torch.inf, r"2 means or targets are not finite"),
        (ONE, ONE, ONE[0].long(), r"targets has dtype torch.int64"),
        (ONE[:, :0], ONE[:, :0], ONE[0, :0], r"RegressionMetrics has seen no targets"),
    ],
)
def test_bad_input_is_named_with_its_remedy(
    means: Tensor, variances: Tensor, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.mixture_nll(means, variances, targets)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3)])
def test_rmse_of_a_prediction_is_that_of_its_members_mean(shape: tuple[int, ...]) -> None:
    means, targets = torch.randn(4, *shape), torch.randn(shape)
    expected = float((means.mean(0) - targets).square().mean().sqrt())
    assert metrics.rmse(means.mean(0), targets) == pytest.approx(expected)
    assert metrics.rmse(means, targets) == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 5])
def test_rmse_takes_a_column_of_means_for_flat_targets(n: int) -> None:
    means, targets = torch.randn(n, 1), torch.randn(n)
    expected = float((means[:, 0] - targets).square().mean().sqrt())
    assert metrics.rmse(means, targets) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("means", "targets", "message"),
    [
        (
            torch.ones(3),
            torch.ones(2),
            r"means has shape \(3,\), targets has shape \(2,\); expected mea",
        ),
        (torch.ones(2, 3, 4), torch.ones(4, 3), r"or \(S, N, ...\) for S members; pass p.mean"),
        (torch.ones(0, 2), torch.ones(2), r"means has shape \(0, 2\)"),
        (torch.ones(2).long(), torch.ones(2), r"means has dtype torch.int64"),
        (torch.ones(2), torch.ones(2).long(), r"targets has dtype torch.int64"),
        (torch.ones(2) * torch.nan, torch.ones(2), r"2 means or targets are not finite"),
        (torch.ones(0), torch.ones(0), r"seen no targets"),
    ],
)
def test_rmse_never_speaks_of_variances(means: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        metrics.rmse(means, targets)
    assert "variance" not in str(caught.value)


def test_the_level_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"level is 95; expected a share between 0 and 1"):
        metrics.coverage(ONE, ONE, ONE[0], level=95)


def test_a_target_on_the_quantile_of_a_level_counts_as_below_it() -> None:
    _, shares = metrics.quantile_calibration(
        torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([-1.0, 0.0, 0.0, 1.0]), num_levels=1
    )
    assert shares.tolist() == [0.75]
