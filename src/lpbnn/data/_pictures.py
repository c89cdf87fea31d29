"""Pictures in files, a class each: all in memory, or decoded in their turn by threads that read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lpbnn.data._examples import Dataset, Examples, Index, Pair
from lpbnn.data.files import AHEAD, WORKERS, Size, header
from lpbnn.data.images import DEEP, in_mode, opened, read_image

GREY = ("1", "L", "LA")  # Pillow's modes without colour
LOOKED_AT = 64  # pictures at once, for their mean and spread


@dataclass(frozen=True, eq=False)
class PictureFiles(Examples):
    """Pictures of any size, each read as uint8 (C, H, W) when it is asked for, and its class.

    Args:
        paths: the files.
        targets: int64 (N,), the class of each.
        wanted: channels, height and width to which every picture is brought, as `predict` does it.
        device: where examples are given out; pinned memory lets the copy run beside the work.
    """

    paths: tuple[Path, ...]
    targets: Tensor
    wanted: tuple[int, int, int]
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.wanted

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Index) -> Pair:
        if isinstance(index, int):
            x, y = self[torch.tensor([range(len(self))[index]])]
            return x[0], y[0]
        return next(self.stream([self._at(index)]))

    def take(self, index: slice | Tensor) -> Dataset:
        """The examples at `index`, decoded, in memory."""
        return Dataset(*next(replace(self, device=torch.device("cpu")).stream([self._at(index)])))

    def to(self, device: torch.device | str) -> PictureFiles:
        return replace(self, device=torch.device(device))

    def stream(self, parts: Sequence[Tensor]) -> Iterator[Pair]:
        waiting: deque[_Batch] = deque()
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="lpbnn-read")
        try:
            for part in parts:
                waiting.append(_Batch(self, part, pool))
                if len(waiting) > max(AHEAD, WORKERS // max(1, len(part))):
                    yield waiting.popleft().on(self.device)
            while waiting:
                yield waiting.popleft().on(self.device)
        finally:  # also where the loop was left early, or a picture could not be read
            pool.shutdown(cancel_futures=True)

    def class_counts(self, classes: int) -> tuple[int, ...]:
        known = self.targets[(self.targets >= 0) & (self.targets < classes)]
        return tuple(known.bincount(minlength=classes).tolist())

    def read_into(self, place: int, x: Tensor) -> None:
        """Decode one picture into the given row of a batch."""
        np.copyto(x.numpy(), read_image(self.paths[place], self.wanted).numpy())

    def _at(self, index: slice | Tensor) -> Tensor:
        return torch.arange(len(self))[index]


class _Batch:
    """A tensor that threads are filling."""

    def __init__(self, data: PictureFiles, places: Tensor, pool: ThreadPoolExecutor) -> None:
        shape, pinned = (len(places), *data.shape), data.device.type == "cuda"
        self.x = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        self.y = data.targets[places]
        self.futures: list[Future[None]] = [
            pool.submit(data.read_into, place, self.x[row])
            for row, place in enumerate(places.tolist())
        ]

    def on(self, device: torch.device) -> Pair:
        """The batch, complete; the first file that could not be read raises its error."""
        for future in self.futures:
            future.result()
        return self.x.to(device, non_blocking=True), self.y.to(device, non_blocking=True)


class Look(NamedTuple):
    """What the head of a picture tells."""

    size: Size
    grey: bool


def look(path: Path) -> Look:
    """The size and the kind of a picture that is complete and can be read, without decoding it."""
    try:
        size = header(path, label=False)
        with opened(path) as picture:
            if picture.mode in DEEP:
                in_mode(picture, "L", path)  # refuses it
            return Look(size, picture.mode in GREY)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large: {error} Fix: make it smaller.") from error


def mean_and_std(data: Examples, places: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of every channel of the pictures at `places`, on the 0..1 scale; a constant channel has std 1.

    >>> black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> mean_and_std(Dataset(black_and_white, torch.zeros(2)), torch.arange(2))
    ((0.5,), (0.5,))
    """
    total = square = torch.zeros(data.shape[0], dtype=torch.float64)
    for x, _ in data.stream(places.split(LOOKED_AT)):
        whole = x.double()  # whole numbers: their sums are exact
        total = total + whole.sum((0, 2, 3))
        square = square + whole.square().sum((0, 2, 3))
    count = len(places) * data.shape[1] * data.shape[2]
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt() / 255
    return tuple((mean / 255).tolist()), tuple(value or 1.0 for value in std.tolist())
