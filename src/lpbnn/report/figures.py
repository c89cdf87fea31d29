"""The diagrams of classification, each of one method or of all: numbers in, inline SVG out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from lpbnn.report.colours import dashes, marker
from lpbnn.report.svg import INK, LINE, MUTED, colour, drawing

FEW = 10  # examples of a bin: fewer say little, and their bar is pale
SHARES = ((0, 0.5, 1), ("0", ".5", "1"))


def reliability(
    edges: np.ndarray, accuracy: np.ndarray, count: np.ndarray, index: int, label: str
) -> str:
    """Accuracy against confidence, bin by bin, and below it where the confidences lie."""
    width = np.diff(edges)
    with drawing(204, 204, f"Reliability diagram of {label}") as d:
        axes = d.axes(26, 16, 170, 130)
        for here, alpha in (((count > 0) & (count < FEW), 0.35), (count >= FEW, 1.0)):
            left, wide, high = edges[:-1][here], width[here], accuracy[here]
            bars = axes.bar(
                left, high, wide, align="edge", color=colour(index), alpha=0.5 * alpha, linewidth=0
            )
            for bar, number in zip(bars, count[here], strict=True):
                end = bar.get_x() + bar.get_width()
                told = f"{label}: confidence {bar.get_x():.2f} to {end:.2f}, "
                d.title(bar, told + f"accuracy {bar.get_height():.3f} of {number} examples")
            axes.hlines(high, left, left + wide, color=colour(index), alpha=alpha, linewidth=2)
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, dashes=(3, 3), zorder=4)
        axes.set(xlim=(0, 1), ylim=(0, 1.01))
        axes.set_xticks((0, 0.5, 1), ())
        axes.set_yticks(*SHARES)
        axes.text(0, 1.05, "accuracy", color=MUTED, va="bottom", ha="left")
        below = d.axes(26, 154, 170, 22)
        share = count / max(1, count.sum())
        below.bar(edges[:-1], share, width, align="edge", color=MUTED, alpha=0.6, linewidth=0)
        below.set(xlim=(0, 1), ylim=(0, max(share.max(), 1e-9)))
        _confidence_axis(below)
    return d.svg


@dataclass(frozen=True)
class Line:
    """A method along severities: mean and spread over its seeds."""

    label: str
    index: int
    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """NaN where there is one run only."""
    trained: bool = True
    """Whether it trained to its end: a diverged one does not decide what range is shown."""

    @property
    def band(self) -> np.ndarray:
        """The spread, 0 where it is not known."""
        return np.nan_to_num(self.std)


@dataclass(frozen=True)
class Mark:
    """A name and the place in a chart that it belongs to; without an x it gets no thread."""

    name: str
    index: int
    x: float | None
    y: float


def severities(lines: Sequence[Line], what: str, percent: bool) -> str:
    """A metric against the severity of the corruption, every line named at its end."""
    factor = 100 if percent else 1
    names = [line.label if len(line.label) < 30 else f"{line.label[:28]}…" for line in lines]
    beside = room_for(names)
    height = max(240, 14 * len(lines) + 70)
    with drawing(440, height, f"{what} against the severity of the corruption") as d:
        axes = d.axes(34, 18, 406 - beside, height - 58)
        for line in lines:
            low, high = (line.mean - line.std) * factor, (line.mean + line.std) * factor
            axes.fill_between(line.x, low, high, color=colour(line.index), alpha=0.13, linewidth=0)
        for line in lines:
            shown = {
                "color": colour(line.index),
                "linewidth": 1.8,
                "linestyle": dashes(line.index),
                "marker": marker(line.index),
                "markersize": 3.2,
            }
            (drawn,) = axes.plot(line.x, line.mean * factor, **shown)
            d.title(drawn, _told(line, what, factor))
        ticks = sorted({float(x) for line in lines for x in line.x})
        axes.set_xticks(ticks, ["clean" if t == 0 else f"{t:g}" for t in ticks])
        axes.set_xlabel("severity", labelpad=2)
        axes.text(0, 1.03, what, transform=axes.transAxes, color=MUTED, va="bottom")
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        low, high = _range(lines, factor, percent)
        axes.set_ylim(low, high)
        marks = []
        for line, name in zip(lines, names, strict=True):
            end = float(line.mean[-1]) * factor
            beyond = " ↓" * (end < low) + " ↑" * (end > high)
            marks.append(Mark(name + beyond, line.index, float(line.x[-1]), end))
        name_beside(axes, marks)
    return d.svg


@dataclass(frozen=True)
class Cumulative:
    """The share of examples whose score is at most ``x``; both arrays are in ascending order."""

    x: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, *scores: np.ndarray) -> "Cumulative":
        """Pool the scores, or the evenly spaced quantiles, of several seeds.

        >>> Cumulative.of(np.array([3.0, 1.0]), np.array([2.0, 4.0])).share
        array([0.25, 0.5 , 0.75, 1.  ])
        """
        x = np.sort(np.concatenate(scores).astype(np.float64))
        return cls(x, np.arange(1, len(x) + 1) / len(x))

    @classmethod
    def of_confidences(cls, edges: np.ndarray, counts: np.ndarray) -> "Cumulative":
        """Turn a histogram of the confidence into the distribution of 1 - confidence.

        >>> flipped = Cumulative.of_confidences(np.array([0, 0.5, 1]), np.array([1, 3]))
        >>> flipped.x.tolist(), flipped.share.tolist()
        ([0.5, 1.0], [0.75, 1.0])
        """
        return cls(1 - edges[::-1][1:], counts[::-1].cumsum() / max(1, counts.sum()))

    def at(self, share: float) -> float:
        """The score that this share of the examples does not exceed."""
        return float(self.x[min(np.searchsorted(self.share, share), len(self.x) - 1)])

    def mapped(self, change: Callable[[np.ndarray], np.ndarray]) -> "Cumulative":
        """The distribution of an increasing function of the score."""
        return Cumulative(change(self.x), self.share)


@dataclass(frozen=True)
class ScoreAxis:
    """The axis of a score: scores outside the limits are drawn at the nearer end."""

    name: str
    low: float
    high: float
    log: bool = False


def detection(
    inside: Cumulative, outside: Cumulative, axis: ScoreAxis, index: int, label: str
) -> str:
    """The two distributions of the score: filled for the test set, a line for what was never seen."""
    with drawing(204, 128, f"Out-of-distribution scores of {label}: {axis.name}") as d:
        axes = d.axes(26, 6, 170, 86)
        axes.set_xscale("log" if axis.log else "linear")
        for part, name in ((inside, "test"), (outside, "out of distribution")):
            shown = (part.x >= axis.low) & (part.x <= axis.high)
            before = float(part.share[part.x < axis.low].max(initial=0.0))
            x = np.concatenate([[axis.low], part.x[shown], [axis.high]])
            last = float(part.share[part.x <= axis.high].max(initial=0.0))
            share = np.concatenate([[before], part.share[shown], [last]])
            x, share = _thinned(x, share)
            (line,) = axes.plot(
                x,
                share,
                color=colour(index) if part is inside else INK,
                linewidth=1.4,
                drawstyle="steps-post",
            )
            if part is inside:
                axes.fill_between(
                    x, share, color=colour(index), alpha=0.3, linewidth=0, step="post"
                )
            quartiles = ", ".join(f"{part.at(q):.3g}" for q in (0.25, 0.5, 0.75))
            d.title(line, f"{label}, {name}: quartiles of the score {quartiles}")
        axes.set(xlim=(axis.low, axis.high), ylim=(0, 1.02))
        axes.set_yticks(*SHARES)
        if axis.log:
            axes.minorticks_off()
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}".replace("e-0", "e-"))
        else:
            axes.locator_params(axis="x", nbins=4)
        axes.set_xlabel(axis.name, labelpad=0)
    return d.svg


def _thinned(x: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most 200 points, evenly spaced along the share, and both ends."""
    if len(x) <= 200:
        return x, share
    keep = np.unique(np.linspace(0, len(x) - 1, 200).round().astype(int))
    return x[keep], share[keep]


def posterior(mean: np.ndarray, std: np.ndarray, index: int, label: str) -> str:
    """Some inputs of a layer: each member's factor (J, m), and how far a draw lies from it."""
    number, inputs = mean.shape
    with drawing(440, 250, f"Factors of the members of {label}") as d:
        axes = d.axes(34, 18, 398, 196)
        for place in range(0, inputs, 2):
            axes.axvspan(place - 0.5, place + 0.5, color=LINE, alpha=0.45, linewidth=0)
        for member in range(number):
            x = np.arange(inputs) + (member - (number - 1) / 2) * 0.7 / number
            low, high = mean[member] - std[member], mean[member] + std[member]
            axes.vlines(x, low, high, color=colour(index), alpha=0.45, linewidth=2)
            axes.plot(x, mean[member], ".", color=colour(index), markersize=5)
        axes.axhline(1, color=MUTED, linewidth=0.9, dashes=(3, 3), zorder=0)
        axes.set_xlim(-0.7, inputs - 0.3)
        axes.set_xticks(())
        axes.locator_params(axis="y", nbins=5)
        axes.set_xlabel("inputs of the layer", labelpad=6)
        axes.text(0, 1.03, "factor r̂", transform=axes.transAxes, color=MUTED, va="bottom")
    return d.svg


def _told(line: Line, what: str, factor: float) -> str:
    """The numbers of a line, as the pointer shows them."""
    values = ", ".join(
        f"{'clean' if x == 0 else f'{x:g}'}: {factor * mean:.4g}"
        for x, mean in zip(line.x, line.mean, strict=True)
    )
    return f"{line.label}, {what}: {values}"


def _confidence_axis(axes: Axes) -> None:
    axes.set_xticks(*SHARES)
    axes.set_yticks(())
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("confidence", labelpad=0)


def _range(lines: Sequence[Line], factor: float, percent: bool) -> tuple[float, float]:
    """All that trained, with some air, and no further than the numbers can go."""
    deciding = [line for line in lines if line.trained] or lines
    low = min(float(np.nanmin(line.mean - line.band)) for line in deciding) * factor
    high = max(float(np.nanmax(line.mean + line.band)) for line in deciding) * factor
    air = 0.06 * max(high - low, 0.01 * factor)
    if percent:
        return max(0, low - air), min(101, high + air)
    return 0, high + air


def name_beside(axes: Axes, marks: Sequence[Mark]) -> None:
    """Names to the right of what they name, pushed apart, each with a thread to it."""
    low, high = map(float, axes.get_ylim())
    left, right = axes.get_xlim()
    box = axes.get_window_extent()
    up, across = (high - low) / box.height, (right - left) / box.width
    heights = [min(max(mark.y, low), high) for mark in marks]
    places = spread(heights, 13 * up, low + 7 * up, high)
    for mark, y, place in zip(marks, heights, places, strict=True):
        if mark.x is not None:
            xs = [mark.x + 4 * across, right + 6 * across, right + 13 * across]
            # Thin, grey and dotted: a solid one in the method's colour reads as an error bar.
            thread = {"color": MUTED, "linewidth": 0.8, "dashes": (1, 2.5), "clip_on": False}
            axes.plot(xs, [y, place, place], zorder=1, **thread)
        shape = {"marker": marker(mark.index), "color": colour(mark.index), "markersize": 4.5}
        axes.plot(right + 18 * across, place, clip_on=False, **shape)
        axes.text(right + 24 * across, place, mark.name, va="center", ha="left", clip_on=False)
    axes.set(xlim=(left, right), ylim=(low, high))


def room_for(names: Sequence[str]) -> float:
    """Pixels to the right of a chart that ``name_beside`` needs."""
    return 37 + 5.8 * max(map(len, names))


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The same places at least ``gap`` apart, moved as little as their order and bounds allow.

    >>> spread([5.0, 5.0, 1.0], gap=1.0, low=0.0, high=10.0)
    [4.5, 5.5, 1.0]
    >>> spread([10.0, 10.0], gap=1.0, low=0.0, high=10.0)
    [9.0, 10.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    blocks: list[tuple[float, int]] = []  # (centre, number of names): neighbours that touch merge
    for i in order:
        blocks.append((places[i], 1))
        while True:
            centre, number = blocks[-1]
            half = (number - 1) * gap / 2
            blocks[-1] = (min(max(centre, low + half), high - half), number)
            if len(blocks) < 2:
                break
            (before, fewer), (centre, number) = blocks[-2:]
            if centre - before >= (fewer + number) * gap / 2 - 1e-12:
                break
            total = fewer + number
            blocks[-2:] = [((before * fewer + centre * number) / total, total)]
    found = [0.0] * len(places)
    ranked = iter(order)
    for centre, number in blocks:
        for step in range(number):
            found[next(ranked)] = centre + (step - (number - 1) / 2) * gap
    return found
