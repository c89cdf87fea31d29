"""The drawings: their colours, their size, and that matplotlib is left as it was."""

import base64
import io
import re
from importlib import resources

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from lpbnn import plots
from lpbnn.report import gallery, pictures
from lpbnn.report.colours import COLOURS
from lpbnn.report.svg import INK, colour, drawing

STYLE = resources.files("lpbnn.report").joinpath("templates/style.css").read_text("utf-8")
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
    found = [re.findall(rf"--{name}: (#[0-9a-f]{{6}})", STYLE)[theme] for name in names]
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
            found = plots.push_apart(places, 0.05, 0, 1)
            gaps = np.diff(np.sort(found))
            assert (gaps >= 0.05 - 1e-9).all()
            assert min(found) >= -1e-9
            assert max(found) <= 1 + 1e-9
            order = np.argsort(places, kind="stable")
            assert (np.diff(np.array(found)[order]) > 0).all()
    assert plots.push_apart([0.1, 0.9], 0.05, 0, 1) == pytest.approx([0.1, 0.9])


def test_a_dozen_names_stand_apart_beside_a_chart() -> None:
    names = [f"a method of long name {i}" for i in range(12)]
    with drawing(440, 240, "x") as d:
        axes = d.axes(40, 18, 230, 180)
        axes.set(xlim=(0, 2), ylim=(0.6, 1))
        plots.name_beside(axes, names, [(2.0, 0.7)] * 12, [colour(i) for i in range(12)], "o" * 12)
    found = re.findall(r'<text style="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>(a method[^<]*)', d.svg)
    assert len(found) == 12
    assert np.diff(sorted(float(y) for _, y, _ in found)).min() >= 11
    assert all(float(x) + 5.8 * len(name) <= 442 for x, _, name in found)


def bars(members: np.ndarray, names: list[str], truth: int | None = None) -> str:
    with drawing(96, 76, "LP-BNN: <3>") as d:
        plots.member_bars(d.axes(0, 2, 96, 60), members, names, truth, color=colour(2))
    return d.svg


def test_more_members_than_can_be_read_are_thinned_evenly() -> None:
    members = np.random.default_rng(0).dirichlet(np.ones(10), 16)
    svg = bars(members, list("0123456789"), 3)
    assert len(re.findall(r"<title>member \d+ of 16: ", svg)) == 8  # sixteen would be hairlines
    assert [f"member {i} of 16:" in svg for i in (1, 2, 3, 16)] == [True, False, True, True]
    assert len(svg) < 7_000
    assert 'aria-label="LP-BNN: &lt;3&gt;"' in svg


def test_the_true_class_is_bold_and_long_names_are_turned() -> None:
    svg = bars(np.eye(3)[:1], ["a", "b", "c"], 1)
    assert re.findall(r"font-weight:700[^>]*>([^<]*)</text>", svg) == ["b"]
    assert "rotate" not in svg
    turned = bars(np.eye(3)[:1], ["<aeroplane>"] * 3)
    assert "rotate(-90" in turned
    assert "&lt;aeroplane&gt;" in turned


def test_a_bar_is_as_high_as_its_probability() -> None:
    svg = bars(np.array([[0.5, 0.25, 0.25]]), ["a", "b", "c"])
    (path,) = re.findall(r'<g class="mark"><title>.*?<path d="([^"]+)"', svg)
    heights = {62 - float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)}
    assert sorted(round(height, 2) for height in heights) == [0, 14.5, 29]  # of 60, two of them air


def test_intervals_of_a_gaussian_hold_what_they_say() -> None:
    random = np.random.default_rng(0)
    size = 20_000
    found = plots.interval_coverage(random.normal(1, 5, size), np.ones(size), np.full(size, 5.0))
    assert np.abs(found - plots.LEVELS).max() < 0.01


def test_intervals_of_a_parity_plot_are_drawn_whole() -> None:
    with drawing(204, 196, "x") as d:
        plots.parity(d.axes(36, 8, 160, 150), np.arange(9.0), np.arange(9.0), np.full(9, 5.0))
    ends = np.array(re.findall(r"M ?[1-9][\d.]* ([\d.-]+) ?L ?[\d.]+ ([\d.-]+)", d.svg), float)
    assert len(ends) >= 9
    assert ends.min() >= 8
    assert ends.max() <= 158  # the frame of the axes, in pixels


def test_the_two_distributions_of_a_score_are_drawn_over_the_whole_panel() -> None:
    random = np.random.default_rng(0)
    sure, unsure = 10 ** random.uniform(-4, -1, 1000), 10 ** random.uniform(-2, 0, 1000)
    with drawing(204, 128, "x") as d:
        axes = d.axes(26, 6, 170, 86)
        plots.ood_scores(axes, sure, unsure, limits=(1e-4, 1.0), log=True, label="MCP <1>")
    paths = [re.findall(r"[\d.]+ [\d.]+", path) for path in re.findall(r' d="([^"]+)"', d.svg)]
    lines = [np.array([p.split() for p in one], float) for one in paths if len(one) > 100]
    assert len(lines) >= 2
    for line in lines:
        assert np.ptp(line[:, 0]) > 160
        assert np.ptp(line[:, 1]) > 80
    assert "MCP &lt;1&gt;, test: quartiles of the score" in d.svg


def test_a_plot_needs_nothing_but_axes() -> None:
    """In a notebook the colours are those of the axes' cycle, and the axes come back."""
    axes = Figure().subplots()
    assert plots.curve(axes, [0, 1], [1.0, 0.5]) is axes
    plots.curve(axes, [0, 1], [1.0, 0.7])
    assert [to_hex(line.get_color()) for line in axes.lines] == ["#1f77b4", "#ff7f0e"]


def test_inputs_that_correlate_stand_together() -> None:
    random = np.random.default_rng(0)
    block = np.kron(np.eye(4), np.full((6, 6), 0.8)) + 0.2 * np.eye(24)
    place = random.permutation(24)
    order = plots.similar_first(block[place][:, place])
    groups = place[order] // 6
    assert (np.diff(groups) != 0).sum() == 3  # each block once
    assert plots.strongest(block) == 1.0


def test_pictures_are_small_and_keep_their_values() -> None:
    assert (pictures.picture(np.full((3, 8, 8), 200, np.uint8)) == 200).all()
    assert (pictures.picture(np.full((1, 8, 8), 0.5)) == 127).all()
    assert pictures.picture(np.zeros((3, 360, 480), np.uint8)).shape == (180, 240, 3)


@pytest.mark.parametrize("colours", [3, 1000])
def test_a_png_has_the_pixels_that_are_given(colours: int) -> None:
    palette = np.random.default_rng(0).integers(0, 256, (colours, 3)).astype(np.uint8)
    pixels = palette[np.arange(1200).reshape(30, 40) % colours]
    _, _, code = pictures.data_uri(pixels).partition("base64,")
    image = Image.open(io.BytesIO(base64.b64decode(code)))
    assert image.mode == ("P" if colours == 3 else "RGB")
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), pixels)


def test_correlations_are_clear_at_zero_and_opaque_at_one() -> None:
    colours = plots.DIVERGING(np.linspace(0, 1, 256))
    assert colours[[0, -1], 3].tolist() == [1, 1]
    assert colours[127:129, 3].max() < 0.01
    assert colours[0, 0] > colours[0, 2]  # orange
    assert colours[-1, 2] > colours[-1, 0]  # blue


def test_maps_in_colours() -> None:
    colours = plots.palette(("sky", "road"), 13)
    assert len({tuple(colour) for colour in colours}) == 13
    found = plots.class_pixels([[0, 12, 255]], colours)[0]
    expected = [plots.STREET_COLORS["sky"], colours[12], plots.VOID]
    np.testing.assert_array_equal(found, np.stack(expected))
    for scale, sure in ((plots.SURE, 1.0), (plots.UNSURE, 0.0)):
        light = plots.value_pixels([[sure, 1 - sure, np.nan]], scale=scale)[0].mean(-1)
        assert light[0] > 200 > 50 > light[1]  # pale is sure
    mask = np.zeros((5, 6), bool)
    mask[2, 2:4] = True
    lined = pictures.outlined(plots.value_pixels(np.ones((5, 6))), mask)
    drawn = (lined == pictures.ANOMALY).all(-1)
    assert drawn.sum() == 10
    assert not (drawn & mask).any()
    assert pictures.thinned(np.zeros((3, 720, 1280)), 240).shape == (3, 120, 214)


def test_a_map_that_is_enlarged_shows_its_pixels() -> None:
    look = gallery._Look(np.zeros((2, 3), np.uint8), None, 1.0, 8)
    for width, enlarged in ((4, True), (8, False), (9, False)):
        picture = gallery._map(np.zeros((2, width, 3), np.uint8), "a map", look)
        assert (picture.pixelated, picture.width) == (enlarged, 8)
