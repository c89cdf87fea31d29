"""The paper's runtime table (Table 3): DeepLabv3+ on street scenes, relative to the plain network.

ResNet-50 encoder, 1280x720, four members, decoder converted; training at batch 4, test at batch 1.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lpbnn.engine.bench.plan import Plan
from lpbnn.engine.bench.record import Record, Row
from lpbnn.engine.bench.tables import MODES, NAMES, by_method

METHODS = ("lpbnn", "batchensemble", "tradi", "ensemble")  # in the order of their interest
COLUMNS = {
    "train": "train time",
    "train_bytes": "train memory",
    "predict": "test time",
    "predict_bytes": "test memory",
}
PAPER: dict[str, tuple[float, ...]] = {  # in the order of COLUMNS
    "mcp": (1.0, 1.0, 1.0, 1.0),
    "batchensemble": (1.31, 1.11, 2.67, 2.18),
    "ensemble": (4.0, 4.0, 4.0, 4.0),
    "tradi": (1.18, 1.02, 4.0, 4.0),
    "lpbnn": (1.33, 1.11, 2.71, 2.18),
}


TABLE3 = Plan(("deeplab",), METHODS, members=(4,), modes=("eager", "compiled"))


def tables(record: Record) -> list[Table]:
    """Ours beside the paper's, a table for every mode."""
    modes = dict.fromkeys(row.case.mode for row in record.rows)
    rows = sorted(record.rows, key=by_method)
    return [_table(mode, [row for row in rows if row.case.mode == mode]) for mode in modes]


def _table(mode: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"Table 3, relative to plain, {MODES[mode]}", title_justify="left")
    table.box = SIMPLE_HEAD
    table.add_column("method", no_wrap=True)
    for name in COLUMNS.values():
        table.add_column(name, justify="right")
        table.add_column("paper", justify="right", style="dim")
    for row in rows:
        cells = [NAMES.get(row.case.method, row.case.method)]
        paper = PAPER.get(row.case.method)
        for index, what in enumerate(COLUMNS):
            ratio = row.ratio(what)
            cells.append("" if ratio is None else f"{ratio:.2f}")
            cells.append("" if paper is None else f"{paper[index]:.2f}")
        table.add_row(*cells)
    return table
