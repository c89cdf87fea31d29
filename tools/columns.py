"""The CSV files in results/ as text, and columns of tables that are made from them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
ARCHIVE = RESULTS / "records.tar.xz"

Row = Mapping[str, str]


class Column(NamedTuple):
    """A metric: its name in the CSV, its title, and the paper's name for it, if the paper has it.

    A metric whose title has ↓ is better if it is less.
    """

    key: str
    title: str
    paper: str | None = None
    percent: bool = False

    def text(self, value: float, sign: str = "") -> str:
        return f"{100 * value:{sign}.2f}" if self.percent else f"{value:{sign}.4f}"

    def mean(self, rows: Iterable[Row], bold: bool = False) -> str:
        """Return the mean over rows, with its standard deviation if there are several numbers."""
        values = numbers(rows, self.key)
        if not values:
            return ""
        mean = f"**{self.text(fmean(values))}**" if bold else self.text(fmean(values))
        return f"{mean} ±{self.text(stdev(values))}" if len(values) > 1 else mean


def flat(results: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every number of nested results by its path; what was not measured is left out.

    >>> flat({"test": {"accuracy": 0.9, "ece": None}, "ood": {}})
    {'test/accuracy': 0.9}
    """
    found: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            found[prefix + key] = value
    return found


def value_of(text: str) -> Any:
    """Return what a cell holds: None for an empty one, text for what is no JSON.

    >>> value_of("0.1"), value_of(""), value_of("mcp"), value_of('{"members": 4}')
    (0.1, None, 'mcp', {'members': 4})
    """
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def numbers(rows: Iterable[Row], key: str) -> list[float]:
    """Return a column of some rows; an empty cell was not measured."""
    found = (value_of(row.get(key, "")) for row in rows)
    return [float(value) for value in found if value is not None]
