"""The one table model: rows of runs, columns of metrics, mean and standard deviation over seeds.

``comparison``, ``severity``, ``diversity``, ``uncertainty`` and ``cost`` make a ``Table``;
``lpbnn.report.formats`` writes it to the terminal and as Markdown, LaTeX, CSV and a DataFrame, and the
template ``table.html`` as HTML.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from lpbnn.metric_info import HUGE, METRICS, MetricInfo
from lpbnn.report.runs import (
    BASELINE,
    Group,
    Run,
    by_data,
    counted,
    grouped,
    listed,
    plural,
    read_runs,
)
from lpbnn.training.rundir import RunDir

Mark = Literal["", "best", "second"]
TEST = ("miou", "accuracy", "nll", "rmse", "coverage", "ece", "brier")
MAIN = {"classification": "accuracy", "segmentation": "miou", "regression": "rmse"}
DETECTION = ("auroc", "aupr", "fpr95")
DIVERSITY = ("ratio_error", "q_statistic", "correlation", "disagreement")
PIXELS = {"pixels": "anomalies: per image", "pixels_pooled": "anomalies: pooled"}
ALL_SEVERITIES = [1, 2, 3, 4, 5]
RULE = (
    "rows share a mark if their mean ± standard deviation over seeds overlaps that of the best row, or the "
    "best of the remaining rows. A single run is given the median deviation of its column. If no row has "
    "several seeds, the digits shown decide."
)


Scale = tuple[tuple[float, float, str], ...]  # (from here on, one unit, its name)
PLAIN: Scale = ((0, 1, ""),)
COUNT: Scale = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (0, 1, ""))
SECONDS: Scale = ((7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
BYTES: Scale = ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0, 1e3, "kB"))


@dataclass(frozen=True)
class Quantity(MetricInfo):
    """A number without a good side; with a ``scale`` it is shown in three digits and its unit."""

    scale: Scale = ()

    @property
    def arrow(self) -> str:
        return ""

    def format(self, value: float) -> str:
        """With its unit.

        >>> parameters, seconds = COSTS["cost/parameters"], COSTS["train/seconds"]
        >>> parameters.format(36_546_980), parameters.format(310_000), seconds.format(95_400)
        ('36.5 M', '310 k', '26.5 h')
        """
        if not self.scale:
            return f"{value:,.0f}" if value >= 1000 else super().format(value)
        one, unit = next((one, unit) for least, one, unit in self.scale if value >= least)
        number = value / one
        digits = ".3g" if number >= HUGE else ".0f" if number >= 100 else "#.3g"
        return f"{number:{digits}} {unit}".rstrip()

    def spread(self, mean: float, std: float) -> str:
        """A cost's spread as a share of it, none where there is none.

        >>> COSTS["train/seconds"].spread(20, 1), COSTS["cost/parameters"].spread(310_000, 0)
        ('±5 %', '')
        """
        if not self.scale:
            return f"±{self.format(std)}"
        return f"±{100 * std / mean:.0f} %" if std > 0 else ""


COSTS: dict[str, Quantity] = {
    key: Quantity(key, title, "lower", convention, scale=scale)
    for key, title, convention, scale in (
        ("cost/parameters", "Parameters", "all that is trained, of all members", COUNT),
        ("train/seconds", "Training", "wall-clock time, without the evaluation", SECONDS),
        ("train/images_per_second", "Images/s", "training images per second", COUNT),
        ("train/epoch_seconds", "Epoch", "median of all but the first, which compiles", SECONDS),
        ("evaluate_seconds", "Evaluation", "wall-clock time of all that is measured", SECONDS),
        (
            "cost/predict_seconds_per_1000",
            "Prediction",
            "time for 1,000 examples, all members",
            SECONDS,
        ),
        ("train/peak_bytes", "Memory, training", "the largest amount in use at any time", BYTES),
        ("cost/predict_peak_bytes", "Memory, prediction", "the same, while predicting", BYTES),
    )
}
_PARTS = ("total", "aleatoric", "epistemic")
_NATS = (
    "entropy of the mean prediction, in nats",
    "mean entropy of the members' own predictions",
    "the difference of the two: what the members disagree about",
)
_ROOTS = (
    "root of the mean predicted variance, in the target's unit",
    "the same of the members' own variances",
    "the same of the variance of their means; its square and aleatoric's add up",
)
UNCERTAINTY = {
    key: Quantity(key, key.capitalize(), "lower", convention, digits=3)
    for key, convention in zip(_PARTS, _NATS, strict=True)
}
DEVIATIONS = {
    key: Quantity(key, key.capitalize(), "lower", convention, scale=PLAIN)
    for key, convention in zip(_PARTS, _ROOTS, strict=True)
}


CONFORMAL: dict[str, Quantity] = {
    key: Quantity(key, title, "lower", convention, digits=digits)
    for key, title, convention, digits in (
        ("level", "Level", "the share of examples that was asked for", 2),
        ("coverage", "Coverage", "share of the test set inside its set or interval", 3),
        ("size", "Size", "mean number of classes, or mean width in the target's unit", 2),
        ("examples", "Held-out examples", "of the validation part, from which scores are", 0),
    )
}


@dataclass(frozen=True)
class PaperTable:
    """Published numbers to stand beside ours: ``rows[method or label][metric]``, shares in [0, 1].

    A metric is named as a column is (``"svhn/auroc"``) or, for any set, by its key (``"auroc"``).
    """

    source: str
    rows: Mapping[str, Mapping[str, float]]

    def value(self, row: "Row", column: "Column") -> float | None:
        """The published number of a cell, or None."""
        name = self.named(row.label, row.method)
        # Only the means over all severities are published.
        if name is None or column.part.startswith("severity"):
            return None
        numbers = self.rows[name]
        return numbers.get(column.key, numbers.get(column.info.key))

    def named(self, label: str, method: str) -> str | None:
        """Its row for one of ours: by the whole label, by the label without settings, by the method.

        >>> table = PaperTable("a paper", {"lpbnn": {}, "LP-BNN+GN": {}})
        >>> table.named("LP-BNN+GN (lr=0.1)", "lpbnn"), table.named("LP-BNN (lr=0.1)", "lpbnn")
        ('LP-BNN+GN', 'lpbnn')
        """
        names = (label, label.partition(" (")[0], method)
        return next((name for name in names if name in self.rows), None)

    def place(self, label: str, method: str) -> int:
        """Where a row of ours stands in its order; after all where it has none."""
        name = self.named(label, method)
        return len(self.rows) if name is None else list(self.rows).index(name)


@dataclass(frozen=True)
class Column:
    """One metric, of one set where there are several (``part``), found in the results at ``path``."""

    key: str
    info: MetricInfo
    part: str = ""
    path: tuple[str, ...] = ()
    marked: bool = True
    """True if the best values are marked."""

    @property
    def tip(self) -> str:
        """The convention of the metric and which way is better.

        >>> Column("auroc", METRICS["auroc"]).tip
        'OOD is the positive class; ties count half (higher is better)'
        """
        better = {"higher": "higher is better", "lower": "lower is better"}
        said = better.get(self.info.direction, f"best at {self.info.target}")
        return f"{self.info.convention} ({said})" if self.info.arrow else self.info.convention

    def sort_value(self, cell: "Cell") -> float | None:
        """The number that the column is sorted by: the mean, or its distance to the target."""
        if cell.mean is None or self.info.target is None:
            return cell.mean
        return self.info.badness(cell.mean)


@dataclass(frozen=True)
class Cell:
    """What the runs of a row gave; runs without the number are not among ``values``."""

    values: tuple[float, ...] = ()
    mark: Mark = ""
    reference: float | None = None
    relative: float | None = None
    """The mean over that of the baseline's row."""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Cell":
        """The numbers among ``values``.

        >>> Cell.of([0.5, None, float("nan"), 0.7]).values
        (0.5, 0.7)
        """
        return cls(tuple(float(v) for v in values if v is not None and math.isfinite(v)))

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Of a sample, over n - 1; None for fewer than two.

        >>> Cell((1.0, 2.0, 3.0)).std, Cell((1.0,)).std
        (1.0, None)
        """
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self, info: MetricInfo) -> tuple[str, str]:
        """Mean and spread as shown; the spread of a single run is empty.

        >>> Cell((0.95, 0.97)).text(METRICS["accuracy"]), Cell().text(METRICS["ece"])
        (('96.00', '±1.41'), ('–', ''))
        """
        if self.mean is None:
            return "–", ""
        spread = "" if self.std is None else info.spread(self.mean, self.std)
        return info.format(self.mean), spread

    def below(self, info: MetricInfo, n: int) -> list[str]:
        """What is shown below the mean of a row of ``n`` runs.

        >>> Cell((0.95,), reference=0.96, relative=2.0).below(METRICS["accuracy"], 3)
        ['×2.00', 'of 1 run', 'paper 96.00']
        """
        found = [] if self.relative is None else [f"×{self.relative:.2f}"]
        if 0 < len(self.values) < n:
            found.append(f"of {plural(len(self.values), 'run')}")
        if self.reference is not None:
            found.append(f"paper {info.format(self.reference)}")
        return found


@dataclass(frozen=True)
class Row:
    """The runs of one method and its settings."""

    label: str
    method: str
    index: int
    n: int
    cells: Mapping[str, Cell] = field(default_factory=dict)
    diverged: tuple[int, ...] = ()
    """The epochs in which runs of this row diverged."""
    failed: bool = False
    """True if it has less than half of the best row's accuracy."""

    @property
    def note(self) -> str:
        """What must be said of the row.

        >>> Row("BNN", "meanfield", 0, 1, diverged=(3,)).note
        'diverged in epoch 3'
        >>> Row("BNN", "meanfield", 0, 3, diverged=(3, 25)).note
        '2 of 3 runs diverged (epochs 3, 25)'
        >>> Row("DUQ", "duq", 0, 1, failed=True).note
        'not learned'
        """
        epochs = ", ".join(map(str, sorted(self.diverged)))
        if not self.diverged:
            return "not learned" if self.failed else ""
        if self.n == 1:
            return f"diverged in epoch {epochs}"
        word = "epoch" if len(self.diverged) == 1 else "epochs"
        return f"{len(self.diverged)} of {self.n} runs diverged ({word} {epochs})"


@dataclass(frozen=True)
class Table:
    """Rows and columns; ``cells`` of a row are found by the column's key."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    source: str = ""
    """Of the published numbers, where there are any."""

    @property
    def legend(self) -> list[MetricInfo]:
        """Each metric once, in the order of the columns."""
        return list({column.info.key: column.info for column in self.columns}.values())

    @property
    def parts(self) -> list[tuple[str, list[Column]]]:
        """The sets that columns belong to, with their columns."""
        return [(part, list(same)) for part, same in groupby(self.columns, lambda c: c.part)]

    @property
    def starts(self) -> set[str]:
        """The first column of every part but the first, which gets a thin line before it."""
        return {columns[0].key for _, columns in self.parts[1:]}

    @property
    def marked(self) -> bool:
        return any(cell.mark for row in self.rows for cell in row.cells.values())

    @property
    def spread(self) -> bool:
        return any(cell.std is not None for row in self.rows for cell in row.cells.values())

    @property
    def spreading(self) -> set[str]:
        """The keys of the columns in which any row shows a spread."""
        cells = ((c, row.cells[c.key]) for c in self.columns for row in self.rows)
        return {column.key for column, cell in cells if cell.text(column.info)[1]}

    def explanations(self, spread: bool = True) -> list[str]:
        """What a reader has to know beside the columns' conventions, one sentence each."""
        found = list(self.notes)
        if self.spread and spread:
            found.append("± is the standard deviation over seeds (n - 1 in its denominator).")
        if self.source:
            found.append(f"The published numbers are those of {self.source}.")
        if any(row.diverged for row in self.rows):
            found.append(
                "Diverged runs were measured with their last finite weights, where these gave "
                "numbers at all; their rows are not ranked."
            )
        if any(row.failed for row in self.rows):
            found.append(
                "Rows with less than half of the best accuracy have not learned and are not ranked."
            )
        return found


def build(
    title: str,
    columns: Sequence[Column],
    groups: Sequence[Group],
    notes: Sequence[str] = (),
    reference: PaperTable | None = None,
    among: Sequence[Group] = (),
    cells: Mapping[str, Mapping[str, Cell]] | None = None,
) -> Table:
    """Build a table: cells are read from the runs, empty columns left out, the best two marked.

    Args:
        title: of the table.
        columns: in their order; ``path`` says where a run has the number.
        groups: the rows.
        notes: sentences below the table.
        reference: published numbers.
        among: all groups, where only some have a row: the best accuracy may be another one's.
        cells: ``cells[label][column key]``, where they are not what ``path`` finds.
    """
    found = cells or {g.label: {c.key: Cell.of(g.values(*c.path)) for c in columns} for g in groups}
    used = [c for c in columns if any(found[g.label][c.key].values for g in groups)]
    without = failed(among or groups)
    rows = [
        Row(
            label=g.label,
            method=g.method,
            index=g.index,
            n=len(g.runs),
            cells={c.key: found[g.label][c.key] for c in used},
            diverged=tuple(g.diverged),
            failed=g.label in without,
        )
        for g in groups
    ]
    if reference is not None:
        rows = [
            replace(
                row,
                cells={
                    c.key: replace(row.cells[c.key], reference=reference.value(row, c))
                    for c in used
                },
            )
            for row in rows
        ]
    compared = any(cell.reference is not None for row in rows for cell in row.cells.values())
    source = reference.source if reference is not None and compared else ""
    for column in used:
        if column.marked:
            rows = _marked(rows, column)
    return Table(title, tuple(used), tuple(rows), tuple(notes), source)


def main_metric(groups: Sequence[Group]) -> str:
    """The metric by which networks of a task are compared first: mIoU, accuracy or RMSE."""
    return MAIN[groups[0].runs[0].data.task]


def failed(groups: Sequence[Group]) -> set[str]:
    """The labels of those with less than half of the best accuracy, where there is one."""
    found = {group.label: Cell.of(group.values("test", "accuracy")).mean for group in groups}
    known = {label: accuracy for label, accuracy in found.items() if accuracy is not None}
    return {label for label, accuracy in known.items() if accuracy < max(known.values()) / 2}


def marks(
    values: Sequence[float | None], info: MetricInfo, spreads: Sequence[float | None] = ()
) -> list[Mark]:
    """Return the marks of a column by ``RULE``: all within the noise of the best share its mark.

    Values are compared as shown. Where all are within the noise, or there is one only, nothing is marked,
    and no row is second best where the last one would be too.

    Args:
        values: the means; None for rows that do not compete.
        info: says which way is better.
        spreads: the standard deviations over seeds; None for a single run. Left out: no noise.

    >>> marks([0.012, 0.009, None, 0.01, 0.00901], METRICS["ece"])
    ['', 'best', '', 'second', 'best']
    >>> marks([0.93, 0.935, 0.90, 0.80], METRICS["accuracy"], [0.004, 0.002, 0.01, 0.01])
    ['best', 'best', 'second', '']
    """
    known = [s for s in spreads if s is not None]
    usual = statistics.median(known) if known else 0.0
    ends: dict[int, tuple[float, float]] = {}  # of each row, the badness and its deviation
    for row, value in enumerate(values):
        if value is not None and math.isfinite(value):
            spread = spreads[row] if spreads else 0.0
            deviation = usual if spread is None else spread
            shown = round(value, info.decimals(value) + 2 * info.percent)
            ends[row] = (info.badness(shown), deviation)
    best = _within_noise(ends)
    if len(best) == len(ends):
        return ["" for _ in values]
    rest = {row: end for row, end in ends.items() if row not in best}
    second = _within_noise(rest)
    if len(second) == len(rest):  # the last is among them
        second = set()
    return [
        "best" if row in best else "second" if row in second else "" for row in range(len(values))
    ]


def _within_noise(ends: Mapping[int, tuple[float, float]]) -> set[int]:
    """The row of the least badness and those that follow until one's interval does not overlap its own.

    A noisy row below a separated one is left out: otherwise noise would be rewarded.
    """
    order = sorted(ends, key=lambda row: ends[row])
    found: set[int] = set()
    for row in order:
        (least, spread), (bad, own) = ends[order[0]], ends[row]
        if bad - least > own + spread + 1e-9:
            break
        found.add(row)
    return found


def _marked(rows: Sequence[Row], column: Column) -> list[Row]:
    """Only methods that trained to their end, and learned, compete: who says nothing is calibrated."""
    out = [row.diverged or row.failed for row in rows]
    means = [None if o else row.cells[column.key].mean for o, row in zip(out, rows, strict=True)]
    spreads = [None if o else row.cells[column.key].std for o, row in zip(out, rows, strict=True)]
    return [
        replace(row, cells={**row.cells, column.key: replace(row.cells[column.key], mark=mark)})
        for row, mark in zip(rows, marks(means, column.info, spreads), strict=True)
    ]


def comparison(
    runs: Iterable[str | Path | RunDir | Run], reference: PaperTable | None = None
) -> Table:
    """Every method's metrics, seeds as mean and spread; the runs must be of one data set."""
    found = read_runs(runs)
    parts = by_data(found)
    if len(parts) > 1:
        held = ", ".join(f"{name} ({len(part)} runs)" for name, part in parts.items())
        raise ValueError(
            f"the runs are of several data sets: {held}; expected one, because their numbers do not "
            "compare. Fix: compare one at a time, or write a report, which has a part for each."
        )
    return compare(grouped(found), reference)


def compare(groups: Sequence[Group], reference: PaperTable | None = None) -> Table:
    """The comparison of runs that are read and grouped already."""
    columns = [Column(key, METRICS[key], path=("test", key)) for key in TEST]
    for name in measured_on(groups, "ood"):
        columns += [
            Column(f"{name}/{key}", METRICS[key], _set_title(name), ("ood", name, key))
            for key in DETECTION
        ]
    origins = counted(run.origin for group in groups for run in group.runs if run.origin)
    part = "corrupted: " + " / ".join(origin for origin, _ in origins)
    columns += [Column(key, METRICS[key], part, ("corruption", key)) for key in ("ca", "ce")]
    notes = _fairness_notes(groups) + _pixel_notes(groups)
    notes += _score_notes(groups) + _corruption_notes(groups)
    title = f"Comparison on {groups[0].runs[0].data.name}"
    return build(title, columns, groups, notes, reference)


def severity(
    groups: Sequence[Group],
    keys: Sequence[str] = ("accuracy", "ece"),
    reference: PaperTable | None = None,
) -> Table:
    """Metrics at each severity of corruption, means over the corruptions, then over all (cA, cE)."""
    levels = sorted(
        {n for g in groups for run in g.runs for n in run.at("corruption", "severities") or {}}
    )
    columns = []
    for key in keys:
        for level in levels:
            path = ("corruption", "severities", level, key)
            columns.append(Column(f"{level}/{key}", METRICS[key], f"severity: {level}", path))
        whole = {"accuracy": "ca", "ece": "ce"}[key]
        columns.append(Column(whole, METRICS[whole], "all: severities", ("corruption", whole)))
    title = "Under corruption, by severity"
    return build(title, columns, groups, _corruption_notes(groups), reference)


def diversity(groups: Sequence[Group], reference: PaperTable | None = None) -> Table:
    """How differently the members err, on the test images and on corrupted ones."""
    columns = [
        Column(f"{part}/{key}", METRICS[key], part, ("diversity", part, key))
        for part in ("test", "corrupted")
        for key in DIVERSITY
    ]
    several = [g for g in groups if any(Cell.of(g.values(*c.path)).values for c in columns)]
    title = "Diversity of the members"
    return build(title, columns, several, reference=reference, among=groups)


def recalibration(groups: Sequence[Group]) -> Table:
    """The test metrics of calibrated runs, as trained and calibrated."""
    columns = [
        Column(f"{part}/{key}", METRICS[key], part, (*path, key), marked=False)
        for part, path in (("as trained", ("calibration", "before")), ("calibrated", ("test",)))
        for key in TEST
    ]
    fitted = ("scale", "noise_scale")  # there may be conformal scores alone
    calibrated = [
        g
        for g in groups
        if any(run.at("calibration", key) is not None for run in g.runs for key in fitted)
    ]
    return build("Before and after calibration", columns, calibrated, among=groups)


def conformal(groups: Sequence[Group]) -> Table:
    """The coverage and size of the prediction sets and intervals that runs have."""
    where = ("calibration", "conformal")
    columns = [
        Column(key, info, path=(*where, key), marked=False) for key, info in CONFORMAL.items()
    ]
    having = [g for g in groups if any(run.at(*where) for run in g.runs)]
    return build("Prediction sets and intervals", columns, having, among=groups)


def uncertainty(groups: Sequence[Group]) -> Table:
    """Mean uncertainty and its two parts, on the test set and out of distribution."""
    regression = groups[0].runs[0].data.task == "regression"
    columns = []
    for name in measured_on(groups, "uncertainty"):
        part = name if name == "test" else _set_title(name)
        columns += [
            Column(f"{name}/{key}", info, part, ("uncertainty", name, key), marked=False)
            for key, info in (DEVIATIONS if regression else UNCERTAINTY).items()
        ]
    cells: dict[str, dict[str, Cell]] = {group.label: {} for group in groups}
    for group in groups if regression else ():
        for (
            column
        ) in columns:  # variances of the standardised target, as deviations in its own unit
            found = ((run.data.target_std, run.at(*column.path)) for run in group.runs)
            values = (std * math.sqrt(max(v, 0.0)) for std, v in found if v is not None)
            cells[group.label][column.key] = Cell.of(values)
    return build("Uncertainty and its parts", columns, groups, cells=cells if regression else None)


def cost(groups: Sequence[Group]) -> Table:
    """What a method costs, also relative to the plain network where that is among the rows."""
    columns = [Column(key, info, marked=False) for key, info in COSTS.items()]
    cells = {g.label: {key: Cell.of(g.values(*key.split("/"))) for key in COSTS} for g in groups}
    notes = _cost_notes(groups)
    bases: dict[str, None] = {}
    own = {label: dict(numbers) for label, numbers in cells.items()}
    for group in groups:
        base = baseline(group, groups)
        if base is None or len(groups) == 1:
            continue
        bases[base.label] = None
        for key, cell in own[group.label].items():
            usual = own[base.label][key].mean
            if cell.mean is not None and usual:
                cells[group.label][key] = replace(cell, relative=cell.mean / usual)
    if bases:
        several = "the plain network of the same backbone"
        notes.append(f"×: relative to {several if len(bases) > 1 else next(iter(bases))}.")
    return build("Cost", columns, groups, notes, cells=cells)


def baseline(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return the plain network that a cost is relative to: of the same backbone, or else any."""
    plain = [g for g in groups if g.method == BASELINE]
    same = [g for g in plain if g.settings["backbone"] == group.settings["backbone"]]
    return next(iter(same or plain), None)


def measured_on(groups: Sequence[Group], key: str) -> list[str]:
    """The sets that any run was measured on."""
    return list(dict.fromkeys(n for g in groups for r in g.runs for n in r.at(key) or {}))


def _set_title(name: str) -> str:
    """An out-of-distribution set; of pixels, how their images are taken together.

    >>> _set_title("svhn"), _set_title("pixels_pooled")
    ('OOD: svhn', 'anomalies: pooled')
    """
    return PIXELS.get(name, f"OOD: {name}")


def _pixel_notes(groups: Sequence[Group]) -> list[str]:
    """What was done with the pixels of many images."""
    if groups[0].runs[0].data.task != "segmentation":
        return []
    notes = ["mIoU, ECE and the like are of all test pixels but void and anomalous ones."]
    if any(name in PIXELS for name in measured_on(groups, "ood")):
        notes.append(
            "Anomalies per image: computed in each image that has anomalous pixels, then averaged (the "
            "paper's protocol); pooled: over the pixels of all test images together, by a histogram. Void "
            "pixels are left out of both."
        )
    return notes


def _fairness_notes(groups: Sequence[Group]) -> list[str]:
    """Return what the rows do not share although a fair comparison would, and seeds that repeat."""
    differing = []
    for name in ("backbone", "epochs", "batch_size", "precision"):
        values = dict.fromkeys(str(group.settings.get(name)) for group in groups)
        if len(values) > 1:
            differing.append(f"{name.replace('_', ' ')} ({', '.join(values)})")
    predictions: dict[int, list[str]] = {}
    for group in groups:
        for number in dict.fromkeys(n for n in group.values("cost", "members") if n):
            predictions.setdefault(number, []).append(group.label)
    if len(predictions) > 1:
        told = "; ".join(f"{n}: {', '.join(predictions[n])}" for n in sorted(predictions))
        differing.append(f"the number of predictions that are averaged ({told})")
    notes = [f"The rows differ in {', '.join(differing)}."] if differing else []
    repeated = {
        group.label: [seed for seed, n in Counter(r.seed for r in group.runs).items() if n > 1]
        for group in groups
    }
    if told := [
        f"{label} {', '.join(map(str, seeds))}" for label, seeds in repeated.items() if seeds
    ]:
        notes.append(f"Seeds that occur more than once count each time: {'; '.join(told)}.")
    return notes


# Out-of-distribution scores that are no method's own.
SCORES = {
    "confidence": "1 - the largest probability of the mean prediction",
    "entropy": "the entropy of the mean prediction",
    "variance": "the predicted variance",
}


def _score_notes(groups: Sequence[Group]) -> list[str]:
    """Name the score of unknown inputs: methods may have one of their own."""
    if not measured_on(groups, "ood"):
        return []
    usual: dict[str, list[str]] = {}
    own = []
    for group in groups:
        if score := own_score(group.runs[0]):
            own.append(f"{group.label} has its own ({score})")
        else:
            usual.setdefault(SCORES[usual_score(group.runs[0])], []).append(group.label)
    if len(usual) == 1:
        return [f"Out-of-distribution score: {'; '.join([*usual, *own])}."]
    told = "; ".join([*(f"{score} ({', '.join(rows)})" for score, rows in usual.items()), *own])
    caution = " AUROC, AUPR and FPR95 of different scores do not compare." if usual else ""
    return [f"Out-of-distribution score: {told}.{caution}"]


def usual_score(run: Run) -> str:
    """Return the name of the score of methods that have none of their own, a key of ``SCORES``."""
    if run.data.task == "regression":
        return "variance"
    return run.settings["evaluate.score"] if run.data.task == "classification" else "confidence"


def own_score(run: Run) -> str | None:
    """Return the name of the method's own out-of-distribution score; None for the usual one."""
    score = run.settings.get("method_options.score", "entropy")
    return None if score == "entropy" or run.data.task == "regression" else score


def _corruption_notes(groups: Sequence[Group]) -> list[str]:
    """Whose corruptions, of how many images: numbers on different ones do not compare."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            if corruption := run.at("corruption"):
                levels = [int(level) for level in corruption["severities"]]
                text = f"{len(corruption['sets'])} corruptions ({run.origin}), severities "
                text += ", ".join(map(str, levels)) if levels != ALL_SEVERITIES else "1 to 5"
                text += f", {corruption['images']:,} images each"
                found.setdefault(text, []).append(group.label)
    if len(found) == 1:
        return [f"cA and cE: {text}." for text in found]
    return [f"cA and cE of {', '.join(dict.fromkeys(who))}: {text}." for text, who in found.items()]


def _cost_notes(groups: Sequence[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs if run.at("cost")]
    notes = []
    if devices := [run.at("cost", "device") for run in runs]:
        caution = "; times on different devices do not compare" * (len(set(devices)) > 1)
        notes.append(f"Measured on {listed(devices)}{caution}.")
    if shared := sum(any(one.get("beside", 1) > 1 for one in run.sessions) for run in runs):
        notes.append(
            f"{plural(shared, 'run')} shared the device with others: alone they are faster."
        )
    if kinds := [run.at("cost", "memory") for run in runs]:
        resident = any("resident" in str(kind) for kind in kinds)
        caution = ", with all that it held before: compare it only between processes" * resident
        notes.append(f"Memory: {listed(kinds)}{caution}.")
    return notes
