"""The verdict that opens the page: three sentences on quality, uncertainty and cost, from its tables."""

from collections.abc import Container, Sequence
from operator import itemgetter

from lpbnn.report.runs import Group, listed
from lpbnn.report.tables import COSTS, MAIN, Cell, Column, Row, Table, baseline, main_metric

CALIBRATION = ("ece", "nll")
MOST = 3  # names in a sentence
TIMES = {"train/seconds": "to train", "cost/predict_seconds_per_1000": "to predict"}


def verdict(groups: Sequence[Group], comparison: Table, cost: str = "") -> list[str]:
    """Say in three sentences what the comparison and the costs show; fewer where less was measured.

    Differences within the noise over seeds are called that, by the rule that marks the table's cells. Rows
    that are not ranked, and networks that do not compare, are named.
    ``cost`` takes the place of the sentence on the costs of these runs.
    """
    columns = {column.key: column for column in comparison.columns}
    detection = [c for c in comparison.columns if c.info.key == "auroc"][:1]
    quality, calibration = (
        [columns[key] for key in keys if key in columns][:1]
        for keys in ((main_metric(groups),), CALIBRATION)
    )
    asked = [*quality, *calibration, *detection]
    leaders = {rows[0].label for column in asked if (rows := _ranked(comparison, column))}
    out = {row.label: row.note for row in comparison.rows if not _competes(row)}
    backbones = list(dict.fromkeys(str(group.settings["backbone"]) for group in groups))
    found = [
        [
            *(_on(comparison, column) for column in quality),
            *(f"{label} is not ranked: {note}" for label, note in list(out.items())[:MOST]),
            f"the rows are of different networks ({in_words(backbones)})" * (len(backbones) > 1),
        ],
        [_on(comparison, column) for column in (*calibration, *detection)],
        [cost or _cost([g for g in groups if g.label not in out], groups, leaders)],
    ]
    sentences = ["; ".join(filter(None, parts)) for parts in found]
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence]


def _competes(row: Row) -> bool:
    return not row.diverged and not row.failed


def _ranked(table: Table, column: Column) -> list[Row]:
    """The rows that compete in a column, the best first."""
    found = [
        (column.info.badness(mean), row)
        for row in table.rows
        if _competes(row) and (mean := row.cells[column.key].mean) is not None
    ]
    return [row for _, row in sorted(found, key=itemgetter(0))]


def _on(table: Table, column: Column) -> str:
    """Return who is best by one metric, who is within the noise of that, and who is last."""
    rows = _ranked(table, column)
    if not rows:
        return ""
    title = column.info.title
    name = title.lower() if title.istitle() else title
    if column.part:
        where = column.part.replace(":", "")
        name += f" on {where[4:]}" if where.startswith("OOD ") else f" of {where}"
    first, shown = rows[0], [_shown(row, column) for row in rows]
    if len(rows) == 1:
        return f"the {name} of {first.label} is {shown[0]}"
    alike = [
        row.label for row in rows if row.cells[column.key].mark == first.cells[column.key].mark
    ]
    if len(alike) == len(rows):
        ends = f"{shown[0]} to {shown[-1]}"
        return f"{name} does not tell the {len(rows)} methods apart ({ends})"
    last = f"{rows[-1].label} is last ({shown[-1]})"
    if len(alike) > 1:
        others = in_words(alike[1:])
        verb = "is" if len(alike) == 2 else "are"
        told = f"{first.label} has the best mean {name} ({shown[0]})"
        return f"{told}, and {others} {verb} within the noise of it; {last}"
    told = (
        f"{first.label} has the best {name} ({shown[0]}), followed by {rows[1].label} ({shown[1]})"
    )
    single = all(row.n == 1 for row in rows) and column.key in MAIN.values()
    return told + ", each in a single run, whose noise is not known" * single


def _cost(ranked: Sequence[Group], groups: Sequence[Group], leaders: Container[str]) -> str:
    """What those named before cost, relative to the plain network if that is among the rows."""
    named = [g for g in ranked if g.label in leaders and baseline(g, groups) is not g]
    named = named or [g for g in ranked if baseline(g, groups) is not g]
    told = []
    bases: set[str] = set()
    for group in named[:MOST]:
        base = baseline(group, groups)
        times = []
        for key, words in TIMES.items():
            mean, usual = (
                None if g is None else Cell.of(g.values(*key.split("/"))).mean
                for g in (group, base)
            )
            if mean is not None:
                time = f"×{mean / usual:.2g}" if usual else COSTS[key].format(mean)
                times.append(f"{time} {words}")
        if times:
            number = listed(group.values("cost", "members"))
            several = f" with {number} predictions" * (number.isdigit() and number != "1")
            told.append(f"{group.label} takes {' and '.join(times)}{several}")
            bases |= {base.label} if base is not None else set()
    several = "the plain network of the same backbone"
    against = several if len(bases) > 1 else "".join(bases)
    return "; ".join(told) + f" (× the time of {against})" * bool(bases)


def _shown(row: Row, column: Column) -> str:
    """The mean and its spread, with their unit."""
    mean, spread = row.cells[column.key].text(column.info)
    return " ".join(filter(None, (mean, spread.replace("±", "± "), column.info.unit)))


def in_words(names: Sequence[str]) -> str:
    """Some names as a list in a sentence, the rest counted."""
    if len(names) > MOST + 1:
        names = [*names[:MOST], f"{len(names) - MOST} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
