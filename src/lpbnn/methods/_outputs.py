"""Outputs of members, and labels for the methods whose loss is not the likelihood's."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lpbnn.likelihoods import Categorical, Likelihood
from lpbnn.model import Outputs


def stack_members(outputs: Sequence[Outputs]) -> Outputs:
    """Stack the outputs (B, ...) of S members to (S, B, ...), in every tensor of a nested structure.

    Example:
        >>> stacked = stack_members([{"a": torch.zeros(5, 2), "b": torch.zeros(5)}] * 3)
        >>> {name: tuple(tensor.shape) for name, tensor in stacked.items()}
        {'a': (3, 5, 2), 'b': (3, 5)}
    """
    return tree_map(lambda *members: torch.stack(members), *outputs)


def require_categorical(
    likelihood: Likelihood | None, method: str, tasks: Sequence[str], reason: str
) -> None:
    """Refuse a likelihood that is not over the classes of one of ``tasks``."""
    if likelihood is None or (isinstance(likelihood, Categorical) and likelihood.task in tasks):
        return
    raise ValueError(
        f"{method} has no task={likelihood.task!r} (likelihood {type(likelihood).__name__}): {reason} It "
        f"has {' and '.join(map(repr, tasks))}. Fix: choose another method, such as 'lpbnn'."
    )


def labels_and_weights(
    likelihood: Categorical, outputs: Tensor, y: Tensor, row_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return checked labels, and how much each example (pixel, token) counts.

    Args:
        likelihood: says which label is ignored, and which classes weigh how much.
        outputs: (n, C, ...), or (n, ..., C) if the likelihood's classes are last.
        y: labels (n, ...), or probabilities of the shape of the outputs (soft labels).
        row_weights: (n,), or None.

    Returns:
        Labels (n, 1, ...), 0 for ignored ones, or soft labels (n, C, ...); weights (n, ...).
    """
    y = likelihood.check_targets(outputs, y)
    weights = likelihood.weights(y).to(outputs.dtype)
    if row_weights is not None:
        weights = weights * row_weights.to(weights.dtype).view(-1, *(1,) * (weights.dim() - 1))
    if y.is_floating_point():
        return (y if likelihood.dim == 1 else y.movedim(-1, 1)).to(outputs.dtype), weights
    labels = y.where(y != likelihood.ignore_index, 0)
    if (
        labels.device.type == "cpu" and not torch.compiler.is_compiling()
    ):  # a GPU would have to wait
        wrong = labels[(labels < 0) | (labels >= outputs.shape[likelihood.dim])]
        if wrong.numel():
            raise IndexError(
                f"labels are 0 to {outputs.shape[likelihood.dim] - 1}, for the network's "
                f"{outputs.shape[likelihood.dim]} outputs, or ignore_index={likelihood.ignore_index}; got "
                f"{wrong.unique().tolist()[:5]}. Fix: as many outputs as classes; for a label that does "
                "not count, build(..., ignore_index=that label)."
            )
    return labels.unsqueeze(1), weights


def label_mean(values: Tensor, labels: Tensor) -> Tensor:
    """Return sum_k y_k values_k, (n, ...), without a one-hot tensor for labels that are integers.

    Example:
        >>> label_mean(torch.tensor([[1.0, 3.0]]), torch.tensor([[1]]))
        tensor([3.])
        >>> label_mean(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 0.5]]))
        tensor([2.])
    """
    if labels.is_floating_point():
        return (values * labels).sum(1)
    return values.gather(1, labels).squeeze(1)
