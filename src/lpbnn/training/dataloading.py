"""The training data on its device: every epoch's batches from (seed, epoch) alone.

The order and the augmentation are drawn for the whole batch of a step; each process then takes its
slice, and reads no other files than that. So the examples of a step, crops and flips included, do not
depend on how many processes share them, and a run that is resumed sees what it would have seen.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import Augment, Splits
from lpbnn.data.augment import (
    Chance,
    Normalise,
    Transform,
    batch_indices,
    epoch_generator,
)
from lpbnn.training.config import RunConfig

Batch = tuple[Tensor, Tensor]
ORDER, AUGMENTATION, NOISE = 0, 1, 2  # streams of random numbers; each rank has a NOISE of its own


def noise_seed(seed: int, epoch: int, rank: int) -> int:
    """Return the seed of everything that the model itself draws in an epoch.

    >>> noise_seed(0, epoch=1, rank=0) != noise_seed(1, epoch=0, rank=0)
    True
    """
    mixed = np.random.SeedSequence([seed, epoch, NOISE, rank]).generate_state(1, np.uint64)
    return int(mixed[0] >> 1)


class TrainLoader:
    """The training part of ``splits`` as a process sees it, epoch by epoch.

    The last examples of a batch that does not divide among the processes are left out, so that all of them
    count the same.

    Args:
        device: where the batches are.
        rank: this process.
        world: how many processes share every batch.
    """

    def __init__(
        self,
        splits: Splits,
        config: RunConfig,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.batch_size, self.rank, self.world = config.batch_size, rank, world
        self.segments, self.images = splits.task == "segmentation", len(splits.shape) == 3
        self.augment = config.augment.over(splits.augment)
        last = config.channels_last
        self.prepare = Normalise(splits.mean, splits.std, len(splits.shape), last).to(self.device)
        void = 0 if splits.ignore_index is None else splits.ignore_index
        given = (splits.mean, splits.std, self.augment, config.augment.padding, void, last)
        self.transform = Transform(*given).to(self.device) if self.images else None
        self.normalise_targets = splits.normalise_targets
        self.train = splits.train.to(self.device)

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        whole, rest = divmod(len(self.train), self.batch_size)
        return whole + (not self.config.drop_last and rest >= self.world)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of this process in an epoch: prepared, augmented, shuffled."""
        seed, count = self.config.seed, len(self.train)
        order = epoch_generator(seed, epoch, "cpu", ORDER)
        chance = epoch_generator(seed, epoch, self.device, AUGMENTATION)
        whole = batch_indices(count, self.batch_size, order, self.config.drop_last)[: self.steps]
        shares = [len(part) // self.world for part in whole]
        mine = [slice(self.rank * share, (self.rank + 1) * share) for share in shares]
        parts = [part[rows] for part, rows in zip(whole, mine, strict=True)]
        for part, rows, (x, y) in zip(whole, mine, self.train.stream(parts), strict=True):
            yield self._prepared(x, self.normalise_targets(y), chance, len(part), rows)

    def _prepared(
        self, x: Tensor, y: Tensor, chance: torch.Generator, whole: int, mine: slice
    ) -> Batch:
        """Return a share of a batch of ``whole`` examples, changed as it would be in one process."""
        if self.transform is None or self.augment == Augment():
            return self.prepare(x), y
        drawn = Chance(*(part[mine] for part in self.transform.draw(x, chance, whole)))
        x, moved = self.transform(x, y if self.segments else None, drawn)
        return x, y if moved is None else moved

    def __iter__(self) -> Iterator[Batch]:
        """Yield all training examples in order, without augmentation: what ``after_fit`` reads."""
        parts = batch_indices(len(self.train), self.batch_size, alone=False)
        for x, y in self.train.stream(parts):
            yield self.prepare(x), self.normalise_targets(y)
