r"""EDL: the network's outputs are evidence for a Dirichlet over the class probabilities.

.. math::
    \alpha = e(f(x)) + 1, \quad S = \sum_k \alpha_k, \quad p_k = \alpha_k / S, \quad u = K / S

    L = \overline{\sum_k (y_k - p_k)^2 + \frac{p_k (1 - p_k)}{S + 1}}
        + \lambda_t \, \overline{KL(Dir(\tilde\alpha) \| Dir(1))}, \quad
    \tilde\alpha = y + (1 - y) \odot \alpha

The first term is the expected squared error under the Dirichlet; the second takes back the evidence
for wrong classes, and its weight :math:`\lambda_t = \lambda \min(1, \text{epoch} / 10)` starts at zero.
K / S, the vacuity, is 1 where the network has no evidence at all.

``full_kl`` is :math:`\lambda`: 1 in the paper, by default :math:`1 / K^2`. A first bit of evidence e for a
class that is right with probability q gains about 2 q e / K of the error and costs
:math:`\lambda (1 - q) (\pi^2 / 12) e^2` of KL: evidence settles near :math:`q / ((1 - q) \lambda K)`, while
a probability other than 1 / K needs evidence of the order of K. With K = 10 and the paper's weight a
network that is right 9 times of 10 does best to say 37 %, and one that is right half the time 11 %. So
little evidence leaves hardly a gradient, and on CIFAR-10 training may stop there (docs/lab-notes.md).
With :math:`1 / K^2` the two say 89 % and 51 %, and much the same for any K.

``evidence`` is exp by default, as the authors' code recommends; relu, of the paper's first example, leaves
an example without a gradient where all its outputs are negative.

Sensoy, Kaplan, Kandemir: Evidential deep learning to quantify classification uncertainty, NeurIPS
2018.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.likelihoods import check_batch, check_outputs, check_targets
from lpbnn.model import Model, Terms, as_call, batch_size, total
from lpbnn.rank_one.factors import at_least_float32, device_of

Evidence = Literal["exp", "softplus", "relu"]
Score = Literal["vacuity", "confidence"]

EVIDENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda outputs: outputs.clamp(-10, 10).exp(),  # as published: e^10 is evidence enough
    "softplus": F.softplus,
    "relu": F.relu,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of edl: evidence, the weight of the KL, and the score; the file's head says why."""

    num_data: int | None = (
        None  # not needed: the KL is a mean; taken so that methods can be swapped
    )
    members: int = 1
    evidence: Evidence = "exp"
    anneal: float = 10  # epochs over which the KL grows to its full weight; 0: at once
    # that weight; None: 1 / K^2. The paper's is 1
    full_kl: float | None = dataclasses.field(default=None, metadata={"then": 1.0})
    score: Score = "vacuity"  # K / S; "confidence": 1 - max p, as for the other methods

    def __post_init__(self) -> None:
        if self.members != 1:
            raise ValueError(
                f"members={self.members!r}: edl is one network; use 'ensemble' for more."
            )
        for name, choices in (("evidence", EVIDENCE), ("score", get_args(Score))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not known; choose one of "
                    f"{', '.join(choices)}."
                )
        if self.anneal < 0:
            raise ValueError(f"anneal={self.anneal!r}: expected a number of epochs of at least 0.")
        if self.full_kl is not None and not self.full_kl >= 0:
            raise ValueError(f"full_kl={self.full_kl!r}: expected a number of at least 0, or None.")


class Evidential(Model):
    """One network whose outputs are evidence, class by class (pixel by pixel in segmentation).

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Evidential(net, Config())
        >>> terms = model.loss(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        >>> list(terms)
        ['loss', 'risk', 'kl']
        >>> tuple(model.strangeness(model(torch.randn(5, 4))).shape)  # K / S
        (1, 5)
    """

    stochastic = False
    kl_weight: Tensor  # grows to 1: the share of the full weight

    def __init__(self, net: nn.Module, config: Config, **options: Any) -> None:
        super().__init__(net, **options)
        if self.task == "regression":
            raise ValueError(
                "edl has no task='regression': a Dirichlet is a distribution over classes. It has "
                "'classification' and 'segmentation'. Fix: choose another method, such as 'lpbnn'."
            )
        self.evidence = config.evidence
        self.anneal, self.full_kl = config.anneal, config.full_kl
        self.score_by = config.score
        # In a loop that never calls before_epoch: the full KL.
        self.register_buffer("kl_weight", torch.ones((), device=device_of(net)), persistent=False)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        batch_size(args, kwargs)
        return self.readout(self.net(*args, **kwargs)).unsqueeze(0)

    def alpha(self, outputs: Tensor) -> Tensor:
        """The Dirichlet's parameters, of the shape of the outputs."""
        return EVIDENCE[self.evidence](at_least_float32(outputs)) + 1

    def likelihood(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        check_outputs(
            outputs.shape[1:], self.task
        )  # one class has probability 1, whatever the evidence
        alpha = self.alpha(outputs)
        return alpha / alpha.sum(2, keepdim=True), None

    def loss(self, x: Any, y: Tensor) -> Terms:
        check_batch(x, y, self.task)
        args, kwargs = as_call(x)
        alpha = self.alpha(self(*args, **kwargs).squeeze(0))
        check_targets(alpha, y, self.task)
        counted = y != self.ignore_index
        labels = y.where(counted, 0).unsqueeze(1)
        weights = counted.to(alpha.dtype)
        if self.class_weights is not None:
            class_weights: Tensor = self.class_weights  # type: ignore[assignment]
            weights = weights * class_weights.to(alpha.dtype)[labels.squeeze(1)]
        # Where every pixel is void there is nothing to learn: a loss of 0, not 0 / 0.
        weights = weights / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)
        risk = (bayes_risk(alpha, labels) * weights).sum()
        wrong = kl_to_uniform(alpha.scatter(1, labels, 1.0))
        full = alpha.shape[1] ** -2 if self.full_kl is None else self.full_kl
        return total(risk=risk, kl=self.kl_weight.clone() * full * (wrong * weights).sum())

    def before_epoch(self, epoch: int, epochs: int) -> None:
        self.kl_weight.fill_(min(1.0, epoch / self.anneal) if self.anneal else 1.0)

    def phase(self) -> object:
        return None

    def strangeness(self, outputs: Tensor) -> Tensor | None:
        """K / S of member outputs, (S, B, ...); None where confidence is to be the score."""
        return None if self.score_by == "confidence" else self.alpha(outputs).mean(2).reciprocal()


def bayes_risk(alpha: Tensor, labels: Tensor) -> Tensor:
    r"""Expected squared error :math:`E_{p \sim Dir(\alpha)} \|y - p\|^2`, (n, ...).

    Args:
        alpha: (n, K, ...).
        labels: (n, 1, ...), the index at which y is one.

    Example:
        >>> bayes_risk(torch.ones(1, 2), torch.tensor([[0]]))  # 2 E (1 - p)^2, p uniform
        tensor([0.6667])
    """
    strength = alpha.sum(1, keepdim=True)
    p = alpha / strength
    squares = p.square().sum(1)  # sum (y - p)^2 = 1 - 2 p_y + sum p^2, without a one-hot tensor
    return (
        1 - 2 * p.gather(1, labels).squeeze(1) + squares + (1 - squares) / (strength.squeeze(1) + 1)
    )


def kl_to_uniform(alpha: Tensor) -> Tensor:
    """KL(Dir(alpha) || Dir(1)) over the classes of alpha (n, K, ...), giving (n, ...).

    Example:
        >>> kl_to_uniform(torch.ones(2, 3))
        tensor([0., 0.])
    """
    strength = alpha.sum(1)
    return (
        torch.lgamma(strength)
        - math.lgamma(alpha.shape[1])
        - torch.lgamma(alpha).sum(1)
        + ((alpha - 1) * (torch.digamma(alpha) - torch.digamma(strength).unsqueeze(1))).sum(1)
    )


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    return Evidential(net, config, **model_options)
