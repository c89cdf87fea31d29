r"""Rank-1 BNN: BatchEnsemble with a Gaussian over every entry of r and s.

.. math::
    W_j = W \odot (s_j r_j^T), \; r_j \sim N(\mu, \sigma^2), \; s_j \sim N(\mu, \sigma^2), \quad
    L = \overline{NLL} + \tfrac{\beta}{N} \sum_{layers} KL(q \| N(1, 0.1^2))

The KL is summed over the entries and averaged over members; beta grows in
equal steps to 1 over ``anneal`` of the epochs.

Dusenberry et al.: Efficient and scalable Bayesian neural nets with rank-1 factors, ICML 2020.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.likelihoods import at_least_float32
from lpbnn.methods._rank_one import (
    RankOneConfig,
    annealed,
    check_fraction,
    check_num_data,
    convert_layers,
    ensemble_options,
)
from lpbnn.model import Terms, UncertainModel
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.rank_one.factors import GaussianFactors, GaussianPosterior


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of rank1."""

    num_data: int | None = None  # N, required
    std: float = 0.1  # initial standard deviation of r and s
    prior_std: float = 0.1  # standard deviation of the prior of r and s, around 1
    anneal: float = 2 / 3  # fraction of the epochs over which the KL grows to its full weight

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("anneal", self.anneal)
        for name in ("std", "prior_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number above 0.")


class Rank1BNN(RankOneEnsemble):
    """J members with Gaussian factors."""

    kl_weight: Tensor  # grows to 1; 1 in a loop that never calls before_epoch

    def __init__(self, net: nn.Module, config: Config, **options: Any) -> None:
        super().__init__(net, **options)
        self.num_data = check_num_data(config.num_data, "rank1")
        self.anneal = config.anneal
        self.register_buffer("kl_weight", torch.ones_like(self.noise_scale), persistent=False)

    def penalties(self, posterior: GaussianPosterior) -> Terms:
        weight = at_least_float32(self.kl_weight).clone()  # it may change before the backward pass
        return {"kl": posterior.kl() * (weight / self.num_data)}

    def before_epoch(self, epoch: int, epochs: int) -> None:
        self.kl_weight.fill_(annealed(epoch, epochs, self.anneal))


def build(net: nn.Module, config: Config, **model_options: Any) -> UncertainModel:
    check_num_data(config.num_data, "rank1")

    def make_factors(inputs: int, outputs: int) -> GaussianFactors:
        return GaussianFactors(
            config.members,
            inputs,
            outputs,
            init_std=config.init_std,
            init=config.init,
            std=config.std,
            prior_std=config.prior_std,
        )

    net = convert_layers(net, config, make_factors)
    return Rank1BNN(net, config, **ensemble_options(config), **model_options)
