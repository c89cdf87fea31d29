"""Options that every experiment has. What runs them is in ``_suite``, which imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True)
class SuiteOptions:
    """Options of every experiment: how its runs are made, or where they are."""

    source: Annotated[Path | None, arg(name="from")] = None
    """Train nothing: show the runs of this folder, of a ledger (also in an archive,
    results/records.tar.xz/cifar10-fast) or of run folders."""
    out: Path = Path("runs")
    """Folder of the runs; finished ones are not trained again."""
    ledger: Path | None = None
    """Keep every finished run's numbers here, one JSON each; what it holds is not trained again."""
    jobs: int | None = None
    """Runs side by side; None: one per core, or one on a GPU. There compiled ones compile side by side and
    train in turn, each with the device to itself."""
    report: Path = Path("report.html")
    """The page with the figures."""
