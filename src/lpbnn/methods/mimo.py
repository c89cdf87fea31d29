r"""MIMO: one network with M inputs and M outputs trains M subnetworks at the price of one.

The subnetworks share all layers but the first and the last, and become independent because each must predict
its own input among M that are seen together. The network needs capacity for M of them.

$$
(o_1, ..., o_M) = f(x_1, ..., x_M), \quad L = \sum_m \overline{NLL}(o_m, y_m), \quad
p(y|x) = \tfrac1M \sum_m p(y | f_m(x, ..., x))
$$

In training every head sees the batch in an order of its own and predicts for its own input only; in
evaluation all heads see the same input. A training step shows each example ``batch_repetitions`` times, at
so many times the cost. ``input_repetition`` is the share of training rows in which all heads see the same
input.

The first layer of the network is widened to M times the input channels and its last one to M times the
outputs. Both are found by the order of registration, or named (``first``, ``last``); a network with several
outputs has a last layer for each. What runs before the first layer runs for each input, and what runs after
the last for each output. The M copies of the weights start different: the first is the given one, and the
others are random permutations of its entries, so that the scale is that of the given network. Those of the
first layer are divided by sqrt(M), because M inputs are added up. ``lpbnn.undo`` returns the plain network
of the first subnetwork.

Shuffling the batch is right only if the network treats its examples independently. If it does not (a graph
network, whose rows are nodes), the first training loss is an error; a compiled loss is not checked.

Havasi et al.: Training independent subnetworks for robust prediction, ICLR 2021.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.convert.convert import convert
from lpbnn.convert.wrapper import Wrapper, move_hooks
from lpbnn.likelihoods import MultiHead, require_targets
from lpbnn.members.call import Call, CallCheck, as_call, batch_size, call_kind, raise_with_advice
from lpbnn.members.rows import expand_batch, gather, map_tensors
from lpbnn.model import Outputs, Terms, UncertainModel, with_loss
from lpbnn.options import Count, Options, Share
from lpbnn.rank_one.layer import SUPPORTED, TRANSPOSED
from lpbnn.registry import did_you_mean


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of mimo."""

    members: Count = 3  # M, subnetworks
    batch_repetitions: Count = 4  # times that a training step shows each example
    input_repetition: Share = 0.0  # share of training rows with the same input for all heads
    first: str | None = None  # path of the layer that takes the inputs; None: the first registered
    last: str | Sequence[str] | None = None  # path(s) of the output layer(s); None: the last ones


class _Wide(Wrapper):
    """A layer that is M times as wide on one side.

    Its channels on that side are in the order (group, member, channel), so that a convolution keeps its
    groups; the first axis of a weight has the groups.

    Args:
        layer: a Linear or (transposed) convolution.
        members: M.
        scale: multiplies the M copies of the weight.
    """

    guarded = ()  # the wide weight is the layer's own
    side: str  # "in" or "out"
    alone: int | None = None  # the only member that runs, for a comparison

    def __init__(self, layer: Any, members: int, scale: float = 1.0) -> None:
        super().__init__(layer)
        self.members = members
        linear = isinstance(layer, nn.Linear)
        self.groups: int = 1 if linear else layer.groups
        self.channel = -1 if linear else 1 - layer.weight.dim()  # axis of the channels in an input
        self.axis = int((self.side == "in") != isinstance(layer, TRANSPOSED))  # in the weight
        self.width = f"{self.side}_{'features' if linear else 'channels'}"
        weight = layer.weight.detach()
        copies = [weight, *(_shuffled(weight) for _ in range(members - 1))]
        self._set("weight", self._join(copies, self.axis) * scale)
        setattr(layer, self.width, members * getattr(layer, self.width))

    def unconverted(self) -> nn.Module:
        layer = copy.deepcopy(self).restore()
        move_hooks(layer, nn.Module())
        return layer

    def _set(self, name: str, value: Tensor) -> None:
        learns = getattr(self.layer, name).requires_grad
        setattr(self.layer, name, nn.Parameter(value, learns))

    def _join(self, copies: list[Tensor], axis: int) -> Tensor:
        parts = [copy.unflatten(0, (self.groups, -1)) for copy in copies]
        return torch.cat(parts, 1 + axis).flatten(0, 1)

    def _copies(self, name: str, axis: int) -> list[Tensor]:
        """Return the M tensors that ``_join`` joined, as they are now."""
        joined = getattr(self.layer, name).detach().unflatten(0, (self.groups, -1))
        return [part.flatten(0, 1) for part in joined.chunk(self.members, 1 + axis)]

    def _narrow(self, weight: Tensor) -> nn.Module:
        """Return the layer at its own width, with this weight."""
        self._set("weight", weight)
        setattr(self.layer, self.width, getattr(self.layer, self.width) // self.members)
        return super().restore()


class FirstLayer(_Wide):
    """A first layer: takes rows of M inputs, member-major, and returns one row for every M.

    Example:
        >>> layer = FirstLayer(nn.Conv2d(3, 8, 3), members=2)
        >>> tuple(layer(torch.randn(10, 3, 5, 5)).shape)  # five pairs of images
        (5, 8, 3, 3)
    """

    side = "in"

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(layer, members, scale=members**-0.5)

    def restore(self) -> nn.Module:
        """Return the layer that computes the same if all inputs are equal."""
        return self._narrow(torch.stack(self._copies("weight", self.axis)).sum(0))

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.alone is not None:
            input = expand_batch(input, self.members)
        groups = gather(input, self.members).unflatten(self.channel, (self.groups, -1))
        joined = torch.stack(groups.unbind(), self.channel - 1)
        return self.layer(joined.flatten(self.channel - 2, self.channel), *args, **kwargs)


class LastLayer(_Wide):
    """A last layer: takes rows, and returns the rows of M heads, member-major.

    Example:
        >>> layer = LastLayer(nn.Linear(8, 10), members=2)
        >>> tuple(layer(torch.randn(5, 8)).shape)
        (10, 10)
    """

    side = "out"

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(layer, members)
        if isinstance(layer.bias, Tensor):
            self._set("bias", self._join([layer.bias.detach()] * members, 0))

    def restore(self) -> nn.Module:
        """Return the layer of the first head."""
        if self.layer.bias is not None:
            self._set("bias", self._copies("bias", 0)[0].clone())
        return self._narrow(self._copies("weight", self.axis)[0].clone())

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.layer(input, *args, **kwargs)
        heads = y.unflatten(self.channel, (self.groups, self.members, -1))
        # torch.export takes any batch in unbind and cat, but not in movedim and flatten.
        own = [
            head.flatten(self.channel - 1, self.channel) for head in heads.unbind(self.channel - 1)
        ]
        return torch.cat(own) if self.alone is None else own[self.alone]


class MIMO(UncertainModel):
    """M subnetworks in one network; a call gives all of them the same input.

    Args:
        net: a network whose first and last layers have been widened.
        config: the options.
        ends: the paths of the first layer and of the last layers.
        model_options: ``likelihood`` (any; ``MultiHead`` needs a last layer per head) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = build(net, Config(members=2))
        >>> list(model.loss(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
        ['loss', 'nll']
        >>> tuple(model(torch.randn(5, 4)).shape)
        (2, 5, 3)
    """

    stochastic = False

    def __init__(
        self, net: nn.Module, config: Config, ends: tuple[str, list[str]], **model_options: Any
    ) -> None:
        super().__init__(net, **model_options)
        self.members = config.members
        self.config = config
        self.first, self.last = ends

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        call = self.call(args, kwargs, self.members)
        return self._run(*call.map_examples(expand_batch, members=self.members))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        """Return the outputs (M, rows / M, ...) for inputs in member-major rows."""
        rows = batch_size(args, kwargs)
        try:
            outputs = self.run_network(*args, **kwargs)
        except RuntimeError as error:
            raise_with_advice(self._advice(), error)

        def heads(output: Tensor) -> Tensor:
            if output.shape[0] != rows:
                raise RuntimeError(
                    f"{rows} inputs went in and {output.shape[0]} outputs came out. {self._advice()}"
                )
            return gather(output, self.members)

        return map_tensors(heads, outputs)

    def _advice(self) -> str:
        return (
            f"mimo joins {self.members} inputs at {self.first!r} and separates the heads at "
            f"{', '.join(map(repr, self.last))}. If a tensor bypasses these layers and meets what they "
            "return, or they are not called once each, name others with first=... and last=..."
        )

    def compare(self, call: Call) -> None:
        """Find out if examples are independent; refuse a network whose rows meet the wrong heads."""
        from lpbnn.check import heads_equal_members  # imports point the other way

        kind = call_kind(call.args, call.kwargs)
        self.checks[kind] = CallCheck("single")  # the comparisons call this model
        try:
            super().compare(call)
            if not heads_equal_members(self, call):
                raise ValueError(
                    "the heads do not predict what each subnetwork predicts alone, so members cannot run "
                    f"together. {self._advice()}, in the order of their calls. A network that joins rows in "
                    "front of the first layer, or takes rows apart behind the last one, has no such layers."
                )
        except BaseException:
            self.checks[kind] = CallCheck()
            raise

    def run_alone(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        """Return the outputs (B, ...) of one subnetwork that sees each example at all its inputs.

        The reference for a comparison: nothing but the first and the last layers has other rows than in a
        network that was not converted.
        """
        wide = [module for module in self.net.modules() if isinstance(module, _Wide)]
        try:
            for layer in wide:
                layer.alone = member
            return self.run_network(*args, **kwargs)
        finally:
            for layer in wide:
                layer.alone = None

    def chunk_sizes(self, batch: int, samples: int, chunk: int | None) -> tuple[int, int]:
        examples = batch if chunk is None else max(1, chunk // self.members)
        return self.members, min(batch, examples)

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        """Return the NLL, summed over the heads; see ``UncertainModel.loss``."""
        args, kwargs = as_call(x)
        batch = batch_size(args, kwargs)
        self.likelihood.check_batch(x, y)
        require_targets(y, weight, batch)
        call = self.call(args, kwargs, self.members)
        if self.training:
            call = self.independent_call(args, kwargs)
        device = next(t.device for t in tree_leaves((y, args, kwargs)) if isinstance(t, Tensor))
        examples = self.shuffled_examples(batch, device)
        outputs = self._run(*call.map_examples(lambda x: x[examples.flatten().to(x.device)]))
        heads = []
        for member, rows in enumerate(examples):
            own = map_tensors(lambda t, m=member: t[m], outputs)
            targets = map_tensors(lambda t, r=rows: t[r.to(t.device)], y)
            weights = None if weight is None else weight[rows.to(weight.device)]
            heads.append(self.likelihood.nll_terms(own, targets, weights))
        return with_loss(**{name: torch.stack([h[name] for h in heads]).sum() for name in heads[0]})

    def shuffled_examples(self, batch: int, device: torch.device) -> Tensor:
        """Return which example each head sees in each row, (M, rows); in evaluation all see the same."""
        if not self.training:
            return torch.arange(batch, device=device).expand(self.members, -1)
        rows = batch * self.config.batch_repetitions
        order = torch.randperm(rows, device=device) % batch
        different = round(rows * (1 - self.config.input_repetition))
        shuffles = torch.rand(self.members, different, device=device).argsort(1)
        same = order[different:].expand(self.members, -1)
        return torch.cat([order[:different][shuffles], same], 1)


def build(net: nn.Module, config: Config, **model_options: Any) -> MIMO:
    """Widen the first and the last layer of ``net``, in place."""
    likelihood = model_options.get("likelihood")
    heads = len(likelihood.names) if isinstance(likelihood, MultiHead) else 1
    first, last = find_ends(net, config.first, config.last, heads)

    def widen(layer: nn.Module, path: str) -> nn.Module:
        return (FirstLayer if path == first else LastLayer)(layer, config.members)

    convert(net, widen, include=[first, *last])
    return MIMO(net, config, (first, last), **model_options)


def find_ends(
    net: nn.Module, first: str | None, last: str | Sequence[str] | None, heads: int = 1
) -> tuple[str, list[str]]:
    """Return the path of the layer that takes the inputs, and those of the layers that return outputs.

    Args:
        net: the network.
        first: the path that the user gave; None takes the first registered layer.
        last: the path or paths that the user gave; None takes the last ``heads`` registered layers.
        heads: the number of outputs of the network.
    """
    in_attention = {
        id(layer)
        for module in net.modules()
        if isinstance(module, nn.MultiheadAttention)  # uses their weights without their forward
        for layer in module.modules()
    }
    layers = {
        path: layer
        for path, layer in net.named_modules()
        if isinstance(layer, SUPPORTED) and id(layer) not in in_attention
    }
    listed = ", ".join(list(layers)[:20]) or "none"
    named = [last] if isinstance(last, str) else list(last or ())
    for name, path in (("first", first), *(("last", path) for path in named)):
        if path is not None and path not in layers:
            raise ValueError(
                f"{name}={path!r} is no Linear or convolution of the network.{did_you_mean(path, layers)} "
                f"Its layers are: {listed}."
            )
    if len(layers) <= heads:
        raise ValueError(
            f"mimo widens the first and the last layer of a network, so it needs {heads + 1}; found: "
            f"{listed}."
        )
    ends = first or next(iter(layers)), named or list(layers)[-heads:]
    if ends[0] in ends[1]:
        raise ValueError(f"first and last are both {ends[0]!r}; expected two layers of: {listed}.")
    for path in (ends[0], *ends[1]):
        if "weight" not in layers[path]._parameters:
            raise ValueError(
                f"{path!r} computes its weight itself (parametrised, or with weight or spectral norm) "
                f"and cannot be widened. Name another layer with first=... or last=...: {listed}."
            )
    return ends


def _shuffled(weight: Tensor) -> Tensor:
    order = torch.randperm(weight.numel()).to(weight.device)
    return weight.flatten()[order].view_as(weight)
