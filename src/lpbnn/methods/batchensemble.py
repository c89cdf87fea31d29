r"""BatchEnsemble: J members share one weight, each with its own rank-one factors.

Member j scales the inputs of every layer by a vector r_j and the outputs by a vector s_j, which is a weight of
its own at the price of two vectors. In training the members share the batch; in prediction each sees all of it.

$$W_j = W \odot (s_j r_j^T), \quad p(y|x) = \tfrac1J \sum_j p(y|x, W_j)$$

Every member has its own biases too. Members that start further apart (``init_std``) are more diverse and need
a longer training to agree on the shared weights: at 15 to 30 epochs 0.1 was better than 0.5 (lab notes).

Wen, Tran, Ba: BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning,
ICLR 2020.
"""

import dataclasses
from functools import partial
from typing import Any

from torch import nn

from lpbnn.options import NonNegative
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble, convert_layers
from lpbnn.rank_one.factors import PointFactors


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of batchensemble."""

    fast_lr: NonNegative = 0.5


class BatchEnsemble(RankOneEnsemble):
    """J deterministic members.

    Example:
        >>> import torch
        >>> model = build(nn.Sequential(nn.Linear(4, 3)), Config(members=2))
        >>> tuple(model(torch.randn(5, 4)).shape)
        (2, 5, 3)
    """

    stochastic = False


def build(net: nn.Module, config: Config, **model_options: Any) -> BatchEnsemble:
    """Give every chosen layer of ``net`` the factors of J members, in place."""
    factors = partial(PointFactors, config.members, init_std=config.init_std)
    convert_layers(net, config, factors)
    return BatchEnsemble(net, config, **model_options)
