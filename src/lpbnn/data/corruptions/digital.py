"""Digital: brightness, contrast, elastic transform, pixelate, jpeg. All are relative to the size.

On 8x8 images pixelate can only shrink to whole pixels: 7, 7, 6, 6, 5.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lpbnn.data.corruptions.ops import Corruption, Draws, box_matrix, gaussian, separable


def brightness(x: Tensor, amount: float, draw: Draws) -> Tensor:
    """V' = min(V + amount, 1) at the same hue and saturation, V = max(R, G, B).

    Hue and saturation are ratios, so x V' / V keeps both; black has neither and turns grey.

    >>> brightness(
    ...     torch.tensor([0.2, 0.4, 0.1]).view(1, 3, 1, 1), 0.2, Draws("key", 1, 1)
    ... ).flatten()
    tensor([0.3000, 0.6000, 0.1500])
    """
    value = x.amax(1, keepdim=True)
    brighter = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * brighter / value.clamp(min=1e-6), brighter)


def contrast(x: Tensor, factor: float, draw: Draws) -> Tensor:
    """(x - m) factor + m, m the mean of each channel of each image.

    >>> contrast(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2), 0.5, Draws("key", 1, 1)).flatten()
    tensor([0.2500, 0.7500])
    """
    mean = x.mean((-2, -1), keepdim=True)
    return (x - mean) * factor + mean


def _sample(x: Tensor, row: Tensor, column: Tensor, corners: bool) -> Tensor:
    """x at real-valued positions (B, H, W), linear; beyond the border it is mirrored."""
    height, width = x.shape[-2:]
    if corners:  # mirrored about the centre of the last pixel: cb|abc|ba
        grid = (2 * column / (width - 1) - 1, 2 * row / (height - 1) - 1)
    else:  # mirrored about the edge of the last pixel: ba|abc|cb
        grid = ((2 * column + 1) / width - 1, (2 * row + 1) / height - 1)
    return F.grid_sample(
        x, torch.stack(grid, -1).to(x), padding_mode="reflection", align_corners=corners
    )


def random_affine(side: int, centre: Tensor, reach: float, draw: Draws) -> Tensor:
    """Inverse affine maps (B, 2, 3) that undo moving three corners of a square by U(-reach, reach).

    The corners lie `side` from the centre (x, y); A [x', y', 1]^T = [x, y]^T.
    """
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], device=centre.device)
    before = centre + side * corners
    after = before + draw.uniform(3, 2, low=-reach, high=reach)
    ones = after.new_ones(*after.shape[:2], 1)
    solved = torch.linalg.solve(torch.cat([after, ones], 2), before.expand_as(after))
    return solved.transpose(1, 2)


def elastic_transform(x: Tensor, c: tuple[float, float, float], draw: Draws) -> Tensor:
    """A random affine map, then displacement by alpha G_sigma u, u ~ U(-1, 1) per pixel and axis.

    c = (alpha, sigma, affine), each a fraction of the side.

    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> elastic_transform(flat, (0.1, 0.03, 0.03), Draws("key", 1, 1)).sub(0.5).abs().max() < 1e-6
    tensor(True)
    """
    height, width = x.shape[-2:]
    least = min(height, width)
    alpha, sigma, affine = (least * part for part in c)
    w = torch.arange(width, device=x.device, dtype=torch.float32).expand(height, width)
    h = torch.arange(height, device=x.device, dtype=torch.float32)[:, None].expand(height, width)
    centre = torch.tensor([width // 2, height // 2], device=x.device, dtype=torch.float32)
    maps = random_affine(least // 3, centre, affine, draw)
    position = torch.einsum("bij,jhw->bihw", maps, torch.stack([w, h, torch.ones_like(w)]))
    x = _sample(x, position[:, 1], position[:, 0], corners=True)
    if alpha == 0:
        return x
    field = draw.uniform(2, height, width, low=-1.0, high=1.0)
    field = alpha * gaussian(field, sigma, truncate=3.0, border="reflect")
    return _sample(x, h + field[:, 1], w + field[:, 0], corners=False)


def pixelate(x: Tensor, factor: float, draw: Draws) -> Tensor:
    """Shrink to int(factor side) by box means, grow back by repetition; 8-bit after every step.

    >>> line = torch.arange(8.0).div(255).expand(1, 1, 8, 8)
    >>> pixelate(line, 0.5, Draws("key", 1, 1))[0, 0, 0].mul(255).tolist()
    [1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 7.0, 7.0]
    """

    def eight_bits(image: Tensor) -> Tensor:  # halves up, as Pillow; 1e-3 is our rounding error
        return (image * 255 + 0.5 + 1e-3).floor() / 255

    height, width = x.shape[-2:]
    small = int(height * factor), int(width * factor)
    same = torch.eye
    x = eight_bits(separable(x, same(height), box_matrix(width, small[1])))
    x = eight_bits(separable(x, box_matrix(height, small[0]), same(small[1])))
    return F.interpolate(x, (height, width), mode="nearest-exact")


def _through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    stream = BytesIO()
    Image.fromarray(image).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream))


def jpeg_compression(x: Tensor, quality: int, draw: Draws) -> Tensor:
    """Each image through Pillow's JPEG at `quality` (grey images as grey JPEG), on the CPU.

    >>> grey = torch.full((1, 1, 8, 8), 128 / 255)  # no coefficient to quantise: nothing lost
    >>> jpeg_compression(grey, 40, Draws("key", 1, 1)).mul(255).unique().tolist()
    [128.0]
    """
    pixels = (x * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    flat = pixels[..., 0] if x.shape[1] == 1 else pixels
    coded = torch.from_numpy(np.stack([_through_jpeg(image, quality) for image in flat]))
    return coded.view(pixels.shape).permute(0, 3, 1, 2).to(x) / 255


FAMILY = {
    "brightness": Corruption(brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption(contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": Corruption(
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Corruption(pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": Corruption(jpeg_compression, (80, 65, 58, 50, 40)),
}
