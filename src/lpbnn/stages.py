"""Where in a network the batch becomes members: what runs before is shared, and runs once."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lpbnn.layers import SUPPORTED, Draw, FastWeight
from lpbnn.members import BatchMode, any_batched, copied, is_batched, spread_tree
from lpbnn.norms import MemberNorm

UNCONVERTED = (*SUPPORTED, nn.RNNBase, nn.MultiheadAttention)  # what is worth running only once
# Numbers in a batch that keep a device busy without a second member beside them.
FULL = {"cpu": 2**16, "cuda": 2**19}
# The same behind a shared part, without a compiler: a decoder is tens of small calls for each member, and
# the host must start them faster than the GPU is done with them (docs/cost.md).
FULL_STAGE = {"cpu": 2**16, "cuda": 2**25}
UNROLLED = 8  # a compiler writes out every member's turn: no more of them than this

Plan = tuple[int, int, BatchMode]  # batch, members, and how the one is spread over the other


class Cast:
    """Whose rows the layers and norms of a pass will see, of an ensemble of so many members."""

    def __init__(
        self, layers: Sequence[FastWeight], norms: Sequence[MemberNorm], members: int
    ) -> None:
        self.layers, self.norms, self.members = layers, norms, members

    def choose(self, draws: Sequence[Draw], rows: int, first: int) -> None:
        """Every call of a layer uses its draw, until another is chosen; member ``first`` is the first."""
        for layer, draw in zip(self.layers, draws, strict=True):
            layer._held, layer._rows = draw, rows
        ids = [(first + i) % self.members for i in range(draws[0].members)]
        for norm in self.norms:
            norm._held = ids

    def release(self) -> None:
        for layer in self.layers:
            layer._held, layer._rows = None, 0
        for norm in self.norms:
            norm._held = None


class SpreadAt:
    """A forward pre-hook on the first converted stage: the batch becomes members there.

    What comes before it runs once per example. Tensors that are spread already pass through.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def add_to(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def end(self) -> None:
        """The pass is over, or broke off."""
        self.plan = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return None if self.plan is None else spread_tree((args, kwargs), *self.plan)


class SpreadInTurn(SpreadAt):
    """The same, and members may go through the stage a few at a time, where a pass and the stage allow it.

    One by one where the batch fills the device by itself: each is a plain network with its own weights
    then, and memory is that of one. Otherwise ``width`` of them at a time, as rows. Their outputs are
    joined as rows behind the stage.

    A stage allows it with an attribute ``in_turn = True``. That is a promise: it returns a row for each
    row that it is given, in every tensor, and leaves nothing behind that anybody reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cast: tuple[Cast, list[Draw], int] | None = (
            None  # draws, and which member is the first
        )
        self.width = 1
        self._turn: _Turn | None = None  # of the last members, in the stage's own call

    def add_to(self, module: nn.Module) -> None:
        super().add_to(module)
        module.register_forward_hook(self.join)

    def end(self) -> None:
        super().end()
        self.cast = self._turn = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._turn is not None:
            self._turn.depth += module is self._turn.module  # a stage that calls itself
            return None
        if self.plan is not None and self.cast is not None and goes_in_turn(module):
            batch, members, _ = self.plan
            few = _at_a_time((args, kwargs), batch, members, self.width)
            if few < members and any_batched((args, kwargs), batch):
                return self._in_turn(module, args, kwargs, few)
        return super().__call__(module, args, kwargs)

    def _in_turn(self, module: nn.Module, args: Any, kwargs: Any, few: int) -> tuple[Any, Any]:
        """All members but the last few, and what these are called with."""
        assert self.plan is not None
        assert self.cast is not None
        (batch, members, _), (cast, draws, first) = self.plan, self.cast
        plan, self.plan = self.plan, None  # a stage within the stage has rows already
        outputs: list[Any] = []
        for start in range(0, members, few):
            part = [draw.take(slice(start, start + few)) for draw in draws]
            rows = batch * part[0].members
            cast.choose(part, rows, first + start)
            given = copied((args, kwargs), batch, part[0].members)
            if start + few >= members:
                self._turn = _Turn(module, plan, outputs)
                return given
            outputs.append(module.forward(*given[0], **given[1]))
            leaves = tree_leaves(outputs[-1])
            if not all(isinstance(leaf, Tensor) and is_batched(leaf, rows) for leaf in leaves):
                raise RuntimeError(
                    f"{type(module).__name__} has in_turn = True and got {rows} rows, but returned "
                    f"{[tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]}. "
                    "Fix: in_turn = False, so that its members are computed together."
                )
        raise AssertionError("there is a last member")

    def join(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The members' outputs as rows, after the turn of the last."""
        turn = self._turn
        if turn is None or turn.module is not module:
            return output
        if turn.depth:
            turn.depth -= 1
            return output
        self._turn, self.plan = None, turn.plan
        assert self.cast is not None
        cast, draws, first = self.cast
        cast.choose(draws, turn.plan[0] * turn.plan[1], first)
        return tree_map(lambda *leaves: torch.cat(leaves), *turn.earlier, output)


class _Turn:
    """The last members' turn in a stage: what the others gave, and the plan to go on with."""

    def __init__(self, module: nn.Module, plan: Plan, earlier: list[Any]) -> None:
        self.module, self.plan, self.earlier = module, plan, earlier
        self.depth = 0


def goes_in_turn(module: nn.Module) -> bool:
    """Whether a stage may be called for a few members at a time, with nobody's hook to notice."""
    if not getattr(module, "in_turn", False):
        return False
    inner = () if torch.compiler.is_compiling() else module.modules()
    hooks = [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in inner]
    own = len(module._forward_pre_hooks) + len(module._forward_hooks)
    return own <= 2 and sum(hooks) <= 2  # ours


def fills_device(tree: Any, batch: int, full: Mapping[str, int]) -> bool:
    """Whether the examples in a call keep the device busy without a second member beside them."""
    tensors = [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and is_batched(leaf, batch)
    ]
    kind = "cpu" if all(tensor.device.type == "cpu" for tensor in tensors) else "cuda"
    return sum(tensor.numel() for tensor in tensors) >= full[kind]


def _at_a_time(tree: Any, batch: int, members: int, width: int) -> int:
    """How many members go through a stage together."""
    compiling = torch.compiler.is_compiling()
    few = 1 if fills_device(tree, batch, FULL if compiling else FULL_STAGE) else width
    if not compiling:
        return few
    return next((n for n in (few, width) if members <= n * UNROLLED), members)


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
