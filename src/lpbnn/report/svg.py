"""matplotlib figures as inline SVG that follows the page: its fonts, its colours, light and dark.

Figures are drawn in stand-in colours, which become CSS variables; what a colour is, the page's style
sheet says, once for light and once for dark. One unit of a figure is one CSS pixel.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lpbnn.plots import TITLE
from lpbnn.report.colours import COLOURS

INK, MUTED, LINE, PAPER = "#010101", "#010102", "#010103", "#010104"
NAMES = ("", "ink", "muted", "line", "paper")  # by the last byte of the four
_STAND_IN = re.compile(r"#01(01|02)([0-9a-f]{2})")
_NUMBER = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r'(url\(#|^#|href="#)([^")]+)')
_COMMAND = re.compile(r" ?([A-Za-z]) ?")
_FONT = re.compile(r"font-family:[^;]*;? ?")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's own font, selectable
    "svg.hashsalt": "lpbnn",
    "text.parse_math": False,  # names are shown as they are
    "font.size": 10.5,
    "text.color": INK,
    "grid.color": LINE,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": PAPER,
    "figure.dpi": 72,
    "savefig.dpi": 72,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "lines.solid_capstyle": "round",
}


def colour(index: int) -> str:
    """Return the stand-in for the colour of a method."""
    return f"#0102{index % COLOURS:02x}"


class Drawing:
    """A figure of so many pixels; ``svg`` is there once its ``drawing`` block is left."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72))
        self.svg = Markup("")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes whose box is given in pixels from the upper left corner."""
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)


@contextmanager
def drawing(width: float, height: float, label: str) -> Iterator[Drawing]:
    """Draw within this block; ``label`` is what a screen reader says.

    >>> with drawing(100, 50, "A <line>") as d:
    ...     line = d.axes(10, 5, 80, 40).plot([0, 1], color=colour(3))
    >>> str(d.svg[:71])
    '<svg viewBox="0 0 100 50" role="img" aria-label="A &lt;line&gt;" style='
    >>> "var(--m3)" in d.svg, "http" in d.svg
    (True, False)
    """
    # The settings of whoever calls are put back; matplotlib has no other way to choose them.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        made = Drawing(width, height)
        yield made
        buffer = io.BytesIO()
        made.figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None})
    made.svg = Markup(_inline(buffer.getvalue(), made, label))


def _inline(source: bytes, made: Drawing, label: str) -> str:
    """The drawing alone: no namespaces, names of its own, few digits, the page's colours."""
    root = ElementTree.fromstring(source)
    # A name in one drawing must not meet the same name in another on the page.
    prefix = "d" + hashlib.sha256(source + label.encode()).hexdigest()[:8]
    named = {name for _, name in _REFERENCE.findall(source.decode())}
    for node in list(root.iter()):
        node.tag = node.tag.rpartition("}")[2]
        node.tail = None
        title = node.get("id", "")
        if node.tag != "text":
            node.text = None
        node.attrib = {
            key.rpartition("}")[2]: _rewritten(key, value, prefix)
            for key, value in node.attrib.items()
            if not value.startswith((TITLE, "rotate(-0 ")) and (key != "id" or value in named)
        }
        if title.startswith(TITLE):
            told = ElementTree.Element("title")
            told.text = title.removeprefix(TITLE)
            node.insert(0, told)
            node.set("class", "mark")
    root[:] = _needed(root)
    root.attrib = {
        "viewBox": f"0 0 {made.width:g} {made.height:g}",
        "role": "img",
        "aria-label": label,
        "style": f"max-width:{made.width:g}px",
    }
    return ElementTree.tostring(root, encoding="unicode")


def _rewritten(key: str, value: str, prefix: str) -> str:
    """An attribute's value with short numbers, the page's colours and the drawing's own names."""
    if key == "id":
        return f"{prefix}-{value}"
    if key == "style":
        value = _STAND_IN.sub(_variable, _FONT.sub("", value))
        value = value.replace("; ", ";").replace(": ", ":")
    elif key in ("d", "points", "transform", "x", "y", "width", "height"):
        value = " ".join(_NUMBER.sub(_short, value).split())
        value = _COMMAND.sub(r"\1", value) if key == "d" else value
    return _REFERENCE.sub(rf"\g<1>{prefix}-\2", value)


def _variable(found: re.Match[str]) -> str:
    kind, number = found.groups()
    return f"var(--{NAMES[int(number, 16)] if kind == '01' else f'm{int(number, 16)}'})"


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _needed(node: ElementTree.Element) -> list[ElementTree.Element]:
    """The children without what draws nothing: groups around nothing said, boxes without paint."""
    kept: list[ElementTree.Element] = []
    for child in node:
        child[:] = _needed(child)
        if child.tag == "g" and not child.attrib:
            kept += list(child)
            continue
        invisible = child.tag in ("metadata", "style") or child.get("style") == "fill:none"
        if not invisible and (child.tag != "defs" or len(child)):
            kept.append(child)
    return kept
