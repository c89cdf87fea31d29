"""The training data on its device: every epoch's batches from (seed, epoch) alone.

The order and the augmentation are drawn for the whole batch of a step; each process then takes its
slice, and reads no other files than that. So the examples of a step, crops and flips included, do not
depend on how many processes share them, and a run that is resumed sees what it would have seen.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn.data import Augment, Dataset, Splits
from lpbnn.data.augment import Drawn, Transform, batch_indices, batches, epoch_generator
from lpbnn.data.joint_transforms import Chance, JointTransform
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig

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
        self.transform = self._transform(splits, config).to(self.device)
        self.normalise_targets = splits.normalise_targets
        self.train = splits.train.to(self.device)

    def _transform(self, splits: Splits, config: RunConfig) -> Transform | JointTransform:
        """What is random about a picture; where labels move with it, or where it is resized, all of it
        is in one step.
        """
        plain = self.augment._replace(pad=0, flip=False, cutout=0) == Augment()
        padding, last = config.augment.padding, config.channels_last
        if plain and splits.task != "segmentation":
            return Transform.of(splits, self.augment, padding, channels_last=last)
        void = 0 if splits.ignore_index is None else splits.ignore_index
        return JointTransform(splits.mean, splits.std, self.augment, padding, void, last)

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
        self._check_labels(splits)
        segments, crop = self.info.task == "segmentation", self.augment.crop
        if segments and self.info.ignore_index is None and self._leaves_the_picture():
            raise ValueError(
                f"{splits.name!r} has no ignore_index, so the border that augment.pad, scale and crop "
                f"({self.augment}) can add would need a class. Fix: augment.pad=0, no scale below 1, no "
                "crop larger than the pictures."
            )
        if any(crop) and not segments:
            raise ValueError(
                f"augment.crop is {crop}, but {splits.name!r} is no segmentation set: its test pictures "
                "keep their size. Fix: leave augment.crop out, or use augment.pad."
            )

    def _check_labels(self, splits: Splits) -> None:
        """A label without a class would stop a GPU without a word; files are checked as they are read."""
        train, classes = splits.train, splits.num_classes
        if classes is None or not isinstance(train, Dataset):
            return
        void = splits.ignore_index
        known = sum(splits.class_counts)
        if void is not None and not 0 <= void < classes:  # a class that is void is counted already
            known += int((train.targets == void).sum())
        if strange := train.targets.numel() - known:
            raise ValueError(
                f"{splits.name!r}: {strange} training labels are outside 0..{classes - 1}"
                f"{'' if void is None else f' and are not ignore_index={void}'}. Fix: check the labels, or "
                "the number of classes; what should not be learned gets the ignore_index."
            )

    def _leaves_the_picture(self) -> bool:
        augment, size = self.augment, self.info.shape[1:]
        too_large = any(c > s for c, s in zip(augment.crop, size, strict=True))
        return augment.pad > 0 or augment.scale[0] < 1 or too_large

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
        whole = batch_indices(len(self.train), self.batch_size, order, self.drop_last)[: self.steps]
        shares = [len(part) // self.world for part in whole]
        mine = [slice(self.rank * share, (self.rank + 1) * share) for share in shares]
        parts = [part[rows] for part, rows in zip(whole, mine, strict=True)]
        for part, rows, (x, y) in zip(whole, mine, self.train.stream(parts), strict=True):
            yield self._prepared(x, self.normalise_targets(y), chance, len(part), rows)

    def _prepared(
        self, x: Tensor, y: Tensor, chance: torch.Generator, whole: int, mine: slice
    ) -> Batch:
        """A share of a batch of ``whole`` examples, changed as it would be in one process."""
        if not is_images(self.info) or self.augment == Augment():
            return self.prepare(x), y
        if isinstance(self.transform, Transform):
            drawn = self.transform.draw(x, chance, whole)
            return self.transform(x, Drawn(*(part[mine] for part in drawn))), y
        drawn = Chance(*(part[mine] for part in self.transform.draw(x, chance, whole)))
        maps = y if self.info.task == "segmentation" else None
        x, moved = self.transform(x, maps, drawn)
        return x, y if moved is None else moved

    def plain(self) -> Iterable[Batch]:
        """All training examples in order and as they are, as often as it is iterated over."""
        return _Plain(self)


class _Plain:
    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Batch]:
        feed = self.feed
        for x, y in batches(feed.train, feed.batch_size, shuffle=False, alone=False):
            yield feed.prepare(x), feed.normalise_targets(y)
