"""Diversity of members against counts made pair by pair."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lpbnn import metrics
from lpbnn.metrics import DiversityMetrics

NAMES = ("ratio_error", "q_statistic", "correlation")


def make(seed: int, members: int, n: int, classes: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=rng)
    logits = torch.randn(members, n, classes, generator=rng) + 2 * torch.eye(classes)[labels]
    return logits.softmax(-1), labels


def restated(members: Tensor, labels: Tensor) -> dict[str, float]:
    predictions = members.argmax(-1).numpy()
    right = predictions == labels.numpy()
    pairs: dict[str, list[float]] = {name: [] for name in (*NAMES, "disagreement")}
    for a, b in combinations(range(len(members)), 2):
        n11, n00 = (right[a] & right[b]).sum(), (~right[a] & ~right[b]).sum()
        n10, n01 = (right[a] & ~right[b]).sum(), (~right[a] & right[b]).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            pairs["ratio_error"].append((n10 + n01) / n00)
            pairs["q_statistic"].append((n11 * n00 - n10 * n01) / (n11 * n00 + n10 * n01))
            constant = right[a].all() or right[b].all() or not right[a].any() or not right[b].any()
            pearson = np.nan if constant else np.corrcoef(~right[a], ~right[b])[0, 1]
            pairs["correlation"].append(pearson)
        pairs["disagreement"].append((predictions[a] != predictions[b]).mean())
    defined = {name: [x for x in values if not np.isnan(x)] for name, values in pairs.items()}
    return {name: float(np.mean(x)) if x else np.nan for name, x in defined.items()}


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 60), st.integers(2, 5))
def test_equals_counts_made_pair_by_pair(seed: int, members: int, n: int, classes: int) -> None:
    probs, labels = make(seed, members, n, classes)
    measured = DiversityMetrics(members)
    measured.update(probs, labels)
    expected = restated(probs, labels)
    assert measured.compute() == pytest.approx(expected, nan_ok=True)
    for name in NAMES:
        value = getattr(metrics, name)(probs, labels)
        assert value == pytest.approx(expected[name], nan_ok=True)
    assert metrics.disagreement(probs) == pytest.approx(expected["disagreement"])


def test_identical_members_have_no_diversity() -> None:
    probs, labels = make(0, 1, 100, 3)
    measured = DiversityMetrics(3)
    measured.update(probs.expand(3, -1, -1), labels)
    expected = {"ratio_error": 0.0, "q_statistic": 1.0, "correlation": 1.0, "disagreement": 0.0}
    assert measured.compute() == pytest.approx(expected)


def test_undefined_pairs_are_left_out_and_infinite_ones_are_not() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    perfect = torch.eye(2)[torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0]])]
    assert np.isnan(metrics.ratio_error(perfect, labels))
    assert np.isnan(metrics.correlation(perfect, labels))
    never_together = torch.eye(2)[torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0]])]
    assert metrics.ratio_error(never_together, labels) == np.inf
    assert metrics.q_statistic(never_together, labels) == -1.0


def test_maps_equal_their_pixels_and_ignored_ones_count_nowhere() -> None:
    maps = torch.randn(3, 2, 4, 5, 6).softmax(2)
    labels = torch.randint(4, (2, 5, 6))
    labels[0, 0] = 255
    void = (labels == 255) | (labels == 3)  # a class may be ignored too
    expected = DiversityMetrics(3)
    expected.update(maps.movedim(2, -1)[:, ~void], labels[~void])
    measured = DiversityMetrics(3, ignore_index=(255, 3))
    measured.update(maps, labels)
    assert measured.compute() == pytest.approx(expected.compute())


def test_counts_are_exact_under_autocast() -> None:
    probs, labels = make(1, 3, 3001, 4)  # 3001 is not a bfloat16 number
    expected, measured = DiversityMetrics(3), DiversityMetrics(3)
    expected.update(probs, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured.update(probs, labels)
    assert measured.compute() == expected.compute()


@pytest.mark.parametrize(
    ("members", "labels", "message"),
    [
        (
            torch.ones(1, 2, 2),
            torch.tensor([0, 1]),
            r"1 member\(s\) were given; expected at least two",
        ),
        (
            torch.ones(2, 2),
            torch.tensor([0, 1]),
            r"members has shape \(2, 2\); expected \(S, N, C\)",
        ),
        (torch.ones(2, 2, 2), torch.tensor([0]), r"labels has shape \(1,\)"),
        (torch.ones(2, 2, 2), torch.tensor([0, 2]), r"1 labels lie outside 0..C-1"),
        (torch.full((2, 2, 2), torch.nan), torch.tensor([0, 1]), r"4 predictions are NaN"),
        (torch.ones(2, 2, 2).long(), torch.tensor([0, 1]), r"members has dtype torch.int64"),
        (
            torch.ones(2, 0, 2),
            torch.tensor([], dtype=torch.int64),
            r"has seen no labelled examples",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(members: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.q_statistic(members, labels)
