"""Options of every experiment; apart from ``_suite``, which imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True)
class SuiteOptions:
    """Options of every experiment: how its runs are made, or where to find them."""

    source: Annotated[Path | None, arg(name="from")] = None
    """Show the finished runs in this folder and train nothing."""
    out: Path = Path("runs")
    """Folder for the runs; finished ones are not trained again."""
    jobs: int | None = None
    """Number of parallel runs; None: one per core, or one on a GPU."""
    report: Path = Path("report.html")
    """HTML page with the figures."""
