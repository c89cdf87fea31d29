r"""Likelihoods: what a network's outputs say about the targets.

A likelihood scores outputs against targets (``nll``) and says what is averaged over the members of a model
and how uncertain each of them is (``summary``). ``build(net, task="classification")`` is a shorthand for
``build(net, likelihood=Categorical())``:

=================  ==========================  =====================================================
task               likelihood                  outputs, targets
=================  ==========================  =====================================================
"classification"   ``Categorical()``           (B, C), labels (B,) or probabilities (B, C)
"segmentation"     ``Segmentation()``          (B, C, H, W), labels (B, H, W)
"regression"       ``Gaussian()``              (B, 2K), (B, K); dense: (B, 2K, H, W), (B, K, H, W)
"multilabel"       ``MultiLabel()``            (B, K), zeros and ones (B, K)
\                  ``Categorical(dim=-1)``     sequences: (B, T, C), labels (B, T)
\                  ``{"name": likelihood}``    a mapping of outputs, a mapping of targets
\                  an object of the user       see ``Custom``
=================  ==========================  =====================================================
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Task = Literal["classification", "segmentation", "regression", "multilabel"]
Weighting = Literal["median", "log"]
TASKS: tuple[str, ...] = get_args(Task)
MIN_VARIANCE = 1e-6


class Summary(NamedTuple):
    """What members say, each by itself.

    Args:
        values: (S, B, ...), averaged over the members: probabilities, or means.
        aleatoric: each member's own uncertainty: entropies (S, B, ...), or variances like ``values``.
        variances: each member's variances, if a prediction shall keep them.
    """

    values: Tensor
    aleatoric: Tensor
    variances: Tensor | None = None


class Likelihood(nn.Module):
    """Base class of likelihoods; a subclass defines ``nll`` and ``summary``.

    Attributes:
        task: a name for the kind of targets.
        quantity: what the averaged values are: "probs", "mean" or "values" of a ``Prediction``.
        class_dim: axis of a prediction's probabilities over which they sum to one; None if they do not.
        information: True if ``total`` is an entropy, so that total - aleatoric is the mutual information of
            prediction and member. False: total = aleatoric + the variance of the values over members.
        cellwise: True if every pixel is summarised by itself, so that maps may be cut into strips.
    """

    task: str = "custom"
    quantity: Literal["probs", "mean", "values"] = "values"
    class_dim: int | None = None
    information: bool = False
    cellwise: bool = False

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        """Return the negative log-likelihood of every row, (n,), or cell (pixel, token), (n, ...).

        It is multiplied by ``weights(targets)``, if there are any.
        """
        raise NotImplementedError

    def summary(self, outputs: Tensor) -> Summary:
        """Return what member outputs (S, B, ...) say."""
        raise NotImplementedError

    def weights(self, targets: Any) -> Tensor | None:
        """Return how much each cell counts in a mean, of the shape of ``nll``; None counts all equally."""
        return None

    def mean_nll(self, outputs: Any, targets: Any, row_weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean of ``nll`` over all rows, a scalar; 0 if nothing counts.

        Args:
            outputs: (n, ...).
            targets: as the likelihood takes them, for n rows.
            row_weights: (n,), how much each row counts; None counts all equally.
        """
        cells = self.nll(outputs, targets)
        counts = self.weights(targets)
        if counts is None and row_weights is None:
            return cells.mean()
        counts = torch.ones_like(cells) if counts is None else counts.to(cells.dtype)
        if row_weights is not None:
            each = _per_cell(row_weights, cells)
            cells, counts = cells * each, counts * each
        return weighted_mean(cells.sum(), counts.sum())

    def nll_terms(
        self, outputs: Any, targets: Any, row_weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return {"nll": mean_nll(...)}; several heads add their parts of it, "nll/<name>"."""
        return {"nll": self.mean_nll(outputs, targets, row_weights)}

    def members_nll(self, outputs: Any, targets: Any, row_weights: Tensor | None = None) -> Tensor:
        """Return ``mean_nll`` over all rows of all members.

        Args:
            outputs: (S, B, ...).
            targets: for B examples; every member is scored against all of them.
            row_weights: (B,), how much each example counts.
        """
        return self.mean_nll(*member_rows(outputs, targets, row_weights))

    def total(self, average: Tensor) -> Tensor:
        """Return the entropy of averaged values (B, ...); needed if ``information`` is True."""
        raise NotImplementedError

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return how unlike the training data each example is, higher is stranger.

        Args:
            average: the averaged values (B, ...).
            total: the total uncertainty.
        """
        return total.flatten(1).sum(1) if total.dim() > 1 else total

    def read_output(self, output: Any) -> Any:
        """Return the tensor in what a network returned: itself, ["out"], ["logits"] or .logits."""
        return read_output(output)

    def check_batch(self, x: Any, y: Any) -> None:
        """Refuse a batch that is wrong in a way that can be told before the network has run."""


class Categorical(Likelihood):
    r"""Classes: the softmax of the outputs.

    .. math:: NLL = - w_y \log \mathrm{softmax}(o)_y

    Targets are labels, of any integer type, or soft labels: a probability for every class, whose NLL is the
    expectation, :math:`- \sum_c y_c w_c \log \mathrm{softmax}(o)_c`. In a mean an example counts with the
    weight of its label; an ignored one, or a soft label of zeros, does not count.

    Args:
        ignore_index: the label that does not count (void pixels, padding).
        class_weights: one number of at least 0 per class (see ``class_weights``).
        dim: where the outputs have their classes: 1, right after the batch, (B, C, ...) with labels
            (B, ...); or -1, last, as in sequences, (B, T, C) with labels (B, T). Probabilities of a
            prediction have the same layout.

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
    class_weights: Tensor | None

    def __init__(
        self,
        ignore_index: int = -100,
        class_weights: Tensor | Sequence[float] | None = None,
        dim: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.dim = self.class_dim = _channel_dim(dim)
        self.cellwise = dim == 1
        self.register_buffer("class_weights", _checked_weights(class_weights), persistent=False)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = self.check_targets(outputs, targets)
        return self._cross_entropy(outputs, targets, "none")

    def mean_nll(
        self, outputs: Tensor, targets: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        targets = self.check_targets(outputs, targets)
        soft = targets.is_floating_point()
        if row_weights is not None or soft or self.task != "classification":
            return super().mean_nll(outputs, targets, row_weights)
        nll = self._cross_entropy(outputs, targets, "sum")  # one kernel
        return weighted_mean(nll, self.weights(targets).to(nll.dtype).sum())

    def weights(self, targets: Tensor) -> Tensor:
        """Return how much each cell counts, (n, ...): its label's class weight, and 0 if it is ignored."""
        if targets.is_floating_point():
            soft = at_least_float32(targets if self.dim == 1 else targets.movedim(-1, 1))
            if self.class_weights is not None:
                soft = soft * self.class_weights.to(soft).view(-1, *(1,) * (soft.dim() - 2))
            return soft.sum(1)
        counted = targets != self.ignore_index
        if self.class_weights is None:
            return counted.float()
        labels = targets.masked_fill(~counted, 0).long()
        return counted.to(self.class_weights.dtype) * self.class_weights[labels]

    def summary(self, outputs: Tensor) -> Summary:
        """Return probabilities, of the shape of the outputs (S, B, C, ...), and entropies (S, B, ...)."""
        self.check_outputs(outputs.shape[1:])
        axis = member_axis(self.dim)
        probs = at_least_float32(outputs).softmax(axis)
        return Summary(probs, entropy(probs, axis))

    def total(self, average: Tensor) -> Tensor:
        return entropy(average, self.dim)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return 1 - the largest probability, (B, ...)."""
        return 1 - average.amax(self.dim)

    def check_batch(self, x: Any, y: Any) -> None:
        require_tensor(y)
        if not isinstance(x, Tensor) or x.is_floating_point() or self.dim != 1:
            return
        if y.is_floating_point() and x.dim() < y.dim():
            raise ValueError(
                f"loss(x, y) got {x.dtype} inputs of shape {tuple(x.shape)} and {y.dtype} targets of "
                f"shape {tuple(y.shape)}: they seem to be swapped. Fix: loss(inputs, labels)."
            )

    def check_outputs(self, shape: Sequence[int]) -> None:
        """Refuse outputs, of so many rows, that have no classes, or other classes than the weights."""
        layout = "(batch, classes, ...)" if self.dim == 1 else "(batch, ..., classes)"
        if len(shape) < 2 or shape[self.dim] < 2:
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

        Values are not looked at: that would wait for a GPU.
        """
        require_tensor(targets)
        self.check_outputs(outputs.shape)
        shape = list(outputs.shape)
        shape.pop(self.dim)
        if targets.is_floating_point():
            if targets.shape == outputs.shape:
                return targets
        elif list(targets.shape) == shape:
            return targets.long()
        hint = ""
        if self.dim == 1 and outputs.dim() > 2 and targets.shape == outputs.shape[:-1]:
            hint = (
                " Classes come second here, right after the batch. Fix: outputs.movedim(-1, 1), or "
                "likelihood=likelihoods.Categorical(dim=-1) if they are last."
            )
        raise ValueError(
            f"{self.task} with outputs of shape {tuple(outputs.shape)} needs integer labels of shape "
            f"{tuple(shape)}, or floating-point probabilities of shape {tuple(outputs.shape)}; got "
            f"{targets.dtype} of shape {tuple(targets.shape)}.{hint}"
        )

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        outputs = at_least_float32(outputs)  # a sum over pixels is beyond float16
        if self.dim != 1:
            outputs = outputs.movedim(-1, 1)
        weight = None if self.class_weights is None else self.class_weights.to(outputs)
        if targets.is_floating_point():
            targets = targets.to(outputs.dtype)
            if self.dim != 1:
                targets = targets.movedim(-1, 1)
            return F.cross_entropy(outputs, targets, weight, reduction=reduction)
        try:
            return F.cross_entropy(
                outputs, targets, weight, ignore_index=self.ignore_index, reduction=reduction
            )
        except IndexError as error:  # a CPU looks at every label anyway
            raise self._wrong_label(outputs.shape[1], targets) from error

    def _wrong_label(self, classes: int, targets: Tensor) -> IndexError:
        wrong = targets[(targets != self.ignore_index) & ((targets < 0) | (targets >= classes))]
        return IndexError(
            f"labels are 0 to {classes - 1}, for the network's {classes} outputs, or ignore_index="
            f"{self.ignore_index}; got {wrong.unique().tolist()[:5]}. Fix: as many outputs as classes; "
            "for a label that does not count, build(..., ignore_index=that label)."
        )


class Segmentation(Categorical):
    """Classes pixel by pixel: outputs (B, C, H, W), labels (B, H, W). Pixels count equally in a mean.

    Example:
        >>> likelihood = Segmentation(ignore_index=255)
        >>> likelihood.nll(torch.zeros(2, 5, 4, 4), torch.full((2, 4, 4), 255)).sum().item()
        0.0
    """

    task = "segmentation"


class Gaussian(Likelihood):
    r"""Real numbers: independent normal distributions, one per target.

    .. math:: NLL = \tfrac12 \sum_k \left( \log 2 \pi v_k + (y_k - m_k)^2 / v_k \right)

    Args:
        variance: "softplus": the outputs are 2K, means and then raw variances, v = softplus(raw) + 1e-6.
            "log": the same with v = exp(raw) + 1e-6. A number: a fixed variance, the network has one output
            per target (1.0 is half the squared error, up to a constant).
        dim: where the outputs have these numbers: 1, right after the batch, (B, 2K, ...) with targets
            (B, K, ...), maps included; or -1, last, (B, T, 2K) with targets (B, T, K). The targets of K = 1
            may leave the axis out.

    Example:
        >>> mean, variance = Gaussian().split(torch.zeros(5, 2))
        >>> tuple(mean.shape), round(variance[0].item(), 4)
        ((5, 1), 0.6931)
        >>> Gaussian(variance=1.0).nll(torch.zeros(1, 3), torch.ones(1, 3))  # 3/2 (log 2 pi + 1)
        tensor([4.2568])
    """

    task = "regression"
    quantity = "mean"

    def __init__(self, variance: Literal["softplus", "log"] | float = "softplus", dim: int = 1):
        super().__init__()
        fixed = isinstance(variance, int | float) and not isinstance(variance, bool)
        if variance not in ("softplus", "log") and not (fixed and 0 < variance < math.inf):
            raise ValueError(
                f"variance={variance!r}: expected 'softplus', 'log', or a positive number for a fixed "
                "variance and one output per target."
            )
        self.variance = variance
        self.dim = _channel_dim(dim)
        self.cellwise = dim == 1

    def split(self, outputs: Tensor, members: bool = False) -> tuple[Tensor, Tensor]:
        """Return means and variances, K each, of outputs (n, 2K, ...), or (S, n, 2K, ...) of members."""
        axis = member_axis(self.dim) if members else self.dim
        values = at_least_float32(outputs)
        if isinstance(self.variance, int | float):
            return values, torch.full_like(values, self.variance)
        if outputs.shape[axis] % 2:
            raise ValueError(
                f"a regression network has two outputs per target (mean, variance); got "
                f"{outputs.shape[axis]} outputs. Fix: double the width of its last layer, or, for one "
                "output per target, likelihood=likelihoods.Gaussian(variance=1.0)."
            )
        mean, raw = values.chunk(2, axis)
        return mean, (F.softplus(raw) if self.variance == "softplus" else raw.exp()) + MIN_VARIANCE

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.check_outputs(outputs.shape)
        mean, variance = self.split(outputs)
        squared = (self.check_targets(outputs, mean, targets) - mean).square()
        each = math.log(2 * math.pi) + variance.log() + squared / variance
        return 0.5 * each.sum(self.dim)

    def summary(self, outputs: Tensor) -> Summary:
        """Return means and variances (S, B, K, ...)."""
        self.check_outputs(outputs.shape[1:])
        mean, variance = self.split(outputs, members=True)
        return Summary(mean, variance, variance)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return the total variance, summed over the K targets, (B, ...)."""
        return total.sum(self.dim)

    def check_batch(self, x: Any, y: Any) -> None:
        require_tensor(y)

    def check_outputs(self, shape: Sequence[int]) -> None:
        """Refuse outputs, of so many rows, without an axis for the targets."""
        if len(shape) < 2:
            raise ValueError(
                f"regression needs outputs (batch, {self._width()}, ...); the network gave "
                f"{tuple(shape)}. Fix: output.unsqueeze(1), for one number per example."
            )

    def check_targets(self, outputs: Tensor, mean: Tensor, targets: Any) -> Tensor:
        """Return the targets in the shape of the means; refuse a shape or type that does not fit."""
        require_tensor(targets)
        shapes = [list(mean.shape)]
        if mean.shape[self.dim] == 1:
            shapes.append([n for i, n in enumerate(mean.shape) if i != self.dim % mean.dim()])
        if list(targets.shape) not in shapes or not targets.is_floating_point():
            raise ValueError(
                f"regression with outputs of shape {tuple(outputs.shape)}, {self._width()}, needs "
                f"floating-point targets of shape {tuple(mean.shape)}; got {targets.dtype} of shape "
                f"{tuple(targets.shape)}."
            )
        return targets.reshape(mean.shape)

    def _width(self) -> str:
        return "2 per target" if isinstance(self.variance, str) else "1 per target"


class MultiLabel(Likelihood):
    r"""Labels that do not exclude each other: K independent yes-or-no questions.

    .. math:: NLL = - \sum_k y_k \log p_k + (1 - y_k) \log (1 - p_k), \quad p = \mathrm{sigmoid}(o)

    Outputs and targets are (B, K, ...); targets are zeros and ones, or probabilities. Probabilities and
    uncertainties (binary entropies, in nats) of a prediction have the same shape.

    Args:
        dim: where the outputs have the labels: 1, right after the batch, or -1, last.

    Example:
        >>> MultiLabel().nll(torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))  # 3 log 2
        tensor([2.0794])
    """

    task = "multilabel"
    quantity = "probs"
    information = True

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = _channel_dim(dim)
        self.cellwise = dim == 1

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        require_tensor(targets)
        if outputs.dim() < 2 or targets.shape != outputs.shape:
            raise ValueError(
                f"multilabel needs outputs and targets of one shape, (batch, labels, ...), a zero or one "
                f"for each label; got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}."
            )
        outputs = at_least_float32(outputs)
        each = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        )
        return each.sum(self.dim)

    def summary(self, outputs: Tensor) -> Summary:
        """Return probabilities and their binary entropies, both (S, B, K, ...)."""
        probs = at_least_float32(outputs).sigmoid()
        return Summary(probs, self.total(probs))

    def total(self, average: Tensor) -> Tensor:
        return torch.special.entr(average) + torch.special.entr(1 - average)

    def ood_score(self, average: Tensor, total: Tensor) -> Tensor:
        """Return the entropy, summed over the labels, (B, ...)."""
        return total.sum(self.dim)

    def check_batch(self, x: Any, y: Any) -> None:
        require_tensor(y)


class MultiHead(Likelihood):
    """Several heads, with a likelihood each; ``build(net, likelihood={...})`` makes one of a mapping.

    Outputs and targets are mappings with the same names; ``predict`` returns a ``Prediction`` per name. The
    NLL is the sum over the heads, whose parts ``loss`` returns as "nll/<name>".

    Args:
        heads: a likelihood (or an object of the user, see ``Custom``) by name.

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
                f"likelihoods of several heads are given by name; got {list(heads)}. Fix: "
                "likelihood={'kind': likelihoods.Categorical(), 'size': likelihoods.Gaussian()}."
            )
        self.names = tuple(heads)
        # A list: module names may not contain dots.
        self.parts = nn.ModuleList(as_likelihood(head) for head in heads.values())

    @property
    def heads(self) -> dict[str, Likelihood]:
        """The likelihoods by name."""
        return dict(zip(self.names, self.parts, strict=True))  # type: ignore[arg-type]

    def nll(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Any]) -> Tensor:
        """Return the sum over the heads, (n,); a row's cells are summed."""
        rows = [head.nll(outputs[name], targets[name]) for name, head in self.heads.items()]
        return torch.stack([row.flatten(1).sum(1) if row.dim() > 1 else row for row in rows]).sum(0)

    def mean_nll(
        self,
        outputs: Mapping[str, Tensor],
        targets: Mapping[str, Any],
        row_weights: Tensor | None = None,
    ) -> Tensor:
        return self.nll_terms(outputs, targets, row_weights)["nll"]

    def nll_terms(
        self,
        outputs: Mapping[str, Tensor],
        targets: Mapping[str, Any],
        row_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        parts = {
            f"nll/{name}": head.mean_nll(outputs[name], targets[name], row_weights)
            for name, head in self.heads.items()
        }
        return {"nll": torch.stack(list(parts.values())).sum(), **parts}

    def read_output(self, output: Any) -> dict[str, Tensor]:
        """Return the tensors of the heads, by name."""
        if not isinstance(output, Mapping) or not set(self.names) <= set(output):
            given = f"keys {list(output)}" if isinstance(output, Mapping) else type(output).__name__
            entries = ", ".join(f"{name!r}: output[{i}]" for i, name in enumerate(self.names))
            raise TypeError(
                f"the network returned {given}; expected a mapping with {list(self.names)}, the names of "
                f"the likelihoods. Fix: build(..., readout=lambda output: {{{entries}}})."
            )
        return {name: head.read_output(output[name]) for name, head in self.heads.items()}

    def check_batch(self, x: Any, y: Any) -> None:
        if not isinstance(y, Mapping) or not set(self.names) <= set(y):
            given = f"keys {list(y)}" if isinstance(y, Mapping) else type(y).__name__
            raise TypeError(
                f"targets are a mapping with {list(self.names)}, one entry per head; got {given}."
            )
        for name, head in self.heads.items():
            head.check_batch(x, y[name])


class UserLikelihood(Protocol):
    """What ``build(net, likelihood=...)`` takes besides the likelihoods of this file; see ``Custom``."""

    def nll(self, outputs: Any, targets: Any, /) -> Tensor: ...

    def summary(self, outputs: Any, /) -> Any: ...


class Custom(Likelihood):
    """A likelihood of the user: any object with ``nll`` and ``summary``; ``build`` wraps it by itself.

    - ``nll(outputs, targets)`` returns the negative log-likelihood of every row, (n,), or cell, (n, ...).
    - ``summary(outputs)`` takes rows (n, ...) as well and returns ``values`` (n, ...), which are averaged
      over members; or ``(values, aleatoric)``, with the variance of the data around each value, in the
      shape of the values (0 if not given). The epistemic part is the variance of the values over members.

    An ``nn.Module`` may have parameters: they are trained and saved with the model. A likelihood whose
    uncertainty is an entropy, or that ignores targets, is a subclass of ``Likelihood``.

    Example:
        >>> class Poisson:
        ...     def nll(self, outputs, targets):
        ...         return F.poisson_nll_loss(outputs[:, 0], targets, reduction="none")
        ...
        ...     def summary(self, outputs):
        ...         rate = outputs[:, 0].exp()
        ...         return rate, rate  # the mean, and its variance
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

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        cells = at_least_float32(self.user.nll(outputs, targets))
        rows = _first_dim(outputs)
        if cells.dim() == 0 or cells.shape[0] != rows:
            raise ValueError(
                f"{type(self.user).__name__}.nll returned a tensor of shape {tuple(cells.shape)} for "
                f"{rows} rows; expected ({rows},), one number per row. Fix: reduction='none'."
            )
        return cells

    def summary(self, outputs: Tensor) -> Summary:
        found = self.user.summary(outputs.flatten(0, 1))
        parts = [
            at_least_float32(part) for part in (found if isinstance(found, tuple) else (found,))
        ]
        values = parts[0]
        aleatoric = parts[1] if len(parts) > 1 else torch.zeros_like(values)
        rows = outputs.shape[0] * outputs.shape[1]
        if values.shape[:1] != (rows,) or aleatoric.shape != values.shape:
            raise ValueError(
                f"{type(self.user).__name__}.summary returned shapes "
                f"{[tuple(part.shape) for part in parts]} for {rows} rows; expected values ({rows}, ...), "
                "or (values, aleatoric) of one shape."
            )
        shape = outputs.shape[:2]
        values, aleatoric = values.unflatten(0, shape), aleatoric.unflatten(0, shape)
        return Summary(values, aleatoric, aleatoric if len(parts) > 1 else None)


def as_likelihood(
    likelihood: "Likelihood | UserLikelihood | Mapping[str, Any] | None" = None,
    task: str = "classification",
    ignore_index: int = -100,
    class_weights: Tensor | Sequence[float] | None = None,
) -> Likelihood:
    """Return the likelihood that ``build`` was asked for.

    Args:
        likelihood: one of this file, a mapping of them, or the user's object; None takes the task's.
        task: "classification", "segmentation", "regression" or "multilabel".
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
    if likelihood is None:
        if task in ("classification", "segmentation"):
            kind = Categorical if task == "classification" else Segmentation
            return kind(ignore_index, class_weights)
        if class_weights is not None:
            raise ValueError(f"class_weights are for labels; task={task!r} has none.")
        return Gaussian() if task == "regression" else MultiLabel()
    if class_weights is not None or ignore_index != -100:
        raise ValueError(
            "ignore_index and class_weights belong to the likelihood that is given. Fix: "
            "likelihood=likelihoods.Categorical(ignore_index=..., class_weights=...)."
        )
    if isinstance(likelihood, Mapping):
        return MultiHead(likelihood)
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, type) or not all(
        callable(getattr(likelihood, name, None)) for name in ("nll", "summary")
    ):
        given = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
        raise TypeError(
            f"likelihood={given}: expected an object of lpbnn.likelihoods, such as "
            "likelihoods.Gaussian(), a mapping of them, or an object with nll(outputs, targets) and "
            "summary(outputs)."
        )
    return Custom(likelihood)


def class_weights(counts: Sequence[int], kind: Weighting) -> list[float]:
    r"""Return one weight per class from its number of labels, so that rare classes count more.

    With the shares :math:`p_c = n_c / \sum_k n_k`:

    - "median": :math:`w_c = \mathrm{median}_k(p_k) / p_c` (Eigen and Fergus, 2015), over the classes that
      have labels; a class without labels weighs 0
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


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32, and anything else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def entropy(probs: Tensor, dim: int = 1) -> Tensor:
    r"""Return H(p) = -sum_c p_c log p_c in nats, with 0 log 0 = 0.

    Example:
        >>> round(entropy(torch.tensor([[0.5, 0.5]])).item(), 4)
        0.6931
    """
    return torch.special.entr(probs).sum(dim)


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight, and 0 for a batch in which nothing counts: a mean over nothing is NaN."""
    return total / weight.clamp_min(torch.finfo(total.dtype).tiny)


def member_axis(dim: int) -> int:
    """Return where an axis of rows (n, ...) is in outputs of members (S, n, ...)."""
    return dim + 1 if dim > 0 else dim


def member_rows(
    outputs: Any, targets: Any, row_weights: Tensor | None = None
) -> tuple[Any, Any, Tensor | None]:
    """Return member outputs (S, B, ...) as rows (S * B, ...), with targets and weights of every row.

    Example:
        >>> rows, targets, _ = member_rows(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]))
        >>> tuple(rows.shape), targets.tolist()
        ((6, 4), [0, 1, 2, 0, 1, 2])
    """
    members = _first_dim(outputs)

    def repeat(y: Tensor) -> Tensor:
        return y.repeat(members, *(1,) * (y.dim() - 1)) if members > 1 else y

    rows = tree_map_only(Tensor, lambda each: each.flatten(0, 1), outputs)
    weights = None if row_weights is None else repeat(row_weights)
    return rows, tree_map_only(Tensor, repeat, targets), weights


def read_output(output: Any) -> Tensor:
    """Return the tensor in what a network returned: itself, ["out"], ["logits"] or .logits."""
    if isinstance(output, Tensor):
        return output
    found = [output.get(key) for key in ("out", "logits")] if isinstance(output, Mapping) else []
    for tensor in (*found, getattr(output, "logits", None)):
        if isinstance(tensor, Tensor):
            return tensor
    given, fix = type(output).__name__, "output[0]"
    if isinstance(output, Mapping):
        given = f"a mapping with the keys {list(output)}"
        keys = [key for key, value in output.items() if isinstance(value, Tensor)]
        fix = f"output[{next(iter(keys or output), 'key')!r}]"
    elif not isinstance(output, tuple | list):
        fix = "the tensor in output"
    raise TypeError(
        f"the network returned {given}; expected a tensor, or a mapping with 'out' or 'logits'. "
        f"Fix: build(..., readout=lambda output: {fix})."
    )


def require_tensor(targets: object) -> None:
    """Refuse targets that are not a tensor, a list of labels for example."""
    if not isinstance(targets, Tensor):
        given = type(targets).__name__
        raise TypeError(f"targets are a tensor; got {given}. Fix: torch.as_tensor(y).")


def require_targets(y: Any, batch: int) -> None:
    """Refuse more or fewer targets than examples, in a tensor or a mapping of tensors."""
    for leaf in tree_leaves(y):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (batch,):
            raise ValueError(
                f"the loss takes {batch} targets here, one for each example; got {batch} examples and "
                f"targets of shape {tuple(leaf.shape)}. Fix: targets whose first dimension is {batch}."
            )


def _first_dim(outputs: Any) -> int:
    return outputs.shape[0] if isinstance(outputs, Tensor) else tree_leaves(outputs)[0].shape[0]


def _per_cell(row_weights: Tensor, cells: Tensor) -> Tensor:
    """Return weights of rows (n,) in a shape that multiplies cells (n, ...)."""
    if row_weights.shape != cells.shape[:1]:
        raise ValueError(
            f"weights of examples have shape ({cells.shape[0]},), one number for each; got "
            f"{tuple(row_weights.shape)}."
        )
    return row_weights.to(cells.dtype).view(-1, *(1,) * (cells.dim() - 1))


def _channel_dim(dim: int) -> int:
    if dim not in (1, -1):
        raise ValueError(f"dim={dim!r}: expected 1, right after the batch, or -1, the last.")
    return dim


def _checked_weights(given: Tensor | Sequence[float] | None) -> Tensor | None:
    if given is None:
        return None
    weights = torch.as_tensor(given, dtype=torch.float32)
    if weights.dim() != 1 or not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(
            f"class_weights={weights.tolist()}: expected one finite number of at least 0 per class."
        )
    return weights
