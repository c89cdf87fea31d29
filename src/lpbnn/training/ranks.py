"""Several processes as one: each does its share, all learn what the others found, all agree."""

import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

if TYPE_CHECKING:
    from lightning.fabric import Fabric

T = TypeVar("T")


class Ranks:
    """This process among those of a run; without a fabric it is the only one.

    ``gather``, ``agree`` and ``wait`` are meetings: every process has to come, or the others wait.

    >>> ranks = Ranks()
    >>> list(ranks.share(3)), ranks.gather("mine"), ranks.agree(True)
    ([0, 1, 2], ['mine'], True)
    """

    def __init__(self, fabric: "Fabric | None" = None) -> None:
        self.rank = 0 if fabric is None else fabric.global_rank
        self.world = 1 if fabric is None else fabric.world_size
        self.wait = _nobody if fabric is None else fabric.barrier
        """Until all are here."""

    def share(self, count: int) -> range:
        """Which of ``count`` pieces of work are this process's: every ``world``-th."""
        return range(self.rank, count, self.world)

    def gather(self, mine: T) -> list[T]:
        """What every process gives, in the order of the ranks; tensors should be on the CPU."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        distributed.all_gather_object(everyone, mine)
        return everyone

    def agree(self, ok: bool) -> bool:
        """Whether all say yes."""
        return all(self.gather(ok))

    def same_buffers(self, model: nn.Module) -> None:
        """Statistics of rank 0's share of the data (batch norm's) become those of all.

        Gradients are averaged, buffers are not: without this, processes would measure different models.
        """
        if self.world > 1:
            with torch.no_grad():
                for buffer in model.buffers():
                    distributed.broadcast(buffer, 0)


def _nobody() -> None:
    """To wait for."""


def is_first() -> bool:
    """Whether this is the first, or only, process of a run, told before the processes meet."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))
