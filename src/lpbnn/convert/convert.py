"""The converter: replace layers of any network by path, in place, weights kept bit for bit."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lpbnn.convert.attention import PROJECTIONS, SplitAttention
from lpbnn.convert.checks import (
    SUPPORTED,
    ancestors,
    hidden_references,
    join,
    refuse_unconvertible,
    weigh,
)
from lpbnn.convert.filters import (
    Candidate,
    Filter,
    Pattern,
    matches,
    parse_patterns,
    reason_to_leave,
)
from lpbnn.convert.wrapper import Wrapper

LayerFactory = Callable[[nn.Module, str], nn.Module]


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did: the paths it converted and those it left, with the reason."""

    converted: tuple[str, ...]
    left: dict[str, str]

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

    ``include`` and ``exclude`` take path globs ("decoder.*"; "decoder" means all below it), layer
    types, or a list of both; each must match something (``exclude``: or a module with weights of another
    kind, see ``describe_unconverted``). A module used twice is converted once.
    ``undo`` gives the network back.

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
    if isinstance(net, nn.MultiheadAttention):
        raise ValueError(
            "a lone nn.MultiheadAttention has no parent in which it could be replaced."
        )
    candidates = _candidates(net)
    for path, candidate in candidates.items():
        if isinstance(candidate.module, Wrapper):
            raise ValueError(
                f"{path!r} is converted already ({type(candidate.module).__name__}). Call undo first; "
                "several parts are converted in one call: include=[...]."
            )
    wanted, unwanted = parse_patterns(include), parse_patterns(exclude)
    if wanted or unwanted:
        _refuse_idle_patterns(net, candidates, wanted or [], unwanted or [])
    chosen, left = [], {}
    for path, candidate in candidates.items():
        if reason := reason_to_leave(candidate, wanted, unwanted):
            left[path] = reason
        else:
            chosen.append(path)
    if not chosen:
        raise ValueError(_nothing_to_convert(net, candidates, include, exclude))
    hidden = hidden_references(net)
    for path in chosen:
        refuse_unconvertible(net, path, candidates[path].module, hidden)
    _split_attention(net, chosen)
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
    return Conversion(tuple(chosen), left)


def undo(net: nn.Module) -> nn.Module:
    """Take every converted layer out again, in place, and return the network.

    Weights are the shared weights as they are now; a bias is the mean of the members' biases. A
    network that was converted and not trained comes back bit for bit.
    """
    for kind in (Wrapper, SplitAttention):  # an attention after the projections in it
        found = [module for module in net.modules() if isinstance(module, kind)]
        replace_modules(net, {id(module): module.restore() for module in found})
    for module in net.modules():
        for name, value in module.__dict__.pop("_before_conversion", {}).items():
            setattr(module, name, value)
    return net


def _candidates(net: nn.Module) -> dict[str, Candidate]:
    """Return the layers that can be chosen, by first path; attention stands for its four projections."""
    found: dict[tuple[int, str], Candidate] = {}
    for path, module, projection in _layers("", net):
        candidate = found.setdefault((id(module), projection), Candidate([], module))
        candidate.paths.append(join(path, projection) if projection else path)
    return {candidate.paths[0]: candidate for candidate in found.values()}


def _layers(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the path and module of every layer below, and the name of a projection of attention."""
    for name, child in module._modules.items():
        inner = join(path, name)
        if isinstance(child, nn.MultiheadAttention):
            yield from ((inner, child, projection) for projection in PROJECTIONS)
        elif isinstance(child, (*SUPPORTED, Wrapper)):
            yield inner, child, ""
        elif child is not None:
            yield from _layers(inner, child)


def _refuse_idle_patterns(
    net: nn.Module,
    candidates: dict[str, Candidate],
    include: list[Pattern],
    exclude: list[Pattern],
) -> None:
    layers = list(candidates.values())
    others = [bare.candidate for bare in weigh(net)[1]]
    for name, given, those in (("include", include, layers), ("exclude", exclude, layers + others)):
        for pattern in given:
            if not any(matches(candidate, pattern) for candidate in those):
                raise ValueError(
                    f"{name}={pattern!r} matches no layer. "
                    + _layers_found(candidates, pattern if isinstance(pattern, str) else None)
                )


def _split_attention(net: nn.Module, chosen: list[str]) -> None:
    attentions = {}
    for path in chosen:
        parent = net.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            attentions[id(parent)] = parent
    replace_modules(net, {key: SplitAttention(module) for key, module in attentions.items()})


def replace_modules(net: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
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
    net: nn.Module, candidates: dict[str, Candidate], include: Filter, exclude: Filter
) -> str:
    if isinstance(net, SUPPORTED):
        return (
            f"the network is itself a {type(net).__name__} and cannot be replaced in place. "
            "Wrap it: nn.Sequential(layer)."
        )
    return (
        f"nothing to convert in {type(net).__name__} with include={include!r}, exclude={exclude!r}. "
        + _layers_found(candidates, None)
    )


def _layers_found(candidates: dict[str, Candidate], near: str | None) -> str:
    if not candidates:
        kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
        return f"The network has no layer of a type that can be converted ({kinds})."
    listed = ", ".join(
        f"{path} ({type(c.module).__name__})" for path, c in list(candidates.items())[:20]
    )
    more = f", and {len(candidates) - 20} more" if len(candidates) > 20 else ""
    close = difflib.get_close_matches(near or "", list(candidates), n=1)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Layers found: {listed}{more}."
