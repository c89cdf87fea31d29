"""Pictures and label maps in files: decoded, checked, and read ahead by threads.

Memory does not grow with the data set: at any time the batch in use and a few more are decoded, `AHEAD`
or as many as keep the threads busy. All conversions: a picture is turned as its EXIF data says and becomes
grey or RGB, without transparency; the palette of a label map is ignored, its indices are the ids, and the
map has to fit the turned picture. Everything else is an error that names the file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lpbnn.data._examples import Dataset, Examples, Index, Pair, widened

T = TypeVar("T")
VOID, UNKNOWN = 255, 254  # labels: no class on purpose, and an id that no class has
AHEAD = 2  # batches
WORKERS = min(8, os.cpu_count() or 1)
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TAIL = 4096  # bytes in which the end mark of a complete file is looked for
END_MARKS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
Size = tuple[int, int]  # height, width
SAME = np.arange(256, dtype=np.uint8)  # label ids that are labels already
MODES = {1: "L", 3: "RGB"}
GREY = ("1", "L", "LA")  # Pillow's modes without colour
DEEP = ("I", "I;16", "I;16B", "I;16L", "F")  # a conversion to 8 bits would clip, not scale
PROGRAMS = ("EPS", "WMF")  # Pillow starts another program for them
ORIENTATION = 0x0112  # the EXIF tag
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


def size_text(size: Size) -> str:
    """Return a size as width x height.

    >>> size_text((720, 1280))
    '1280x720'
    """
    return f"{size[1]}x{size[0]}"


def parse_size(name: str, size: int | Sequence[int] | None, square: bool = False) -> Size | None:
    """Return height and width from the option of a data set.

    Args:
        square: accept one side for both.

    >>> parse_size("folder", 64, square=True), parse_size("camvid", (180, 240))
    ((64, 64), (180, 240))
    """
    if size is None:
        return None
    sides: Any = (size, size) if square and isinstance(size, int) else size
    whole = isinstance(sides, list | tuple) and all(type(n) is int and n > 0 for n in sides)
    if not whole or len(sides) != 2:
        expected = "(height, width), such as (180, 240)"
        if square:
            expected = "a side in pixels or (height, width), such as 64 or [64, 96]"
        raise ValueError(f"{name}: size={size!r}; expected {expected}.")
    return sides[0], sides[1]


class LabelMaps(NamedTuple):
    """The targets of a segmentation set.

    Args:
        paths: the label files, one for each picture.
        native: height and width that every file must have.
        table: (256,) the label of each id in the files; `UNKNOWN` makes an id an error.
        counts: (256,) pixels of each label, if they are known already.
    """

    paths: tuple[Path, ...]
    native: Size
    table: np.ndarray = SAME
    counts: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class FileDataset(Examples):
    """Pictures, uint8 (C, H, W), decoded when they are asked for, with a class or a label map each.

    Args:
        images: the files.
        targets: int64 (N,), the class of each picture, or the label maps.
        size: channels, height and width of what is given out. Pictures are resized smoothly (bicubic
            with classes, as `lpbnn predict` does; bilinear with label maps), label maps by the nearest.
        device: where examples are given out; pinned memory lets the copy run beside the work.
    """

    images: tuple[Path, ...]
    targets: Tensor | LabelMaps
    size: tuple[int, int, int]
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Index) -> Pair:
        if isinstance(index, int):
            x, y = self[torch.tensor([range(len(self))[index]])]
            return x[0], y[0]
        return next(self.stream([torch.arange(len(self))[index]]))

    def take(self, index: slice | Tensor) -> Dataset:
        """The examples at `index`, decoded, in memory."""
        with _threads() as pool:
            return Dataset(*_Batch(self, torch.arange(len(self))[index], pool).tensors())

    def to(self, device: torch.device | str) -> FileDataset:
        return replace(self, device=torch.device(device))

    def stream(self, parts: Sequence[Tensor]) -> Iterator[Pair]:
        waiting: deque[_Batch] = deque()
        pool = _threads()
        try:
            for part in parts:
                waiting.append(_Batch(self, part, pool))
                if len(waiting) > max(AHEAD, WORKERS // max(1, len(part))):
                    yield self._given(waiting.popleft())
            while waiting:
                yield self._given(waiting.popleft())
        finally:  # also if the loop was left early, or an example could not be read
            pool.shutdown(cancel_futures=True)

    def _given(self, batch: _Batch) -> Pair:
        x, y = (part.to(self.device, non_blocking=True) for part in batch.tensors())
        return x, widened(y)

    def class_counts(self, classes: int) -> tuple[int, ...]:
        if isinstance(self.targets, Tensor):
            return Dataset(self.targets, self.targets).class_counts(classes)
        counts, table = self.targets.counts, self.targets.table
        if counts is None:
            counts = by_label(count_ids(self.targets.paths, table).sum(0), table)
        return tuple(int(count) for count in counts[:classes])

    def read_into(self, index: int, x: Tensor, y: Tensor) -> None:
        """Decode one example into the given rows of a batch."""
        # By numpy: torch would start threads of its own in each of ours.
        size = self.size[1:]
        if isinstance(self.targets, Tensor):
            pixels = read_picture(self.images[index], None, size, self.size[0], BICUBIC)
        else:
            paths, native, table, _ = self.targets
            pixels = read_picture(self.images[index], native, size)
            np.copyto(y.numpy(), read_labels(paths[index], native, size, table))
        np.copyto(x.numpy(), pixels.transpose(2, 0, 1))


class _Batch:
    """Tensors that threads are filling."""

    def __init__(self, data: FileDataset, indices: Tensor, pool: ThreadPoolExecutor) -> None:
        # Pinned memory lets the copy to a GPU run beside the work.
        options = {"dtype": torch.uint8, "pin_memory": data.device.type == "cuda"}
        self.x = torch.empty((len(indices), *data.size), **options)
        if isinstance(data.targets, Tensor):
            self.y = data.targets[indices]
        else:
            self.y = torch.empty((len(indices), *data.size[1:]), **options)
        self.futures: list[Future[None]] = [
            pool.submit(data.read_into, index, self.x[row], self.y[row])
            for row, index in enumerate(indices.tolist())
        ]

    def tensors(self) -> Pair:
        """The batch, complete; the first file that could not be read raises its error."""
        for future in self.futures:
            future.result()
        return self.x, self.y


def read_picture(
    path: Path | str,
    native: Size | None = None,
    size: Size | None = None,
    channels: int = 3,
    resample: Image.Resampling = BILINEAR,
) -> np.ndarray:
    """Decode a file to uint8 (H, W, C), grey or RGB.

    Args:
        native: the size that the file must have; None: any.
        size: the size of the result; None: the file's own.
    """
    if channels not in MODES:
        raise ValueError(
            f"the network takes {channels} channels; a picture has 1 (grey) or 3 (RGB)."
        )
    with opened(path) as picture:
        if native is not None:
            _require_size(path, size_shown(picture), native)
        pixels = in_mode(picture, MODES[channels], path)
        height, width = size or (pixels.height, pixels.width)
        if (width, height) != pixels.size:
            pixels = pixels.resize((width, height), resample)
        return np.asarray(pixels, dtype=np.uint8).reshape(height, width, channels)


def read_scene(path: Path | str, height: int) -> Tensor:
    """One file to uint8 (3, H, W) of a height, its shape kept."""
    with opened(path) as picture:
        size = scaled(size_shown(picture), height)
    return _as_tensor(read_picture(path, size=size, resample=BICUBIC))


def scaled(size: Size, height: int) -> Size:
    """Height and width that a scene of a size is read in.

    >>> scaled((720, 1280), 360)
    (360, 640)
    """
    return height, max(1, round(size[1] * height / size[0]))


def read_images(paths: Sequence[Path | str], shape: tuple[int, ...]) -> Tensor:
    """Files to uint8 (N, C, H, W): converted to grey or RGB, then resized to the network's size.

    A missing or damaged file is an error that names it; transparency is dropped.
    """
    return torch.stack([read_image(path, shape) for path in paths])


def read_image(path: Path | str, shape: tuple[int, ...]) -> Tensor:
    """One file to uint8 (C, H, W)."""
    channels, height, width = shape
    return _as_tensor(read_picture(path, None, (height, width), channels, BICUBIC))


def _as_tensor(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


@contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """The picture in a file, open; a missing or damaged file is an error that names it."""
    kind = Path(path)
    if kind.is_dir():
        raise ValueError(f"{path} is a folder; give image files.")
    if kind.exists() and not kind.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is a pipe or a device; give image files.")
    try:
        with Image.open(path) as picture:
            if picture.format in PROGRAMS:
                raise ValueError(
                    f"{path} is a program that draws a picture ({picture.format}), and none is run. Fix: save "
                    "it as PNG."
                )
            yield picture
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file.") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large: {error} Fix: make it smaller.") from error
    except Exception as error:  # damaged bytes fail in any way at all
        if isinstance(error, ValueError) and str(path) in str(error):
            raise  # ours
        raise ValueError(
            f"{path} cannot be read: damaged, or no image ({error}). Fix: get the file again."
        ) from error


def orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation of a picture just opened, 1 to 8, from its header alone."""
    if picture.format == "TIFF":  # Pillow turns it by itself
        return 1
    try:
        # Not the PNG reader's own, which would decode the pixels in search of data behind them.
        found = Image.Image.getexif(picture).get(ORIENTATION, 1)
    except Exception:  # broken EXIF data raises anything, and is no reason to refuse the pixels
        return 1
    return found if found in range(1, 9) else 1


def size_shown(picture: Image.Image) -> tuple[int, int]:
    """Height and width of a picture just opened, as it is shown."""
    width, height = picture.size
    return (width, height) if orientation(picture) >= 5 else (height, width)


def upright(picture: Image.Image) -> Image.Image:
    """A picture just opened, as it is shown."""
    return picture if orientation(picture) == 1 else ImageOps.exif_transpose(picture)


def in_mode(picture: Image.Image, mode: str, path: Path | str) -> Image.Image:
    """A picture just opened, as it is shown, as "L" or "RGB"; transparency is dropped."""
    if picture.mode in DEEP:
        raise ValueError(
            f"{path} has pixels of more than 8 bits (mode {picture.mode!r}), of which a conversion "
            "would keep the lowest. Fix: save it with 8 bits per channel."
        )
    picture = upright(picture)
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert(mode)


def read_labels(path: Path, native: Size, size: Size, table: np.ndarray) -> np.ndarray:
    """uint8 (H, W), every id translated by `table`."""
    with opened(path) as picture:
        _require_size(path, (picture.height, picture.width), native)
        require_one_channel(path, picture)
        if size != native:
            picture = picture.resize((size[1], size[0]), Image.Resampling.NEAREST)
        ids = np.array(picture)
    small = ids.astype(np.uint8)
    labels = np.where(small == ids, table[small], UNKNOWN).astype(np.uint8)
    if (labels == UNKNOWN).any():
        raise unknown_ids(path, np.unique(ids[labels == UNKNOWN]).tolist(), table)
    return labels


def count_ids(paths: Sequence[Path], table: np.ndarray = SAME) -> np.ndarray:
    """Count each id from 0 to 255 in each label file, (N, 256); larger ids are an error.

    `table` tells the error which ids are expected; others of one byte are counted all the same.
    """

    def count(path: Path) -> np.ndarray:
        with opened(path) as picture:
            require_one_channel(path, picture)
            ids = np.array(picture)
        if ids.min(initial=0) < 0 or ids.max(initial=0) > 255:
            raise unknown_ids(path, np.unique(ids[(ids < 0) | (ids > 255)]).tolist(), table)
        return np.bincount(ids.astype(np.uint8).ravel(), minlength=256)

    return np.stack(in_threads(count, paths)) if paths else np.zeros((0, 256), np.int64)


def by_label(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Counts of ids, (256,), as counts of labels."""
    return np.bincount(table, weights=ids, minlength=256).astype(np.int64)


def in_threads(work: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """`work` for every file, in their order; the first error ends it."""
    with _threads() as pool:
        try:
            return list(pool.map(work, paths))
        finally:
            pool.shutdown(cancel_futures=True)


def is_picture(path: Path) -> bool:
    """Return True for the name of a picture that is not hidden."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".")


def walk(folder: Path) -> list[Path]:
    """Return all files in a folder and below; links to other folders are followed, as `rglob` does not."""
    found, seen = [], set()
    for base, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(base)
        if here in seen:  # a link leads back
            folders.clear()
            continue
        seen.add(here)
        found += [Path(base, name) for name in names]
    return sorted(found)


class Header(NamedTuple):
    """The header of a picture file."""

    size: Size
    grey: bool


def header(path: Path, label: bool = False) -> Header:
    """The size and the kind of a picture that is complete and can be read, without decoding it."""
    with opened(path) as picture:
        if label:
            require_one_channel(path, picture)
        elif picture.mode in DEEP:
            in_mode(picture, "L", path)  # refuses it
        grey = picture.mode in GREY
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            ends = END_MARKS.get(picture.format or "", b"") in file.read()
        if not ends:  # cut short, most likely: decoding it tells
            picture.load()
        return Header((picture.height, picture.width) if label else size_shown(picture), grey)


def require_one_channel(path: Path, picture: Image.Image) -> None:
    """A label map holds a class id per pixel; colours would have to be guessed at."""
    if len(picture.getbands()) != 1 or picture.mode == "F":
        raise ValueError(
            f"{path} is a picture of mode {picture.mode!r}; expected a label map with one class id per "
            "pixel (mode 'L' or 'P'). Fix: give the file of ids, not the coloured one."
        )


def unknown_ids(path: Path, ids: Sequence[int], table: np.ndarray) -> ValueError:
    """The error for ids that no class has."""
    known = [i for i, label in enumerate(table.tolist()) if label != UNKNOWN]
    return ValueError(
        f"{path} holds the label ids {', '.join(map(str, ids[:8]))}, which no class has; expected "
        f"{_ranges(known)}. Fix: check that it is a label map of this data set, with its published ids."
    )


def _require_size(path: Path | str, size: Size, native: Size) -> None:
    if size != native:
        raise ValueError(
            f"{path} is {size_text(size)} now; it was {size_text(native)} when the "
            "data was loaded. Fix: leave the files alone during a run, and start again."
        )


def _ranges(numbers: Sequence[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 11, 255])
    '0-2, 11, 255'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, run)) for run in found)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="lpbnn-read")
