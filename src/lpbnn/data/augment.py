"""Augmentation and order of batches on the device that holds the data: no workers, copies or syncs.

Two steps, so that what is random can be looked at, tested and repeated:

    chance = transform.draw(images, generator)       # nine uniform numbers for each picture
    x, labels = transform(images, labels, chance)    # pure arithmetic: torch.compile sees one graph

The picture is resized by a factor f, as often halved as doubled, and padded; a window is cut from it,
flipped with probability 1/2. Pixel (i, j) of the window lies at ((i + top + 1/2) / f - 1/2, ...) of the
picture: the colour there is interpolated between four pixels, the label of a label map is the nearest
pixel's. What lies outside is void for the loss and, after normalisation, zero: the mean colour. A hole
(cutout) hides the picture and not its labels.

Every epoch can be repeated from two numbers: `epoch_generator(seed, epoch)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn.data import Augment, normalise

LUMA = (0.299, 0.587, 0.114)
Padding = Literal["zero", "reflect"]


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


class Normalise(nn.Module):
    """Inputs of a data set as its network sees them; the constants are on the device of the module.

    Args:
        mean: a number for each channel or feature.
        std: the same.
        dims: dimensions of one input: 3 for images, 1 for features.
        channels_last: the memory layout of images.

    >>> Normalise([0.5], [0.25], dims=1)(torch.tensor([[1.0], [0.0]])).tolist()
    [[2.0], [-2.0]]
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dims: int = 3,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.dims = dims
        last = channels_last and dims == 3
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        # Buffers move with .to(device) once; a tensor made per batch would wait for the device.
        for name, values in (("mean", mean), ("std", std)):
            values = torch.tensor(values).view(-1, *(1,) * (dims - 1))
            self.register_buffer(name, values, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a batch, normalised."""
        x = normalise(inputs, self.mean, self.std, self.dims)
        return x.contiguous(memory_format=self.memory_format)


class Transform(nn.Module):
    """From uint8 pictures (B, C, H, W), and label maps (B, H, W), to augmented ones of the window's size.

    >>> transform = Transform([0.5], [0.5], Augment(scale=(0.5, 0.5)), void=255)
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
        augment: Augment = Augment(),  # noqa: B008 (immutable)
        padding: Padding = "zero",
        void: int = 255,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.augment, self.padding, self.void = augment, padding, void
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.normalise = Normalise(mean, std)
        weights = LUMA if len(mean) == 3 else (1 / len(mean),) * len(mean)
        self.register_buffer("luma", torch.tensor(weights).view(-1, 1, 1), persistent=False)

    def draw(self, images: Tensor, generator: torch.Generator, batch: int | None = None) -> Chance:
        """The random numbers for a batch; all nine whatever is in use, so that the crops do not
        depend on whether colours change.
        """
        size = (len(Chance._fields), batch or len(images))
        return Chance(*torch.rand(size, generator=generator, device=images.device))

    def forward(
        self, images: Tensor, labels: Tensor | None, chance: Chance
    ) -> tuple[Tensor, Tensor | None]:
        """Normalised windows (B, C, h, w), and the labels (B, h, w) in them, if there are any."""
        channels = len(self.normalise.mean)
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; expected (batch, {channels}, height, "
                "width), one channel per mean."
            )
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
        whole = low == high == 1  # every place is a pixel
        pixels = pick(images, y.long(), x.long()) if whole else interpolated(images, y, x)
        pixels = self.normalise(self._coloured(pixels, keep, chance))
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

        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        pixels = (pixels * strength(chance.brightness)).clamp(0, 1)
        grey = (pixels * self.luma).sum(1, keepdim=True) * keep[:, None]
        mean = grey.sum((2, 3), keepdim=True) / keep.sum((1, 2)).clamp_min(1)[:, None, None, None]
        pixels = torch.lerp(mean, pixels, strength(chance.contrast)).clamp(0, 1)
        grey = (pixels * self.luma).sum(1, keepdim=True)
        return torch.lerp(grey, pixels, strength(chance.saturation)).clamp(0, 1)


def pick(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The pixels of images (B, C, H, W) at rows y (B, h) and columns x (B, w): (B, C, h, w)."""
    picture = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return images[picture, channel, y[:, None, :, None], x[:, None, None, :]]


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


def hole_in(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Return the mask of the cutout: [centre - side // 2, + side) in both directions, (B, 1, H, W)."""

    def span(centre: Tensor, size: int) -> Tensor:
        distance = torch.arange(size, device=centre.device) - (centre[:, None] - side // 2)
        return (distance >= 0) & (distance < side)

    rows, columns = span(row, images.shape[2]), span(column, images.shape[3])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def epoch_generator(
    seed: int, epoch: int, device: torch.device | str = "cpu", stream: int = 0
) -> torch.Generator:
    """A generator that depends on these numbers alone: a run resumes at any epoch exactly.

    Give order and augmentation different `stream` numbers, and each rank its own as well.

    >>> one, two = epoch_generator(3, epoch=7), epoch_generator(3, epoch=7)
    >>> torch.equal(torch.randperm(9, generator=one), torch.randperm(9, generator=two))
    True
    """
    # seed + epoch would make epoch 1 of seed 0 the same as epoch 0 of seed 1: mix them instead.
    mixed = np.random.SeedSequence([seed, epoch, stream]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(mixed[0]))


def batch_indices(
    count: int,
    size: int,
    generator: torch.Generator | None = None,
    drop_last: bool = False,
    alone: bool = True,
) -> list[Tensor]:
    """Return the indices of each batch of `count` examples, shuffled by the generator or in order.

    One that is left over has no statistics; it may be `alone`, or joins the batch before it.

    >>> [part.tolist() for part in batch_indices(5, 2)]
    [[0, 1], [2, 3], [4]]
    >>> [part.tolist() for part in batch_indices(5, 2, alone=False)]
    [[0, 1], [2, 3, 4]]
    """
    if generator is None:
        order = torch.arange(count)
    else:
        order = torch.randperm(count, generator=generator, device=generator.device)
    parts = list(order[: count - count % size if drop_last else count].split(size)) if count else []
    if not alone and len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
