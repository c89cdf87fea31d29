"""Accuracy against what is gained for it: every row that trained is drawn and named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpbnn.report.runs import Group, grouped, read_runs
from lpbnn.report.sections import sections
from lpbnn.report.tradeoffs import Point, chart, limits, tradeoffs

Make = Callable[..., Path]


def groups(*folders: Path) -> list[Group]:
    return grouped(read_runs(folders))


def test_a_chart_for_each_number_that_several_rows_have(make: Make) -> None:
    page = tradeoffs(groups(make("mcp"), make("lpbnn"), make("lpbnn", 1)))
    assert page.count("<svg") == 3
    for words in ("ECE ↓", "photos AUROC ↑", "cE ↓", "LP-BNN", "MCP"):
        assert words in page
    clean = groups(make("mcp", corrupted=False), make("edl", corrupted=False))
    assert tradeoffs(clean).count("<svg") == 2


def test_nothing_to_compare_is_no_section(make: Make) -> None:
    alone = groups(make("mcp"))
    assert tradeoffs(alone) == ""
    assert "tradeoffs" not in [section.name for section in sections(alone)]
    assert tradeoffs(groups(make("mcp"), make("lpbnn", diverged=2))) == ""


def test_one_far_off_is_named_with_its_numbers_and_presses_nobody_flat() -> None:
    near = [Point(f"m{i}", i, 93 + 0.1 * i, 0.01 + 0.001 * i, 0.1, 0.001) for i in range(6)]
    far = Point("far", 6, 64.5, 0.254, 0.0, 0.0)
    drawn = chart([*near, far], "ECE ↓")
    assert "far (64.5, 0.254)" in drawn
    assert "m3 (" not in drawn
    low, high = limits([p.x for p in [*near, far]])
    assert 92 < low < 93
    assert 93.5 < high < 94.5


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_the_range_holds_the_middle_half(values: list[float]) -> None:
    low, high = limits(values)
    assert low < high
    inside = sum(low <= value <= high for value in values)
    assert inside >= len(values) / 2


def test_names_are_kept_short_and_tell_rows_apart(make: Make) -> None:
    long = {"weighting": "equation", "fast_lr": 3, "init_std": 0.25}
    options: list[dict[str, Any]] = [{"log_variance": v, **long} for v in (-1, 1)]
    made = [make("lpbnn", options=o, folder=f"r{i}") for i, o in enumerate([*options, {}])]
    found = groups(*made)
    assert min(len(group.label) for group in found) > 60
    page = tradeoffs(found)
    for value in ("-1", "1", "-2"):
        assert f", {value})<" in page
    many = [Point(f"a very long name of a method {i}", i, 90, 0.1, 0, 0) for i in (100000, 200000)]
    assert "a very long name of a method 1" in chart(many, "ECE ↓")
    shown = re.sub(r"<title>[^<]*</title>", "", chart(many, "ECE ↓"))  # hover has the whole name
    assert "100000" not in shown


@pytest.mark.parametrize("same", [True, False])
def test_equal_numbers_can_be_drawn(same: bool) -> None:
    points = [Point("a", 0, 90, 0.1, 0, 0), Point("b", 1, 90 if same else 91, 0.1, 0, 0)]
    assert chart(points, "ECE ↓").count("<svg") == 1


def test_numbers_on_an_axis_are_whole_however_close_they_are() -> None:
    drawn = chart([Point("a", 0, 100, 0.1, 0, 0), Point("b", 1, 100, 0.2, 0, 0)], "ECE ↓")
    assert "+1e2" not in drawn
    assert "100.0" in drawn
