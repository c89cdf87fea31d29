"""The colour of every method, the same on every page; rows of one method differ by marker and dashes.

A row has an ``index``: the colour is ``index % COLOURS``, the place among the rows of that colour is
``index // COLOURS``. ``style.css`` says what ``--m0`` to ``--m15`` are, once for light and once for dark.
"""

import zlib
from collections.abc import Iterable
from typing import Any

COLOURS = 16
# LP-BNN has the accent; the others are muted.
FIXED = {
    "lpbnn": 0,
    "mcp": 1,
    "mcdropout": 2,
    "meanfield": 3,
    "ensemble": 4,
    "batchensemble": 5,
    "rank1": 6,
    "mimo": 7,
    "tradi": 8,
    "edl": 9,
    "duq": 10,
    "abnn": 11,
}
FREE = range(len(FIXED), COLOURS)  # for methods that are not built in
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


def colour_of(method: str) -> int:
    """Return the number of a method's colour: a fixed one, or one of the free ones by its name.

    >>> colour_of("lpbnn"), colour_of("my-own") == colour_of("my-own") >= len(FIXED)
    (0, True)
    """
    return FIXED.get(method, FREE[zlib.crc32(method.encode()) % len(FREE)])


def assign(rows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return the index of every row, given as (label, method).

    >>> assign([("LP-BNN (4)", "lpbnn"), ("MCP", "mcp"), ("LP-BNN (8)", "lpbnn")])
    {'LP-BNN (4)': 0, 'MCP': 1, 'LP-BNN (8)': 16}
    """
    found: dict[str, int] = {}
    for label, method in rows:
        taken = [index for index in found.values() if index % COLOURS == colour_of(method)]
        found.setdefault(label, colour_of(method) + COLOURS * len(taken))
    return found


def marker(index: int) -> str:
    """The marker of a row: rows of one colour have different ones."""
    return MARKERS[index // COLOURS % len(MARKERS)]


def line_style(index: int) -> dict[str, Any]:
    """Return matplotlib's options for the line of a row; the accented method is on top of the others.

    >>> line_style(0)["zorder"] > line_style(3)["zorder"]
    True
    """
    accent = index % COLOURS == FIXED["lpbnn"]
    dashes = DASHES[index // COLOURS % len(DASHES)]
    look = {"linestyle": dashes, "marker": marker(index), "markersize": 3.2}
    return {**look, "zorder": 3 if accent else 2, "linewidth": 2.2 if accent else 1.6}
