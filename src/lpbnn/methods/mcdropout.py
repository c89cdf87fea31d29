r"""MC dropout: dropout stays on at prediction, and every pass is a draw from an approximate posterior.

A network trained with dropout is an approximation to a Bayesian one whose weights are switched off at random;
S passes with different masks are S members.

$$p(y|x) = \tfrac1S \sum_s p(y|x, W \odot m_s), \quad m_s \sim \mathrm{Bernoulli}(1 - \text{rate})$$

Where dropout acts:

- a network with ``nn.Dropout*`` layers keeps them where they are, at their rates unless ``rate`` is given
  (or all of them are 0: then 0.1);
- a network without any gets dropout in front of every Linear and convolution except the first, which
  sees the data. ``include`` and ``exclude`` choose other layers (the first too, if it is included); given
  for a network that has dropout of its own, they add to it.

Dropout called as a function, and that inside ``nn.MultiheadAttention`` and recurrent layers, follows the
network's mode: it is off in prediction, and recurrent layers are named in a warning. Batch norm follows the
mode too: in evaluation it uses its running statistics.
``lpbnn.undo`` takes everything out again.

The part of the network before the first dropout runs once per example, not once per pass: the encoder, if
only the decoder has dropout. ``expand_at`` names another part; "" repeats the whole network.

In a call of the model every row has its own mask. In a prediction a member is one thinned network: its
masks hold for all examples, so that the prediction does not depend on how the work is divided.

Gal, Ghahramani: Dropout as a Bayesian approximation: representing model uncertainty in deep learning,
ICML 2016.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.convert.checks import SUPPORTED, Filter
from lpbnn.convert.convert import convert, replace_modules
from lpbnn.convert.wrapper import Wrapper
from lpbnn.members.call import as_call
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.members.passes import MemberPass, PassSlot, require_member_rows
from lpbnn.members.rows import gather
from lpbnn.model import Pass, Terms, noise_scale_value, with_loss
from lpbnn.options import ABOVE_0, BELOW_1, Count, Options, Range

Rate = Annotated[float, Range("a number between 0 and 1, without them", ABOVE_0, BELOW_1)]
RATE = 0.1  # of inserted dropout, unless another is given
ALPHA = 1.7580993408473766  # minus the value at which SELU saturates: what alpha dropout puts in

FUNCTIONS: dict[type[nn.Module], Any] = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of mcdropout."""

    members: Count = 4  # passes that one call of the model makes; training makes one
    rate: Rate | None = None  # None: the network's own; 0.1 if it has none
    include: Filter = None  # path globs or types of the layers to put dropout in front of
    exclude: Filter = None  # path globs or types of layers to leave as they are
    expand_at: str | None = None  # where the batch is expanded to passes; None: found


class DropoutMasks:
    """The dropout masks of a pass: a mask for every row, or masks from one seed per member.

    Masks from seeds are the same however members are grouped into passes.

    Args:
        count: the number of members.
        seeds: one per member; None draws a mask for every row.
        soft: factors around 1 in place of zeros, for a comparison: zeros hide what they multiply.
    """

    def __init__(self, count: int, seeds: Sequence[int] | None = None, soft: bool = False) -> None:
        self.count, self.seeds, self.soft = count, seeds, soft

    def take(self, start: int, count: int) -> "DropoutMasks":
        """Return ``count`` members, from ``start`` on."""
        if self.seeds is None:
            return DropoutMasks(min(count, self.count - start))
        seeds = self.seeds[start : start + count]
        return DropoutMasks(len(seeds), seeds, self.soft)

    def sample(
        self,
        shape: Sequence[int],
        rate: float,
        device: torch.device,
        generators: dict[torch.device, list[torch.Generator]],
    ) -> Tensor:
        """Return which entries stay, (members, *shape); factors if the masks are soft.

        Args:
            shape: of the entries.
            rate: the share that falls.
            device: of the mask.
            generators: those of the pass, one per member; the first layer of the pass makes them.
        """
        assert self.seeds is not None
        if device not in generators:
            generators[device] = [torch.Generator(device).manual_seed(s) for s in self.seeds]
        drawn = [torch.rand(shape, generator=g, device=device) for g in generators[device]]
        masks = torch.stack(drawn)
        return 0.75 + 0.5 * masks if self.soft else masks >= rate


class ActiveDropout(Wrapper):
    """A dropout layer that is active in evaluation too, at the layer's ``p``.

    Args:
        layer: one of torch's dropout layers.
        rate: replaces ``p`` until ``restore``; None keeps the layer's own.
        path: the layer's path in the network.

    Example:
        >>> dropout = ActiveDropout(nn.Dropout(0.5)).eval()
        >>> bool((dropout(torch.ones(1000)) == 0).any())
        True
    """

    def __init__(self, layer: nn.Module, rate: Rate | None = None, path: str = "") -> None:
        super().__init__(layer, path)
        kind = next((kind for kind in FUNCTIONS if isinstance(layer, kind)), None)
        if kind is None:
            known = ", ".join(kind.__name__ for kind in FUNCTIONS)
            raise TypeError(f"expected one of {known}; got {type(layer).__name__}.")
        replaced: tuple[Any, float | None] = (layer.p, rate)
        self.replaced = replaced  # the layer's own rate, and the one put in its place
        if rate is not None:
            self.p = rate
        self.function = FUNCTIONS[kind]
        self.alpha = kind in (nn.AlphaDropout, nn.FeatureAlphaDropout)
        self.by_channel = kind not in (nn.Dropout, nn.AlphaDropout)
        self.slot, self.index = PassSlot(), 0  # the model replaces both
        self.noise_scale = 1.0

    @property
    def p(self) -> float:
        return self.layer.p  # type: ignore[return-value]

    @p.setter
    def p(self, rate: float) -> None:
        self.layer.p = rate  # type: ignore[assignment]

    @property
    def rate(self) -> float:
        """The rate in use: ``p``, with the standard deviation of the mask times ``noise_scale``."""
        if self.noise_scale == 1 or self.p == 1:
            return self.p
        variance = self.noise_scale**2 * self.p / (1 - self.p)  # of a mask with mean 1
        return variance / (1 + variance)

    def restore(self) -> nn.Module:
        own, replacement = self.replaced
        if self.p == replacement:  # a rate that was set since is the user's, and stays
            self.p = own
        return super().restore()

    def extra_repr(self) -> str:
        return f"p={self.rate:g}"

    def forward(self, input: Tensor) -> Tensor:
        rate = self.rate
        state: MemberPass | None = self.slot.get()
        masks: DropoutMasks | None = None if state is None else state.sampled
        if state is None or masks is None or masks.seeds is None:
            return self.function(input, rate, training=True)
        require_member_rows(input.shape[0], masks.count, state, self.path)
        shape = input.shape[1:2] + (1,) * (input.dim() - 2) if self.by_channel else input.shape[1:]
        stays = masks.sample(shape, rate, input.device, state.generators).unsqueeze(1)
        rows = gather(input, len(stays))
        if masks.soft:
            return (rows * stays.to(rows.dtype)).flatten(0, 1)
        if not self.alpha:
            return torch.where(stays, rows / (1 - rate), 0.0).flatten(0, 1)
        scale = ((ALPHA**2 * rate + 1) * (1 - rate)) ** -0.5  # for mean 0 and variance 1
        return (scale * torch.where(stays, rows, -ALPHA) + scale * ALPHA * rate).flatten(0, 1)


class DropBefore(Wrapper):
    """Dropout in front of a layer; the layer keeps its weights.

    Example:
        >>> DropBefore(nn.Linear(3, 2), 0.1, "head")
        DropBefore(
          (layer): Linear(in_features=3, out_features=2, bias=True)
          (dropout): ActiveDropout(
            p=0.1
            (layer): Dropout(p=0.1, inplace=False)
          )
        )
    """

    added = "dropout"

    def __init__(self, layer: nn.Module, rate: float, path: str = "") -> None:
        super().__init__(layer, path)
        self.dropout = ActiveDropout(nn.Dropout(rate), path=path)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer(self.dropout(input), *args, **kwargs)


class MCDropout(MemberEnsemble):
    """One network whose every pass drops other units.

    Args:
        net: the network, with ``ActiveDropout`` in it.
        members: passes of one call.
        expand_at: the part before which nothing drops.
        **options: of ``UncertainModel``.

    Example:
        >>> model = build(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), Config(members=5))
        >>> tuple(model(torch.randn(6, 4)).shape)
        (5, 6, 3)
    """

    member_layer = ActiveDropout
    layers: list[ActiveDropout]

    def __init__(
        self,
        net: nn.Module,
        members: int,
        expand_at: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(net, expand_at=expand_at, **options)
        self.members = members

    def find_expansion_points(self) -> tuple[list[list[str]], list[str]]:
        safe = [find_dropping_part(self.net)]
        return ([safe] if safe == [""] else [safe, [""]]), safe

    def sample(self, samples: int = 1) -> DropoutMasks:
        return DropoutMasks(samples * self.members)

    def probe(self, count: int) -> DropoutMasks:
        return DropoutMasks(count, list(range(1, count + 1)), soft=True)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        seeds: list[int] = torch.randint(2**62, (samples * self.members,)).tolist()
        masks = DropoutMasks(len(seeds), seeds)
        for start in range(0, masks.count, width):
            yield partial(self._outputs_of, masks.take(start, width), True)

    @property
    def noise_scale(self) -> float:
        """The factor on the standard deviation of the masks; 1 is that of training."""
        return self.layers[0].noise_scale

    def set_noise_scale(self, scale: float) -> None:
        """Scale the standard deviation of the masks, sqrt(p / (1 - p)), of all dropout layers."""
        for dropout in self.layers:
            dropout.noise_scale = noise_scale_value(scale)

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "noise_scale": self.noise_scale}

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state)
        self.set_noise_scale(json.loads(bytes(state.tolist())).get("noise_scale", 1.0))

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        if not self.training:
            return super().loss(x, y, weight)
        self.likelihood.check_batch(x, y)
        outputs = self.run(DropoutMasks(1), self.call(*as_call(x)))
        return with_loss(**self.likelihood.nll_terms(outputs, y, weight))


def build(net: nn.Module, config: Config, **model_options: Any) -> MCDropout:
    """Keep the dropout of ``net`` active, or put some into it, in place."""
    if not isinstance(config.expand_at, str | None):
        raise ValueError(f"expand_at={config.expand_at!r}: mcdropout takes the path of one module.")
    own = {
        path: layer for path, layer in net.named_modules() if isinstance(layer, tuple(FUNCTIONS))
    }
    if not own or config.include is not None or config.exclude is not None:
        insert_dropout(net, config)
    rate = config.rate
    if rate is None and not any(layer.p for layer in own.values()):
        rate = RATE  # all rates are 0: passes must differ
    active = {id(layer): ActiveDropout(layer, rate, path) for path, layer in own.items()}
    replace_modules(net, active)
    warn_of_recurrent_layers(net)
    return MCDropout(net, config.members, config.expand_at, **model_options)


def find_dropping_part(net: nn.Module) -> str:
    """Return the part that has all dropout and everything after it; "" if that is the whole network.

    In a ``Sequential`` it begins at the first child that drops. Networks of other kinds are taken to call
    their parts one after the other, as encoder and decoder are; ``lpbnn.check`` finds those that do not.
    """
    path, module = "", net
    while True:
        holders = [
            (name, child)
            for name, child in module.named_children()
            if any(isinstance(inner, ActiveDropout) for inner in child.modules())
        ]
        in_order = isinstance(module, nn.Sequential)
        if not holders or ((len(holders) > 1 or path) and not in_order):
            return path
        name, module = holders[0]
        alone = isinstance(module, ActiveDropout) and not in_order  # a tensor may go around it
        if alone or isinstance(module, nn.ModuleList | nn.ModuleDict):  # these have no forward
            return path
        path = f"{path}.{name}" if path else name


def insert_dropout(net: nn.Module, config: Config) -> None:
    """Put dropout in front of the chosen layers; by default all but the first, which sees the data."""
    exclude = config.exclude
    layers = [path for path, layer in net.named_modules() if isinstance(layer, SUPPORTED)]
    if config.include is None and len(layers) > 1:
        given = [] if exclude is None else [exclude] if isinstance(exclude, str | type) else exclude
        exclude = [layers[0], *given]
    rate = RATE if config.rate is None else config.rate
    convert(net, lambda layer, path: DropBefore(layer, rate, path), config.include, exclude)


def warn_of_recurrent_layers(net: nn.Module) -> None:
    """Name the recurrent layers, in which no unit is dropped in prediction."""
    named = [
        f"{path!r} ({type(module).__name__})"
        for path, module in net.named_modules()
        if isinstance(module, nn.RNNBase)
    ]
    if named:
        warnings.warn(
            f"mcdropout drops nothing inside of {', '.join(named)}: a recurrent layer has no place for "
            "dropout that stays on in prediction, and its own dropout= is on in training only. Passes "
            "differ by the other layers alone.",
            UserWarning,
            stacklevel=4,  # at lpbnn.build's caller
        )
