"""Cost against the number of members: a row per backbone and mode, a column per cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.networks import Record
from benchmarks.tables import grouped, name_of
from lpbnn.training.bench import PLAIN, Row, ratio

COSTS = {
    "train": "training step",
    "predict": "prediction by all members",
    "train_bytes": "peak memory of training",
}
TICKS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def plot(records: Sequence[Record], path: Path) -> Path:
    """Draw the records into a file whose ending (.svg, .png, .pdf) is its format."""
    groups = {
        name: methods
        for name, rows in grouped(records).items()
        if (methods := [row for row in rows if row["case"]["method"] != PLAIN])
    }
    if not groups:
        raise ValueError("nothing to draw: no method was measured beside the plain network.")
    with rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "lpbnn"}):
        figure = Figure(figsize=(10.5, 0.9 + 2.7 * len(groups)), layout="constrained")
        axes = figure.subplots(len(groups), len(COSTS), squeeze=False)
        names = dict.fromkeys(row["case"]["method"] for rows in groups.values() for row in rows)
        colours = {name: f"C{i}" for i, name in enumerate(names)}
        for (name, part), line in zip(groups.items(), axes, strict=True):
            for (cost, title), axis in zip(COSTS.items(), line, strict=True):
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
