"""The figures of the page: what ``lpbnn.plots`` draws, of the runs of every method, as SVG."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.axes import Axes

from lpbnn import plots
from lpbnn.metrics.calibration import ReliabilityBins
from lpbnn.metrics.info import METRICS, MetricInfo
from lpbnn.report import tables
from lpbnn.report.colours import line_style, marker
from lpbnn.report.entries import SCORES, score_quantiles
from lpbnn.report.runs import Group, Run
from lpbnn.report.svg import colour, drawing
from lpbnn.report.tables import COSTS, Cell

FAR = 20  # largest over least value from which an axis is logarithmic
SHOWN_INPUTS = 20  # of a posterior's layer
LONGEST = 34  # letters of a name beside a chart
SETTINGS = re.compile(r" \((.*)\)$")


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


def calibration(groups: Sequence[Group]) -> Panels | None:
    """Reliability diagrams, seeds pooled."""
    names = [f"reliability/{name}" for name in ("edges", "count", "accuracy", "confidence")]
    drawn: dict[str, Markup] = {}
    for group in groups:
        if runs := group.with_arrays(*names):
            with drawing(204, 204, f"Reliability diagram of {group.label}") as d:
                axes = d.axes(26, 16, 170, 130)
                look = {"color": colour(group.index), "label": group.label}
                plots.reliability(axes, _pooled(runs), **look)
            drawn[group.label] = d.svg
    fewer = any(0 < len(g.with_arrays(*names)) < len(g.runs) for g in groups)
    return _panels(groups, drawn, "ece", fewer=fewer)


def risk_coverage(groups: Sequence[Group]) -> list[Figure]:
    """The error of the most certain share of the test set, all methods in one chart."""
    curves = {}
    for group in groups:
        runs = group.with_arrays("risk/coverage", "risk/risk")
        if runs and not group.diverged:
            coverage = runs[0].arrays["risk/coverage"]
            parts = [
                run.arrays["risk/risk"]
                for run in runs
                if len(run.arrays["risk/risk"]) == len(coverage)
            ]
            curves[group.label] = (group, coverage, np.mean(parts, 0))
    if not curves:
        return []
    ends = [Mark(g, 100.0, 100 * float(risk[-1])) for g, _, risk in curves.values()]

    def draw(axes: Axes) -> None:
        for group, coverage, risk in curves.values():
            look = {**line_style(group.index), "marker": "", "label": group.label}
            plots.risk_coverage(axes, coverage, risk, color=colour(group.index), **look)
        wrong = [float(coverage[risk > 0].min(initial=1)) for _, coverage, risk in curves.values()]
        axes.set_xlim(10 * int(10 * min(wrong) - 1e-6), 100)  # from where anybody errs
        worst = max(float(risk[coverage > 0.1].max()) for _, coverage, risk in curves.values())
        axes.set_ylim(0, 105 * max(worst, 1e-4))

    return [_chart("errors among them, %", ends, draw, "Errors of the most certain examples")]


def training(groups: Sequence[Group]) -> list[Figure]:
    """The logged loss of every epoch, mean over seeds, and a validation metric where there is one."""
    charts = []
    for key, what in (("log/nll", "training NLL"), ("log/val_nll", "validation NLL")):
        curves = {}
        for group in groups:
            rows = [_log(run, key) for run in group.runs]
            rows = [row for row in rows if len(row)]
            if rows:
                epochs = max(map(len, rows))
                table = np.full((len(rows), epochs), np.nan)
                for place, row in zip(table, rows, strict=True):
                    place[: len(row)] = row
                curves[group.label] = (group, _nan_mean(table))
        if not curves or max(len(mean) for _, mean in curves.values()) < 2:
            continue
        ends = [
            Mark(g, float(len(m)), float(m[-1])) for g, m in curves.values() if np.isfinite(m[-1])
        ]
        values = np.concatenate([mean for _, mean in curves.values()])
        values = values[np.isfinite(values)]
        log = values.size > 0 and values.min() > 0 and values.max() > FAR * values.min()

        def draw(axes: Axes, curves: Any = curves, log: bool = log) -> None:
            for group, mean in curves.values():
                look = {**line_style(group.index), "marker": "", "label": group.label}
                x = np.arange(1, len(mean) + 1)
                plots.curve(axes, x, mean, color=colour(group.index), **look)
            axes.set_xlabel("epoch", labelpad=2)
            if log:
                axes.set_yscale("log")
                axes.minorticks_off()
                axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.locator_params(axis="x", nbins=6, integer=True)

        charts.append(_chart(what, ends, draw, f"{what} by epochs"))
    return charts


def corruption(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy and ECE against severity."""
    charts = []
    for key in ("accuracy", "ece"):
        info = METRICS[key]
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
        what = _what(info)

        def draw(
            axes: Axes, lines: Any = lines, limits: Any = (low, high), what: str = what
        ) -> None:
            for group, x, mean, std in lines:
                look = {**line_style(group.index), "label": f"{group.label}, {what}"}
                look |= {"color": colour(group.index), "names": [_level(level) for level in x]}
                plots.curve(axes, x, mean, std, **look)
            levels = sorted({float(level) for _, x, _, _ in lines for level in x})
            axes.set_xticks(levels, [_level(level) for level in levels])
            axes.set_xlabel("severity", labelpad=2)
            axes.margins(x=0.02)
            axes.set_ylim(*limits)

        charts.append(_chart(what, ends, draw, f"{what} against the severity of the corruption"))
    return charts


def trade_offs(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy against ECE, the AUROC of each set never seen, and cE; RMSE against NLL."""
    regression = groups[0].runs[0].data.task == "regression"
    key, first = ("rmse", "nll") if regression else ("accuracy", "ece")
    across = (METRICS[key], ("test", key))
    measured = [("", METRICS[first], ("test", first))]
    measured += [
        (tables.PIXELS.get(name, name), METRICS["auroc"], ("ood", name, "auroc"))
        for name in tables.measured_on(groups, "ood")
    ]
    measured.append(("", METRICS["ce"], ("corruption", "ce")))
    charts = (trade_off(groups, across, (info, path), above=name) for name, info, path in measured)
    return [chart for chart in charts if chart is not None]


def costs(groups: Sequence[Group]) -> list[Figure]:
    """The main metric against the time of training, of a prediction, and against parameters."""
    key = next(
        (k for k in ("miou", "accuracy", "rmse") if any(g.values("test", k)[0] for g in groups)), ""
    )
    if not key:
        return []
    paths = {
        "train/seconds": "training time, s",
        "cost/predict_seconds_per_1000": "prediction of 1,000 examples, s",
    }
    charts = (
        trade_off(
            groups, (COSTS[path], tuple(path.split("/"))), (METRICS[key], ("test", key)), along
        )
        for path, along in paths.items()
    )
    return [chart for chart in charts if chart is not None]


Measured = tuple[MetricInfo, tuple[str, ...]]


def trade_off(
    groups: Sequence[Group], across: Measured, up: Measured, along: str = "", above: str = ""
) -> Figure | None:
    """One number against another, every method that trained a point; None of fewer than two.

    Args:
        groups: the methods.
        across: metric and path of the x axis.
        up: the same of the y axis.
        along: name of the x axis; empty for that of its metric.
        above: the set that the y axis is measured on.
    """
    points = [(g, *found) for g in groups if (found := _point(g, across, up)) is not None]
    if len(points) < 2:
        return None
    what = f"{above} {_what(up[0])}".strip()
    name = across[0].title.lower() if across[0].title.istitle() else across[0].title
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    log = isinstance(across[0], tables.Quantity) and min(xs) > 0 and max(xs) > 5 * min(xs)
    low, high = limits(xs, [p[3] for p in points])
    if log:
        low, high = 0.7 * min(x - dx if dx < x else x for _, x, _, dx, _ in points), 1.3 * max(xs)
    bottom, top = limits(ys, [p[4] for p in points])
    marks = []
    for group, x, y, _, _ in points:
        inside = low <= x <= high and bottom <= y <= top
        more = "" if inside else f" ({x:.1f}, {y:.3f})"
        marks.append(Mark(group, x if inside else None, y, more))

    def draw(axes: Axes) -> None:
        axes.set_xscale("log" if log else "linear")
        axes.set(xlim=(low, high), ylim=(bottom, top))
        for group, x, y, dx, dy in points:
            if not (low <= x <= high and bottom <= y <= top):
                continue
            told = f"{group.label}: {along or name} {x:.2f}" + f" ± {dx:.2f}" * bool(dx)
            told = f"{told} {across[0].unit}".rstrip()
            told += f", {what} {y:.4f}" + f" ± {dy:.4f}" * bool(dy)
            look = {"color": colour(group.index), "marker": marker(group.index), "label": told}
            plots.trade_off(axes, x, y, dx if dx < x else 0.0, dy, **look)
        better = "→" if across[0].direction == "higher" else "←"
        unit = f", {across[0].unit}" * bool(across[0].unit)
        axes.set_xlabel(f"{along or name + unit} {better}", labelpad=2)
        axes.grid(axis="x", linewidth=0.8)
        if log:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.minorticks_off()
            steps = (1, 2, 5) if high < 30 * low else (1,)
            ticks = [step * 10.0**power for power in range(-4, 8) for step in steps]
            axes.set_xticks([tick for tick in ticks if low <= tick <= high])
            axes.locator_params(axis="y", nbins=5)
        else:
            axes.locator_params(nbins=5)
            axes.ticklabel_format(useOffset=False)  # whole numbers, however close they are

    return _chart(what, marks, draw, f"{what} against {along or name}")


def limits(values: Sequence[float], spreads: Sequence[float] = ()) -> tuple[float, float]:
    """The range of what lies together with its bars: one far off would press the others flat.

    >>> low, high = limits([1.0, 2.0, 3.0, 2.0, 99.0])
    >>> low < 1 and 3 < high < 4
    True
    >>> low, high = limits([1.0, 2.0], [0.5, 0.0])  # whole bars
    >>> low < 0.5
    True
    """
    first, _, third = quantiles(values, n=4, method="inclusive")
    reach = 3 * max(third - first, 1e-9)
    low, high = first - reach, third + reach
    pairs = list(zip(values, spreads or [0.0] * len(values), strict=True))
    near: list[tuple[float, float]] = []
    # A bar may widen the range to a further point, whose own bar is then drawn whole too.
    while len(more := [(v, s) for v, s in pairs if low <= v <= high]) > len(near):
        near = more
        ends = [end for value, spread in near for end in (value - spread, value + spread)]
        air = max(0.08 * (max(ends) - min(ends)), 1e-3 * max(1e-3, *map(abs, ends)))
        low, high = min(ends) - air, max(ends) + air
    return low, high


def detection(groups: Sequence[Group]) -> list[Panels]:
    """The distribution of the score that the AUROC is of, on the test set and on each other set."""
    found = []
    for name in tables.measured_on(groups, "ood"):
        pairs = {g.label: (g, pair) for g in groups if (pair := score_samples(g, name)) is not None}
        look = _score_axes(pairs)
        drawn: dict[str, Markup] = {}
        for label, (group, pair) in pairs.items():
            what, shown = look[label]
            with drawing(204, 128, f"Out-of-distribution scores of {label}: {what}") as d:
                axes = d.axes(26, 6, 170, 86)
                plots.ood_scores(axes, *pair, color=colour(group.index), label=label, **shown)
                axes.set_xlabel(what, labelpad=0)
            drawn[label] = d.svg
        fewer = any(0 < len(_scored(g, name)) < len(g.runs) for g in groups)
        panels = _panels(groups, drawn, "auroc", "ood", name, fewer=fewer, about={"set": name})
        if panels is not None:
            found.append(panels)
    return found


def score_samples(group: Group, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return scores of a group on the test set and on the set ``name``, every seed with equal weight.

    A record that was kept without its scores has a histogram of the confidence: that gives the usual score,
    and says nothing of a method's own.
    """
    runs = _scored(group, name)
    if not runs:
        return None
    inside, outside = (
        np.concatenate([s for run in runs if (s := _scores(run, where)) is not None])
        for where in ("test", f"ood/{name}")
    )
    if group.runs[0].data.task == "regression":  # scores are variances of the standardised target
        scale = group.runs[0].data.target_std
        return scale * np.sqrt(inside), scale * np.sqrt(outside)
    return inside, outside


def _scores(run: Run, where: str) -> np.ndarray | None:
    """The scores of a set as evenly spaced quantiles, so that every seed has the same weight."""
    scores = run.arrays.get(f"{where}{SCORES}")
    if scores is not None:
        return score_quantiles(scores)
    if f"quantiles/{where}" in run.arrays:
        return run.arrays[f"quantiles/{where}"]
    counts, edges = run.arrays.get(f"histogram/{where}"), run.arrays.get("histogram/edges")
    own = run.settings.get("method_options.score", "confidence") != "confidence"
    if counts is None or edges is None or own or not counts.sum():
        return None
    return score_quantiles(np.repeat(1 - edges[1:], counts))


def _scored(group: Group, name: str) -> list[Run]:
    """The runs whose score can be drawn."""
    places = ("test", f"ood/{name}")
    return [run for run in group.runs if all(_scores(run, p) is not None for p in places)]


def _score_axes(
    found: Mapping[str, tuple[Group, tuple[np.ndarray, np.ndarray]]],
) -> dict[str, tuple[str, dict[str, Any]]]:
    """One axis for all that have the usual score; a method's own, and a diverged one, has its own."""
    alike = {
        label: pair
        for label, (group, pair) in found.items()
        if tables.own_score(group) is None and not group.diverged
    }
    axes = {}
    for label, (group, pair) in found.items():
        own = tables.own_score(group)
        parts = [part for both in (alike.values() if label in alike else [pair]) for part in both]
        low = min(float(np.quantile(part, 0.005)) for part in parts)
        high = max(float(np.quantile(part, 0.995)) for part in parts)
        name = f"own score: {own}" if own else "1 - largest probability"
        if group.runs[0].data.task == "regression":
            name = "predicted standard deviation"
        low = max(low, 1e-4 * high) if own is None else low
        high = high if high > low else low + 1e-6
        axes[label] = (name, {"limits": (low, high), "log": low > 0 and high > FAR * low})
    return axes


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
    names = ("targets", "mean", "aleatoric_std", "epistemic_std")
    targets, mean, aleatoric, epistemic = (
        run.arrays[f"{where}/{name}"].reshape(-1).astype(np.float64) for name in names
    )
    inputs = run.arrays[f"{where}/inputs"]
    x = inputs.reshape(-1).astype(np.float64) if inputs.size == len(inputs) else None
    return Predicted(targets, mean, np.hypot(aleatoric, epistemic), epistemic, x)


def predictions(groups: Sequence[Group]) -> Panels | None:
    """Regression: the curve where there is one input, otherwise predictions against targets."""
    found = _predicted(groups)
    if not found:
        return None
    drawn: dict[str, Markup] = {}
    if any(test.x is None for _, test in found):
        for group, test in found:
            with drawing(204, 196, f"Predictions of {group.label} against the targets") as d:
                look: dict[str, Any] = {"color": colour(group.index), "label": group.label}
                plots.parity(d.axes(36, 8, 160, 150), *test[:3], **look)
            drawn[group.label] = d.svg
        return _panels(groups, drawn, "rmse", about={"curve": False})
    outside = {
        group.label: [
            part
            for name in group.shown.at("ood") or {}
            if (part := predicted(group.shown, f"ood/{name}"))
        ]
        for group, _ in found
    }
    targets = np.concatenate(
        [part.targets for g, test in found for part in (test, *outside[g.label])]
    )
    air = 0.25 * float(np.ptp(targets))
    trained = False
    for group, test in found:
        parts = (test, *outside[group.label])
        x, mean, std, epistemic, shown = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("x", "mean", "std", "epistemic", "targets")
        )
        train = [group.shown.arrays.get(f"train/{name}") for name in ("inputs", "targets")]
        points = None if train[0] is None or train[1] is None else (train[0], train[1])
        trained |= points is not None
        with drawing(300, 200, f"Prediction of {group.label} along its input") as d:
            axes = d.axes(38, 8, 254, 160)
            look = {"color": colour(group.index), "label": group.label, "train": points}
            plots.regression_band(axes, x, mean, std, epistemic, targets=shown, **look)
            axes.set_ylim(float(targets.min()) - air, float(targets.max()) + air)
            if len(parts) > 1 and test.x is not None:
                for edge in (test.x.min(), test.x.max()):
                    axes.axvline(
                        edge, color=axes.xaxis.label.get_color(), linewidth=0.8, dashes=(4, 3)
                    )
        drawn[group.label] = d.svg
    return _panels(groups, drawn, "nll", kind="wide", about={"curve": True, "train": trained})


def intervals(groups: Sequence[Group]) -> Panels | None:
    """Regression: are the intervals as wide as they should be?"""
    drawn: dict[str, Markup] = {}
    for group, test in _predicted(groups):
        with drawing(204, 196, f"Calibration of the intervals of {group.label}") as d:
            look = {"color": colour(group.index), "label": group.label}
            plots.interval_calibration(d.axes(36, 18, 160, 140), *test[:3], **look)
        drawn[group.label] = d.svg
    return _panels(groups, drawn, "coverage")


class Posterior(NamedTuple):
    """The learned posterior of one layer of a method."""

    group: Group
    layer: str
    inputs: int
    draw: float
    """Mean standard deviation of a draw."""
    members: float | None
    """Mean standard deviation between members."""
    figures: Sequence[Figure]


def posterior(groups: Sequence[Group]) -> list[Posterior]:
    """One layer's fast weights under the learned posterior: their correlation, their spread."""
    found = []
    for group in groups:
        arrays = group.shown.arrays
        if "posterior/correlation" not in arrays:
            continue
        matrix, mean, std = (arrays[f"posterior/{key}"] for key in ("correlation", "mean", "std"))
        layer = str(arrays["posterior/layer"])
        with drawing(300, 320, f"Correlation matrix of {layer}") as correlation:
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
        found.append(Posterior(group, layer, len(matrix), float(std.mean()), members, figures))
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


def _chart(what: str, marks: Sequence[Mark], draw: Callable[[Axes], None], label: str) -> Figure:
    """A chart of several methods: ``what`` above its y axis, every method named at the right."""
    names = []
    for mark in marks:
        name = mark.group.label if len(mark.group.label) < LONGEST else shortened(mark.group.label)
        names.append((name if len(name) < LONGEST else f"{name[: LONGEST - 2]}…") + mark.more)
    beside = 37 + 5.8 * max(map(len, names), default=0)
    height = max(235, 14 * len(marks) + 70)
    with drawing(440, height, label) as d:
        axes = d.axes(40, 18, 400 - beside, height - 58)
        draw(axes)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        plots.above(axes, what)
        places = [(mark.x, mark.y) for mark in marks]
        colours = [colour(mark.group.index) for mark in marks]
        plots.name_beside(axes, names, places, colours, [marker(m.group.index) for m in marks])
    return Figure(d.svg)


def _what(info: MetricInfo) -> str:
    return f"{info.title}{f', {info.unit}' * bool(info.unit)} {info.arrow}"


def _panels(
    groups: Sequence[Group], drawn: Mapping[str, Markup], key: str, *where: str, **more: Any
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


def _pooled(runs: Sequence[Run]) -> ReliabilityBins:
    """The bins of several seeds as one diagram."""
    edges, counts, accuracy, confidence = (
        np.nan_to_num([run.arrays[f"reliability/{name}"] for run in runs])
        for name in ("edges", "count", "accuracy", "confidence")
    )
    total = counts.sum(0)
    parts = [(values * counts).sum(0) / np.maximum(total, 1) for values in (confidence, accuracy)]
    return ReliabilityBins(*map(torch.from_numpy, (edges[0], *parts, total)))


def _severities(group: Group, info: MetricInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Severities (0 is the clean test set), means and deviations of a metric as it is shown."""
    levels = sorted(
        {int(n) for run in group.runs for n in run.at("corruption", "severities") or {}}
    )
    if not levels:
        return None
    cells = [Cell.of(group.values("test", info.key))]
    cells += [Cell.of(group.values("corruption", "severities", str(n), info.key)) for n in levels]
    factor = 100 if info.percent else 1
    mean = np.array([np.nan if cell.mean is None else factor * cell.mean for cell in cells])
    std = np.array([np.nan if cell.std is None else factor * cell.std for cell in cells])
    return np.array([0, *levels]), mean, std


def _level(severity: float) -> str:
    return "clean" if severity == 0 else f"{severity:g}"


def _point(
    group: Group, across: Measured, up: Measured
) -> tuple[float, float, float, float] | None:
    """Means and deviations (0 of one run), as they are shown."""
    if group.diverged:
        return None
    cells = [Cell.of(group.values(*path)) for _, path in (across, up)]
    if any(cell.mean is None for cell in cells):
        return None
    factors = [100 if info.percent else 1 for info, _ in (across, up)]
    x, y = (factor * (cell.mean or 0.0) for factor, cell in zip(factors, cells, strict=True))
    dx, dy = (factor * (cell.std or 0.0) for factor, cell in zip(factors, cells, strict=True))
    return x, y, dx, dy


def _log(run: Run, key: str) -> np.ndarray:
    """A column of the log; the loss where the log has no NLL of its own."""
    found = run.arrays.get(key)
    if found is None and key == "log/nll":
        found = run.arrays.get("log/loss")
    return np.zeros(0) if found is None else found


def _nan_mean(table: np.ndarray) -> np.ndarray:
    known = np.isfinite(table)
    total = np.where(known, table, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _predicted(groups: Iterable[Group]) -> list[tuple[Group, Predicted]]:
    found = ((group, predicted(group.shown, "test")) for group in groups)
    return [(group, test) for group, test in found if test is not None]
