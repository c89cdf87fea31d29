"""Single images, and what every method says of them: rows are images, columns are methods."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lpbnn.report import pictures
from lpbnn.report.bars import member_bars
from lpbnn.report.html import esc, image, name, scroll
from lpbnn.report.runs import Group, Run

CLASSES_SHOWN = 10
SMALL = 64  # pixels: below, pixels are shown as squares


class Shown(NamedTuple):
    """One image: the kind of example it is, and its key among those of that kind."""

    kind: str
    key: tuple[str, ...]


def kinds(groups: Sequence[Group]) -> list[str]:
    """``examples/test``, ``examples/corrupted``, ``examples/ood/<name>``, as far as there are any."""
    found = (
        key.removesuffix("/images")
        for group in groups
        for key in group.shown.arrays
        if key.startswith("examples/") and key.endswith("/images")
    )
    return list(dict.fromkeys(found))


def member_grid(groups: Sequence[Group]) -> str:
    """Each member's class probabilities for each image; empty where no run has kept any."""
    able = [g for g in groups if any(f"{k}/members" in g.shown.arrays for k in kinds(groups))]
    if not able:
        return ""
    body = ""
    for kind in kinds(able):
        body += f'<tr class="kind"><th colspan="{len(able) + 1}"><span>{kind_title(kind)}</span></th></tr>'
        for key, (run, place) in places(able, kind).items():
            body += _row(able, Shown(kind, key), run, place)
    made = f'<table class="grid" style="--n:{len(able)}">{head(able)}<tbody>{body}</tbody></table>'
    return scroll(made, "Members' answers")


def head(groups: Sequence[Group], first: str = "Image") -> str:
    """The names of the methods."""
    heads = "".join(f'<th scope="col">{name(group.label, group.index)}</th>' for group in groups)
    return f'<thead><tr><th class="first">{first}</th>{heads}</tr></thead>'


def kind_title(kind: str) -> str:
    """A kind of examples in words."""
    part = kind.removeprefix("examples/")
    fixed = {"test": "Test images", "corrupted": "The same, corrupted"}
    return fixed.get(part) or f"Out of distribution: {esc(part.removeprefix('ood/'))}"


def keys(run: Run, kind: str) -> list[tuple[str, ...]]:
    """What identifies an image: its place in the data set and, if any, its corruption."""
    if f"{kind}/index" not in run.arrays:
        return []
    parts = [run.arrays[f"{kind}/index"]]
    parts += [
        a for n in ("corruption", "severity") if (a := run.arrays.get(f"{kind}/{n}")) is not None
    ]
    return [tuple(map(str, values)) for values in zip(*parts, strict=True)]


def places(groups: Sequence[Group], kind: str) -> dict[tuple[str, ...], tuple[Run, int]]:
    """Every image of a kind, and where the first run that has it keeps it."""
    found: dict[tuple[str, ...], tuple[Run, int]] = {}
    for group in groups:
        for place, key in enumerate(keys(group.shown, kind)):
            found.setdefault(key, (group.shown, place))
    return found


def _row(groups: Sequence[Group], shown: Shown, run: Run, place: int) -> str:
    label = int(run.arrays[f"{shown.kind}/labels"][place])
    names = run.data.classes or tuple(map(str, range(run.data.num_classes or 0)))
    answers = {g.index: _answer(g.shown, shown) for g in groups}
    given = [members for members in answers.values() if members is not None]
    classes = _classes(given, label)
    cells = ""
    for group in groups:
        members = answers[group.index]
        if members is None:
            cells += "<td></td>"
            continue
        cells += f"<td>{_cell(members, classes, names, label, group)}</td>"
    return f'<tr><th scope="row" class="first">{_input(run, shown, place, names, label)}</th>{cells}</tr>'


def _answer(run: Run, shown: Shown) -> np.ndarray | None:
    """The members' probabilities (S, C) of one image."""
    known, members = keys(run, shown.kind), run.arrays.get(f"{shown.kind}/members")
    return (
        members[:, known.index(shown.key)] if members is not None and shown.key in known else None
    )


def _classes(answers: Sequence[np.ndarray], label: int) -> list[int]:
    """All classes of a few, otherwise those that any method finds likely, and the true one."""
    means = np.stack([members.mean(0) for members in answers])
    if means.shape[1] <= CLASSES_SHOWN:
        return list(range(means.shape[1]))
    likely = np.argsort(-means.max(0), kind="stable")[:CLASSES_SHOWN].tolist()
    if label >= 0 and label not in likely:
        likely[-1] = label
    return sorted(likely)


def _cell(
    members: np.ndarray, classes: list[int], names: Sequence[str], label: int, group: Group
) -> str:
    mean = members.mean(0)
    best = int(mean.argmax())
    said = f"{_short(names[best])}: {mean[best]:.2f}"
    truth = classes.index(label) if label in classes else None
    short = [_short(names[i]) for i in classes]
    svg = member_bars(members[:, classes], short, truth, group.index, f"{group.label}: {said}")
    verdict = "" if label < 0 else f' <span title="{"right" if best == label else "wrong"}">'
    verdict += "" if label < 0 else f"{'✓' if best == label else '✗'}</span>"
    return f'{svg}<span class="said">{esc(said)}{verdict}</span>'


def _short(text: str) -> str:
    return text if len(text) <= 7 else text[:6] + "."


def _input(run: Run, shown: Shown, place: int, names: Sequence[str], label: int) -> str:
    """The picture and what it is."""
    values = run.arrays[f"{shown.kind}/images"][place]
    what = f"label {names[label]}" if label >= 0 else "no class"
    if len(shown.key) == 3:
        what = f"{shown.key[1].replace('_', ' ')}, severity {shown.key[2]}; {what}"
    made = pictures.data_uri(pictures.picture(values))
    return f"{image(made, what, values.shape[-1] < SMALL, 56)}<span>{esc(what)}</span>"
