"""Plots in a notebook: numbers that cannot be drawn are refused with the fix; tensors are taken as they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lpbnn
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


# Figures show what was given


def segments(lines: Any) -> np.ndarray:
    """The ends of bars that were drawn as lines, (N, 2, 2)."""
    return np.array(lines.get_segments())


def test_the_bars_of_a_reliability_diagram_are_its_bins(axes: Axes) -> None:
    confidence = torch.cat([torch.full((9,), 0.6), torch.full((10,), 0.9)])
    probs = torch.stack([confidence, 1 - confidence], 1)
    bins = metrics.reliability(probs, torch.arange(19) % 3 // 2, num_bins=4)
    plots.reliability(axes, bins, label="mine")
    few, many = axes.patches  # pale where there are fewer than ten examples
    assert [(bar.get_x(), bar.get_width()) for bar in (few, many)] == [(0.5, 0.25), (0.75, 0.25)]
    heights = [bar.get_height() for bar in (few, many)]
    assert heights == pytest.approx([2 / 3, 0.7])
    assert (few.get_alpha(), many.get_alpha()) == (0.175, 0.5)
    assert many.get_gid() == "title:mine: confidence 0.75 to 1.00, accuracy 0.700 of 10 examples"
    tops = np.concatenate([segments(lines)[:, :, 1].ravel() for lines in axes.collections])
    assert tops == pytest.approx(np.repeat(heights, 2))
    (strip,) = axes.child_axes
    assert [bar.get_height() for bar in strip.patches] == pytest.approx([0, 0, 9 / 19, 10 / 19])
    assert strip.get_ylim() == pytest.approx((0, 10 / 19))


def test_risks_are_drawn_in_percent(axes: Axes) -> None:
    curve = metrics.risk_coverage(torch.arange(10.0), torch.arange(10) >= 6)
    plots.risk_coverage(axes, curve, label="mine")
    (line,) = axes.lines
    np.testing.assert_allclose(line.get_xdata(), 100 * curve.coverage)
    np.testing.assert_allclose(line.get_ydata(), 100 * curve.risk)
    shown = "0.00 % of 50 %, 25.00 % of 80 %, 40.00 % of 100 %"
    assert line.get_gid() == f"title:mine: errors {shown}"


@pytest.mark.parametrize("log", [False, True])
def test_a_distribution_function_is_the_share_of_lower_scores(axes: Axes, log: bool) -> None:
    inside, outside = np.linspace(1, 2, 1001), np.linspace(3, 7, 1001)
    plots.ood_scores(axes, inside, outside, limits=(1.25, 5.0), log=log)
    for line, low, high in zip(axes.lines, (1, 3), (2, 7), strict=True):
        x, y = line.get_data()
        np.testing.assert_allclose(y[1:-1], ((x[1:-1] - low) / (high - low)).clip(0, 1), atol=0.51)
        inner = (x > max(low, 1.25)) & (x < min(high, 5))
        expected = (x[inner] - low) / (high - low)
        np.testing.assert_allclose(y[inner], expected, atol=1e-6)
        assert y[0] == pytest.approx(max(0, (1.25 - low) / (high - low)), abs=0.01)
    assert axes.get_xlim() == (1.25, 5.0)
    assert axes.lines[0].get_gid().endswith("quartiles of the score 1.25, 1.5, 1.75")


def test_the_axis_of_scores_shows_all_but_the_outermost(axes: Axes) -> None:
    plots.ood_scores(axes, np.linspace(1, 2, 2001), np.linspace(3, 5, 2001))
    assert axes.get_xlim() == pytest.approx((1.005, 4.99))


def test_a_row_of_bars_is_a_members_probabilities(axes: Axes) -> None:
    members = np.array([[0.2, 0.8], [0.6, 0.4], [1.0, 0.0]])
    plots.member_bars(axes, members, ["cat", "dog"], 1, left=3.0)
    for number, (bars, given) in enumerate(zip(axes.patches, members, strict=True)):
        values, edges, foot = bars.get_data()
        assert foot == pytest.approx(1 - (number + 1) / 3)
        kept = given[given > 0]
        assert (values[::2] - foot) / (1 / 3 - 1 / 30) == pytest.approx(kept)
        assert edges == pytest.approx([3.1, 3.9, 4.1, 4.9][: 2 * len(kept)])
    assert [text.get_weight() for text in axes.texts] == ["normal", "bold"]
    assert [text.get_position()[0] for text in axes.texts] == [3.5, 4.5]
    assert axes.patches[0].get_gid() == "title:member 1 of 3: dog 0.80"


def test_no_more_members_are_drawn_than_asked_for(axes: Axes) -> None:
    plots.member_bars(axes, np.full((20, 3), 1 / 3), most=5)
    titles = [str(bars.get_gid()) for bars in axes.patches]
    assert [title.split()[1] for title in titles] == ["1", "6", "11", "15", "20"]


def test_a_band_holds_95_percent_on_both_sides_of_the_mean(axes: Axes) -> None:
    x = np.array([2.0, 0.0, 1.0])
    plots.regression_band(axes, x, 10 * x, 0 * x + 1, 0 * x + 0.5, targets=x, train=(x, x))
    for band, reach in zip(axes.collections, (1.96, 0.98), strict=True):
        corners = band.get_paths()[0].vertices
        expected = {
            (float(a), float(round(10 * a + sign * reach, 4))) for a in x for sign in (1, -1)
        }
        assert {(float(a), float(round(b, 4))) for a, b in corners} == expected
    targets, mean, train = (line.get_data() for line in axes.lines)
    assert mean[1].tolist() == [0.0, 10.0, 20.0]
    assert targets[0].tolist() == targets[1].tolist() == [0.0, 1.0, 2.0]
    assert train[0].tolist() == x.tolist()
    assert axes.get_xlim() == (0.0, 2.0)


def test_predictions_have_intervals_of_95_percent_beside_the_diagonal(axes: Axes) -> None:
    targets = np.arange(100.0)
    plots.parity(axes, targets, targets + 1, np.full(100, 0.5), most=25)
    diagonal, dots = axes.lines
    assert diagonal.get_xydata().tolist() == [[0.0, 0.0], [100.0, 100.0]]
    assert dots.get_xdata().tolist() == list(range(0, 100, 4))
    assert (dots.get_ydata() - dots.get_xdata()).tolist() == [1.0] * 25
    (intervals,) = axes.collections
    ends = segments(intervals)[:, :, 1] - segments(intervals)[:, :, 0]
    assert ends == pytest.approx(np.tile([0.02, 1.98], (25, 1)))
    assert dots.get_gid() == "title:model: median 95 % interval ± 0.98"


def test_a_point_has_a_deviation_in_both_directions(axes: Axes) -> None:
    plots.trade_off(axes, 5.0, 3.0, 1.0, 0.5)
    across, up = map(segments, axes.collections)
    assert across.tolist() == [[[4.0, 3.0], [6.0, 3.0]]]
    assert up.tolist() == [[[5.0, 2.5], [5.0, 3.5]]]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[5.0, 3.0]]]


def test_a_curve_has_a_band_of_one_deviation(axes: Axes) -> None:
    plots.curve(axes, [0, 1], [1.0, 0.5], [0.1, 0.2], label="mine", names=("a", "b"))
    corners = {
        (float(x), round(float(y), 6)) for x, y in axes.collections[0].get_paths()[0].vertices
    }
    assert corners == {(0.0, 0.9), (0.0, 1.1), (1.0, 0.3), (1.0, 0.7)}
    assert axes.lines[0].get_gid() == "title:mine: a: 1, b: 0.5"


def test_factors_are_drawn_by_member_with_their_deviations(axes: Axes) -> None:
    mean, std = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), np.full((2, 3), 0.25)
    plots.posterior_factors(axes, mean, std)
    for bars, dots, own in zip(axes.collections, axes.lines, mean, strict=False):
        assert dots.get_ydata().tolist() == own.tolist()
        assert segments(bars)[:, :, 1].tolist() == [[m - 0.25, m + 0.25] for m in own]
    places = np.array([dots.get_xdata() for dots in axes.lines[:2]])
    assert places.mean(0) == pytest.approx([0, 1, 2])
    assert places[1] - places[0] == pytest.approx([0.35] * 3)
    assert len(axes.patches) == 2  # every second input has a ground


def test_correlations_lie_on_a_scale_with_zero_in_its_middle(axes: Axes) -> None:
    matrix = np.eye(4) + 0.25 * (1 - np.eye(4))
    plots.posterior_correlation(axes, matrix)
    (image,) = axes.images
    assert image.get_clim() == (-0.3, 0.3)
    assert image.get_array().tolist() == matrix.tolist()
    (scale,) = axes.child_axes
    assert [label.get_text() for label in scale.get_xticklabels()] == ["−0.3", "0", "+0.3"]


def test_a_plane_shows_the_uncertainty_at_its_points(axes: Axes) -> None:
    model = lpbnn.build(torch.nn.Linear(2, 3), "ensemble", members=3)
    x, y = [[0.0, 1.0], [2.0, 5.0], [1.0, 3.0]], [0, 1, 1]
    plots.decision_map(axes, model, x, y, show="total", margin=0.5, points=4)
    (image,) = axes.images
    assert image.get_extent() == [-1.0, 3.0, -1.0, 7.0]
    assert image.get_clim() == pytest.approx((0, np.log(3)))
    corners = torch.tensor([[-1.0, -1.0], [3.0, -1.0], [-1.0, 7.0], [3.0, 7.0]])
    expected = lpbnn.predict(model, corners).total.view(2, 2)
    np.testing.assert_allclose(image.get_array()[::3, ::3], expected, rtol=1e-5)
    assert image.origin == "lower"
    assert [len(line.get_xdata()) for line in axes.lines] == [1, 2]


def test_the_scale_of_a_map_ends_at_its_top(axes: Axes) -> None:
    plots.value_map(axes, [[0.0, 1.0], [2.0, 3.0]], 2.0, unit="nats", title="mine")
    pixels = axes.images[0].get_array()
    assert pixels.tolist() == plots.value_pixels([[0.0, 0.5], [1.0, 1.0]]).tolist()
    (beside,) = axes.child_axes
    assert beside.get_ylim() == (0.0, 2.0)
    assert beside.get_ylabel() == "nats"
    assert axes.get_title("left") == "mine"
    assert axes._left_title.get_fontsize() == beside.yaxis.label.get_fontsize() + 2
