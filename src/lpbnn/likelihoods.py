"""The likelihoods of the three tasks: what one row of outputs says of one row of targets."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Task = Literal["classification", "segmentation", "regression"]
Weighting = Literal["median", "log"]
TASKS: tuple[str, ...] = get_args(Task)
MIN_VARIANCE = 1e-6


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; anything wider stays."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def split_gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Regression outputs (..., 2K) to mean and variance (..., K): variance = softplus(second half).

    Example:
        >>> mean, variance = split_gaussian(torch.zeros(5, 2))
        >>> tuple(mean.shape), round(variance[0].item(), 4)
        ((5, 1), 0.6931)
    """
    if outputs.shape[-1] % 2:
        raise ValueError(
            f"a regression network has two outputs per target (mean, spread); got "
            f"{outputs.shape[-1]} outputs. Double the width of its last layer."
        )
    mean, raw = at_least_float32(outputs).chunk(2, -1)
    return mean, F.softplus(raw) + MIN_VARIANCE


def nll(
    outputs: Tensor,
    targets: Tensor,
    task: Task = "classification",
    weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Mean negative log-likelihood of the rows, optionally weighted row by row.

    - classification: outputs (n, C), targets (n,): :math:`-\log \mathrm{softmax}(o)_y`
    - segmentation: outputs (n, C, H, W), targets (n, H, W): the same by pixel, over valid pixels; 0 if
      there is none
    - regression: outputs (n, 2K), targets (n, K):
      :math:`\tfrac12 \sum_k (\log 2\pi v_k + (y_k - m_k)^2 / v_k)`

    Example:
        >>> round(nll(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)  # log 4
        1.3863
    """
    if task == "regression":
        mean, variance = split_gaussian(outputs)  # first: it refuses an odd number of outputs
        check_targets(outputs, targets, task)
        squared = (targets.reshape(mean.shape) - mean).square()
        rows = 0.5 * (math.log(2 * math.pi) + variance.log() + squared / variance).sum(-1)
        return rows.mean() if weights is None else (rows * weights).sum() / weights.sum()
    check_targets(outputs, targets, task)
    outputs = at_least_float32(outputs)  # a sum over pixels is beyond float16
    if class_weights is not None:
        class_weights = class_weights.to(outputs.dtype)
    kind = "sum" if weights is None and task == "classification" else "none"
    cells = _cross_entropy(outputs, targets, class_weights, ignore_index, kind)
    counted = (targets != ignore_index).to(cells.dtype)
    if class_weights is not None:
        counted = counted * class_weights[targets.masked_fill(targets == ignore_index, 0)]
    if weights is not None:
        weights = weights.to(cells.dtype).view(-1, *(1,) * (cells.dim() - 1))
        cells, counted = cells * weights, counted * weights
    # A batch without one valid pixel says nothing: 0, where a mean over nothing would be NaN.
    return cells.sum() / counted.sum().clamp_min(torch.finfo(cells.dtype).tiny)


def _cross_entropy(
    outputs: Tensor, targets: Tensor, class_weights: Tensor | None, ignore_index: int, kind: str
) -> Tensor:
    """Torch's, and on a CPU, which looks at every label anyway, a wrong one is told."""
    try:
        return F.cross_entropy(
            outputs, targets, class_weights, ignore_index=ignore_index, reduction=kind
        )
    except IndexError as error:
        classes = outputs.shape[1]
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= classes))]
        raise IndexError(
            f"labels are 0 to {classes - 1}, for the network's {classes} outputs, or ignore_index="
            f"{ignore_index}; got {wrong.unique().tolist()[:5]}. Fix: as many outputs as classes; for a "
            "label that does not count, build(..., ignore_index=that label)."
        ) from error


def class_weights(counts: Sequence[int], kind: Weighting) -> list[float]:
    r"""One weight per class from how many labels it has, so that rare classes are not forgotten.

    With the shares :math:`p_c = n_c / \sum_k n_k`:

    - "median": :math:`w_c = \mathrm{median}_k(p_k) / p_c` (Eigen and Fergus, 2015), over the classes there
      are; a class without labels weighs 0
    - "log": :math:`w_c = 1 / \log(1.02 + p_c)` (Paszke et al., 2016), between 1.4 and 50

    Example:
        >>> class_weights([800, 400, 200, 200], "median")
        [0.375, 0.75, 1.5, 1.5]
    """
    n = torch.tensor(counts, dtype=torch.float64)
    if kind not in get_args(Weighting):
        raise ValueError(
            f"class weights {kind!r}; expected one of {', '.join(get_args(Weighting))}."
        )
    if not n.sum() > 0:
        raise ValueError(
            f"class weights need labels to count; got counts {tuple(counts)}. Fix: check the training "
            "labels, or train without class weights."
        )
    share = n / n.sum()
    if kind == "log":
        return (1 / torch.log(1.02 + share)).tolist()
    middle = share[share > 0].quantile(0.5)
    return torch.where(share > 0, middle / share, 0.0).tolist()


def require_tensor(targets: object) -> None:
    """Refuse targets that are no tensor, a list of labels for example."""
    if not isinstance(targets, Tensor):
        given = type(targets).__name__
        raise TypeError(f"targets are a tensor; got {given}. Fix: torch.as_tensor(y).")


def check_batch(x: object, y: object, task: Task) -> None:
    """Refuse a batch that can be seen to be none before the network has run."""
    require_tensor(y)
    assert isinstance(y, Tensor)
    if task == "regression" or not isinstance(x, Tensor) or x.is_floating_point():
        return
    if y.is_floating_point() and x.dim() < y.dim():
        raise ValueError(
            f"loss(x, y) got {x.dtype} inputs of shape {tuple(x.shape)} and {y.dtype} targets of shape "
            f"{tuple(y.shape)}: they seem to be swapped. Fix: loss(inputs, labels)."
        )


def require_targets(y: Tensor, batch: int) -> None:
    """Refuse more or fewer targets than examples."""
    if y.shape[:1] != (batch,):
        raise ValueError(
            f"the loss takes {batch} targets here, one for each example; got {batch} examples and "
            f"targets of shape {tuple(y.shape)}. Fix: targets whose first dimension is {batch}."
        )


def check_outputs(shape: Sequence[int], task: Task) -> None:
    """Refuse outputs, of so many rows, that are no classes or no Gaussians."""
    regression = task == "regression"
    if len(shape) < 2 or (shape[1] < 2 and not regression):
        raise ValueError(
            f"{task} needs outputs (batch, {'2 per target' if regression else 'classes'}, ...); "
            f"the network gave {tuple(shape)}. A yes-or-no question has two classes: give "
            "the last layer two outputs."
        )


def check_targets(outputs: Tensor, targets: Tensor, task: Task) -> None:
    """Refuse targets whose shape or type does not fit; values are not looked at (no device sync)."""
    require_tensor(targets)
    check_outputs(outputs.shape, task)
    hint = ""
    if task == "regression":
        expected = (outputs.shape[0], outputs.shape[-1] // 2)
        shapes = [expected, expected[:1]] if expected[1] == 1 else [expected]
        fits = tuple(targets.shape) in shapes and targets.is_floating_point()
        kind = "floating-point targets"
    else:
        expected = (outputs.shape[0], *outputs.shape[2:])
        fits = tuple(targets.shape) == expected and targets.dtype == torch.int64
        kind = "int64 labels"
        if outputs.dim() > 2 and targets.shape == outputs.shape[:-1]:
            hint = " Classes come second, right after the batch: outputs.movedim(-1, 1)."
    if not fits:
        raise ValueError(
            f"{task} with outputs of shape {tuple(outputs.shape)} needs {kind} of shape {expected}; "
            f"got {targets.dtype} of shape {tuple(targets.shape)}.{hint}"
        )
