"""The drawings: their colours, their size, and that matplotlib is left as it was."""

import re

import matplotlib
import numpy as np
import pytest

from lpbnn.report import figures, maps, pictures
from lpbnn.report.bars import member_bars
from lpbnn.report.colours import COLOURS
from lpbnn.report.page import style
from lpbnn.report.regression import Predicted, observed, parity
from lpbnn.report.svg import INK, colour, drawing
from lpbnn.report.tradeoffs import Point, chart, limits

# Machado et al. 2009: what people without the long or the medium cones see, in linear RGB.
PROTAN = ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052))
DEUTAN = ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969))
TO_CONES = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
TO_OKLAB = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))


def linear(code: str) -> np.ndarray:
    value = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def palette(theme: int, *names: str) -> np.ndarray:
    """The colours of the style sheet: theme 0 is light, 1 is dark."""
    found = [re.findall(rf"--{name}: (#[0-9a-f]{{6}})", style())[theme] for name in names]
    return np.stack([linear(code) for code in found])


def oklab(rgb: np.ndarray) -> np.ndarray:
    return np.cbrt(rgb.clip(0, 1) @ np.array(TO_CONES).T) @ np.array(TO_OKLAB).T


@pytest.mark.parametrize("theme", [0, 1])
def test_all_methods_can_be_told_apart_by_the_colour_blind(theme: int) -> None:
    methods = palette(theme, *(f"m{i}" for i in range(COLOURS)))
    for seen in (np.eye(3), np.array(PROTAN), np.array(DEUTAN)):
        lab = oklab(methods @ seen.T)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1) + np.eye(COLOURS)
        assert apart.min() > 0.055  # Okabe and Ito's palette of eight: 0.076, Tol's twelve: 0.039


@pytest.mark.parametrize("theme", [0, 1])
def test_text_and_colours_stand_out_from_the_page(theme: int) -> None:
    light = np.array([0.2126, 0.7152, 0.0722])
    page = float((palette(theme, "paper") @ light)[0])

    def contrast(*names: str) -> float:
        values = palette(theme, *names) @ light
        return float(
            (np.maximum(values, page) + 0.05).min() / (np.minimum(values, page) + 0.05).max()
        )

    for name in ("ink", "muted", "accent", "warning"):
        assert contrast(name) >= 4.5, name  # WCAG AA for text
    for index in range(COLOURS):
        assert contrast(f"m{index}") >= 2.4, index


def test_matplotlib_is_left_as_it_was_and_does_not_leak_in() -> None:
    def draw() -> str:
        with drawing(100, 60, "x") as d:
            d.axes(10, 5, 80, 40).plot([0, 1], color=colour(1))
        return d.svg

    plain = draw()
    with matplotlib.rc_context({"axes.facecolor": "red", "lines.linewidth": 9, "font.size": 30}):
        before = dict(matplotlib.rcParams)
        assert draw() == plain
        assert dict(matplotlib.rcParams) == before


def test_svg_names_are_its_own_and_text_is_kept() -> None:
    def draw(label: str) -> str:
        with drawing(100, 60, label) as d:
            axes = d.axes(10, 5, 80, 40)
            axes.plot([0, 2], marker="o", color=INK)
            axes.text(0, 0, "#010101 <&> $x$ url(#p)")
        return d.svg

    one, two = draw("a"), draw("b")
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg in (one, two):
        defined = set(re.findall(r' id="([^"]+)"', svg))
        used = set(re.findall(r'(?:href="|style="|clip-path="url\()#([^")]+)', svg))
        assert used <= defined
        assert "#010101 &lt;&amp;&gt; $x$ url(#p)" in svg
        assert "var(--ink)" in svg
        assert not re.search(r"xmlns|<metadata|font-family|DejaVu", svg)


def test_names_at_line_ends_do_not_touch() -> None:
    random = np.random.default_rng(0)
    for number in (1, 2, 5, 12):
        for _ in range(50):
            places = random.uniform(0, 1, number).round(1).tolist()
            found = figures.spread(places, 0.05, 0, 1)
            gaps = np.diff(np.sort(found))
            assert (gaps >= 0.05 - 1e-9).all()
            assert min(found) >= -1e-9
            assert max(found) <= 1 + 1e-9
            order = np.argsort(places, kind="stable")
            assert (np.diff(np.array(found)[order]) > 0).all()
    assert figures.spread([0.1, 0.9], 0.05, 0, 1) == [0.1, 0.9]


def test_a_dozen_names_fit_beside_a_chart() -> None:
    line = np.linspace(0.9, 0.7, 3)
    lines = [
        figures.Line(f"a method of long name {i}", i, np.arange(3), line, line * np.nan, i > 0)
        for i in range(12)
    ]
    svg = figures.severities(lines, "ECE ↓", percent=False)
    found = re.findall(r'<text style="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>(a method[^<]*)', svg)
    assert len(found) == 12
    heights = sorted(float(y) for _, y, _ in found)
    assert np.diff(heights).min() >= 11
    assert all(float(x) + 5.8 * len(name) <= 442 for x, _, name in found)


def test_members_of_one_cell_are_one_small_outline() -> None:
    members = np.random.default_rng(0).dirichlet(np.ones(10), 16)
    svg = member_bars(members, list("0123456789"), 3, 2, "LP-BNN: <3>")
    assert svg.count("var(--m2)") == 1
    assert (
        svg.count("z") == 80
    )  # a closed bar each, of eight members: sixteen rows would be hairlines
    assert [f"member {i} of 16:" in svg for i in (1, 2, 3, 16)] == [True, False, True, True]
    assert len(svg) < 7_000
    assert '<text x="34.2" y="71" class="true">3</text>' in svg
    assert 'aria-label="LP-BNN: &lt;3&gt;"' in svg
    turned = member_bars(members[:1], ["<aeroplane>"] * 10, None, 2, "x")
    assert "rotate(-90" in turned
    assert "&lt;aeroplane&gt;" in turned


def test_a_bar_is_as_high_as_its_probability() -> None:
    svg = member_bars(np.array([[0.5, 0.25]]), ["a", "b"], None, 0, "x")
    heights = [float(value) for value in re.findall(r"v(-[\d.]+)h", svg)]
    assert heights == [-29.0, -14.5]  # of 60 pixels, two of them air


def test_intervals_of_a_gaussian_hold_what_they_say() -> None:
    random = np.random.default_rng(0)
    size = 20_000
    spread = np.full(size, 3.0)
    test = Predicted(random.normal(1, 5, size), np.ones(size), spread, np.full(size, 4.0))
    assert np.abs(observed(test) - np.linspace(0.05, 0.95, 19)).max() < 0.01


def test_error_bars_are_drawn_whole() -> None:
    low, high = limits([93.0, 94.0, 95.0], [0.1, 0.1, 2.0])
    assert low < 93
    assert high > 97
    line = figures.Line("MCP", 1, np.arange(3), np.array([0.5, 0.4, 0.3]), np.full(3, 0.2))
    assert figures._range([line], 1, percent=False)[1] > 0.7
    test = Predicted(np.arange(9.0), np.arange(9.0), np.full(9, 5.0), np.zeros(9))
    svg = parity(test, 0, "MCP")
    ends = np.array(re.findall(r"M ?[1-9][\d.]* ([\d.-]+) ?L ?[\d.]+ ([\d.-]+)", svg), float)
    assert len(ends) >= 9
    assert ends.min() >= 8
    assert ends.max() <= 158  # the frame of the axes, in pixels


def test_threads_to_names_are_no_error_bars() -> None:
    drawn = chart([Point("a", 0, 90, 0.1, 1, 0.01), Point("b", 1, 91, 0.2, 1, 0.01)], "ECE ↓")
    dotted = re.findall(r"stroke-dasharray:[^;]*;[^\"]*stroke:var\(--(\w+)\)", drawn)
    assert dotted == ["muted", "muted"]
    assert "a: accuracy 90.00 ± 1.00 %, ECE ↓ 0.1000 ± 0.0100" in drawn


def test_inputs_that_correlate_stand_together() -> None:
    random = np.random.default_rng(0)
    block = np.kron(np.eye(4), np.full((6, 6), 0.8)) + 0.2 * np.eye(24)
    place = random.permutation(24)
    order = pictures.similar_first(block[place][:, place])
    groups = place[order] // 6
    assert (np.diff(groups) != 0).sum() == 3  # each block once
    assert pictures.strongest(block) == 1.0


def test_pictures_are_small_and_keep_their_values() -> None:
    assert pictures.picture(np.full((3, 8, 8), 200, np.uint8)).getpixel((0, 0)) == (200, 200, 200)
    assert pictures.picture(np.full((1, 8, 8), 0.5)).getpixel((0, 0)) == (127, 127, 127)
    assert pictures.picture(np.zeros((3, 360, 480), np.uint8)).size == (240, 180)
    matrix = pictures.correlation(np.array([[1.0, -1.0], [np.nan, 0.5]]))
    assert matrix.getpixel((0, 0)) == (*pictures.POSITIVE, 255)
    assert matrix.getpixel((1, 0)) == (*pictures.NEGATIVE, 255)
    assert matrix.getpixel((0, 1)) == (*pictures.NEGATIVE, 0)


def test_maps_in_colours() -> None:
    colours = maps.palette(("sky", "road"), 13)
    assert len({tuple(colour) for colour in colours}) == 13
    labels = maps.labelled(np.array([[0, 12, 255, 13]]), colours, anomaly=13).convert("RGB")
    found = [labels.getpixel((x, 0)) for x in range(4)]
    assert found == [maps.COLOURS["sky"], tuple(colours[12]), maps.VOID, maps.ANOMALY]
    for scale, sure in ((maps.SURE, 1.0), (maps.UNSURE, 0.0)):
        light = maps.shaded(np.array([[sure, 1 - sure, np.nan]]), scale=scale).convert("L")
        assert light.getpixel((0, 0)) > 200 > 50 > light.getpixel((1, 0))  # pale is sure
    mask = np.zeros((5, 6), bool)
    mask[2, 2:4] = True
    lined = np.array(maps.outlined(maps.shaded(np.ones((5, 6))), mask))
    drawn = (lined == maps.ANOMALY).all(-1)
    assert drawn.sum() == 10
    assert not (drawn & mask).any()
    assert maps.thinned(np.zeros((3, 720, 1280)), 240).shape == (3, 120, 214)
