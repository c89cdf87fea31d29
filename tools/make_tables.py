"""Make results/*.csv, *.npz and *.jsonl from the archive of records.

Command: ``python -m tools.make_tables``. A CSV has a row for each run, with numbers as the
record writes them; results/README.md has the columns.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tools import fair
from tools.columns import ARCHIVE, RESULTS, flat

from benchmarks.archive import members
from lpbnn.atomic import write_atomic

# The folders of the archive in each CSV.
TABLES = {
    "cifar10": ("cifar10-fast",),
    "cifar100": ("cifar100-fast",),
    "segmentation": ("camvid-anomaly-fast",),
    "stability": ("cifar10-stability", "digits-stability"),
    "digits": ("digits-demo", "digits-variants"),
    "settings": (
        *("cifar10-held-out", "cifar10-tradeoff"),
        *("cifar100-draws", "cifar100-held-out", "cifar100-tradeoff"),
    ),
}
# Tables of the paper that have figures of single images; the arrays of other runs are in the archive alone.
FIGURES = ("cifar10", "cifar100", "segmentation")
# Folders whose runs are too few for a table.
WAITING = ("fair-cifar100",)
# Measurements of other kinds, one line for each file.
LINES = ("bench", "search")
# Notes on records, which are not edited.
NOTES = {
    "cifar100-fast/cifar100-fast-wrn-16-4-duq-0.json": (
        "the commit is older than the options: the run was made at 940a401, before DUQ had the option bce "
        "(3e55737), and bce=mean was added to the record later as what the run did"
    ),
}
# Parts of a record's results that are settings or have a column of their own.
NO_METRICS = {
    *("format", "method", "backbone", "data", "seed"),
    *("source", "evaluate", "measured_again"),
}

Record = Mapping[str, Any]


def config_hash(config: Record) -> str:
    """Return a hash of the recorded config without the seed, so that seeds share it.

    >>> config_hash({"seed": 0, "method": "mcp"}) == config_hash({"method": "mcp", "seed": 1})
    True
    """
    text = json.dumps({k: v for k, v in config.items() if k != "seed"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def row(name: str, record: Record) -> dict[str, Any]:
    """Return a run as a row of a CSV.

    Args:
        name: of the record in the archive, ``FOLDER/RUN.json``.
        record: its content.
    """
    config, results, session = record["config"], record["results"], record["sessions"][-1]
    again = results.get("measured_again") or {}
    notes = [NOTES.get(name), record.get("converted") and f"converted: {record['converted']}"]
    return {
        "folder": name.partition("/")[0],
        "run": Path(name).stem,
        "config_hash": config_hash(config),
        "commit": session.get("commit"),
        "dirty": session.get("dirty"),
        "measured_again": again.get("commit"),
        "seed": config["seed"],
        "seconds": results["train"]["seconds"],
        "method": config["method"],
        "options": config["method_options"],
        "backbone": config["backbone"],
        "backbone_options": config["backbone_options"],
        "data": config["data"],
        "data_options": config["data_options"],
        "epochs": config["epochs"],
        "batch_size": config["batch_size"],
        "lr": config["optim"]["lr"],
        "samples": results["evaluate"]["samples"],
        "device": session.get("device"),
        "torch": session.get("versions", {}).get("torch"),
        "note": "; ".join(note for note in notes if note),
        **flat({key: value for key, value in results.items() if key not in NO_METRICS}),
    }


def cell(value: Any) -> str:
    """Return a value as text that ``value_of`` reads without loss.

    >>> cell(0.1), cell(None), cell("mcp"), cell({"members": 4})
    ('0.1', '', 'mcp', '{"members": 4}')
    """
    if value is None or value == "":
        return ""
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def csv_text(content: Mapping[str, bytes], folders: tuple[str, ...]) -> str:
    """Return the CSV of some folders: columns as they first occur, per-corruption ones last."""
    rows = [row(name, json.loads(content[name])) for name in _named(content, folders, ".json")]
    columns = sorted(dict.fromkeys(c for one in rows for c in one), key=_late)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(one.get(column)) for column in columns] for one in rows)
    return buffer.getvalue()


def lines_text(content: Mapping[str, bytes]) -> str:
    """Return the files of ``LINES`` as JSON lines: ``{"file": ..., "content": ...}``."""
    lines = []
    for name in sorted(name for name in content if name.partition("/")[0] in LINES):
        text = content[name].decode()
        held = json.loads(text) if name.endswith(".json") else text
        lines.append(json.dumps({"file": name, "content": held}, ensure_ascii=False) + "\n")
    return "".join(lines)


def arrays(content: Mapping[str, bytes], folders: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the arrays of some folders as ``RUN/ARRAY``.

    An array that is the same in all runs that have it, such as the images that all of them saw, is there once,
    as ``ARRAY``.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in _named(content, folders, ".npz"):
        with np.load(io.BytesIO(content[name]), allow_pickle=False) as stored:
            for key in stored.files:
                found.setdefault(key, {})[Path(name).stem] = stored[key]
    kept: dict[str, np.ndarray] = {}
    for key, by_run in found.items():
        first, *others = by_run.values()
        if others and all(_same(first, other) for other in others):
            kept[key] = first
        else:
            kept |= {f"{run}/{key}": array for run, array in by_run.items()}
    return kept


def outputs(content: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every file that is made from the archive."""
    known = {folder for folders in TABLES.values() for folder in folders} | {*LINES}
    known |= {fair.FOLDER, *WAITING}
    if unknown := sorted({name.partition("/")[0] for name in content} - known):
        raise ValueError(
            f"the archive has the folders {', '.join(unknown)}, which belong to no table. Fix: add them "
            "to TABLES in tools/make_tables.py."
        )
    for table, folders in TABLES.items():
        yield f"{table}.csv", csv_text(content, folders)
    yield f"{fair.FOLDER}.csv", fair.csv_text(content)
    yield "benchmarks.jsonl", lines_text(content)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def _named(content: Mapping[str, bytes], folders: tuple[str, ...], suffix: str) -> list[str]:
    """Return the names of the files of some folders, seeds in the order of numbers."""

    def place(name: str) -> tuple[int, str, int]:
        folder, _, run = name.removesuffix(suffix).partition("/")
        stem = run.rstrip("0123456789")
        return folders.index(folder), stem, int(run[len(stem) :] or 0)

    found = [n for n in content if n.endswith(suffix) and n.partition("/")[0] in folders]
    return sorted(found, key=place)


def _late(column: str) -> int:
    return ("corruption/severities/" in column) + 2 * ("corruption/sets/" in column)


def main() -> None:
    content = members(ARCHIVE)
    for name, text in outputs(content):
        write_atomic(RESULTS / name, text.encode())
        print(f"{name}: {len(text.encode()):,} bytes, {text.count(chr(10))} lines")
    for table in FIGURES:
        buffer = io.BytesIO()
        found = arrays(content, TABLES[table])
        np.savez_compressed(buffer, **found)  # type: ignore[arg-type]
        write_atomic(RESULTS / f"{table}.npz", buffer.getvalue())
        print(f"{table}.npz: {len(buffer.getvalue()):,} bytes, {len(found)} arrays")


if __name__ == "__main__":
    main()
