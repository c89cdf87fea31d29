"""Records as tables for the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.networks import Record
from lpbnn.report.runs import title
from lpbnn.training import bench
from lpbnn.training.bench import PLAIN, Row, Setup, ratio

COLUMNS = bench.COLUMNS | {
    "predict_bytes": ("predict, MiB", 2**20),
    "first_step": ("first step, s", 1.0),
}
TABLE_3 = {  # of the paper: train time, train memory, test time, test memory
    "mcp": (1.0, 1.0, 1.0, 1.0),
    "batchensemble": (1.31, 1.11, 2.67, 2.18),
    "ensemble": (4.0, 4.0, 4.0, 4.0),
    "tradi": (1.18, 1.02, 4.0, 4.0),
    "lpbnn": (1.33, 1.11, 2.71, 2.18),
}
COSTS = {
    "train": "train time",
    "train_bytes": "train memory",
    "predict": "test time",
    "predict_bytes": "test memory",
}


def name_of(method: str) -> str:
    """Return what a method is called in a table.

    >>> name_of("mcp"), name_of("lpbnn")
    ('plain', 'LP-BNN')
    """
    return "plain" if method == PLAIN else title(method)


def grouped(records: Sequence[Record]) -> dict[str, list[Row]]:
    """Return the rows of every network and mode, sorted by method and J."""
    rows = [row for record in records for row in record["rows"]]
    order = list(dict.fromkeys(row["case"]["method"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["case"]["method"]), row["case"]["members"]))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("{backbone}, {mode}".format(**row["case"]), []).append(row)
    return groups


def networks(records: Sequence[Record]) -> list[Table]:
    """Return a table for every network and mode."""
    return [
        bench.table(rows, COLUMNS, title=name, title_justify="left")
        for name, rows in grouped(records).items()
    ]


def table_3(record: Record) -> Table:
    """Return our ratios to plain beside those of the paper's Table 3."""
    (rows,) = grouped([record]).values()
    head = ("method", *(text for name in COSTS.values() for text in (name, "paper")))
    cells = []
    for row in rows:
        method = row["case"]["method"]
        paper = TABLE_3.get(method, (None,) * len(COSTS))
        pairs = [(ratio(row, cost), theirs) for cost, theirs in zip(COSTS, paper, strict=True)]
        numbers = ["" if x is None else f"{x:.2f}" for pair in pairs for x in pair]
        cells.append([name_of(method), *numbers])
    return _table(f"Table 3, relative to plain, {rows[0]['case']['mode']}", head, cells)


def flops(setup: Setup, rows: Sequence[dict[str, Any]]) -> Table:
    """Return operations relative to plain, whose row is the first and absolute."""
    plain = rows[0]
    cells = [
        [
            name_of(row["method"]),
            str(row["members"]),
            f"{row['train'] / 1e12:.4g} ({row['train'] / plain['train']:.4f})",
            f"{row['predict'] / 1e12:.4g} ({row['predict'] / plain['predict']:.3f})",
            f"{(row['parameters'] - plain['parameters']) / 1e6:.3g}",
        ]
        for row in rows
    ]
    name = f"{setup.backbone}, input {setup.input}, batch {setup.batch} / {setup.test_batch or setup.batch}"
    head = ("method", "J", "train, T operations", "predict, T operations", "added parameters, M")
    return _table(name, head, cells)


def notes(record: Record) -> list[str]:
    """Return where a record was made, and which cases have no row and why."""
    made, settings = record["environment"], record["settings"]
    budget = settings.get("memory_budget", 1.0)
    kept = f", compiled with a memory budget of {budget}" if budget != 1 else ""
    where = f"{made['device']}, torch {made['versions']['torch']}{kept}"
    lines = [
        f"{where}; medians of {settings['repeats']} repeats, each in turn with the plain network"
    ]
    return lines + [f"not measured: {name}: {why}" for name, why in record["failed"].items()]


def _table(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in cells:
        table.add_row(*row)
    return table
