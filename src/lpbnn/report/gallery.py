"""Single images, and what every method says of them: members' probabilities, maps of street scenes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from lpbnn import plots
from lpbnn.report import pictures
from lpbnn.report.runs import Group, Run
from lpbnn.report.svg import colour, drawing

CLASSES_SHOWN = 10
MOST = 8  # members: rows of more would be hairlines
SMALL = 64  # pixels: below, pixels are shown as squares
PITCH = 106  # pixels from one method to the next in a row of bars
ROOM, LARGEST, SMALLEST = 1060, 168, 112  # pixels of the page for all columns; width of a map
MAPS = {"predicted": "prediction", "confidence": "confidence", "epistemic": "epistemic uncertainty"}

Key = tuple[str, ...]  # an image's place in the data set and, if any, its corruption


class Picture(NamedTuple):
    """A PNG and what it shows."""

    uri: str
    what: str
    pixelated: bool = False
    width: int | None = None


class Answers(NamedTuple):
    """One image and the members' bars of all methods."""

    picture: Picture
    svg: Markup


class Scene(NamedTuple):
    """One street scene: input and truth, then for each kind of map one per method, or why it has none."""

    pictures: Sequence[Picture]
    what: str
    maps: Mapping[str, Sequence[Picture | str]]


@dataclass(frozen=True)
class Grid:
    """Rows of images by kind, columns of methods."""

    groups: Sequence[Group]
    rows: Mapping[str, Sequence[Answers | Scene]]
    classes: Sequence[tuple[str, tuple[int, ...]]] = ()
    """Names and colours of the classes of maps."""
    scales: Sequence[tuple[str, str, str, Picture]] = ()
    """Of the maps of numbers: name, both ends, the colours between."""
    most: int = MOST


def member_grid(groups: Sequence[Group]) -> Grid | None:
    """Each member's class probabilities for each image; None where no run has kept any."""
    able = [g for g in groups if any(f"{k}/members" in g.shown.arrays for k in _kinds(groups))]
    rows = {
        _title(kind): [_answers(able, kind, *found) for found in _places(able, kind).items()]
        for kind in _kinds(able)
    }
    return Grid(able, rows) if able else None


def segmentation_grid(groups: Sequence[Group]) -> Grid | None:
    """Every method's labels, confidence and epistemic uncertainty; None where no run has kept maps."""
    able = [group for group in groups if _has_maps(group.shown)]
    if not able:
        return None
    info = able[0].shown.data
    colours = plots.palette(info.classes, info.num_classes or 1)
    width = min(LARGEST, max(SMALLEST, ROOM // (len(able) + 1) - 6))
    look = _Look(colours, info.ood_index, _top(able), width)
    rows = {
        _title(kind): [_scene(able, kind, *found, look) for found in _places(able, kind).items()]
        for kind in _kinds(able)
    }
    names = info.classes or tuple(map(str, range(info.num_classes or 0)))
    classes = [(name, tuple(map(int, c))) for name, c in zip(names, colours, strict=True)]
    if look.anomaly is not None:
        classes.append(("anomaly (in the truth; elsewhere its outline)", pictures.ANOMALY))
    scales = [_scale("confidence", plots.SURE, "1")]
    if look.top:
        scales.append(_scale(MAPS["epistemic"], plots.UNSURE, f"{look.top:g} nats"))
    return Grid(able, rows, [*classes, ("void", plots.VOID)], scales)


def _kinds(groups: Sequence[Group]) -> list[str]:
    """``examples/test``, ``examples/corrupted``, ``examples/ood/<name>``, as far as there are any."""
    found = (
        key.removesuffix("/images")
        for group in groups
        for key in group.shown.arrays
        if key.startswith("examples/") and key.endswith("/images")
    )
    return list(dict.fromkeys(found))


def _title(kind: str) -> str:
    part = kind.removeprefix("examples/")
    fixed = {"test": "Test images", "corrupted": "The same, corrupted"}
    return fixed.get(part) or f"Out of distribution: {part.removeprefix('ood/')}"


def _keys(run: Run, kind: str) -> list[Key]:
    names = ("index", "corruption", "severity")
    parts = [a for n in names if (a := run.arrays.get(f"{kind}/{n}")) is not None]
    return [tuple(map(str, values)) for values in zip(*parts, strict=True)]


def _places(groups: Sequence[Group], kind: str) -> dict[Key, tuple[Run, int]]:
    """Every image of a kind, and where the first run that has it keeps it."""
    found: dict[Key, tuple[Run, int]] = {}
    for group in groups:
        for place, key in enumerate(_keys(group.shown, kind)):
            found.setdefault(key, (group.shown, place))
    return found


def _stored(run: Run, kind: str, name: str, key: Key, axis: int) -> np.ndarray | None:
    """What a run says of one image; None if it has not kept it."""
    known, array = _keys(run, kind), run.arrays.get(f"{kind}/{name}")
    return None if array is None or key not in known else array.take(known.index(key), axis)


def _answers(groups: Sequence[Group], kind: str, key: Key, found: tuple[Run, int]) -> Answers:
    """The bars of all methods for one image, in one drawing: every figure has a cost of its own."""
    run, place = found
    label = int(run.arrays[f"{kind}/labels"][place])
    names = run.data.classes or tuple(map(str, range(run.data.num_classes or 0)))
    answers = {g.label: _stored(g.shown, kind, "members", key, 1) for g in groups}
    classes = _classes([members for members in answers.values() if members is not None], label)
    short = [_short(names[i]) for i in classes]
    truth = classes.index(label) if label in classes else None
    what = f"label {names[label]}" if label >= 0 else "no class"
    if len(key) == 3:
        what = f"{key[1].replace('_', ' ')}, severity {key[2]}; {what}"
    below = 40 if max(map(len, short)) > 2 else 14
    with drawing(PITCH * len(groups), 78 + below, f"Members of every method: {what} {key}") as d:
        axes = d.axes(0, 2, PITCH * len(groups), 60)
        pitch = len(classes) * PITCH / (PITCH - 10)
        for number, group in enumerate(groups):
            members = answers[group.label]
            if members is None:
                continue
            left, paint = number * pitch, colour(group.index)
            shown = members[:, classes]
            plots.member_bars(axes, shown, short, truth, color=paint, left=left, most=MOST)
            mean = members.mean(0)
            best = int(mean.argmax())
            verdict = "" if label < 0 else " ✓" if best == label else " ✗"
            said = f"{_short(names[best])}: {mean[best]:.2f}{verdict}"
            text = axes.text(left, -(below + 2) / 60, said, va="top", fontsize=12.5)
            plots.told(text, f"{group.label}: {names[best]} {mean[best]:.3f}")
        axes.set_xlim(0, len(groups) * pitch)
    values = run.arrays[f"{kind}/images"][place]
    image = pictures.data_uri(pictures.picture(values))
    return Answers(Picture(image, what, values.shape[-1] < SMALL, 56), d.svg)


def _classes(answers: Sequence[np.ndarray], label: int) -> list[int]:
    """All classes of a few, otherwise those that any method finds likely, and the true one."""
    means = np.stack([members.mean(0) for members in answers])
    if means.shape[1] <= CLASSES_SHOWN:
        return list(range(means.shape[1]))
    likely = np.argsort(-means.max(0), kind="stable")[:CLASSES_SHOWN].tolist()
    if label >= 0 and label not in likely:
        likely[-1] = label
    return sorted(likely)


def _short(text: str) -> str:
    return text if len(text) <= 7 else text[:6] + "."


class _Look(NamedTuple):
    """What all maps share: colours, the number of the anomaly, the end of the scale, the width."""

    colours: np.ndarray
    anomaly: int | None
    top: float
    width: int


def _scene(
    groups: Sequence[Group], kind: str, key: Key, found: tuple[Run, int], look: _Look
) -> Scene:
    run, place = found
    truth = pictures.thinned(run.arrays[f"{kind}/labels"][place])
    strange = truth == look.anomaly if look.anomaly is not None else np.zeros_like(truth, bool)
    image = pictures.picture(pictures.thinned(run.arrays[f"{kind}/images"][place]))
    share = f", {100 * strange.mean():.1f} % anomalous" if strange.any() else ""
    labels = plots.class_pixels(truth, look.colours)
    labels[strange] = pictures.ANOMALY
    shown = [_map(image, "input", look), _map(labels, "truth", look)]
    maps = {
        words: [_said(group.shown, kind, key, name, look, strange) for group in groups]
        for name, words in MAPS.items()
    }
    return Scene(shown, f"test image {key[0]}{share}", maps)


def _said(
    run: Run, kind: str, key: Key, name: str, look: _Look, strange: np.ndarray
) -> Picture | str:
    """One map of one method, the anomaly outlined; in words why there is none."""
    values = _stored(run, kind, name, key, 0)
    if values is None:
        return ""
    values = pictures.thinned(values)
    if name == "predicted":
        made = plots.class_pixels(values, look.colours)
    elif name == "confidence":
        made = plots.value_pixels(values)
    elif not values.any():
        single = run.at("cost", "members") == 1
        return "none: it is one network" if single else "0: its members agree"
    else:
        made = plots.value_pixels(values, look.top, plots.UNSURE)
    if strange.shape == values.shape:
        made = pictures.outlined(made, strange)
    return _map(made, MAPS[name], look)


def _map(pixels: np.ndarray, what: str, look: _Look) -> Picture:
    return Picture(pictures.data_uri(pixels), what, pixels.shape[1] < look.width, look.width)


def _scale(what: str, scale: str, high: str) -> tuple[str, str, str, Picture]:
    ramp = plots.value_pixels(np.linspace(0, 1, 128)[None].repeat(2, 0), scale=scale)
    return what, "0", high, Picture(pictures.data_uri(ramp), f"from 0 to {high}")


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
    return pictures.round_top(np.concatenate(found)) if found else 0.0
