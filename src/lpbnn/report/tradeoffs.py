"""What is paid in accuracy for calibration and detection: a chart for each, a point for each row."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from lpbnn.metrics.info import METRICS
from lpbnn.report import html, tables
from lpbnn.report.colours import marker
from lpbnn.report.figures import Mark, name_beside, room_for
from lpbnn.report.runs import Group
from lpbnn.report.svg import LINE, MUTED, colour, drawing
from lpbnn.report.tables import Cell

LONGEST = 34  # letters of a name beside a chart
SETTINGS = re.compile(r" \((.*)\)$")


@dataclass(frozen=True)
class Point:
    """A row of the comparison: mean and spread over its seeds (0 of one run)."""

    label: str
    index: int
    x: float
    y: float
    dx: float
    dy: float


def tradeoffs(groups: Sequence[Group]) -> str:
    """Accuracy against ECE, against the AUROC of each set never seen, and against cE."""
    measured = [("", "ece", ("test", "ece"))]
    measured += [
        (tables.PIXELS.get(name, name), "auroc", ("ood", name, "auroc"))
        for name in tables.measured_on(groups, "ood")
    ]
    measured.append(("", "ce", ("corruption", "ce")))
    charts = []
    for name, key, path in measured:
        points = [point for group in groups if (point := _point(group, path)) is not None]
        if len(points) > 1:
            info = METRICS[key]
            words = (name, info.title, info.arrow)
            charts.append(html.chart(chart(points, " ".join(word for word in words if word))))
    return html.said(
        "What one method gains in calibration or detection, another pays for in accuracy: of two points "
        "the one further right and, by the arrow, further up or down is the better in both. Bars are one "
        "standard deviation over seeds. A network far outside has its numbers beside its name; one that "
        "diverged is left out.",
        html.panels(charts, "charts") if charts else "",
    )


def chart(points: Sequence[Point], what: str) -> str:
    """A number against accuracy, every point named at the right."""
    across = limits([p.x for p in points], [p.dx for p in points])
    up = limits([p.y for p in points], [p.dy for p in points])
    marks = [_mark(p, across, up) for p in points]
    beside = room_for([mark.name for mark in marks])
    height = max(230, 14 * len(points) + 70)
    with drawing(440, height, f"{what} against accuracy") as d:
        axes = d.axes(40, 18, 400 - beside, height - 58)
        axes.set(xlim=across, ylim=up)
        for p in points:
            bars = {"color": colour(p.index), "alpha": 0.45, "linewidth": 1.6}
            axes.hlines(p.y, p.x - p.dx, p.x + p.dx, **bars)
            axes.vlines(p.x, p.y - p.dy, p.y + p.dy, **bars)
            (dot,) = axes.plot(
                p.x, p.y, marker(p.index), color=colour(p.index), markersize=5.5, zorder=4
            )
            d.title(dot, _told(p, what))
        axes.set_xlabel("accuracy, % →", labelpad=2)
        axes.text(0, 1.03, what, transform=axes.transAxes, color=MUTED, va="bottom")
        axes.grid(color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.locator_params(nbins=5)
        axes.ticklabel_format(useOffset=False)  # whole numbers, however close they are
        name_beside(axes, marks)
    return d.svg


def limits(values: Sequence[float], spreads: Sequence[float] = ()) -> tuple[float, float]:
    """The range of what lies together with its bars: one far off would press the others flat.

    >>> low, high = limits([1.0, 2.0, 3.0, 2.0, 99.0])
    >>> low < 1 and 3 < high < 4
    True
    >>> low, high = limits([1.0, 2.0], [0.5, 0.0])  # whole bars
    >>> low < 0.5
    True
    """
    first, _, third = quantiles(values, n=4, method="inclusive")
    reach = 3 * max(third - first, 1e-9)
    bars = zip(values, spreads or [0.0] * len(values), strict=True)
    near = [
        end
        for value, spread in bars
        if first - reach <= value <= third + reach
        for end in (value - spread, value + spread)
    ]
    air = max(0.08 * (max(near) - min(near)), 1e-3 * max(1e-3, *map(abs, near)))
    return min(near) - air, max(near) + air


def shortened(label: str) -> str:
    """A row's name with the values of its settings alone, of switches those that are on.

    They tell rows apart; which settings they are of, the table says in the same order.

    >>> shortened("LP-BNN (train_decoder=yes, by_width=no, log_variance=-2)")
    'LP-BNN (train_decoder, -2)'
    >>> shortened("LP-BNN (train_decoder=no)"), shortened("Deep Ensembles")
    ('LP-BNN', 'Deep Ensembles')
    """

    def values(found: re.Match[str]) -> str:
        pairs = [part.partition("=") for part in found[1].split(", ")]
        told = [
            name if value == "yes" else value or name for name, _, value in pairs if value != "no"
        ]
        return f" ({', '.join(told)})" if told else ""

    return SETTINGS.sub(values, label)


def _told(p: Point, what: str) -> str:
    """The numbers of a point, as the pointer shows them."""
    across = f"{p.x:.2f}" + f" ± {p.dx:.2f}" * bool(p.dx)
    up = f"{p.y:.4f}" + f" ± {p.dy:.4f}" * bool(p.dy)
    return f"{p.label}: accuracy {across} %, {what} {up}"


def _point(group: Group, path: tuple[str, ...]) -> Point | None:
    if group.diverged:
        return None
    x, y = Cell.of(group.values("test", "accuracy")), Cell.of(group.values(*path))
    if x.mean is None or y.mean is None:
        return None
    spreads = (100 * (x.std or 0.0), y.std or 0.0)
    return Point(group.label, group.index, 100 * x.mean, y.mean, *spreads)


def _mark(point: Point, across: tuple[float, float], up: tuple[float, float]) -> Mark:
    """A point's name; of one that lies outside, with its numbers instead of a thread."""
    name = point.label if len(point.label) < LONGEST else shortened(point.label)
    name = name if len(name) < LONGEST else f"{name[: LONGEST - 2]}…"
    if across[0] <= point.x <= across[1] and up[0] <= point.y <= up[1]:
        return Mark(name, point.index, point.x, point.y)
    return Mark(f"{name} ({point.x:.1f}, {point.y:.3f})", point.index, None, point.y)
