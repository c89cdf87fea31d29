"""Plots in a notebook: numbers that cannot be drawn are refused with the fix; tensors are taken as they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lpbnn import metrics, plots

X = torch.linspace(-1, 1, 9)


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda axes: plots.ood_scores(axes, [1, np.nan], [2]), "1 of 2 values of inside are NaN"),
        (lambda axes: plots.ood_scores(axes, [1], [np.inf]), "1 of 1 values of outside are NaN"),
        (lambda axes: plots.ood_scores(axes, [], [2]), "inside is empty"),
        (lambda axes: plots.ood_scores(axes, [-1, 1], [2, 3], log=True), "Fix: log=False"),
        (lambda axes: plots.member_bars(axes, [0.2, 0.8]), r"expected \(S, C\); p.members\[:, i\]"),
        (lambda axes: plots.member_bars(axes, [[0.2, 0.8]], ["cat"]), "1 names and 2 classes"),
        (lambda axes: plots.regression_band(axes, X, X[:5], X), "x has 9, mean has 5, std has 9"),
        (lambda axes: plots.parity(axes, [1, np.nan], [1, 2], [1, 1]), "1 of 4 values of targets"),
        (lambda axes: plots.interval_calibration(axes, X, X, [1]), "std has 1. Fix: one target"),
        (lambda axes: plots.posterior_factors(axes, [1], [1]), r"mean has shape \(1,\)"),
        (lambda axes: plots.posterior_correlation(axes, np.ones((2, 3))), r"expected \(m, m\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    axes: Axes, draw: Callable[[Axes], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(axes)


def test_probabilities_in_the_place_of_a_curve_name_the_call(axes: Axes) -> None:
    with pytest.raises(TypeError, match=r"lpbnn.metrics.reliability\(p.probs, y\); got Tensor"):
        plots.reliability(axes, torch.rand(4, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lpbnn.metrics.risk_coverage\(p.total, .*; got list"):
        plots.risk_coverage(axes, [0.1])  # type: ignore[arg-type]


def test_tensors_with_gradients_are_drawn(axes: Axes) -> None:
    scores = torch.rand(50).requires_grad_()
    plots.ood_scores(axes, scores, scores + 1)
    plots.regression_band(axes, X.requires_grad_(), X**2, X**2 + 1)
    plots.member_bars(axes, torch.rand(3, 4, requires_grad=True))


def test_equal_scores_have_an_axis(axes: Axes) -> None:
    for log in (False, True):
        low, high = plots.ood_scores(axes, [1.0, 1.0], [1.0], log=log).get_xlim()
        assert low < 1 < high


def test_a_notebook_draws_into_axes_of_its_own(axes: Axes) -> None:
    probs, labels = torch.rand(50, 3).softmax(1), torch.randint(0, 3, (50,))
    wrong = probs.argmax(1) != labels
    assert plots.reliability(axes, metrics.reliability(probs, labels)) is axes
    assert plots.risk_coverage(axes, metrics.risk_coverage(1 - probs.amax(1), wrong)) is axes
