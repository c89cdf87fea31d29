"""The training data on its device: every epoch's batches from (seed, epoch) alone.

The order and the augmentation are drawn for the whole batch of a step; each process then takes its
slice. So the examples of a step, crops and flips included, do not depend on how many processes share
them, and a run that is resumed sees what it would have seen.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn.data import Augment, Dataset, Splits
from lpbnn.data.augment import Drawn, Transform, batches, epoch_generator
from lpbnn.engine.build import DataInfo
from lpbnn.engine.config import RunConfig

Batch = tuple[Tensor, Tensor]
ORDER, AUGMENTATION, NOISE = 0, 1, 2  # streams of random numbers; each rank has a NOISE of its own


class Standardise(nn.Module):
    """(x - mean) / std for vectors, with both on the device: no copy, no wait per batch."""

    mean: Tensor
    std: Tensor

    def __init__(self, info: DataInfo) -> None:
        super().__init__()
        shape = (-1,) + (1,) * (len(info.shape) - 1)
        self.register_buffer("mean", torch.tensor(info.mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(info.std).view(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def is_images(info: DataInfo) -> bool:
    """Whether the inputs are pictures (C, H, W)."""
    return len(info.shape) == 3


def preparation(info: DataInfo, device: torch.device, channels_last: bool = False) -> nn.Module:
    """Raw inputs on the device to what the network sees, without augmentation."""
    if is_images(info):
        module = Transform(info.mean, info.std, channels_last=channels_last)
    else:
        module = Standardise(info)
    return module.to(device)


def noise_seed(seed: int, epoch: int, rank: int) -> int:
    """The seed of everything that the model itself draws in an epoch.

    >>> noise_seed(0, epoch=1, rank=0) != noise_seed(1, epoch=0, rank=0)
    True
    """
    mixed = np.random.SeedSequence([seed, epoch, NOISE, rank]).generate_state(1, np.uint64)
    return int(mixed[0] >> 1)


class Feed:
    """The training part of ``splits`` as a process sees it, epoch by epoch.

    Args:
        rank, world: this process and how many share every batch; the last examples of a batch that
            does not divide among them are left out, so that all processes count the same.
    """

    def __init__(
        self,
        splits: Splits,
        config: RunConfig,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self.seed, self.batch_size, self.drop_last = (
            config.seed,
            config.batch_size,
            config.drop_last,
        )
        self.rank, self.world = rank, world
        self.info = DataInfo.of(splits)
        self.augment = config.augment.over(splits.augment)
        self._check(splits)
        self.prepare = preparation(self.info, self.device, config.channels_last)
        self.transform = Transform.of(
            splits, self.augment, config.augment.padding, channels_last=config.channels_last
        ).to(self.device)
        moves = self.augment._replace(cutout=0)  # a hole hides the picture, not its labels
        self.labels = Transform([0.0], [1.0], moves, config.augment.padding).to(self.device)
        train = splits.train.to(self.device)
        self.train = Dataset(train.inputs, splits.normalise_targets(train.targets))

    def _check(self, splits: Splits) -> None:
        examples = len(splits.train)
        if self.batch_size < self.world or (self.drop_last and self.batch_size > examples):
            raise ValueError(
                f"batch_size={self.batch_size} leaves nothing to train on with {examples} examples, "
                f"{self.world} process(es) and drop_last={self.drop_last}. Fix: a batch of at least "
                "one example per process and at most the examples there are."
            )
        if self.batch_size % self.world:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide among {self.world} processes; it is "
                f"the batch of all together. Fix: a multiple of {self.world}."
            )
        segments = self.info.task == "segmentation"
        if segments and self.augment.pad and self.info.ignore_index is None:
            raise ValueError(
                f"{splits.name!r} has no ignore_index, so the border that augment.pad="
                f"{self.augment.pad} adds would need a class. Fix: augment.pad=0."
            )

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        whole, rest = divmod(len(self.train), self.batch_size)
        return whole + (not self.drop_last and rest >= self.world)

    @property
    def examples(self) -> int:
        """Examples per epoch, over all processes."""
        whole, rest = divmod(len(self.train), self.batch_size)
        return whole * self.batch_size + (0 if self.drop_last else rest // self.world * self.world)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of this process in an epoch: prepared, augmented, shuffled."""
        order = epoch_generator(self.seed, epoch, "cpu", ORDER)
        chance = epoch_generator(self.seed, epoch, self.device, AUGMENTATION)
        for x, y in batches(self.train, self.batch_size, order, drop_last=self.drop_last):
            share = len(x) // self.world
            if share == 0:
                return
            mine = slice(self.rank * share, (self.rank + 1) * share)
            yield self._prepared(x, y, chance, mine)

    def _prepared(self, x: Tensor, y: Tensor, chance: torch.Generator, mine: slice) -> Batch:
        if not is_images(self.info) or self.augment == Augment():
            return self.prepare(x[mine]), y[mine]
        drawn = Drawn(*(part[mine] for part in self.transform.draw(x, chance)))
        x, y = self.transform(x[mine], drawn), y[mine]
        return x, self._moved(y, drawn) if self.info.task == "segmentation" else y

    def _moved(self, labels: Tensor, drawn: Drawn) -> Tensor:
        """Label maps cropped and flipped as their pictures were; what came in is ignored."""
        outside = self.info.ignore_index or 0
        shifted = (labels - outside).float().unsqueeze(1)  # the border is filled with zeros
        return self.labels(shifted, drawn).squeeze(1).long() + outside

    def plain(self) -> Iterable[Batch]:
        """All training examples in order and as they are, as often as it is iterated over."""
        return _Plain(self)


class _Plain:
    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self.feed.train, self.feed.batch_size, shuffle=False):
            yield self.feed.prepare(x), y
