"""Plots of uncertainty: every function takes matplotlib axes and returns them.

    figure, axes = plt.subplots()
    plots.reliability(axes, lpbnn.metrics.reliability(p.probs, y), label="LP-BNN")

- classification: ``reliability``, ``risk_coverage``, ``ood_scores``, ``member_bars``, ``decision_map``
- regression: ``regression_band``, ``parity``, ``interval_calibration``
- segmentation: ``class_map``, ``value_map``
- posterior: ``posterior_correlation``, ``posterior_factors``
- comparison: ``curve`` (training, corruption), ``trade_off``, ``name_beside``

Arrays may be torch tensors or anything else that numpy reads. ``color`` is any colour of
matplotlib, by default the next of the axes' cycle. Text and lines follow ``matplotlib.rcParams``. Marks carry
what they show as their ``gid`` ("title:..."), which the report turns into hover titles of its SVG.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from lpbnn.extras import missing
from lpbnn.model import UncertainModel
from lpbnn.predict import predict

try:
    import matplotlib as mpl
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import StepPatch

    from lpbnn.metrics.calibration import ReliabilityBins
    from lpbnn.metrics.selective import RiskCoverage
except ModuleNotFoundError as error:
    raise missing(error) from error

__all__ = [
    "class_map",
    "class_pixels",
    "curve",
    "decision_map",
    "interval_calibration",
    "interval_coverage",
    "member_bars",
    "name_beside",
    "ood_scores",
    "palette",
    "parity",
    "picture",
    "posterior_correlation",
    "posterior_factors",
    "regression_band",
    "reliability",
    "risk_coverage",
    "similar_first",
    "strongest",
    "trade_off",
    "value_map",
    "value_pixels",
]

TITLE = "title:"  # what a gid of a mark starts with
FEW = 10  # examples of a bin: fewer say little, and their bar is pale
WIDE = 1.96  # standard deviations on either side of the middle 95 %
LEVELS = np.linspace(0.05, 0.95, 19)
POINTS = 201  # of a curve over many examples: evenly spaced quantiles
SURE, UNSURE = "magma", "magma_r"  # in both scales pale is sure and dark is not
VOID = (0, 0, 0)
# Roads grey-violet, trees green, people red: what most readers of street scenes expect.
STREET_COLORS = {
    "road": (115, 85, 125),
    "road line": (240, 240, 240),
    "pavement": (214, 160, 196),
    "sidewalk": (214, 160, 196),
    "building": (98, 94, 92),
    "wall": (124, 124, 168),
    "fence": (188, 158, 142),
    "pole": (190, 190, 184),
    "sign": (238, 214, 36),
    "traffic sign": (238, 214, 36),
    "traffic light": (246, 164, 48),
    "tree": (84, 138, 52),
    "vegetation": (84, 138, 52),
    "terrain": (168, 218, 150),
    "sky": (104, 152, 206),
    "unlabeled": (104, 152, 206),  # in StreetHazards the sky, mostly
    "pedestrian": (220, 44, 58),
    "person": (220, 44, 58),
    "rider": (252, 116, 80),
    "bicyclist": (252, 116, 80),
    "car": (28, 52, 158),
    "truck": (18, 20, 92),
    "bus": (38, 92, 120),
    "train": (20, 120, 130),
    "motorcycle": (96, 60, 220),
    "bicycle": (126, 28, 52),
    "other": (146, 112, 62),
}
# Positive blue, negative orange, clear at zero: it reads on a light and on a dark page.
_BLUE, _ORANGE = (58 / 255, 110 / 255, 205 / 255), (222 / 255, 110 / 255, 40 / 255)
DIVERGING = ListedColormap(
    [(*_ORANGE, 1 - i / 127) for i in range(128)] + [(*_BLUE, i / 127) for i in range(128)],
    "lpbnn_diverging",
)


def reliability(
    axes: Axes, bins: ReliabilityBins, *, color: Any = None, label: str = "model"
) -> Axes:
    """Draw accuracy against confidence, and in a strip below where the confidences lie.

    Args:
        axes: to draw into.
        bins: of ``lpbnn.metrics.reliability(probs, labels)``. Bins of fewer than ten examples are pale.
        color: of the bars.
        label: of the model, for the marks' titles.

    >>> from lpbnn.metrics import reliability as bins
    >>> import torch
    >>> probs = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.9, 0.1]])
    >>> len(reliability(_axes(), bins(probs, torch.tensor([0, 1, 0]))).patches)  # one for each bin
    3
    """
    if not isinstance(bins, ReliabilityBins):
        raise _wrong_type(bins, "lpbnn.metrics.reliability(p.probs, y)")
    color = _color(axes, color)
    edges, accuracy, count = map(np.asarray, (bins.edges, bins.accuracy, bins.count))
    width = np.diff(edges)
    for here, alpha in (((count > 0) & (count < FEW), 0.35), (count >= FEW, 1.0)):
        left, high = edges[:-1][here], accuracy[here]
        look = {"color": color, "alpha": 0.5 * alpha, "linewidth": 0}
        bars = axes.bar(left, high, width[here], align="edge", **look)
        for bar, number in zip(bars, count[here], strict=True):
            end = bar.get_x() + bar.get_width()
            where = f"{label}: confidence {bar.get_x():.2f} to {end:.2f}"
            told(bar, f"{where}, accuracy {bar.get_height():.3f} of {number} examples")
        axes.hlines(high, left, left + width[here], color=color, alpha=alpha, linewidth=2)
    axes.plot([0, 1], [0, 1], color=_ink(), linewidth=0.9, dashes=(3, 3), zorder=4)
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    axes.set_xticks((0, 0.5, 1), ())
    _share_ticks(axes.yaxis)
    above(axes, "accuracy")
    strip = axes.inset_axes((0, -0.23, 1, 0.17))
    share = count / max(1, count.sum())
    strip.bar(edges[:-1], share, width, align="edge", color=_muted(), alpha=0.6, linewidth=0)
    strip.set(xlim=(0, 1), ylim=(0, max(float(share.max()), 1e-9)), yticks=())
    strip.spines["left"].set_visible(False)
    _share_ticks(strip.xaxis)
    strip.set_xlabel("confidence", labelpad=0)
    return axes


def risk_coverage(
    axes: Axes, curve: RiskCoverage, *, color: Any = None, label: str = "model", **look: Any
) -> Axes:
    """Draw the risk of answering only the most certain share of the examples.

    Args:
        axes: to draw into.
        curve: of ``lpbnn.metrics.risk_coverage(p.total, p.labels != y)``.
        color: of the line.
        label: of the model, for the mark's title.
        look: of matplotlib's ``plot``.

    >>> from lpbnn.metrics import risk_coverage as curve
    >>> doubt, wrong = torch.tensor([0.1, 0.4, 0.2]), torch.tensor([0, 1, 0])
    >>> risk_coverage(_axes(), curve(doubt, wrong)).get_xlabel()
    'coverage, %'
    """
    if not isinstance(curve, RiskCoverage):
        raise _wrong_type(curve, "lpbnn.metrics.risk_coverage(p.total, p.labels != y)")
    coverage, risk = map(np.asarray, (curve.coverage, curve.risk))
    (line,) = axes.plot(100 * coverage, 100 * risk, color=_color(axes, color), **look)
    shown = [int(np.argmin(abs(coverage - share))) for share in (0.5, 0.8, 1)]
    numbers = ", ".join(f"{100 * risk[i]:.2f} % of {100 * coverage[i]:.0f} %" for i in shown)
    told(line, f"{label}: errors {numbers}")
    axes.set_xlabel("coverage, %", labelpad=2)
    return axes


def ood_scores(
    axes: Axes,
    inside: Any,
    outside: Any,
    *,
    color: Any = None,
    label: str = "model",
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> Axes:
    """Draw the distribution functions of a score, filled on the test set and a line elsewhere.

    Args:
        axes: to draw into.
        inside: (N,) scores of the test set, such as ``p.ood_score``.
        outside: (M,) scores of the other set.
        color: of the test set.
        label: of the model, for the marks' titles.
        limits: of the score's axis; None for the middle 99 %.
        log: True for a logarithmic axis.

    >>> ood_scores(_axes(), [0.1, 0.2], [0.4, 0.9], log=True).get_xscale()
    'log'
    """
    given = [_finite("inside", inside), _finite("outside", outside)]
    color = _color(axes, color)
    share = np.linspace(0, 1, POINTS)
    curves = [np.quantile(scores, share) for scores in given]
    if limits is None:
        limits = min(x[1] for x in curves), max(x[-2] for x in curves)
        if limits[0] == limits[1]:  # all scores are equal
            limits = (limits[0] / 2, 2 * limits[0]) if log else (limits[0] - 0.5, limits[0] + 0.5)
    if log and not limits[0] > 0:
        raise ValueError(
            f"a logarithmic axis cannot begin at {limits[0]:.3g}. Fix: log=False, or limits above 0."
        )
    axes.set_xscale("log" if log else "linear")
    for x, part, paint in zip(curves, ("test", "elsewhere"), (color, _ink()), strict=True):
        ends = np.concatenate([[limits[0]], x.clip(*limits), [limits[1]]])
        heights = np.concatenate([[(x <= limits[0]).mean()], share, [1.0]])
        heights[1:-1][x < limits[0]] = heights[0]
        (line,) = axes.plot(ends, heights, color=paint, linewidth=1.4)
        quartiles = ", ".join(f"{x[POINTS * q // 4]:.3g}" for q in (1, 2, 3))
        told(line, f"{label}, {part}: quartiles of the score {quartiles}")
        if part == "test":
            axes.fill_between(ends, heights, color=color, alpha=0.3, linewidth=0)
    axes.set(xlim=limits, ylim=(0, 1.02))
    _share_ticks(axes.yaxis)
    if log:
        log_ticks(axes, "x")
    else:
        axes.locator_params(axis="x", nbins=4)
    return axes


def member_bars(
    axes: Axes,
    members: Any,
    names: Sequence[str] = (),
    truth: int | None = None,
    *,
    color: Any = None,
    left: float = 0.0,
    most: int = 8,
) -> Axes:
    """Draw the class probabilities of one example: a row of bars for each member.

    Args:
        axes: to draw into; several examples or models stand side by side with different ``left``.
        members: (S, C) probabilities, such as ``p.members[:, i]``.
        names: of the classes; none for their numbers.
        truth: the right class, whose name is bold.
        color: of the bars.
        left: where the first bar stands; each class takes one unit.
        most: members to draw, evenly chosen: more would be hairlines.

    >>> len(member_bars(_axes(), [[0.2, 0.8], [0.6, 0.4]], ["cat", "dog"], 1).patches)
    2
    """
    values = np.nan_to_num(_table("members", members, "(S, C); p.members[:, i] of an example"))
    number, classes = values.shape
    names = names or [str(i) for i in range(classes)]
    if len(names) != classes:
        raise ValueError(f"there are {len(names)} names and {classes} classes. Fix: a name each.")
    color = _color(axes, color)
    chosen = np.linspace(0, number - 1, min(number, most)).round().astype(int)
    row = 1 / len(chosen)
    tall = row - min(1 / 30, row / 4)  # some air between two members
    for place, member in enumerate(chosen):
        foot = 1 - row * (place + 1)
        seen = np.flatnonzero(values[member] >= min(0.005, values[member].max()))
        edges = left + (seen[:, None] + [0.1, 0.9]).ravel()
        heights = np.zeros(2 * len(seen) - 1)
        heights[::2] = values[member, seen]
        look = {"fill": True, "color": color, "linewidth": 0, "clip_on": False}
        bars = StepPatch(foot + tall * heights, edges, baseline=foot, **look)
        axes.add_artist(bars)  # axes.stairs would search the limits, which are known
        best = int(values[member].argmax())
        told(bars, f"member {member + 1} of {number}: {names[best]} {values[member, best]:.2f}")
    feet = np.repeat(1 - row * np.arange(1, len(chosen) + 1), 3)
    across = np.tile([left, left + classes, np.nan], len(chosen))
    axes.plot(across, feet, color=_line(), linewidth=0.8, zorder=0, clip_on=False)
    turned = max(map(len, names)) > 2
    turn: dict[str, Any] = {
        "rotation": 90 if turned else 0,
        "ha": "center",
        "va": "top",
        "fontsize": 8.5,
    }
    for place, name in enumerate(names):
        text = axes.text(left + place + 0.5, -0.04, name, **turn)
        text.set(weight="bold" if place == truth else "normal")
        text.set(color=_ink() if place == truth else _muted())
    axes.set(xlim=(min(left, axes.get_xlim()[0]), left + classes), ylim=(0, 1))
    axes.set_axis_off()
    return axes


def regression_band(
    axes: Axes,
    x: Any,
    mean: Any,
    std: Any,
    epistemic: Any = None,
    *,
    targets: Any = None,
    train: tuple[Any, Any] | None = None,
    color: Any = None,
    label: str = "model",
) -> Axes:
    """Draw the predicted mean of one input with its 95 % band, and in it the epistemic part.

    Args:
        axes: to draw into.
        x: (N,) inputs in any order.
        mean: (N,) predicted means.
        std: (N,) total standard deviations.
        epistemic: (N,) standard deviations of the members' means.
        targets: (N,) of the test set, as small dots.
        train: inputs and targets of the training set, as large dots.
        color: of line and bands.
        label: of the model, for the marks' titles.

    >>> x = np.linspace(-1, 1, 9)
    >>> regression_band(_axes(), x, x**2, 0 * x + 0.1, train=(x, x**2)).get_xlabel()
    'input'
    """
    x, mean, std = _equally_many(x=x, mean=mean, std=std)
    color = _color(axes, color)
    order = np.argsort(x)
    x, mean = x[order], mean[order]
    for deviation, alpha in ((std, 0.2), (epistemic, 0.4)):
        if deviation is not None:
            reach = WIDE * _flat(deviation)[order]
            axes.fill_between(x, mean - reach, mean + reach, color=color, alpha=alpha, linewidth=0)
    if targets is not None:
        some = slice(None, None, max(1, len(x) // 120))
        small = {"color": _muted(), "markersize": 2, "alpha": 0.6}
        (dots,) = axes.plot(x[some], _flat(targets)[order][some], ".", **small)
        told(dots, "targets of the test and the outside set")
    (line,) = axes.plot(x, mean, color=color, linewidth=1.8)
    told(line, f"{label}: predicted mean")
    if train is not None:
        large = {"color": _ink(), "markersize": 4.5, "markeredgewidth": 0.8, "zorder": 5}
        edge = mpl.rcParams["savefig.facecolor"]
        edge = axes.get_facecolor() if edge == "auto" else edge
        (dots,) = axes.plot(*map(_flat, train), "o", markeredgecolor=edge, **large)
        told(dots, f"{_flat(train[0]).size} training points")
    axes.set_xlim(x.min(), x.max())
    axes.set_xlabel("input", labelpad=0)
    axes.locator_params(axis="y", nbins=5)
    return axes


def parity(
    axes: Axes,
    targets: Any,
    mean: Any,
    std: Any,
    *,
    color: Any = None,
    label: str = "model",
    most: int = 60,
) -> Axes:
    """Draw predictions with their 95 % intervals against the targets.

    Args:
        axes: to draw into.
        targets: (N,).
        mean: (N,) predicted means.
        std: (N,) total standard deviations.
        color: of dots and intervals.
        label: of the model, for the marks' titles.
        most: examples to draw: more intervals would hide each other.

    >>> parity(_axes(), [1, 2, 3], [1.1, 2.2, 2.7], [0.1, 0.1, 0.4]).get_xlabel()
    'target'
    """
    targets, mean, std = _equally_many(targets=targets, mean=mean, std=std)
    both = _finite("targets and mean", np.concatenate([targets, mean]))
    color, reach = _color(axes, color), WIDE * std
    low, high = float(both.min()), float(both.max())
    axes.plot([low, high], [low, high], color=_muted(), linewidth=0.8, dashes=(4, 3))
    some = slice(None, None, max(1, len(mean) // most))
    targets, mean, reach = targets[some], mean[some], reach[some]
    axes.vlines(targets, mean - reach, mean + reach, color=color, alpha=0.25, linewidth=1)
    (dots,) = axes.plot(targets, mean, ".", color=color, markersize=4)
    told(dots, f"{label}: median 95 % interval ± {float(np.median(reach)):.3g}")
    air = 0.03 * (high - low)
    bottom, top = min(low, float((mean - reach).min())), max(high, float((mean + reach).max()))
    axes.set(xlim=(low - air, high + air), ylim=(bottom - air, top + air))
    axes.locator_params(nbins=4)
    axes.set_xlabel("target", labelpad=0)
    return axes


def interval_coverage(targets: Any, mean: Any, std: Any) -> np.ndarray:
    """Compute the share of targets within the central Gaussian interval of each of ``LEVELS``.

    >>> interval_coverage([0.0, 3.0], [0.0, 0.0], [1.0, 1.0])[[0, -1]]
    array([0.5, 0.5])
    """
    from scipy.special import erfinv

    targets, mean, std = _equally_many(targets=targets, mean=mean, std=std)
    reach = np.sqrt(2) * erfinv(LEVELS)
    away = abs(targets - mean) / std.clip(np.finfo(np.float64).tiny)
    return (away[None] <= reach[:, None]).mean(1)


def interval_calibration(
    axes: Axes, targets: Any, mean: Any, std: Any, *, color: Any = None, label: str = "model"
) -> Axes:
    """Draw how many targets lie in the central intervals of each level.

    Args:
        axes: to draw into.
        targets: (N,).
        mean: (N,) predicted means.
        std: (N,) total standard deviations.
        color: of the line.
        label: of the model, for the mark's title.

    >>> interval_calibration(_axes(), [0.0, 3.0], [0.0, 0.0], [1.0, 1.0]).get_xlabel()
    'level of the interval'
    """
    axes.plot([0, 1], [0, 1], color=_muted(), linewidth=0.8, dashes=(4, 3))
    look = {"linewidth": 1.8, "marker": "o", "markersize": 2.8}
    shares = interval_coverage(targets, mean, std)
    (line,) = axes.plot(LEVELS, shares, color=_color(axes, color), **look)
    told(line, f"{label}: {100 * shares[-1]:.0f} % of the targets in the 95 % intervals")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    _share_ticks(axes.xaxis)
    _share_ticks(axes.yaxis)
    axes.grid(color=_line(), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("level of the interval", labelpad=0)
    above(axes, "share of targets in it")
    return axes


def palette(classes: Sequence[str], count: int) -> np.ndarray:
    """Return a colour for each class, (count, 3) bytes: by its name if known, otherwise hues apart.

    >>> palette(("sky", "dragon"), 2)[0].tolist(), len(palette((), 30))
    ([104, 152, 206], 30)
    """
    hue = (np.arange(count) * 0.618034) % 1  # a golden angle apart, the same every time
    light = 0.55 + 0.3 * ((np.arange(count) % 3) - 1) / 2
    wave = np.array([0, 1 / 3, 2 / 3])
    rgb = light[:, None] + 0.35 * np.cos(2 * np.pi * (hue[:, None] - wave))
    colours = (rgb.clip(0, 1) * 255).astype(np.uint8)
    for number, name in enumerate(classes[:count]):
        if name in STREET_COLORS:
            colours[number] = STREET_COLORS[name]
    return colours


def class_map(axes: Axes, labels: Any, classes: Sequence[str] = (), *, title: str = "") -> Axes:
    """Draw a map of class numbers; what is no class (void) is black.

    Args:
        axes: to draw into.
        labels: (H, W) class numbers, such as ``p.labels[i]``.
        classes: names of the classes, which choose their colours.
        title: above the map.

    >>> len(class_map(_axes(), [[0, 1], [1, 255]], ("road", "sky")).images)
    1
    """
    count = len(classes) or int(np.asarray(labels).max()) + 1
    return picture(axes, class_pixels(labels, palette(classes, count)), title)


def class_pixels(labels: Any, colors: np.ndarray) -> np.ndarray:
    """Return the colours (H, W, 3) of a map of class numbers (H, W); no class (void) is black.

    >>> class_pixels([[1, 255]], palette(("road", "sky"), 2)).tolist()
    [[[104, 152, 206], [0, 0, 0]]]
    """
    labels = np.asarray(labels).astype(int)
    known = (labels >= 0) & (labels < len(colors))
    table = np.vstack([colors, [VOID]]).astype(np.uint8)
    return table[np.where(known, labels, len(colors))]


def value_map(
    axes: Axes,
    values: Any,
    top: float = 1.0,
    *,
    scale: str = SURE,
    title: str = "",
    unit: str = "",
) -> Axes:
    """Draw a map of numbers from 0 to ``top`` with its scale beside it.

    Args:
        axes: to draw into.
        values: (H, W), such as ``p.confidence[i]`` or ``p.epistemic[i]``.
        top: end of the scale.
        scale: a colour map: ``SURE`` for confidences, ``UNSURE`` for uncertainties.
        title: above the map.
        unit: beside the scale.

    >>> len(value_map(_axes(), [[0.2, 0.9]], unit="nats").child_axes)
    1
    """
    picture(axes, value_pixels(values, top, scale), title)
    beside = axes.inset_axes((1.02, 0.0, 0.025, 1.0))
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(Normalize(0, top), scale), cax=beside)
    bar.set_label(unit, fontsize=9)
    bar.ax.tick_params(labelsize=9)
    return axes


def value_pixels(values: Any, top: float = 1.0, scale: str = SURE) -> np.ndarray:
    """Return the colours (H, W, 3) of a map of numbers (H, W) on a scale from 0 to ``top``.

    >>> value_pixels([[0.0, 2.0]]).tolist()
    [[[0, 0, 3], [251, 252, 191]]]
    """
    share = (np.nan_to_num(np.asarray(values, np.float64)) / top).clip(0, 1)
    return mpl.colormaps[scale]((255 * share).round().astype(int), bytes=True)[..., :3]


def picture(axes: Axes, pixels: Any, title: str = "") -> Axes:
    """Draw an image (H, W, 3) without any axes.

    >>> picture(_axes(), np.zeros((2, 3, 3), np.uint8), "black").get_title("left")
    'black'
    """
    axes.imshow(np.asarray(pixels), interpolation="nearest")
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_axis_off()
    return axes


def similar_first(matrix: Any) -> np.ndarray:
    """Return an order in which neighbours correlate: the leaves of a hierarchical clustering.

    Inputs are close if their rows are alike: then they correlate with the same others in the same way.

    >>> block = np.kron(np.eye(2), np.ones((2, 2)))[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    >>> order = similar_first(block)
    >>> float(np.abs(np.diff(block[order][:, order], axis=0)).sum())  # one border, two blocks
    4.0
    """
    from scipy.cluster.hierarchy import leaves_list, linkage

    rows = np.nan_to_num(np.asarray(matrix, np.float64))
    if len(rows) < 3:
        return np.arange(len(rows))
    # The best order of the leaves takes seconds for more.
    return leaves_list(linkage(rows, "average", optimal_ordering=len(rows) <= 512))


def strongest(matrix: Any) -> float:
    """Return the end of a scale that shows a correlation matrix: 99 % of the pairs stay below it.

    The diagonal, which is 1 whatever the others are, does not count.

    >>> strongest(np.full((4, 4), 0.15) + 0.85 * np.eye(4))
    0.2
    """
    values = abs(np.nan_to_num(np.asarray(matrix)))
    pairs = values[~np.eye(len(values), dtype=bool)]
    high = float(np.quantile(pairs, 0.99)) if pairs.size else 1.0
    return next((step for step in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7) if step >= high), 1.0)


def decision_map(
    axes: Axes,
    model: UncertainModel,
    x: Any,
    y: Any,
    *,
    show: str = "epistemic",
    margin: float = 1.0,
    points: int = 100,
    samples: int = 4,
    seed: int = 0,
) -> Axes:
    """Draw an uncertainty over the plane around two-dimensional examples, and the examples by class.

    Args:
        axes: to draw into.
        model: a classifier of two numbers.
        x: examples (B, 2).
        y: their labels (B,).
        show: a name of ``Prediction``: "epistemic", "aleatoric", "total" or "confidence".
        margin: how far the plane goes beyond the examples, as a multiple of their range.
        points: of the grid in each direction.
        samples: draws of each member.
        seed: of the draws.

    >>> from torch import nn
    >>> import lpbnn
    >>> model = lpbnn.build(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), num_data=2)
    >>> len(decision_map(_axes(), model, [[0.0, 1.0], [1.0, 0.0]], [0, 1], points=5).images)
    1
    """
    x, y = np.asarray(x, np.float32), np.asarray(y)
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"decision_map draws a plane: expected x of shape (B, 2), got {x.shape}.")
    low, high = x.min(0), x.max(0)
    low, high = low - margin * (high - low), high + margin * (high - low)
    across, up = np.meshgrid(*(np.linspace(a, b, points) for a, b in zip(low, high, strict=True)))
    grid = torch.from_numpy(np.stack([across.ravel(), up.ravel()], 1).astype(np.float32))
    like = next(model.parameters())
    p = predict(model, grid.to(like), samples=samples, seed=seed, keep_members=False)
    top = 1.0 if show == "confidence" else float(np.log(p.probs.shape[-1]))
    values = getattr(p, show).float().cpu().numpy().reshape(points, points)
    axes.imshow(
        values,
        origin="lower",
        extent=(low[0], high[0], low[1], high[1]),
        aspect="auto",
        interpolation="bilinear",
        cmap=SURE if show == "confidence" else UNSURE,
        vmin=0,
        vmax=top,
    )
    for label in np.unique(y):
        axes.plot(*x[y == label].T, ".", markersize=2, color=f"C{int(label)}")
    return axes


def posterior_correlation(axes: Axes, matrix: Any) -> Axes:
    """Draw a correlation matrix of a posterior, inputs in the order of ``similar_first``.

    Blue is together, orange opposed; the scale ends at ``strongest``.

    Args:
        axes: to draw into, square.
        matrix: (m, m), such as the correlation of ``lpbnn.posterior(model)``.

    >>> posterior_correlation(_axes(), np.eye(4)).get_xlabel()
    'inputs, ordered'
    """
    matrix = np.nan_to_num(_table("matrix", matrix, "(m, m)"))
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix has shape {matrix.shape}; expected (m, m), correlations.")
    order, top, size = similar_first(matrix), strongest(matrix), len(matrix)
    shown = matrix[order][:, order]
    ends = (0.5, size + 0.5, size + 0.5, 0.5)
    look: dict[str, Any] = {"cmap": DIVERGING, "vmin": -top, "vmax": top, "extent": ends}
    axes.imshow(shown, interpolation="none", **look)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks((1, size))
    axes.set_xlabel("inputs, ordered", labelpad=-6)
    axes.set_ylabel("inputs, ordered", labelpad=-14)
    below = axes.inset_axes((0.15, -0.2, 0.7, 0.035))
    ramp = np.linspace(-top, top, 256)[None]
    below.imshow(ramp, aspect="auto", cmap=DIVERGING, extent=(-top, top, 0, 1))
    below.set(yticks=(), xticks=(-top, 0, top), xticklabels=(f"−{top:g}", "0", f"+{top:g}"))
    below.spines["left"].set_visible(False)
    return axes


def posterior_factors(axes: Axes, mean: Any, std: Any, *, color: Any = None) -> Axes:
    """Draw some inputs of a layer: each member's factor, and one standard deviation of a draw.

    Args:
        axes: to draw into.
        mean: (J, m), the factors of J members.
        std: (J, m), standard deviations of the draws.
        color: of all members.

    >>> posterior_factors(_axes(), np.ones((2, 5)), np.full((2, 5), 0.1)).get_xlabel()
    'inputs of the layer'
    """
    mean, std = _table("mean", mean, "(J, m)"), _table("std", std, "(J, m)")
    color, (number, inputs) = _color(axes, color), mean.shape
    for place in range(0, inputs, 2):
        axes.axvspan(place - 0.5, place + 0.5, color=_line(), alpha=0.45, linewidth=0)
    for member in range(number):
        x = np.arange(inputs) + (member - (number - 1) / 2) * 0.7 / number
        low, high = mean[member] - std[member], mean[member] + std[member]
        axes.vlines(x, low, high, color=color, alpha=0.45, linewidth=2)
        (dots,) = axes.plot(x, mean[member], ".", color=color, markersize=5)
        told(dots, f"member {member + 1}")
    axes.axhline(1, color=_muted(), linewidth=0.9, dashes=(3, 3), zorder=0)
    axes.set_xlim(-0.7, inputs - 0.3)
    axes.set_xticks(())
    axes.locator_params(axis="y", nbins=5)
    axes.set_xlabel("inputs of the layer", labelpad=6)
    above(axes, "factor r̂")
    return axes


def curve(
    axes: Axes,
    x: Any,
    mean: Any,
    std: Any = None,
    *,
    color: Any = None,
    label: str = "model",
    names: Sequence[str] = (),
    **look: Any,
) -> Axes:
    """Draw a line with a band of one standard deviation: a loss by epochs, accuracy by severity.

    Args:
        axes: to draw into.
        x: (P,).
        mean: (P,).
        std: (P,), NaN where it is not known; None for no band.
        color: of line and band.
        label: of the model, for the mark's title.
        names: what the values of x are called in that title; none for numbers.
        look: of matplotlib's ``plot``.

    >>> len(curve(_axes(), [0, 1, 2], [0.9, 0.8, 0.6], [0.1, 0.1, 0.2]).collections)
    1
    """
    color = _color(axes, color)
    x, mean = np.asarray(x, np.float64), np.asarray(mean, np.float64)
    if std is not None:
        reach = np.asarray(std, np.float64)
        axes.fill_between(x, mean - reach, mean + reach, color=color, alpha=0.13, linewidth=0)
    (line,) = axes.plot(x, mean, color=color, **{"linewidth": 1.8, **look})
    names = names or [f"{value:g}" for value in x]
    some = np.unique(np.linspace(0, len(x) - 1, min(6, len(x))).round().astype(int))
    told(line, f"{label}: " + ", ".join(f"{names[i]}: {mean[i]:.4g}" for i in some))
    return axes


def trade_off(
    axes: Axes,
    x: float,
    y: float,
    x_std: float = 0.0,
    y_std: float = 0.0,
    *,
    color: Any = None,
    marker: str = "o",
    label: str = "model",
) -> Axes:
    """Draw one model as a point with a bar of one standard deviation in both directions.

    Args:
        axes: to draw into; call it once for each model.
        x: such as the cost, or the accuracy.
        y: such as the ECE.
        x_std: over seeds.
        y_std: over seeds.
        color: of point and bars.
        marker: of the point.
        label: title of the mark.

    >>> len(trade_off(_axes(), 97.5, 0.02, 0.3, 0.001).lines)
    1
    """
    bars = {"color": _color(axes, color), "alpha": 0.45, "linewidth": 1.6}
    axes.hlines(y, x - x_std, x + x_std, **bars)
    axes.vlines(x, y - y_std, y + y_std, **bars)
    (dot,) = axes.plot(x, y, marker, color=bars["color"], markersize=5.5, zorder=4)
    told(dot, label)
    return axes


def name_beside(
    axes: Axes,
    names: Sequence[str],
    places: Sequence[tuple[float | None, float]],
    colors: Sequence[Any],
    markers: Sequence[str],
) -> Axes:
    """Write names to the right of what they name, pushed apart, each with a dotted thread to it.

    Args:
        axes: whose limits are set.
        names: one for each model.
        places: x and y of each; without an x there is no thread.
        colors: of each.
        markers: of each.

    >>> axes = _axes()
    >>> len(name_beside(axes, ["a", "b"], [(1, 0.5), (None, 0.5)], ["r", "g"], "os").texts)
    2
    """
    box = axes.get_window_extent()
    pixel = 72 / axes.figure.dpi
    to_axes, to_data = axes.transAxes.inverted(), axes.transData
    up, across = 1 / (box.height * pixel), 1 / (box.width * pixel)
    low, high = axes.get_ylim()
    points = [
        to_axes.transform(to_data.transform((x or axes.get_xlim()[0], min(max(y, low), high))))
        for x, y in places
    ]
    apart = push_apart([float(height) for _, height in points], 13 * up, 7 * up, 1.0)
    beside = {"transform": axes.transAxes, "clip_on": False}
    shown = zip(names, places, points, apart, colors, markers, strict=True)
    for name, (x, _), (start, height), place, color, marker in shown:
        if x is not None:
            ends = [start + 4 * across, 1 + 6 * across, 1 + 13 * across]
            # Thin, grey and dotted: a solid one in the model's colour reads as an error bar.
            thread = {"color": _muted(), "linewidth": 0.8, "dashes": (1, 2.5), "zorder": 1}
            axes.plot(ends, [height, place, place], **thread, **beside)
        shape = {"marker": marker, "color": color, "markersize": 4.5}
        axes.plot(1 + 18 * across, place, **shape, **beside)
        axes.text(1 + 24 * across, place, name, va="center", ha="left", **beside)
    return axes


def push_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the places at least ``gap`` apart, moved as little as their order and bounds allow.

    >>> push_apart([5.0, 5.0, 1.0], gap=1.0, low=0.0, high=10.0)
    [4.5, 5.5, 1.0]
    >>> push_apart([10.0, 10.0], gap=1.0, low=0.0, high=10.0)
    [9.0, 10.0]
    """
    from scipy.optimize import isotonic_regression

    if not places:
        return []
    order = np.argsort(places, kind="stable")
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    steps = gap * np.arange(len(places))
    # Places less their steps may only rise: the nearest such numbers are an isotonic regression.
    fitted = isotonic_regression(np.asarray(places, np.float64)[order] - steps).x
    found = np.empty(len(places))
    found[order] = fitted.clip(low, high - steps[-1]) + steps
    return found.tolist()


def told(artist: Artist, text: str) -> None:
    """Let a mark show ``text`` in the report where the pointer rests on it."""
    artist.set_gid(TITLE + text)


def above(axes: Axes, text: str) -> None:
    """Write what the y axis is above it, where it can be read without turning the head."""
    place = {"transform": axes.transAxes, "va": "bottom", "ha": "left"}
    axes.text(0, 1.04, text, color=_muted(), **place)


def log_ticks(axes: Axes, which: Literal["x", "y"]) -> None:
    """Label a logarithmic axis with plain numbers: powers of ten, on a short axis also some between.

    >>> axes = _axes()
    >>> axes.set(xscale="log", xlim=(0.02, 0.6))
    [None, (0.02, 0.6)]
    >>> log_ticks(axes, "x")
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['0.02', '0.05', '0.1', '0.2', '0.5']
    """
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    steps = (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = powers[:: -(-len(powers) // 6)]
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks((), minor=True)


def _share_ticks(axis: Any) -> None:
    axis.set_ticks((0, 0.5, 1), ("0", ".5", "1"))


def _array(values: Any) -> np.ndarray:
    return np.asarray(
        values.detach().cpu() if isinstance(values, torch.Tensor) else values, np.float64
    )


def _flat(values: Any) -> np.ndarray:
    return _array(values).reshape(-1)


def _finite(name: str, values: Any) -> np.ndarray:
    """Return the values flat; refuse none at all, and those that are NaN or infinite."""
    found = _flat(values)
    bad = int((~np.isfinite(found)).sum())
    if bad or not found.size:
        what = f"{bad} of {found.size} values of {name} are NaN or infinite" if bad else ""
        raise ValueError(
            f"{what or f'{name} is empty'}. Fix: check the data, or plot the others, values[values.isfinite()]."
        )
    return found


def _equally_many(**values: Any) -> list[np.ndarray]:
    """Return the values flat; refuse different numbers of them."""
    found = {name: _flat(given) for name, given in values.items()}
    if len({each.size for each in found.values()}) > 1:
        sizes = ", ".join(f"{name} has {each.size}" for name, each in found.items())
        raise ValueError(
            f"expected a number per example of each: {sizes}. Fix: one target at a time."
        )
    return list(found.values())


def _table(name: str, values: Any, shape: str) -> np.ndarray:
    """Return the values; refuse another number of dimensions than two."""
    found = _array(values)
    if found.ndim != 2:
        raise ValueError(f"{name} has shape {found.shape}; expected {shape}.")
    return found


def _wrong_type(given: Any, call: str) -> TypeError:
    return TypeError(f"expected the result of {call}; got {type(given).__name__}.")


def _color(axes: Axes, color: Any) -> Any:
    """Return the colour that is given, or the next of the axes' cycle."""
    if color is not None:
        return color
    (line,) = axes.plot([], [])
    line.remove()
    return line.get_color()


def _ink() -> str:
    return mpl.rcParams["text.color"]


def _muted() -> str:
    return mpl.rcParams["axes.labelcolor"]


def _line() -> str:
    return mpl.rcParams["grid.color"]


def _axes() -> Axes:
    """Axes for the examples of this module."""
    from matplotlib.figure import Figure

    return Figure().subplots()
