"""Corrupt a batch.

Reproducible: the result for image i is a function of that image, its index, its shape, the seed,
the corruption and the severity. It does not depend on how many images follow it, so the first
thousand of ten thousand are those of a run on the first thousand. Draws are made on the CPU, so
CUDA gives the same images up to rounding (a value may differ by one in 255).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lpbnn.data.corruptions import blur, digital, noise, weather
from lpbnn.data.corruptions.ops import Corruption, Draws
from lpbnn.registry import unknown

VERSION = 1  # raised whenever the same seed would give other images
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST_SIDE = 8

TABLE: dict[str, Corruption] = {
    **noise.FAMILY,
    **blur.FAMILY,
    **weather.FAMILY,
    **digital.FAMILY,
}
CORRUPTIONS: tuple[str, ...] = tuple(TABLE)
"""The fifteen names, in the published order and spelled as the published files."""


def check(images: Tensor, name: str, severity: int) -> None:
    """Raise what is wrong with a request, before anything is computed or written."""
    given = f"{images.dtype} of shape {tuple(images.shape)}"
    if images.dtype != torch.uint8:
        raise TypeError(
            f"corrupt() takes uint8 images in 0..255, got {given}; convert with "
            "(images * 255).round().to(torch.uint8) if they are floats in 0..1."
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"corrupt() takes images of shape (N, C, H, W) with C = 1 or 3, got {given}; "
            "use images.permute(0, 3, 1, 2) for channels-last, images[None] for a single image."
        )
    if min(images.shape[-2:]) < SMALLEST_SIDE:
        raise ValueError(
            f"corrupt() takes images of at least {SMALLEST_SIDE}x{SMALLEST_SIDE} pixels, got "
            f"{given}; enlarge them first."
        )
    if name not in TABLE:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r}; expected one of 1, 2, 3, 4, 5 (5 is the worst).")


def block_rows(shape: Iterable[int]) -> int:
    """Return the number of images per generator: 256 small ones, fewer large ones (about 2^20 values).

    >>> block_rows((3, 32, 32)), block_rows((3, 720, 1280))
    (256, 1)
    """
    values = torch.Size(shape).numel()
    return min(256, max(1, 2**20 // values))


@torch.no_grad()
def corrupt(
    images: Tensor, name: str, severity: int, seed: int = 0, frost: str | Path | None = None
) -> Tensor:
    """The images corrupted: floor(255 clip(f(x / 255), 0, 1)), as the published files are rounded.

    `frost` is the folder of the published frost pictures; None makes procedural frost.

    >>> images = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    >>> corrupt(images, "brightness", 5).unique().tolist()  # 100 + .3 * 255
    [176]
    """
    check(images, name, severity)
    apply, severities = TABLE[name]
    if name == "frost" and frost is not None:
        overlays = weather.read_overlays(frost, min(images.shape[-2:]))
        apply = partial(weather.frost, overlays=overlays)
    block = block_rows(images.shape[1:])
    out = torch.empty_like(images)
    for number, rows in enumerate(images.split(block)):
        key = f"lpbnn/{VERSION}/{seed}/{name}/{severity}/{number}"
        draw = Draws(key, len(rows), block, images.device)
        y = apply(rows.float() / 255, severities[severity - 1], draw)
        # The published arrays are truncated, not rounded; 1e-3 is more than float32 can lose.
        out[number * block :][: len(rows)] = (y.clamp(0, 1) * 255 + 1e-3).to(torch.uint8)
    return out
