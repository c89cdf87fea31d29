"""Pictures of one's own in folders, a folder for each class: DIR/train/CLASS/*.png, or DIR/CLASS/*.png.

    DIR/train/CLASS/*.png    the classes; beside it DIR/val/CLASS/ and DIR/test/CLASS/, if there are any
    DIR/CLASS/*.png          or without parts
    DIR/ood/*.png            pictures of none of the classes; in DIR/ood/NAME/, a set for each NAME

Without a val or test part a share of every class is held out of train, drawn by a fixed seed. Hidden files
and files that are no pictures are left out and counted. Links to folders are followed.

Every picture is turned as its EXIF data says, made grey or RGB and *stretched* to one size: by the same
function that ``lpbnn predict`` reads new pictures with, so a network is asked what it was trained on, and
nothing at a border is cut off, where the thing to be recognised may be. What that costs is proportions: a
picture of another shape is distorted; crop such pictures before, or give a `size` of the usual shape.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from lpbnn.data import NOT_A_CLASS, Augment, Entry, Examples, Splits
from lpbnn.data.files import (
    ENDINGS,
    FileDataset,
    Size,
    header,
    in_threads,
    is_picture,
    parse_size,
    size_text,
    walk,
)

_LOG = logging.getLogger(__name__)
PARTS = ("train", "val", "test")
OOD = "ood"
CALLED_OTHERWISE = {
    **{"training": "train", "testing": "test", "valid": "val", "validation": "val", "dev": "val"},
    **{name.capitalize(): name for name in PARTS},
    "OOD": OOD,
}
ClassFolders = dict[str, tuple[Path, ...]]
MEMORY = 4.0  # GiB
SHARES = {"val": 0.1, "test": 0.2}
PAD_SHARE = 8  # a side is padded by an eighth of it for random crops, as CIFAR's 32 by 4
SAMPLED = 10_000  # pictures that tell the mean and spread of a set too large for memory
AT_ONCE = 64  # pictures, for their mean and spread
LARGE = 512  # pixels of a side from which training on whole pictures is seldom meant


def load(
    root: Path | None = None,
    size: int | Sequence[int] | None = None,
    channels: int | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int = 0,
    memory: float = MEMORY,
) -> Splits:
    """The pictures under `root`, all of one size.

    Args:
        size: a side, or height and width; None is that of the pictures, where all have the same.
        channels: 1 (grey) or 3 (RGB); None is 1 where all training pictures are grey, otherwise 3.
        val, test: shares of every class that leave train where there is no such part; None is 0.1 and 0.2.
        seed: of what is held out, whatever the run's: all runs are measured on the same pictures.
        memory: GiB that may be kept decoded; a larger set is read from its files in every epoch.

    >>> load(Path("/nowhere"), size=0)
    Traceback (most recent call last):
    ...
    ValueError: folder: size=0; expected a side in pixels or (height, width), such as 64 or [64, 96].
    """
    wanted = parse_size("folder", size, square=True)
    if channels not in (None, 1, 3):
        raise ValueError(f"folder: channels={channels!r}; expected 1 (grey) or 3 (RGB).")
    tree = read_tree(root)
    parts, notes = _held_out(tree, {"val": val, "test": test}, seed)
    # Every header is read, so that unreadable files are found before the training.
    paths = [*_paths(tree.parts), *(path for found in tree.ood.values() for path in found)]
    _LOG.info("checking %d pictures in %s", len(paths), tree.root)
    headers = dict(zip(paths, in_threads(header, paths), strict=True))
    if wanted is None:
        wanted = _common_size({path: headers[path].size for path in _paths(tree.parts)})
    if channels is None:
        grey = all(headers[path].grey for pictures in parts["train"].values() for path in pictures)
        channels = 1 if grey else 3
    shape = (channels, *wanted)
    gibibytes = len(headers) * int(np.prod(shape)) / 2**30
    fits = gibibytes <= memory
    if not fits:
        notes.append(f"read from the files in every epoch: {gibibytes:.1f} GiB, memory={memory:g}")
    train, held, tested = (_examples(parts[name].values(), shape, fits) for name in PARTS)
    seen = _sample(len(train), fits)
    mean, std = mean_and_std(train, seen)
    if len(seen) < len(train):
        notes.append(f"mean and spread of {len(seen):,} training pictures")
    kind = "grey" if channels == 1 else "colour"
    about = f"{size_text(wanted)} {kind} pictures of {len(tree.classes)} classes in folders"
    if any(head.size != wanted for head in headers.values()):
        about += ", stretched to this size"
    fingerprint = _fingerprint(tree)
    return Splits(
        name=f"{tree.root.resolve().name}-{fingerprint}",
        task="classification",
        train=train,
        val=held,
        test=tested,
        ood={n: _examples([paths], shape, fits, NOT_A_CLASS) for n, paths in tree.ood.items()},
        num_classes=len(tree.classes),
        classes=tree.classes,
        mean=mean,
        std=std,
        description="; ".join([about, *notes, *_left_out(tree)]),
        source=str(tree.root),
        augment=Augment(pad=min(wanted) // PAD_SHARE, flip=True),
        fingerprint=fingerprint,
    )


def _held_out(
    tree: Tree, shares: Mapping[str, float | None], seed: int
) -> tuple[dict[str, ClassFolders], list[str]]:
    """All three parts, and in words what of train was held out for those that were not there."""
    for part, share in shares.items():
        if share is not None and part in tree.parts:
            raise ValueError(
                f"folder: {part}={share} asks for a share of train, but {tree.root / part} is there. Fix: "
                f"leave data.{part} out, or move that folder elsewhere."
            )
    taken = {p: SHARES[p] if s is None else s for p, s in shares.items() if p not in tree.parts}
    for part, share in taken.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 <= share < 1 or (part == "test" and share == 0):
            least = (
                "0 < test < 1: something has to be measured" if part == "test" else "0 <= val < 1"
            )
            raise ValueError(f"folder: {part}={share!r}; expected a share of train, {least}.")
    parts: dict[str, ClassFolders] = {part: dict(tree.parts.get(part, {})) for part in PARTS}
    for name, pictures in tree.parts["train"].items():
        counts = {p: max(1, round(s * len(pictures))) if s else 0 for p, s in taken.items()}
        if sum(counts.values()) >= len(pictures):
            asked = ", ".join(f"{count} for {part}" for part, count in counts.items())
            raise ValueError(
                f"folder: the class {name!r} has {len(pictures)} pictures to train with, of which {asked} "
                "would be held out, and none is left. Fix: add pictures, add a folder for the part, or "
                "give a smaller share (--data.val 0)."
            )
        # numpy promises that a RandomState's stream never changes. No class depends on the others.
        random = np.random.RandomState([seed, crc32(os.fsencode(name))])
        order = random.permutation(len(pictures))
        cuts = np.cumsum(list(counts.values()), dtype=int)
        for part, chosen in zip((*counts, "train"), np.split(order, cuts), strict=True):
            parts[part][name] = tuple(pictures[i] for i in sorted(chosen.tolist()))
    said = [f"{share:.0%} for {part}" for part, share in taken.items() if share]
    note = f"held out of every class, by seed {seed}: {' and '.join(said)}"
    return parts, [note] if said else []


def _paths(parts: Mapping[str, ClassFolders]) -> list[Path]:
    return [p for folders in parts.values() for pictures in folders.values() for p in pictures]


def _common_size(sizes: Mapping[Path, Size]) -> Size:
    """The size of all pictures; strange ones (ood) may have any, and follow."""
    first, size = next(iter(sizes.items()))
    for path, other in sizes.items():
        if other != size:
            raise ValueError(
                f"folder: {first} is {size_text(size)}, {path} is {size_text(other)}; a network takes one "
                "size. Fix: give it, as a side or as height and width: --data.size 64 or --data.size 64 96; "
                "every picture is stretched to it."
            )
    if max(size) > LARGE:
        _LOG.warning(
            "the pictures are %s; a smaller size is faster: --data.size 128", size_text(size)
        )
    return size


def _examples(
    folders: Iterable[tuple[Path, ...]], shape: tuple[int, int, int], fits: bool, first: int = 0
) -> Examples:
    """The pictures of each folder with its number from `first` on; in memory where all fit."""
    labelled = [(path, label) for label, paths in enumerate(folders, first) for path in paths]
    targets = torch.tensor([label for _, label in labelled], dtype=torch.int64)
    files = FileDataset(tuple(path for path, _ in labelled), targets, shape)
    return files.take(slice(None)) if fits else files


def _sample(count: int, fits: bool) -> torch.Tensor:
    """The training pictures that tell mean and spread: all, or as many as do not take long to read."""
    if fits or count <= SAMPLED:
        return torch.arange(count)
    return torch.from_numpy(np.random.RandomState(0).permutation(count)[:SAMPLED])


def mean_and_std(
    data: Examples, indices: torch.Tensor
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel of the pictures at `indices`, in 0..1; std 1 for a constant channel.

    >>> from lpbnn.data import Dataset
    >>> black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> mean_and_std(Dataset(black_and_white, torch.zeros(2)), torch.arange(2))
    ((0.5,), (0.5,))
    """
    total = square = torch.zeros(data.shape[0], dtype=torch.float64)
    for x, _ in data.stream(indices.split(AT_ONCE)):
        whole = x.double()  # whole numbers: their sums are exact
        total = total + whole.sum((0, 2, 3))
        square = square + whole.square().sum((0, 2, 3))
    count = len(indices) * data.shape[1] * data.shape[2]
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt() / 255
    return tuple((mean / 255).tolist()), tuple(value or 1.0 for value in std.tolist())


def _fingerprint(tree: Tree) -> str:
    """Hash the paths and sizes of the pictures, so that tables do not mix runs on other pictures.

    Strange pictures do not count: a run may be measured with new ones.
    """
    lines = sorted(
        f"{p.relative_to(tree.root).as_posix()} {p.stat().st_size}" for p in _paths(tree.parts)
    )
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:6]


def _left_out(tree: Tree) -> list[str]:
    """Return a note on files that are no pictures."""
    if not tree.left_out:
        return []
    known_last = sorted(tree.left_out, key=lambda path: path.name.startswith("."))
    shown = ", ".join(path.relative_to(tree.root).as_posix() for path in known_last[:3])
    more = ", ..." if len(tree.left_out) > 3 else ""
    note = f"left out, hidden, no picture or in no class: {len(tree.left_out)} ({shown}{more})"
    _LOG.warning("%s: %s", tree.root, note)
    return [note]


@dataclass
class Tree:
    """Pictures found: by class for every part, OOD pictures by set, and files left out.

    `parts` has "train", and "val" and "test" where they are there.
    """

    root: Path
    parts: dict[str, ClassFolders] = field(default_factory=dict)
    ood: ClassFolders = field(default_factory=dict)
    left_out: list[Path] = field(default_factory=list)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the folders, in their order."""
        return tuple(self.parts["train"])


def read_tree(root: Path | None) -> Tree:
    """The pictures under `root`; a `ValueError` or `FileNotFoundError` says what to put where.

    >>> read_tree(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: folder: /nowhere does not exist. Fix: give as root (--data-root) a folder ...
    """
    expected = "a folder with a folder of pictures for each class"
    if root is None:
        raise ValueError(f"folder: no root was given. Fix: give as root (--data-root) {expected}.")
    if not root.is_dir():
        why = "is a file" if root.exists() else "does not exist"
        raise FileNotFoundError(
            f"folder: {root} {why}. Fix: give as root (--data-root) {expected}."
        )
    tree = Tree(root)
    folders = {path.name: path for path in _folders(tree, root)}
    _require_our_names(root, folders)
    if "train" in folders:
        for name in (part for part in PARTS if part in folders):
            tree.parts[name] = _classes(tree, folders[name])
        tree.left_out += [p for name, p in folders.items() if name not in (*PARTS, OOD)]
        _require_same_classes(tree)
    else:
        _require_whole(root, folders)
        tree.parts["train"] = _classes(tree, root, besides=OOD)
    if OOD in folders:
        tree.ood = _ood_sets(tree, folders[OOD])
    return tree


def _classes(tree: Tree, folder: Path, besides: str = "") -> ClassFolders:
    """The pictures of every class in a folder; at least two classes, none of them empty."""
    folders = [path for path in _folders(tree, folder) if path.name != besides]
    files = _files(tree, folder)
    if not folders:
        held = f"{len(files)} pictures and no folders" if files else "no folders"
        raise ValueError(
            f"folder: {folder} holds {held}; expected a folder of pictures for each class, such as "
            f"{folder / 'cat'} and {folder / 'dog'}. Fix: move the pictures into such folders, or give "
            "another root (--data-root)."
        )
    tree.left_out += files  # of no class
    found = {path.name: _pictures(tree, path) for path in folders}
    if len(found) == 1:
        raise ValueError(
            f"folder: {folder} holds one class only, {folders[0].name}; expected two or more. Fix: add a "
            "folder of pictures for every other class, or give another root (--data-root); pictures that "
            f"are just none of the class belong in {tree.root / OOD}."
        )
    return found


def _pictures(tree: Tree, folder: Path) -> tuple[Path, ...]:
    """The pictures of one class."""
    inner = _folders(tree, folder)
    if inner:
        nested = ", ".join(path.name for path in inner[:4])
        raise ValueError(
            f"folder: {folder} holds the folders {nested}; expected the pictures of the class "
            f"{folder.name!r} themselves. Fix: if {folder} is the folder of the data, give it as root "
            f"(--data-root {folder}); otherwise move the pictures up into {folder}."
        )
    before = len(tree.left_out)
    found = _files(tree, folder)
    if not found:
        others = ", ".join(path.name for path in tree.left_out[before:][:4])
        held = f"; it holds {others}" if others else ""
        raise ValueError(
            f"folder: {folder} holds no pictures ({', '.join(ENDINGS)}){held}. Fix: put the pictures of "
            f"the class {folder.name!r} there, or remove the folder."
        )
    return tuple(found)


def _ood_sets(tree: Tree, folder: Path) -> ClassFolders:
    """The pictures of none of the classes: a set for each folder, and `ood` for those in none."""
    found = {OOD: tuple(_files(tree, folder))}
    for inner in _folders(tree, folder):
        found[inner.name] = tuple(_kept(tree, walk(inner)))
    found = {name: pictures for name, pictures in found.items() if pictures}
    if not found:
        raise ValueError(
            f"folder: {folder} holds no pictures ({', '.join(ENDINGS)}). Fix: put pictures there that are "
            "none of the classes, or remove the folder."
        )
    return found


def _folders(tree: Tree, folder: Path) -> list[Path]:
    """The folders in a folder, in the order of their names; notebooks and archives leave hidden ones."""
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    hidden = [path for path in found if path.name.startswith((".", "__"))]
    tree.left_out += [path for path in hidden if path not in tree.left_out]
    return [path for path in found if path not in hidden]


def _files(tree: Tree, folder: Path) -> list[Path]:
    return _kept(tree, sorted(path for path in folder.iterdir() if not path.is_dir()))


def _kept(tree: Tree, paths: Iterable[Path]) -> list[Path]:
    """The pictures; what is hidden or no picture, by its name, is noted."""
    kept: list[Path] = []
    for path in paths:
        (kept if is_picture(path) else tree.left_out).append(path)
    return kept


def _require_our_names(root: Path, folders: dict[str, Path]) -> None:
    for name in folders:
        ours = CALLED_OTHERWISE.get(name)
        if ours in ("train", OOD) or (ours and "train" in folders):
            raise ValueError(
                f"folder: {root} has a folder {name}; expected the parts to be called train, val, test and "
                f"ood. Fix: rename it to {ours}, or move it elsewhere."
            )


def _require_whole(root: Path, folders: dict[str, Path]) -> None:
    """A folder without parts is one of classes: not one of parts without train, a part, or a parent."""
    if parts := [name for name in folders if name in PARTS]:
        raise ValueError(
            f"folder: {root} has {' and '.join(parts)} and no train. Fix: add {root / 'train'}, or give "
            "the folders of the classes without parts: shares of them are then held out."
        )
    here = root.resolve()
    if here.name in PARTS and any((here.parent / p).is_dir() for p in PARTS if p != here.name):
        raise ValueError(
            f"folder: {root} is one part of the data in {here.parent}. Fix: give that as root "
            f"(--data-root {here.parent})."
        )
    for name, path in folders.items():
        if (path / "train").is_dir() and name != OOD:
            raise ValueError(
                f"folder: {root} is the folder around the data: {path} has a train folder. Fix: give that "
                f"as root (--data-root {path})."
            )


def _require_same_classes(tree: Tree) -> None:
    expected = set(tree.classes)
    for part, found in tree.parts.items():
        for names, what in ((expected - set(found), "lacks"), (set(found) - expected, "also has")):
            if names:
                some = ", ".join(sorted(names)[:8])
                raise ValueError(
                    f"folder: {tree.root / part} {what} {some}, unlike {tree.root / 'train'}; "
                    "expected the same classes in every part. Fix: add or rename folders; pictures of no "
                    f"class to be learned belong in {tree.root / OOD}."
                )


SETS = {
    "folder": Entry(
        load, "pictures of your own: --data-root DIR with DIR/train/CLASS/*.png, or DIR/CLASS/*.png"
    )
}
