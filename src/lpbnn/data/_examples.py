"""A part of a data set: examples by index, whole in memory or made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

Index = int | slice | Tensor
Pair = tuple[Tensor, Tensor]
COUNTED_AT_ONCE = 64  # label maps


class Examples(TorchDataset[Pair]):
    """A part of a data set: its length, the shape and type of an input, and examples by index.

    Label maps are kept in a byte per pixel; whoever asks for examples gets them as int64.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: Index) -> Pair:
        raise NotImplementedError

    def take(self, index: slice | Tensor) -> Dataset:
        """The examples at `index`, in memory."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Examples:
        """The same examples, given out on another device."""
        raise NotImplementedError

    def stream(self, parts: Sequence[Tensor]) -> Iterator[Pair]:
        """One batch after the other: the examples at each of `parts`, vectors of places."""
        raise NotImplementedError

    def class_counts(self, classes: int) -> tuple[int, ...]:
        """Count the labels of each class; void and unknown ones are left out."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Dataset(Examples):
    """Examples as two tensors of equal length; any index gives the pair (inputs, targets).

    >>> data = Dataset(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.arange(5))
    >>> x, y = data[torch.tensor([3, 1])]
    >>> len(data), tuple(x.shape), y.tolist(), data[3][1].item(), len(data.take(slice(2)))
    (5, (2, 1, 8, 8), [3, 1], 3, 2)
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for name, values in (("inputs", self.inputs), ("targets", self.targets)):
            if not isinstance(values, Tensor):
                raise TypeError(
                    f"Dataset takes tensors; its {name} are {type(values).__name__}. "
                    "Fix: torch.as_tensor(...), float32 for tables."
                )
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"Dataset got {len(self.inputs)} inputs and {len(self.targets)} targets; "
                "every input needs one target: check how the two were read or indexed."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Index) -> Pair:
        return self.inputs[index], widened(self.targets[index])

    def take(self, index: slice | Tensor) -> Dataset:
        """The examples at `index`, again as a data set."""
        return Dataset(self.inputs[index], self.targets[index])

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device."""
        return Dataset(self.inputs.to(device), self.targets.to(device))

    def stream(self, parts: Sequence[Tensor]) -> Iterator[Pair]:
        if not parts:
            return
        order = torch.cat(list(parts)).to(self.inputs.device)  # one copy, not one for each batch
        for rows in order.split([len(part) for part in parts]):
            yield self[rows]

    def class_counts(self, classes: int) -> tuple[int, ...]:
        """
        >>> Dataset(torch.zeros(4), torch.tensor([0, 2, 2, 255])).class_counts(3)
        (1, 0, 2)
        >>> Dataset(torch.zeros(2), torch.tensor([0, 255], dtype=torch.uint8)).class_counts(3)
        (1, 0, 0)
        """
        counts = torch.zeros(classes, dtype=torch.int64)
        for part in self.targets.split(COUNTED_AT_ONCE):
            # Bytes are counted as they are: 30 times as fast as to look for the known ones first.
            known = part if part.dtype == torch.uint8 else part[(part >= 0) & (part < classes)]
            found = torch.bincount(known.flatten(), minlength=classes)
            counts += found[:classes].cpu()
        return tuple(counts.tolist())


def widened(targets: Tensor) -> Tensor:
    """Labels that were kept in a byte, as the int64 that losses and metrics take."""
    return targets.long() if targets.dtype == torch.uint8 else targets
