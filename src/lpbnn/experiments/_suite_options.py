"""Options of every experiment, and the paper's numbers; apart from ``_suite``, which imports torch."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

if TYPE_CHECKING:
    from lpbnn.report import PaperTable


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


def paper_table(
    source: str,
    keys: Sequence[str],
    rows: Mapping[str, Sequence[float]],
    percents: Container[str] = ("accuracy", "ca", "miou"),
) -> "PaperTable":
    """Return published rows in the keys and units of our metrics: percents become shares."""
    from lpbnn.report import PaperTable

    found = {
        name: {
            key: value / 100 if key in percents else value
            for key, value in zip(keys, values, strict=True)
        }
        for name, values in rows.items()
    }
    return PaperTable(source, found)
