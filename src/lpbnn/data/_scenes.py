"""Street scenes in folders: pictures paired with label maps, and all that is cheap checked first.

Before training every file's head is read (size, mode, end of file) and every label map is counted,
so that a missing label, a wrong size or an id without a class is found in seconds and by name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lpbnn.data import Augment, Entry, Splits
from lpbnn.data._download import DEFAULT_ROOT
from lpbnn.data.files import (
    UNKNOWN,
    VOID,
    FileDataset,
    LabelMaps,
    Size,
    by_label,
    count_ids,
    header,
    in_threads,
    parse_size,
    size_text,
    unknown_ids,
)

_LOG = logging.getLogger(__name__)
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEMORY = 2.0  # GiB


class Ids(NamedTuple):
    """The meaning of the ids in the label files: `classes[k]` is the id of class k."""

    classes: tuple[int, ...]
    void: tuple[int, ...] = ()
    anomalies: tuple[int, ...] = ()

    def table(self, training: bool) -> np.ndarray:
        """(256,) the label of every id: anomalies are void in training, one class more elsewhere.

        >>> Ids((7, 8), void=(0,), anomalies=(9,)).table(training=False)[[7, 8, 9, 0, 1]].tolist()
        [0, 1, 2, 255, 254]
        """
        table = np.full(256, UNKNOWN, dtype=np.uint8)
        table[list(self.classes)] = np.arange(len(self.classes))
        table[list(self.void)] = VOID
        table[list(self.anomalies)] = VOID if training else len(self.classes)
        return table


class Folder(NamedTuple):
    """Folders of the pictures and label maps of a part; `ending` replaces a picture's suffix."""

    images: Path
    labels: Path
    ending: str = ".png"


class Part(NamedTuple):
    """Pairs of files of one size, and how often each id is in each label map, (N, 256)."""

    images: tuple[Path, ...]
    labels: tuple[Path, ...]
    native: Size
    counts: np.ndarray

    def where(self, chosen: np.ndarray) -> Part:
        """The pairs for which `chosen`, (N,), is true."""
        images, labels = (
            tuple(path for path, keep in zip(paths, chosen, strict=True) if keep)
            for paths in (self.images, self.labels)
        )
        return self._replace(images=images, labels=labels, counts=self.counts[chosen])

    def having(self, ids: Sequence[int]) -> np.ndarray:
        """(N,) whether a label map has any of `ids`."""
        return self.counts[:, list(ids)].sum(1) > 0

    def __add__(self, other: Part) -> Part:  # type: ignore[override]
        counts = np.concatenate([self.counts, other.counts])
        images, labels = self.images + other.images, self.labels + other.labels
        return self._replace(images=images, labels=labels, counts=counts)


@dataclass(frozen=True)
class Street:
    """A set of street scenes: its classes, what its ids mean, and how many pairs each folder has."""

    name: str
    entry: Entry
    classes: tuple[str, ...]
    ids: Ids
    published: Mapping[str, int]
    augment: Augment

    def read(self, folders: Mapping[str, Folder]) -> dict[str, Part]:
        """Read the pairs of every folder, checked against each other and against the classes."""
        found = {name: _part(folder, self.ids) for name, folder in folders.items()}
        first = next(iter(found.values()))
        for part in found.values():
            _require_one_size(part.images[0], part.native, first.images[0], first.native)
        return found

    def anomalous(self, *parts: Part) -> Part:
        """The pairs of all `parts` that show an anomaly; that none does is an error."""
        chosen = [part.where(part.having(self.ids.anomalies)) for part in parts]
        return self._some(sum(chosen[1:], chosen[0]), parts, "has a pixel of", "such pixels")

    def ordinary(self, part: Part) -> Part:
        """The pairs without an anomaly; that none is left is an error."""
        chosen = part.where(~part.having(self.ids.anomalies))
        return self._some(chosen, [part], "is without", "pictures that have none")

    def _some(self, chosen: Part, among: Sequence[Part], what: str, fix: str) -> Part:
        if not chosen.images:
            folders = sorted({str(label.parent) for part in among for label in part.labels})
            count = sum(len(part.labels) for part in among)
            raise ValueError(
                f"{self.name}: none of the {count:,} label maps in {', '.join(folders)} {what} label id "
                f"{' or '.join(map(str, self.ids.anomalies))} (the anomaly), so a part of the data is "
                f"empty. Fix: give a root (--data-root) with {fix}, or load other data."
            )
        return chosen

    def splits(
        self,
        source: Path,
        found: Mapping[str, Part],
        chosen: tuple[Part, Part, Part],
        size: Sequence[int] | None,
        memory: float,
        note: str = "",
    ) -> Splits:
        """Train, validation and test; decoded into memory where they need at most `memory` GiB."""
        native = chosen[0].native
        shown = parse_size(self.name, size) or native
        parts = [
            self._examples(part, shown, training=number == 0) for number, part in enumerate(chosen)
        ]
        fits = sum(map(len, parts)) * 4 * shown[0] * shown[1] <= memory * 2**30
        train, val, test = (part.take(slice(None)) if fits else part for part in parts)
        notes = [note, self._unlike_published(found)]
        if shown != native:
            notes.append(f"resized from {size_text(native)} to {size_text(shown)}")
        return Splits(
            name=self.name,
            task="segmentation",
            train=train,
            val=val,
            test=test,
            num_classes=len(self.classes),
            classes=self.classes,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            ignore_index=VOID,
            ood_index=len(self.classes) if self.ids.anomalies else None,
            description="; ".join([self.entry.description, *filter(None, notes)]),
            source=str(source),
            augment=self.augment,
        )

    def _unlike_published(self, found: Mapping[str, Part]) -> str:
        """Return a note on a copy with missing or additional images."""
        given = {name: len(part.images) for name, part in found.items()}
        if given == self.published:
            return ""
        counted = ", ".join(
            f"{given[name]:,} of {n:,} {name}" for name, n in self.published.items()
        )
        note = f"not the published number of images: {counted}"
        _LOG.warning("%s: %s", self.name, note)
        return note

    def _examples(self, part: Part, size: Size, training: bool) -> FileDataset:
        table = self.ids.table(training)
        counts = by_label(part.counts.sum(0), table)
        maps = LabelMaps(part.labels, part.native, table, counts)
        return FileDataset(part.images, maps, (3, *size))


def _part(folder: Folder, ids: Ids) -> Part:
    """A folder's pairs; what is wrong with a file is an error that names it."""
    images, labels = pairs(folder)
    _LOG.info("checking %d pictures and label maps in %s", len(images), folder.images)
    sizes = in_threads(lambda path: header(path, label=False), images)
    others = in_threads(lambda path: header(path, label=True), labels)
    for image, label, size, other in zip(images, labels, sizes, others, strict=True):
        if size != other:
            raise ValueError(
                f"{image} is {size_text(size)}, its label map {label} is {size_text(other)}; expected the same "
                "size. Fix: get both files again."
            )
        _require_one_size(image, size, images[0], sizes[0])
    table = ids.table(training=False)
    counts = count_ids(labels, table)
    strange = (counts > 0) & (table == UNKNOWN)
    for label, row in zip(labels, strange, strict=True):
        if row.any():
            raise unknown_ids(label, np.flatnonzero(row).tolist(), table)
    return Part(images, labels, sizes[0], counts)


def pairs(folder: Folder) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The pictures under a folder, in the order of their names, and their label maps."""
    images, maps = (_files(path) for path in (folder.images, folder.labels))
    if not images:
        raise FileNotFoundError(
            f"{folder.images} holds no pictures ({', '.join(PICTURES)}). Fix: extract the archive "
            "again, or give another root (--data-root)."
        )
    places = [folder.labels / path.relative_to(folder.images) for path in images]
    labels = [path.with_name(path.stem + folder.ending) for path in places]
    _require_own(images, labels)
    there = set(maps)
    missing = [i for i, label in enumerate(labels) if label not in there]
    if missing:
        first = missing[0]
        raise FileNotFoundError(
            f"{labels[first]} is missing: the label map of {images[first]} ({len(missing)} of "
            f"{len(images)} pictures have none). Fix: extract the labels again, or remove the picture."
        )
    if len(there) > len(labels):
        alone = min(there - set(labels))
        raise FileNotFoundError(
            f"{alone} is a label map without a picture in {folder.images}. Fix: extract the pictures "
            "again, or remove the label map."
        )
    return tuple(images), tuple(labels)


def _require_own(images: Sequence[Path], labels: Sequence[Path]) -> None:
    """No label map belongs to two pictures, such as a.png and a.jpg."""
    owners: dict[Path, Path] = {}
    for image, label in zip(images, labels, strict=True):
        if label in owners:
            raise ValueError(
                f"{owners[label]} and {image} have one label map, {label}; expected a picture for each. "
                "Fix: remove or rename one of the two."
            )
        owners[label] = image


def locate(
    name: str, root: Path | None, folders: Sequence[str], needed: Sequence[str], publisher: str
) -> Path:
    """The first of `folders` under `root` that has everything in `needed`."""
    root = DEFAULT_ROOT if root is None else root
    for folder in folders:
        if all((root / folder / part).is_dir() for part in needed):
            return root / folder
    first = root / folders[0]
    lacks = ", ".join(part for part in needed if not (first / part).is_dir())
    near = first if first.is_dir() else root
    if near.is_dir():
        why = f"{near} holds {', '.join(sorted(p.name for p in near.iterdir())[:8]) or 'nothing'}"
    else:
        why = f"{near} does not exist"
    raise FileNotFoundError(
        f"{name}: {first} lacks {lacks} ({why}). Fix: give as root (--data-root) the folder in which "
        f"{folders[0]}/{needed[0]} is; the data is published at {publisher}."
    )


def _files(folder: Path) -> list[Path]:
    """The pictures in a folder and below; links to other folders are followed, as `rglob` does not."""
    found = (
        Path(base, name) for base, _, names in os.walk(folder, followlinks=True) for name in names
    )
    return sorted(p for p in found if p.suffix.lower() in PICTURES and not p.name.startswith("."))


def _require_one_size(path: Path, size: Size, first: Path, expected: Size) -> None:
    if size != expected:
        raise ValueError(
            f"{path} is {size_text(size)}, {first} is {size_text(expected)}; expected one size in the whole "
            "set. Fix: get the file again."
        )
