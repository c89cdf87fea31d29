"""The report: run folders in, a table in the terminal or one self-contained HTML page out.

    from lpbnn.report import comparison, print_table, write_report

    print_table(comparison(folders), console)
    write_report(folders, Path("report.html"))

==========  ========================================================================================
entries     a run as one JSON file; ``ledger``: folders of them; ``results_md``: RESULTS.md
runs        run folders and kept runs, read; seeds gathered into groups
tables      ``Table``: plain data, mean and deviation over seeds, the best two marked; which tables there are
formats     a table in the terminal, as Markdown, LaTeX, CSV and DataFrame
html        a table, and everything else, in HTML
colours     the colour of every method
svg         matplotlib's drawings as SVG that follows the page's colours
figures     the drawings of classification; ``regression``: those of regression
panels      the parts of the page that are figures
bars        the members' bars of one image
pictures    images and matrices as PNG; ``maps``: maps of classes and of numbers, with their colours
gallery     single images and what every method says of them; ``scenes``: the same of street scenes
answers     what a run says of image files: ``lpbnn predict``
settings    how the runs were made
sections    the parts of the page, each left out where it has no data
page        ``write_report``; ``tell_report`` also prints where it is; ``style.css`` is its look
==========  ========================================================================================
"""

from lpbnn.report.formats import frame, print_table
from lpbnn.report.page import tell_report, write_report
from lpbnn.report.tables import PaperTable, Table, comparison

__all__ = [
    "PaperTable",
    "Table",
    "comparison",
    "frame",
    "print_table",
    "tell_report",
    "write_report",
]
