"""AUROC, AUPR and FPR95 against scikit-learn, exactly and through the histogram."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from lpbnn import metrics
from lpbnn.metrics import DetectionMetrics, PooledDetectionMetrics
from lpbnn.metrics.detection import BINS, bin_of

KINDS = [
    "random",
    "tied",
    "constant",
    "separable",
    "outside [0, 1]",
    "close",
    "confident",
    "underflow",
]


def make(kind: str, seed: int, n: int, share: float) -> tuple[Tensor, Tensor]:
    """Scores with both classes present; ``close`` ones differ by less than a bin's width."""
    rng = torch.Generator().manual_seed(seed)
    uniform = torch.rand(n, generator=rng)
    is_ood = torch.rand(n, generator=rng) < share
    is_ood[0], is_ood[1] = True, False
    scores = {
        "random": uniform,
        "tied": (uniform * 4).round() / 4,
        "constant": torch.full((n,), 0.3),
        "separable": uniform / 2 + is_ood / 2,
        "outside [0, 1]": uniform.logit() * 40 + 100,
        "close": 0.5 + uniform * 1e-3,
        "underflow": (uniform * 4 - 2).round().double() * uniform.double() * 1e-60,
        "confident": 1 - (1 - uniform**8 * 1e-6),  # float32 near zero, many exact zeros
    }[kind]
    return scores, is_ood


def restated(scores: Tensor, is_ood: Tensor) -> dict[str, float]:
    s, y = scores.double().numpy(), is_ood.numpy()
    fpr, tpr, _ = roc_curve(y, s, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(y, s),
        "aupr": average_precision_score(y, s),
        "fpr95": fpr[np.argmax(tpr >= 0.95)],
    }


cases = st.builds(
    make,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    n=st.integers(2, 200),
    share=st.floats(0.01, 0.99),
)


@settings(max_examples=120, deadline=None)
@given(cases)
def test_exact_metrics_equal_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    measured = DetectionMetrics()
    measured.update(*case)
    assert measured.compute() == pytest.approx(restated(*case), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(cases)
def test_histogram_ranks_bins_as_the_exact_metrics_rank_scores(case: tuple[Tensor, Tensor]) -> None:
    scores, is_ood = case
    pooled = PooledDetectionMetrics()
    pooled.update(scores, is_ood)
    assert pooled.compute() == pytest.approx(restated(bin_of(scores).double(), is_ood), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_histogram_is_exact_for_sixteen_bit_scores(dtype: torch.dtype) -> None:
    scores, is_ood = make("random", 0, 2000, 0.3)
    pooled = PooledDetectionMetrics()
    pooled.update(scores.to(dtype), is_ood)
    assert pooled.compute() == pytest.approx(restated(scores.to(dtype), is_ood), abs=1e-9)


def test_histogram_is_nearly_exact_on_realistic_scores() -> None:
    rng = torch.Generator().manual_seed(0)
    is_ood = torch.rand(200_000, generator=rng) < 0.02
    logits = torch.randn(200_000, 13, generator=rng)
    logits[:, 0] += torch.where(is_ood, 4.0, 9.0) * torch.rand(200_000, generator=rng)
    scores = 1 - logits.softmax(1).amax(1)
    scores[torch.rand(200_000, generator=rng) < 0.4] = 0  # saturated: half of both classes tie
    pooled = PooledDetectionMetrics()
    pooled.update(scores, is_ood)
    assert pooled.compute() == pytest.approx(restated(scores, is_ood), abs=1e-4)


any_float = st.floats(width=32, allow_nan=False) | st.just(-0.0)


@settings(max_examples=200, deadline=None)
@given(any_float, any_float)
def test_bins_keep_the_order(one: float, other: float) -> None:
    low, high = bin_of(torch.tensor(sorted([one, other]))).tolist()
    assert 0 <= low <= high < BINS
    if one == other:  # -0.0 too
        assert low == high
    if min(one, other) > 0 and max(one, other) > min(one, other) * (1 + 2**-10) > 1e-37:
        assert low < high


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False).filter(bool))
def test_zero_has_a_bin_of_its_own(value: float) -> None:
    zero, other = bin_of(torch.tensor([0.0, value])).tolist()
    assert zero != other


@pytest.mark.parametrize("name", ["auroc", "aupr", "fpr95"])
def test_functions_equal_the_family(name: str) -> None:
    scores, is_ood = make("random", 5, 100, 0.4)
    family = DetectionMetrics()
    family.update(scores, is_ood)
    assert getattr(metrics, name)(scores, is_ood) == family.compute()[name]


def test_nothing_depends_on_the_order_of_tied_examples() -> None:
    scores, is_ood = make("tied", 2, 100, 0.5)
    order = torch.randperm(100)
    assert restated(scores, is_ood) == pytest.approx(restated(scores[order], is_ood[order]))
    for name in ("auroc", "aupr", "fpr95"):
        measure = getattr(metrics, name)
        assert measure(scores, is_ood) == measure(scores[order], is_ood[order])


def test_95_percent_of_twenty_is_nineteen() -> None:
    positives = torch.arange(20, 0, -1).float() * 2  # 40, 38, ..., 2
    negatives = torch.tensor([3.0, 1.0])  # one between the 19th and the 20th positive
    scores = torch.cat([positives, negatives])
    is_ood = torch.arange(22) < 20
    assert metrics.fpr95(scores, is_ood) == 0.0
    assert metrics.fpr95(scores[1:], is_ood[1:]) == 0.5  # 18 of 19 is below .95


def test_which_class_is_positive() -> None:
    scores, is_ood = torch.tensor([0.1, 0.2, 0.9]), torch.tensor([False, False, True])
    assert metrics.auroc(scores, is_ood) == 1.0
    assert metrics.auroc(scores, ~is_ood) == 0.0


def test_infinite_scores_are_ranked() -> None:
    scores = torch.tensor([torch.inf, torch.inf, 0.0, -torch.inf])
    is_ood = torch.tensor([True, False, True, False])
    assert metrics.auroc(scores, is_ood) == 0.625
    pooled = PooledDetectionMetrics()
    pooled.update(scores, is_ood)
    assert pooled.compute()["auroc"] == 0.625


SCORES, OOD = torch.tensor([0.1, 0.9]), torch.tensor([False, True])


@pytest.mark.parametrize("metric", [DetectionMetrics, PooledDetectionMetrics])
@pytest.mark.parametrize(
    ("scores", "is_ood", "message"),
    [
        (
            SCORES,
            ~OOD & OOD,
            r"0 out-of-distribution and 2 in-distribution .* at least one of each",
        ),
        (SCORES, ~OOD | OOD, r"2 out-of-distribution and 0 in-distribution"),
        (SCORES[:0], OOD[:0], r"0 out-of-distribution and 0 in-distribution"),
        (torch.tensor([0.1, torch.nan]), OOD, r"1 scores are NaN; expected real numbers"),
        (SCORES, OOD.long(), r"is_ood is torch.int64; expected a boolean .* labels == ood_class"),
        (SCORES, OOD[:1], r"is_ood has shape \(1,\) while scores has \(2,\)"),
        (SCORES.long(), OOD, r"scores has dtype torch.int64"),
        ([0.1, 0.9], OOD, r"scores is a list"),
    ],
)
def test_bad_input_is_named_with_its_remedy(
    metric: type, scores: Tensor, is_ood: Tensor, message: str
) -> None:
    measured = metric()
    with pytest.raises(ValueError, match=message):  # noqa: PT012 (shapes at update, values at compute)
        measured.update(scores, is_ood)
        measured.compute()


def test_pooled_scores_that_are_not_valid_do_not_count() -> None:
    draws = torch.Generator().manual_seed(0)
    scores = torch.rand(500, generator=draws)
    is_ood, valid = (torch.rand(2, 500, generator=draws) < 0.5).unbind()
    masked, alone = metrics.PooledDetectionMetrics(), metrics.PooledDetectionMetrics()
    masked.update(scores, is_ood, valid)
    alone.update(scores[valid], is_ood[valid])
    assert torch.equal(masked.histogram, alone.histogram)
    assert masked.compute() == alone.compute()


def test_numbers_below_float32_have_their_place_next_to_zero() -> None:
    scores = torch.tensor([-1.0, -1e-30, -1e-60, 0.0, 1e-60, 1e-30, 1.0], dtype=torch.float64)
    assert (bin_of(scores).diff() > 0).all()
