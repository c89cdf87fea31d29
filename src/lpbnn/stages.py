"""Where in a network the batch becomes members: what runs before is shared, and runs once."""

import difflib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lpbnn.layers import SUPPORTED, FastWeight
from lpbnn.members import BatchMode, is_batched, spread_tree

UNCONVERTED = (*SUPPORTED, nn.RNNBase, nn.MultiheadAttention)  # what is worth running only once
# Numbers in a batch that keep a device busy without a second member beside them.
FULL = {"cpu": 2**16, "cuda": 2**19}

Turn = Callable[[int], AbstractContextManager[Any]]


class SpreadAt:
    """Forward hooks on the first converted stage: the batch becomes members there.

    What comes before it runs once per example. Tensors that are spread already pass through. The members
    go through the stage together, as rows, or in turn, where ``turn`` says how one is chosen and the
    batch fills the device by itself: then each is a plain network with its own weights, and memory is
    that of one.
    """

    def __init__(self) -> None:
        self.plan: tuple[int, int, BatchMode] | None = None
        self.turn: Turn | None = None
        self._earlier: list[Any] = []  # outputs of the members before the last, whose turn it is
        self._last = ExitStack()

    def add_to(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)
        module.register_forward_hook(self._joined)

    def end(self) -> None:
        """The pass is over, or broke off."""
        self.plan = self.turn = None
        if not torch.compiler.is_compiling():
            self._earlier = []
            self._last.close()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.plan is None:
            return None
        if not torch.compiler.is_compiling() and self.turn is not None:
            turn, batch = self.turn, self.plan[0]
            if fills_device((args, kwargs), batch) and self._in_turn(module, turn, args, kwargs):
                return None
        return spread_tree((args, kwargs), *self.plan)

    def _in_turn(self, module: nn.Module, turn: Turn, args: Any, kwargs: Any) -> bool:
        """All members but the last, and the last one's turn begun; False if outputs cannot be joined."""
        assert self.plan is not None
        batch, members, _ = plan = self.plan
        self.plan, outputs = None, []  # the hooks leave these calls alone
        for member in range(members - 1):
            with turn(member):
                outputs.append(module(*args, **kwargs))
            if not all(
                isinstance(leaf, Tensor) and is_batched(leaf, batch)
                for leaf in tree_leaves(outputs[-1])
            ):
                self.plan = plan
                return False
        self.plan, self._earlier = plan, outputs
        self._last.enter_context(turn(members - 1))
        return True

    def _joined(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self.plan is None or not self._earlier:
            return output
        self._last.close()
        outputs, self._earlier = [*self._earlier, output], []
        return tree_map(lambda *leaves: torch.cat(leaves), *outputs)


def fills_device(tree: Any, batch: int) -> bool:
    """Whether the examples in a call keep the device busy without a second member beside them."""
    tensors = [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and is_batched(leaf, batch)
    ]
    kind = "cpu" if all(tensor.device.type == "cpu" for tensor in tensors) else "cuda"
    return sum(tensor.numel() for tensor in tensors) >= FULL[kind]


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
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), SpreadAt):
                del module._forward_hooks[key]


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
