"""Street scenes side by side: input and truth, and every method's labels, confidence and ignorance."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from lpbnn.report import maps
from lpbnn.report.gallery import head, keys, kind_title, kinds, places
from lpbnn.report.html import esc, image, scroll
from lpbnn.report.pictures import data_uri, picture
from lpbnn.report.runs import Group, Run
from lpbnn.training.build import DataInfo

ROOM, LARGEST, SMALLEST = 1060, 168, 112  # pixels of the page for all columns; width of a map
ROWS = {"predicted": "prediction", "confidence": "confidence", "epistemic": "epistemic uncertainty"}


class Look(NamedTuple):
    """What all maps share: colours, the number of the anomaly, the end of the scale, the width."""

    colours: np.ndarray
    anomaly: int | None
    top: float
    width: int


def segmentation_grid(groups: Sequence[Group]) -> str:
    """A block of rows for each scene, a column for each method; empty where no run has kept maps."""
    able = [group for group in groups if _has_maps(group.shown)]
    if not able:
        return ""
    info = able[0].shown.data
    colours = maps.palette(info.classes, info.num_classes or 1)
    width = min(LARGEST, max(SMALLEST, ROOM // (len(able) + 1) - 6))
    look = Look(colours, info.ood_index, _top(able), width)
    body = ""
    for kind in kinds(able):
        title = kind_title(kind)
        body += f'<tr class="kind"><th colspan="{len(able) + 2}"><span>{title}</span></th></tr>'
        for key, (run, place) in places(able, kind).items():
            body += _scene(able, kind, key, run, place, look)
    heads = head(able, "Scene").replace("</th>", "</th><th></th>", 1)
    made = f'<table class="grid maps">{heads}<tbody>{body}</tbody></table>'
    return legend(info, look) + scroll(made, "Segmentations")


def legend(info: DataInfo, look: Look) -> str:
    """What the colours of the three kinds of maps mean."""
    names = info.classes or tuple(map(str, range(info.num_classes or 0)))
    entries = [(name, tuple(colour)) for name, colour in zip(names, look.colours, strict=True)]
    if look.anomaly is not None:
        entries.append(("anomaly (in the truth; elsewhere its outline)", maps.ANOMALY))
    entries.append(("void", maps.VOID))
    chips = "".join(
        f'<span><i style="background:rgb({r},{g},{b})"></i>{esc(name)}</span>'
        for name, (r, g, b) in entries
    )
    bars = _bar("confidence", maps.SURE, "0", "1")
    if look.top:
        bars += _bar(ROWS["epistemic"], maps.UNSURE, "0", f"{look.top:g} nats")
    return f'<p class="keys">{chips}</p><p class="keys">{bars}</p>'


def _bar(what: str, scale: str, low: str, high: str) -> str:
    ramp = maps.shaded(np.linspace(0, 1, 128)[None].repeat(2, 0), scale=scale)
    shown = image(data_uri(ramp), f"from {low} to {high}")
    return f'<span class="scale">{esc(what)} {low} {shown} {esc(high)}</span>'


def _scene(
    groups: Sequence[Group], kind: str, key: tuple[str, ...], run: Run, place: int, look: Look
) -> str:
    """Three rows: what every method says; beside them the picture and its truth."""
    truth = maps.thinned(run.arrays[f"{kind}/labels"][place])
    strange = truth == look.anomaly if look.anomaly is not None else np.zeros_like(truth, bool)
    shown = picture(maps.thinned(run.arrays[f"{kind}/images"][place]))
    share = f", {100 * strange.mean():.1f} % anomalous" if strange.any() else ""
    beside = [
        _shown(shown, "input", look) + "<span>input</span>",
        _shown(maps.labelled(truth, look.colours, look.anomaly), "truth", look)
        + "<span>truth</span>",
        f"<span>test image {esc(key[0])}{share}</span>",
    ]
    rows = ""
    for (name, words), first in zip(ROWS.items(), beside, strict=True):
        cells = "".join(
            f"<td>{_cell(g.shown, kind, key, name, look, strange)}</td>" for g in groups
        )
        start = ' class="scene"' if not rows else ""
        rows += (
            f'<tr{start}><th class="first">{first}</th><th class="what">{words}</th>{cells}</tr>'
        )
    return rows


def _cell(
    run: Run, kind: str, key: tuple[str, ...], name: str, look: Look, strange: np.ndarray
) -> str:
    found = keys(run, kind)
    array = run.arrays.get(f"{kind}/{name}")
    if key not in found or array is None:
        return ""
    values = maps.thinned(array[found.index(key)])
    if name == "predicted":
        made = maps.labelled(values, look.colours)
    elif name == "confidence":
        made = maps.shaded(values)
    elif not values.any():
        why = (
            "none: it is one network" if run.at("cost", "members") == 1 else "0: its members agree"
        )
        return f'<span class="said">{why}</span>'
    else:
        made = maps.shaded(values, look.top, maps.UNSURE)
    outline = strange if strange.shape == values.shape else np.zeros_like(values, bool)
    return _shown(maps.outlined(made, outline), ROWS[name], look)


def _shown(made: Image.Image, what: str, look: Look) -> str:
    return image(data_uri(made), what, pixelated=made.width < look.width, width=look.width)


def _has_maps(run: Run) -> bool:
    predicted = run.arrays.get("examples/test/predicted")
    return run.data.task == "segmentation" and predicted is not None and predicted.ndim == 3


def _top(groups: Sequence[Group]) -> float:
    """One scale for all methods; 0 where none of them has members."""
    found = [
        array.ravel()
        for group in groups
        for name, array in group.shown.arrays.items()
        if name.startswith("examples/") and name.endswith("/epistemic") and array.any()
    ]
    return maps.round_top(np.concatenate(found)) if found else 0.0
