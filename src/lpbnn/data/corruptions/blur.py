"""Blur: defocus, glass, motion, zoom. Lengths are pixels of a 32x32 image.

Larger images: lengths grow by s = min(H, W) / 32. Smaller ones: defocus and glass keep the
published kernels, which are 3x3 already, motion shrinks by half at most (8x8: s = 1/2), because a
blur far below one pixel is no blur, and zoom, relative anyway, is not rounded to whole pixels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lpbnn.data.corruptions.ops import (
    Corruption,
    Draws,
    border_index,
    gather_pixels,
    gaussian,
    length_scale,
    zoom,
)


def disk_kernel(radius: float, alias: float) -> Tensor:
    """A uniform disk, u^2 + v^2 <= radius^2, softened by a small Gaussian of sigma `alias`.

    >>> disk_kernel(1, 0.2).mul(1000).round().int()[1:-1, 1:-1]
    tensor([[  0, 200,   0],
            [200, 200, 200],
            [  0, 200,   0]], dtype=torch.int32)
    """
    soft = 1 if radius <= 8 else 2  # the published softening kernel is 3x3, 5x5 for large disks
    reach = math.floor(radius) + soft
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (line[:, None] ** 2 + line**2 <= radius**2).double()
    bell = torch.exp(-0.5 * (torch.arange(-soft, soft + 1, dtype=torch.float64) / alias) ** 2)
    bell = torch.outer(bell, bell) / bell.sum() ** 2
    kernel = F.conv2d((disk / disk.sum())[None, None], bell[None, None], padding=soft)
    return kernel[0, 0].float()


def defocus_blur(x: Tensor, c: tuple[float, float], draw: Draws) -> Tensor:
    """x * disk(radius) * N(0, alias^2): a lens out of focus, borders mirrored.

    >>> dot = torch.zeros(1, 1, 8, 8).index_fill_(2, torch.tensor(4), 1.0)
    >>> defocus_blur(dot, (1.5, 0.1), Draws("key", 1, 1))[0, 0, :, 0].mul(3).round().int().tolist()
    [0, 0, 0, 1, 1, 1, 0, 0]
    """
    s = length_scale(x, least=1.0)
    kernel = disk_kernel(c[0] * s, c[1] * s)
    padded = F.pad(x, (len(kernel) // 2,) * 4, mode="reflect")
    total = torch.zeros_like(x)
    # Few taps are not zero, and adding shifted images is faster than a one-channel convolution.
    for i, j in (kernel > 1e-6).nonzero().tolist():
        shifted = padded[..., i : i + x.shape[-2], j : j + x.shape[-1]]
        total.add_(shifted, alpha=kernel[i, j].item())
    return total


def glass_blur(x: Tensor, c: tuple[float, int, int], draw: Draws) -> Tensor:
    """Blur, let every pixel take a neighbour's value at random, `iterations` times, blur again.

    x[h, w] <- x[h + dy, w + dx], dy and dx uniform in {-delta, ..., delta - 1}. The published loop
    means to swap the two pixels, but its two numpy views alias each other and the neighbour keeps
    its value; walking backwards with delta = 1 it only reads what it has not yet written. One
    gather from the previous image is therefore exactly what made CIFAR-10-C. The first delta + 1
    rows and columns never move.

    >>> x = torch.rand(1, 1, 32, 32)
    >>> y = glass_blur(x, (0.05, 1, 1), Draws("key", 1, 1))
    >>> bool((y[..., :2] - x[..., :2]).abs().max() < 1 / 255), bool((y != x)[..., 2:].any())
    (True, True)
    """
    s = length_scale(x, least=1.0)
    sigma, delta, iterations = c[0] * s, round(c[1] * s), c[2]
    height, width = x.shape[-2:]
    x = (gaussian(x, sigma) * 255 + 1e-3).floor() / 255
    h = torch.arange(height, device=x.device)[:, None]
    w = torch.arange(width, device=x.device)
    moves = (h > delta) & (h <= height - delta) & (w > delta) & (w <= width - delta)
    for _ in range(iterations):
        jump = draw.integers(-delta, delta, 2, height, width) * moves
        row, column = h + jump[:, 0], w + jump[:, 1]
        x = gather_pixels(x, row, column)
    return gaussian(x, sigma)


def streak(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Motion along `degrees` (B,): sum_i k_i x[h + round(i sin), w + round(i cos)], 8-bit rounded.

    k_i ~ exp(-i^2 / 2 sigma^2) for i = 0 .. 2 ceil(radius): one-sided, as ImageMagick's; borders
    repeat the edge.
    """
    taps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (taps / sigma) ** 2)
    kernel /= kernel.sum()
    theta = torch.deg2rad(degrees.double())[:, None, None]
    h = torch.arange(x.shape[-2], device=x.device)[:, None]
    w = torch.arange(x.shape[-1], device=x.device)
    total = torch.zeros_like(x)
    for i, weight in enumerate(kernel.tolist()):
        if weight < 1e-6:  # cannot change an 8-bit value
            break
        row = h + torch.ceil(i * theta.sin() - 0.5).long()
        column = w + torch.ceil(i * theta.cos() - 0.5).long()
        row = border_index(row, x.shape[-2], "nearest")
        column = border_index(column, x.shape[-1], "nearest")
        total += weight * gather_pixels(x, row, column)
    return (total * 255).round() / 255


def motion_blur(x: Tensor, c: tuple[float, float], draw: Draws) -> Tensor:
    """A streak of (radius, sigma) in a direction drawn from U(-45, 45) degrees, one per image.

    >>> x = torch.rand(2, 3, 32, 32)
    >>> y = motion_blur(x, (9, 2.5), Draws("key", 2, 2))
    >>> bool(y.var() < x.var() / 2), f"{(y.mean() - x.mean()).abs():.2f}"
    (True, '0.00')
    """
    s = length_scale(x, least=0.5)
    return streak(x, c[0] * s, c[1] * s, draw.uniform(low=-45, high=45))


def zoom_blur(x: Tensor, largest: float, draw: Draws) -> Tensor:
    """(x + sum_z zoom(x, z)) / (1 + #z), z = 1, 1.01, ..., up to `largest`.

    >>> zoom_blur(torch.full((1, 1, 8, 8), 0.5), 1.06, Draws("key", 1, 1)).unique().tolist()
    [0.5]
    """
    # numpy's arange decides whether rounding lets the last factor in; it does for the first two.
    factors = np.arange(1, largest, 0.01).tolist()
    total = x.clone()
    for factor in factors:
        total += zoom(x, factor)
    return total / (len(factors) + 1)


FAMILY = {
    "defocus_blur": Corruption(
        defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    ),
    "glass_blur": Corruption(
        glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
    ),
    "motion_blur": Corruption(motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Corruption(zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
}
