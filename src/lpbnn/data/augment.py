"""Augmentation and batches on the device that holds the data: no workers, no copies, no syncs.

Two steps, so that what is random can be looked at, tested and repeated:

    drawn = transform.draw(images, generator)    # five small integer vectors, on the device
    x = transform(images, drawn)                 # pure arithmetic: torch.compile sees one graph

The order is the usual one: random crop of the padded picture, flip, normalise, cutout. The padding
and the hole are zero *after* normalisation, that is, the mean colour. Pixel (i, j) of the result is
pixel (i + top - pad, j' + left - pad) of the picture, with j' = j or, flipped, W - 1 - j.

Every epoch can be repeated from two numbers: `epoch_generator(seed, epoch)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn.data import Augment, Examples, normalise

Padding = Literal["zero", "reflect"]


class Drawn(NamedTuple):
    """Random numbers of every picture of a batch; each a vector of its length.

    `top` and `left` are the crop's corner in the padded picture, `flip` is 0 or 1, and
    (`row`, `column`) is the centre of the cutout's hole in the result.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
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
    """From uint8 pictures (B, C, H, W) to what a network sees; random only where `drawn` is given.

    >>> transform = Transform(mean=[0.5], std=[0.25], augment=Augment(pad=1, flip=True, cutout=2))
    >>> images = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    >>> transform(images).unique().tolist()  # evaluation: (1 - 0.5) / 0.25
    [2.0]
    >>> drawn = transform.draw(images, torch.Generator().manual_seed(0))
    >>> transform(images, drawn).unique().tolist()  # the padding and the hole are 0
    [0.0, 2.0]
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment = Augment(),  # noqa: B008 (immutable)
        padding: Padding = "zero",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if min(augment.pad, augment.cutout) < 0:
            raise ValueError(f"{augment} has a negative size; expected pad >= 0 and cutout >= 0.")
        if padding not in ("zero", "reflect"):
            raise ValueError(f"padding={padding!r}; expected 'zero' or 'reflect'.")
        self.augment, self.padding, self.dtype = augment, padding, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.normalise = Normalise(mean, std)

    def draw(self, images: Tensor, generator: torch.Generator, batch: int | None = None) -> Drawn:
        """The random numbers for a batch, from a generator on the device of the images.

        `batch` is the number of pictures, where `images` are only some of them. All five are drawn
        whatever is in use: switching cutout on does not change the crops.

        >>> images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
        >>> transform = Transform([0.5], [0.5], Augment(pad=2))
        >>> drawn = transform.draw(images, torch.Generator().manual_seed(0))
        >>> {name: tuple(values.shape) for name, values in drawn._asdict().items()}
        {'top': (3,), 'left': (3,), 'flip': (3,), 'row': (3,), 'column': (3,)}
        """
        check_generator(generator, images)
        count, _, height, width = images.shape
        offsets = 2 * self.augment.pad + 1
        return Drawn(
            *(
                torch.randint(high, (batch or count,), generator=generator, device=images.device)
                for high in (offsets, offsets, 2, height, width)
            )
        )

    def forward(self, images: Tensor, drawn: Drawn | None = None) -> Tensor:
        """Normalised pictures, (B, C, H, W): as they are, or changed as `drawn` says."""
        channels = len(self.normalise.mean)
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; expected (batch, {channels}, height, "
                "width), one channel per mean."
            )
        keep = None
        if drawn is not None:
            images, keep = self._move(images, drawn)
            if self.augment.cutout:
                hole = hole_in(images, drawn.row, drawn.column, self.augment.cutout)
                keep = ~hole if keep is None else keep & ~hole
        x = self.normalise(images)
        x = x if keep is None else torch.where(keep, x, 0.0)
        return x.to(self.dtype).contiguous(memory_format=self.memory_format)

    def _move(self, images: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor | None]:
        """The cropped and flipped pictures, and where they hold picture, (B, 1, H, W)."""
        pad, (height, width) = self.augment.pad, images.shape[2:]
        if not pad and not self.augment.flip:
            return images, None
        i = torch.arange(height, device=images.device)
        j = torch.arange(width, device=images.device).expand(len(images), width)
        if self.augment.flip:
            j = torch.where(drawn.flip[:, None].bool(), width - 1 - j, j)
        y = i + (drawn.top - pad)[:, None]  # (B, H)
        x = j + (drawn.left - pad)[:, None]  # (B, W)
        keep = None
        if self.padding == "reflect":
            y, x = _reflect(y, height, pad), _reflect(x, width, pad)
        elif pad:
            inside_y, inside_x = (y >= 0) & (y < height), (x >= 0) & (x < width)
            keep = (inside_y[:, :, None] & inside_x[:, None, :])[:, None]
            y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        return pick(images, y, x), keep


def pick(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The pixels of images (B, C, H, W) at rows y (B, h) and columns x (B, w): (B, C, h, w)."""
    picture = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return images[picture, channel, y[:, None, :, None], x[:, None, None, :]]


def _reflect(index: Tensor, size: int, pad: int) -> Tensor:
    """-1 -> 1, size -> size - 2: the border is a mirror and is not repeated."""
    if pad >= size:
        raise ValueError(
            f"reflect padding of {pad} needs pictures larger than {pad}; these have a side of "
            f"{size}. Use a smaller pad or padding='zero'."
        )
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def hole_in(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Return the mask of the cutout: [centre - side // 2, + side) in both directions, (B, 1, H, W)."""

    def span(centre: Tensor, size: int) -> Tensor:
        distance = torch.arange(size, device=centre.device) - (centre[:, None] - side // 2)
        return (distance >= 0) & (distance < side)

    rows, columns = span(row, images.shape[2]), span(column, images.shape[3])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def check_generator(generator: torch.Generator, images: Tensor) -> None:
    """Random numbers are drawn on the device of the images: no copy, no wait."""
    if generator.device.type != images.device.type:
        raise ValueError(
            f"the generator is on {generator.device}, the images are on {images.device}; make "
            f"one with torch.Generator({images.device.type!r}) or epoch_generator(..., "
            f"device={images.device.type!r})."
        )


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


def batches(
    dataset: Examples,
    batch_size: int,
    generator: torch.Generator | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    alone: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of (inputs, targets), indexed on the device that holds them.

    With a generator on the CPU the order is the same whatever device the data is on.

    >>> from lpbnn.data import Dataset
    >>> data = Dataset(torch.arange(5.0), torch.arange(5))
    >>> [y.tolist() for _, y in batches(data, 2, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    >>> order = torch.cat([y for _, y in batches(data, 2, epoch_generator(0, epoch=0))])
    >>> order.sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    if shuffle and generator is None:
        raise ValueError(
            "shuffle=True needs a generator; pass epoch_generator(seed, epoch), or shuffle=False."
        )
    order = generator if shuffle else None
    return dataset.stream(batch_indices(len(dataset), batch_size, order, drop_last, alone))


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
    if size < 1:
        raise ValueError(f"batch_size={size}; expected at least 1.")
    if drop_last and size > count:
        raise ValueError(
            f"batch_size={size} and drop_last=True leave nothing of {count} examples; "
            "use a smaller batch or drop_last=False."
        )
    if generator is None:
        order = torch.arange(count)
    else:
        order = torch.randperm(count, generator=generator, device=generator.device)
    parts = list(order[: count - count % size if drop_last else count].split(size)) if count else []
    if not alone and len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
