r"""MC dropout: dropout stays on at prediction, and every pass is a draw from an approximate posterior.

.. math:: p(y|x) = \tfrac1S \sum_s p(y|x, W \odot m_s), \quad m_s \sim \mathrm{Bernoulli}(1 - \text{rate})

Where dropout acts:

- a network with ``nn.Dropout*`` layers keeps them where they are, at their rates unless ``rate`` is given
  (or all of them are 0: then 0.1);
- a network without any gets dropout in front of every Linear and convolution except the first, which
  sees the data. ``include`` and ``exclude`` choose other layers (the first too, if it is included); given
  for a network that has dropout of its own, they add to it.

Dropout called as a function, and that inside ``nn.MultiheadAttention``, cannot be found and follows the
network's mode. Batch norm follows the mode too: in evaluation it uses its running statistics.
``lpbnn.undo`` takes everything out again.

What lies before the part that drops runs once per example, not once per pass: the encoder, where only the
decoder has dropout. ``spread_at`` names another part; "" repeats the whole network.

In a call of the model every row has its own mask. In a prediction a member is one thinned network: its
masks hold for all examples, so that the answer does not depend on how the work is divided.

Gal, Ghahramani: Dropout as a Bayesian approximation: representing model uncertainty in deep learning,
ICML 2016.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lpbnn.convert.convert import Conversion, Filter, convert, disable_fused_paths, replace_modules
from lpbnn.convert.wrapper import Wrapper
from lpbnn.likelihoods import check_batch
from lpbnn.members.rows import Places, gather, mask_places, masks_given, spread_tree
from lpbnn.model import Model, Pass, Terms, as_call, at_least_one, batch_size, total
from lpbnn.rank_one.doors import check_stage, raise_with, where_spread
from lpbnn.rank_one.layer import SUPPORTED
from lpbnn.rank_one.stages import SpreadAt

RATE = 0.1  # of inserted dropout, unless another is given
ALPHA = 1.7580993408473766  # minus the value at which SELU saturates: what alpha dropout puts in

_FUNCTIONS: dict[type[nn.Module], Any] = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of mcdropout: how many passes, where dropout acts and at which rate; see the file's head."""

    members: int = 4  # passes that one call of the model makes; training makes one
    rate: float | None = None  # None: the network's own; 0.1 where it has none
    include: Filter = None  # path globs or types of the layers to put dropout in front of
    exclude: Filter = None
    spread_at: str | None = None  # where the batch becomes passes; None: found
    num_data: int | None = None  # not needed: there is no KL; taken so that methods can be swapped

    def __post_init__(self) -> None:
        at_least_one("members", self.members)
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(
                f"rate={self.rate!r}: expected a number between 0 and 1, without them."
            )


class Streams:
    """Random numbers of every member from a seed of its own: the same however members are grouped."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self._generators: dict[torch.device, list[torch.Generator]] = {}

    def kept(self, shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
        """Which entries stay, (members, *shape)."""
        if device not in self._generators:
            self._generators[device] = [
                torch.Generator(device).manual_seed(seed) for seed in self.seeds
            ]
        drawn = [
            torch.rand(*shape, generator=generator, device=device)
            for generator in self._generators[device]
        ]
        return torch.stack(drawn) >= rate


class KeptDropout(Wrapper):
    """A dropout layer that is on in evaluation too, at the layer's ``p``: ``rate`` until ``restore``.

    Example:
        >>> dropout = KeptDropout(nn.Dropout(0.5)).eval()
        >>> bool((dropout(torch.ones(1000)) == 0).any())
        True
    """

    def __init__(self, layer: nn.Module, rate: float | None = None) -> None:
        super().__init__(layer)
        kind = next((kind for kind in _FUNCTIONS if isinstance(layer, kind)), None)
        if kind is None:
            known = ", ".join(kind.__name__ for kind in _FUNCTIONS)
            raise TypeError(f"expected one of {known}; got {type(layer).__name__}.")
        replaced: tuple[Any, float | None] = (layer.p, rate)
        self.replaced = replaced  # the layer's own rate, and what was put in its place
        if rate is not None:
            self.p = rate
        self.function = _FUNCTIONS[kind]
        self.alpha = kind in (nn.AlphaDropout, nn.FeatureAlphaDropout)
        self.by_channel = kind not in (nn.Dropout, nn.AlphaDropout)
        self.streams: Streams | None = None  # set while a pass holds its masks

    @property
    def p(self) -> float:
        return self.layer.p  # type: ignore[return-value]

    @p.setter
    def p(self, rate: float) -> None:
        self.layer.p = rate  # type: ignore[assignment]

    def restore(self) -> nn.Module:
        own, put = self.replaced
        if self.p == put:  # a rate that was set since is the user's, and stays
            self.p = own
        return super().restore()

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        # Rows that do not belong to members evenly are none of ours: plain dropout suits them.
        if self.streams is None or x.shape[0] % len(self.streams.seeds):
            return self.function(x, self.p, training=True)
        shape = x.shape[1:2] + (1,) * (x.dim() - 2) if self.by_channel else x.shape[1:]
        kept = self.streams.kept(shape, self.p, x.device).unsqueeze(1)
        rows = gather(x, len(kept))
        if not self.alpha:
            return torch.where(kept, rows / (1 - self.p), 0.0).flatten(0, 1)
        scale = ((ALPHA**2 * self.p + 1) * (1 - self.p)) ** -0.5  # keeps mean 0 and variance 1
        return (scale * torch.where(kept, rows, -ALPHA) + scale * ALPHA * self.p).flatten(0, 1)


class DropBefore(Wrapper):
    """Dropout in front of a layer; the layer keeps its weights.

    Example:
        >>> DropBefore(nn.Linear(3, 2), 0.1, "head")
        DropBefore(
          (layer): Linear(in_features=3, out_features=2, bias=True)
          (dropout): KeptDropout(
            p=0.1
            (layer): Dropout(p=0.1, inplace=False)
          )
        )
    """

    added = "dropout"

    def __init__(self, layer: nn.Module, rate: float, path: str = "") -> None:
        super().__init__(layer, path)
        self.dropout = KeptDropout(nn.Dropout(rate))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer(self.dropout(x), *args, **kwargs)


class MCDropout(Model):
    """One network whose every pass drops other units.

    ``conversion`` says which layers drop, ``stage`` the part before which nothing does.
    """

    _masks: Places = ()  # of a model that an older version pickled

    def __init__(
        self,
        net: nn.Module,
        members: int,
        conversion: Conversion,
        spread_at: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        self.members = members
        self.conversion = conversion
        self.dropouts = [module for module in net.modules() if isinstance(module, KeptDropout)]
        self.stage = find_stage(net) if spread_at is None else spread_at
        self._masks = mask_places(net)
        self._spread_at = SpreadAt()
        if self.stage:
            self._spread_at.add_to(net.get_submodule(self.stage))

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._rows(args, kwargs, self.members)

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], members: int) -> Tensor:
        batch = batch_size(args, kwargs)
        if self.stage and members > 1:  # one pass, as in training, has nothing to repeat
            self._spread_at.plan = (batch, members, "repeat")
        elif not self.stage:
            masks = masks_given(self._masks, args, kwargs)
            args, kwargs = spread_tree((args, kwargs), batch, members, masks=masks)
        try:
            outputs = self.readout(self.net(*args, **kwargs))
        except (RuntimeError, ValueError) as error:
            raise_with(where_spread([self.stage]) if self.stage else "", error)
        finally:
            self._spread_at.end()
        if outputs.shape[0] != batch * members:
            raise RuntimeError(
                f"{batch} examples and {members} passes make {batch * members} rows, but the network "
                f"returned {outputs.shape[0]}. {where_spread([self.stage])}"
            )
        return gather(outputs, members)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        seeds: list[int] = torch.randint(2**62, (samples * self.members,)).tolist()
        for start in range(0, len(seeds), width):
            yield partial(self._thinned, seeds[start : start + width])

    def _thinned(self, seeds: list[int], *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of the thinned networks that these seeds stand for."""
        streams = Streams(seeds)
        try:
            for dropout in self.dropouts:
                dropout.streams = streams
            return self._rows(args, kwargs, len(seeds))
        finally:
            for dropout in self.dropouts:
                dropout.streams = None

    def loss(self, x: Any, y: Tensor) -> Terms:
        if not self.training:
            return super().loss(x, y)
        check_batch(x, y, self.task)
        args, kwargs = as_call(x)
        return total(nll=self.nll(self._rows(args, kwargs, 1)[0], y))


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    if any(isinstance(module, KeptDropout) for module in net.modules()):
        raise ValueError("the network has been built as mcdropout already. Call lpbnn.undo first.")
    if not isinstance(config.spread_at, str | None):
        raise ValueError(f"spread_at={config.spread_at!r}: mcdropout takes the path of one module.")
    check_stage(net, config.spread_at)  # before anything is changed
    own = {path: layer for path, layer in net.named_modules() if isinstance(layer, _DropoutNd)}
    conversion = Conversion(tuple(own), {})
    if not own or config.include is not None or config.exclude is not None:
        inserted = insert(net, config)
        conversion = Conversion(conversion.converted + inserted.converted, inserted.left)
    rate = config.rate
    if rate is None and not any(layer.p for layer in own.values()):
        rate = RATE  # slots that were left empty: passes must differ
    replace_modules(net, {id(layer): KeptDropout(layer, rate) for layer in own.values()})
    disable_fused_paths(net, list(own))
    return MCDropout(net, config.members, conversion, config.spread_at, **model_options)


def find_stage(net: nn.Module) -> str:
    """The part that has all dropout and everything after it; "" where that is the whole network.

    In a ``Sequential`` it begins at the first child that drops. A network of another kind is trusted to
    call its parts one after the other, as encoder and decoder are; what they do inside is not looked at.
    """
    path, module = "", net
    while True:
        holders = [
            (name, child)
            for name, child in module.named_children()
            if any(isinstance(inner, KeptDropout) for inner in child.modules())
        ]
        in_order = isinstance(module, nn.Sequential)
        if not holders or ((len(holders) > 1 or path) and not in_order):
            return path
        name, module = holders[0]
        alone = isinstance(module, KeptDropout) and not in_order  # something may go around it
        if alone or isinstance(module, nn.ModuleList | nn.ModuleDict):  # these have no forward
            return path
        path = f"{path}.{name}" if path else name


def insert(net: nn.Module, config: Config) -> Conversion:
    """Put dropout in front of the chosen layers; by default all but the first, which sees the data."""
    exclude = config.exclude
    layers = [path for path, layer in net.named_modules() if isinstance(layer, SUPPORTED)]
    if config.include is None and len(layers) > 1:
        given = [] if exclude is None else [exclude] if isinstance(exclude, str | type) else exclude
        exclude = [layers[0], *given]
    rate = RATE if config.rate is None else config.rate
    return convert(net, lambda layer, path: DropBefore(layer, rate, path), config.include, exclude)
