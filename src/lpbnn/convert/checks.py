"""Facts about a network: its convertible layers, and those that a conversion refuses by name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from lpbnn.convert.attention import PROJECTIONS
from lpbnn.convert.recurrent import SplitRecurrent
from lpbnn.convert.transposed import computes_linear, is_transposed_linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SUPPORTED: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
# Norms that may keep running statistics.
RUNNING_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
WITHOUT_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    *RUNNING_NORMS,
)
Pattern = str | type[nn.Module]
Filter = Pattern | Sequence[Pattern] | None
_REGISTRY = frozenset(vars(nn.Module()))  # torch's own dictionaries


@dataclass
class Candidate:
    """A module that a filter can choose, with every path it has (the first one names it)."""

    paths: list[str]
    module: nn.Module  # for a projection of nn.MultiheadAttention: the attention
    size: int = 0  # numbers in its weight matrices, if it is no layer
    left: str = ""  # why a filter leaves it; empty if it is chosen

    def matches(self, pattern: Pattern) -> bool:
        """Return True if a pattern means this module; a path also means everything below it."""
        if isinstance(pattern, str):
            return any(
                fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") for path in self.paths
            )
        made_linear = isinstance(self.module, nn.MultiheadAttention) or is_transposed_linear(
            self.module
        )
        if made_linear and issubclass(nn.Linear, pattern):
            return True
        return isinstance(self.module, pattern)


@dataclass
class NetworkFacts:
    """Facts that a conversion needs about a network.

    Args:
        layers: the layers that can be chosen, by first path; attention stands for its four projections.
        bare: other modules with weight matrices.
        matrices: numbers in all weight matrices; embeddings and norms do not count.
        hidden: modules that are also held in a plain attribute, a list or a bound method, by id.
        time_first: modules whose rows are time steps, by path.
    """

    layers: dict[str, Candidate] = field(default_factory=dict)
    bare: list[Candidate] = field(default_factory=list)
    matrices: int = 0
    hidden: dict[int, str] = field(default_factory=dict)
    time_first: dict[str, nn.Module] = field(default_factory=dict)


def inspect_network(net: nn.Module) -> NetworkFacts:
    """Collect the facts about a network in one walk over its modules.

    Example:
        >>> list(inspect_network(nn.TransformerEncoderLayer(8, 2)).layers)[:5]
        ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.out_proj', 'linear1']
    """
    facts = NetworkFacts()
    candidates: dict[tuple[int, str], Candidate] = {}
    seen: set[int] = set()  # modules and parameters, by id
    layer = None  # the path, with its dot, of the layer whose own parts come next
    for path, module in net.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        inside = layer is not None and path.startswith(layer)
        attention = isinstance(module, nn.MultiheadAttention)
        supported = attention or isinstance(module, SUPPORTED) or is_transposed_linear(module)
        if supported and not inside:
            inside, layer = True, prefix
            parts = PROJECTIONS if attention else ("",)
            for part in parts if path else ():  # the network itself has no parent to replace it in
                candidate = candidates.setdefault((id(module), part), Candidate([], module))
                candidate.paths.append(prefix + part if part else path)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if getattr(module, "batch_first", True) is False and not isinstance(module, SplitRecurrent):
            facts.time_first[path] = module  # SplitRecurrent turns its input around
        for name, value in vars(module).items():
            for leaf in () if name in _REGISTRY else tree_leaves(value):
                held = getattr(leaf, "__self__", leaf)
                if isinstance(held, nn.Module) and held is not module:
                    facts.hidden[id(held)] = prefix + name
        if isinstance(module, WITHOUT_MATRICES):
            continue
        paths, size = [path] if path else [], 0
        for name, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                size += parameter.numel()
                paths.append(prefix + name)
        facts.matrices += size
        if size and not inside:
            facts.bare.append(Candidate(paths, module, size))
    facts.layers = {candidate.paths[0]: candidate for candidate in candidates.values()}
    return facts


def is_matrix(parameter: Tensor) -> bool:
    """Return True if a parameter multiplies vectors: no bias, no scale, no row (1, ...)."""
    if isinstance(parameter, UninitializedParameter) or parameter.dim() < 2:
        return False
    return parameter.shape[0] > 1 and math.prod(parameter.shape) > parameter.shape[0]


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs m and outputs p of a supported layer.

    Example:
        >>> widths(nn.Linear(3, 2)), widths(nn.ConvTranspose2d(4, 6, 3))
        ((3, 2), (4, 6))
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        return layer.in_channels, layer.out_channels
    supported = ", ".join(kind.__name__ for kind in SUPPORTED)
    raise TypeError(f"{type(layer).__name__} cannot be converted; these can: {supported}.")


def refuse_unconvertible(path: str, module: nn.Module, facts: NetworkFacts) -> None:
    """Raise an error that names the layer if a conversion would not do what it says."""
    # The projections of an attention are layers of our making: all are left out at once.
    attention = isinstance(module, nn.MultiheadAttention)
    out = f"{path.rpartition('.')[0]}.*" if attention else path
    fix = f"Leave it out with exclude={out!r}."
    for name, tensor in module.named_parameters():
        if isinstance(tensor, UninitializedParameter):
            raise ValueError(
                f"{path!r} is lazy and has no shape yet. Run one batch through it first."
            )
        if tensor.is_floating_point() and not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(
                f"{path}.{name} holds NaN or infinity; a conversion would spread it over every "
                "member. Load finite weights first."
            )
    if attention and (
        type(module) is not nn.MultiheadAttention
        or module.bias_k is not None
        or module.add_zero_attn
    ):
        raise ValueError(
            f"{path!r} belongs to an attention with bias_kv, zero_attn or its own code. {fix}"
        )
    if "bias" in getattr(module, "parametrizations", {}) or "bias_orig" in module._parameters:
        raise ValueError(f"{path!r} has a parametrised bias, and every member needs its own. {fix}")
    for outer, parent in facts.time_first.items():
        if not outer or path.startswith(f"{outer}."):
            raise ValueError(
                f"{path!r} is inside {outer!r}, a {type(parent).__name__} with batch_first=False: its "
                f"rows are time steps and not examples. Build it with batch_first=True. {fix}"
            )
    if id(module) in facts.hidden:
        raise ValueError(
            f"{path!r} is also kept in the plain attribute {facts.hidden[id(module)]!r}, where it cannot be "
            f"replaced. Use nn.ModuleList or nn.ModuleDict there. {fix}"
        )
    if is_transposed_linear(module):
        if not computes_linear(module):
            raise ValueError(
                f"{path!r} is a {type(module).__name__} with a forward of its own, which is not x W + b. {fix}"
            )
    elif not attention and type(module) not in SUPPORTED and not _adds_its_bias_last(module):
        raise ValueError(
            f"{path!r} is a {type(module).__name__} with a forward of its own that does more than add its "
            f"bias, and every member needs a bias. {fix}"
        )


def _adds_its_bias_last(layer: nn.Module) -> bool:
    """Return True if the layer adds its bias at the very end: then zeros give the bias, whatever it is."""
    bias = layer._parameters.get("bias")
    if bias is None or bias.is_meta or not _has_own_forward(layer):
        return True
    before, mode = bias.detach().clone(), layer.training
    try:
        with torch.no_grad():
            layer.eval()
            zeros = torch.zeros(_input_shape(layer), device=bias.device, dtype=bias.dtype)
            for value in (-1.0, 1.0):
                bias.fill_(value)
                if not (layer(zeros) == value).all():
                    return False
            return True
    except Exception:
        return False  # its forward wants something else: not ours to convert
    finally:
        with torch.no_grad():
            bias.copy_(before)
        layer.train(mode)


def is_odd(layer: nn.Module) -> bool:
    """Return True if f(-x) = -f(x) for a layer without a bias; one with a bias was compared before."""
    own = next(layer.parameters(recurse=False), None)
    if own is None or own.is_meta or getattr(layer, "bias", None) is not None:
        return True
    if not _has_own_forward(layer):
        return True
    mode = layer.training
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_input_shape(layer), generator=generator).to(own)
    try:
        with torch.no_grad():
            layer.eval()
            y, negative = layer(torch.cat([x, -x]))  # one call: noise in its weight is the same
            return bool(torch.allclose(-negative, y, rtol=0.0, atol=0.05 * float(y.abs().max())))
    except Exception:
        return True  # it wants other inputs than these, and there is no bias to go wrong
    finally:
        layer.train(mode)


def _has_own_forward(layer: nn.Module) -> bool:
    """Return True if a class derived from torch's replaces one of its methods, and may compute otherwise."""
    kinds = type(layer).__mro__
    own, torchs = next((kinds[:i], kind) for i, kind in enumerate(kinds) if kind in SUPPORTED)
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    return any(hasattr(torchs, name) and not name.startswith("__") for name in names)


def _input_shape(layer: nn.Module) -> list[int]:
    """Return the shape of one example that a layer can take."""
    shape = [1, widths(layer)[0]]
    if not isinstance(layer, nn.Linear):  # room for the dilated kernel
        sizes = zip(layer.kernel_size, layer.dilation, strict=True)  # type: ignore[arg-type]
        shape += [2 * (size - 1) * dilation + 2 for size, dilation in sizes]
    return shape
