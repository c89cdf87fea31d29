r"""MIMO: one network with M inputs and M outputs trains M subnetworks at the price of one.

.. math::
    (o_1, ..., o_M) = f(x_1, ..., x_M), \quad L = \sum_m \overline{NLL}(o_m, y_m), \quad
    p(y|x) = \tfrac1M \sum_m p(y | f_m(x, ..., x))

In training every head sees a batch shuffled on its own and answers for its own input only; at test all
see the same input. Each batch is shown ``batch_repetitions`` times at once, which costs as much. With
``input_repetition`` p, that share of the rows gives the same input to all heads in training too.

The network's first layer is widened to M times the input channels and its last one to M times the
outputs; both are found by the order of registration, or named (``first``, ``last``). What comes before the
first layer runs for each input, what comes after the last for each output. The M copies of their weights
start apart: the first is the given one, the others have its entries shuffled, so the scale is that of the
given network whatever its initialiser; those of the first layer are divided by sqrt(M), because M inputs
are added up. ``lpbnn.undo`` gives the plain network of the first subnetwork.

Havasi et al.: Training independent subnetworks for robust prediction, ICLR 2021.
"""

import dataclasses
import difflib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lpbnn.convert.convert import convert
from lpbnn.convert.wrapper import Wrapper
from lpbnn.likelihoods import check_batch, require_targets
from lpbnn.members.rows import Places, gather, is_batched, mask_places, masks_given, spread_tree
from lpbnn.model import Model, Terms, as_call, at_least_one, batch_size, total
from lpbnn.rank_one.doors import raise_with
from lpbnn.rank_one.layer import SUPPORTED, TRANSPOSED


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of mimo: its subnetworks, how a batch is dealt to them, and where they begin and end."""

    members: int = 3  # M
    batch_repetitions: int = 4  # times each example is shown in a training step
    input_repetition: float = 0.0  # share of training rows with the same input for all heads
    first: str | None = None  # path of the layer that takes the inputs; None: the first registered
    last: str | None = None  # path of the layer that gives the outputs; None: the last registered
    num_data: int | None = None  # not needed: there is no KL; taken so that methods can be swapped

    def __post_init__(self) -> None:
        for name in ("members", "batch_repetitions"):
            at_least_one(name, getattr(self, name))
        if not 0 <= self.input_repetition <= 1:
            raise ValueError(
                f"input_repetition={self.input_repetition!r}: expected a share between 0 and 1."
            )


class _Wide(Wrapper):
    """A layer M times as wide on one side.

    Its channels on that side are ordered (group, member, channel), so that a convolution's groups hold.
    """

    guarded = ()  # the wide weight is the layer's own
    side: str  # "in" or "out"

    def __init__(self, layer: nn.Module, members: int, scale: float = 1.0) -> None:
        super().__init__(layer)
        self.members = members
        linear = isinstance(layer, nn.Linear)
        self.channel = -1 if linear else 1
        self.groups: int = 1 if linear else layer.groups  # type: ignore[assignment]
        self.width_name = f"{self.side}_{'features' if linear else 'channels'}"
        self.axis = int((self.side == "in") != isinstance(layer, TRANSPOSED))
        weight = self._parameter("weight").detach()
        copies = [weight, *(_shuffled(weight) for _ in range(members - 1))]
        self._set(_join(copies, self.axis, self.groups) * scale, members * self.width)

    @property
    def width(self) -> int:
        return getattr(self.layer, self.width_name)

    def _parameter(self, name: str) -> nn.Parameter:
        return getattr(self.layer, name)

    def _set(self, weight: Tensor, width: int) -> None:
        self.layer.weight = nn.Parameter(weight, self._parameter("weight").requires_grad)
        setattr(self.layer, self.width_name, width)

    def _copies(self) -> list[Tensor]:
        return _part(self._parameter("weight").detach(), self.axis, self.groups, self.members)


class FirstLayer(_Wide):
    """Rows of M inputs, member-major, go in; one row for every M comes out.

    Example:
        >>> layer = FirstLayer(nn.Conv2d(3, 8, 3), members=2)
        >>> tuple(layer(torch.randn(10, 3, 5, 5)).shape)  # five pairs of images
        (5, 8, 3, 3)
    """

    side = "in"

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(layer, members, scale=members**-0.5)

    def restore(self) -> nn.Module:
        """The layer that does the same where all inputs are equal."""
        self._set(torch.stack(self._copies()).sum(0), self.width // self.members)
        return super().restore()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = gather(x, self.members).unbind()
        groups = [part.unflatten(self.channel, (self.groups, -1)) for part in inputs]
        axis = -2 if self.channel == -1 else 2
        joined = torch.stack(groups, axis).flatten(axis - 1, axis + 1)
        return self.layer(joined, *args, **kwargs)


class LastLayer(_Wide):
    """One row goes in; the outputs of M heads come out, one row each, member-major.

    Example:
        >>> layer = LastLayer(nn.Linear(8, 10), members=2)
        >>> tuple(layer(torch.randn(5, 8)).shape)
        (10, 10)
    """

    side = "out"

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(layer, members)
        if layer.bias is not None:
            self._set_bias(_join([self._parameter("bias").detach()] * members, 0, self.groups))

    def _set_bias(self, bias: Tensor) -> None:
        self.layer.bias = nn.Parameter(bias, self._parameter("bias").requires_grad)

    def restore(self) -> nn.Module:
        """The layer of the first head."""
        if self.layer.bias is not None:
            biases = _part(self._parameter("bias").detach(), 0, self.groups, self.members)
            self._set_bias(biases[0].clone())
        self._set(self._copies()[0].clone(), self.width // self.members)
        return super().restore()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.layer(x, *args, **kwargs)
        axis = -2 if self.channel == -1 else 2
        heads = y.unflatten(self.channel, (self.groups, self.members, -1)).unbind(axis)
        axis = -2 if self.channel == -1 else 1
        return torch.cat([head.flatten(axis, axis + 1) for head in heads])


class Mimo(Model):
    """M subnetworks in one; a call answers for the same input M times."""

    stochastic = False
    _masks: Places = ()  # of a model that an older version pickled

    def __init__(
        self, net: nn.Module, config: Config, ends: tuple[str, str], **options: Any
    ) -> None:
        super().__init__(net, **options)
        self.members = config.members
        self.batch_repetitions = config.batch_repetitions
        self.input_repetition = config.input_repetition
        self.ends = ends
        self._masks = mask_places(net)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        batch, masks = batch_size(args, kwargs), masks_given(self._masks, args, kwargs)
        return self._heads(*spread_tree((args, kwargs), batch, self.members, masks=masks))

    def _heads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Rows of inputs, member-major, to the outputs (M, rows / M, C, ...)."""
        rows = batch_size(args, kwargs)
        try:
            outputs = self.readout(self.net(*args, **kwargs))
        except RuntimeError as error:
            raise_with(self._where(), error)
        if outputs.shape[0] != rows:
            raise RuntimeError(
                f"{rows} inputs went in and {outputs.shape[0]} outputs came out. {self._where()}"
            )
        return gather(outputs, self.members)

    def _where(self) -> str:
        return (
            f"mimo joins {self.members} inputs at {self.ends[0]!r} and parts the heads at "
            f"{self.ends[1]!r}. If a tensor goes around these layers and meets what they return, or "
            "they are not called once each, name others with first=... and last=..."
        )

    def loss(self, x: Any, y: Tensor) -> Terms:
        args, kwargs = as_call(x)
        batch = batch_size(args, kwargs)
        check_batch(x, y, self.task)
        require_targets(y, batch)
        dealt, masks = self.deal(batch, y.device), masks_given(self._masks, args, kwargs)

        def take(part: Tensor) -> Tensor:
            mine = is_batched(part, batch, masks)
            return part[dealt.flatten().to(part.device)] if mine else part

        heads = self._heads(*tree_map_only(Tensor, take, (args, kwargs)))
        losses = [self.nll(outputs, y[rows]) for outputs, rows in zip(heads, dealt, strict=True)]
        return total(nll=torch.stack(losses).sum())

    def deal(self, batch: int, device: torch.device) -> Tensor:
        """Which example each head sees in each row, (M, rows); in evaluation all see the same."""
        if not self.training:
            return torch.arange(batch, device=device).expand(self.members, -1)
        rows = batch * self.batch_repetitions
        order = torch.randperm(rows, device=device) % batch
        alone = round(rows * (1 - self.input_repetition))
        shuffles = torch.rand(self.members, alone, device=device).argsort(1)
        same = order[alone:].expand(self.members, -1)
        return torch.cat([order[:alone][shuffles], same], 1)


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    first, last = find_ends(net, config.first, config.last)

    def wide(layer: nn.Module, path: str) -> nn.Module:
        return (FirstLayer if path == first else LastLayer)(layer, config.members)

    convert(net, wide, include=[first, last])
    return Mimo(net, config, (first, last), **model_options)


def find_ends(net: nn.Module, first: str | None, last: str | None) -> tuple[str, str]:
    """The paths of the layers that take the inputs and give the outputs."""
    inside = {
        id(layer)
        for module in net.modules()
        if isinstance(module, nn.MultiheadAttention)  # reads their weights past their forward
        for layer in module.modules()
    }
    layers = {
        path: layer
        for path, layer in net.named_modules()
        if isinstance(layer, SUPPORTED) and id(layer) not in inside
    }
    listed = ", ".join(list(layers)[:20]) or "none"
    for name, path in (("first", first), ("last", last)):
        if path is not None and path not in layers:
            close = difflib.get_close_matches(path, layers, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{name}={path!r} is no Linear or convolution of the network.{hint} "
                f"Its layers are: {listed}."
            )
    if len(layers) < 2:
        raise ValueError(
            f"mimo widens the first and the last layer of a network, so it needs two; found: {listed}."
        )
    ends = first or next(iter(layers)), last or list(layers)[-1]
    if ends[0] == ends[1]:
        raise ValueError(f"first and last are both {ends[0]!r}; expected two layers of: {listed}.")
    for path in ends:
        if "weight" not in layers[path]._parameters:
            raise ValueError(
                f"{path!r} computes its weight itself (parametrised, or with weight or spectral norm) "
                f"and cannot be widened. Name another layer with first=... or last=...: {listed}."
            )
    return ends


def _shuffled(weight: Tensor) -> Tensor:
    order = torch.randperm(weight.numel()).to(weight.device)
    return weight.flatten()[order].view_as(weight)


def _join(copies: list[Tensor], axis: int, groups: int) -> Tensor:
    """One tensor of M, along ``axis``; axis 0 of a weight or bias runs over the groups as well."""
    if axis == 1:
        return torch.cat(copies, 1)
    return torch.stack([copy.unflatten(0, (groups, -1)) for copy in copies], 1).flatten(0, 2)


def _part(joined: Tensor, axis: int, groups: int, members: int) -> list[Tensor]:
    """The inverse of ``_join``."""
    if axis == 1:
        return list(joined.chunk(members, 1))
    parts = joined.unflatten(0, (groups, members, -1)).unbind(1)
    return [part.flatten(0, 1) for part in parts]
