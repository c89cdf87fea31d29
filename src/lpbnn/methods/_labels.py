"""Labels and weights of examples, for methods whose loss is not the likelihood's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lpbnn.likelihoods import Categorical, Likelihood, require_row_weights


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
        likelihood: defines the ignored label and the class weights.
        outputs: (n, C, ...), or (n, ..., C) if the likelihood's classes are last.
        y: labels (n, ...), or probabilities of the shape of the outputs (soft labels).
        row_weights: (n,), or None.

    Returns:
        Labels (n, 1, ...), 0 for ignored ones, or soft labels (n, C, ...); weights (n, ...).
    """
    y, classes = likelihood.check_targets(outputs, y), outputs.shape[likelihood.dim]
    weights = likelihood.weights(y).to(outputs.dtype)
    if row_weights is not None:
        require_row_weights(row_weights, outputs.shape[0])
        weights = weights * row_weights.to(weights.dtype).view(-1, *(1,) * (weights.dim() - 1))
    if y.is_floating_point():
        return y.movedim(likelihood.dim, 1).to(outputs.dtype), weights
    labels = y.where(y != likelihood.ignore_index, 0)
    readable = labels.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would wait
    if readable and ((labels < 0) | (labels >= classes)).any():
        raise likelihood.label_error(y, classes)
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
