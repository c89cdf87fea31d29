"""Tables as plain data: what was measured, mean and spread over seeds, the best two marked.

One ``Table`` feeds the terminal (``lpbnn.report.terminal``) and the page (``lpbnn.report.html``).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lpbnn.metrics.info import MetricInfo
from lpbnn.report.quantities import Quantity
from lpbnn.report.runs import Group

Mark = Literal["", "best", "second"]
RULE = (
    "best is the row with the best mean, with the rows that follow it in the order of their means as long as "
    "mean ± standard deviation over seeds overlaps its own; second best likewise among the rest. A single run "
    "has the median deviation of its column; where no row has several seeds, the digits shown decide."
)


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
        numbers = self.rows[name] if name is not None else {}
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

    def only(self, *keys: str) -> "PaperTable":
        """Some of its metrics.

        >>> PaperTable("a paper", {"mcp": {"ece": 0.02, "ce": 0.1}}).only("ce").rows
        {'mcp': {'ce': 0.1}}
        """
        kept = {
            name: {key: value for key, value in row.items() if key in keys}
            for name, row in self.rows.items()
        }
        return PaperTable(self.source, kept)


@dataclass(frozen=True)
class Column:
    """One metric, of one set where there are several (``part``)."""

    key: str
    info: MetricInfo
    part: str = ""
    marked: bool = True
    """Whether the best values are to be told apart."""


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

        >>> from lpbnn.metrics import METRICS
        >>> Cell((0.95, 0.97)).text(METRICS["accuracy"]), Cell().text(METRICS["ece"])
        (('96.00', '±1.41'), ('–', ''))
        """
        if self.mean is None:
            return "–", ""
        mean = info.format(self.mean)
        if self.std is None:
            return mean, ""
        if isinstance(info, Quantity):
            return mean, info.spread(self.mean, self.std)
        return mean, f"±{info.format(self.std)}"


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
    """Whether it has less than half of the best row's accuracy."""

    @classmethod
    def of(cls, group: Group, cells: Mapping[str, Cell]) -> "Row":
        diverged = tuple(group.diverged)
        return cls(group.label, group.method, group.index, len(group.runs), cells, diverged)

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
    def marked(self) -> bool:
        return any(cell.mark for row in self.rows for cell in row.cells.values())

    @property
    def spread(self) -> bool:
        return any(cell.std is not None for row in self.rows for cell in row.cells.values())

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
    cells: Mapping[str, Mapping[str, Cell]],
    notes: Sequence[str] = (),
    reference: PaperTable | None = None,
    among: Sequence[Group] = (),
) -> Table:
    """A table of ``cells[label][column key]``: empty columns left out, the best two marked.

    ``among`` are all groups, where only some have a row: the best accuracy may be another one's.
    """
    used = [c for c in columns if any(cells[g.label][c.key].values for g in groups)]
    rows = [Row.of(g, {c.key: cells[g.label][c.key] for c in used}) for g in groups]
    without = failed(among or groups)
    rows = [replace(row, failed=row.label in without) for row in rows]
    source = ""
    if reference is not None:
        rows = [_referenced(row, used, reference) for row in rows]
        compared = any(cell.reference is not None for row in rows for cell in row.cells.values())
        source = reference.source if compared else ""
    for column in used:
        if column.marked:
            rows = _marked(rows, column)
    return Table(title, tuple(used), tuple(rows), tuple(notes), source)


def failed(groups: Sequence[Group]) -> set[str]:
    """The labels of those with less than half of the best accuracy, where there is one."""
    found = {group.label: Cell.of(group.values("test", "accuracy")).mean for group in groups}
    known = {label: accuracy for label, accuracy in found.items() if accuracy is not None}
    return {label for label, accuracy in known.items() if accuracy < max(known.values()) / 2}


def marks(
    values: Sequence[float | None], info: MetricInfo, spreads: Sequence[float | None] = ()
) -> list[Mark]:
    """Return the marks of a column by ``RULE``: all within the noise of the best share its mark.

    Values are compared as shown. Where all are within the noise, or there is one only, nothing is marked;
    the second of two is not marked either.

    Args:
        values: the means; None for rows that do not compete.
        info: says which way is better.
        spreads: the standard deviations over seeds; None for a single run. Left out: no noise.

    >>> from lpbnn.metrics import METRICS
    >>> marks([0.012, 0.009, None, 0.01, 0.00901], METRICS["ece"])
    ['', 'best', '', 'second', 'best']
    >>> marks([0.93, 0.935, 0.90], METRICS["accuracy"], [0.004, 0.002, 0.01])
    ['best', 'best', 'second']
    """
    known = [s for s in spreads if s is not None]
    usual = statistics.median(known) if known else 0.0
    ends: dict[int, tuple[float, float]] = {}  # of each row, the badness and its deviation
    for row, value in enumerate(values):
        if value is not None and math.isfinite(value):
            spread = spreads[row] if spreads else 0.0
            deviation = usual if spread is None else spread
            ends[row] = (info.badness(_as_shown(value, info)), deviation)
    best = _within_noise(ends)
    if len(best) == len(ends):
        return ["" for _ in values]
    rest = {row: end for row, end in ends.items() if row not in best}
    second = _within_noise(rest) if len(ends) > 2 else set()
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


def _as_shown(value: float, info: MetricInfo) -> float:
    return round(value, info.digits + 2 * info.percent)


def _marked(rows: Sequence[Row], column: Column) -> list[Row]:
    """Only methods that trained to their end, and learned, compete: who says nothing is calibrated."""
    out = [row.diverged or row.failed for row in rows]
    means = [None if o else row.cells[column.key].mean for o, row in zip(out, rows, strict=True)]
    spreads = [None if o else row.cells[column.key].std for o, row in zip(out, rows, strict=True)]
    return [
        replace(row, cells={**row.cells, column.key: replace(row.cells[column.key], mark=mark)})
        for row, mark in zip(rows, marks(means, column.info, spreads), strict=True)
    ]


def _referenced(row: Row, columns: Sequence[Column], reference: PaperTable) -> Row:
    cells = {c.key: replace(row.cells[c.key], reference=reference.value(row, c)) for c in columns}
    return replace(row, cells=cells)
