r"""Quality of a predicted distribution of a number: mixture NLL, RMSE, coverage.

Each member s predicts a Gaussian; the prediction of the ensemble is their equal mixture,

$$p(y \mid x) = \frac{1}{S} \sum_s \mathcal{N}(y;\, \mu_s(x),\, \sigma_s^2(x)).$$

Everything takes ``means`` and ``variances`` (S, N) and ``targets`` (N,); S = 1 is one Gaussian. ``rmse``
needs no variances and takes the mean of a prediction, (N,), as well. With targets (N, D), each of the N x D
numbers counts as one target with its own marginal.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lpbnn.metrics import _base as base


class RegressionMetrics(base.StreamingMetric):
    """NLL, RMSE and coverage together, from three sums.

    >>> metrics = RegressionMetrics()
    >>> metrics.update(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([0.0, 1.0, 3.0]))
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'nll': 2.5856, 'rmse': 1.8257, 'coverage': 0.6667}
    """

    sums: Tensor
    counts: Tensor
    faults: Tensor

    def __init__(self, *, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        base.require(0 < level < 1, f"level is {level}", "a share between 0 and 1", "use 0.95")
        self.level = level
        self.add_sum("sums", 2, dtype=torch.float64)  # negative log-likelihood, squared error
        self.add_sum("counts", 2)  # targets, targets inside the interval
        self.add_sum("faults", 2)

    def update(self, means: Tensor, variances: Tensor, targets: Tensor) -> None:
        """Add a batch: ``means`` and ``variances`` (S, N, ...), ``targets`` (N, ...)."""
        given = {"means": means, "variances": variances, "targets": targets}
        for name, values in given.items():
            base.check_floating(name, values)
        base.require(
            means.shape == variances.shape
            and means.shape[1:] == targets.shape
            and targets.ndim >= 1
            and len(means) > 0,
            ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in given.items()),
            "(S, N, ...), (S, N, ...) and (N, ...)",
            "for a single Gaussian pass means[None] and variances[None]",
        )
        flat = (means.flatten(1), variances.flatten(1), targets.flatten())
        step = max(1, base.CHUNK // len(means))
        for parts in zip(*(x.detach().split(step, dim=-1) for x in flat), strict=True):
            self._add(*parts)

    def _add(self, means: Tensor, variances: Tensor, targets: Tensor) -> None:
        real = base.wide(targets.device)
        means, variances, targets = (x.to(real) for x in (means, variances, targets))
        z = (targets - means) / variances.sqrt()
        log_likelihoods = -(z.square() + variances.log() + math.log(2 * math.pi)) / 2
        nll = math.log(len(means)) - log_likelihoods.logsumexp(0)
        error = targets - means.mean(0)
        # The target is inside the central interval exactly when its cumulative probability is
        # inside [tail, 1 - tail]: no quantile of a mixture has to be searched for.
        below = torch.special.ndtr(z).mean(0)
        tail = (1 - self.level) / 2
        inside = (below >= tail) & (below <= 1 - tail)
        finite = means.isfinite().all(0) & targets.isfinite()
        positive = (variances.isfinite() & (variances > 0)).all(0)

        sums = torch.stack([nll.sum(), error.square().sum()])
        counts = torch.stack([torch.ones_like(inside).sum(), inside.sum()])
        faults = torch.stack([(~finite).sum(), (~positive).sum()])
        self.add(sums=sums, counts=counts, faults=faults)

    def compute(self) -> dict[str, float]:
        """``{"nll", "rmse", "coverage"}`` of everything seen; ``ValueError`` if nothing."""
        base.require_none(
            self.faults,
            (
                ("{} means or targets are not finite", "real numbers", "check the data"),
                (
                    "{} variances are not positive and finite",
                    "variances above 0",
                    "predict them through softplus or exp, and pass variances, not logarithms",
                ),
            ),
        )
        total, inside = self.counts.tolist()
        base.require_seen(total, self, "targets")
        nll, squared = (self.sums / total).tolist()
        return {"nll": nll, "rmse": math.sqrt(squared), "coverage": inside / total}


def mixture_nll(means: Tensor, variances: Tensor, targets: Tensor) -> float:
    r"""Mean negative log-likelihood of the targets under the mixture, in nats.

    $$-\frac{1}{N} \sum_i \log \frac{1}{S} \sum_s \mathcal{N}(y_i; \mu_{si}, \sigma_{si}^2)$$

    >>> round(mixture_nll(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1)), 4)  # ln(2 pi) / 2
    0.9189
    """
    return base.seen_once(RegressionMetrics(), means, variances, targets).compute()["nll"]


def rmse(means: Tensor, targets: Tensor) -> float:
    r"""Return the root mean squared error of predicted means.

    $$\sqrt{\frac{1}{N} \sum_i \Big(y_i - \frac{1}{S} \sum_s \mu_{si}\Big)^2}$$

    Args:
        means: ``p.mean`` of a prediction, in the shape of the targets, or the members' means (S, N, ...).
        targets: (N,) or (N, D); means (N, 1) go with targets (N,).

    >>> rmse(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 5.0]))
    2.1213...
    >>> rmse(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([2.0, 5.0]))  # two members
    2.1213...
    """
    for name, values in (("means", means), ("targets", targets)):
        base.check_floating(name, values)
    if means.shape == (*targets.shape, 1):
        means = means.squeeze(-1)
    members = means if means.shape[1:] == targets.shape else means[None]
    base.require(
        members.shape[1:] == targets.shape and targets.ndim >= 1 and len(members) > 0,
        f"means has shape {tuple(means.shape)}, targets has shape {tuple(targets.shape)}",
        "means of the targets' shape, or (S, N, ...) for S members",
        "pass p.mean of a prediction and the targets that belong to it",
    )
    metric = RegressionMetrics()
    return base.seen_once(metric, members, torch.ones_like(members), targets).compute()["rmse"]


def coverage(means: Tensor, variances: Tensor, targets: Tensor, *, level: float = 0.95) -> float:
    r"""Share of targets inside the mixture's central interval; ``level`` (.95) is the ideal.

    $$
    \frac{1}{N} \sum_i \left[\tfrac{1 - \ell}{2} \le F_i(y_i) \le \tfrac{1 + \ell}{2}
    \right], \quad F_i(y) = \frac{1}{S} \sum_s \Phi\Big(\frac{y - \mu_{si}}{\sigma_{si}}\Big)
    $$

    The interval runs from the 2.5 % to the 97.5 % quantile of the mixture itself, not of a
    Gaussian with its mean and variance.

    >>> coverage(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor([0.0, 1.95, 1.97]))
    0.6666...
    """
    metric = RegressionMetrics(level=level)
    return base.seen_once(metric, means, variances, targets).compute()["coverage"]


def crps(means: Tensor, variances: Tensor, targets: Tensor) -> float:
    r"""Continuous ranked probability score of the mixture, in the unit of the targets; lower is better.

    $$E|X - y| - \tfrac12 E|X - X'| = \int (F(x) - [y \le x])^2 \, dx$$

    The expectations have closed forms for a mixture of Gaussians; the second one compares all pairs of
    members. A prediction without variance has its absolute error.

    Gneiting, Raftery: Strictly proper scoring rules, prediction, and estimation, JASA 2007.

    >>> round(
    ...     crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1)), 4
    ... )  # (sqrt 2 - 1) / sqrt pi
    0.2337
    """
    means, variances, targets = _checked_mixture(means, variances, targets)
    error = _mean_distance(targets - means, variances).mean(0)
    spread = torch.zeros_like(error)
    for mean, variance in zip(means, variances, strict=True):
        spread += _mean_distance(mean - means, variance + variances).mean(0)
    return float((error - spread / (2 * len(means))).mean())


def quantile_calibration(
    means: Tensor, variances: Tensor, targets: Tensor, *, num_levels: int = 99
) -> tuple[Tensor, Tensor]:
    r"""Share of targets below each quantile of the mixture: the diagonal, if quantiles are calibrated.

    $$\hat p(\ell) = \frac1N \sum_i [F_i(y_i) \le \ell]$$

    Kuleshov, Fenner, Ermon: Accurate uncertainties for deep learning using calibrated regression, ICML 2018.

    Args:
        means: (S, N, ...).
        variances: (S, N, ...).
        targets: (N, ...).
        num_levels: levels 1 / (L + 1) to L / (L + 1).

    Returns:
        The levels and the shares, both (L,).

    >>> levels, shares = quantile_calibration(
    ...     torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([-1.0, -0.1, 0.1, 1.0]), num_levels=3
    ... )
    >>> levels.tolist(), shares.tolist()
    ([0.25, 0.5, 0.75], [0.25, 0.5, 0.75])
    """
    base.require(num_levels >= 1, f"num_levels is {num_levels}", "at least 1", "use 99")
    means, variances, targets = _checked_mixture(means, variances, targets)
    below = torch.special.ndtr((targets - means) / variances.sqrt()).mean(0).sort().values
    levels = torch.arange(1, num_levels + 1).to(below) / (num_levels + 1)
    return levels, torch.searchsorted(below, levels, right=True).double() / len(below)


def quantile_error(
    means: Tensor, variances: Tensor, targets: Tensor, *, num_levels: int = 99
) -> float:
    """Mean distance of `quantile_calibration` from the diagonal; 0 is ideal, 1/2 the worst.

    >>> quantile_error(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([9.0, 9.0]), num_levels=3)
    0.5
    """
    levels, shares = quantile_calibration(means, variances, targets, num_levels=num_levels)
    return float((shares - levels).abs().mean())


def _checked_mixture(
    means: Tensor, variances: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 means and variances (S, N) and targets (N,), refused as the metrics above do."""
    base.seen_once(RegressionMetrics(), means, variances, targets).compute()
    means, variances = means.detach().flatten(1).double(), variances.detach().flatten(1).double()
    return means, variances, targets.detach().flatten().double()


def _mean_distance(shift: Tensor, variance: Tensor) -> Tensor:
    """Return E|X| of X ~ N(shift, variance)."""
    std = variance.sqrt()
    z = shift / std
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return shift * (2 * torch.special.ndtr(z) - 1) + 2 * std * density
