"""Base of the metrics: state that merges, checks that do not stall a GPU, bounded memory.

Shapes and dtypes are checked in ``update``, where they cost nothing. Values (a label out of range,
a NaN) live on the device: they are counted there, beside the sums, and ``compute`` raises. So a
loop over batches never waits for the GPU, and bad data never becomes a number in a table.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

# Probabilities looked at in one go (4 MiB of float32): what bounds the temporaries of `update`.
CHUNK = 2**20

IgnoreIndex: TypeAlias = int | tuple[int, ...] | None


class StreamingMetric(Metric):
    """A torchmetrics ``Metric`` whose state is a sum (or a concatenation) over what it has seen.

    ``update`` per batch, ``compute`` at the end, ``merge_state`` for metrics filled elsewhere, and
    DDP through ``add_state``: all four give the same number as one ``update`` with all the data.
    Sums are float64; a device without it (MPS) reduces there and accumulates in a metric left on
    the CPU.
    """

    full_state_update: bool | None = False
    is_differentiable: bool | None = False

    def add_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        """Declare a state of zeros that is summed over batches, merges and processes."""
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def add(self, **seen: Tensor) -> None:
        """Add a batch to the named states."""
        # Not in place: a state made under inference_mode could not be written to outside of it.
        for name, value in seen.items():
            state = getattr(self, name)
            setattr(self, name, state + value.to(state.device))

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Take in what another metric of the same kind has seen."""
        if isinstance(incoming_state, Metric):
            seen, incoming_state = incoming_state.update_count, incoming_state.metric_state
        else:
            seen = 1
        for name, mine in self.metric_state.items():
            theirs = incoming_state.get(name)
            # Without this, states of shape (1,) and (15,) would broadcast into a wrong sum.
            if isinstance(mine, Tensor) and (
                not isinstance(theirs, Tensor) or theirs.shape != mine.shape
            ):
                given = tuple(theirs.shape) if isinstance(theirs, Tensor) else theirs
                raise ValueError(
                    f"cannot merge: the state {name!r} is {given} there and {tuple(mine.shape)} "
                    f"here; merge two {type(self).__name__} built with the same arguments"
                )
        here = {
            name: state.to(self.device)
            if isinstance(state, Tensor)
            else [part.to(self.device) for part in state]
            for name, state in incoming_state.items()
        }
        super().merge_state(here)
        # torchmetrics (1.9) forgets both: a merge into a fresh metric would warn that nothing was
        # seen, and a merge after `compute` would return the value from before.
        self._update_count += seen
        self._computed = None


Fault: TypeAlias = tuple[str, str, str]  # given, expected, fix; {} is how many
LABELS_OUTSIDE: Fault = (
    "{} labels lie outside 0..C-1",
    "class indices below the number of classes",
    "name void labels with ignore_index=..., or remap the labels",
)

M = TypeVar("M", bound=StreamingMetric)


def seen_once(metric: M, *inputs: Tensor | None) -> M:
    """``metric`` after one ``update``, on the inputs' device: the body of the one-shot functions."""
    first = inputs[0]
    if isinstance(first, Tensor) and first.device.type != "mps":  # MPS has no float64
        metric = metric.to(first.device)
    metric.update(*inputs)
    return metric


def wide(device: torch.device) -> torch.dtype:
    """The dtype of a sum on ``device``: float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: sixteen bits and fewer are widened, a chunk at a time."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def require(ok: bool, given: str, expected: str, fix: str) -> None:
    """Raise a ``ValueError`` that says what was given, what was expected and what to do about it.

    >>> require(False, "probs has shape (3,)", "(N, C)", "stack the two classes")
    Traceback (most recent call last):
    ValueError: probs has shape (3,); expected (N, C); stack the two classes
    """
    if not ok:
        raise ValueError(f"{given}; expected {expected}; {fix}")


def require_none(faults: Tensor, messages: tuple[Fault, ...]) -> None:
    """Raise for the first kind of fault that ``update`` counted; ``{}`` in its text is the count."""
    for count, (given, expected, fix) in zip(faults.tolist(), messages, strict=True):
        require(count == 0, given.format(count), expected, fix)


def require_seen(count: int, metric: object, what: str) -> None:
    """Raise when there is nothing to average."""
    require(
        count > 0,
        f"{type(metric).__name__} has seen no {what}",
        "at least one",
        "call update() with data before compute(), and check ignore_index or the data set's length",
    )


def check_floating(name: str, values: Tensor) -> None:
    """``values`` must be a floating-point tensor."""
    require(
        isinstance(values, Tensor),
        f"{name} is a {type(values).__name__}",
        "a torch.Tensor",
        f"convert it with torch.as_tensor({name})",
    )
    require(
        values.is_floating_point(),
        f"{name} has dtype {values.dtype}",
        "a floating-point dtype",
        "pass the scores or probabilities themselves, not class indices or 0-255 values",
    )


def check_probs(probs: Tensor, labels: Tensor, name: str = "probs") -> None:
    """``probs`` (N, C, ...) against integer ``labels`` (N, ...); shapes and dtypes only."""
    check_floating(name, probs)
    shape = tuple(probs.shape)
    require(
        probs.ndim >= 2 and shape[1] > 0,
        f"{name} has shape {shape}",
        "(N, C), or (N, C, H, W) for maps, with one column per class",
        "for a two-class sigmoid p, pass torch.stack([1 - p, p], dim=1)",
    )
    check_labels(labels, shape[:1] + shape[2:], f"{name} has shape {shape}")


def check_labels(labels: Tensor, shape: tuple[int, ...], beside: str, name: str = "labels") -> None:
    """``labels`` must be class indices of the given shape."""
    require(
        isinstance(labels, Tensor),
        f"{name} is a {type(labels).__name__}",
        "a torch.Tensor of class indices",
        f"convert it with torch.as_tensor({name})",
    )
    require(
        not labels.is_floating_point() and labels.dtype != torch.bool,
        f"{name} has dtype {labels.dtype}",
        "an integer dtype",
        "pass class indices, for instance one_hot.argmax(1) or labels.long()",
    )
    require(
        tuple(labels.shape) == shape,
        f"{name} has shape {tuple(labels.shape)} while {beside}",
        f"{name} of shape {shape}",
        "pass the predictions and the labels of the same examples",
    )


def pieces(probs: Tensor, labels: Tensor, batch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of ``probs`` (N, C, ...) and ``labels`` (N, ...) with about ``CHUNK`` probabilities each.

    Cut along the batch, then along the first spatial axis: a 1280x720 map of 13 classes is never
    copied whole, whatever is computed from a piece. ``batch`` is the axis N of ``probs``.

    >>> maps, labels = torch.zeros(2, 13, 720, 1280), torch.zeros(2, 720, 1280)
    >>> parts = list(pieces(maps, labels))
    >>> len(parts), parts[0][0].shape, parts[0][1].shape
    (24, torch.Size([1, 13, 63, 1280]), torch.Size([1, 63, 1280]))
    """
    step = max(1, CHUNK * len(labels) // max(1, probs.numel()))
    for some, of_them in zip(probs.split(step, batch), labels.split(step), strict=True):
        if some.numel() <= CHUNK or labels.ndim == 1:
            yield some, of_them
            continue
        rows = max(1, CHUNK * of_them.shape[1] // some.numel())
        yield from zip(some.split(rows, batch + 2), of_them.split(rows, 1), strict=True)


def kept(labels: Tensor, ignore_index: IgnoreIndex) -> Tensor:
    """Return True where a label counts. A selection instead of a mask would make the GPU wait."""
    ignored = ignore_index if isinstance(ignore_index, tuple) else (ignore_index,)
    mask = torch.ones_like(labels, dtype=torch.bool)
    for index in ignored:
        if index is not None:
            mask &= labels != index
    return mask


def tally(index: Tensor, weights: Tensor, size: int) -> Tensor:
    """``weights`` summed by ``index`` into ``size`` cells: ``bincount`` without its device sync.

    >>> tally(torch.tensor([0, 2, 2]), torch.tensor([1, 1, 1]), 4)
    tensor([1, 0, 2, 0])
    """
    cells = torch.zeros(size, dtype=weights.dtype, device=weights.device)
    return cells.index_add_(0, index.flatten(), weights.flatten())
