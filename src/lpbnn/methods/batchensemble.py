r"""BatchEnsemble: J members share one weight, each with its own rank-one factors.

.. math:: W_j = W \odot (r_j s_j^T), \quad p(y|x) = \tfrac1J \sum_j p(y|x, W_j)

Wen, Tran, Ba: BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning,
ICLR 2020.
"""

import dataclasses
from typing import Any

from torch import nn

from lpbnn.methods._rank_one import RankOneConfig, ensemble_options, wrap
from lpbnn.model import Model
from lpbnn.rank_one.ensemble import FastWeightEnsemble
from lpbnn.rank_one.factors import PointFactors


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    fast_lr: float = 0.5
    num_data: int | None = None  # not needed: there is no KL; taken so that methods can be swapped


class BatchEnsemble(FastWeightEnsemble):
    """J deterministic members."""

    stochastic = False


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    def factors(members: int, inputs: int, outputs: int) -> PointFactors:
        return PointFactors(members, inputs, outputs, spread=config.spread, init=config.init)

    return BatchEnsemble(wrap(net, config, factors), **ensemble_options(config), **model_options)
