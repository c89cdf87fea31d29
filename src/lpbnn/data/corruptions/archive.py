"""Folders in the published layout: official CIFAR-10-C / CIFAR-100-C, or sets generated once.

One `<corruption>.npy` per corruption, uint8, (5 N, H, W, C), severity-major: rows 0..N-1 are
severity 1, the next N severity 2, and so on; `labels.npy` repeats the N labels five times. Files
written here stand beside a small `<corruption>.json` that says how they were made; a folder without
those is taken for the published one. So no table can pass one off as the other.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lpbnn.atomic import write_atomic
from lpbnn.data.corruptions.generate import (
    CORRUPTIONS,
    SEVERITIES,
    VERSION,
    CorruptedSet,
    FrostKind,
    check,
    corrupt,
    frost_kind,
)

Recipe = dict[str, str | int | list[int] | None]


@dataclass(frozen=True, eq=False)
class Archive:
    """The corrupted sets of a folder, read one at a time; iterating gives every `CorruptedSet`.

    `num` images per severity, `labels` for them (N,), or None where the folder has none.
    """

    root: Path
    num: int
    origin: Literal["official", "generated"]
    frost: FrostKind | None
    names: tuple[str, ...]
    labels: Tensor | None

    @property
    def label(self) -> str:
        """Origin of the sets, as a table prints it.

        >>> Archive(Path("."), 9, "generated", "procedural", CORRUPTIONS, None).label
        'generated (frost: procedural)'
        """
        return self.origin if self.frost is None else f"{self.origin} (frost: {self.frost})"

    def read(self, name: str, severity: int) -> Tensor:
        """The `num` images of one corruption at one severity, uint8 (N, C, H, W)."""
        if name not in self.names or severity not in SEVERITIES:
            raise ValueError(
                f"{self.root} was asked for {name!r} at severity {severity}; it holds "
                f"{', '.join(self.names)} at severities 1 to 5."
            )
        rows = _open(self.root / f"{name}.npy")
        each = len(rows) // len(SEVERITIES)
        part = rows[(severity - 1) * each :][: self.num]
        return torch.from_numpy(np.array(part)).permute(0, 3, 1, 2).contiguous()

    def __iter__(self) -> Iterator[CorruptedSet]:
        for name in self.names:
            for severity in SEVERITIES:
                frost = self.frost if name == "frost" else None
                yield CorruptedSet(name, severity, self.read(name, severity), self.origin, frost)


def _open(path: Path) -> np.ndarray:
    """The array of a published file, mapped, not read; its form is checked."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no complete .npy file ({error}); fetch it again.") from error
    if rows.dtype != np.uint8 or rows.ndim != 4 or len(rows) % len(SEVERITIES):
        raise ValueError(
            f"{path} holds {rows.dtype} of shape {rows.shape}; expected uint8 (5 N, H, W, C), five "
            "severities of N images: it is not a file of CIFAR-10-C, or it is damaged."
        )
    return rows


def _recipe_path(root: Path, name: str) -> Path:
    return root / f"{name}.json"


def read_official(root: str | Path, n: int | None = None) -> Archive:
    """The folder of published files at `root`; `n` keeps the first n images of every severity.

    All fifteen files and `labels.npy` must be there. A folder written by `cached` is read as well,
    and is labelled "generated".

    >>> read_official("/nowhere")
    Traceback (most recent call last):
    FileNotFoundError: '/nowhere' lacks gaussian_noise.npy, shot_noise.npy, ... and 14 more; ...
    """
    root = Path(root)
    wanted = [f"{name}.npy" for name in CORRUPTIONS] + ["labels.npy"]
    if missing := [name for name in wanted if not (root / name).is_file()]:
        more = f", ... and {len(missing) - 2} more" if len(missing) > 2 else ""
        raise FileNotFoundError(
            f"{str(root)!r} lacks {', '.join(missing[:2])}{more}; give the unpacked folder of "
            "CIFAR-10-C or CIFAR-100-C (zenodo.org/records/2535967, /3555552), or generate the "
            "sets with cached()."
        )
    sizes = {name: len(_open(root / f"{name}.npy")) for name in CORRUPTIONS}
    labels = torch.from_numpy(np.load(root / "labels.npy", allow_pickle=False).astype(np.int64))
    if len({*sizes.values(), len(labels)}) != 1:
        raise ValueError(
            f"{root} holds files of different lengths: labels {len(labels)}, {sizes}; "
            "every file must have the same: fetch the odd one again."
        )
    each = len(labels) // len(SEVERITIES)
    if n is not None and not 1 <= n <= each:
        raise ValueError(
            f"n={n}; {root} has {each} images per severity: give 1 to {each}, or None."
        )
    recipes = [_read_recipe(root, name) for name in CORRUPTIONS]
    made = any(recipe is not None for recipe in recipes)
    frost = (recipes[CORRUPTIONS.index("frost")] or {}).get("frost") if made else None
    return Archive(
        root,
        n or each,
        "generated" if made else "official",
        "pictures" if frost == "pictures" else "procedural" if made else None,
        CORRUPTIONS,
        labels[: n or each],
    )


def _read_recipe(root: Path, name: str) -> dict[str, object] | None:
    try:
        recipe = json.loads(_recipe_path(root, name).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}  # half a file: somebody generated here, but nothing can be trusted
    return recipe if isinstance(recipe, dict) else {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_fresh(root: Path, name: str, recipe: Recipe) -> bool:
    """Return True if the file of this corruption was made by this recipe and is complete."""
    path, found = root / f"{name}.npy", _read_recipe(root, name)
    if not path.is_file():
        return False
    if found is None:
        raise FileExistsError(
            f"{path} was not written by cached() (no {name}.json beside it) and is not "
            "overwritten; read it with read_official(), or give another folder."
        )
    checksum = found.pop("sha256", None)
    if found != recipe:
        return False
    if checksum != _sha256(path):
        warnings.warn(f"{path} is damaged (checksum); it is generated again.", stacklevel=4)
        return False
    return True


def _check_labels_file(root: Path, labels: np.ndarray) -> None:
    """Refuse to replace labels that `cached` did not write: a folder of its own has recipes."""
    path = root / "labels.npy"
    if not path.exists() or any(_recipe_path(root, name).exists() for name in CORRUPTIONS):
        return
    try:
        same = np.array_equal(np.load(path, allow_pickle=False), labels)
    except (ValueError, EOFError, OSError):
        same = False
    if not same:
        raise FileExistsError(
            f"{path} was not written by cached() (no recipes beside it) and is not overwritten. Fix: give "
            "another folder."
        )


def _write(root: Path, name: str, recipe: Recipe, sets: Iterable[Tensor]) -> None:
    path = root / f"{name}.npy"
    # Without a recipe a file counts as published: one that fits nothing comes before the file.
    write_atomic(_recipe_path(root, name), b'{"unfinished": true}')
    _write_array(path, np.concatenate([made.permute(0, 2, 3, 1).cpu().numpy() for made in sets]))
    text = json.dumps({**recipe, "sha256": _sha256(path)}, indent=1) + "\n"
    write_atomic(_recipe_path(root, name), text.encode())


def _write_array(path: Path, rows: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    write_atomic(path, buffer.getbuffer())


def cached(
    images: Tensor,
    root: str | Path,
    labels: Tensor | None = None,
    seed: int = 0,
    frost: str | Path | None = None,
    names: Iterable[str] = CORRUPTIONS,
) -> Archive:
    """The corrupted sets of `images`, generated under `root` unless the same are there and whole.

    A file is used again only if seed, version, kind of frost and the images themselves agree and
    its checksum holds; otherwise that file is made anew. Files that are not ours are left alone.

    >>> import tempfile
    >>> images = torch.full((2, 1, 8, 8), 100, dtype=torch.uint8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive = cached(images, folder, names=["contrast", "fog"])
    ...     print(
    ...         archive.label, [s.severity for s in archive], archive.read("contrast", 5).unique()
    ...     )
    generated [1, 2, 3, 4, 5, 1, 2, 3, 4, 5] tensor([100], dtype=torch.uint8)
    """
    root, names = Path(root), tuple(names)
    for name in names:
        check(images, name, SEVERITIES[0])
    if labels is not None and (len(labels) != len(images) or not 0 <= labels.max() < 256):
        raise ValueError(
            f"cached() got {len(images)} images and labels of shape {tuple(labels.shape)} up to "
            f"{labels.max()}; give one class per image, 0 to 255 (the published files are uint8)."
        )
    tiled = None
    if labels is not None:
        tiled = labels.cpu().repeat(len(SEVERITIES)).numpy().astype(np.uint8)
        _check_labels_file(root, tiled)
    root.mkdir(parents=True, exist_ok=True)
    source = hashlib.sha256(images.cpu().numpy().tobytes()).hexdigest()
    for name in names:
        recipe: Recipe = {
            "corruption": name,
            "origin": "generated by lpbnn",
            "version": VERSION,
            "seed": seed,
            "frost": frost_kind(frost) if name == "frost" else None,
            "shape": list(images.shape),
            "images": source,
        }
        if not _is_fresh(root, name, recipe):
            _write(root, name, recipe, (corrupt(images, name, s, seed, frost) for s in SEVERITIES))
    if tiled is not None:
        _write_array(root / "labels.npy", tiled)
    kind = frost_kind(frost) if "frost" in names else None
    return Archive(root, len(images), "generated", kind, names, labels)
