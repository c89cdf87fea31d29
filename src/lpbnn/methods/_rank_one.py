"""Common parts of BatchEnsemble, Rank-1 BNN and LP-BNN: options, checks, and the conversion."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lpbnn.convert.checks import describe_unconverted, widths
from lpbnn.convert.convert import convert
from lpbnn.convert.filters import Filter
from lpbnn.members.partial import check_expand_at
from lpbnn.members.rows import BATCH_MODES, BatchMode
from lpbnn.model import at_least_one
from lpbnn.rank_one.ensemble import BATCH_NORM_MODES, BatchNormMode
from lpbnn.rank_one.factors import INITS, Factors, Init
from lpbnn.rank_one.layer import RankOneLayer


@dataclasses.dataclass(frozen=True)
class RankOneConfig:
    """Options of all rank-one methods."""

    members: int = 4  # J, the number of members
    batch_mode: BatchMode = "split"  # in training: "split" the batch among members, or "repeat" it
    batch_norm: BatchNormMode = "shared"  # or one for each "member"
    init_std: float = 0.5  # standard deviation of the initial r and s around 1
    init: Init = "normal"  # or "signs": random +-1
    fast_lr: float = 1.0  # learning rate of the factors, as a multiple of the network's
    include: Filter = None  # path globs or layer types to convert; None: all
    exclude: Filter = None  # path globs or layer types to leave as they are
    # where the batch is expanded to members: a path, or several; None: found
    expand_at: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        at_least_one("members", self.members)
        for name in ("init_std", "fast_lr"):
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise ValueError(f"{name}={value!r}: expected a number of at least 0.")
        choose("batch_mode", self.batch_mode, BATCH_MODES)
        choose("batch_norm", self.batch_norm, BATCH_NORM_MODES)
        choose("init", self.init, INITS)


def choose(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse an option that is none of the choices."""
    if value not in choices:
        listed = " or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])])
        raise ValueError(f"{name}={value!r}: choose {listed}.")


def check_fraction(name: str, value: float) -> None:
    """Refuse a number that is no fraction of the epochs."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: expected a share of the epochs, from 0 to 1.")


def check_num_data(num_data: int | None, method: str) -> int:
    """Return num_data; the KL is divided by it, so it must be given, never guessed."""
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


def annealed(epoch: int, epochs: int, fraction: float) -> float:
    """Return the KL's weight in an epoch (from 0): it grows in equal steps to 1 over a fraction of them."""
    return min(1.0, (epoch + 1) / max(1.0, fraction * epochs))


def convert_layers(
    net: nn.Module, config: RankOneConfig, make_factors: Callable[[int, int], Factors]
) -> nn.Module:
    """Convert the chosen layers, with ``make_factors(inputs, outputs)`` for each."""

    def make_layer(layer: nn.Module, path: str) -> RankOneLayer:
        weight: Any = layer.weight
        factors = make_factors(*widths(layer)).to(weight.device, weight.dtype)
        return RankOneLayer(layer, factors, path)

    check_expand_at(net, config.expand_at)  # before anything is converted
    left_out = describe_unconverted(net, config.include, config.exclude)
    convert(net, make_layer, config.include, config.exclude)
    if left_out:
        warnings.warn(left_out, stacklevel=4)  # at lpbnn.build's caller
    return net


def ensemble_options(config: RankOneConfig) -> dict[str, Any]:
    """Return the options that ``RankOneEnsemble`` takes."""
    names = ("batch_mode", "batch_norm", "expand_at", "fast_lr")
    return {name: getattr(config, name) for name in names}
