"""Selective prediction: from which uncertainty on an example is refused, chosen on held-out data."""

import math

import torch
from torch import Tensor


def risk_threshold(uncertainty: Tensor, losses: Tensor, risk: float) -> float:
    """Return the largest uncertainty to accept so that the mean loss of accepted examples is at most ``risk``.

    The risk holds on the held-out examples; on others it varies around it.

    Args:
        uncertainty: (N,), of held-out examples, for example ``p.total``.
        losses: (N,), for example ``p.labels != y``.
        risk: the largest mean loss.

    Example:
        >>> uncertainty, wrong = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 0, 1, 1])
        >>> t = risk_threshold(uncertainty, wrong, risk=0.1)
        >>> uncertainty <= t
        tensor([ True,  True, False, False])
    """
    from lpbnn.metrics.selective import risk_coverage  # torchmetrics is an extra

    if not isinstance(risk, int | float) or not risk >= 0:
        raise ValueError(f"risk={risk!r}: expected a mean loss of at least 0, such as 0.05.")
    curve = risk_coverage(uncertainty, losses)
    last = torch.ones_like(curve.risk, dtype=torch.bool)  # of its group of equal uncertainty
    last[:-1] = curve.uncertainty[:-1] < curve.uncertainty[1:]
    # The risk of a group of equal uncertainty is a sum of its means: a mean of 0.5 may come out larger.
    allowed = (last & (curve.risk <= risk * (1 + 1e-9))).nonzero()
    if not len(allowed):
        raise ValueError(
            f"no threshold has a risk of at most {risk}: the lowest is {curve.risk[last].min().item():.4g}. "
            "Fix: a higher risk, or another uncertainty."
        )
    return curve.uncertainty[allowed[-1]].item()


def ood_threshold(ood_scores: Tensor, tpr: float = 0.95) -> float:
    """Return the largest threshold at which a share ``tpr`` of OOD examples is found, score >= threshold.

    It is the threshold of ``metrics.fpr95``. Without OOD examples take scores s of the held-out data:
    ``-ood_threshold(-s, 0.95)`` accepts 95 % of them, score <= threshold.

    Args:
        ood_scores: (N,), scores of examples that are OOD, for example ``p.ood_score``.
        tpr: the share to find.

    Example:
        >>> ood_threshold(torch.arange(1.0, 101.0), 0.95)
        6.0
    """
    if not isinstance(tpr, int | float) or not 0 < tpr <= 1:
        raise ValueError(f"tpr={tpr!r}: expected a share between 0 and 1, such as 0.95.")
    if not isinstance(ood_scores, Tensor) or not ood_scores.numel():
        given = type(ood_scores).__name__
        given = "no scores" if isinstance(ood_scores, Tensor) else f"{given} instead of a tensor"
        raise ValueError(
            f"expected a tensor of OOD scores; got {given}. Fix: p.ood_score of OOD examples."
        )
    scores = ood_scores.flatten()
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"expected finite OOD scores, got {int((~scores.isfinite()).sum())} of {len(scores)} that are "
            "not. Fix: check the inputs and the weights of the model."
        )
    found = math.ceil(tpr * len(scores) - 1e-9)
    return scores.sort(descending=True).values[found - 1].item()
