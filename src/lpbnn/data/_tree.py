"""Which pictures a folder holds, by part and class, and what is wrong with one that is laid out otherwise.

    DIR/train/CLASS/*.png    the classes; beside it DIR/val/CLASS/ and DIR/test/CLASS/, where there are any
    DIR/CLASS/*.png          or without parts
    DIR/ood/*.png            pictures of none of the classes; in DIR/ood/NAME/, a set for each NAME

Hidden files and what is no picture are left out and counted. Links to folders are followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PARTS = ("train", "val", "test")
OOD = "ood"
CALLED_OTHERWISE = {
    **{"training": "train", "testing": "test", "valid": "val", "validation": "val", "dev": "val"},
    **{name.capitalize(): name for name in PARTS},
    "OOD": OOD,
}
ClassFolders = dict[str, tuple[Path, ...]]


@dataclass
class Tree:
    """What was found: pictures by class for every part, strange ones by set, and what was left out.

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
        tree.ood = _strange(tree, folders[OOD])
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


def _strange(tree: Tree, folder: Path) -> ClassFolders:
    """The pictures of none of the classes: a set for each folder, and `ood` for those in none."""
    found = {OOD: tuple(_files(tree, folder))}
    for inner in _folders(tree, folder):
        walked = sorted(
            Path(base, n) for base, _, n_s in os.walk(inner, followlinks=True) for n in n_s
        )
        found[inner.name] = tuple(_kept(tree, walked))
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
        picture = path.suffix.lower() in ENDINGS and not path.name.startswith(".")
        (kept if picture else tree.left_out).append(path)
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
                raise ValueError(
                    f"folder: {tree.root / part} {what} {_listed(names)}, unlike {tree.root / 'train'}; "
                    "expected the same classes in every part. Fix: add or rename folders; pictures of no "
                    f"class to be learned belong in {tree.root / OOD}."
                )


def _listed(names: Iterable[str], most: int = 8) -> str:
    """
    >>> _listed({"b", "a"}), _listed("abc", most=2)
    ('a, b', 'a, b and 1 more')
    """
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest
