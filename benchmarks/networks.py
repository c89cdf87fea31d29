"""Whole networks: records of what each method costs, written after every case."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.utils.benchmark import set_torch_threads

from benchmarks.archive import read_json, write_json
from benchmarks.rows import record
from lpbnn import backbones
from lpbnn.bench import Row, Setup, measurements
from lpbnn.training.files import RunError

Record = dict[str, Any]
FORMAT = 1
METHODS = ("lpbnn", "batchensemble", "rank1", "meanfield", "ensemble")
# The setting of the paper's runtime table: ResNet-50 encoder, decoder converted.
DEEPLAB = Setup(
    "deeplab", (3, 720, 1280), 13, batch=4, test_batch=1, options=("include=decoder.*",)
)


def setup_of(backbone: str) -> Setup:
    """Return what a network is measured on.

    >>> setup_of("deeplab").input, setup_of("wrn-28-10").input
    ((3, 720, 1280), (3, 32, 32))
    """
    if backbones.load(backbone).dense:
        return replace(DEEPLAB, backbone=backbone)
    return Setup(backbone)


def measure(
    setup: Setup,
    methods: Sequence[str],
    members: Sequence[int],
    path: Path | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> Record:
    """Measure every method with every number of members beside the plain network.

    Args:
        path: file for the record; it is whole after every case, so that a command may be stopped.
        report: called with every row.

    Returns:
        A record: device, versions, commit and command, settings, rows, and why a case has none.
    """
    with set_torch_threads(setup.threads):  # part of a CPU's name
        found = record("cuda:0" if setup.cuda else "cpu", settings=asdict(setup))
    found |= {"rows": [], "failed": {}}
    for name, row, why in measurements(setup, methods, members):
        if row is None:
            found["failed"][name] = why
        else:
            found["rows"].append(row)
            report(row)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found)
    return found


def read(path: Path) -> Record:
    """Read a record; another kind of file is an error."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or "rows" not in data:
        raise RunError(
            f"{path} is not a record of python -m benchmarks networks (format {FORMAT}). Fix: give such "
            "a file, or measure again with --json."
        )
    return data
