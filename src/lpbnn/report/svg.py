"""matplotlib figures as inline SVG that follows the page: its fonts, its colours, light and dark.

Figures are drawn in stand-in colours, which become CSS variables; what a colour is, the page's style
sheet says, once for light and once for dark. One unit of a figure is one CSS pixel.
"""

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
_REFERENCE = re.compile(r'(?:url\(|href=")#([^")]+)')
_COMMAND = re.compile(r" ?([A-Za-z]) ?")
_FONT = re.compile(r"font-family:[^;]*;? ?")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's own font, selectable
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
        # Clips and markers are named by a hash of this and of what they are: no two meet on a page.
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": label})
        made = Drawing(width, height)
        yield made
        buffer = io.BytesIO()
        made.figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None})
    made.svg = Markup(_inline(buffer.getvalue(), made, label))


def _inline(source: bytes, made: Drawing, label: str) -> str:
    """The drawing alone: no namespaces, no groups without a use, few digits, the page's colours."""
    root = ElementTree.fromstring(source)
    _clean(root, set(_REFERENCE.findall(source.decode())))
    root.attrib = {
        "viewBox": f"0 0 {made.width:g} {made.height:g}",
        "role": "img",
        "aria-label": label,
        "style": f"max-width:{made.width:g}px",
    }
    return ElementTree.tostring(root, encoding="unicode")


def _clean(node: ElementTree.Element, used: set[str]) -> None:
    """Drop names outside of ``used`` and what draws nothing; make titles of the marks' names."""
    title = node.get("id", "")
    node.tag, node.tail = node.tag.rpartition("}")[2], None
    node.text = node.text if node.tag == "text" else None
    node.attrib = {
        key.rpartition("}")[2]: _rewritten(key, value)
        for key, value in node.attrib.items()
        if not value.startswith((TITLE, "rotate(-0 ")) and (key != "id" or value in used)
    }
    children: list[ElementTree.Element] = []
    for child in node:
        _clean(child, used)
        if child.tag == "g" and not child.attrib:
            children += child
        elif (child.tag == "defs" and not len(child)) or child.get("style") == "fill:none":
            continue
        elif child.tag not in ("metadata", "style"):
            children.append(child)
    node[:] = children
    if title.startswith(TITLE):
        told = ElementTree.Element("title")
        told.text = title.removeprefix(TITLE)
        node.insert(0, told)
        node.set("class", "mark")


def _rewritten(key: str, value: str) -> str:
    """An attribute's value with short numbers and the page's colours."""
    if key == "style":
        value = _STAND_IN.sub(_variable, _FONT.sub("", value))
        return value.replace("; ", ";").replace(": ", ":")
    if key in ("d", "points", "x", "y", "width", "height"):
        value = " ".join(_NUMBER.sub(_short, value).split())
    return _COMMAND.sub(r"\1", value) if key == "d" else value


def _variable(found: re.Match[str]) -> str:
    kind, number = found.groups()
    return f"var(--{NAMES[int(number, 16)] if kind == '01' else f'm{int(number, 16)}'})"


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")
