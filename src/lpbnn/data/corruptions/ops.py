"""Parts of the fifteen corruptions: reproducible draws, borders, and filters as small matrices.

A separable filter of an image X is `R X C^T` with one matrix per axis that already contains the
border rule, so blur, zoom and resampling of a batch are two matrix products, on any device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

REFERENCE_SIDE = 32  # the side of the images the published parameters belong to
Border = Literal["nearest", "reflect", "mirror"]


class Corruption(NamedTuple):
    """A function (images in 0..1, the severity's parameters, draws) -> images, and its five."""

    apply: Callable[[Tensor, Any, Draws], Tensor]
    severities: tuple[Any, Any, Any, Any, Any]


class Draws:
    """Random numbers for the images of one block, made on the CPU and sent to `device`.

    Numbers for a whole block are always drawn and the first `rows` kept, so those of image i depend
    on the key and on i, never on how many images follow it.

    >>> few, many = (Draws("key", rows, block=8).uniform(3) for rows in (2, 5))
    >>> torch.equal(few, many[:2])
    True
    """

    def __init__(self, key: str, rows: int, block: int, device: torch.device | str = "cpu") -> None:
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.block, self.device = rows, block, device

    def _keep(self, drawn: Tensor) -> Tensor:
        return drawn[: self.rows].to(self.device)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """U(low, high), of shape (rows, *shape)."""
        unit = torch.rand(self.block, *shape, generator=self.generator, dtype=dtype)
        return self._keep(unit) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """N(0, 1), of shape (rows, *shape)."""
        return self._keep(torch.randn(self.block, *shape, generator=self.generator))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers low..high-1, of shape (rows, *shape)."""
        return self._keep(torch.randint(low, high, (self.block, *shape), generator=self.generator))


def length_scale(x: Tensor, least: float) -> float:
    """By how much lengths in pixels grow for these images, s = max(min(H, W) / 32, least).

    >>> length_scale(torch.zeros(1, 1, 8, 8), least=0.5)
    0.5
    """
    return max(min(x.shape[-2:]) / REFERENCE_SIDE, least)


def border_index(index: Tensor, size: int, border: Border) -> Tensor:
    """Positions outside 0..size-1 brought inside: a|abc|c, ba|abc|cb (reflect), cb|abc|ba (mirror).

    >>> around = torch.arange(-2, 5)
    >>> [border_index(around, 3, rule).tolist() for rule in ("nearest", "reflect", "mirror")]
    [[0, 0, 0, 1, 2, 2, 2], [1, 0, 0, 1, 2, 2, 1], [2, 1, 0, 1, 2, 1, 0]]
    """
    if border == "nearest" or size == 1:
        return index.clamp(0, size - 1)
    if border == "mirror":
        folded = index % (2 * size - 2)
        return torch.minimum(folded, 2 * size - 2 - folded)
    folded = index % (2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)


def gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    """G with (G x)_i = sum_k g_k x_(i+k), g_k ~ exp(-k^2 / 2 sigma^2), |k| <= truncate sigma + 1/2.

    >>> gaussian_matrix(3, sigma=0.5, truncate=2.0, border="nearest").mul(1000).round().int()
    tensor([[893, 107,   0],
            [107, 787, 107],
            [  0, 107, 893]], dtype=torch.int32)
    """
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = (
        torch.exp(-0.5 * (offsets.double() / sigma) ** 2) if radius else torch.ones(1).double()
    )
    columns = border_index(torch.arange(size)[:, None] + offsets, size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, columns, (weights / weights.sum()).expand(size, -1))
    return matrix.float()


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Z with Z x = the middle 1/factor of x, stretched linearly to its old length.

    The published way crops, stretches and trims whole pixels. Below 32 of them that rounding would
    swallow the zoom (1.06 of 8 pixels is 8), so there x is read at c + (i - c) / factor instead,
    c the centre.

    >>> zoom_matrix(64, 2.0)[:4] @ torch.arange(64.0)
    tensor([16.0000, 16.4921, 16.9841, 17.4762])
    >>> zoom_matrix(4, 2.0) @ torch.arange(4.0)
    tensor([0.7500, 1.2500, 1.7500, 2.2500])
    """
    crop = math.ceil(size / factor)
    grown = round(crop * factor)
    i = torch.arange(size, dtype=torch.float64)
    centre = (size - 1) / 2
    if size < REFERENCE_SIDE:
        at = centre + (i - centre) / factor
    else:  # the ends of the crop land on the ends of the stretched signal
        at = (size - crop) // 2 + (i + (grown - size) // 2) * (crop - 1) / (grown - 1)
    left = at.floor().long().clamp(max=size - 2)
    share = at - left
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows = torch.arange(size)
    matrix[rows, left] = 1 - share
    matrix[rows, left + 1] = share
    return matrix.float()


def box_matrix(size: int, smaller: int) -> Tensor:
    """B that shrinks a signal: each output the mean of the inputs whose centres its box covers.

    >>> box_matrix(4, 2)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    width = size / smaller
    centre = (torch.arange(smaller, dtype=torch.float64)[:, None] + 0.5) * width
    distance = (torch.arange(size, dtype=torch.float64) + 0.5 - centre) / width
    covered = ((distance > -0.5) & (distance <= 0.5)).double()
    return (covered / covered.sum(1, keepdim=True)).float()


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """R X C^T for every image and channel."""
    return rows.to(x) @ x @ columns.to(x).T


def gaussian(x: Tensor, sigma: float, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """The image filtered by a Gaussian of standard deviation sigma, pixels."""
    rows, columns = (gaussian_matrix(size, sigma, truncate, border) for size in x.shape[-2:])
    return separable(x, rows, columns)


def zoom(x: Tensor, factor: float) -> Tensor:
    """The image magnified about its centre, same size."""
    rows, columns = (zoom_matrix(size, factor) for size in x.shape[-2:])
    return separable(x, rows, columns)


def gather_pixels(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """out[b, c, h, w] = x[b, c, row[b, h, w], column[b, h, w]], the same for every channel."""
    flat = (row * x.shape[-1] + column).flatten(1).unsqueeze(1)
    return x.flatten(2).gather(2, flat.expand(-1, x.shape[1], -1)).view_as(x)


def grey(x: Tensor) -> Tensor:
    """Luma .299 R + .587 G + .114 B, one channel; a grey image is its own."""
    if x.shape[1] == 1:
        return x
    return (x * x.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)).sum(1, keepdim=True)
