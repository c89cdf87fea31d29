"""Cost against the number of members, as a picture: a row per backbone and mode, a column per cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpbnn.engine.bench.record import Record, Row
from lpbnn.engine.bench.tables import NAMES

COSTS = {
    "train": "training step",
    "predict": "prediction by all members",
    "train_bytes": "peak memory of training",
}
COLOURS = {
    "lpbnn": "#c2410c",
    "batchensemble": "#2563eb",
    "rank1": "#0f766e",
    "meanfield": "#7c3aed",
    "ensemble": "#6b7280",
    "tradi": "#a16207",
    "torch-uncertainty-batchensemble": "#93c5fd",
    "torch-uncertainty-lpbnn": "#fdba74",
}
INK, FAINT = "#1f2937", "#d1d5db"


def plot(records: Sequence[Record], path: Path) -> Path:
    """Draw what the records hold; the ending of ``path`` (.svg, .png, .pdf) says how."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [row for record in records for row in record.rows if row.case.method != "mcp"]
    groups = list(dict.fromkeys((row.case.backbone, row.case.mode) for row in rows))
    if not groups:
        raise ValueError("nothing to draw: no method was measured beside the plain network.")
    with rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "lpbnn"}):
        figure = Figure(figsize=(10.5, 0.9 + 2.7 * len(groups)), layout="constrained")
        axes = figure.subplots(len(groups), len(COSTS), squeeze=False)
        for (backbone, mode), line in zip(groups, axes, strict=True):
            part = [r for r in rows if (r.case.backbone, r.case.mode) == (backbone, mode)]
            for (cost, title), axis in zip(COSTS.items(), line, strict=True):
                _panel(axis, part, cost)
                axis.set_title(title, loc="left", color=INK)
            line[0].set_ylabel(f"{backbone}, {mode}\ntimes the plain network", color=INK)
        for axis in axes[-1]:
            axis.set_xlabel("members J", color=INK)
        handles = {
            str(curve.get_label()): curve
            for line in axes
            for axis in line
            for curve in axis.get_lines()
            if not str(curve.get_label()).startswith("_")  # matplotlib's own names
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _panel(axis: Any, rows: Sequence[Row], cost: str) -> None:
    """Ratios against J, both on a scale of doublings; the dotted line is J separate networks."""
    curves = _curves(rows, cost)
    members = sorted({row.case.members for row in rows})
    span = [min(members), max(max(members), 2)]
    axis.plot(span, span, color=FAINT, linestyle=":", linewidth=1.5, label="J networks", zorder=1)
    highest = 1.0
    for method, points in curves.items():
        x, y = zip(*points, strict=True)
        highest = max(highest, *y)
        bold = method == "lpbnn"
        axis.plot(
            x,
            y,
            color=COLOURS.get(method, INK),
            label=NAMES.get(method, method),
            linewidth=2.4 if bold else 1.4,
            marker="o",
            markersize=5 if bold else 3.5,
            zorder=4 if bold else 3,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(members, [str(j) for j in members])
    ticks = [t for t in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32) if t <= 1.1 * highest]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ylim(
        min(0.9, *(y for p in curves.values() for _, y in p), 0.9), max(2.2, 1.2 * highest)
    )
    axis.minorticks_off()
    axis.grid(axis="y", color=FAINT, linewidth=0.6, alpha=0.7)
    axis.axhline(1, color=INK, linewidth=0.8, zorder=2)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK, length=3)
    if not curves:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#6b7280")


def _curves(rows: Sequence[Row], cost: str) -> dict[str, list[tuple[int, float]]]:
    """By method, in the order of the names: (J, ratio), rising J."""
    found: dict[str, list[tuple[int, float]]] = {}
    for method in dict.fromkeys((*NAMES, *(row.case.method for row in rows))):
        pairs = [(r.case.members, r.ratio(cost)) for r in rows if r.case.method == method]
        points = sorted((j, ratio) for j, ratio in pairs if ratio is not None)
        if points:
            found[method] = points
    return found
