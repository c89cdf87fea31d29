"""Pictures and label maps in files, decoded in their turn by threads that read ahead.

Memory does not grow with the data set: at any time the batch in use and a few more are decoded, `AHEAD`
or as many as keep the threads busy.
Conversions, all of them: a grey or palette picture becomes RGB, transparency is dropped; a palette
in a label map is ignored, its indices are the ids; a picture is turned as its EXIF data says, and
its label map has to be one of the picture as it is shown. Whatever else does not fit is an error that names
the file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lpbnn.data._examples import Dataset, Examples, Index, Pair, widened
from lpbnn.data.images import in_mode, opened, size_shown

T = TypeVar("T")
VOID, UNKNOWN = 255, 254  # labels: no class on purpose, and an id that no class has
AHEAD = 2  # batches
WORKERS = min(8, os.cpu_count() or 1)
TAIL = 4096  # bytes in which the end mark of a complete file is looked for
END_MARKS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
Size = tuple[int, int]  # height, width
SAME = np.arange(256, dtype=np.uint8)  # label ids that are labels already


@dataclass(frozen=True, eq=False)
class ReadAhead(Examples):
    """Examples whose pictures, uint8, are read from files when they are asked for, the next ones already.

    Args:
        device: where examples are given out; pinned memory lets the copy run beside the work.
    """

    device: torch.device = field(default=torch.device("cpu"), kw_only=True)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, index: Index) -> Pair:
        if isinstance(index, int):
            x, y = self[torch.tensor([range(len(self))[index]])]
            return x[0], y[0]
        return next(self.stream([torch.arange(len(self))[index]]))

    def take(self, index: slice | Tensor) -> Dataset:
        """The examples at `index`, decoded, in memory."""
        with _threads() as pool:
            return Dataset(*_Batch(self, torch.arange(len(self))[index], pool).tensors())

    def to(self, device: torch.device | str) -> Self:
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
        finally:  # also where the loop was left early, or an example could not be read
            pool.shutdown(cancel_futures=True)

    def _given(self, batch: _Batch) -> Pair:
        x, y = (part.to(self.device, non_blocking=True) for part in batch.tensors())
        return x, widened(y)

    def blank(self, places: Tensor) -> Pair:
        """A batch for the examples at `places`, as `read_into` is to fill it."""
        raise NotImplementedError

    def read_into(self, place: int, x: Tensor, y: Tensor) -> None:
        """Decode one example into the given rows of a batch."""
        raise NotImplementedError

    def bytes_for(self, count: int, shape: Sequence[int]) -> Tensor:
        """Memory for `count` arrays, pinned where it will be copied to a GPU."""
        pinned = self.device.type == "cuda"
        return torch.empty((count, *shape), dtype=torch.uint8, pin_memory=pinned)


class _Batch:
    """Tensors that threads are filling."""

    def __init__(self, data: ReadAhead, places: Tensor, pool: ThreadPoolExecutor) -> None:
        self.x, self.y = data.blank(places)
        self.futures: list[Future[None]] = [
            pool.submit(data.read_into, place, self.x[row], self.y[row])
            for row, place in enumerate(places.tolist())
        ]

    def tensors(self) -> Pair:
        """The batch, complete; the first file that could not be read raises its error."""
        for future in self.futures:
            future.result()
        return self.x, self.y


@dataclass(frozen=True, eq=False)
class FileDataset(ReadAhead):
    """Pairs of a picture and a label map: uint8 (3, H, W) and (H, W), read when asked for.

    Args:
        images, labels: the files, pair by pair.
        native: height and width that every file must have.
        size: height and width to which they are resized (pictures smoothly, labels by the nearest).
        table: (256,) what each id in the label files stands for; `UNKNOWN` makes it an error.
        counts: (256,) pixels of each label, where they are known already.
    """

    images: tuple[Path, ...]
    labels: tuple[Path, ...]
    native: Size
    size: Size
    table: np.ndarray = field(default_factory=lambda: SAME)
    counts: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, *self.size)

    def __len__(self) -> int:
        return len(self.images)

    def class_counts(self, classes: int) -> tuple[int, ...]:
        counts = self.counts
        if counts is None:
            counts = by_label(count_ids(self.labels, self.table).sum(0), self.table)
        return tuple(int(count) for count in counts[:classes])

    def blank(self, places: Tensor) -> Pair:
        count = len(places)
        return self.bytes_for(count, self.shape), self.bytes_for(count, self.size)

    def read_into(self, place: int, x: Tensor, y: Tensor) -> None:
        # By numpy: torch would start threads of its own in each of ours.
        picture = read_picture(self.images[place], self.native, self.size)
        np.copyto(x.numpy(), picture.transpose(2, 0, 1))
        np.copyto(y.numpy(), read_labels(self.labels[place], self.native, self.size, self.table))


def read_picture(path: Path, native: Size, size: Size) -> np.ndarray:
    """uint8 (H, W, 3)."""
    with opened(path) as picture:
        _require_size(path, size_shown(picture), native)
        colours = in_mode(picture, "RGB", path)
        if size != native:
            colours = colours.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(colours)


def read_ids(path: Path) -> np.ndarray:
    """The ids in a label file, (H, W), as they are."""
    with opened(path) as picture:
        require_one_channel(path, picture)
        return np.array(picture)


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
    """How often each id from 0 to 255 is in each label file, (N, 256); larger ids are an error.

    `table` tells the error which ids are expected; others of one byte are counted all the same.
    """

    def count(path: Path) -> np.ndarray:
        ids = read_ids(path)
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


def header(path: Path, label: bool) -> Size:
    """Height and width of a file that is complete and, as far as its head tells, usable."""
    with opened(path) as picture:
        if label:
            require_one_channel(path, picture)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            ends = END_MARKS.get(picture.format or "", b"") in file.read()
        if not ends:  # cut short, most likely: decoding it tells
            picture.load()
        return size_shown(picture) if not label else (picture.height, picture.width)


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


def _require_size(path: Path, size: Size, native: Size) -> None:
    if size != native:
        raise ValueError(
            f"{path} is {size[1]}x{size[0]} now; it was {native[1]}x{native[0]} when the "
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
