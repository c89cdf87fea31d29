"""What BatchEnsemble, Rank-1 and LP-BNN share: options, checks, and the wrapping of the network."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lpbnn.convert.convert import convert
from lpbnn.convert.filters import Filter
from lpbnn.convert.unconverted import unconverted
from lpbnn.members.rows import BATCH_MODES, BatchMode
from lpbnn.model import at_least_one
from lpbnn.rank_one.doors import check_stage
from lpbnn.rank_one.ensemble import BATCH_NORM_MODES, BatchNormMode
from lpbnn.rank_one.factors import INITS, Factors, Init
from lpbnn.rank_one.layer import FastWeight, widths


@dataclasses.dataclass(frozen=True)
class RankOneConfig:
    members: int = 4  # J
    batch_mode: BatchMode = "split"  # in training: "split" the batch among members, or "repeat" it
    batch_norm: BatchNormMode = "shared"  # or one for each "member"
    spread: float = 0.5  # standard deviation of the initial r and s around 1
    init: Init = "normal"  # or "signs": random +-1
    fast_lr: float = 1.0  # learning rate of the fast weights, as a factor
    repeat_last: float = 0.0  # share of the epochs, at the end, trained with batch_mode "repeat"
    include: Filter = None  # path globs or layer types to convert; None: all
    exclude: Filter = None
    # where the batch becomes members: a path, or several; None: found
    spread_at: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        at_least_one("members", self.members)
        if self.spread < 0:
            raise ValueError(f"spread={self.spread!r}: expected a number of at least 0.")
        check_share("repeat_last", self.repeat_last)
        if self.batch_mode not in BATCH_MODES:
            raise ValueError(f"batch_mode={self.batch_mode!r}: choose 'split' or 'repeat'.")
        if self.batch_norm not in BATCH_NORM_MODES:
            raise ValueError(f"batch_norm={self.batch_norm!r}: choose 'shared' or 'member'.")
        if self.init not in INITS:
            raise ValueError(f"init={self.init!r}: choose 'normal' or 'signs'.")


def check_share(name: str, value: float) -> None:
    """Refuse what is no share of the epochs."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: expected a share of the epochs, from 0 to 1.")


def check_num_data(num_data: int | None, method: str) -> int:
    """The KL is divided by the number of training examples: it must be given, never guessed."""
    if num_data is None:
        raise ValueError(
            f"{method} needs num_data, the number of training examples that its KL term is divided "
            "by. Fix: build(..., num_data=len(train))."
        )
    try:
        return at_least_one("num_data", num_data)
    except ValueError as error:
        raise ValueError(
            f"num_data={num_data!r}: expected the number of training examples, an integer above 0."
        ) from error


def annealed(epoch: int, epochs: int, share: float) -> float:
    """Weight of the KL in an epoch (from 0): grows in equal steps to 1 over ``share`` of the epochs."""
    return min(1.0, (epoch + 1) / max(1.0, share * epochs))


def wrap(
    net: nn.Module, config: RankOneConfig, factors: Callable[[int, int, int], Factors]
) -> nn.Module:
    """Convert the chosen layers, with ``factors(members, inputs, outputs)`` for each."""

    def fast_weight(layer: nn.Module, path: str) -> FastWeight:
        weight: Any = layer.weight
        made = factors(config.members, *widths(layer)).to(weight.device, weight.dtype)
        return FastWeight(layer, made, path)

    check_stage(net, config.spread_at)  # before anything is converted
    left_behind = unconverted(net, config.include, config.exclude)
    convert(net, fast_weight, config.include, config.exclude)
    if left_behind:
        warnings.warn(left_behind, stacklevel=4)  # of lpbnn.build's caller
    return net


def ensemble_options(config: RankOneConfig) -> dict[str, Any]:
    names = ("batch_mode", "batch_norm", "spread_at", "fast_lr", "repeat_last")
    return {name: getattr(config, name) for name in names}
