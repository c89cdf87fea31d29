r"""EDL: the network's outputs are evidence for a Dirichlet over the class probabilities.

$$\alpha = \exp(f(x)) + 1, \quad S = \sum_k \alpha_k, \quad p_k = \alpha_k / S, \quad u = K / S$$

$$
L = \overline{R(\alpha, y)} + \lambda_t \, \overline{KL(Dir(\tilde\alpha) \,\|\, Dir(1))}, \quad
\tilde\alpha = y + (1 - y) \odot \alpha
$$

``risk`` chooses R, one of the three risks of the paper:

- "squared", the expected squared error
  $E_{p \sim Dir(\alpha)} \|y - p\|^2 = \sum_k (y_k - p_k)^2 + p_k (1 - p_k) / (S + 1)$;
- "digamma", the expected cross-entropy
  $E[-\sum_k y_k \log p_k] = \sum_k y_k (\psi(S) - \psi(\alpha_k))$;
- "log_marginal", type-II maximum likelihood
  $-\log E[\prod_k p_k^{y_k}] = \sum_k y_k (\log S - \log \alpha_k)$.

The paper prefers the first. Its gradient falls with 1 / K, so with 100 classes the other two learn much
faster. The KL removes evidence for wrong classes; its weight grows with the epoch t,
$\lambda_t = \lambda \min(1, t / 10)$. The vacuity u is 1 if there is no evidence at all.

$\lambda$ is ``full_kl``. A little evidence e for a class that is right with probability q lowers the
squared error by about 2 q e / K and costs $\lambda (1 - q) (\pi^2 / 12) e^2$ of KL. So evidence settles near
$q / ((1 - q) \lambda K)$, but any probability other than 1 / K needs evidence of the order of K.

The evidence is exp of the output, clamped to $\pm 10$, as the authors' code recommends. relu, the first example
of the paper, has no gradient where all outputs are negative.

The model's outputs are $\log \alpha$, whose softmax is p.

Differences from the paper:
    ``full_kl`` is $1 / K^2$ by default and 1 in the paper. With K = 10 and the paper's weight the best
    confidence of a network that is right in 90 % of the cases is 37 %, and with 50 % it is 11 %; there the
    gradient vanishes, and on CIFAR-10 training may stop (lab notes). With $1 / K^2$ they are 89 % and 51 %, and
    similar for every K and risk.

Sensoy, Kaplan, Kandemir: Evidential deep learning to quantify classification uncertainty, NeurIPS 2018.
"""

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpbnn.likelihoods import Categorical, member_axis, require_categorical
from lpbnn.members.call import as_call
from lpbnn.model import Terms, UncertainModel, with_loss
from lpbnn.options import NonNegative, OneNetwork, Options
from lpbnn.precision import at_least_float32

Risk = Literal["squared", "digamma", "log_marginal"]
Score = Literal["vacuity", "entropy"]


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of edl."""

    members: OneNetwork = 1  # edl is one network
    risk: Risk = "squared"  # R, the data term of the loss
    anneal: NonNegative = 10  # epochs over which the KL grows to its full weight; 0: none
    full_kl: NonNegative | None = None  # lambda, that full weight; None: 1 / K^2. The paper has 1
    score: Score = "vacuity"  # OOD score: K / S, or "entropy": that of the likelihood


class EDL(UncertainModel):
    """One network whose outputs are evidence for classes, of whole inputs, pixels or tokens.

    Args:
        net: returns one output per class, (B, K, ...).
        config: the options.
        model_options: ``likelihood`` (``Categorical`` or ``Segmentation``) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = EDL(net, Config())
        >>> terms = model.loss(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        >>> list(terms)
        ['loss', 'risk', 'kl']
        >>> tuple(model.ood_score(model(torch.randn(5, 4))).shape)  # K / S
        (1, 5)
    """

    stochastic = False
    likelihood: Categorical
    kl_weight: Tensor  # lambda_t / lambda

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, **model_options)
        self.config = config
        # Loops that never call before_epoch train with the full KL.
        device = next((p.device for p in net.parameters()), None)
        self.register_buffer("kl_weight", torch.ones((), device=device), persistent=False)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return log alpha, (1, B, K, ...)."""
        return self.alpha(self.run_network(*args, **kwargs)).log().unsqueeze(0)

    def alpha(self, outputs: Tensor) -> Tensor:
        """Return the Dirichlet's parameters for outputs of the network, of the same shape."""
        return at_least_float32(outputs).clamp(-10, 10).exp() + 1

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        """Return the terms ``risk`` and ``kl``; see ``UncertainModel.loss``."""
        self.likelihood.check_batch(x, y)
        args, kwargs = as_call(x)
        alpha = self.alpha(self.run_network(*args, **kwargs))
        labels, weights = self.likelihood.labels_and_weights(alpha, y, weight)
        alpha = alpha.movedim(self.likelihood.dim, 1)
        # If nothing counts, every weight is 0 and so is the loss.
        weights = weights / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)
        risk = (bayes_risk(alpha, labels, self.config.risk) * weights).sum()
        kl = (kl_to_uniform(without_evidence(alpha, labels)) * weights).sum()
        full = alpha.shape[1] ** -2 if self.config.full_kl is None else self.config.full_kl
        return with_loss(risk=risk, kl=self.kl_weight.clone() * full * kl)

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """Set the KL's weight for the epoch."""
        anneal = self.config.anneal
        self.kl_weight.fill_(min(1.0, epoch / anneal) if anneal else 1.0)

    def ood_score(self, outputs: Tensor) -> Tensor | None:
        """Return the vacuity K / S of member outputs log alpha, (S, B, ...); None for "entropy"."""
        if self.config.score == "entropy":
            return None
        return outputs.exp().mean(member_axis(self.likelihood.dim)).reciprocal()


def bayes_risk(alpha: Tensor, labels: Tensor, risk: Risk = "squared") -> Tensor:
    """Return the risk of ``p ~ Dir(alpha)``, (n, ...); see the head of this file.

    Args:
        alpha: (n, K, ...).
        labels: integers (n, 1, ...), or probabilities (n, K, ...).
        risk: "squared", "digamma" or "log_marginal".

    Example:
        >>> bayes_risk(torch.ones(1, 2), torch.tensor([[0]]))  # 2 E (1 - p)^2, p uniform
        tensor([0.6667])
        >>> bayes_risk(torch.ones(1, 2), torch.tensor([[0]]), "log_marginal")  # log 2
        tensor([0.6931])
    """
    strength = alpha.sum(1, keepdim=True)
    if risk != "squared":
        f = torch.digamma if risk == "digamma" else torch.log
        if labels.is_floating_point():
            return (labels * (f(strength) - f(alpha))).sum(1)
        return f(strength).squeeze(1) - f(alpha.gather(1, labels).squeeze(1))
    p = alpha / strength
    squares = p.square().sum(1)  # sum (y - p)^2 = sum y^2 - 2 sum y p + sum p^2
    own = labels.square().sum(1) if labels.is_floating_point() else 1
    return own - 2 * label_mean(p, labels) + squares + (1 - squares) / (strength.squeeze(1) + 1)


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


def without_evidence(alpha: Tensor, labels: Tensor) -> Tensor:
    """Return alpha (n, K, ...) without the evidence for the labels: y + (1 - y) * alpha."""
    if labels.is_floating_point():
        return labels + (1 - labels) * alpha
    return alpha.scatter(1, labels, 1.0)


def kl_to_uniform(alpha: Tensor) -> Tensor:
    """Return KL(Dir(alpha) || Dir(1)) over the classes of alpha (n, K, ...), (n, ...).

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


def build(net: nn.Module, config: Config, **model_options: Any) -> EDL:
    """Wrap a network whose outputs become evidence."""
    require_categorical(
        model_options.get("likelihood"),
        "edl",
        ("classification", "segmentation"),
        "a Dirichlet is a distribution over the probabilities of classes.",
    )
    return EDL(net, config, **model_options)
