"""A ``Table`` in the terminal, as Markdown, LaTeX and CSV, and as a pandas DataFrame."""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lpbnn.report.runs import Run, by_data, grouped, read_runs
from lpbnn.report.tables import RULE, Column, Row, Table, compare, cost, diversity
from lpbnn.training.rundir import RunDir

MARKS = {"best": "●", "second": "○", "": " "}
STYLES = {"best": "bold", "second": "underline", "": ""}
MARKDOWN_MARKS = {"best": "**{}**", "second": "_{}_", "": "{}"}
LATEX_MARKS = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$", "±": r"$\pm$"}
    | {"×": r"$\times$", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}
)
MARKDOWN = str.maketrans({char: f"\\{char}" for char in "|*_`<>[]#"})
ENDLESS = 2**20  # columns: wider than any table
GAP = 1  # column of the terminal between two of the table


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown, its title above, its notes below."""
    lines = [["method", "n", *map(_markdown_head, table.columns)]]
    lines.append(["---", "---:", *("---:" for _ in table.columns)])
    for row in table.rows:
        name = markdown_text(f"{row.label}, {row.note}" if row.note else row.label)
        lines.append([name, str(row.n), *(_markdown_cell(row, c) for c in table.columns)])
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = markdown_text(" ".join(table.explanations(spread=False)))
    said = f"\n<sub>{notes}</sub>\n" if notes else ""
    return f"**{markdown_text(table.title)}**\n\n{rows}\n{said}"


def markdown_text(text: str) -> str:
    """Escape what Markdown would take for its own."""
    return text.translate(MARKDOWN)


def _markdown_head(column: Column) -> str:
    part = column.part.partition(",")[0].removeprefix("OOD: ").removeprefix("corrupted: ")
    return markdown_text(f"{part.replace(':', '')} {column.info.head}".strip())


def _markdown_cell(row: Row, column: Column) -> str:
    cell = row.cells[column.key]
    mean, spread = cell.text(column.info)
    text = MARKDOWN_MARKS[cell.mark].format(mean) + (f" {spread}" if spread else "")
    return "<br>".join([text, *cell.below(column.info, row.n)])


def latex(table: Table) -> str:
    r"""The table for a paper: ``booktabs``, best bold, second best underlined, notes as comments."""
    lines = [f"% {line}" for line in (table.title, *table.explanations())]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    if any(part for part, _ in table.parts):
        heads = [
            rf"\multicolumn{{{len(own)}}}{{c}}{{{latex_text(part.partition(',')[0])}}}"
            for part, own in table.parts
        ]
        lines.append(" & ".join(["", *heads]) + r" \\")
        first = 2
        for part, own in table.parts:
            lines += [rf"\cmidrule(lr){{{first}-{first + len(own) - 1}}}"] * bool(part)
            first += len(own)
    heads = ["Method", *(latex_text(column.info.head) for column in table.columns)]
    lines += [" & ".join(heads) + r" \\", r"\midrule"]
    for row in table.rows:
        name = f"{row.label}, {row.note}" if row.note else row.label
        cells = [latex_text(name), *(_latex_cell(row, c) for c in table.columns)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex_text(text: str) -> str:
    r"""Escape what LaTeX would take for its own.

    >>> print(latex_text("lr_1 = 50 % ↑"))
    lr\_1 = 50 \% $\uparrow$
    """
    return text.translate(LATEX)


def _latex_cell(row: Row, column: Column) -> str:
    cell = row.cells[column.key]
    mean, spread = cell.text(column.info)
    text = LATEX_MARKS[cell.mark].format(latex_text(mean))
    more = [spread] * bool(spread) + [f"({said})" for said in cell.below(column.info, row.n)]
    return " ".join([text, *map(latex_text, more)])


def as_cell(value: Any) -> Any:
    """Return a cell of a CSV file that no spreadsheet takes for a formula.

    >>> as_cell("=1+1"), as_cell("cat"), as_cell(-0.5)
    ("'=1+1", 'cat', -0.5)
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value


def to_csv(table: Table) -> str:
    """One line for each row, numbers as they were measured; see ``records``."""
    text = io.StringIO()
    rows = records(table)
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: as_cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "latex": latex, "csv": to_csv}


def records(table: Table) -> list[dict[str, Any]]:
    """Each row as a dict: label, method, runs, note, and of every column ``KEY`` and ``KEY_std``.

    Shares are in [0, 1]; a number that was not measured, and the deviation of one run, is None.
    """
    return [
        {"label": row.label, "method": row.method, "runs": row.n, "note": row.note}
        | {
            name: value
            for c in table.columns
            for name, value in (
                (c.key, row.cells[c.key].mean),
                (f"{c.key}_std", row.cells[c.key].std),
            )
        }
        for row in table.rows
    ]


def frame(runs: Iterable[str | Path | RunDir | Run], per_run: bool = False) -> Any:
    """Runs as a pandas DataFrame: comparison, diversity and cost, a row for each method and setting.

    Args:
        runs: run folders; several data sets are possible.
        per_run: a row for each run, with its seed, in place of mean and deviation over seeds.

    Returns:
        columns ``data``, ``label``, ``method``, ``runs`` (or ``seed``), ``note``, then every metric and,
        over seeds, its standard deviation as ``METRIC_std``.
    """
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "lpbnn.report.frame needs pandas, which is not installed. Fix: pip install pandas, or use "
            "lpbnn compare RUN... --format csv."
        ) from error
    rows: list[dict[str, Any]] = []
    for data, part in by_data(read_runs(runs)).items():
        groups = grouped(part)
        if per_run:
            groups = [
                replace(g, label=f"{g.label}\n{i}", runs=(run,))
                for g in groups
                for i, run in enumerate(g.runs)
            ]
        found: dict[str, dict[str, Any]] = {}
        for table in (compare(groups), diversity(groups), cost(groups)):
            for record in records(table):
                found.setdefault(record["label"], {"data": data}).update(record)
        for group in groups:
            row = found[group.label]
            if per_run:
                row = {k: v for k, v in row.items() if k != "runs" and not k.endswith("_std")}
                row |= {"label": group.label.partition("\n")[0], "seed": group.runs[0].seed}
            rows.append(row)
    return pandas.DataFrame(rows)


def print_table(table: Table, console: Console, legend: bool = False) -> None:
    """Print ``table``: spreads beside their means, or below where that does not fit.

    Columns that do not fit even then go into further tables. ``legend`` adds what each metric means.
    """
    labels = [_label(row, console.width // 2) for row in table.rows]
    room = console.width - max([len("method"), *map(_width, labels)]) - 2 * GAP  # both edges
    pages = _pages(table, room, stacked=False)
    if len(pages) > 1:
        pages = _pages(table, room, stacked=True)
    for number, blocks in enumerate(pages):
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        if number == 0:
            shown.title, shown.title_justify, shown.title_style = Text(table.title), "left", "bold"
        shown.add_column("method", no_wrap=True)
        for block in blocks:
            shown.add_column(block[0], no_wrap=True)
        for row, label in enumerate(labels):
            shown.add_row(label, *(block[row + 1] for block in blocks))
        console.print(shown)
    lines = [f"{i.title} {i.arrow}".rstrip() + f": {i.convention}." for i in table.legend if legend]
    lines += [f"● best, ○ second best: {RULE}"] * table.marked
    for line in [*lines, *table.explanations()]:
        console.print(Text(line, style="dim"))


def print_whole(shown: RichTable, console: Console) -> None:
    """Print a table; what is piped or redirected is as wide as it needs, and nothing of it is cut."""
    if not console.is_terminal:
        options = console.options.update(max_width=ENDLESS)
        shown.width = console.measure(shown, options=options).maximum
    console.print(shown, crop=False)


def _pages(table: Table, room: int, stacked: bool) -> list[list[list[Text]]]:
    """The columns, each with its head, as many to a table as fit; at least one.

    The columns of one part (a set) stay together where a whole table has room for them.
    """
    pages: list[list[list[Text]]] = [[]]
    left = room
    for _, columns in table.parts:
        blocks = [
            _aligned([_head(column), *(_cell(r, column, table, stacked) for r in table.rows)])
            for column in columns
        ]
        widths = [_width(block[0]) + GAP for block in blocks]
        whole = sum(widths)
        for block, width in zip(blocks, widths, strict=True):
            if pages[-1] and (width > left or left < whole <= room):
                pages.append([])
                left = room
            pages[-1].append(block)
            left -= width
            whole = 0  # the others follow the first
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
    info = column.info
    unit = f"{info.unit} {info.arrow}".strip()
    return Text(
        "\n".join([*lines, *([info.title, unit] if info.unit else [f"{info.title} {unit}"])])
    )


def _label(row: Row, room: int) -> Text:
    """The row's name, in several lines where it is wider than ``room``: columns need the rest."""
    lines = wrap(row.label, room, subsequent_indent="  ", break_on_hyphens=False)
    text = Text("\n").join(map(Text, lines))
    if row.n > 1:
        text.append(f" n={row.n}", style="dim")
    if row.note:
        text.append(f"\n  {row.note}", style="red")
    return text


def _cell(row: Row, column: Column, table: Table, stacked: bool) -> Text:
    """The mean with its spread and mark; below it, the share of the baseline, the published one."""
    cell = row.cells[column.key]
    mean, spread = cell.text(column.info)
    mark = MARKS[cell.mark] if column.marked else ""
    text = Text().append(mean, style=STYLES[cell.mark])
    # As wide as the widest of the column, so that the means stand below each other.
    widest = max(len(other.cells[column.key].text(column.info)[1]) for other in table.rows)
    aside = "" if stacked or not widest else f" {spread:<{widest}}"
    text.append(aside, style="dim").append(mark)
    below = [spread] if stacked and spread else []
    below += cell.below(column.info, row.n)
    for line in below:
        text.append(f"\n{line}{' ' * len(mark)}", style="dim")
    return text


def _width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)
