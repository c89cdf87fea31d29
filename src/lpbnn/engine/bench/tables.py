"""Costs as tables for the terminal: what was measured, and beside it how many times plain that is."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from lpbnn.engine.bench.clock import Compared
from lpbnn.engine.bench.layers import LayerBench
from lpbnn.engine.bench.record import Record, Row

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
MODES = {
    "eager": "eager",
    "graph": "CUDA graph",
    "compiled": "compiled (the training step as a CUDA graph on a GPU)",
}


def layers(measured: LayerBench) -> Table:
    """The table of ``lpbnn bench layers``."""
    table = Table(
        title=measured.title,
        caption=f"{measured.repeats} interleaved repeats, medians, {measured.threads} thread(s), "
        f"torch {measured.torch}",
    )
    _columns(table, "layer", "ms", "x plain", "spread")
    for row in measured.rows:
        table.add_row(
            row.name, f"{1e3 * row.seconds:.1f}", f"{row.ratio:.2f}", f"{100 * row.spread:.0f} %"
        )
    return table


def networks(records: Sequence[Record]) -> list[Table]:
    """A table for every backbone and mode; every cell a number and how many times plain it is."""
    rows = [row for record in records for row in record.rows]
    order = {key: i for i, key in enumerate(dict.fromkeys(_group(row) for row in rows))}
    rows.sort(key=lambda row: (order[_group(row)], by_method(row)))
    return [
        _network_table(backbone, mode, list(part))
        for (backbone, mode), part in groupby(rows, key=_group)
    ]


def caption(record: Record) -> str:
    """Where and how a record was made, in one line.

    >>> caption(Record({"device": "H200", "versions": {"torch": "2.11"}}, {"repeats": 10}))
    'H200, torch 2.11; medians of 10 repeats, each in turn with the plain network'
    """
    made, settings = record.environment, record.settings
    where = f"{made.get('device')}, torch {made.get('versions', {}).get('torch')}"
    precision = f", {settings['precision']}" if settings.get("precision") else ""
    budget = settings.get("memory_budget", 1.0)
    kept = f", compiled with a memory budget of {budget}" if budget != 1 else ""
    return (
        f"{where}{precision}{kept}; medians of {settings.get('repeats')} repeats, each in turn with the "
        "plain network"
    )


def notes(record: Record) -> list[str]:
    """What has no row, and why."""
    lines = [f"not measured: {name}: {why}" for name, why in record.failed.items()]
    if record.skipped:
        lines.append(f"no time was left for {', '.join(record.skipped)}")
    return lines


def line(row: Row) -> str:
    """One configuration in one line, while the others are still to come."""
    found = {
        "train": _time(row.train),
        "predict": _time(row.predict),
        "memory": _bytes(row.size.train_bytes, row.ratio("train_bytes")),
        "first step": "" if row.size.first_step is None else f"{row.size.first_step:.1f} s",
    }
    return f"{row.case.name}: " + ", ".join(
        f"{name} {text}" for name, text in found.items() if text
    )


def _network_table(backbone: str, mode: str, rows: Iterable[Row]) -> Table:
    table = Table(title=escape(f"{backbone}, {MODES[mode]}"), title_justify="left", box=SIMPLE_HEAD)
    _columns(
        table,
        "method",
        *("J", "parameters", "train step", "predict", "train memory", "predict memory"),
        "first step",
    )
    for row in rows:
        table.add_row(
            NAMES.get(row.case.method, row.case.method),
            "" if row.case.method == "mcp" else str(row.case.members),
            f"{row.size.parameters / 1e6:.2f} M ({row.ratio('parameters'):.2f})",
            _time(row.train),
            _time(row.predict),
            _bytes(row.size.train_bytes, row.ratio("train_bytes")),
            _bytes(row.size.predict_bytes, row.ratio("predict_bytes")),
            "" if row.size.first_step is None else f"{row.size.first_step:.1f} s",
        )
    return table


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")


def _group(row: Row) -> tuple[str, str]:
    return row.case.backbone, row.case.mode


def by_method(row: Row) -> tuple[int, int]:
    """The place of a row in a table: as the methods are listed above, then by J."""
    names = list(NAMES)
    place = names.index(row.case.method) if row.case.method in names else len(names)
    return place, row.case.members


def _time(compared: Compared | None) -> str:
    return "" if compared is None else f"{_ms(compared.own.median)} ({compared.ratio:.2f})"


def _ms(seconds: float) -> str:
    """Milliseconds, with three digits that count.

    >>> _ms(0.012345), _ms(1.5)
    ('12.3 ms', '1500 ms')
    """
    ms = 1e3 * seconds
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f} ms"


def _bytes(count: int | None, ratio: float | None) -> str:
    if count is None:
        return ""
    size = f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
    return size if ratio is None else f"{size} ({ratio:.2f})"
