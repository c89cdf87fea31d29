"""Options of every experiment; apart from ``_suite``, which imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True)
class SuiteOptions:
    """Options of every experiment: how its runs are made, or where to find them."""

    source: Annotated[Path | None, arg(name="from")] = None
    """Show existing runs and train nothing: a folder of runs or a ledger, also in an archive
    (results/records.tar.xz/cifar10-fast)."""
    out: Path = Path("runs")
    """Folder for the runs; finished ones are not trained again."""
    ledger: Path | None = None
    """Folder that keeps the results of every finished run, one JSON file each; these are not trained again."""
    jobs: int | None = None
    """Number of parallel runs; None: one per core, or one on a GPU."""
    report: Path = Path("report.html")
    """HTML page with the figures."""
