"""What may be converted: a layer for which a conversion would not do what it says is refused by name."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from lpbnn.rank_one.layer import SUPPORTED, widths

_REGISTRY = frozenset(vars(nn.Module()))  # torch's own dictionaries


def refuse_unconvertible(
    net: nn.Module, path: str, module: nn.Module, hidden: dict[int, str]
) -> None:
    """Raise, naming the layer, wherever a conversion would not do what it says."""
    attention = isinstance(
        module, nn.MultiheadAttention
    )  # its projections are layers by our making
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
        if getattr(parent, "batch_first", True) is False:
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
    if not attention and not _adds_its_bias_last(module):
        raise ValueError(
            f"{path!r} is a {type(module).__name__} with a forward of its own that does more than add its "
            f"bias, and every member needs a bias. {fix}"
        )


def hidden_references(net: nn.Module) -> dict[int, str]:
    """Modules that some module also holds in a plain attribute, a list or a bound method, by id."""
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
    """For zeros, a layer that adds its bias at the very end answers with the bias, whatever it is."""
    bias = layer._parameters.get("bias")
    kind = next(kind for kind in SUPPORTED if isinstance(layer, kind))
    own = any(
        getattr(type(layer), name, None) is not getattr(kind, name, None)
        for name in ("forward", "_conv_forward")
    )
    if bias is None or bias.is_meta or not own:
        return True
    before, mode = bias.detach().clone(), layer.training
    inputs, _ = widths(layer)
    shape = [1, inputs]
    if not isinstance(layer, nn.Linear):  # room for the dilated kernel
        sizes = zip(layer.kernel_size, layer.dilation, strict=True)  # type: ignore[arg-type]
        shape += [2 * (size - 1) * dilation + 2 for size, dilation in sizes]
    try:
        with torch.no_grad():
            layer.eval()
            zeros = torch.zeros(shape, device=bias.device, dtype=bias.dtype)
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


def ancestors(net: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    parts = path.split(".")
    for depth in range(len(parts)):
        outer = ".".join(parts[:depth])
        yield outer, net.get_submodule(outer)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
