"""Which layers are converted: filters choose them, and those that would go wrong are refused by name."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from lpbnn.convert.recurrent import SplitRecurrent
from lpbnn.convert.transposed import computes_linear, is_transposed_linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SUPPORTED: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
NOTICEABLE = 0.1  # share of the weights above which a user is told that they are not converted
NAMED = 3  # modules in the message
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


class Candidate(NamedTuple):
    """A module that a filter can choose, with every path it has (the first one names it)."""

    paths: list[str]
    module: nn.Module  # for a projection of nn.MultiheadAttention: the attention
    size: int = 0  # numbers in its weight matrices, if it is no layer

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


def is_convertible(module: nn.Module) -> bool:
    """Return True for a layer that can be converted, or whose projections can."""
    return isinstance(module, (*SUPPORTED, nn.MultiheadAttention)) or is_transposed_linear(module)


class Filters:
    """The two filters of a conversion.

    Args:
        include: path globs, layer types, or a list of both; None: everything.
        exclude: the same; None: nothing.

    Example:
        >>> filters = Filters(include="decoder", exclude=nn.Conv2d)
        >>> filters.reason_to_leave(Candidate(["decoder.0"], nn.Conv2d(3, 3, 1)))
        'excluded'
        >>> filters.reason_to_leave(Candidate(["encoder.0"], nn.Linear(3, 3)))
        'not included'
    """

    def __init__(self, include: Filter = None, exclude: Filter = None) -> None:
        self.all = include is None
        self.include = [] if include is None else as_patterns(include)
        self.exclude = [] if exclude is None else as_patterns(exclude)

    def reason_to_leave(self, candidate: Candidate) -> str:
        """Return why a module is not converted; empty if it is."""
        if not self.all and not any(map(candidate.matches, self.include)):
            return "not included"
        return "excluded" if any(map(candidate.matches, self.exclude)) else ""

    def find_idle(
        self, layers: Sequence[Candidate], others: Sequence[Candidate]
    ) -> tuple[str, Pattern] | None:
        """Return the first pattern that matches nothing, after the name of its filter."""
        named = (("include", self.include, layers), ("exclude", self.exclude, [*layers, *others]))
        for name, patterns, candidates in named:
            for pattern in patterns:
                if not any(candidate.matches(pattern) for candidate in candidates):
                    return name, pattern
        return None


def as_patterns(given: Pattern | Sequence[Pattern]) -> list[Pattern]:
    """Return a filter as a list of patterns."""
    patterns: list[Pattern] = [given] if isinstance(given, str | type) else list(given)
    for pattern in patterns:
        if not isinstance(pattern, str | type):
            raise TypeError(
                f"a filter is a path glob or a layer type; got {pattern!r}. "
                "Example: include=['decoder.*', nn.Conv2d]."
            )
    return patterns


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


def refuse_unconvertible(
    net: nn.Module, path: str, module: nn.Module, hidden: dict[int, str]
) -> None:
    """Raise an error that names the layer if a conversion would not do what it says."""
    # Its projections are layers by our making.
    attention = isinstance(module, nn.MultiheadAttention)
    out = f"{path.rpartition('.')[0]}.*" if attention else path
    fix = f"Leave it out with exclude={out!r}."
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise ValueError(f"{path!r} is lazy and has no shape yet. Run one batch through it first.")
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
    for outer, parent in ancestors(net, path):
        time_first = getattr(parent, "batch_first", True) is False
        if time_first and not isinstance(parent, SplitRecurrent):  # that turns its input around
            raise ValueError(
                f"{path!r} is inside {outer!r}, a {type(parent).__name__} with batch_first=False: its "
                f"rows are time steps and not examples. Build it with batch_first=True. {fix}"
            )
    for name, tensor in module.named_parameters(recurse=False):
        if tensor.is_floating_point() and not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(
                f"{path}.{name} holds NaN or infinity; a conversion would spread it over every "
                "member. Load finite weights first."
            )
    if id(module) in hidden:
        raise ValueError(
            f"{path!r} is also kept in the plain attribute {hidden[id(module)]!r}, where it cannot be "
            f"replaced. Use nn.ModuleList or nn.ModuleDict there. {fix}"
        )
    if is_transposed_linear(module):
        if not computes_linear(module):
            raise ValueError(
                f"{path!r} is a {type(module).__name__} with a forward of its own, which is not x W + b. {fix}"
            )
        return
    plain = attention or type(module) in SUPPORTED
    if not plain and not _adds_its_bias_last(module):
        raise ValueError(
            f"{path!r} is a {type(module).__name__} with a forward of its own that does more than add its "
            f"bias, and every member needs a bias. {fix}"
        )


def find_hidden_references(net: nn.Module) -> dict[int, str]:
    """Return modules that are also held in a plain attribute, a list or a bound method, by id."""
    found: dict[int, str] = {}
    for path, owner in net.named_modules():
        for name, value in vars(owner).items():
            if name in _REGISTRY:
                continue
            for leaf in tree_leaves(value):
                held = getattr(leaf, "__self__", leaf)
                if isinstance(held, nn.Module) and held is not owner:
                    found[id(held)] = join(path, name)
    return found


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


def ancestors(net: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules around a layer with their paths, the network itself first."""
    parts = path.split(".")
    for depth in range(len(parts)):
        outer = ".".join(parts[:depth])
        yield outer, net.get_submodule(outer)


def join(path: str, name: str) -> str:
    """Return the path of a part of the module at ``path``; the network itself has the path \"\"."""
    return f"{path}.{name}" if path else name


def describe_unconverted(
    net: nn.Module, total: int, bare: list[Candidate], filters: Filters
) -> str:
    """Return a message about weights that no conversion reaches and nobody excluded; empty if they are few.

    Args:
        net: the network.
        total: numbers in all of its weight matrices.
        bare: the modules with matrices that are no layers (``find_bare_matrices``).
        filters: the user's choice of layers.

    Example:
        >>> net = nn.ModuleDict({"rnn": nn.LSTM(4, 8), "head": nn.Linear(8, 2)})
        >>> print(describe_unconverted(net, *find_bare_matrices(net), Filters()))
        rnn (LSTM) cannot be converted and keeps 96 % of the weights ...
        >>> describe_unconverted(net, *find_bare_matrices(net), Filters(exclude="rnn"))
        ''
    """
    kept = [candidate for candidate in bare if not filters.reason_to_leave(candidate)]
    share = sum(candidate.size for candidate in kept) / max(1, total)
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


def find_bare_matrices(net: nn.Module) -> tuple[int, list[Candidate]]:
    """Return the numbers in all weight matrices, and the modules with matrices that are no layers.

    A module is found by its path and by those of its matrices. Embeddings and norms do not count.
    """
    total, bare = 0, []
    seen: set[int] = set()
    layer = None  # the one whose own parts come next
    for path, module in net.named_modules():
        inside = layer is not None and path.startswith(layer)
        if not inside and is_convertible(module):
            inside, layer = True, f"{path}." if path else ""
        if isinstance(module, WITHOUT_MATRICES):
            continue
        paths, size = [path] if path else [], 0
        for name, parameter in module.named_parameters(recurse=False):
            if is_matrix(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                size += parameter.numel()
                paths.append(join(path, name))
        total += size
        if size and not inside:
            bare.append(Candidate(paths, module, size))
    return total, bare


def is_matrix(parameter: Tensor) -> bool:
    """Return True if a parameter multiplies vectors: no bias, no scale, no row (1, ...)."""
    if isinstance(parameter, UninitializedParameter) or parameter.dim() < 2:
        return False
    return parameter.shape[0] > 1 and math.prod(parameter.shape) > parameter.shape[0]
