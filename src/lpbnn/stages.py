"""Where in a network the batch becomes members: what runs before is shared, and runs once."""

import difflib
from typing import Any

from torch import nn

from lpbnn.layers import SUPPORTED, FastWeight
from lpbnn.members import BatchMode, spread_tree

UNCONVERTED = (*SUPPORTED, nn.RNNBase, nn.MultiheadAttention)  # what is worth running only once


class SpreadAt:
    """A forward pre-hook on the first converted stage: the batch becomes members there.

    What comes before it runs once per example. Tensors that are spread already pass through.
    """

    def __init__(self) -> None:
        self.plan: tuple[int, int, BatchMode] | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return None if self.plan is None else spread_tree((args, kwargs), *self.plan)


def find_stages(net: nn.Module) -> list[str]:
    """Where the batch becomes members: the smallest module that holds every converted layer.

    Where that is the network itself and part of it is unconverted, its children that hold converted
    layers: the first of them to be called spreads the batch, and what runs before it is shared.
    """
    if not _has_unconverted(net):
        return [""]
    path, module = "", net
    while not isinstance(module, FastWeight):
        children = _holders(path, module)
        if len(children) > 1:
            return [path] if path and _is_called(module) else _called(children)
        path, module = children[0]
    return [path]


def check_stage(net: nn.Module, stage: str | None) -> None:
    """Refuse a ``spread_at`` that is no path in the network."""
    paths = [path for path, _ in net.named_modules()]
    if stage is not None and stage not in paths:
        close = difflib.get_close_matches(stage, paths, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"spread_at={stage!r} is no module of the network.{hint}")


def remove_hooks(net: nn.Module) -> None:
    """Take our hooks off a network that goes its own way again."""
    for module in net.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, SpreadAt):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _has_unconverted(module: nn.Module) -> bool:
    """Whether a layer below could have been converted and was not."""
    if isinstance(module, FastWeight):
        return False
    return isinstance(module, UNCONVERTED) or any(map(_has_unconverted, module.children()))


def _holders(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that hold converted layers."""
    return [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if any(isinstance(inner, FastWeight) for inner in child.modules())
    ]


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)  # these have no forward


def _called(holders: list[tuple[str, nn.Module]]) -> list[str]:
    """The paths, with lists of modules replaced by what they hold."""
    found = []
    for path, module in holders:
        found += [path] if _is_called(module) else _called(_holders(path, module))
    return found
