"""Random scale, crop, flip, colour and cutout of pictures together with their label maps.

As in `augment`, chance and arithmetic are apart, and both work on whole batches on the device:

    chance = transform.draw(images, generator)       # nine uniform numbers for each picture
    x, labels = transform(images, labels, chance)

The picture is resized by a factor f, as often halved as doubled, and a window is cut from it, flipped
with probability 1/2. Pixel (i, j) of the window lies at ((i + top + 1/2) / f - 1/2, ...) of the
picture: the colour there is interpolated between four pixels, the label is the nearest pixel's. What
lies outside is void for the loss and, after normalisation, zero. A hole (cutout) hides the picture
and not its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lpbnn.data import Augment
from lpbnn.data.augment import Normalise, Padding, check_generator, hole_in, pick

LUMA = (0.299, 0.587, 0.114)


class Chance(NamedTuple):
    """Uniform numbers in [0, 1), each a vector with one for every picture."""

    scale: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    row: Tensor
    column: Tensor


class JointTransform(nn.Module):
    """From uint8 pictures (B, C, H, W) and labels (B, H, W) to augmented ones of the window's size.

    >>> transform = JointTransform([0.5], [0.5], Augment(scale=(0.5, 0.5)), void=255)
    >>> images = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    >>> labels = torch.ones(1, 4, 4, dtype=torch.int64)
    >>> chance = Chance(*torch.zeros(9, 1))
    >>> transform(images, labels, chance)[1][0].tolist()
    [[1, 1, 255, 255], [1, 1, 255, 255], [255, 255, 255, 255], [255, 255, 255, 255]]
    """

    luma: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment,
        padding: Padding = "zero",
        void: int = 255,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        low, high = augment.scale
        if not 0 < low <= high:
            raise ValueError(
                f"scale={augment.scale}; expected two factors, 0 < smallest <= largest."
            )
        if not 0 <= augment.colour < 1:
            raise ValueError(f"colour={augment.colour}; expected 0 <= colour < 1.")
        self.augment, self.padding, self.void = augment, padding, void
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.normalise = Normalise(mean, std)
        weights = LUMA if len(mean) == 3 else (1 / len(mean),) * len(mean)
        self.register_buffer("luma", torch.tensor(weights).view(-1, 1, 1), persistent=False)

    def draw(self, images: Tensor, generator: torch.Generator, batch: int | None = None) -> Chance:
        """The random numbers for a batch; all nine whatever is in use, so that the crops do not
        depend on whether colours change.
        """
        check_generator(generator, images)
        size = (len(Chance._fields), batch or len(images))
        return Chance(*torch.rand(size, generator=generator, device=images.device))

    def forward(
        self, images: Tensor, labels: Tensor | None, chance: Chance
    ) -> tuple[Tensor, Tensor | None]:
        """Normalised windows (B, C, h, w), and the labels (B, h, w) in them."""
        size = images.shape[2:]
        height, width = (c or s for c, s in zip(self.augment.crop, size, strict=True))
        low, high = self.augment.scale
        factor = low * (high / low) ** chance.scale
        i = torch.arange(height, device=images.device)
        j = torch.arange(width, device=images.device).expand(len(images), width)
        if self.augment.flip:
            j = torch.where(chance.flip[:, None] < 0.5, width - 1 - j, j)
        y = self._source(i, chance.top, factor, height, size[0])
        x = self._source(j, chance.left, factor, width, size[1])
        y, inside_y = self._inside(y, size[0])
        x, inside_x = self._inside(x, size[1])
        keep = inside_y[:, :, None] & inside_x[:, None, :]  # (B, h, w)
        pixels = self._coloured(interpolated(images, y, x), keep, chance)
        pixels = self.normalise(pixels)
        shown = keep[:, None]
        if self.augment.cutout:
            row, column = (chance.row * height).long(), (chance.column * width).long()
            shown = shown & ~hole_in(pixels, row, column, self.augment.cutout)
        pixels = torch.where(shown, pixels, 0.0).contiguous(memory_format=self.memory_format)
        if labels is None:
            return pixels, None
        return pixels, torch.where(keep, nearest(labels, y, x), self.void)

    def _source(self, place: Tensor, u: Tensor, factor: Tensor, window: int, size: int) -> Tensor:
        """Return the positions of the window's rows (or columns) in the picture, (B, window)."""
        pad = self.augment.pad
        room = factor * size + 2 * pad - window  # negative where the window is the larger one
        start = room.sign() * (u * (room.abs().floor() + 1)).floor() - pad
        return (place + start[:, None] + 0.5) / factor[:, None] - 0.5

    def _inside(self, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Places moved into the picture, and where they were inside already."""
        if self.padding == "reflect":
            turn = max(1, 2 * (size - 1))  # -1 -> 1, size -> size - 2: the border is not repeated
            place = place.remainder(turn)
            return torch.minimum(place, turn - place), torch.ones_like(place, dtype=torch.bool)
        return place.clamp(0, size - 1), (place >= -0.5) & (place < size - 0.5)

    def _coloured(self, pixels: Tensor, keep: Tensor, chance: Chance) -> Tensor:
        """Brightness, contrast about the mean grey, saturation; each kept in 0..1."""
        if not self.augment.colour:
            return pixels

        def strength(u: Tensor) -> Tensor:
            return (1 + self.augment.colour * (2 * u - 1))[:, None, None, None]

        pixels = (pixels * strength(chance.brightness)).clamp(0, 1)
        grey = (pixels * self.luma).sum(1, keepdim=True) * keep[:, None]
        mean = grey.sum((2, 3), keepdim=True) / keep.sum((1, 2)).clamp_min(1)[:, None, None, None]
        pixels = torch.lerp(mean, pixels, strength(chance.contrast)).clamp(0, 1)
        grey = (pixels * self.luma).sum(1, keepdim=True)
        return torch.lerp(grey, pixels, strength(chance.saturation)).clamp(0, 1)


def interpolated(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Colours, on the 0..1 scale, at rows y (B, h) and columns x (B, w), both inside the pictures."""

    def between(rows: Tensor) -> Tensor:
        left = x.floor().long()
        right = (left + 1).clamp_max(images.shape[3] - 1)
        sides = (pick(images, rows, columns) for columns in (left, right))
        one, two = (side.float() / 255 if side.dtype == torch.uint8 else side for side in sides)
        return torch.lerp(one, two, (x - left)[:, None, None, :])

    above = y.floor().long()
    below = (above + 1).clamp_max(images.shape[2] - 1)
    return torch.lerp(between(above), between(below), (y - above)[:, None, :, None])


def nearest(labels: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Labels at the pixels nearest to rows y (B, h) and columns x (B, w)."""
    rows, columns = (y + 0.5).floor().long(), (x + 0.5).floor().long()
    return pick(labels[:, None], rows, columns)[:, 0]
