"""Accuracy against what is gained for it: every row that trained is drawn and named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpbnn.report.figures import costs, span, together, trade_offs
from lpbnn.report.page import chapter
from lpbnn.report.runs import Group, grouped, read_runs

Make = Callable[..., Path]


def groups(*folders: Path) -> list[Group]:
    return grouped(read_runs(folders))


def drawn(*folders: Path) -> list[str]:
    return [figure.svg for figure in trade_offs(groups(*folders))]


def measured(
    make: Make, accuracy: float, ece: float, seed: int = 0, name: str = "mcp", **more: Any
) -> Path:
    """A run of these numbers, none of them corrupted or out of distribution."""
    test = {"accuracy": accuracy, "ece": ece, "nll": 0.2, "brier": 0.1}
    return make(name, seed, test=test, ood={}, corrupted=False, **more)


def test_a_chart_for_each_number_that_several_rows_have(make: Make) -> None:
    charts = drawn(make("mcp"), make("lpbnn"), make("lpbnn", 1))
    assert len(charts) == 3
    for chart, words in zip(charts, ("ECE ↓", "AUROC ↑ (photos)", "cE ↓"), strict=True):
        assert words in chart
        assert "LP-BNN" in chart
        assert "MCP" in chart
    assert len(drawn(make("mcp", corrupted=False), make("edl", corrupted=False))) == 2


def test_the_first_chart_opens_the_page_and_the_others_are_a_section(make: Make) -> None:
    found = chapter(groups(make("mcp"), make("lpbnn")), "digits")
    (section,) = [section for section in found.sections if section.name == "tradeoffs"]
    assert found.figure is not None
    assert "ECE ↓" in found.figure.svg
    assert len(section.data) == 2


def test_nothing_to_compare_is_no_section(make: Make) -> None:
    alone = groups(make("mcp"))
    assert trade_offs(alone) == costs(alone) == []
    assert "tradeoffs" not in [section.name for section in chapter(alone, "digits").sections]
    assert drawn(make("mcp"), make("lpbnn", diverged=2)) == []


def test_one_that_has_not_learned_is_no_point(make: Make) -> None:
    near = [measured(make, a, 0.1, name=name) for name, a in (("mcp", 0.9), ("edl", 0.8))]
    assert drawn(*near, measured(make, 0.1, 0.0, name="duq")) == drawn(*near)


def test_one_far_off_is_named_with_its_numbers_and_presses_nobody_flat(make: Make) -> None:
    near = [measured(make, 0.93 + 0.001 * i, 0.01 + 0.001 * i, name=f"m{i}") for i in range(6)]
    (chart,) = drawn(*near, measured(make, 0.645, 0.254, name="far"))
    assert "far (64.5, 0.254)" in chart
    assert "m3 (" not in chart
    assert together([*(93 + 0.1 * i for i in range(6)), 64.5], [0.0] * 7) == [True] * 6 + [False]


def test_one_left_out_by_one_number_does_not_stretch_the_axis_of_the_other(make: Make) -> None:
    near = [measured(make, 0.98 + 0.001 * i, 0.01 + 0.001 * i, name=f"m{i}") for i in range(6)]
    (chart,) = drawn(*near, measured(make, 0.96, 0.22, name="far"))
    assert "far (96.0, 0.220)" in chart
    assert min(map(float, re.findall(r">(9\d\.\d)</text>", chart))) == 98.0


def test_one_that_is_better_than_four_others_is_drawn(make: Make) -> None:
    """Its distance is not far: the mIoU of CamVid-Anomaly's networks and their ensemble."""
    assert all(together([65.27, 65.78, 65.94, 66.27, 68.04], [0.15, 0.18, 0.28, 0.41, 0.0]))
    # Far from the others' means and not far from their bars: the same networks' pooled AUROC.
    values, spreads = [0.9058, 0.9055, 0.9055, 0.9069, 0.9171], [0.004, 0.006, 0.008, 0.007, 0.0]
    assert all(together(values, spreads))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_at_least_half_of_the_values_lie_together(values: list[float]) -> None:
    assert sum(together(values, [0.0] * len(values))) >= len(values) / 2


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 10)), min_size=2, max_size=12))
def test_the_bars_of_whatever_is_in_the_range_are_drawn_whole(
    points: list[tuple[float, float]],
) -> None:
    near = together(*zip(*points, strict=True))
    inside = [point for point, there in zip(points, near, strict=True) if there]
    low, high = span(*zip(*inside, strict=True))
    for point in points:
        assert (low <= point[0] <= high) == (point in inside)
    for value, spread in inside:
        assert low <= value - spread
        assert value + spread <= high


def test_a_bar_that_is_longer_than_its_mean_is_drawn(
    regression: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error over two seeds may spread more than it is large; its axis begins at 0."""
    seen: list[tuple[float, float, float]] = []

    def draw(axes: Any, x: float, y: float, x_std: float, *_: Any, **__: Any) -> None:
        seen.append((x, x_std, axes.get_xlim()[0]))

    monkeypatch.setattr("lpbnn.plots.trade_off", draw)
    runs = [
        regression(name, seed=seed, folder=f"{name}{seed}", test={"nll": 2.0, "rmse": rmse}, ood={})
        for name, both in (("mcp", (1.0, 199.0)), ("edl", (150.0, 250.0)))
        for seed, rmse in enumerate(both)
    ]
    drawn(*runs)
    assert seen[0] == (pytest.approx(100), pytest.approx(140.0, abs=0.1), 0.0)


def test_names_are_kept_short_and_tell_rows_apart(make: Make) -> None:
    long = {"weighting": "equation", "fast_lr": 3, "init_std": 0.25}
    options: list[dict[str, Any]] = [{"log_variance": v, **long} for v in (-1, 1)]
    made = [make("lpbnn", options=o, folder=f"r{i}") for i, o in enumerate([*options, {}])]
    assert min(len(group.label) for group in groups(*made)) > 60
    for value in ("-1", "1", "-2"):
        assert f", {value})<" in drawn(*made)[0]
    names = [f"a very long name of a method {i}" for i in (100000, 200000)]
    chart = drawn(*(make(name, folder=name[-6:]) for name in names))[0]
    assert "a very long name of a method 1" in chart
    shown = re.sub(r"<title>[^<]*</title>", "", chart)  # hover has the whole name
    assert "100000" not in shown


@pytest.mark.parametrize("other", [0.90, 0.91])
def test_equal_numbers_can_be_drawn(make: Make, other: float) -> None:
    assert len(drawn(measured(make, 0.9, 0.1), measured(make, other, 0.1, name="edl"))) == 1


def test_numbers_on_an_axis_are_whole_however_close_they_are(make: Make) -> None:
    (chart,) = drawn(measured(make, 1.0, 0.1), measured(make, 1.0, 0.2, name="edl"))
    assert "+1e2" not in chart
    assert "100.0" in chart


def test_threads_to_names_are_no_error_bars(make: Make) -> None:
    runs = [
        measured(make, accuracy, ece, seed, name)
        for name, ece in (("mcp", 0.1), ("edl", 0.2))
        for seed, accuracy in enumerate((0.89, 0.91))
    ]
    (chart,) = drawn(*runs)
    dotted = re.findall(r"stroke-dasharray:[^;]*;[^\"]*stroke:var\(--(\w+)\)", chart)
    assert dotted == ["muted", "muted"]
    assert "MCP: accuracy 90.00 ± 1.41 %, ECE ↓ 0.1000" in chart


def test_accuracy_against_cost_has_a_logarithmic_axis_where_costs_are_far_apart(make: Make) -> None:
    """An ensemble takes four times a network's time, and 40 times is shown by powers of ten."""
    train = {"epochs": 5, "of": 5, "diverged": None, "images_per_second": 1, "epoch_seconds": 1}
    near, far = (
        costs(groups(make("mcp"), make("ensemble", folder=f"e{t}", train={**train, "seconds": t})))
        for t in (40, 400)
    )
    assert len(near) == len(far) == 2
    assert "training time, s ←" in far[0].svg
    ticks = re.findall(r">(\d+)</text>", far[0].svg)
    assert {"10", "100"} <= set(ticks)
