"""Records as tables for the terminal, and as a figure of cost against the number of members."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.networks import Record
from lpbnn import bench
from lpbnn.bench import PLAIN, Row, ratio
from lpbnn.report.runs import title

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

PLOTTED = {
    "train": "training step",
    "predict": "prediction by all members",
    "train_bytes": "peak memory of training",
}
TICKS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


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
    return [bench.table(rows, COLUMNS, title=name) for name, rows in grouped(records).items()]


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
    mode = rows[0]["case"]["mode"]
    return bench.text_table(head, cells, title=f"Table 3, relative to plain, {mode}")


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


def plot(records: Sequence[Record], path: Path) -> Path:
    """Draw the records into a file whose ending (.svg, .png, .pdf) is its format.

    A row per backbone and mode, a column per cost.
    """
    groups = {
        name: methods
        for name, rows in grouped(records).items()
        if (methods := [row for row in rows if row["case"]["method"] != PLAIN])
    }
    if not groups:
        raise ValueError("nothing to draw: no method was measured beside the plain network.")
    with rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "lpbnn"}):
        figure = Figure(figsize=(10.5, 0.9 + 2.7 * len(groups)), layout="constrained")
        axes = figure.subplots(len(groups), len(PLOTTED), squeeze=False)
        names = dict.fromkeys(row["case"]["method"] for rows in groups.values() for row in rows)
        colours = {name: f"C{i}" for i, name in enumerate(names)}
        for (name, part), line in zip(groups.items(), axes, strict=True):
            for (cost, title), axis in zip(PLOTTED.items(), line, strict=True):
                _panel(axis, part, cost, colours)
                axis.set_title(title, loc="left")
            line[0].set_ylabel(f"{name}\ntimes the plain network")
        for axis in axes[-1]:
            axis.set_xlabel("members J")
        found = [axis.get_legend_handles_labels() for axis in axes.flat]
        curves = {label: curve for pair in found for curve, label in zip(*pair, strict=True)}
        figure.legend(
            list(curves.values()), list(curves), loc="outside lower center", ncols=6, frameon=False
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _panel(axis: Any, rows: Sequence[Row], cost: str, colours: dict[str, str]) -> None:
    """Draw ratios against J, both on log scales; the dotted line is J separate networks."""
    members = sorted({row["case"]["members"] for row in rows})
    axis.plot(members, members, "k:", alpha=0.3, label="J networks")
    axis.axhline(1, color="black", linewidth=0.8)
    for method in dict.fromkeys(row["case"]["method"] for row in rows):
        own = [row for row in rows if row["case"]["method"] == method]
        points = [(row["case"]["members"], value) for row in own if (value := ratio(row, cost))]
        if points:
            style = {"color": colours[method], "linewidth": 2.4 if method == "lpbnn" else 1.4}
            axis.plot(*zip(*points, strict=True), "o-", label=name_of(method), **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(members, [str(j) for j in members])
    low, high = axis.get_ylim()
    ticks = [tick for tick in TICKS if low <= tick <= max(high, 2)]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
