"""Accuracy, NLL, Brier and ECE against a plain restatement in numpy, and against scikit-learn."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor
from torchmetrics import MetricCollection

from lpbnn import metrics
from lpbnn.metrics import ClassificationMetrics, corruption_means, reliability

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = ["random", "edges", "constant", "sure"]


def make(kind: str, seed: int, n: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Probabilities that are random, on bin edges (k/15), all equal, or one-hot; random labels."""
    rng = torch.Generator().manual_seed(seed)
    if kind == "random":
        probs = (torch.randn(n, classes, generator=rng, dtype=torch.float64) * 3).softmax(1)
    elif kind == "edges":
        top = torch.randint(15, 31, (n,), generator=rng).double() / 30  # and between them
        probs = ((1 - top) / max(1, classes - 1))[:, None].repeat(1, classes)
        probs[:, 0] = top if classes > 1 else 1.0
    elif kind == "constant":
        probs = torch.full((n, classes), 1 / classes, dtype=torch.float64)
    else:
        probs = torch.eye(classes, dtype=torch.float64)[torch.randint(classes, (n,), generator=rng)]
    return probs.to(dtype), torch.randint(classes, (n,), generator=rng)


def restated(probs: Tensor, labels: Tensor) -> dict[str, float]:
    p, y, n = probs.double().numpy(), labels.numpy(), len(labels)
    edges = torch.tensor([k / 15 for k in range(16)], dtype=torch.float64).to(probs.dtype)
    edges = edges.double().numpy()
    confidence, right = p.max(1), p.argmax(1) == y
    ece = 0.0
    for lo, hi in pairwise(edges):
        inside = (confidence > lo) & (confidence <= hi)
        if inside.any():
            ece += inside.sum() / n * abs(right[inside].mean() - confidence[inside].mean())
    return {
        "accuracy": right.mean(),
        "nll": -np.log(np.maximum(p[np.arange(n), y], 2.0**-126)).mean(),
        "brier": ((p - np.eye(p.shape[1])[y]) ** 2).sum(1).mean(),
        "ece": ece,
    }


cases = st.builds(
    make,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60),
    classes=st.integers(1, 12),
    dtype=st.sampled_from(DTYPES),
)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_equals_a_plain_restatement(case: tuple[Tensor, Tensor]) -> None:
    measured = ClassificationMetrics()
    measured.update(*case)
    assert measured.compute() == pytest.approx(restated(*case), rel=1e-5, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 50), st.integers(2, 8))
def test_equals_scikit_learn(seed: int, n: int, classes: int) -> None:
    probs, labels = make("random", seed, n, classes, torch.float64)
    assert metrics.accuracy(probs, labels) == accuracy_score(labels, probs.argmax(1))
    expected = log_loss(labels, probs.numpy(), labels=list(range(classes)))
    assert metrics.nll(probs, labels) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["accuracy", "nll", "brier", "ece"])
def test_functions_equal_the_family(name: str) -> None:
    probs, labels = make("random", 1, 50, 5, torch.float32)
    family = ClassificationMetrics()
    family.update(probs, labels)
    assert getattr(metrics, name)(probs, labels) == family.compute()[name]


def test_the_family_works_in_a_torchmetrics_collection() -> None:
    probs, labels = make("random", 2, 50, 5, torch.float32)
    together = MetricCollection([ClassificationMetrics()])
    together.update(probs[:20], labels[:20])
    together.update(probs[20:], labels[20:])
    keys = ("accuracy", "nll", "brier", "ece")
    assert together.compute() == pytest.approx(
        {k: getattr(metrics, k)(probs, labels) for k in keys}
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bins_are_closed_above_in_every_dtype(dtype: torch.dtype) -> None:
    for k in range(1, 16):
        probs = torch.tensor([[k / 15] + [(1 - k / 15) / 14] * 14], dtype=torch.float64).to(dtype)
        bins = reliability(probs, torch.tensor([0]))
        assert bins.count.nonzero().item() == k - 1, f"{k}/15 fell in {bins.count}"


def test_reliability_bins_describe_the_ece() -> None:
    probs, labels = make("random", 3, 200, 4, torch.float32)
    bins = reliability(probs, labels)
    assert bins.edges.tolist() == [k / 15 for k in range(16)]
    assert int(bins.count.sum()) == 200
    filled = bins.count > 0
    assert bool(
        ((bins.confidence > bins.edges[:-1]) & (bins.confidence <= bins.edges[1:]))[filled].all()
    )
    assert bool(bins.accuracy.isnan().equal(~filled))
    assert bins.ece == pytest.approx(metrics.ece(probs, labels))
    streaming = ClassificationMetrics()
    streaming.update(probs, labels)
    assert streaming.reliability().count.equal(bins.count)


def test_number_of_bins_is_an_option() -> None:
    probs, labels = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
    assert metrics.ece(probs, labels, num_bins=1) == pytest.approx(abs(0.5 - 0.75))
    with pytest.raises(ValueError, match="num_bins is 0; expected at least 1"):
        metrics.ece(probs, labels, num_bins=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 5), st.integers(1, 6))
def test_maps_equal_their_pixels_and_ignored_ones_count_nowhere(
    seed: int, n: int, classes: int, side: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, classes, side, side + 1, generator=rng).softmax(1)
    labels = torch.randint(classes, (n, side, side + 1), generator=rng)
    void = torch.rand(labels.shape, generator=rng) < 0.3
    void[0, 0, 0] = False
    rows = probs.movedim(1, -1)[~void]
    expected = ClassificationMetrics()
    expected.update(rows, labels[~void])

    marked = labels.where(
        ~void, torch.where(torch.rand(labels.shape, generator=rng) < 0.5, 255, -1)
    )
    probs = probs.where(~void[:, None], torch.nan)  # what is ignored is not even looked at
    measured = ClassificationMetrics(ignore_index=(255, -1))
    measured.update(probs, marked)
    assert measured.compute() == pytest.approx(expected.compute(), abs=1e-7)


def test_a_probability_of_zero_costs_the_floor_not_infinity() -> None:
    sure_and_wrong = torch.tensor([[1.0, 0.0]])
    assert metrics.nll(sure_and_wrong, torch.tensor([1])) == pytest.approx(
        126 * np.log(2), rel=1e-6
    )
    assert metrics.brier(sure_and_wrong, torch.tensor([1])) == 2.0


def test_brier_keeps_its_digits_when_nearly_perfect() -> None:
    probs = torch.tensor([[1 - 1e-5, 1e-5]])
    assert metrics.brier(probs, torch.tensor([0])) == pytest.approx(2e-10, rel=1e-2)


def test_corruption_means_weigh_every_set_alike() -> None:
    results = [
        {"accuracy": a, "ece": e, "nll": 9.0} for a, e in ((0.9, 0.1), (0.6, 0.2), (0.3, 0.6))
    ]
    assert corruption_means(results) == pytest.approx({"ca": 0.6, "ce": 0.3})
    with pytest.raises(ValueError, match="0 results"):
        corruption_means([])
    with pytest.raises(ValueError, match=r"keys \['accuracy'\]; expected .* 'ece'"):
        corruption_means([{"accuracy": 1.0}])


GOOD = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (GOOD, torch.tensor([0, 2]), r"1 labels lie outside 0..C-1; .* ignore_index"),
        (GOOD, torch.tensor([0, -1]), r"1 labels lie outside"),
        (GOOD * 2, LABELS, r"2 rows of probs .* do not sum to one; .*softmax"),
        (GOOD.log(), LABELS, r"2 rows of probs are negative"),
        (torch.tensor([[1.5, -0.5], [0.5, 0.5]]), LABELS, r"1 rows of probs are negative"),
        (torch.tensor([[torch.nan, 0.5], [0.5, 0.5]]), LABELS, r"1 rows of probs .* NaN"),
        (GOOD, torch.tensor([0]), r"labels has shape \(1,\) while probs has shape \(2, 2\)"),
        (GOOD[:, 0], LABELS, r"probs has shape \(2,\); expected \(N, C\).* torch.stack\("),
        (GOOD.long(), LABELS, r"probs has dtype torch.int64; expected a floating-point dtype"),
        (GOOD, LABELS.float(), r"labels has dtype torch.float32; expected an integer dtype"),
        (GOOD, LABELS.bool(), r"labels has dtype torch.bool"),
        (GOOD.numpy(), LABELS, r"probs is a ndarray; expected a torch.Tensor; .*as_tensor"),
        (GOOD, [0, 1], r"labels is a list"),
        (GOOD[:0], LABELS[:0], r"Metrics has seen no labelled examples; .* update\(\)"),
    ],
)
def test_bad_input_is_named_with_its_remedy(probs: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.accuracy(probs, labels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_the_dtype_is_not_an_error(dtype: torch.dtype) -> None:
    probs = torch.randn(64, 1000).softmax(1).to(dtype)
    assert 0 <= metrics.accuracy(probs, torch.zeros(64, dtype=torch.int64)) <= 1
