"""Pictures of one's own in folders, a folder for each class: DIR/train/CLASS/*.png, or DIR/CLASS/*.png.

The layout is in ``_tree.py``: also DIR/val and DIR/test with the same classes, and DIR/ood with pictures of
none of them. Without a val or test part a share of every class is held out of train, drawn by a fixed seed.

Every picture is turned as its EXIF data says, made grey or RGB and *stretched* to one size: by the same
function that ``lpbnn predict`` reads new pictures with, so a network is asked what it was trained on, and
nothing at a border is cut off, where the thing to be recognised may be. What that costs is proportions: a
picture of another shape is distorted; crop such pictures before, or give a `size` of the usual shape.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from lpbnn.data import NOT_A_CLASS, Augment, Entry, Examples, Splits
from lpbnn.data._pictures import Look, PictureFiles, look, mean_and_std
from lpbnn.data._tree import PARTS, ClassFolders, Tree, read_tree
from lpbnn.data.files import Size, in_threads

_LOG = logging.getLogger(__name__)
MEMORY = 4.0  # GiB
SHARES = {"val": 0.1, "test": 0.2}
PAD_SHARE = 8  # a side is padded by an eighth of it for random crops, as CIFAR's 32 by 4
SAMPLED = 10_000  # pictures that tell the mean and spread of a set too large for memory
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
    wanted = _size(size)
    if channels not in (None, 1, 3):
        raise ValueError(f"folder: channels={channels!r}; expected 1 (grey) or 3 (RGB).")
    tree = read_tree(root)
    parts, notes = _held_out(tree, {"val": val, "test": test}, seed)
    looks = _looked_at(tree)
    if wanted is None:
        wanted = _common_size({path: looks[path].size for path in _paths(tree.parts)})
    if channels is None:
        grey = all(looks[path].grey for pictures in parts["train"].values() for path in pictures)
        channels = 1 if grey else 3
    shape = (channels, *wanted)
    files = {name: _examples(folders, shape) for name, folders in parts.items()}
    strange = {name: _strange(paths, shape) for name, paths in tree.ood.items()}
    gibibytes = sum(map(len, (*files.values(), *strange.values()))) * int(np.prod(shape)) / 2**30
    fits = gibibytes <= memory
    if not fits:
        notes.append(f"read from the files in every epoch: {gibibytes:.1f} GiB, memory={memory:g}")
    train, held, tested = (_settled(files[name], fits) for name in PARTS)
    seen = _sample(len(train), fits)
    mean, std = mean_and_std(train, seen)
    if len(seen) < len(train):
        notes.append(f"mean and spread of {len(seen):,} training pictures")
    kind = "grey" if channels == 1 else "colour"
    about = f"{_text(wanted)} {kind} pictures of {len(tree.classes)} classes in folders"
    if any(head.size != wanted for head in looks.values()):
        about += ", stretched to this size"
    fingerprint = _fingerprint(tree)
    return Splits(
        name=f"{tree.root.resolve().name}-{fingerprint}",
        task="classification",
        train=train,
        val=held,
        test=tested,
        ood={name: _settled(part, fits) for name, part in strange.items()},
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
        random = np.random.RandomState([seed, crc32(name.encode())])
        order = random.permutation(len(pictures))
        cuts = np.cumsum(list(counts.values()), dtype=int)
        for part, chosen in zip((*counts, "train"), np.split(order, cuts), strict=True):
            parts[part][name] = tuple(pictures[i] for i in sorted(chosen.tolist()))
    said = [f"{share:.0%} for {part}" for part, share in taken.items() if share]
    note = f"held out of every class, by seed {seed}: {' and '.join(said)}"
    return parts, [note] if said else []


def _looked_at(tree: Tree) -> dict[Path, Look]:
    """Every picture's head: what cannot be read is told before anything is trained."""
    paths = [*_paths(tree.parts), *(path for found in tree.ood.values() for path in found)]
    _LOG.info("checking %d pictures in %s", len(paths), tree.root)
    return dict(zip(paths, in_threads(look, paths), strict=True))


def _paths(parts: Mapping[str, ClassFolders]) -> list[Path]:
    return [p for folders in parts.values() for pictures in folders.values() for p in pictures]


def _common_size(sizes: Mapping[Path, Size]) -> Size:
    """The size of all pictures; strange ones (ood) may have any, and follow."""
    first, size = next(iter(sizes.items()))
    for path, other in sizes.items():
        if other != size:
            raise ValueError(
                f"folder: {first} is {_text(size)}, {path} is {_text(other)}; a network takes one size. "
                "Fix: give it, as a side or as height and width: --data.size 64 or --data.size 64 96; "
                "every picture is stretched to it."
            )
    if max(size) > LARGE:
        _LOG.warning("the pictures are %s; a smaller size is faster: --data.size 128", _text(size))
    return size


def _examples(folders: ClassFolders, shape: tuple[int, int, int]) -> PictureFiles:
    paths = tuple(path for pictures in folders.values() for path in pictures)
    counts = torch.tensor([len(pictures) for pictures in folders.values()], dtype=torch.int64)
    return PictureFiles(paths, torch.arange(len(counts)).repeat_interleave(counts), shape)


def _strange(paths: tuple[Path, ...], shape: tuple[int, int, int]) -> PictureFiles:
    return PictureFiles(paths, torch.full((len(paths),), NOT_A_CLASS), shape)


def _settled(files: PictureFiles, fits: bool) -> Examples:
    return files.take(slice(None)) if fits else files


def _sample(count: int, fits: bool) -> torch.Tensor:
    """The training pictures that tell mean and spread: all, or as many as do not take long to read."""
    if fits or count <= SAMPLED:
        return torch.arange(count)
    return torch.from_numpy(np.random.RandomState(0).permutation(count)[:SAMPLED])


def _fingerprint(tree: Tree) -> str:
    """Of the pictures' places and lengths: runs on other pictures are not put into one table.

    Strange pictures do not count: a run may be measured with new ones.
    """
    lines = sorted(
        f"{p.relative_to(tree.root).as_posix()} {p.stat().st_size}" for p in _paths(tree.parts)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:6]


def _left_out(tree: Tree) -> list[str]:
    """What is said of files that are no pictures."""
    if not tree.left_out:
        return []
    known_last = sorted(tree.left_out, key=lambda path: path.name.startswith("."))
    shown = ", ".join(path.relative_to(tree.root).as_posix() for path in known_last[:3])
    more = ", ..." if len(tree.left_out) > 3 else ""
    note = f"left out, hidden, no picture or in no class: {len(tree.left_out)} ({shown}{more})"
    _LOG.warning("%s: %s", tree.root, note)
    return [note]


def _size(size: int | Sequence[int] | None) -> Size | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else size
    whole = isinstance(sides, list | tuple) and all(type(n) is int and n > 0 for n in sides)
    if not whole or len(sides) != 2:
        raise ValueError(
            f"folder: size={size!r}; expected a side in pixels or (height, width), such as 64 or [64, 96]."
        )
    return sides[0], sides[1]


def _text(size: Size) -> str:
    return f"{size[1]}x{size[0]}"


SETS = {
    "folder": Entry(
        load, "pictures of your own: --data-root DIR with DIR/train/CLASS/*.png, or DIR/CLASS/*.png"
    )
}
