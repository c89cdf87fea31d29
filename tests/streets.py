"""Small files in the published layouts of the street data sets: pictures whose colours tell the label."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (12, 16)  # height, width
CAMVID = {"train": 4, "val": 2, "test": 3}


def ids(number: int, choices: list[int], size: tuple[int, int] = SIZE) -> np.ndarray:
    """A label map that holds every one of `choices`."""
    random = np.random.RandomState(number)
    found = np.array(choices, np.uint8)[random.randint(len(choices), size=size)]
    found.flat[: len(choices)] = choices
    return found


def write_pair(image: Path, label: Path, found: np.ndarray) -> None:
    """A label map, and a picture that shows its ids: (id, 10 id, 255 - id)."""
    for path in (image, label):
        path.parent.mkdir(parents=True, exist_ok=True)
    wide = found.astype(np.int64)
    Image.fromarray(np.stack([wide, 10 * wide % 256, 255 - wide], -1).astype(np.uint8)).save(image)
    Image.fromarray(found).save(label)


def camvid(root: Path, size: tuple[int, int] = SIZE, counts: dict[str, int] | None = None) -> Path:
    """Every second picture has a bicyclist (10)."""
    for part, count in (counts or CAMVID).items():
        for i in range(count):
            choices = [0, 1, 3, 8, 11] + ([10] if i % 2 else [])
            image, label = (root / "camvid" / f / f"{i:03}.png" for f in (part, f"{part}annot"))
            write_pair(image, label, ids(i, choices, size))
    return root


def streethazards(root: Path) -> Path:
    """Two towns in the training part; every test picture has an anomaly (14)."""
    towns = {("train", "training"): ("t1", "t2"), ("train", "validation"): ("t4",)}
    for (archive, part), names in (towns | {("test", "test"): ("t5", "t6")}).items():
        for town in names:
            for i in range(2):
                choices = [1, 2, 7, 8, 13] + ([14] if part == "test" else [])
                image, label = (
                    root / archive / kind / part / town / f"{i}.png"
                    for kind in ("images", "annotations")
                )
                write_pair(image, label, ids(i, choices))
    return root


def bdd(root: Path, old: bool = True) -> Path:
    """In either layout; the second picture of each part has a motorcycle (17), the third a train (16)."""
    images, labels, ending = (
        ("seg/images", "seg/labels", "_train_id.png")
        if old
        else ("images/10k", "labels/sem_seg/masks", ".png")
    )
    for part, count in {"train": 5, "val": 4}.items():
        for i in range(count):
            choices = [0, 2, 10, 13, 18, 255, *{1: [17], 2: [16]}.get(i, [])]
            image = root / "bdd100k" / images / part / f"{i}a-{i}b.jpg"
            label = root / "bdd100k" / labels / part / f"{i}a-{i}b{ending}"
            write_pair(image, label, ids(i, choices))
    return root
