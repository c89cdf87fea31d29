"""The parts of the page that are figures: small ones, a panel per method, and two charts."""

from collections.abc import Mapping, Sequence

import numpy as np

from lpbnn.metrics.info import METRICS
from lpbnn.report import figures, html, pictures, regression, tables
from lpbnn.report.entries import SCORES, score_quantiles
from lpbnn.report.figures import Cumulative, ScoreAxis
from lpbnn.report.regression import Predicted
from lpbnn.report.runs import Group, Run
from lpbnn.report.tables import Cell

SHOWN_INPUTS = 20
FAR = 20  # largest over least score from which the axis is logarithmic
FEWER = " The numbers are means over all seeds, the drawings show those with predictions."


def calibration(groups: Sequence[Group]) -> str:
    """Reliability diagrams."""
    names = ("reliability/edges", "reliability/accuracy", "reliability/count")
    drawn = {
        group.label: figures.reliability(*_pooled(runs), group.index, group.label)
        for group in groups
        if (runs := group.with_arrays(*names))
    }
    return html.said(
        "A calibrated network's bars end on the dashed line: where they end below it, the network is "
        "surer than it is right, above it, right more often than it says. Pale bars hold fewer than "
        f"{figures.FEW} examples; the strip below shows where the confidences lie."
        + _drawn_from(groups, *names),
        _panels(groups, drawn, "ece"),
    )


def corruption(groups: Sequence[Group]) -> str:
    """Accuracy and ECE against severity."""
    charts = []
    for key, percent in (("accuracy", True), ("ece", False)):
        lines = [line for group in groups if (line := _line(group, key)) is not None]
        if not lines:
            return ""
        info = METRICS[key]
        title = f"{info.title}{f', {info.unit}' * bool(info.unit)} {info.arrow}"
        charts.append(html.chart(figures.severities(lines, title, percent)))
    return html.said(
        "The stronger the corruption, the less accurate every network is; one that knows it keeps "
        "its calibration error low to the right. Means over the corruptions; bands are one standard "
        "deviation over seeds; “clean” is the whole test set.",
        html.panels(charts, "charts"),
    )


def detection(groups: Sequence[Group]) -> str:
    """The distribution of the score that the AUROC is of, on the test set and on each other set."""
    body = ""
    for name in tables.measured_on(groups, "ood"):
        found = {g.label: (g, pair) for g in groups if (pair := score_curves(g, name)) is not None}
        axes = _score_axes(found)
        drawn = {
            label: figures.detection(*pair, axes[label], g.index, label)
            for label, (g, pair) in found.items()
        }
        seeds = {g.label: len(_scored(g, name)) for g in groups}
        fewer = any(0 < seeds[g.label] < len(g.runs) for g in groups)
        body += html.said(
            "The share of examples whose out-of-distribution score, the one that the AUROC is of, is at "
            "most the value below: <span class='swatch'></span> filled is the test set, <span "
            f"class='stroke'></span> the line is {html.esc(name)}, which no network was trained on. The "
            "further the line lies to the right of the filled part, the better." + FEWER * fewer,
            _panels(groups, drawn, "auroc", "ood", name),
        )
    return body


def score_curves(group: Group, name: str) -> tuple[Cumulative, Cumulative] | None:
    """Return the distributions of a group's score on the test set and on the set ``name``, seeds pooled.

    A record that was kept without its scores has a histogram of the confidence: that gives the usual score,
    and says nothing of a method's own.
    """
    runs = _scored(group, name)
    if not runs:
        return None
    pairs = [[_scores(run, where) for run in runs] for where in ("test", f"ood/{name}")]
    if all(scores is not None for part in pairs for scores in part):
        inside, outside = (Cumulative.of(*(s for s in part if s is not None)) for part in pairs)
        if group.runs[0].data.task != "regression":
            return inside, outside
        scale = group.runs[0].data.target_std  # scores are variances of the standardised target
        deviations = [part.mapped(lambda x: scale * np.sqrt(x)) for part in (inside, outside)]
        return deviations[0], deviations[1]
    edges = runs[0].arrays["histogram/edges"]
    counts = (
        np.sum([run.arrays[f"histogram/{where}"] for run in runs], 0)
        for where in ("test", f"ood/{name}")
    )
    inside, outside = (Cumulative.of_confidences(edges, count) for count in counts)
    return inside, outside


def _scores(run: Run, where: str) -> np.ndarray | None:
    """The scores of a set as evenly spaced quantiles, so that every seed has the same weight."""
    scores = run.arrays.get(f"{where}{SCORES}")
    return run.arrays.get(f"quantiles/{where}") if scores is None else score_quantiles(scores)


def _scored(group: Group, name: str) -> list[Run]:
    """The runs whose score can be drawn: with its values, otherwise with confidences that give it."""
    places = ("test", f"ood/{name}")
    exact = [run for run in group.runs if all(_scores(run, where) is not None for where in places)]
    if exact or tables.own_score(group) is not None:
        return exact
    return group.with_arrays("histogram/edges", *(f"histogram/{where}" for where in places))


def _score_axes(
    found: Mapping[str, tuple[Group, tuple[Cumulative, Cumulative]]],
) -> dict[str, ScoreAxis]:
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
        low, high = min(part.at(0.005) for part in parts), max(part.at(0.995) for part in parts)
        name = f"own score: {own}" if own else "1 - largest probability"
        if group.runs[0].data.task == "regression":
            name = "predicted standard deviation"
        low = max(low, 1e-4 * high) if own is None else low
        high = high if high > low else low + 1e-6
        axes[label] = ScoreAxis(name, low, high, log=low > 0 and high > FAR * low)
    return axes


def predictions(groups: Sequence[Group]) -> str:
    """Regression: the curve where there is one input, otherwise predictions against targets."""
    found = _predicted(groups)
    if not found:
        return ""
    if any(test.x is None for _, test in found):
        drawn = {g.label: regression.parity(test, g.index, g.label) for g, test in found}
        return html.said(
            "Points on the dashed line are right; nearly all 95 % intervals should reach it.",
            _panels(groups, drawn, "rmse"),
        )
    outside = {g.label: _outside(g.shown) for g, _ in found}
    targets = [part.targets for g, test in found for part in (test, *outside[g.label])]
    low, high = float(np.concatenate(targets).min()), float(np.concatenate(targets).max())
    limits = (low - 0.25 * (high - low), high + 0.25 * (high - low))
    drawn = {
        g.label: regression.curve(
            test, outside[g.label], limits, g.index, g.label, _training(g.shown)
        )
        for g, test in found
    }
    points = " Large dots are the training points, small ones test targets."
    return html.said(
        "The bands should widen outside the dashed lines, where there was no training data: pale is "
        "the 95 % interval, darker the part of it that the members disagree about."
        + points
        * any(_training(g.shown) is not None for g, _ in found),
        _panels(groups, drawn, "nll", kind="wide"),
    )


def intervals(groups: Sequence[Group]) -> str:
    """Regression: are the intervals as wide as they should be?"""
    found = _predicted(groups)
    drawn = {g.label: regression.intervals(test, g.index, g.label) for g, test in found}
    return html.said(
        "Above the dashed line the intervals are wider than they need be, below it too narrow; they "
        "are those of a Gaussian with the predicted spread.",
        _panels(groups, drawn, "coverage"),
    )


def posterior(groups: Sequence[Group]) -> str:
    """One layer's fast weights under the learned posterior: their correlation, their spread."""
    having = [group for group in groups if "posterior/correlation" in group.shown.arrays]
    return html.said(
        "Left, the correlation of every two inputs' factors r̂ (first member): blocks are inputs that vary "
        "together, which a mean-field posterior cannot say. Inputs are in the order of a hierarchical "
        "clustering, the same along both axes; the scale ends where 99 % of the pairs do. Right, some of "
        "these inputs: dots apart are members that differ, bars are one standard deviation of a draw.",
        "".join(map(_posterior, having)),
    )


def _posterior(group: Group) -> str:
    arrays = group.shown.arrays
    matrix, mean, std = (arrays[f"posterior/{key}"] for key in ("correlation", "mean", "std"))
    order = pictures.similar_first(matrix)
    # Many members need wide columns: their dots would cover each other.
    most = min(len(order), max(4, SHOWN_INPUTS * 4 // max(4, len(mean))))
    some = order[np.linspace(0, len(order) - 1, most).round().astype(int)]
    layer = str(arrays["posterior/layer"])
    facts = f"<code>{html.esc(layer)}</code>, {len(matrix)} inputs; deviation of a draw "
    facts += f"{float(std.mean()):.3f}"
    if len(mean) > 1:
        facts += f", between members {float(mean.std(0, ddof=1).mean()):.3f}"
    top = pictures.strongest(matrix)
    picture = pictures.data_uri(pictures.correlation(matrix[order][:, order], top))
    image = html.image(picture, f"correlation matrix of {layer}", pixelated=True, width=250)
    drawn = html.matrix(image, len(matrix), top)
    chart = figures.posterior(mean[:, some], std[:, some], group.index, group.label)
    return (
        f'<p class="facts">{html.name(group.label, group.index)} {facts}</p>'
        f'<div class="posterior">{drawn}{html.chart(chart)}</div>'
    )


def _panels(
    groups: Sequence[Group], drawn: Mapping[str, str], key: str, *where: str, kind: str = "small"
) -> str:
    """A panel per method with its number; a method that has none is named below."""
    if not drawn:
        return ""
    parts, missing = [], []
    for group in groups:
        cell = Cell.of(group.values(*(where or ("test",)), key))
        if group.label in drawn:
            number = f"{METRICS[key].title} {cell.text(METRICS[key])[0]}"
            parts.append(html.panel(group.label, group.index, drawn[group.label], number))
        else:
            why = "not stored" if cell.values else "not measured"
            missing.append(f"{group.label} ({'diverged' if group.diverged else why})")
    note = f"Not shown: {', '.join(missing)}." if missing else ""
    return html.panels(parts, kind) + (f'<p class="warning">{html.esc(note)}</p>' if note else "")


def _drawn_from(groups: Sequence[Group], *names: str) -> str:
    """A figure of fewer seeds than its number is a mean of says so: of kept runs, one has arrays."""
    fewer = any(0 < len(g.with_arrays(*names)) < len(g.runs) for g in groups)
    return FEWER * fewer


def _pooled(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges, accuracies and counts of several seeds as one diagram."""
    counts = np.stack([run.arrays["reliability/count"] for run in runs])
    right = np.nan_to_num(np.stack([run.arrays["reliability/accuracy"] for run in runs])) * counts
    total = counts.sum(0)
    return runs[0].arrays["reliability/edges"], right.sum(0) / np.maximum(total, 1), total


def _line(group: Group, key: str) -> figures.Line | None:
    """A metric along severities; 0 is the clean test set."""
    levels = sorted(
        {int(n) for run in group.runs for n in run.at("corruption", "severities") or {}}
    )
    if not levels:
        return None
    cells = [Cell.of(group.values("test", key))]
    cells += [Cell.of(group.values("corruption", "severities", str(n), key)) for n in levels]
    mean = np.array([np.nan if cell.mean is None else cell.mean for cell in cells])
    std = np.array([np.nan if cell.std is None else cell.std for cell in cells])
    trained = len(group.diverged) == 0
    return figures.Line(group.label, group.index, np.array([0, *levels]), mean, std, trained)


def _predicted(groups: Sequence[Group]) -> list[tuple[Group, Predicted]]:
    found = ((group, Predicted.of(group.shown.arrays, "test")) for group in groups)
    return [(group, test) for group, test in found if test is not None]


def _training(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Inputs and targets of the training set, where the run has stored them."""
    inputs, targets = (run.arrays.get(f"train/{name}") for name in ("inputs", "targets"))
    return None if inputs is None or targets is None else (inputs, targets)


def _outside(run: Run) -> list[Predicted]:
    found = (Predicted.of(run.arrays, f"ood/{name}") for name in run.at("ood") or {})
    return [part for part in found if part is not None]
