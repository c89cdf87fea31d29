"""Common parts of BatchEnsemble, Rank-1 BNN and LP-BNN: their options, and the conversion of a network."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lpbnn.convert.checks import Filter, widths
from lpbnn.convert.convert import convert
from lpbnn.members.rows import BatchMode
from lpbnn.methods._options import Count, NonNegative, Options
from lpbnn.rank_one.ensemble import BatchNormMode
from lpbnn.rank_one.factors import Factors, Init
from lpbnn.rank_one.layer import RankOneLayer


@dataclasses.dataclass(frozen=True)
class RankOneConfig(Options):
    """Options of all rank-one methods."""

    members: Count = 4  # J, the number of members
    batch_mode: BatchMode = "split"  # in training: "split" the batch among members, or "repeat" it
    batch_norm: BatchNormMode = "shared"  # or one for each "member"
    init_std: NonNegative = 0.5  # standard deviation of the initial r and s around 1
    init: Init = "normal"  # or "signs": random +-1
    first_init: Init | None = None  # of the first layer, which sees the data; None: init
    fast_lr: NonNegative = 1.0  # learning rate of the factors, as a multiple of the network's
    include: Filter = None  # path globs or layer types to convert; None: all
    exclude: Filter = None  # path globs or layer types to leave as they are
    # where the batch is expanded to members: a path, or several; None: found
    expand_at: str | Sequence[str] | None = None


def convert_layers(
    net: nn.Module, config: RankOneConfig, make_factors: Callable[..., Factors]
) -> dict[str, Any]:
    """Convert the chosen layers of ``net``, in place, and return the options of its ``RankOneEnsemble``.

    Args:
        net: the network.
        config: the options.
        make_factors: makes the factors of a layer from its numbers of inputs and outputs, and ``init``.
    """
    first_init = iter([config.first_init or config.init])

    def make_layer(layer: nn.Module, path: str) -> RankOneLayer:
        weight: Any = layer.weight
        init = next(first_init, config.init)
        factors = make_factors(*widths(layer), init=init).to(weight.device, weight.dtype)
        return RankOneLayer(layer, factors, path)

    conversion = convert(net, make_layer, config.include, config.exclude)
    if conversion.unconverted:
        warnings.warn(conversion.unconverted, stacklevel=4)  # at lpbnn.build's caller
    return {
        "batch_mode": config.batch_mode,
        "batch_norm": config.batch_norm,
        "expand_at": config.expand_at,
        "fast_lr": config.fast_lr,
    }
