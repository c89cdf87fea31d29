"""StreetHazards (Hendrycks et al., 2019): rendered 1280x720 street scenes with odd objects in the test.

Read from what the published archives (``streethazards_train.tar``, ``streethazards_test.tar``; see
github.com/hendrycks/anomaly-seg) extract to, ``train/`` and ``test/``, under `root` or
``root/streethazards/``: ``train/images/{training,validation}/TOWN/N.png`` with
``train/annotations/...``, ``test/images/test/TOWN/N.png`` with ``test/annotations/...``. Ids are 1-14,
class + 1; the first class, "unlabeled", is counted like the others (it is the sky, mostly), and id 0
is void, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lpbnn.data import Augment, Entry, Splits
from lpbnn.data._scenes import MEMORY, Folder, Ids, Street, locate

CLASSES = (
    *("unlabeled", "building", "fence", "other", "pedestrian", "pole", "road line", "road"),
    *("sidewalk", "vegetation", "car", "wall", "traffic sign"),
)
PARTS = {"training": "train", "validation": "train", "test": "test"}  # part -> archive


def load(
    root: Path | None = None, size: Sequence[int] | None = None, memory: float = MEMORY
) -> Splits:
    """13 classes and the anomaly; decoded the set takes 26 GiB, kept if `memory` allows for them.

    Args:
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.

    >>> load(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: streethazards: /nowhere/streethazards lacks train/images/training, ...
    """
    folder = locate_folder(root)
    folders = {
        part: Folder(folder / archive / "images" / part, folder / archive / "annotations" / part)
        for part, archive in PARTS.items()
    }
    found = STREET.read(folders)
    parts = (found["training"], found["validation"], found["test"])
    return STREET.splits(folder, found, parts, size, memory)


def locate_folder(root: Path | None) -> Path:
    """Return the folder of the files; a `FileNotFoundError` says what is missing."""
    needed = [
        f"{archive}/{kind}/{part}"
        for part, archive in PARTS.items()
        for kind in ("images", "annotations")
    ]
    folders = ("streethazards", "StreetHazards", ".")
    return locate(STREET.name, root, folders, needed, "github.com/hendrycks/anomaly-seg")


SETS = {
    "streethazards": Entry(
        load,
        "StreetHazards: rendered 1280x720 street scenes, 13 classes; anomaly: odd objects",
        locate_folder,
    )
}
STREET = Street(
    name="streethazards",
    entry=SETS["streethazards"],
    classes=CLASSES,
    ids=Ids(tuple(range(1, 14)), void=(0,), anomalies=(14,)),
    published={"training": 5125, "validation": 1031, "test": 1500},
    augment=Augment(flip=True, scale=(0.5, 2.0), crop=(512, 512), colour=0.25),
)
