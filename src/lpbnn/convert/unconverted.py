"""Weights that no conversion reaches, a recurrent layer's for example: the user is told of them."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lpbnn.convert.checks import ancestors, join
from lpbnn.convert.filters import Candidate, Filter, patterns, reason_to_leave
from lpbnn.rank_one.layer import SUPPORTED

NOTICEABLE = 0.1  # share of the weights that nobody leaves out without knowing
NAMED = 3  # modules in the message
LAYERS = (*SUPPORTED, nn.MultiheadAttention)
NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)


class Bare(NamedTuple):
    """A module with weight matrices of its own that is no layer, by its path and by theirs."""

    candidate: Candidate
    size: int  # numbers in the matrices


def unconverted(net: nn.Module, include: Filter = None, exclude: Filter = None) -> str:
    """What to say of weights that no conversion reaches and nobody left out, if they are many.

    Example:
        >>> net = nn.ModuleDict({"rnn": nn.LSTM(4, 8), "head": nn.Linear(8, 2)})
        >>> print(unconverted(net))
        rnn (LSTM) cannot be converted and keeps 96 % of the weights ...
        >>> unconverted(net, exclude="rnn")
        ''
    """
    total, bare = weigh(net)
    wanted = [
        one
        for one in sorted(bare, key=lambda one: -one.size)
        if not reason_to_leave(one.candidate, patterns(include), patterns(exclude))
    ]
    share = sum(one.size for one in wanted) / max(1, total)
    if share < NOTICEABLE:
        return ""
    named = {p: type(one.candidate.module).__name__ for one in wanted for p in _names(one, net)}
    paths, listed = list(named), [f"{path} ({kind})" for path, kind in named.items()][:NAMED]
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return (
        f"{', '.join(listed)}{more} cannot be converted and {'keep' if paths[1:] else 'keeps'} "
        f"{share * 100:.0f} % of the weights of {type(net).__name__} as they are, the same for every "
        f"member. If that is meant, as of tables (positions, queries), say so: exclude={paths}. What "
        f"multiplies examples is converted as {', '.join(k.__name__ for k in SUPPORTED[:3])}, ..."
    )


def _names(one: Bare, net: nn.Module) -> list[str]:
    """A module by its path; the network itself by its matrices."""
    return one.candidate.paths if one.candidate.module is net else one.candidate.paths[:1]


def weigh(net: nn.Module) -> tuple[int, list[Bare]]:
    """The numbers in weight matrices, and those modules that keep some where no layer is.

    Tables that are looked up in and norms do not count.
    """
    total, bare = 0, []
    seen: set[int] = set()
    for path, module in net.named_modules():
        if isinstance(module, NO_MATRICES):
            continue
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if is_matrix(parameter) and id(parameter) not in seen
        }
        seen |= {id(parameter) for parameter in own.values()}
        size = sum(parameter.numel() for parameter in own.values())
        total += size
        if own and not _is_of_layer(net, path, module):
            paths = [path] if path else []
            bare.append(
                Bare(Candidate([*paths, *(join(path, name) for name in own)], module), size)
            )
    return total, bare


def is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter multiplies vectors: no bias, no scale, no row (1, ...) for all examples."""
    if isinstance(parameter, UninitializedParameter) or parameter.dim() < 2:
        return False
    return parameter.shape[0] > 1 and sum(size > 1 for size in parameter.shape) > 1


def _is_of_layer(net: nn.Module, path: str, module: nn.Module) -> bool:
    outer = [ancestor for _, ancestor in ancestors(net, path)] if path else []
    return any(isinstance(one, LAYERS) for one in (*outer, module))
