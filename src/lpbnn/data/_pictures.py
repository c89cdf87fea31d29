"""Pictures in files, a class each: all in memory, or decoded in their turn by threads that read ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lpbnn.data._examples import Dataset, Examples, Pair
from lpbnn.data.files import ReadAhead, Size, header
from lpbnn.data.images import DEEP, in_mode, opened, read_image

GREY = ("1", "L", "LA")  # Pillow's modes without colour
LOOKED_AT = 64  # pictures at once, for their mean and spread


@dataclass(frozen=True, eq=False)
class PictureFiles(ReadAhead):
    """Pictures of any size, each read as uint8 (C, H, W) when it is asked for, and its class.

    Args:
        paths: the files.
        targets: int64 (N,), the class of each.
        wanted: channels, height and width to which every picture is brought, as `predict` does it.
    """

    paths: tuple[Path, ...]
    targets: Tensor
    wanted: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.wanted

    def __len__(self) -> int:
        return len(self.paths)

    def class_counts(self, classes: int) -> tuple[int, ...]:
        return Dataset(self.targets, self.targets).class_counts(classes)

    def blank(self, places: Tensor) -> Pair:
        return self.bytes_for(len(places), self.shape), self.targets[places]

    def read_into(self, place: int, x: Tensor, y: Tensor) -> None:
        np.copyto(x.numpy(), read_image(self.paths[place], self.wanted).numpy())


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
