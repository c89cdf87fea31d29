r"""Rank-1 BNN: BatchEnsemble with a Gaussian over every entry of r and s.

Every member has a mean and a standard deviation for each entry of its factors. The weights W that the members
share are a point estimate, so the posterior costs about as many numbers as the factors.

$$
W_j = W \odot (s_j r_j^T), \; r_j \sim N(\mu, \sigma^2), \; s_j \sim N(\mu, \sigma^2), \quad
L = \overline{NLL} + \tfrac{\beta}{N} \sum_{layers} KL(q \| N(1, 0.1^2))
$$

The KL is summed over the entries and averaged over members; $\beta$ grows in equal steps to 1 over
``anneal`` of the epochs. ``prior_std`` is the 0.1 of the prior.

Dusenberry et al.: Efficient and scalable Bayesian neural nets with rank-1 factors, ICML 2020.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.kernels.rows import stack_tensors
from lpbnn.model import Terms
from lpbnn.options import DataCount, Positive, Share, annealed, require_num_data
from lpbnn.precision import at_least_float32, full_precision
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble, convert_layers
from lpbnn.rank_one.factors import (
    FactorPosterior,
    Factors,
    Init,
    LayerFactors,
    group_layers,
    initial,
    kl_to_standard_normal,
)


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of rank1."""

    num_data: DataCount | None = None  # N, the number of training examples; required
    std: Positive = 0.1  # initial standard deviation of r and s
    prior_std: Positive = 0.1  # standard deviation of the prior of r and s, around 1
    anneal: Share = 2 / 3  # share of the epochs over which the KL grows to its full weight


class GaussianPosterior(FactorPosterior):
    """Independent Gaussians; layers of equal shape are sampled together."""

    def sample(
        self,
        samples: int = 1,
        noise_scale: Tensor | None = None,
        rows_per_member: int | None = None,
    ) -> list[LayerFactors]:
        sampled: dict[int, LayerFactors] = {}
        shape = ("members", "inputs", "outputs", "r_mean.device", "r_mean.dtype")
        for group in group_layers(self.layers, *shape):
            same = list(group.values())
            with full_precision(same[0].r_mean.device):
                r, s = (
                    _sample(
                        stack_tensors([getattr(layer, f"{side}_mean") for layer in same]),
                        stack_tensors([getattr(layer, f"{side}_rho") for layer in same]),
                        samples,
                        noise_scale,
                    )
                    for side in "rs"
                )
            sampled.update(zip(group, map(LayerFactors, r, s), strict=True))
        return [sampled[i] for i in range(len(self.layers))]

    def mean(self) -> list[LayerFactors]:
        return [LayerFactors(layer.r_mean, layer.s_mean) for layer in self.layers]

    def kl(self) -> Tensor:
        """Return the KL divergence to the prior, summed over the layers."""
        terms = [layer.kl() for layer in self.layers]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()


class GaussianFactors(Factors):
    r"""Rank-1 BNN: r_j ~ N(mu, sigma^2) and s_j ~ N(mu, sigma^2), sigma = softplus(rho).

    Example:
        >>> posterior = GaussianFactors.posterior([GaussianFactors(4, inputs=3, outputs=2)])
        >>> bool((posterior.sample()[0][0] != posterior.sample()[0][0]).all())
        True
    """

    posterior = GaussianPosterior

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        init_std: float = 0.5,
        init: Init = "normal",
        std: float = 0.1,
        prior_std: float = 0.1,
    ) -> None:
        super().__init__(members, inputs, outputs)
        rho = std + math.log(-math.expm1(-std))  # softplus(rho) = std
        self.prior_std = prior_std
        self.r_mean = nn.Parameter(initial(members, inputs, init_std, init))
        self.s_mean = nn.Parameter(initial(members, outputs, init_std, init))
        self.r_rho = nn.Parameter(torch.full((members, inputs), rho))
        self.s_rho = nn.Parameter(torch.full((members, outputs), rho))

    def kl(self) -> Tensor:
        """Return KL(q || N(1, prior_std^2)), summed over the entries of r and s, mean over members."""
        with full_precision(self.r_mean.device):
            total = torch.zeros((), device=self.r_mean.device)
            for mean, rho in ((self.r_mean, self.r_rho), (self.s_mean, self.s_rho)):
                std = F.softplus(at_least_float32(rho)) / self.prior_std
                shift = (at_least_float32(mean) - 1) / self.prior_std
                total = total + kl_to_standard_normal(shift, 2 * std.log()).sum(-1).mean()
            return total


def _sample(mean: Tensor, rho: Tensor, samples: int, noise_scale: Tensor | None) -> Tensor:
    """Return mean + softplus(rho) * noise: (L, J, d) to (L, samples * J, d)."""
    std = F.softplus(rho)
    if noise_scale is not None:
        std = std * noise_scale.to(std)
    layers, members, width = mean.shape
    noise = torch.randn(layers, samples, members, width, device=mean.device, dtype=mean.dtype)
    return torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), noise).flatten(1, 2)


class Rank1BNN(RankOneEnsemble):
    """J members with Gaussian factors.

    Args:
        net: the converted network.
        config: the options.
        **model_options: ``likelihood`` and ``readout``.

    Example:
        >>> model = build(nn.Sequential(nn.Linear(4, 3)), Config(members=2, num_data=100))
        >>> list(model.loss(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])))
        ['loss', 'nll', 'kl']
    """

    kl_weight: Tensor  # grows to 1; 1 in a loop that never calls before_epoch

    config: Config

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, config, **model_options)
        self.num_data = require_num_data(config, "rank1")
        self.register_buffer("kl_weight", torch.ones_like(self.noise_scale), persistent=False)

    def penalties(self, posterior: GaussianPosterior) -> Terms:
        weight = self.kl_weight.clone()  # it may change before the backward pass
        return {"kl": posterior.kl() * (weight / self.num_data)}

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """Set the KL's weight for the epoch."""
        self.kl_weight.fill_(annealed(epoch, epochs, self.config.anneal))


def build(net: nn.Module, config: Config, **model_options: Any) -> Rank1BNN:
    """Give every chosen layer of ``net`` the Gaussian factors of J members, in place."""
    factors = partial(
        GaussianFactors,
        config.members,
        init_std=config.init_std,
        std=config.std,
        prior_std=config.prior_std,
    )
    convert_layers(net, config, factors)
    return Rank1BNN(net, config, **model_options)
