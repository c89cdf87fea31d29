"""A ``Table`` in the terminal: split where it is too wide, readable without colours."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lpbnn.report.tables import Column, Row, Table

MARKS = {"best": "●", "second": "○", "": " "}
STYLES = {"best": "bold", "second": "underline", "": ""}
GAP = 2  # columns of the terminal between two of the table


def print_table(table: Table, console: Console) -> None:
    """Print ``table``; columns that do not fit go into further tables below."""
    labels = [_label(row) for row in table.rows]
    first = max([len("method"), *(_width(label) for label in labels)])
    for number, columns in enumerate(_pages(table, console.width - first - GAP)):
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        if number == 0:
            shown.title, shown.title_justify, shown.title_style = Text(table.title), "left", "bold"
        shown.add_column("method", no_wrap=True)
        for column in columns:
            shown.add_column(_head(column), justify="right", no_wrap=True)
        for row, label in zip(table.rows, labels, strict=True):
            shown.add_row(label, *(_cell(row, c, table) for c in columns))
        console.print(shown)
    for line in _foot(table):
        console.print(Text(line, style="dim"))


def _pages(table: Table, room: int) -> list[list[Column]]:
    """The columns, as many to a table as fit; at least one, or one empty table."""
    pages: list[list[Column]] = [[]]
    left = room
    for column in table.columns:
        cells = [_cell(row, column, table) for row in table.rows]
        width = max(_width(_head(column)), *map(_width, cells)) + GAP
        if width > left and pages[-1]:
            pages.append([])
            left = room
        pages[-1].append(column)
        left -= width
    return pages


def _head(column: Column) -> Text:
    part = f"{column.part.partition(',')[0]}\n" if column.part else ""
    unit = f" {column.info.unit}" if column.info.unit else ""
    return Text(f"{part}{column.info.title}{unit} {column.info.arrow}".rstrip())


def _label(row: Row) -> Text:
    text = Text(row.label)
    if row.n > 1:
        text.append(f"  n={row.n}", style="dim")
    if row.note:
        text.append(f"\n  {row.note}", style="red")
    return text


def _cell(row: Row, column: Column, table: Table) -> Text:
    cell = row.cells[column.key]
    mean, spread = cell.text(column.info)
    text = Text(mean, style=STYLES[cell.mark])
    # As wide as the widest of the column, so that the means stand below each other.
    room = max(len(other.cells[column.key].text(column.info)[1]) for other in table.rows)
    if room:
        text.append(f" {spread:<{room}}", style="not bold not underline dim")
    if column.marked:
        text.append(f" {MARKS[cell.mark]}", style="not underline")
    if cell.relative is not None:
        text.append(f"  ×{cell.relative:.2f}", style="dim")
    if 0 < len(cell.values) < row.n:
        text.append(f"\nof {len(cell.values)} runs", style="dim")
    if cell.reference is not None:
        text.append(
            f"\npaper {column.info.format(cell.reference)}  ", style="not bold not underline dim"
        )
    return text


def _foot(table: Table) -> Sequence[str]:
    lines = [
        f"{info.title}{info.arrow and ' ' + info.arrow}: {info.convention}."
        for info in table.legend
    ]
    if table.marked:
        lines.append("● best, ○ second best, as far as the digits shown tell.")
    return [*lines, *table.explanations()]


def _width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)
