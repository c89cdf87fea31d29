"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 colour, 50,000 train and 10,000 test images.

Read from the published folders ``cifar-10-batches-py/`` and ``cifar-100-python/`` under `root`.
The whole set becomes uint8 tensors. By default every file must have its published md5;
``checksum="any"`` also takes copies (re-packed, re-ordered), and the description then says so. In
either case the pickles are read by an unpickler that admits data and nothing else.

Out of distribution: SVHN's test part, when ``svhn/test_32x32.mat`` lies under the same root. When
it does not, the splits come without it and both the log and the description say so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from lpbnn.data import NOT_A_CLASS, Augment, Dataset, Entry, Splits, svhn
from lpbnn.data._download import DEFAULT_ROOT, fetch, md5, unpickle

_LOG = logging.getLogger(__name__)
_HOSTS = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")
Checksum = Literal["published", "any"]
Measure = Literal["test", "val"]


TRAIN, TEST = 50_000, 10_000  # examples in the files; another number is an error


@dataclass(frozen=True)
class Family:
    name: str
    folder: str
    archive: str
    archive_md5: str
    train: dict[str, str]  # file -> published md5, in order
    test: dict[str, str]
    labels: str  # the key of the targets
    classes: tuple[str, ...]
    mean: tuple[float, float, float]  # of the 50,000, as everyone writes them: to four digits
    std: tuple[float, float, float]
    cutout: int


_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = Family(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    labels="labels",
    classes=tuple(_TEN.split()),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    cutout=16,
)

CIFAR100 = Family(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    labels="fine_labels",
    classes=tuple(_HUNDRED.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    cutout=8,
)


def load(
    family: Family,
    root: Path | None = None,
    val: int = 0,
    download: bool = False,
    checksum: Checksum = "published",
    measure: Measure = "test",
) -> Splits:
    """CIFAR-10 with its 10 classes, or CIFAR-100 with its 100 fine classes.

    Args:
        val: so many images, drawn once for all by a fixed seed, leave train for validation.
        download: fetch files that are missing.
        checksum: "any" takes files that are not the published ones.
        measure: "val" puts the validation images in the place of the test set, which is then left
            alone: for choosing settings by them.

    >>> load(CIFAR10, Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: /nowhere/cifar-10-batches-py is missing: /nowhere does not exist. Give ...
    >>> load(CIFAR100, Path("/nowhere"), val=50_000)
    Traceback (most recent call last):
    ...
    ValueError: cifar100: val=50000; expected 0 <= val < 50000, some images must be left to train.
    """
    if not 0 <= val < TRAIN:
        raise ValueError(
            f"{family.name}: val={val}; expected 0 <= val < {TRAIN}, some images must be left "
            "to train."
        )
    if checksum not in ("published", "any"):
        raise ValueError(f"{family.name}: checksum={checksum!r}; expected 'published' or 'any'.")
    if measure not in get_args(Measure) or (measure == "val" and not val):
        raise ValueError(
            f"{family.name}: measure={measure!r} with val={val}; expected 'test', or 'val' and some images "
            "held out for it (val=5000)."
        )
    root = DEFAULT_ROOT if root is None else root
    files = family.train | family.test
    if download and not all((root / family.folder / name).is_file() for name in files):
        urls = [f"{host}/{family.archive}" for host in _HOSTS]
        fetch(urls, family.archive_md5, root / family.archive, extract=True)
    folder = _locate(family, root)
    copies = _check(folder, files, checksum)
    train = _read(family, folder, tuple(family.train), TRAIN)
    test = _read(family, folder, tuple(family.test), TEST)
    ood, notes = _svhn(root, download)
    if copies:
        notes.insert(0, f"a copy: no published md5 for {', '.join(copies)}")
    # numpy promises that a RandomState's stream never changes; torch does not.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(train)))
    held_out = train.take(order[len(train) - val :])
    if measure == "val":
        test, held_out = held_out, held_out.take(slice(0))
        notes.append(f"measured on {val:,} training images held out, not on the test set")
    return Splits(
        name=family.name,
        task="classification",
        train=train.take(order[:-val]) if val else train,
        val=held_out,
        test=test,
        ood=ood,
        num_classes=len(family.classes),
        classes=family.classes,
        mean=family.mean,
        std=family.std,
        description="; ".join([SETS[family.name].description, *notes]),
        source=str(folder),
        augment=Augment(pad=4, flip=True, cutout=family.cutout),
    )


def _locate(family: Family, root: Path | None) -> Path:
    """The published folder under `root`, with all files; if one is missing, the error says how to get it."""
    root = DEFAULT_ROOT if root is None else root
    folder = root / family.folder
    if folder.is_dir():
        files = family.train | family.test
        if missing := [name for name in files if not (folder / name).is_file()]:
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise FileNotFoundError(
                f"{folder} lacks {', '.join(missing)}; it holds {found}. Delete the folder and get it "
                "again (download=True), or check that it is the set you asked for."
            )
        return folder
    fix = (
        f"Give the folder that contains {family.folder}/ as root (--data-root), or download it: "
        f"lpbnn data download {family.name} --data-root {root}"
    )
    if not root.is_dir():
        why = f"{root} does not exist"
    elif all((root / name).is_file() for name in family.train):
        why, fix = f"{root} is that folder itself", f"Give its parent as root: {root.parent}"
    else:
        found = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
        why = f"{root} holds {found}"
    raise FileNotFoundError(f"{folder} is missing: {why}. {fix}")


def _check(folder: Path, files: dict[str, str], checksum: Checksum) -> list[str]:
    """Check that every file is the published one; return those that are not, where allowed."""
    given = {name: md5(folder / name) for name in files}
    copies = [name for name, expected in files.items() if given[name] != expected]
    if copies and checksum == "published":
        name = copies[0]
        raise ValueError(
            f"{folder / name} ({(folder / name).stat().st_size:,} bytes) has md5 {given[name]}; "
            f"published is {files[name]}. Delete it and get it again, or, if it is a copy you "
            "trust, pass checksum='any': it is then read as data only and labelled as a copy."
        )
    return copies


def _read(family: Family, folder: Path, files: tuple[str, ...], rows: int) -> Dataset:
    """The files of one part in order, each with its equal share of the rows."""
    parts = [_batch(family, folder / name, rows // len(files)) for name in files]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    targets = np.concatenate([targets for _, targets in parts])
    return Dataset(torch.from_numpy(images), torch.from_numpy(targets))


def _batch(family: Family, path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
    content = unpickle(path)
    if family.labels not in content or "data" not in content:
        other = "cifar100" if "fine_labels" in content else "cifar10"
        hint = f" That is a file of {other}." if "data" in content and other != family.name else ""
        raise ValueError(
            f"{path} has the keys {', '.join(sorted(content))}; {family.name} needs 'data' and "
            f"{family.labels!r}.{hint}"
        )
    images, labels = np.asarray(content["data"]), np.asarray(content[family.labels])
    if images.shape != (rows, 3072) or images.dtype != np.uint8:
        raise ValueError(
            f"{path} has data of shape {images.shape} and type {images.dtype}; expected "
            f"{(rows, 3072)} and uint8. Delete it and get it again."
        )
    classes = len(family.classes)
    integers = labels.shape == (rows,) and labels.dtype.kind in "iu"
    if not integers or labels.min(initial=0) < 0 or labels.max(initial=0) >= classes:
        raise ValueError(
            f"{path} has labels of shape {labels.shape} and type {labels.dtype}; expected {rows:,} "
            f"integers from 0 to {classes - 1}. Delete it and get it again."
        )
    return images, labels.astype(np.int64)


def _svhn(root: Path, download: bool) -> tuple[dict[str, Dataset], list[str]]:
    """SVHN's test part under the name "svhn", or nothing and the reason."""
    path = svhn.path_of(root)
    if not path.is_file() and not download:
        note = f"no out-of-distribution part: {path} is missing (to fetch it: lpbnn data download)"
        _LOG.warning("%s", note)
        return {}, [note]
    images = svhn.read(root, download=download)
    notes = [] if svhn.is_published(root) else ["SVHN from a copy without the published md5"]
    return {"svhn": Dataset(images, torch.full((len(images),), NOT_A_CLASS))}, notes


SETS = {
    "cifar10": Entry(
        partial(load, CIFAR10),
        "CIFAR-10: 32x32 colour, 10 classes; out-of-distribution: SVHN, if present",
        partial(_locate, CIFAR10),
    ),
    "cifar100": Entry(
        partial(load, CIFAR100),
        "CIFAR-100: 32x32 colour, 100 classes; out-of-distribution: SVHN, if present",
        partial(_locate, CIFAR100),
    ),
}
