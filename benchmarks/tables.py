"""Records as tables for the terminal: absolute numbers, with the ratio to plain in brackets."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.records import Record
from lpbnn.training.bench import Row, Setup, cell, ratio

NAMES = {
    "mcp": "plain",
    "batchensemble": "BatchEnsemble",
    "lpbnn": "LP-BNN",
    "rank1": "Rank-1 BNN",
    "meanfield": "mean-field BNN",
    "ensemble": "Deep Ensembles",
    "tradi": "TRADI",
    "torch-uncertainty-batchensemble": "BatchEnsemble (torch_uncertainty)",
    "torch-uncertainty-lpbnn": "LP-BNN (torch_uncertainty)",
}
COLUMNS = {
    "parameters": ("parameters, M", 1e6),
    "train": ("train step, ms", 1e-3),
    "predict": ("predict, ms", 1e-3),
    "train_bytes": ("train, MiB", 2**20),
    "predict_bytes": ("predict, MiB", 2**20),
}
TABLE_3 = {  # of the paper: train time, train memory, test time, test memory
    "mcp": (1.0, 1.0, 1.0, 1.0),
    "batchensemble": (1.31, 1.11, 2.67, 2.18),
    "ensemble": (4.0, 4.0, 4.0, 4.0),
    "tradi": (1.18, 1.02, 4.0, 4.0),
    "lpbnn": (1.33, 1.11, 2.71, 2.18),
}


def networks(records: Sequence[Record]) -> list[Table]:
    """Return a table for every backbone and mode."""
    return [
        _table(
            f"{backbone}, {mode}",
            ("method", "J", *(name for name, _ in COLUMNS.values()), "first step, s"),
            [_network(row) for row in rows],
        )
        for (backbone, mode), rows in _groups(records)
    ]


def table_3(record: Record) -> list[Table]:
    """Return our ratios beside those of the paper's Table 3, a table for every mode."""
    costs = ("train", "train_bytes", "predict", "predict_bytes")
    names = ("train time", "train memory", "test time", "test memory")
    head = ("method", *(text for name in names for text in (name, "paper")))
    found = []
    for (_, mode), rows in _groups([record]):
        cells = []
        for row in rows:
            paper = TABLE_3.get(row["case"]["method"], (None,) * len(costs))
            pairs = [(ratio(row, cost), theirs) for cost, theirs in zip(costs, paper, strict=True)]
            numbers = ["" if x is None else f"{x:.2f}" for pair in pairs for x in pair]
            cells.append([_name(row), *numbers])
        found.append(_table(f"Table 3, relative to plain, {mode}", head, cells))
    return found


def draws(record: Record) -> Table:
    """Return rows per second relative to plain, and memory."""
    made = record["settings"]
    title = (
        f"{made['backbone']}: predict(samples={made['samples']}) of {made['members']} members, "
        f"{made['images']} pictures"
    )
    head = ("rows at once", "networks", "seconds", "rows/s", "of plain", "peak, MiB")
    cells = [
        [
            row["name"],
            str(row["networks"]),
            f"{median(row['timing']['times']):.3g}",
            f"{row['rows_per_second']:,.0f}",
            f"{100 * row['relative']:.0f} %",
            f"{row['peak_bytes'] / 2**20:,.0f}",
        ]
        for row in record["rows"]
    ]
    return _table(title, head, cells)


def layers(record: Record) -> Table:
    """Return the time of one layer, and the spread of its repeats."""
    made = record["settings"]
    title = "conv {channels}->{channels} 3x3, {size}x{size}, batch {batch}, J = {members}"
    cells = [
        [
            row["name"],
            f"{1e3 * row['seconds']:.1f}",
            f"{row['ratio']:.2f}",
            f"{100 * row['spread']:.0f} %",
        ]
        for row in record["rows"]
    ]
    return _table(title.format(**made), ("layer", "ms", "x plain", "spread"), cells)


def flops(setup: Setup, rows: Sequence[dict[str, Any]]) -> Table:
    """Return operations relative to plain, whose row is the first and absolute."""
    plain = rows[0]
    cells = [
        [
            NAMES.get(row["method"], row["method"]),
            str(row["members"]),
            f"{row['train'] / 1e12:.4g} ({row['train'] / plain['train']:.4f})",
            f"{row['predict'] / 1e12:.4g} ({row['predict'] / plain['predict']:.3f})",
            f"{(row['parameters'] - plain['parameters']) / 1e6:.3g}",
        ]
        for row in rows
    ]
    title = f"{setup.backbone}, input {setup.input}, batch {setup.batch} / {setup.test_batch or setup.batch}"
    head = ("method", "J", "train, T operations", "predict, T operations", "added parameters, M")
    return _table(title, head, cells)


def notes(record: Record) -> list[str]:
    """Return where a record was made, and what has no row and why."""
    made, settings = record["environment"], record["settings"]
    budget = settings.get("memory_budget", 1.0)
    kept = f", compiled with a memory budget of {budget}" if budget != 1 else ""
    lines = [
        f"{made['device']}, torch {made['versions']['torch']}{kept}; medians of {settings['repeats']} "
        "repeats, each in turn with the plain network"
    ]
    lines += [f"not measured: {name}: {why}" for name, why in record["failed"].items()]
    if record["skipped"]:
        lines.append(f"no time was left for {', '.join(record['skipped'])}")
    return lines


def line(row: Row) -> str:
    """Return one case in one line, while others are still to come."""
    name = "/".join(str(row["case"][key]) for key in ("backbone", "mode", "method", "members"))
    cells = {label: cell(row, what, unit) for what, (label, unit) in COLUMNS.items()}
    return f"{name}: " + "; ".join(f"{label} {text}" for label, text in cells.items() if text)


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by method, in the order of ``NAMES``, then by J."""
    place = {name: index for index, name in enumerate(NAMES)}
    cases = [(place.get(row["case"]["method"], len(place)), row["case"]["members"]) for row in rows]
    return [rows[i] for i in sorted(range(len(rows)), key=cases.__getitem__)]


def _groups(records: Sequence[Record]) -> list[tuple[tuple[str, str], list[Row]]]:
    rows = [row for record in records for row in record["rows"]]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["case"]["backbone"], row["case"]["mode"]), []).append(row)
    return [(key, ordered(part)) for key, part in found.items()]


def _network(row: Row) -> list[str]:
    first, members = row["size"].get("first_step"), row["case"]["members"]
    cells = [cell(row, what, unit) for what, (_, unit) in COLUMNS.items()]
    return [_name(row), str(members), *cells, "" if first is None else f"{first:.1f}"]


def _name(row: Row) -> str:
    method: str = row["case"]["method"]
    return NAMES.get(method, method)


def _table(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in cells:
        table.add_row(*row)
    return table
