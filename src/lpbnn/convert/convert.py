"""The converter: replace layers of any network by path, in place, weights kept bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lpbnn.convert.attention import SplitAttention
from lpbnn.convert.checks import (
    SUPPORTED,
    Candidate,
    Filter,
    NetworkFacts,
    Pattern,
    inspect_network,
    refuse_unconvertible,
)
from lpbnn.convert.recurrent import SplitRecurrent
from lpbnn.convert.transposed import is_transposed_linear, replace_by_linear, restore_origin
from lpbnn.convert.wrapper import Wrapper
from lpbnn.registry import did_you_mean

NOTICEABLE = 0.1  # share of the weights above which a user is told that they are not converted
NAMED = 3  # modules in the message
# Transformer layers read their linears' weights in a fused kernel, unless these attributes have these values.
FUSED = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}

LayerFactory = Callable[[nn.Module, str], nn.Module]


@dataclass(frozen=True)
class Conversion:
    """The paths that ``convert`` converted, those it left with the reason, and a warning for the user.

    Args:
        converted: paths of the converted layers.
        left: the reason why a layer was left, by path.
        warning: names modules that hold a large part of the weights and are no layers; empty if there
            are none, or if the user left them out.
    """

    converted: tuple[str, ...]
    left: dict[str, str]
    warning: str = ""

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
            kind.

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
    facts = inspect_network(net)
    _apply_filters(facts, include, exclude)
    chosen = {path: layer.module for path, layer in facts.layers.items() if not layer.left}
    if not chosen:
        raise ValueError(_nothing_to_convert(net, facts, include, exclude))
    for path, module in chosen.items():
        refuse_unconvertible(path, module, facts)
    left = {path: layer.left for path, layer in facts.layers.items() if layer.left}
    conversion = Conversion(tuple(chosen), left, _describe_unconverted(net, facts))

    rewritten: dict[int, nn.Module] = {}  # an attention has up to four chosen projections
    for module in chosen.values():
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


def replace_modules(net: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules, given by id, wherever the network holds them.

    Transformer layers with a ``Wrapper`` inside leave their fused path, which would bypass it.
    """
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
    for module in net.modules():
        for kind, (name, value) in FUSED.items():
            fuses = isinstance(module, kind)
            if fuses and any(isinstance(inner, Wrapper) for inner in module.modules()):
                vars(module).setdefault("_before_conversion", {name: getattr(module, name)})
                setattr(module, name, value)


def _apply_filters(facts: NetworkFacts, include: Filter, exclude: Filter) -> None:
    """Note on every layer, and every other module with matrices, why the user's filters leave it."""
    included, excluded = _patterns(include), _patterns(exclude)
    layers = list(facts.layers.values())
    everything = [*layers, *facts.bare]
    for candidate in everything:
        if include is not None and not any(map(candidate.matches, included)):
            candidate.left = "not included"
        elif any(map(candidate.matches, excluded)):
            candidate.left = "excluded"
    for name, patterns, among in (("include", included, layers), ("exclude", excluded, everything)):
        for pattern in patterns:
            if not any(candidate.matches(pattern) for candidate in among):
                near = pattern if isinstance(pattern, str) else ""
                listed = _layers_found(facts.layers, near)
                raise ValueError(f"{name}={pattern!r} matches no layer. {listed}")


def _patterns(given: Filter) -> list[Pattern]:
    """Return a filter as a list of patterns."""
    patterns = [given] if isinstance(given, str | type) else list(given or ())
    for pattern in patterns:
        if not isinstance(pattern, str | type):
            raise TypeError(
                f"a filter is a path glob or a layer type; got {pattern!r}. "
                "Example: include=['decoder.*', nn.Conv2d]."
            )
    return patterns


def _describe_unconverted(net: nn.Module, facts: NetworkFacts) -> str:
    """Return a message about weights that no conversion reaches and nobody left out; empty if they are few."""
    kept = [candidate for candidate in facts.bare if not candidate.left]
    share = sum(candidate.size for candidate in kept) / max(1, facts.matrices)
    if share < NOTICEABLE:
        return ""
    kept.sort(key=lambda candidate: -candidate.size)
    # The network itself has no path: it is named by its matrices.
    named = {
        path: type(candidate.module).__name__
        for candidate in kept
        for path in candidate.paths[: None if candidate.module is net else 1]
    }
    listed = [f"{path} ({kind})" for path, kind in named.items()]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    recurrent = any(isinstance(candidate.module, nn.RNNBase) for candidate in kept)
    split = " Fix for recurrent layers: lpbnn.split_recurrent(net) first." if recurrent else ""
    return (
        f"{', '.join(listed[:NAMED])}{more} cannot be converted and {'keep' if listed[1:] else 'keeps'} "
        f"{share * 100:.0f} % of the weights of {type(net).__name__} as they are, the same for every "
        f"member. If that is intended (tables of positions or queries), say so: exclude={list(named)}. "
        f"Layers that multiply examples are converted: {', '.join(k.__name__ for k in SUPPORTED[:3])}, ..."
        f"{split}"
    )


def _nothing_to_convert(
    net: nn.Module, facts: NetworkFacts, include: Filter, exclude: Filter
) -> str:
    kind = type(net).__name__
    if isinstance(net, (*SUPPORTED, nn.MultiheadAttention)):
        return f"the network is itself a {kind} and cannot be replaced in place. Wrap it: nn.Sequential(layer)."
    return (
        f"nothing to convert in {kind} with include={include!r}, exclude={exclude!r}. "
        + _layers_found(facts.layers)
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
