"""HTML by small functions; every text that comes from outside goes through ``esc``."""

import html
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from lpbnn.report.colours import COLOURS
from lpbnn.report.tables import RULE, Cell, Column, Row, Table

CHIPS = 4  # shapes of a chip in style.css
SAID = {"best": "best", "second": "second best"}


def esc(text: object) -> str:
    """Text as text, in an element as well as in a quoted attribute.

    >>> esc('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def chip(index: int) -> str:
    """The colour of a method, before its name; of further rows of one method, another shape."""
    shape = f" v{index // COLOURS % CHIPS}" if index >= COLOURS else ""
    return f'<i class="chip{shape}" style="--c:var(--m{index % COLOURS})"></i>'


def name(label: str, index: int, more: str = "") -> str:
    """A method's name with its colour, and what is to follow it, as HTML."""
    return f'<span class="name">{chip(index)}<span>{esc(label)}{more}</span></span>'


def said(caption: str, body: str) -> str:
    """What to look at, then the thing itself; nothing where there is nothing. Both are HTML."""
    return f'<p class="caption">{caption}</p>{body}' if body else ""


def panel(label: str, index: int, svg: str, number: str) -> str:
    """A small figure of one method, with the number it stands for."""
    title = f'{name(label, index)}<span class="number">{esc(number)}</span>'
    return f'<figure class="panel"><figcaption>{title}</figcaption>{svg}</figure>'


def chart(svg: str) -> str:
    """A larger figure of several methods."""
    return f'<figure class="chart">{svg}</figure>'


def panels(parts: Iterable[str], kind: str) -> str:
    """Figures side by side, as many as there is room for: "small", "wide" or "charts"."""
    return f'<div class="panels {kind}">{"".join(parts)}</div>'


def matrix(image: str, size: int, top: float) -> str:
    """A square picture of correlations with its axes, numbered from 1 to ``size``, and its scale."""
    ends = f"<span>1</span><span>inputs, ordered</span><span>{size}</span>"
    scale = f"<span>−{top:g}</span><i></i><span>+{top:g}</span>"
    return (
        f'<figure class="matrix"><div class="down">{ends}</div><div class="cells">{image}</div>'
        f'<div class="along">{ends}</div><div class="ramp" title="correlation">{scale}</div></figure>'
    )


def scroll(content: str, label: str) -> str:
    """Something wide, in a box that scrolls by itself."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(label)}">{content}</div>'
    )


def image(uri: str, description: str, pixelated: bool = False, width: int | None = None) -> str:
    """A picture that is part of the page."""
    look = ' class="pixels"' if pixelated else ""
    size = f' width="{width}"' if width else ""
    return f'<img src="{uri}" alt="{esc(description)}"{size}{look}>'


def definitions(pairs: Iterable[tuple[str, str]], kind: str = "") -> str:
    """Terms and what they mean; both are HTML."""
    items = "".join(f"<div><dt>{term}</dt><dd>{meaning}</dd></div>" for term, meaning in pairs)
    return f'<dl class="{kind}">{items}</dl>' if items else ""


def table(content: Table, brief: bool = False) -> str:
    """A table of numbers with its legend; ``brief`` leaves out what the first table explains."""
    body = "".join(_row(row, content) for row in content.rows)
    made = f'<table class="sortable">{_head(content.columns)}<tbody>{body}</tbody></table>'
    return scroll(made, content.title) + legend(content, brief)


def legend(content: Table, brief: bool = False) -> str:
    """Which way is better, by which convention, and what the marks mean."""
    pairs = [(esc(f"{i.title} {i.arrow}".rstrip()), esc(i.convention)) for i in content.legend]
    lines = [esc(line) for line in (content.notes if brief else content.explanations())]
    if content.marked and not brief:
        lines.insert(
            0,
            f'<b class="best">Best</b> and <u class="second">second best</u>: {esc(RULE)}',
        )
    notes = "".join(f"<li>{line}</li>" for line in lines)
    return definitions(pairs, "legend") + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _head(columns: Sequence[Column]) -> str:
    parts = [(part, len(list(same))) for part, same in groupby(columns, lambda c: c.part)]
    first = parts[0][0] if parts else ""
    above = ""
    if any(part for part, _ in parts):
        cells = "".join(
            f'<th colspan="{n}" scope="colgroup"{_class("part" + " start" * (part != first))}>'
            f"<span>{esc(part)}</span></th>"
            for part, n in parts
        )
        above = f'<tr class="parts"><td class="first"></td>{cells}</tr>'
    starts = _starts(columns)
    below = "".join(
        f'<th scope="col"{_class("start" if c.key in starts else "")} title="{esc(_tip(c))}"'
        f' data-first="{_first(c)}">'
        f"{esc(c.info.title)}"
        f'<span class="arrow">{esc(f"{c.info.unit} {c.info.arrow}".strip())}</span></th>'
        for c in columns
    )
    return f'<thead>{above}<tr><th class="first" scope="col">Method</th>{below}</tr></thead>'


def _first(column: Column) -> str:
    """Which way a column is sorted first, so that the best is above."""
    return "down" if column.info.direction == "higher" else "up"


def _tip(column: Column) -> str:
    better = {"higher": "higher is better", "lower": "lower is better"}
    said = better.get(column.info.direction, f"best at {column.info.target}")
    return f"{column.info.convention} ({said})" if column.info.arrow else column.info.convention


def _row(row: Row, content: Table) -> str:
    seeds = f' <span class="n">n = {row.n}</span>' if row.n > 1 else ""
    note = f'<span class="warning">{esc(row.note)}</span>' if row.note else ""
    starts = _starts(content.columns)
    spread = {
        c.key for c in content.columns if any(r.cells[c.key].text(c.info)[1] for r in content.rows)
    }
    cells = "".join(
        _cell(row.cells[c.key], c, row.n, "start" if c.key in starts else "", c.key in spread)
        for c in content.columns
    )
    first = f'<th scope="row" class="first">{name(row.label, row.index, seeds)}{note}</th>'
    return f"<tr>{first}{cells}</tr>"


def _cell(cell: Cell, column: Column, n: int, kind: str, spreads: bool) -> str:
    mean, spread = cell.text(column.info)
    text = esc(mean)
    if cell.mark:
        tag = "b" if cell.mark == "best" else "u"
        text = f'<{tag} class="{cell.mark}" title="{SAID[cell.mark]}">{text}</{tag}>'
    if spreads:  # an empty one as well, so that the means stand below each other
        text += f'<span class="spread">{esc(spread)}</span>'
    if cell.relative is not None:
        text += f'<span class="below">×{cell.relative:.2f}</span>'
    if 0 < len(cell.values) < n:
        text += f'<span class="below">of {len(cell.values)} runs</span>'
    if cell.reference is not None:
        text += f'<span class="below">paper {esc(column.info.format(cell.reference))}</span>'
    value = "" if cell.mean is None else repr(_sorted_by(cell.mean, column))
    return f'<td{_class(kind)} data-v="{value}">{text}</td>'


def _sorted_by(mean: float, column: Column) -> float:
    """The number that a column is sorted by: with a target, the distance to it."""
    return mean if column.info.target is None else column.info.badness(mean)


def _starts(columns: Sequence[Column]) -> set[str]:
    """The first column of every part, which gets a thin line before it."""
    return {one.key for before, one in pairwise(columns) if one.part != before.part}


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
