"""The verdict that opens the page: three sentences on quality, uncertainty and cost, from its tables."""

from collections.abc import Sequence

from lpbnn.report.runs import BASELINE, Group
from lpbnn.report.tables import COSTS, MAIN, Cell, Column, Row, Table, main_metric

CALIBRATION = ("ece", "nll")
MOST = 3  # names in a sentence
TIMES = {"train/seconds": "to train", "cost/predict_seconds_per_1000": "to predict"}


def verdict(groups: Sequence[Group], comparison: Table) -> list[str]:
    """Say in three sentences what the comparison and the costs show; fewer where less was measured.

    Differences within the noise over seeds are called that, by the rule that marks the table's cells.
    """
    columns = {column.key: column for column in comparison.columns}
    detection = [c for c in comparison.columns if c.info.key == "auroc"][:1]
    quality, calibration = (
        [columns[key] for key in keys if key in columns][:1]
        for keys in ((main_metric(groups),), CALIBRATION)
    )
    leaders = [
        rows[0].label
        for column in (*quality, *calibration, *detection)
        if (rows := _ranked(comparison, column))
    ]
    uncertainty = [_on(comparison, column) for column in (*calibration, *detection)]
    found = [
        *(_on(comparison, column) for column in quality),
        "; ".join(filter(None, uncertainty)),
        _cost(groups, list(dict.fromkeys(leaders))),
    ]
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in found if sentence]


def _ranked(table: Table, column: Column) -> list[Row]:
    """The rows that compete in a column, the best first."""
    rows = [row for row in table.rows if not row.diverged and not row.failed]
    known = [(row.cells[column.key].mean, row) for row in rows]
    order = sorted(
        (
            (column.info.badness(mean), place)
            for place, (mean, _) in enumerate(known)
            if mean is not None
        )
    )
    return [known[place][1] for _, place in order]


def _on(table: Table, column: Column) -> str:
    """Who is best by one metric, and who is within the noise of that."""
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
    noise = [row for row in rows[1:] if row.cells[column.key].mark == first.cells[column.key].mark]
    if len(noise) == len(rows) - 1:
        ends = f"{shown[0]} to {shown[-1]}"
        return f"the {len(rows)} methods have the same {name} within the noise over seeds ({ends})"
    told = f"{first.label} has the best {name} ({shown[0]})"
    if noise:
        verb = "is" if len(noise) == 1 else "are"
        return (
            f"{told}, and {_names(noise)} {verb} within the noise of it; the last has {shown[-1]}"
        )
    told += f", followed by {rows[1].label} ({shown[1]})"
    single = all(row.n == 1 for row in rows) and column.key in MAIN.values()
    return told + ", each in a single run, whose noise is not known" * single


def _cost(groups: Sequence[Group], leaders: Sequence[str]) -> str:
    """What those named before cost, relative to the plain network if that is among the rows."""
    base = next((group for group in groups if group.method == BASELINE), None)
    named = [group for group in groups if group.label in leaders and group is not base]
    named = named or [group for group in groups if group is not base]
    told = []
    for group in named[:MOST]:
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
            told.append(f"{group.label} takes {' and '.join(times)}")
    against = f" (× the time of {base.label})" if base is not None else ""
    return "; ".join(told) + against if told else ""


def _shown(row: Row, column: Column) -> str:
    """The mean and its spread, with their unit."""
    mean, spread = row.cells[column.key].text(column.info)
    return " ".join(filter(None, (mean, spread.replace("±", "± "), column.info.unit)))


def _names(rows: Sequence[Row]) -> str:
    """Some names as a list in a sentence, the rest counted."""
    names = [row.label for row in rows]
    if len(names) > MOST + 1:
        names = [*names[:MOST], f"{len(names) - MOST} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
