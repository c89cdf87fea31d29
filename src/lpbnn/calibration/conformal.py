r"""Split conformal prediction: sets and intervals that contain the truth as often as asked for.

With scores $s_1, \dots, s_n$ of held-out examples, and q the $\lceil (n + 1) \ell \rceil$-th
smallest of them, the set of all y with $s(x, y) \le q$ contains the label of a further example with
a probability of at least the level $\ell$, and at most $\ell + 1 / (n + 1)$ if no scores are
equal. This holds for every model and every n, if the held-out examples and those predicted are
exchangeable: not under shift, and not for the pixels of one image. It is an average over examples;
``by_class`` gives it for every class. A set may be empty: then no class fits as the held-out labels did.

- ``lac``: $1 - p_y$: the smallest sets on average (Sadinle et al., 2019)
- ``aps``: the probability of y and of all classes before it, in descending order; larger sets for examples
  that are harder (Romano et al., 2020)
- ``raps``: the same, plus ``penalty`` for every place of y beyond ``free_classes``: fewer very large sets
  (Angelopoulos et al., 2021)
- ``absolute``: $|y - m|$: intervals of one width
- ``normalised``: $|y - m| / \sqrt{v}$, v the total variance: wider where the model is less sure
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lpbnn.kernels.autograd import is_traced
from lpbnn.likelihoods import require_tensor
from lpbnn.predict import Prediction

SetScore = Literal["lac", "aps", "raps"]
IntervalScore = Literal["absolute", "normalised"]


@dataclass(frozen=True, eq=False)
class Conformal:
    """Scores of held-out examples; ``p.sets(conformal, level)`` and ``p.interval(level, conformal)`` use them.

    Args:
        method: the score.
        scores: sorted scores (n, ...), float64; for class-conditional sets one (n_c,) per class.
        penalty: of raps.
        free_classes: of raps.
        randomised: True if a random part of a class's own probability counts.
    """

    method: str
    scores: tuple[Tensor, ...]
    penalty: float = 0.0
    free_classes: int = 0
    randomised: bool = False

    def __repr__(self) -> str:
        counts = [len(scores) for scores in self.scores]
        return f"Conformal({self.method}, held-out examples: {' + '.join(map(str, counts))})"

    def thresholds(self, level: float) -> Tensor:
        """Return the quantile of the scores at a level: (1,), (C,) by class, or (1, M) for M numbers."""
        names = (
            [""] if len(self.scores) == 1 else [f" of class {c}" for c in range(len(self.scores))]
        )
        found = [
            conformal_quantile(scores, level, name)
            for scores, name in zip(self.scores, names, strict=True)
        ]
        return torch.stack(found)

    def sets(self, prediction: Prediction, level: float = 0.9) -> Tensor:
        """Return the prediction sets, see ``Prediction.sets``."""
        if self.method not in get_args(SetScore):
            raise TypeError(
                f"these are scores of numbers ({self.method}). Fix: interval(level, conformal)."
            )
        axis, probs = _class_rows(prediction)
        scores = self.class_scores(probs.flatten(0, -2))
        thresholds = self.thresholds(level).to(scores.device)
        if len(thresholds) not in (1, probs.shape[-1]):
            raise ValueError(
                f"the conformal scores are of {len(thresholds)} classes and the prediction has "
                f"{probs.shape[-1]}. Fix: fit_conformal with predictions of this model."
            )
        return (scores <= thresholds).view(probs.shape).movedim(-1, axis)

    def class_scores(self, probs: Tensor) -> Tensor:
        """Return the score of every class, (N, C), from probabilities (N, C)."""
        uniform = torch.rand(len(probs), 1, dtype=torch.float64) if self.randomised else None
        return class_scores(probs, self.method, self.penalty, self.free_classes, uniform)

    def interval(self, prediction: Prediction, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds, see ``Prediction.interval``."""
        if self.method not in get_args(IntervalScore):
            raise TypeError(
                f"these are scores of classes ({self.method}). Fix: sets(conformal, level)."
            )
        mean = prediction.mean
        width = self.thresholds(level).squeeze(0).to(mean)
        if mean[0].numel() != len(width):
            raise ValueError(
                f"the conformal scores are of {len(width)} numbers per example and the prediction has "
                f"{mean[0].numel()}. Fix: fit_conformal with predictions of this model."
            )
        half = width.view(mean.shape[1:]) * _residual_scale(prediction, self.method)
        return mean - half, mean + half


def fit_conformal(
    prediction: Prediction,
    targets: Tensor,
    method: SetScore | IntervalScore | None = None,
    *,
    by_class: bool = False,
    randomised: bool = False,
    penalty: float = 0.01,
    free_classes: int = 5,
    ignore_index: int = -100,
) -> Conformal:
    """Compute the scores of held-out examples, from which sets and intervals of any level follow.

    The held-out examples should not be those that a scaling or a noise scale was fitted on.

    Args:
        prediction: of the held-out inputs.
        targets: labels (B, ...), or numbers in the shape of ``prediction.mean``.
        method: the score (see the head of this file); by default "lac", or "normalised" for numbers.
        by_class: a threshold for every class, so that each is covered as often as asked for. The sets of
            rare classes need as many held-out examples of them as all sets do otherwise.
        randomised: aps and raps count a random part of the class's own probability, as in the papers: the
            sets are smaller, and differ from call to call unless ``torch.manual_seed`` goes before.
        penalty: of raps, for every further class.
        free_classes: of raps, the places without penalty.
        ignore_index: the label that does not count.

    Example:
        >>> import lpbnn
        >>> model = lpbnn.build(torch.nn.Linear(4, 3), "ensemble", members=4)
        >>> x, y = torch.randn(200, 4), torch.randint(0, 3, (200,))
        >>> conformal = fit_conformal(lpbnn.predict(model, x), y)
        >>> sets = lpbnn.predict(model, torch.randn(5, 4)).sets(conformal, level=0.9)
        >>> tuple(sets.shape), sets.dtype, conformal
        ((5, 3), torch.bool, Conformal(lac, held-out examples: 200))
    """
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, got {type(prediction).__name__}. Fix: fit_conformal(lpbnn.predict(model, "
            "x), y)."
        )
    require_tensor(targets)
    numbers = prediction.quantity == "mean"
    method = method or ("normalised" if numbers else "lac")
    known = get_args(IntervalScore if numbers else SetScore)
    if method not in known:
        raise ValueError(
            f"method={method!r}: for {prediction.task} choose one of {', '.join(known)}."
        )
    if not 0 <= penalty < math.inf or not isinstance(free_classes, int) or free_classes < 0:
        raise ValueError(
            f"penalty={penalty!r}, free_classes={free_classes!r}: expected a finite number and an integer, "
            "both at least 0."
        )
    if numbers:
        if by_class or randomised:
            raise ValueError("by_class and randomised are for classes. Fix: leave them out.")
        return Conformal(method, (_residuals(prediction, targets, method),))
    _, probs = _class_rows(prediction)
    labels = targets.to(probs.device)
    if labels.is_floating_point() or labels.shape != probs.shape[:-1]:
        raise ValueError(
            f"expected integer labels of shape {tuple(probs.shape[:-1])}; got {targets.dtype} of shape "
            f"{tuple(targets.shape)}."
        )
    counted = labels != ignore_index
    probs, labels = probs[counted], labels[counted].long()
    classes = probs.shape[-1]
    if len(labels) == 0 or not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, at least one of them; got "
            f"{labels.unique().tolist()[:10]}. Fix: ignore_index= for labels that do not count."
        )
    rule = Conformal(method, (), penalty, free_classes, randomised)
    own = rule.class_scores(probs).gather(1, labels.unsqueeze(1)).squeeze(1)
    groups = [own[labels == c] for c in range(classes)] if by_class else [own]
    return replace(rule, scores=tuple(group.sort().values for group in groups))


def class_scores(
    probs: Tensor,
    method: str,
    penalty: float = 0.0,
    free_classes: int = 0,
    uniform: Tensor | None = None,
) -> Tensor:
    """Return the score of every class, (N, C), float64.

    Args:
        probs: (N, C).
        method: "lac", "aps" or "raps".
        penalty: of raps.
        free_classes: of raps.
        uniform: (N, 1), the part of a class's own probability that does not count; None is 0.

    Example:
        >>> class_scores(torch.tensor([[0.25, 0.5, 0.25]]), "aps")
        tensor([[0.7500, 0.5000, 1.0000]], dtype=torch.float64)
    """
    probs = probs.double()
    if method == "lac":
        return 1 - probs
    if is_traced(probs):  # ONNX has no stable sort; of equal numbers its TopK takes the first first
        ordered, order = probs.topk(probs.shape[1], dim=1)
    else:
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
    scores = ordered.cumsum(1)
    if uniform is not None:
        scores = scores - uniform.to(scores) * ordered
    if method == "raps":
        place = torch.arange(1, probs.shape[1] + 1).to(probs)
        scores = scores + penalty * (place - free_classes).clamp_min(0)
    return torch.empty_like(scores).scatter_(1, order, scores)


def conformal_quantile(scores: Tensor, level: float, name: str = "") -> Tensor:
    r"""Return the $\lceil (n + 1) \ell \rceil$-th smallest of sorted scores (n, ...).

    Example:
        >>> conformal_quantile(torch.arange(1, 100).double(), 0.9)
        tensor(90., dtype=torch.float64)
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level!r}: expected a share between 0 and 1, such as 0.9.")
    place = math.ceil((len(scores) + 1) * level - 1e-9)  # 0.9 * 10 is a little more than 9
    if place > len(scores):
        needed = math.ceil(level / (1 - level) - 1e-9)
        raise ValueError(
            f"a level of {level} needs at least {needed} held-out examples{name}; there are "
            f"{len(scores)}. Fix: more of them, or a lower level{', or by_class=False' if name else ''}."
        )
    return scores[place - 1]


def _class_rows(prediction: Prediction) -> tuple[int, Tensor]:
    """Return the axis of the classes, and the probabilities with the classes last."""
    axis = prediction.class_dim
    if prediction.quantity != "probs" or axis is None:
        raise TypeError(
            f"prediction sets are for classes; this is a {prediction.task} prediction. Fix: for numbers, "
            "interval(level, conformal); several labels are a set already (labels)."
        )
    _require_finite(prediction.probs, "probabilities")
    return axis, prediction.probs.movedim(axis, -1)


def _residuals(prediction: Prediction, targets: Tensor, method: str) -> Tensor:
    """Return sorted residuals (n, M) of the M numbers of an example, each for itself."""
    mean = prediction.mean
    if targets.numel() != mean.numel() or len(targets) != len(mean):
        raise ValueError(
            f"expected targets of shape {tuple(mean.shape)}; got {tuple(targets.shape)}."
        )
    targets = targets.to(mean).reshape(mean.shape)
    _require_finite(targets, "targets")
    residuals = (targets - mean).abs() / _residual_scale(prediction, method)
    _require_finite(residuals, "residuals")
    return residuals.flatten(1).double().sort(0).values


def _residual_scale(prediction: Prediction, method: str) -> Tensor:
    if method == "absolute":
        return torch.ones_like(prediction.mean)
    total = prediction.total
    if not is_traced(total) and not bool((total > 0).all()):
        raise ValueError(
            "some total variances are zero or NaN, so residuals cannot be divided by them. Fix: "
            "method='absolute'."
        )
    return total.sqrt()


def _require_finite(values: Tensor, name: str) -> None:
    if not is_traced(values) and not bool(values.isfinite().all()):
        raise ValueError(
            f"{int((~values.isfinite()).sum())} {name} are not finite. Fix: check the data, and the "
            "weights of the model."
        )
