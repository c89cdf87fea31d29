r"""Selective prediction: how the error falls as the least sure examples are refused.

Everything takes ``uncertainty`` (N,), higher for examples that are refused earlier (``p.total``,
``p.ood_score``, ``1 - p.confidence``), and ``losses`` (N,): ``p.labels != y``, or any loss of at least 0.

With the examples in ascending order of uncertainty, the coverage k / N accepts the first k of them. The
selective risk is the mean loss of those accepted, the generalised risk the sum of their losses over N: the
chance that an example is accepted and wrong. Examples of equal uncertainty count with the mean loss among
them, so that the order in which they are given does not matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lpbnn.metrics import _base as base


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """A risk-coverage curve, by the number of accepted examples from 1 to N; all (N,) float64."""

    coverage: Tensor
    """k / N."""
    risk: Tensor
    """Selective risk: mean loss of the k least uncertain examples."""
    uncertainty: Tensor
    """Uncertainty of the k-th: the largest that is accepted."""

    @property
    def generalised_risk(self) -> Tensor:
        """Sum of the losses of the accepted examples over N."""
        return self.risk * self.coverage

    @property
    def aurc(self) -> float:
        """Area under the selective risk: its mean over all coverages."""
        return float(self.risk.mean())

    @property
    def augrc(self) -> float:
        """Area under the generalised risk, by trapezoids from (0, 0)."""
        risk = self.generalised_risk
        return float((risk.sum() - risk[-1] / 2) / len(risk))


def risk_coverage(uncertainty: Tensor, losses: Tensor) -> RiskCoverage:
    """Return the risk-coverage curve.

    >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 0, 1, 0]))
    >>> curve.risk.tolist()
    [0.0, 0.0, 0.333..., 0.25]
    """
    base.check_floating("uncertainty", uncertainty)
    base.require(
        isinstance(losses, Tensor) and losses.shape == uncertainty.shape and losses.ndim == 1,
        f"uncertainty has shape {tuple(uncertainty.shape)}, "
        f"losses {tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__}",
        "two tensors of one shape (N,)",
        "pass one number per example, for pixels flattened",
    )
    base.require(len(losses) > 0, "there are no examples", "at least one", "check the data set")
    scores, order = uncertainty.detach().double().sort()
    values = losses.detach().to(scores)[order]
    for name, given in (("uncertainty", scores), ("losses", values)):
        bad = int((~given.isfinite()).sum())
        base.require(
            bad == 0, f"{bad} values of {name} are not finite", "real numbers", "check the data"
        )
    base.require(
        bool((values >= 0).all()), "a loss is negative", "at least 0", "pass losses, not gains"
    )
    # Within a group of equal uncertainty every example has the mean loss of the group.
    _, group, count = scores.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(count, dtype=scores.dtype).index_add_(0, group, values)
    accepted = torch.arange(1, len(scores) + 1).to(scores)
    return RiskCoverage(accepted / len(scores), (sums / count)[group].cumsum(0) / accepted, scores)


def aurc(uncertainty: Tensor, losses: Tensor) -> float:
    r"""Area under the risk-coverage curve: the mean of the selective risks over all coverages.

    $$\frac1N \sum_{k=1}^{N} \frac1k \sum_{i \le k} \ell_{(i)}$$

    Geifman, Uziel, El-Yaniv: Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019.

    >>> aurc(torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0]))
    0.25
    """
    return risk_coverage(uncertainty, losses).aurc


def augrc(uncertainty: Tensor, losses: Tensor) -> float:
    r"""Area under the generalised risk-coverage curve: the mean chance of an accepted error.

    For errors, with the accuracy a and the AUROC of right against wrong examples,

    $$(1 - \mathrm{AUROC}) \, a (1 - a) + \tfrac12 (1 - a)^2$$

    Traub et al.: Overcoming common flaws in the evaluation of selective classification systems, NeurIPS 2024.

    >>> augrc(torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0]))  # AUROC 1, accuracy 1/2
    0.125
    """
    return risk_coverage(uncertainty, losses).augrc
