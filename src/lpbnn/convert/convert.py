"""The converter: replace layers of any network by path, in place, weights kept bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lpbnn.convert.attention import PROJECTIONS, SplitAttention
from lpbnn.convert.checks import (
    SUPPORTED,
    Candidate,
    Filter,
    Filters,
    ancestors,
    describe_unconverted,
    find_bare_matrices,
    find_hidden_references,
    is_convertible,
    join,
    refuse_unconvertible,
)
from lpbnn.convert.recurrent import SplitRecurrent
from lpbnn.convert.transposed import is_transposed_linear, replace_by_linear, restore_origin
from lpbnn.convert.wrapper import Wrapper
from lpbnn.registry import did_you_mean

LayerFactory = Callable[[nn.Module, str], nn.Module]


@dataclass(frozen=True)
class Conversion:
    """The paths that ``convert`` converted, those it left with the reason, and a warning for the user.

    Args:
        converted: paths of the converted layers.
        left: the reason why a layer was left, by path.
        unconverted: names modules that hold a large part of the weights and are no layers; empty if there
            are none, or if the user left them out.
    """

    converted: tuple[str, ...]
    left: dict[str, str]
    unconverted: str = ""

    def __str__(self) -> str:
        lines = [f"converted {len(self.converted)} layers: {', '.join(self.converted)}"]
        lines += [f"left {path}: {reason}" for path, reason in self.left.items()]
        return "\n".join(lines)


def convert(
    net: nn.Module,
    layer_factory: LayerFactory,
    include: Filter = None,
    exclude: Filter = None,
) -> Conversion:
    """Replace every chosen Linear and (transposed) convolution by ``layer_factory(layer, path)``.

    A module used twice is converted once. ``undo`` gives the network back.

    Args:
        net: the network, changed in place.
        layer_factory: makes the replacement of a layer, a ``Wrapper``.
        include: path globs ("decoder.*"; "decoder" means all below it), layer types, or a list of both;
            None: all layers. Each must match a layer.
        exclude: the same, for layers to leave. Each must match a layer, or a module with weights of another
            kind (see ``describe_unconverted``).

    Raises:
        ValueError: nothing matches; a pattern matches nothing; a chosen layer cannot be converted.

    Example:
        >>> from lpbnn.rank_one.factors import PointFactors
        >>> from lpbnn.convert.checks import widths
        >>> from lpbnn.rank_one.layer import RankOneLayer
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> factory = lambda layer, path: RankOneLayer(layer, PointFactors(4, *widths(layer)), path)
        >>> print(convert(net, factory, exclude="2"))
        converted 1 layers: 0
        left 2: excluded
    """
    refuse_converted(net)
    layers, filters = find_layers(net), Filters(include, exclude)
    chosen: list[str] = []
    left: dict[str, str] = {}
    for path, layer in layers.items():
        if reason := filters.reason_to_leave(layer):
            left[path] = reason
        else:
            chosen.append(path)
    total, bare = find_bare_matrices(net)
    if (idle := filters.find_idle(list(layers.values()), bare)) is not None:
        name, pattern = idle
        near = pattern if isinstance(pattern, str) else ""
        raise ValueError(f"{name}={pattern!r} matches no layer. {_layers_found(layers, near)}")
    if not chosen:
        raise ValueError(_nothing_to_convert(net, layers, include, exclude))
    hidden = find_hidden_references(net)
    for path in chosen:
        refuse_unconvertible(net, path, layers[path].module, hidden)
    conversion = Conversion(tuple(chosen), left, describe_unconverted(net, total, bare, filters))

    rewritten: dict[int, nn.Module] = {}  # an attention has up to four chosen projections
    for path in chosen:
        module = layers[path].module
        if isinstance(module, nn.MultiheadAttention) and id(module) not in rewritten:
            rewritten[id(module)] = SplitAttention(module)
        elif is_transposed_linear(module):
            rewritten[id(module)] = replace_by_linear(module)
    replace_modules(net, rewritten)
    replacements: dict[int, nn.Module] = {}
    try:
        for path in chosen:
            layer = net.get_submodule(path)
            replacements[id(layer)] = layer_factory(layer, path)
    except BaseException:  # leave the network as it was found
        for made in replacements.values():
            if isinstance(made, Wrapper):
                made.restore()
        undo(net)
        raise
    replace_modules(net, replacements)
    disable_fused_paths(net, chosen)
    return conversion


def undo(net: nn.Module) -> nn.Module:
    """Take every converted layer out again, in place, and return the network.

    Weights are the shared weights as they are now; a bias is the mean of the members' biases. A
    network that was converted and not trained comes back bit for bit.
    """
    for kind in (Wrapper, SplitAttention, SplitRecurrent):  # these after the layers in them
        found = [module for module in net.modules() if isinstance(module, kind)]
        replace_modules(net, {id(module): module.restore() for module in found})
    origins = {id(module): restore_origin(module) for module in net.modules()}
    replace_modules(net, {key: layer for key, layer in origins.items() if layer is not None})
    for module in net.modules():
        for name, value in module.__dict__.pop("_before_conversion", {}).items():
            setattr(module, name, value)
    return net


def refuse_converted(net: nn.Module) -> None:
    """Raise an error if a part of a network is converted."""
    for path, module in net.named_modules():
        if isinstance(module, Wrapper):
            raise ValueError(
                f"{path!r} is converted already ({type(module).__name__}). Call lpbnn.undo first; several "
                "parts are converted in one call: include=[...]."
            )


def find_layers(net: nn.Module) -> dict[str, Candidate]:
    """Return the layers that can be chosen, by first path; attention stands for its four projections.

    Example:
        >>> list(find_layers(nn.TransformerEncoderLayer(8, 2)))[:5]
        ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.out_proj', 'linear1']
    """
    if isinstance(net, (*SUPPORTED, nn.MultiheadAttention)):
        return {}  # it has no parent in which it could be replaced
    found: dict[tuple[int, str], Candidate] = {}
    outer = None  # the layer whose own parts come next
    for path, module in net.named_modules(remove_duplicate=False):
        inside = outer is not None and path.startswith(f"{outer}.")
        if not path or inside or not is_convertible(module):
            continue
        outer, attention = path, isinstance(module, nn.MultiheadAttention)
        for projection in PROJECTIONS if attention else ("",):
            candidate = found.setdefault((id(module), projection), Candidate([], module))
            candidate.paths.append(join(path, projection) if projection else path)
    return {candidate.paths[0]: candidate for candidate in found.values()}


def replace_modules(net: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules, given by id, wherever the network holds them."""
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])


def disable_fused_paths(net: nn.Module, chosen: list[str]) -> None:
    """Transformer layers read their linears' weights in a fused kernel; keep them to the plain path."""
    switches = {
        nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
        nn.TransformerEncoder: ("use_nested_tensor", False),
    }
    for path in chosen:
        for _, module in ancestors(net, path):
            for kind, (name, value) in switches.items():
                if isinstance(module, kind) and "_before_conversion" not in vars(module):
                    module._before_conversion = {name: getattr(module, name)}  # type: ignore[assignment]
                    setattr(module, name, value)


def _nothing_to_convert(
    net: nn.Module, layers: dict[str, Candidate], include: Filter, exclude: Filter
) -> str:
    kind = type(net).__name__
    if isinstance(net, (*SUPPORTED, nn.MultiheadAttention)):
        return f"the network is itself a {kind} and cannot be replaced in place. Wrap it: nn.Sequential(layer)."
    return (
        f"nothing to convert in {kind} with include={include!r}, exclude={exclude!r}. "
        + _layers_found(layers)
    )


def _layers_found(layers: dict[str, Candidate], near: str = "") -> str:
    """Return the list of layers for an error message, and the one whose path is like ``near``."""
    if not layers:
        kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
        return f"The network has no layer of a type that can be converted ({kinds})."
    listed = [f"{path} ({type(layer.module).__name__})" for path, layer in layers.items()]
    more = f", and {len(listed) - 20} more" if len(listed) > 20 else ""
    hint = did_you_mean(near, layers)
    return f"{hint} Layers found: {', '.join(listed[:20])}{more}.".lstrip()
