"""The figures of the page: what ``lpbnn.plots`` draws, of the runs of every method, as SVG."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from lpbnn import plots
from lpbnn.metric_info import HUGE, METRICS, MetricInfo
from lpbnn.metrics.calibration import ReliabilityBins
from lpbnn.metrics.selective import RiskCoverage
from lpbnn.report import tables
from lpbnn.report.colours import line_style, marker
from lpbnn.report.runs import Group, Run
from lpbnn.report.svg import colour, drawing
from lpbnn.report.tables import COSTS, Cell

APART = 5  # quartile ranges beyond the quartiles, from which a point is far from the others
FAR = 20  # largest over least value from which an axis is logarithmic
SCORE_LABELS = {
    "confidence": "1 - largest probability",
    "entropy": "entropy",
    "variance": "predicted standard deviation",
}
QUANTILES = 201  # of the scores of a set
SHOWN_INPUTS = 20  # of a posterior's layer
LONGEST = 34  # letters of a name beside a chart
SETTINGS = re.compile(r" \((.*)\)$")
PREDICTED = ("targets", "mean", "aleatoric_std", "epistemic_std")


class Figure(NamedTuple):
    """An SVG; a small one is of one method and stands below its name and number."""

    svg: Markup
    group: Group | None = None
    number: str = ""


@dataclass(frozen=True)
class Panels:
    """A small figure for each method, and the methods that have none."""

    figures: Sequence[Figure]
    kind: str = "small"
    note: str = ""
    fewer: bool = False
    """True if some figures show fewer seeds than their number is a mean of."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further facts that the caption names."""


class Mark(NamedTuple):
    """A name beside a chart and the place it belongs to; without an x it gets no thread."""

    group: Group
    x: float | None
    y: float
    more: str = ""
    """Said after the name."""


Drawn = dict[str, Markup]
"""The panel of each method, by its label."""


def calibration(groups: Sequence[Group]) -> Panels | None:
    """Reliability diagrams, seeds pooled."""
    names = [f"reliability/{name}" for name in ("edges", "count", "accuracy", "confidence")]
    drawn: Drawn = {}
    for group in groups:
        if runs := group.with_arrays(*names):
            label = f"Reliability diagram of {group.label}"
            with _panel(drawn, group, label, (180, 190), (26, 16, 146, 118)) as axes:
                plots.reliability(axes, _pooled(runs), **_look(group))
    fewer = any(0 < len(g.with_arrays(*names)) < len(g.runs) for g in groups)
    return _panels(groups, drawn, "ece", fewer=fewer)


def risk_coverage(groups: Sequence[Group]) -> list[Figure]:
    """The error of the most certain share of the test set, all methods in one chart."""
    curves = []
    for group in groups:
        runs = group.with_arrays("risk/coverage", "risk/risk")
        if runs and not group.diverged:
            coverage, *_ = (run.arrays["risk/coverage"] for run in runs)
            risks = [run.arrays["risk/risk"] for run in runs]
            alike = [risk for risk in risks if len(risk) == len(coverage)]
            curves.append((group, coverage, np.mean(alike, 0)))
    charts: list[Figure] = []
    if curves:
        ends = [Mark(group, 100.0, 100 * float(risk[-1])) for group, _, risk in curves]
        label = "Errors of the most certain examples"
        with _chart(charts, "errors among them, %", ends, label) as axes:
            for group, coverage, risk in curves:
                both = map(torch.from_numpy, (coverage, risk, risk))
                plots.risk_coverage(axes, RiskCoverage(*both), **_line(group))
            wrong = min(float(coverage[risk > 0].min(initial=1)) for _, coverage, risk in curves)
            axes.set_xlim(10 * int(10 * wrong - 1e-6), 100)  # from where anybody errs
            worst = max(float(risk[coverage > 0.1].max()) for _, coverage, risk in curves)
            axes.set_ylim(0, 105 * max(worst, 1e-4))
    return charts


def training(groups: Sequence[Group]) -> list[Figure]:
    """The logged loss of every epoch, mean over seeds, and a validation metric where there is one."""
    charts: list[Figure] = []
    for key, what in (("log/loss", "training loss"), ("log/val_nll", "validation NLL")):
        rows = [(g, [run.arrays[key] for run in g.with_arrays(key)]) for g in groups]
        curves = [(group, _mean(logs)) for group, logs in rows if logs]
        if max((len(mean) for _, mean in curves), default=0) < 2:
            continue
        ends = [Mark(g, float(len(m)), float(m[-1])) for g, m in curves if np.isfinite(m[-1])]
        # One that diverged does not decide what range is shown.
        deciding = [mean for group, mean in curves if not group.diverged] or [m for _, m in curves]
        values = np.concatenate([mean[np.isfinite(mean)] for mean in deciding])
        with _chart(charts, what, ends, f"{what} by epochs") as axes:
            for group, mean in curves:
                plots.curve(axes, np.arange(1, len(mean) + 1), mean, **_line(group))
            axes.set_xlabel("epoch", labelpad=2)
            low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
            log = low > 0 and high > FAR * low
            if log:
                axes.set(yscale="log", ylim=(0.8 * low, 1.25 * high))
                plots.log_ticks(axes, "y")
            elif low < high:
                axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            axes.locator_params(axis="x", nbins=6, integer=True)
    return charts


def corruption(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy and ECE against severity."""
    charts: list[Figure] = []
    for info in (METRICS["accuracy"], METRICS["ece"]):
        lines = [(g, *line) for g in groups if (line := _severities(g, info)) is not None]
        if not lines:
            return []
        # One that diverged does not decide what range is shown.
        deciding = [line for line in lines if not line[0].diverged] or lines
        low = min(float(np.nanmin(mean - np.nan_to_num(std))) for _, _, mean, std in deciding)
        high = max(float(np.nanmax(mean + np.nan_to_num(std))) for _, _, mean, std in deciding)
        air = 0.06 * max(high - low, 0.01)
        low, high = (max(0, low - air), min(101, high + air)) if info.percent else (0, high + air)
        ends = []
        for group, x, mean, _ in lines:
            end = float(mean[-1])
            beyond = " ↓" if end < low else " ↑" if end > high else ""
            ends.append(Mark(group, float(x[-1]), end, beyond))
        what = info.head
        label = f"{what} against the severity of the corruption"
        with _chart(charts, what, ends, label) as axes:
            for group, x, mean, std in lines:
                look = _look(group, label=f"{group.label}, {what}") | line_style(group.index)
                plots.curve(axes, x, mean, std, names=[_level(level) for level in x], **look)
            levels = sorted({float(level) for _, x, _, _ in lines for level in x})
            axes.set_xticks(levels, [_level(level) for level in levels])
            axes.set_xlabel("severity", labelpad=2)
            axes.margins(x=0.02)
            axes.set_ylim(low, high)
    return charts


class Measured(NamedTuple):
    """A number to be an axis: its metric, its path in the results, and what it is called there."""

    info: MetricInfo
    path: tuple[str, ...]
    name: str = ""

    @property
    def told(self) -> str:
        """Its name without an arrow: "accuracy", "NLL"."""
        title = self.info.title
        return self.name or (title.lower() if title.istitle() else title)


def trade_offs(groups: Sequence[Group]) -> list[Figure]:
    """The main metric against ECE, the AUROC of each set never seen, and cE; RMSE against NLL."""
    key = tables.main_metric(groups)
    first = "nll" if key == "rmse" else "ece"
    up = [Measured(METRICS[first], ("test", first))]
    for name in tables.measured_on(groups, "ood"):
        where = tables.PIXELS.get(name, name).replace(":", "")
        auroc = METRICS["auroc"]
        up.append(Measured(auroc, ("ood", name, "auroc"), f"{auroc.head} ({where})"))
    up.append(Measured(METRICS["ce"], ("corruption", "ce")))
    across = Measured(METRICS[key], ("test", key))
    return [chart for one in up for chart in trade_off(groups, across, one)]


def costs(groups: Sequence[Group]) -> list[Figure]:
    """The main metric against the time of training and of a prediction."""
    key = tables.main_metric(groups)
    times = (
        ("train/seconds", "training time, s"),
        ("cost/predict_seconds_per_1000", "prediction of 1,000 examples, s"),
    )
    up = Measured(METRICS[key], ("test", key))
    across = [Measured(COSTS[path], tuple(path.split("/")), name) for path, name in times]
    return [chart for one in across for chart in trade_off(groups, one, up)]


def trade_off(groups: Sequence[Group], across: Measured, up: Measured) -> list[Figure]:
    """A chart of one number against another: a point for each method that learned, two at least."""
    learned = [g for g in groups if not g.diverged and g.label not in tables.failed(groups)]
    points = []
    for group in learned:
        (x, dx), (y, dy) = (_shown(group, one.info, one.path) for one in (across, up))
        if not np.isnan(x + y):
            points.append((group, x, y, float(np.nan_to_num(dx)), float(np.nan_to_num(dy))))
    if len(points) < 2:
        return []
    info, what = across.info, up.name or up.info.head
    xs, ys, dxs, dys = zip(*(point[1:] for point in points), strict=True)
    log = isinstance(info, tables.Quantity) and min(xs) > 0 and max(xs) > 5 * min(xs)
    wide = [True] * len(xs) if log else together(xs, dxs)
    shown = [a and b for a, b in zip(wide, together(ys, dys), strict=True)]
    inside = list(compress(points, shown)) or points
    low, high = span([p[1] for p in inside], [p[3] for p in inside])
    bottom, top = span([p[2] for p in inside], [p[4] for p in inside])
    if log:
        low = 0.7 * min(x - dx if dx < x else x for _, x, _, dx, _ in inside)
        high = 1.3 * max(x + dx for _, x, _, dx, _ in inside)
    if min(xs) >= 0:  # a bar may reach below what is possible
        low = max(low, 0)
    marks = [
        Mark(g, x, y) if point in inside else Mark(g, None, y, f" ({x:.1f}, {y:.3f})")
        for point in points
        for g, x, y, *_ in [point]
    ]
    charts: list[Figure] = []
    with _chart(charts, what, marks, f"{what} against {across.told}") as axes:
        if log:
            axes.set_xscale("log", nonpositive="clip")  # a bar may reach below zero
        axes.set(xlim=(low, high), ylim=(bottom, top))
        for group, x, y, dx, dy in inside:
            told = f"{group.label}: {across.told} {x:.2f}" + f" ± {dx:.2f}" * bool(dx)
            told = f"{told} {info.unit}".rstrip()
            told += f", {what} {y:.4f}" + f" ± {dy:.4f}" * bool(dy)
            look = _look(group, marker=marker(group.index), label=told)
            plots.trade_off(axes, x, y, dx, dy, **look)
        better = "→" if info.direction == "higher" else "←"
        unit = f", {info.unit}" * bool(info.unit)
        axes.set_xlabel(f"{across.name or across.told + unit} {better}", labelpad=2)
        axes.grid(axis="x", linewidth=0.8)
        _plain_ticks(axes.yaxis)
        if log:
            plots.log_ticks(axes, "x")
        else:
            _plain_ticks(axes.xaxis)
    return charts


def _plain_ticks(axis: Axis) -> None:
    """A few whole numbers, however close they are; huge ones with an exponent each."""
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    formatter = ScalarFormatter(useOffset=False)
    huge = max(map(abs, axis.get_view_interval())) >= HUGE
    axis.set_major_formatter("{x:g}" if huge else formatter)


def span(values: Sequence[float], spreads: Sequence[float]) -> tuple[float, float]:
    """The range of values with their bars, and some air.

    >>> low, high = span([1.0, 2.0], [0.5, 0.0])
    >>> 0 < low < 0.5 and 2 < high < 2.5
    True
    """
    pairs = list(zip(values, spreads, strict=True))
    low, high = min(v - s for v, s in pairs), max(v + s for v, s in pairs)
    air = max(0.08 * (high - low), 1e-3 * max(1e-3, abs(low), abs(high)))
    return low - air, high + air


def together(values: Sequence[float], spreads: Sequence[float]) -> list[bool]:
    """Which values lie together: one far off would press the others flat.

    >>> together([1.0, 2.0, 3.0, 2.0, 99.0], [0.0] * 5)
    [True, True, True, True, False]
    """
    first, _, third = quantiles(values, n=4, method="inclusive")
    reach = APART * max(third - first, 1e-9 * max(1.0, abs(first), abs(third)))
    low, high = first - reach, third + reach
    near = [low <= value <= high for value in values]
    while True:
        # Bars widen the range, and what is near it is drawn with its own bar.
        low, high = span(*zip(*compress(zip(values, spreads, strict=True), near), strict=True))
        room = (high - low) / 2
        wider = [low - room <= value <= high + room for value in values]
        if wider == near:
            return near
        near = wider


def detection(groups: Sequence[Group]) -> list[Panels]:
    """The distribution of the score that the AUROC is of, on the test set and on each other set."""
    found = []
    for name in tables.measured_on(groups, "ood"):
        pairs = [(g, pair) for g in groups if (pair := score_samples(g, name)) is not None]
        # One axis for all that have the usual score; a method's own, and a diverged one, has its own, and
        # so has a variance, which may be of any size.
        alike = [
            g.label for g, _ in pairs if tables.own_score(g.runs[0]) is None and not g.diverged
        ]
        if groups[0].runs[0].data.task == "regression":
            alike = []
        shared = [part for g, pair in pairs if g.label in alike for part in pair]
        drawn: Drawn = {}
        for group, pair in pairs:
            own = tables.own_score(group.runs[0])
            usual = tables.usual_score(group.runs[0])
            what = f"own score: {own}" if own else SCORE_LABELS[usual]
            parts = shared if group.label in alike else pair
            low, high = _score_limits(parts, positive=own is None)
            shown = {"limits": (low, high), "log": low > 0 and high > FAR * low}
            label = f"Out-of-distribution scores of {group.label}: {what}"
            with _panel(drawn, group, label, (180, 124), (26, 6, 146, 82)) as axes:
                plots.ood_scores(axes, *pair, **_look(group, **shown))
                axes.set_xlabel(what, labelpad=0)
        fewer = any(0 < len(_scored(g, name)) < len(g.runs) for g in groups)
        panels = _panels(groups, drawn, "auroc", "ood", name, fewer=fewer, about={"set": name})
        found += [panels] if panels is not None else []
    return found


def score_samples(group: Group, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return scores of a group on the test set and on the set ``name``, every seed with equal weight.

    Pixels have a histogram of the confidence: that gives the usual score, and says nothing of a method's own.
    """
    pairs = _scored(group, name)
    if not pairs:
        return None
    inside, outside = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if group.runs[0].data.task == "regression":  # scores are variances of the standardised target
        scale = group.runs[0].data.target_std
        return scale * np.sqrt(inside), scale * np.sqrt(outside)
    return inside, outside


def _scored(group: Group, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The scores on the test set and on the set ``name`` of every run that has both."""
    pairs = [(_scores(run, "test"), _scores(run, f"ood/{name}")) for run in group.runs]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _scores(run: Run, where: str) -> np.ndarray | None:
    """The scores of a set as evenly spaced quantiles, so that every seed has the same weight."""
    scores = run.arrays.get(f"{where}/scores")
    if scores is not None:
        return score_quantiles(scores)
    counts, edges = run.arrays.get(f"histogram/{where}"), run.arrays.get("histogram/edges")
    own = tables.own_score(run) or tables.usual_score(run)
    if counts is None or edges is None or own != "confidence" or not counts.sum():
        return None
    return score_quantiles(np.repeat(1 - edges[1:], counts))


def score_quantiles(scores: np.ndarray) -> np.ndarray:
    """Return ``QUANTILES`` evenly spaced quantiles, from the least to the largest score.

    >>> score_quantiles(np.arange(1001.0))[[0, 100, 200]].tolist()
    [0.0, 500.0, 1000.0]
    """
    return np.quantile(scores.astype(np.float64), np.linspace(0, 1, QUANTILES)).astype(np.float32)


def _score_limits(parts: Sequence[np.ndarray], positive: bool) -> tuple[float, float]:
    """The middle 99 % of all parts, over at most four powers of ten if scores are positive."""
    low = min(float(np.quantile(part, 0.005)) for part in parts)
    high = max(float(np.quantile(part, 0.995)) for part in parts)
    low = max(low, 1e-4 * high) if positive else low
    return low, high if high > low else low + 1e-6


class Predicted(NamedTuple):
    """Targets and predictions of some examples, all (N,): one input ``x``, or many and none shown."""

    targets: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    epistemic: np.ndarray
    x: np.ndarray | None = None


def predicted(run: Run, where: str) -> Predicted | None:
    """Read the predictions of a run; None if it has none, or predicts several numbers."""
    mean = run.arrays.get(f"{where}/mean")
    if mean is None or mean.size != len(mean):
        return None
    targets, mean, aleatoric, epistemic, inputs = (
        run.arrays[f"{where}/{name}"].reshape(-1).astype(np.float64)
        for name in (*PREDICTED, "inputs")
    )
    x = inputs if inputs.size == mean.size else None
    return Predicted(targets, mean, np.hypot(aleatoric, epistemic), epistemic, x)


def predictions(groups: Sequence[Group]) -> Panels | None:
    """Regression: the curve where there is one input, otherwise predictions against targets."""
    found = _predicted(groups)
    drawn: Drawn = {}
    if any(test.x is None for _, test in found):
        for group, test in found:
            label = f"Predictions of {group.label} against the targets"
            with _panel(drawn, group, label, (180, 176), (36, 8, 138, 130)) as axes:
                plots.parity(axes, *test[:3], **_look(group))
        return _panels(groups, drawn, "rmse", about={"curve": False})
    parts = {}
    for group, test in found:
        strange = (predicted(group.shown, f"ood/{name}") for name in group.shown.at("ood") or {})
        parts[group.label] = [test, *filter(None, strange)]
    everything = [part.targets for both in parts.values() for part in both]
    trained = False
    for group, test in found:
        targets, mean, std, epistemic, x = map(
            np.concatenate, zip(*parts[group.label], strict=True)
        )
        names, points = ("train/inputs", "train/targets"), None
        if group.shown in group.with_arrays(*names):
            points, trained = tuple(group.shown.arrays[name] for name in names), True
        label = f"Prediction of {group.label} along its input"
        with _panel(drawn, group, label, (300, 200), (38, 8, 254, 160)) as axes:
            look = _look(group, targets=targets, train=points)
            plots.regression_band(axes, x, mean, std, epistemic, **look)
            low, high = min(map(np.min, everything)), max(map(np.max, everything))
            axes.set_ylim(low - 0.25 * (high - low), high + 0.25 * (high - low))
            if len(parts[group.label]) > 1 and test.x is not None:
                grey = axes.xaxis.label.get_color()
                for edge in (test.x.min(), test.x.max()):
                    axes.axvline(edge, color=grey, linewidth=0.8, dashes=(4, 3))
    return _panels(groups, drawn, "nll", kind="wide", about={"curve": True, "train": trained})


def intervals(groups: Sequence[Group]) -> Panels | None:
    """Regression: are the intervals as wide as they should be?"""
    drawn: Drawn = {}
    for group, test in _predicted(groups):
        label = f"Calibration of the intervals of {group.label}"
        with _panel(drawn, group, label, (180, 184), (36, 18, 138, 128)) as axes:
            plots.interval_calibration(axes, *test[:3], **_look(group))
    return _panels(groups, drawn, "coverage")


def posterior(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One layer's fast weights under the learned posterior: their correlation, their spread.

    ``draw`` is the mean standard deviation of a draw, ``members`` that between members.
    """
    found = []
    for group in groups:
        arrays = group.shown.arrays
        if "posterior/correlation" not in arrays:
            continue
        matrix, mean, std = (arrays[f"posterior/{key}"] for key in ("correlation", "mean", "std"))
        layer = str(arrays["posterior/layer"])
        with drawing(300, 320, f"Correlation matrix of {layer}, {group.label}") as correlation:
            plots.posterior_correlation(correlation.axes(30, 8, 250, 250), matrix)
        # Many members need wide columns: their dots would cover each other.
        order = plots.similar_first(matrix)
        most = min(len(order), max(4, SHOWN_INPUTS * 4 // max(4, len(mean))))
        some = order[np.linspace(0, len(order) - 1, most).round().astype(int)]
        with drawing(440, 250, f"Factors of the members of {group.label}") as factors:
            axes = factors.axes(34, 18, 398, 196)
            plots.posterior_factors(axes, mean[:, some], std[:, some], color=colour(group.index))
        members = float(mean.std(0, ddof=1).mean()) if len(mean) > 1 else None
        figures = (Figure(correlation.svg), Figure(factors.svg))
        facts = {"inputs": len(matrix), "draw": float(std.mean()), "members": members}
        found.append({"group": group, "layer": layer, **facts, "figures": figures})
    return found


def shortened(label: str) -> str:
    """A row's name with the values of its settings alone, of switches those that are on.

    They tell rows apart; which settings they are of, the table says in the same order.

    >>> shortened("LP-BNN (train_decoder=yes, by_width=no, log_variance=-2)")
    'LP-BNN (train_decoder, -2)'
    >>> shortened("LP-BNN (train_decoder=no)"), shortened("Deep Ensembles")
    ('LP-BNN', 'Deep Ensembles')
    """

    def values(found: re.Match[str]) -> str:
        pairs = [part.partition("=") for part in found[1].split(", ")]
        told = [
            name if value == "yes" else value or name for name, _, value in pairs if value != "no"
        ]
        return f" ({', '.join(told)})" if told else ""

    return SETTINGS.sub(values, label)


@contextmanager
def _chart(charts: list[Figure], what: str, marks: Sequence[Mark], label: str) -> Iterator[Axes]:
    """Add a chart of several methods: ``what`` above its y axis, every method named at the right."""
    labels = [mark.group.label for mark in marks]
    if max(map(len, labels), default=0) >= LONGEST:  # all of them, so that they read alike
        labels = [shortened(label) for label in labels]
    names = [
        (name if len(name) < LONGEST else f"{name[: LONGEST - 2]}…") + mark.more
        for name, mark in zip(labels, marks, strict=True)
    ]
    beside = 37 + 5.8 * max(map(len, names), default=0)
    height = max(235, 14 * len(marks) + 70)
    with drawing(440, height, label) as d:
        axes = d.axes(40, 18, 400 - beside, height - 58)
        yield axes
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        plots.above(axes, what)
        places = [(mark.x, mark.y) for mark in marks]
        colours = [colour(mark.group.index) for mark in marks]
        plots.name_beside(axes, names, places, colours, [marker(m.group.index) for m in marks])
    charts.append(Figure(d.svg))


@contextmanager
def _panel(
    drawn: Drawn, group: Group, label: str, size: tuple[int, int], box: tuple[int, int, int, int]
) -> Iterator[Axes]:
    """Add the panel of one method, of a size in pixels, with axes in a box of it."""
    with drawing(*size, label) as d:
        yield d.axes(*box)
    drawn[group.label] = d.svg


def _panels(
    groups: Sequence[Group], drawn: Drawn, key: str, *where: str, **more: Any
) -> Panels | None:
    """A panel per method with its number; a method that has none is named below."""
    if not drawn:
        return None
    figures, missing = [], []
    for group in groups:
        cell = Cell.of(group.values(*(where or ("test",)), key))
        if group.label in drawn:
            number = f"{METRICS[key].title} {cell.text(METRICS[key])[0]}"
            figures.append(Figure(drawn[group.label], group, number))
        else:
            why = "not stored" if cell.values else "not measured"
            missing.append(f"{group.label} ({'diverged' if group.diverged else why})")
    note = f"Not shown: {', '.join(missing)}." if missing else ""
    return Panels(figures, note=note, **more)


def _look(group: Group, **more: Any) -> dict[str, Any]:
    """Colour and name of a method, for every function of ``lpbnn.plots``."""
    return {"color": colour(group.index), "label": group.label, **more}


def _line(group: Group) -> dict[str, Any]:
    """The same for a line without markers."""
    return _look(group, **line_style(group.index)) | {"marker": ""}


def _pooled(runs: Sequence[Run]) -> ReliabilityBins:
    """The bins of several seeds as one diagram."""
    edges, counts, accuracy, confidence = (
        np.nan_to_num([run.arrays[f"reliability/{name}"] for run in runs])
        for name in ("edges", "count", "accuracy", "confidence")
    )
    total = counts.sum(0)
    parts = [(values * counts).sum(0) / np.maximum(total, 1) for values in (confidence, accuracy)]
    return ReliabilityBins(*map(torch.from_numpy, (edges[0], *parts, total)))


def _shown(group: Group, info: MetricInfo, path: Sequence[str]) -> tuple[float, float]:
    """Mean and deviation over seeds as they are shown; NaN for what is not known."""
    cell = Cell.of(group.values(*path))
    factor = 100 if info.percent else 1
    mean, std = (np.nan if value is None else factor * value for value in (cell.mean, cell.std))
    return mean, std


def _severities(group: Group, info: MetricInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Severities (0 is the clean test set), means and deviations of a metric as it is shown."""
    levels = sorted(
        {int(n) for run in group.runs for n in run.at("corruption", "severities") or {}}
    )
    if not levels:
        return None
    paths = [("test", info.key)]
    paths += [("corruption", "severities", str(level), info.key) for level in levels]
    mean, std = np.array([_shown(group, info, path) for path in paths]).T
    return np.array([0, *levels]), mean, std


def _level(severity: float) -> str:
    return "clean" if severity == 0 else f"{severity:g}"


def _mean(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The mean over rows of several lengths of what is finite in each place, otherwise NaN."""
    table = np.ma.masked_invalid(list(zip_longest(*rows, fillvalue=np.nan)))
    return table.mean(1).filled(np.nan)


def _predicted(groups: Sequence[Group]) -> list[tuple[Group, Predicted]]:
    found = ((group, predicted(group.shown, "test")) for group in groups)
    return [(group, test) for group, test in found if test is not None]
