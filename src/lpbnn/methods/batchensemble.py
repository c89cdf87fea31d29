r"""BatchEnsemble: J members share one weight, each with its own rank-one factors.

.. math:: W_j = W \odot (s_j r_j^T), \quad p(y|x) = \tfrac1J \sum_j p(y|x, W_j)

Wen, Tran, Ba: BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning,
ICLR 2020.
"""

import dataclasses
from typing import Any

from torch import nn

from lpbnn.methods._rank_one import RankOneConfig, convert_layers, ensemble_options
from lpbnn.model import UncertainModel
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.rank_one.factors import PointFactors


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of batchensemble."""

    fast_lr: float = 0.5
    num_data: int | None = None  # unused: there is no KL; accepted so that methods can be swapped


class BatchEnsemble(RankOneEnsemble):
    """J deterministic members."""

    stochastic = False


def build(net: nn.Module, config: Config, **model_options: Any) -> UncertainModel:
    def make_factors(inputs: int, outputs: int) -> PointFactors:
        return PointFactors(
            config.members, inputs, outputs, init_std=config.init_std, init=config.init
        )

    net = convert_layers(net, config, make_factors)
    return BatchEnsemble(net, **ensemble_options(config), **model_options)
