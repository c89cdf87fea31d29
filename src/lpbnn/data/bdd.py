"""BDD-Anomaly (Hendrycks et al., 2019): BDD100K street scenes, motorcycle and train held out.

The pictures of BDD100K's segmentation set (7,000 + 1,000, 1280x720) that have a motorcycle or a train
are the test part (361); the others train (6,688) and validate (951). 17 classes, the bicycle among
them. Both published layouts are read, under `root`:

- ``bdd100k/seg/images/{train,val}/NAME.jpg``, ``bdd100k/seg/labels/{train,val}/NAME_train_id.png``;
- ``bdd100k/images/10k/{train,val}/NAME.jpg``, ``bdd100k/labels/sem_seg/masks/{train,val}/NAME.png``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lpbnn.data import Augment, Entry, Splits
from lpbnn.data._scenes import MEMORY, Folder, Ids, Street, locate

TRAIN_IDS = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign"),
    *("vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus"),
    *("train", "motorcycle", "bicycle"),
)
ANOMALIES = ("train", "motorcycle")
CLASSES = tuple(name for name in TRAIN_IDS if name not in ANOMALIES)
PUBLISHER = "bdd-data.berkeley.edu, after registration"
LAYOUTS = (
    ("seg/images", "seg/labels", "_train_id.png"),
    ("images/10k", "labels/sem_seg/masks", ".png"),
)


def load(
    root: Path | None = None, size: Sequence[int] | None = None, memory: float = MEMORY
) -> Splits:
    """17 classes and the anomaly; decoded the set takes 27 GiB, kept if `memory` allows for them.

    Args:
        size: height and width to which the pictures are resized; None keeps theirs.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.

    >>> load(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: bdd-anomaly: /nowhere/bdd100k lacks seg/images/train, seg/images/val, ...
    """
    folder, (images, labels, ending) = locate_folder(root)
    folders = {
        part: Folder(folder / images / part, folder / labels / part, ending)
        for part in ("train", "val")
    }
    found = STREET.read(folders)
    train, val = (STREET.ordinary(part) for part in found.values())
    chosen = train, val, STREET.anomalous(*found.values())
    return STREET.splits(folder, found, chosen, size, memory)


def locate_folder(root: Path | None) -> tuple[Path, tuple[str, str, str]]:
    """The folder and the first layout that it has; a `FileNotFoundError` says what is missing."""
    problems = []
    for layout in LAYOUTS:
        needed = [f"{kind}/{part}" for kind in layout[:2] for part in ("train", "val")]
        try:
            return locate(STREET.name, root, ("bdd100k", "."), needed, PUBLISHER), layout
        except FileNotFoundError as error:
            problems.append(error)
    raise problems[0]


SETS = {
    "bdd-anomaly": Entry(
        load,
        "BDD-Anomaly: 1280x720 street scenes, 17 classes; anomalies: motorcycle, train",
        locate_folder,
    )
}
STREET = Street(
    name="bdd-anomaly",
    entry=SETS["bdd-anomaly"],
    classes=CLASSES,
    ids=Ids(
        tuple(TRAIN_IDS.index(name) for name in CLASSES),
        void=(255,),
        anomalies=tuple(TRAIN_IDS.index(name) for name in ANOMALIES),
    ),
    published={"train": 7000, "val": 1000},
    augment=Augment(flip=True, scale=(0.5, 2.0), crop=(512, 512), colour=0.25),
)
