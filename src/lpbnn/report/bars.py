"""The members' bars for one image, drawn by hand: matplotlib takes 40 ms for each of hundreds."""

from collections.abc import Sequence

import numpy as np

from lpbnn.report.colours import COLOURS
from lpbnn.report.html import esc

WIDTH, HEIGHT = 96, 60  # pixels, of all members together
SIDE, AIR = 2, 2  # beside the bars, and between two members
MOST = 8  # members: rows of more would be hairlines
LONG = 2  # letters: longer names of classes are turned


def member_bars(
    members: np.ndarray, names: Sequence[str], truth: int | None, index: int, label: str
) -> str:
    """Each member's probabilities of the classes (S, C): a row of bars per member, of ``MOST`` at most.

    >>> svg = member_bars(np.array([[0.25, 0.75], [1.0, 0.0]]), ["a", "b"], 0, 3, "LP-BNN: a")
    >>> svg.count("<path"), svg.count("z"), svg.count('class="true"')
    (3, 4, 1)
    """
    shown = np.linspace(0, len(members) - 1, min(len(members), MOST)).round().astype(int)
    number, classes = len(shown), members.shape[1]
    turned = max(map(len, names), default=0) > LONG
    row, step = HEIGHT / number, (WIDTH - 2 * SIDE) / classes
    tall = row - min(AIR, row / 4)
    places = SIDE + step * (np.arange(classes) + 0.5)
    bars, lines = "", ""
    for at, member in enumerate(shown):
        values = np.nan_to_num(members[member])
        foot = SIDE + row * (at + 1)
        lines += f"M{SIDE} {foot:.1f}H{WIDTH - SIDE}"
        outline = "".join(
            f"M{place - 0.4 * step:.1f} {foot:.1f}v{-value * tall:.1f}h{0.8 * step:.1f}V{foot:.1f}z"
            for place, value in zip(places, values, strict=True)
        )
        best = int(values.argmax())
        told = f"member {member + 1} of {len(members)}: {names[best]} {values[best]:.2f}"
        bars += f'<path d="{outline}"><title>{esc(told)}</title></path>'
    texts = ""
    for at, (place, name) in enumerate(zip(places, names, strict=True)):
        kind = ' class="true"' if at == truth else ""
        down = HEIGHT + SIDE + (4 if turned else 9)
        turn = f' transform="rotate(-90 {place:.1f} {down})"' if turned else ""
        shift = 3 if turned else 0
        texts += f'<text x="{place:.1f}" y="{down + shift}"{turn}{kind}>{esc(name)}</text>'
    high = HEIGHT + (44 if turned else 16)
    return (
        f'<svg class="bars{" turned" * turned}" viewBox="0 0 {WIDTH} {high}" role="img" '
        f'aria-label="{esc(label)}"><path class="feet" d="{lines}"/>'
        f'<g style="fill:var(--m{index % COLOURS})">{bars}</g>{texts}</svg>'
    )
