r"""Likelihoods: what a network's outputs say about the targets.

A likelihood scores outputs against targets (``nll``), and says what is averaged over the members of a model
and how uncertain each of them is (``summary``). ``build(net, task="classification")`` is a shorthand for
``build(net, likelihood=Categorical())``.

| task | likelihood | outputs, targets |
| --- | --- | --- |
| "classification" | ``Categorical()`` | (B, C), labels (B,) or probabilities (B, C) |
| "segmentation" | ``Segmentation()`` | (B, C, H, W), labels (B, H, W) |
| "regression" | ``Gaussian()`` | (B, 2K), (B, K); dense: (B, 2K, H, W), (B, K, H, W) |
| "multilabel" | ``MultiLabel()`` | (B, K), zeros and ones (B, K) |
|  | ``Categorical(dim=-1)`` | sequences: (B, T, C), labels (B, T) |
|  | ``{"name": likelihood}`` | several heads: a mapping of outputs, a mapping of targets |
|  | the user's own object | see ``Custom`` |
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.precision import at_least_float32

Task = Literal["classification", "segmentation", "regression", "multilabel"]
Weighting = Literal["median", "log"]
Score = Literal["entropy", "confidence"]
TASKS: tuple[str, ...] = get_args(Task)
MIN_VARIANCE = 1e-6


class Summary(NamedTuple):
    """The summary of each member's outputs.

    Attributes:
        values: (S, B, ...), what is averaged over the members: probabilities, or means.
        aleatoric: each member's own uncertainty: entropies (S, B, ...), or variances like ``values``.
        variances: each member's variances, if a prediction shall keep them.
    """

    values: Tensor
    aleatoric: Tensor
    variances: Tensor | None = None


class Scaling(nn.Module):
    r"""Outputs rescaled before they become probabilities: $o_c \mapsto a_c o_c + b_c$.

    One number $a = 1/T$ for all classes, b = 0, is a temperature; a number per class is vector
    scaling. ``lpbnn.calibration`` fits them on held-out data. With members, the outputs of each are
    rescaled and the probabilities averaged afterwards.

    Args:
        scale: a, a scalar or (C,).
        bias: b, in the shape of the scale.
        dim: the axis of the classes in outputs (n, ...), 1 or -1.

    Example:
        >>> scaling = Scaling(torch.tensor(0.5))
        >>> scaling(torch.tensor([[4.0, 2.0]])), scaling.temperature
        (tensor([[2., 1.]]), 2.0)
    """

    scale: Tensor
    bias: Tensor

    def __init__(self, scale: Tensor, bias: Tensor | None = None, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias)

    @property
    def temperature(self) -> float:
        """The temperature T; vector scaling has none."""
        if self.scale.dim():
            raise AttributeError("vector scaling has a scale per class, no temperature; use scale.")
        return 1 / self.scale.item()

    def forward(self, outputs: Tensor, members: bool = False) -> Tensor:
        """Return outputs (n, C, ...) rescaled; with ``members`` they are (S, n, C, ...)."""
        outputs = at_least_float32(outputs)
        # Loaded ones may lie elsewhere.
        scale, bias = self.scale.to(outputs), self.bias.to(outputs)
        if scale.dim() == 0:
            return outputs * scale
        axis = member_axis(self.dim) if members else self.dim
        shape = (-1, *(1,) * (outputs.dim() - 1 - axis % outputs.dim()))
        return torch.addcmul(bias.view(shape), outputs, scale.view(shape))

    def extra_repr(self) -> str:
        if self.scale.dim():
            return f"{len(self.scale)} classes"
        return f"temperature={self.temperature:.4g}"


class Likelihood(nn.Module):
    """Base class; a subclass defines ``nll`` and ``summary``.

    Attributes:
        scaling: rescales the outputs in ``summary``, and thereby in predictions; None leaves them as they
            are. The NLL of training does not use it. Likelihoods of classes and labels may have one.
        task: a name for the kind of targets.
        quantity: what the averaged values are called in a ``Prediction``: "probs", "mean" or "values".
        class_dim: axis of the averaged values (B, ...) that sums to one; None if none does.
        information: True if ``total`` is an entropy; total - aleatoric is then the mutual information of
            target and member. False: total = aleatoric + the variance of the values over members.
        cellwise: True if every pixel is summarised by itself, so that maps may be cut into strips.

    Args:
        dim: the axis of the classes, labels or numbers in outputs (n, ...): 1, right after the batch, or
            -1, the last.
    """

    task: str = "custom"
    quantity: Literal["probs", "mean", "values"] = "values"
    class_dim: int | None = None
    information: bool = False
    cellwise: bool = False

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim not in (1, -1):
            raise ValueError(f"dim={dim!r}: expected 1, right after the batch, or -1, the last.")
        self.dim = dim
        self.scaling: Scaling | None = None
        self.register_load_state_dict_pre_hook(_match_scaling)

    @property
    def heads(self) -> "dict[str, Likelihood]":
        """The likelihoods of the heads by name; "" for the only one."""
        return {"": self}

    def scaled(self, outputs: Tensor) -> Tensor:
        """Return member outputs (S, B, ...), rescaled if there is a scaling, in float32 at least."""
        if self.scaling is None:
            return at_least_float32(outputs)
        return self.scaling(outputs, members=True)

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        """Return the negative log-likelihood of every row, (n,), or cell (pixel, token), (n, ...).

        It is multiplied by ``weights(targets)``, if there are any.
        """
        raise NotImplementedError

    def summary(self, outputs: Tensor) -> Summary:
        """Return what member outputs (S, B, ...) say."""
        raise NotImplementedError

    def weights(self, targets: Any) -> Tensor | None:
        """Return how much each cell counts in a mean, in the shape of ``nll``; None counts all equally."""
        return None

    def mean_nll(self, outputs: Any, targets: Any, row_weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean of ``nll`` over all cells, a scalar; 0 if nothing counts.

        Args:
            outputs: (n, ...).
            targets: as the likelihood takes them, for n rows.
            row_weights: (n,), how much each row counts; None counts all equally.
        """
        cells, counts = self.nll(outputs, targets), self.weights(targets)
        if counts is None and row_weights is None:
            return cells.mean()
        counts = torch.ones_like(cells) if counts is None else counts.to(cells.dtype)
        if row_weights is not None:
            require_row_weights(row_weights, cells.shape[0])
            each = row_weights.to(cells.dtype).view(-1, *(1,) * (cells.dim() - 1))
            cells, counts = cells * each, counts * each
        return weighted_mean(cells.sum(), counts.sum())

    def nll_terms(
        self, outputs: Any, targets: Any, row_weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return {"nll": mean_nll(...)}; several heads add their parts of it as "nll/<name>"."""
        return {"nll": self.mean_nll(outputs, targets, row_weights)}

    def total(self, average: Tensor) -> Tensor:
        """Return the entropy of averaged values (B, ...); needed if ``information`` is True."""
        raise NotImplementedError

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return how strange each example is, (B, ...), from the averaged values and their uncertainty.

        Here it is the total uncertainty of an example, (B,), summed over its pixels or numbers.
        """
        return total.flatten(1).sum(1) if total.dim() > 1 else total

    def read_output(self, output: Any) -> Any:
        """Return the tensor in what a network returned: itself, ["out"], ["logits"] or .logits."""
        if isinstance(output, Tensor):
            return output
        keyed = output if isinstance(output, Mapping) else {}
        for found in (keyed.get("out"), keyed.get("logits"), getattr(output, "logits", None)):
            if isinstance(found, Tensor):
                return found
        held = keyed or getattr(output, "__dict__", {})
        names = [name for name, value in held.items() if isinstance(value, Tensor)]
        name = next(iter(names or held), "key")
        fix = f"[{name!r}]" if isinstance(output, Mapping) else f".{name}"
        if isinstance(output, tuple | list):
            fix = "[0]"
        raise TypeError(
            f"the network returned {_kind(output)}; expected a tensor, or a mapping with 'out' or "
            f"'logits'. Fix: build(..., readout=lambda output: output{fix})."
        )

    def check_batch(self, x: Any, y: Any) -> None:
        """Refuse a batch that can be seen to be wrong before the network has run."""
        require_tensor(y)


class Categorical(Likelihood):
    r"""Classes: the softmax of the outputs.

    $$NLL = - w_y \log \mathrm{softmax}(o)_y$$

    Targets are labels, of any integer type, or soft labels: a probability for every class, whose NLL is the
    expectation, $- \sum_c y_c w_c \log \mathrm{softmax}(o)_c$. In a mean an example counts with the
    weight of its label. An ignored label, or a soft label of zeros, does not count.

    Args:
        ignore_index: the label that does not count (void pixels, padding).
        class_weights: one number of at least 0 per class (see ``class_weights``).
        dim: the axis of the classes: 1, (B, C, ...) with labels (B, ...); or -1, as in sequences,
            (B, T, C) with labels (B, T). The probabilities of a prediction have the outputs' layout.
        score: what tells inputs unlike the training data, of the averaged probabilities: their "entropy",
            or "confidence", 1 - the largest of them.

    Example:
        >>> likelihood = Categorical()
        >>> round(likelihood.mean_nll(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)  # log 4
        1.3863
        >>> likelihood.nll(torch.zeros(1, 2), torch.tensor([[0.3, 0.7]]))  # a soft label
        tensor([0.6931])
        >>> Categorical(dim=-1).nll(
        ...     torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64)
        ... ).shape
        torch.Size([2, 5])
    """

    task = "classification"
    quantity = "probs"
    information = True
    cellwise = True
    class_weights: Tensor | None

    def __init__(
        self,
        ignore_index: int = -100,
        class_weights: Tensor | Sequence[float] | None = None,
        dim: int = 1,
        score: Score = "entropy",
    ) -> None:
        super().__init__(dim)
        if score not in get_args(Score):
            raise ValueError(f"score={score!r}: choose 'entropy' or 'confidence'.")
        self.class_dim = dim
        self.ignore_index = ignore_index
        self.score: Score = score
        self.register_buffer("class_weights", _checked_weights(class_weights), persistent=False)

    def nll(self, outputs: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
        """Return the cross-entropy of every cell; reduction="sum" returns their sum, a scalar."""
        targets = self.check_targets(outputs, targets)
        outputs = at_least_float32(outputs).movedim(self.dim, 1)
        weight = None if self.class_weights is None else self.class_weights.to(outputs)
        if targets.is_floating_point():
            targets = targets.to(outputs.dtype).movedim(self.dim, 1)
            return F.cross_entropy(outputs, targets, weight, reduction=reduction)
        try:
            return F.cross_entropy(
                outputs, targets, weight, ignore_index=self.ignore_index, reduction=reduction
            )
        except IndexError as error:  # a CPU reads every label anyway
            raise self.label_error(targets, outputs.shape[1]) from error

    def mean_nll(
        self, outputs: Tensor, targets: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        if type(self) is not Categorical or row_weights is not None:
            return super().mean_nll(outputs, targets, row_weights)
        total = self.nll(outputs, targets, "sum")  # sums in the kernel of the cross-entropy
        return weighted_mean(total, self.weights(targets).to(total.dtype).sum())

    def weights(self, targets: Tensor) -> Tensor:
        """Return the class weight of each label, (n, ...), or 1 without such weights; 0 if ignored."""
        if targets.is_floating_point():
            soft = at_least_float32(targets.movedim(self.dim, -1))
            return (soft if self.class_weights is None else soft * self.class_weights).sum(-1)
        labels = targets.long()  # a uint8 156 would equal -100
        counted = labels != self.ignore_index
        if self.class_weights is None:
            return counted.float()
        return counted * self.class_weights[labels.masked_fill(~counted, 0)]

    def summary(self, outputs: Tensor) -> Summary:
        """Return probabilities, in the shape of the outputs (S, B, C, ...), and entropies (S, B, ...)."""
        self.check_outputs(outputs.shape[1:])
        axis = member_axis(self.dim)
        probs = self.scaled(outputs).softmax(axis)
        return Summary(probs, entropy(probs, axis))

    def total(self, average: Tensor) -> Tensor:
        return entropy(average, self.dim)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return the entropy of the averaged probabilities or 1 - the largest of them, (B, ...)."""
        return total if self.score == "entropy" else 1 - average.amax(self.dim)

    def check_batch(self, x: Any, y: Any) -> None:
        require_tensor(y)
        labels = isinstance(x, Tensor) and not x.is_floating_point() and x.dim() < y.dim()
        if not labels or not y.is_floating_point() or self.dim != 1:
            return
        if bool((y < 0).any()) or bool((y.sum(1) > 1.01).any()):  # no probabilities of classes
            raise ValueError(
                f"loss(x, y) got {x.dtype} inputs of shape {tuple(x.shape)} and {y.dtype} targets of "
                f"shape {tuple(y.shape)}: they seem to be swapped. Fix: loss(inputs, labels)."
            )

    def check_outputs(self, shape: Sequence[int]) -> None:
        """Refuse outputs of this shape (n, ...): without classes, or with more or fewer than weights."""
        if len(shape) < 2 or shape[self.dim] < 2:
            layout = "(batch, classes, ...)" if self.dim == 1 else "(batch, ..., classes)"
            raise ValueError(
                f"{self.task} needs outputs {layout}; the network gave {tuple(shape)}. A yes-or-no "
                "question has two classes: give the last layer two outputs, or use "
                "likelihoods.MultiLabel()."
            )
        if self.class_weights is not None and len(self.class_weights) != shape[self.dim]:
            raise ValueError(
                f"class_weights has {len(self.class_weights)} numbers, but the network has "
                f"{shape[self.dim]} outputs, one per class. Fix: one weight per class."
            )

    def check_targets(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the targets, labels as int64; refuse a shape or type that does not fit.

        The values are not read: that would wait for a GPU.
        """
        require_tensor(targets)
        self.check_outputs(outputs.shape)
        if targets.is_floating_point() and targets.shape == outputs.shape:
            return targets
        shape = (*outputs.shape[:1], *outputs.shape[2:]) if self.dim == 1 else outputs.shape[:-1]
        if not targets.is_floating_point() and targets.shape == shape:
            return targets.long()
        hint = ""
        if outputs.dim() > 2 and targets.shape == outputs.shape[:-1]:
            hint = (
                " Classes come second here, right after the batch. Fix: outputs.movedim(-1, 1), or, if "
                "they are last, likelihood=likelihoods.Categorical(dim=-1)."
            )
        raise ValueError(
            f"{self.task} with outputs of shape {tuple(outputs.shape)} needs integer labels of shape "
            f"{tuple(shape)}, or floating-point probabilities of shape {tuple(outputs.shape)}; got "
            f"{targets.dtype} of shape {tuple(targets.shape)}.{hint}"
        )

    def labels_and_weights(
        self, outputs: Tensor, targets: Any, row_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return checked labels, and how much each cell counts, for a loss of a method's own.

        Args:
            outputs: (n, C, ...), or (n, ..., C) if the classes are last.
            targets: labels (n, ...), or probabilities of the shape of the outputs (soft labels).
            row_weights: (n,), or None.

        Returns:
            Labels (n, 1, ...), 0 for ignored ones, or soft labels (n, C, ...); weights (n, ...).
        """
        targets, classes = self.check_targets(outputs, targets), outputs.shape[self.dim]
        weights = self.weights(targets).to(outputs.dtype)
        if row_weights is not None:
            require_row_weights(row_weights, outputs.shape[0])
            weights = weights * row_weights.to(weights).view(-1, *(1,) * (weights.dim() - 1))
        if targets.is_floating_point():
            return targets.movedim(self.dim, 1).to(outputs.dtype), weights
        labels = targets.where(targets != self.ignore_index, 0)
        # Values on a GPU are not read: that would wait for it.
        readable = labels.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and ((labels < 0) | (labels >= classes)).any():
            raise self.label_error(targets, classes)
        return labels.unsqueeze(1), weights

    def label_error(self, targets: Tensor, classes: int) -> IndexError:
        """Return the error for labels that are neither a class nor ignored."""
        wrong = targets[(targets != self.ignore_index) & ((targets < 0) | (targets >= classes))]
        return IndexError(
            f"labels are 0 to {classes - 1}, for the network's {classes} outputs, or ignore_index="
            f"{self.ignore_index}; got {wrong.unique().tolist()[:5]}. Fix: as many outputs as classes; "
            "for a label that does not count, build(..., ignore_index=that label)."
        )


class Segmentation(Categorical):
    """Classes pixel by pixel: outputs (B, C, H, W), labels (B, H, W); pixels count equally in a mean.

    Anomalies are told by 1 - the largest probability, as published results of this task are.

    Example:
        >>> likelihood = Segmentation(ignore_index=255)
        >>> likelihood.nll(torch.zeros(2, 5, 4, 4), torch.full((2, 4, 4), 255)).sum().item()
        0.0
    """

    task = "segmentation"

    def __init__(
        self,
        ignore_index: int = -100,
        class_weights: Tensor | Sequence[float] | None = None,
        dim: int = 1,
        score: Score = "confidence",
    ) -> None:
        super().__init__(ignore_index, class_weights, dim, score)


class Gaussian(Likelihood):
    r"""Real numbers: independent normal distributions, one per target.

    $$NLL = \tfrac12 \sum_k \left( \log 2 \pi v_k + (y_k - m_k)^2 / v_k \right)$$

    Args:
        variance: "softplus": outputs are K means, then K raw variances, v = softplus(raw) + 1e-6. "log":
            the same with v = exp(raw) + 1e-6. A number: a fixed variance and one output per target (1.0
            is half the squared error, up to a constant).
        dim: the axis of these numbers: 1, (B, 2K, ...) with targets (B, K, ...), maps included; or -1,
            (B, T, 2K) with targets (B, T, K). Targets with K = 1 may leave the axis out.

    Example:
        >>> mean, variance = Gaussian().split(torch.zeros(5, 2))
        >>> tuple(mean.shape), round(variance[0].item(), 4)
        ((5, 1), 0.6931)
        >>> Gaussian(variance=1.0).nll(torch.zeros(1, 3), torch.ones(1, 3))  # 3/2 (log 2 pi + 1)
        tensor([4.2568])
    """

    task = "regression"
    quantity = "mean"
    cellwise = True

    def __init__(
        self, variance: Literal["softplus", "log"] | float = "softplus", dim: int = 1
    ) -> None:
        super().__init__(dim)
        fixed = isinstance(variance, int | float) and 0 < variance < math.inf
        if not fixed and variance not in ("softplus", "log"):
            raise ValueError(
                f"variance={variance!r}: expected 'softplus', 'log', or a positive number for a fixed "
                "variance and one output per target."
            )
        self.variance = variance

    def split(self, outputs: Tensor, members: bool = False) -> tuple[Tensor, Tensor]:
        """Return means and variances (n, K, ...) of outputs (n, 2K, ...).

        Args:
            outputs: (n, 2K, ...), or (n, K, ...) if the variance is fixed.
            members: True if the outputs are those of members, (S, n, ...).
        """
        per_target = 2 if isinstance(self.variance, str) else 1
        if outputs.dim() < 2 + members:
            raise ValueError(
                f"regression needs outputs (batch, {per_target} per target, ...); the network gave "
                f"{tuple(outputs.shape[members:])}. Fix: for one number per example, output.unsqueeze(1)."
            )
        axis = member_axis(self.dim) if members else self.dim
        if outputs.shape[axis] % per_target:
            raise ValueError(
                f"a regression network has two outputs per target (mean, variance); got "
                f"{outputs.shape[axis]} outputs. Fix: double the width of its last layer, or, for one "
                "output per target, likelihood=likelihoods.Gaussian(variance=1.0)."
            )
        values = at_least_float32(outputs)
        if not isinstance(self.variance, str):
            return values, torch.full_like(values, self.variance)
        mean, raw = values.chunk(2, axis)
        return mean, (F.softplus(raw) if self.variance == "softplus" else raw.exp()) + MIN_VARIANCE

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.split(outputs)
        require_tensor(targets)
        shapes = [mean.shape, mean.squeeze(self.dim).shape]  # the second differs if K = 1
        if not targets.is_floating_point():
            raise ValueError(
                f"regression got targets of type {targets.dtype}; expected floating-point numbers. Fix: "
                "y.float(), or, if they are classes, task='classification'."
            )
        if targets.shape not in shapes:
            raise ValueError(
                f"regression with outputs of shape {tuple(outputs.shape)} got targets of shape "
                f"{tuple(targets.shape)}; expected {tuple(mean.shape)}."
            )
        squared = (targets.reshape(mean.shape) - mean).square()
        return 0.5 * (math.log(2 * math.pi) + variance.log() + squared / variance).sum(self.dim)

    def summary(self, outputs: Tensor) -> Summary:
        """Return means and variances, both (S, B, K, ...)."""
        mean, variance = self.split(outputs, members=True)
        return Summary(mean, variance, variance)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return the total variance, summed over the K targets, (B, ...)."""
        return total.sum(self.dim)


class MultiLabel(Likelihood):
    r"""Labels that do not exclude each other: K independent yes-or-no questions.

    $$NLL = - \sum_k y_k \log p_k + (1 - y_k) \log (1 - p_k), \quad p = \mathrm{sigmoid}(o)$$

    Outputs and targets are (B, K, ...), or (B, T, K) with ``dim=-1``; targets are zeros and ones, or
    probabilities. Probabilities and uncertainties (binary entropies, nats) of a prediction have that shape.

    Example:
        >>> MultiLabel().nll(torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))  # 3 log 2
        tensor([2.0794])
    """

    task = "multilabel"
    quantity = "probs"
    information = True
    cellwise = True

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        require_tensor(targets)
        if outputs.dim() < 2 or targets.shape != outputs.shape:
            raise ValueError(
                "multilabel needs outputs and targets of one shape, (batch, labels, ...), with a zero or "
                f"one for each label; got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}."
            )
        outputs = at_least_float32(outputs)
        targets = targets.to(outputs.dtype)
        cells = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return cells.sum(self.dim)

    def summary(self, outputs: Tensor) -> Summary:
        """Return probabilities and their binary entropies, both (S, B, K, ...)."""
        if outputs.dim() < 3:
            raise ValueError(
                "multilabel needs outputs (batch, labels, ...); the network gave "
                f"{tuple(outputs.shape[1:])}."
            )
        probs = self.scaled(outputs).sigmoid()
        return Summary(probs, self.total(probs))

    def total(self, average: Tensor) -> Tensor:
        return torch.special.entr(average) + torch.special.entr(1 - average)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return the entropy, summed over the K labels, (B, ...)."""
        return total.sum(self.dim)


class MultiHead(Likelihood):
    """Several heads with a likelihood each; ``build(net, likelihood={...})`` makes one of a mapping.

    Outputs and targets are mappings with the same names, and ``predict`` returns a ``Prediction`` per name.
    The mean NLL is the sum of the heads'; ``loss`` returns these as "nll/<name>".

    Args:
        heads: likelihoods, or objects of the user (see ``Custom``), by name.

    Example:
        >>> likelihood = MultiHead({"kind": Categorical(), "size": Gaussian()})
        >>> outputs = {"kind": torch.zeros(4, 3), "size": torch.zeros(4, 2)}
        >>> targets = {"kind": torch.tensor([0, 1, 2, 0]), "size": torch.zeros(4)}
        >>> list(likelihood.nll_terms(outputs, targets))
        ['nll', 'nll/kind', 'nll/size']
    """

    task = "multihead"

    def __init__(self, heads: "Mapping[str, Likelihood | UserLikelihood]") -> None:
        super().__init__()
        if not heads or not all(isinstance(name, str) for name in heads):
            raise ValueError(
                f"likelihoods of several heads are given by name; got the names {list(heads)}. Fix: "
                "likelihood={'kind': likelihoods.Categorical(), 'size': likelihoods.Gaussian()}."
            )
        self.names = tuple(heads)
        self.parts = nn.ModuleList(map(as_likelihood, heads.values()))  # a ModuleDict forbids dots

    @property
    def heads(self) -> dict[str, Likelihood]:
        return dict(zip(self.names, self.parts, strict=True))  # type: ignore[arg-type]

    def mean_nll(self, outputs: Any, targets: Any, row_weights: Tensor | None = None) -> Tensor:
        return self.nll_terms(outputs, targets, row_weights)["nll"]

    def nll_terms(
        self, outputs: Any, targets: Any, row_weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        parts = {
            f"nll/{name}": head.mean_nll(outputs[name], targets[name], row_weights)
            for name, head in self.heads.items()
        }
        return {"nll": torch.stack(list(parts.values())).sum(), **parts}

    def read_output(self, output: Any) -> dict[str, Tensor]:
        """Return the tensors of the heads, by name."""
        if not isinstance(output, Mapping) or not set(self.names) <= set(output):
            entries = ", ".join(f"{name!r}: output[{i}]" for i, name in enumerate(self.names))
            raise TypeError(
                f"the network returned {_kind(output)}; expected a mapping with the keys "
                f"{list(self.names)}, the names of the likelihoods. Fix: build(..., readout=lambda "
                f"output: {{{entries}}})."
            )
        return {name: head.read_output(output[name]) for name, head in self.heads.items()}

    def check_batch(self, x: Any, y: Any) -> None:
        if not isinstance(y, Mapping) or not set(self.names) <= set(y):
            raise TypeError(
                f"targets are a mapping with the keys {list(self.names)}, one for each head; got "
                f"{_kind(y)}."
            )
        for name, head in self.heads.items():
            head.check_batch(x, y[name])


class UserLikelihood(Protocol):
    """A user's own object for ``build(net, likelihood=...)``; see ``Custom``."""

    def nll(self, outputs: Any, targets: Any, /) -> Tensor: ...

    def summary(self, outputs: Any, /) -> Any: ...


class Custom(Likelihood):
    """A likelihood of the user: any object with ``nll`` and ``summary``; ``build`` wraps it.

    - ``nll(outputs, targets)`` returns the negative log-likelihood of every row, (n,), or cell, (n, ...).
    - ``summary(outputs)`` takes such rows (n, ...) too and returns ``values`` (n, ...), which are averaged
      over members; or ``(values, aleatoric)``, where aleatoric is the variance of the targets around each
      value, in the shape of the values. The epistemic part is the variance of the values over members.

    An ``nn.Module`` may have parameters; they are trained and saved with the model. A likelihood whose
    uncertainty is an entropy, or that ignores some targets, is written as a subclass of ``Likelihood``.

    Example:
        >>> class Poisson:
        ...     def nll(self, outputs, targets):
        ...         return F.poisson_nll_loss(outputs[:, 0], targets, reduction="none")
        ...
        ...     def summary(self, outputs):
        ...         rate = outputs[:, 0].exp()
        ...         return rate, rate  # its mean, and its variance
        >>> import lpbnn
        >>> model = lpbnn.build(nn.Linear(4, 1), "ensemble", members=3, likelihood=Poisson())
        >>> p = lpbnn.predict(model, torch.randn(5, 4))
        >>> tuple(p.values.shape), tuple(p.epistemic.shape)
        ((5,), (5,))
    """

    def __init__(self, user: UserLikelihood) -> None:
        super().__init__()
        self.user = user
        self.task = getattr(user, "task", "custom")

    def nll(self, outputs: Tensor, targets: Any) -> Tensor:
        cells = at_least_float32(self.user.nll(outputs, targets))
        if cells.shape[:1] != outputs.shape[:1]:
            raise ValueError(
                f"{type(self.user).__name__}.nll returned a tensor of shape {tuple(cells.shape)} for "
                f"{len(outputs)} rows; expected one number for each. Fix: reduction='none'."
            )
        return cells

    def summary(self, outputs: Tensor) -> Summary:
        rows = outputs.flatten(0, 1)
        found = self.user.summary(rows)
        found = found[:2] if isinstance(found, tuple | list) else (found,)
        values, *given = map(at_least_float32, found)
        aleatoric = given[0] if given else torch.zeros_like(values)
        if values.shape[:1] != rows.shape[:1] or aleatoric.shape != values.shape:
            shapes, n = [tuple(part.shape) for part in found], len(rows)
            raise ValueError(
                f"{type(self.user).__name__}.summary returned shapes {shapes} for {n} rows; expected "
                f"values ({n}, ...), or (values, aleatoric) of one shape."
            )
        values, aleatoric = (part.unflatten(0, outputs.shape[:2]) for part in (values, aleatoric))
        return Summary(values, aleatoric, aleatoric if given else None)

    def check_batch(self, x: Any, y: Any) -> None:
        """Accept any targets: the user's object knows which it takes."""


def as_likelihood(
    likelihood: "Likelihood | UserLikelihood | Mapping[str, Any] | None" = None,
    task: str = "classification",
    ignore_index: int = -100,
    class_weights: Tensor | Sequence[float] | None = None,
) -> Likelihood:
    """Return the likelihood that ``build`` was asked for.

    Args:
        likelihood: one of this file, a mapping of them, or the user's object; None takes the task's.
        task: "classification", "segmentation", "regression" or "multilabel"; a likelihood counts in its place.
        ignore_index: for the first two tasks, the label that does not count.
        class_weights: for the first two tasks, one weight per class.

    Example:
        >>> as_likelihood(task="regression"), as_likelihood({"a": Categorical()}).task
        (Gaussian(), 'multihead')
    """
    if task not in TASKS:
        raise ValueError(
            f"task={task!r} is not known; choose one of {', '.join(TASKS)}, or give a likelihood."
        )
    if likelihood is None and task in ("classification", "segmentation"):
        kind = Categorical if task == "classification" else Segmentation
        return kind(ignore_index, class_weights)
    if class_weights is not None or ignore_index != -100:
        raise ValueError(
            "ignore_index and class_weights are for task='classification' and 'segmentation'. Fix: leave "
            "them out, or give likelihood=likelihoods.Categorical(ignore_index=..., class_weights=...)."
        )
    if likelihood is None:
        return Gaussian() if task == "regression" else MultiLabel()
    if isinstance(likelihood, Likelihood):
        if task not in ("classification", likelihood.task) and likelihood.task in TASKS:
            raise ValueError(
                f"task={task!r} with a likelihood of {likelihood.task!r}, {likelihood}. Fix: leave out the "
                "one that is wrong; a likelihood needs no task."
            )
        return likelihood
    if isinstance(likelihood, Mapping):
        return MultiHead(likelihood)
    methods = [getattr(likelihood, name, None) for name in ("nll", "summary")]
    if isinstance(likelihood, type) or not all(map(callable, methods)):
        raise TypeError(
            f"likelihood={likelihood!r}: expected an object such as likelihoods.Gaussian(), a mapping of "
            "them, or an object with nll(outputs, targets) and summary(outputs)."
        )
    return Custom(likelihood)


def class_weights(counts: Sequence[int], kind: Weighting) -> list[float]:
    r"""Return one weight per class from its number of labels, so that rare classes count more.

    With the shares $p_c = n_c / \sum_k n_k$:

    - "median": $w_c = \mathrm{median}_k(p_k) / p_c$ (Eigen and Fergus, 2015), over the classes that
      have labels; a class without labels weighs 0
    - "log": $w_c = 1 / \log(1.02 + p_c)$ (Paszke et al., 2016), between 1.4 and 50

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


def take_scalings(likelihood: Likelihood) -> dict[str, Scaling]:
    """Remove the scalings of a likelihood and return them, by head; "" is the only one's name."""
    taken = {}
    for name, head in likelihood.heads.items():
        if head.scaling is not None:
            taken[name], head.scaling = head.scaling, None
    return taken


def _match_scaling(
    likelihood: Likelihood, state_dict: Mapping[str, Tensor], prefix: str, *_: Any
) -> None:
    """Give a likelihood the kind of scaling that the state dict has, or none, before it is loaded."""
    scale = state_dict.get(f"{prefix}scaling.scale")
    likelihood.scaling = (
        None if scale is None else Scaling(torch.ones_like(scale), dim=likelihood.dim)
    )


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight, and 0 for a batch in which nothing counts: a mean over nothing is NaN."""
    return total / weight.clamp_min(torch.finfo(weight.dtype).tiny)


def member_axis(dim: int) -> int:
    """Return the place of an axis of rows (n, ...) in outputs (S, n, ...) of members.

    Example:
        >>> member_axis(1), member_axis(-1)
        (2, -1)
    """
    return dim + 1 if dim > 0 else dim


def entropy(probs: Tensor, dim: int = 1) -> Tensor:
    r"""Return H(p) = -sum_c p_c log p_c in nats, with 0 log 0 = 0.

    Example:
        >>> round(entropy(torch.tensor([[0.5, 0.5]])).item(), 4)
        0.6931
    """
    return torch.special.entr(probs).sum(dim)


def require_tensor(given: object, name: str = "targets") -> None:
    """Refuse what is not a tensor, a list of labels for example."""
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{name} are a tensor; got {type(given).__name__}. Fix: torch.as_tensor({name})."
        )


def require_row_weights(weight: Tensor, batch: int) -> None:
    """Refuse weights that are not one number for each example."""
    if not isinstance(weight, Tensor) or weight.shape != (batch,):
        given = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"weights of examples are a tensor of shape ({batch},), one number for each; got {given}."
        )


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


def require_targets(y: Any, weight: Tensor | None, batch: int) -> None:
    """Refuse more or fewer targets than examples, in a tensor or a mapping of tensors, or weights."""
    for leaf in tree_leaves(y):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (batch,):
            raise ValueError(
                f"the loss takes {batch} targets here, one for each example; got {batch} examples and "
                f"targets of shape {tuple(leaf.shape)}. Fix: targets whose first dimension is {batch}."
            )
    if weight is not None:
        require_row_weights(weight, batch)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with the keys {list(value)}"
    return type(value).__name__


def _checked_weights(given: Tensor | Sequence[float] | None) -> Tensor | None:
    if given is None:
        return None
    weights = torch.as_tensor(given, dtype=torch.float32)
    if weights.dim() != 1 or not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(
            f"class_weights={weights.tolist()}: expected one finite number of at least 0 per class."
        )
    return weights
