"""One pass over a data set: predictions in batches, each by one of the processes.

Every batch is predicted with the same seed, so the members are the same networks from the first
example to the last, and measuring twice gives the same numbers, with any number of processes.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpbnn.data import Examples, Splits
from lpbnn.data.augment import batch_indices
from lpbnn.model import UncertainModel
from lpbnn.predict import Prediction, predict
from lpbnn.training.build import DataInfo
from lpbnn.training.config import EvalConfig, RunConfig
from lpbnn.training.feed import preparation
from lpbnn.training.ranks import Ranks
from lpbnn.training.tally import T
from lpbnn.training.task_tally import tally_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PIXELS_AT_ONCE = 2**20  # one frame of 1280x720: its probabilities alone, a class each, are 50 MB


class Predictor:
    """A model with all it needs to answer for raw inputs: preparation, precision, samples, seed."""

    def __init__(
        self,
        model: UncertainModel,
        info: DataInfo,
        config: RunConfig,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        samples: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.info, self.seed, self.device = model, info, config.seed, device
        self.settings: EvalConfig = config.evaluate
        self.samples = self.settings.samples if samples is None else samples
        self.prepare = preparation(info, device, config.channels_last)
        self.autocast, self.ranks = autocast, ranks or Ranks()

    def __call__(self, inputs: Tensor, keep_members: bool = True) -> Prediction:
        """The prediction for raw inputs of any device."""
        with self.autocast():
            return predict(
                self.model,
                self.prepare(inputs.to(self.device, non_blocking=True)),
                samples=self.samples,
                chunk=self.settings.chunk,
                keep_members=keep_members,
                seed=self.seed,
            )

    @property
    def batch_size(self) -> int:
        """Examples at once: as set, and of large pictures fewer."""
        pixels = math.prod(self.info.shape[1:])
        return max(1, min(self.settings.batch_size, PIXELS_AT_ONCE // pixels))

    def over(self, data: Examples, tally: T, alone: bool = False) -> T:
        """Everything in ``data``, added to ``tally``, which is returned.

        Processes share the batches and all end with the whole tally; ``alone``, this one sees them all.
        """
        ranks = Ranks() if alone else self.ranks
        parts = batch_indices(len(data), self.batch_size)
        mine = ranks.share(len(parts))
        stream = data.to(self.device).stream([parts[number] for number in mine])
        for number, (x, y) in zip(mine, stream, strict=True):
            prediction = self(x, keep_members=tally.needs_members)
            tally.add(number, prediction, y, prediction.ood_score)
        tally.merge(ranks)
        return tally


def validate(
    model: UncertainModel, splits: Splits, config: RunConfig, fabric: "Fabric"
) -> dict[str, float]:
    """The metrics on the validation part, one draw per member, as ``val_...``."""
    info = DataInfo.of(splits)
    predictor = Predictor(
        model, info, config, fabric.device, fabric.autocast, samples=1, ranks=Ranks(fabric)
    )
    found = predictor.over(splits.val, tally_of(info, fabric.device)).metrics()
    return {f"val_{name}": value for name, value in found.items()}
