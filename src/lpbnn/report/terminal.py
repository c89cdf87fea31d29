"""A ``Table`` in the terminal: in parts where it is too wide, readable without colours."""

from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lpbnn.report.tables import RULE, Column, Row, Table

MARKS = {"best": "●", "second": "○", "": " "}
STYLES = {"best": "bold", "second": "underline", "": ""}
ENDLESS = 2**20  # columns: wider than any table
GAP = 2  # columns of the terminal between two of the table


def print_table(table: Table, console: Console) -> None:
    """Print ``table``: spreads beside their means, or below where that does not fit.

    Columns that do not fit even then go into further tables.
    """
    labels = [_label(row, console.width // 2) for row in table.rows]
    room = console.width - max([len("method"), *map(_width, labels)]) - GAP
    pages = _pages(table, room, stacked=False)
    if len(pages) > 1:
        pages = _pages(table, room, stacked=True)
    for number, blocks in enumerate(pages):
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        if number == 0:
            shown.title, shown.title_justify, shown.title_style = Text(table.title), "left", "bold"
        shown.add_column("method", no_wrap=True)
        for block in blocks:
            shown.add_column(block[0], no_wrap=True)
        for row, label in enumerate(labels):
            shown.add_row(label, *(block[row + 1] for block in blocks))
        console.print(shown)
    for line in _foot(table):
        console.print(Text(line, style="dim"))


def print_whole(shown: RichTable, console: Console) -> None:
    """Print a table; what is piped or redirected is as wide as it needs, and nothing of it is cut."""
    if not console.is_terminal:
        options = console.options.update(max_width=ENDLESS)
        shown.width = console.measure(shown, options=options).maximum
    console.print(shown, crop=False)


def _pages(table: Table, room: int, stacked: bool) -> list[list[list[Text]]]:
    """The columns, each with its head, as many to a table as fit; at least one."""
    pages: list[list[list[Text]]] = [[]]
    left = room
    for column in table.columns:
        block = _aligned([_head(column), *(_cell(r, column, table, stacked) for r in table.rows)])
        width = _width(block[0]) + GAP
        if width > left and pages[-1]:
            pages.append([])
            left = room
        pages[-1].append(block)
        left -= width
    return pages


def _aligned(texts: list[Text]) -> list[Text]:
    """Every line filled up on its left: rich would drop the blanks that keep means aligned."""
    width = max(map(_width, texts))
    return [
        Text("\n").join(
            Text(" " * (width - line.cell_len)) + line
            for line in text.split("\n", allow_blank=True)
        )
        for text in texts
    ]


def _head(column: Column) -> Text:
    """The set, whose corruptions they are, the metric and its good side, below each other."""
    lines = column.part.partition(",")[0].split(": ") if column.part else []
    title = f"{column.info.title} {column.info.unit}".rstrip()
    last = f"{title} {column.info.arrow}".rstrip()
    return Text("\n".join([*lines, last]))


def _label(row: Row, room: int) -> Text:
    """The row's name, in several lines where it is wider than ``room``: columns need the rest."""
    lines = wrap(row.label, room, subsequent_indent="  ", break_on_hyphens=False)
    text = Text("\n").join(map(Text, lines))
    if row.n > 1:
        text.append(f"  n={row.n}", style="dim")
    if row.note:
        text.append(f"\n  {row.note}", style="red")
    return text


def _cell(row: Row, column: Column, table: Table, stacked: bool) -> Text:
    """The mean with its spread and mark; below it, the share of the baseline, the published one."""
    cell = row.cells[column.key]
    mean, spread = cell.text(column.info)
    mark = f" {MARKS[cell.mark]}" if column.marked else ""
    text = Text().append(mean, style=STYLES[cell.mark])
    # As wide as the widest of the column, so that the means stand below each other.
    widest = max(len(other.cells[column.key].text(column.info)[1]) for other in table.rows)
    aside = "" if stacked or not widest else f" {spread:<{widest}}"
    text.append(aside, style="dim").append(mark)
    below = [spread] if stacked and spread else []
    if cell.relative is not None:
        below.append(f"×{cell.relative:.2f}")
    if 0 < len(cell.values) < row.n:
        below.append(f"of {len(cell.values)} runs")
    if cell.reference is not None:
        below.append(f"paper {column.info.format(cell.reference)}")
    for line in below:
        text.append(f"\n{line}{' ' * len(mark)}", style="dim")
    return text


def _foot(table: Table) -> list[str]:
    lines = [f"{i.title} {i.arrow}".rstrip() + f": {i.convention}." for i in table.legend]
    if table.marked:
        lines.append(f"● best, ○ second best: {RULE}")
    return [*lines, *table.explanations()]


def _width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)
