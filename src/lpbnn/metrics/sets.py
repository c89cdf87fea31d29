"""How good prediction sets and intervals are: how often they contain the truth, and how large they are."""

import torch
from torch import Tensor

from lpbnn.metrics import _base as base


def set_coverage(sets: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Share of examples whose label is in their set.

    $$\frac1N \sum_i [y_i \in C_i]$$

    Args:
        sets: (N, C, ...) booleans, of ``p.sets``.
        labels: (N, ...).
        ignore_index: labels that do not count.

    >>> sets = torch.tensor([[True, False], [True, True]])
    >>> set_coverage(sets, torch.tensor([1, 1]))
    0.5
    """
    counted = _check_sets(sets, labels, ignore_index)
    index = labels.long().where(counted, 0).unsqueeze(1)
    base.require(
        bool(((index >= 0) & (index < sets.shape[1])).all()),
        "some labels lie outside 0..C-1",
        "class indices below the number of columns of sets",
        "name void labels with ignore_index=..., or remap the labels",
    )
    return float(sets.gather(1, index).squeeze(1)[counted].double().mean())


def set_size(
    sets: Tensor, labels: Tensor | None = None, *, ignore_index: base.IgnoreIndex = None
) -> float:
    r"""Mean number of classes in a set.

    $$\frac1N \sum_i |C_i|$$

    Args:
        sets: (N, C, ...) booleans, of ``p.sets``.
        labels: (N, ...), if ``ignore_index`` leaves out some.
        ignore_index: labels that do not count.

    >>> set_size(torch.tensor([[True, False], [True, True]]))
    1.5
    """
    if labels is None:
        _require_sets(sets)
        labels = torch.zeros_like(sets[:, 0], dtype=torch.int64)
        ignore_index = None
    return float(sets.sum(1)[_check_sets(sets, labels, ignore_index)].double().mean())


def interval_coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    """Share of targets inside their interval, bounds included.

    >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
    0.5
    """
    for name, given in (("low", low), ("high", high), ("targets", targets)):
        kind = type(given).__name__
        fix = f"convert it with torch.as_tensor({name})"
        base.require(isinstance(given, Tensor), f"{name} is a {kind}", "a torch.Tensor", fix)
    base.require(
        low.shape == high.shape and low.numel() == targets.numel() > 0,
        f"bounds have shapes {tuple(low.shape)} and {tuple(high.shape)}, targets {tuple(targets.shape)}",
        "three tensors of one shape",
        "pass both results of p.interval and the targets that belong to it",
    )
    targets = targets.reshape(low.shape)
    finite = all(bool(values.isfinite().all()) for values in (low, high, targets))
    base.require(finite, "bounds or targets are not finite", "real numbers", "check the data")
    return float(((low <= targets) & (targets <= high)).double().mean())


def _check_sets(sets: Tensor, labels: Tensor, ignore_index: base.IgnoreIndex) -> Tensor:
    """Return which labels count; refuse what are no sets."""
    _require_sets(sets)
    shape = (*sets.shape[:1], *sets.shape[2:])
    base.check_labels(labels, shape, f"sets has shape {tuple(sets.shape)}")
    counted = base.kept(labels, ignore_index)
    base.require(bool(counted.any()), "no label counts", "at least one", "check ignore_index")
    return counted


def _require_sets(sets: Tensor) -> None:
    base.require(
        isinstance(sets, Tensor) and sets.dtype == torch.bool and sets.ndim >= 2,
        f"sets is {sets.dtype} of shape {tuple(sets.shape)}"
        if isinstance(sets, Tensor)
        else f"sets is {type(sets).__name__}",
        "booleans (N, C, ...)",
        "pass p.sets(conformal, level)",
    )
