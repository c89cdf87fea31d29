r"""Rank-1 BNN: BatchEnsemble with a Gaussian over every entry of r and s.

.. math::
    W_j = W \odot (r_j s_j^T), \; r_j \sim N(\mu, \sigma^2), \; s_j \sim N(\mu, \sigma^2), \quad
    L = \overline{NLL} + \tfrac{\beta}{N} \sum_{layers} KL(q \| N(1, 0.1^2))

The KL is summed over the entries and averaged over members; beta grows from 0 to 1 over
``anneal`` of training.

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
    check_num_data,
    check_share,
    ensemble_options,
    wrap,
)
from lpbnn.model import Model, Terms
from lpbnn.rank_one.ensemble import FastWeightEnsemble
from lpbnn.rank_one.factors import GaussianFactors, device_of


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    num_data: int | None = None  # N, required
    std: float = 0.1  # initial standard deviation of r and s
    prior_std: float = 0.1
    anneal: float = 2 / 3  # share of the epochs over which the KL grows to its full weight

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("anneal", self.anneal)
        for name in ("std", "prior_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number above 0.")


class RankOne(FastWeightEnsemble):
    """J members with Gaussian factors."""

    kl_weight: Tensor

    def __init__(self, net: nn.Module, config: Config, **options: Any) -> None:
        super().__init__(net, **options)
        self.num_data = check_num_data(config.num_data, "rank1")
        self.anneal = config.anneal
        # In a loop that never calls before_epoch: the full KL.
        device = device_of(self.layers[0].factors)
        self.register_buffer("kl_weight", torch.ones((), device=device), persistent=False)

    def penalties(self, shared: Any = None) -> Terms:
        kl = [
            layer.factors.kl()
            for layer in self.layers
            if isinstance(layer.factors, GaussianFactors)
        ]
        summed = torch.stack([term.to(kl[0].device) for term in kl]).sum()
        return {"kl": summed * (at_least_float32(self.kl_weight).clone() / self.num_data)}

    def before_epoch(self, epoch: int, epochs: int) -> None:
        super().before_epoch(epoch, epochs)
        self.kl_weight.fill_(annealed(epoch, epochs, self.anneal))

    def phase(self) -> object:
        return super().phase()  # the weight is a buffer


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    check_num_data(config.num_data, "rank1")

    def factors(members: int, inputs: int, outputs: int) -> GaussianFactors:
        return GaussianFactors(
            members,
            inputs,
            outputs,
            spread=config.spread,
            init=config.init,
            std=config.std,
            prior_std=config.prior_std,
        )

    return RankOne(wrap(net, config, factors), config, **ensemble_options(config), **model_options)
