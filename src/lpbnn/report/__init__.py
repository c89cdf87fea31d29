"""The report: run folders in, a table in the terminal or one self-contained HTML page out.

    from lpbnn.report import comparison, print_table, write_report

    print_table(comparison(folders), console)
    write_report(folders, Path("report.html"))

- results: what a run folder holds, checked
- runs: run folders, read; seeds gathered into groups
- tables: ``Table``: plain data, mean and deviation over seeds, the best two marked; the tables
- formats: a table in the terminal, as Markdown, LaTeX, CSV and DataFrame
- verdict: the three sentences that open the page
- figures: what ``lpbnn.plots`` draws of the runs; ``svg``: as SVG in the page's ``colours``
- gallery: single images and what every method says of them; ``pictures``: images and maps as PNG
- settings: how the runs were made
- page: ``write_report`` and ``tell_report``: all of it in ``templates/``
- predict_files: what a run says of image files: ``lpbnn predict``
"""

from typing import TYPE_CHECKING, Any

from lpbnn.extras import missing

try:
    from lpbnn.report.formats import frame, print_table
    from lpbnn.report.tables import PaperTable, Table, comparison
except ModuleNotFoundError as error:
    raise missing(error) from error

if TYPE_CHECKING:
    from lpbnn.report.page import tell_report, write_report

__all__ = [
    "PaperTable",
    "Table",
    "comparison",
    "frame",
    "print_table",
    "tell_report",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import what writes the page on first use: tables need neither matplotlib nor jinja2."""
    if name in ("tell_report", "write_report"):
        try:
            from lpbnn.report import page
        except ModuleNotFoundError as error:
            raise missing(error) from error
        return getattr(page, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
