"""Weather: snow, frost, fog. One layer per image, shared by its channels (frost has colour).

Other sizes: flakes scale with the image but stay at least one pixel, streaks of snow follow the rule
of motion blur, pieces of a frost picture show as much of it as a 32x32 image sees, fog's fractal
spans the next power of two above the image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lpbnn.data.corruptions.blur import streak
from lpbnn.data.corruptions.ops import REFERENCE_SIDE, Corruption, Draws, grey, length_scale, zoom

# The published code draws from the first five of its six pictures; the sixth is never used.
PICTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
PICTURE_SCALE = 0.2  # the published reduction of the pictures before a 32x32 piece is cut
Snow = tuple[float, float, float, float, float, float, float]


def snow(x: Tensor, c: Snow, draw: Draws) -> Tensor:
    """k x + (1 - k) max(x, 1.5 grey(x) + .5) + L + rot180(L): whitened, under a layer of flakes L.

    L: noise N(c0, c1), magnified by c2, set to zero below c3, drawn out into streaks of (radius c4,
    sigma c5) in a direction from U(-135, -45) degrees; k = c6.

    >>> black = torch.zeros(4, 1, 32, 32)
    >>> bool(snow(black, FAMILY["snow"].severities[4], Draws("key", 4, 4)).mean() > 0.1)
    True
    """
    loc, scale, magnify, threshold, radius, sigma, keep = c
    layer = loc + scale * draw.normal(1, *x.shape[-2:])
    layer = zoom(layer, max(1.0, magnify * length_scale(x, least=0.0)))
    layer = layer.masked_fill(layer < threshold, 0).clamp(max=1)
    layer = (layer * 255 + 1e-3).floor() / 255
    s = length_scale(x, least=0.5)
    layer = streak(layer, radius * s, sigma * s, draw.uniform(low=-135, high=-45))
    whitened = torch.maximum(x, 1.5 * grey(x) + 0.5)
    return keep * x + (1 - keep) * whitened + layer + layer.rot90(2, (-2, -1))


def plasma(size: int, decay: float, draw: Draws, rough: float = 100.0) -> Tensor:
    """Diamond-square height maps on a torus, (B, size, size) in 0..1; size is a power of two.

    Each round doubles the grid: a new point is the mean of its four neighbours + w U(-w, w), and
    w is divided by `decay`: a large decay gives broad clouds, a small one haze.

    >>> clouds = plasma(8, 3.0, Draws("key", 2, 2))
    >>> tuple(clouds.shape), clouds.amin((1, 2)).tolist(), clouds.amax((1, 2)).tolist()
    ((2, 8, 8), [0.0, 0.0], [1.0, 1.0])
    """
    corner = torch.zeros(draw.rows, 1, 1, device=draw.device)
    while (side := corner.shape[-1]) < size:
        jitter = draw.uniform(3, side, side, low=-rough * rough, high=rough * rough)
        right, below = corner.roll(-1, 2), corner.roll(-1, 1)
        centre = (corner + right + below + right.roll(-1, 1)) / 4 + jitter[:, 0]
        top = (corner + right + centre + centre.roll(1, 1)) / 4 + jitter[:, 1]
        left = (corner + below + centre + centre.roll(1, 2)) / 4 + jitter[:, 2]
        rows = torch.stack([corner, top], -1).flatten(2), torch.stack([left, centre], -1).flatten(2)
        corner = torch.stack(rows, 2).flatten(1, 2)
        rough /= decay
    low = corner.amin((1, 2), keepdim=True)
    return (corner - low) / (corner.amax((1, 2), keepdim=True) - low)


def _plasma_for(x: Tensor, decay: float, draw: Draws) -> Tensor:
    size = 1 << (max(x.shape[-2:]) - 1).bit_length()
    return plasma(size, decay, draw)[:, None, : x.shape[-2], : x.shape[-1]]


def fog(x: Tensor, c: tuple[float, float], draw: Draws) -> Tensor:
    """(x + a P) m / (m + a): plasma P of decay c1 times a = c0, rescaled by the image's maximum m.

    >>> bool(fog(torch.zeros(2, 1, 8, 8), (1.5, 1.75), Draws("key", 2, 2)).max() == 0)
    True
    """
    amount, decay = c
    highest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * _plasma_for(x, decay, draw)) * highest / (highest + amount)


def read_overlays(folder: str | Path, side: int = REFERENCE_SIDE) -> list[Tensor]:
    """The frost pictures in `folder`, (3, H, W) in 0..1, reduced as the published ones are.

    The reduction keeps what a 32x32 image would see of a picture: .2 side / 32 of its size.
    """
    folder = Path(folder)
    missing = [name for name in PICTURES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"frost={str(folder)!r} lacks {', '.join(missing)}; give the folder that holds "
            f"{', '.join(PICTURES)} (github.com/hendrycks/robustness), or frost=None for "
            "procedural frost."
        )
    overlays = []
    for name in PICTURES:
        with Image.open(folder / name) as picture:
            pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 255
        size = [round(n * PICTURE_SCALE * side / REFERENCE_SIDE) for n in pixels.shape[1:]]
        overlays.append(F.interpolate(pixels[None], size, mode="bilinear")[0])
    return overlays


def cut_pieces(x: Tensor, overlays: list[Tensor], draw: Draws) -> Tensor:
    """A random piece of a random overlay for every image, (B, 3, H, W)."""
    height, width = x.shape[-2:]
    which = draw.integers(0, len(overlays)).tolist()
    where = draw.uniform(2).tolist()
    pieces = []
    for index, (down, across) in zip(which, where, strict=True):
        overlay = overlays[index]
        free = overlay.shape[1] - height, overlay.shape[2] - width
        if min(free) <= 0:
            raise ValueError(
                f"images of {height}x{width} do not fit into a frost picture of "
                f"{overlay.shape[1]}x{overlay.shape[2]}; use frost=None (procedural) for these."
            )
        top, left = int(down * free[0]), int(across * free[1])
        pieces.append(overlay[:, top : top + height, left : left + width])
    return torch.stack(pieces).to(x)


def grow_frost(x: Tensor, draw: Draws) -> Tensor:
    """Procedural frost, (B, 3, H, W) in 0..1: bluish grey, needles in three directions, clouds.

    Tone, tint, contrast and the split between fine and broad structure are drawn from the ranges
    measured on the published pictures at the published reduction: luma 110..205, standard deviation
    within a piece 14..34, two thirds of it finer than five pixels.
    """
    level = draw.uniform(1, 1, 1, low=0.43, high=0.80)
    tint = draw.uniform(1, 1, 1, low=0.03, high=0.15) * x.new_tensor((-1, 0.35, 0.7)).view(3, 1, 1)
    deviation = draw.uniform(1, 1, 1, low=0.055, high=0.133)
    length = 1.2 * length_scale(x, least=0.5)
    seeds = draw.uniform(3, *x.shape[-2:]) ** 4
    angles = draw.uniform(3, low=0, high=360)
    layers = [streak(seeds[:, i : i + 1], 2 * length, length, angles[:, i]) for i in range(3)]
    needles = torch.stack(layers).amax(0)
    clouds = _plasma_for(x, 2.0, draw)
    texture = 0.85 * _standard(needles) + 0.55 * _standard(clouds)
    return (level + tint + deviation * texture).clamp(0, 1)


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True).clamp(min=1e-6)


def frost(
    x: Tensor, c: tuple[float, float], draw: Draws, overlays: list[Tensor] | None = None
) -> Tensor:
    """c0 x + c1 F, F a piece of a frost picture, or procedural frost where there are no pictures.

    >>> frosted = frost(torch.zeros(2, 1, 8, 8), (0.75, 0.45), Draws("key", 2, 2))
    >>> bool((0.45 * 0.4 < frosted.mean()) & (frosted.max() <= 0.45))
    True
    """
    layer = cut_pieces(x, overlays, draw) if overlays else grow_frost(x, draw)
    return c[0] * x + c[1] * (grey(layer) if x.shape[1] == 1 else layer)


FAMILY = {
    "snow": Corruption(
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Corruption(frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": Corruption(fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
}
