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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.model import Terms
from lpbnn.options import DataCount, Positive, Share, annealed, require_num_data
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble, convert_layers
from lpbnn.rank_one.factors import GaussianFactors, GaussianPosterior


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of rank1."""

    num_data: DataCount | None = None  # N, the number of training examples; required
    std: Positive = 0.1  # initial standard deviation of r and s
    prior_std: Positive = 0.1  # standard deviation of the prior of r and s, around 1
    anneal: Share = 2 / 3  # share of the epochs over which the KL grows to its full weight


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
