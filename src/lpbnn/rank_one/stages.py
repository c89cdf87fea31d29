"""How the batch becomes members at a door of the network, and how they go through what is behind it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lpbnn.members.rows import (
    BatchMode,
    Places,
    Tables,
    batched,
    copied,
    is_batched,
    mask_places,
    masks_given,
    spread_tree,
    writes,
)
from lpbnn.rank_one.doors import has_unconverted
from lpbnn.rank_one.layer import Draw, FastWeight, take
from lpbnn.rank_one.norms import MemberNorm

# Numbers in a batch that keep a device busy without a second member beside them.
FULL = {"cpu": 2**16, "cuda": 2**19}
# The same behind a shared part, without a compiler: a stage is many small calls for each member, and the
# host must start them faster than the GPU is done with them (docs/cost.md). DeepLab's fine map of one frame
# of 1280x720 has 15 M numbers: its members go together, and in turn from two frames on.
FULL_STAGE = {"cpu": 2**16, "cuda": 2**24}
UNROLLED = 8  # a compiler writes out every member's turn: no more of them than this

_set = object.__setattr__  # what is no parameter need not go through nn.Module's own, which is slow

Plan = tuple[int, int, BatchMode]  # batch, members, and how the one is spread over the other


class Cast:
    """Whose rows the layers and norms of a pass will see.

    ``draws`` are of the members in the pass, the first of which is number ``first`` of ``members``.
    """

    def __init__(
        self,
        layers: Sequence[FastWeight],
        norms: Sequence[MemberNorm],
        members: int,
        draws: list[Draw],
        first: int,
    ) -> None:
        self.layers, self.norms, self.members = layers, norms, members
        self.draws, self.first = draws, first
        self._looking = False

    def choose(self, draws: Sequence[Draw], rows: int, start: int = 0) -> None:
        """Until others are chosen, every call is for ``draws``: those of the pass from ``start`` on."""
        for layer, draw in zip(self.layers, draws, strict=True):
            _set(layer, "_held", draw)
            _set(layer, "_rows", rows)
        ids = [(self.first + start + i) % self.members for i in range(draws[0].members)]
        for norm in self.norms:
            _set(norm, "_held", ids)

    def release(self) -> None:
        for layer in self.layers:
            _set(layer, "_held", None)
            _set(layer, "_rows", 0)
        for norm in self.norms:
            _set(norm, "_held", None)
        if self._looking:
            self._look_for(None)

    def look_for(self, net: nn.Module) -> None:
        """Until the release, no layer may be given a tensor of the network itself."""
        self._looking = True
        # Held, not only named: of one that the network replaces by another, an activation could get the id.
        tables = (*net.parameters(), *net.buffers())
        self._look_for({id(tensor): (tensor, writes(tensor)) for tensor in tables})

    def _look_for(self, tables: Tables | None) -> None:
        for layer in self.layers:
            _set(layer, "_tables", tables)


class SpreadAt:
    """A forward pre-hook on the first converted stage: the batch becomes members there.

    What comes before it runs once per example. Tensors that are spread already pass through.

    With an attribute ``spread_late = True`` a stage promises that its inputs go nowhere but into converted
    layers, or through operations without weights into them. A compiler would make the copies r * x for all
    of these layers in one kernel, and hold them all: so they get the batch as it is there, and each makes
    the members of it.
    """

    masked: tuple[tuple[nn.Module, Places], ...] = ()  # stages that take masks, and where

    def __init__(self) -> None:
        self.plan: Plan | None = None
        # Stages whose layers spread; a copy of the network has its own.
        self.late: list[nn.Module] = []

    def add_to(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)
        if places := mask_places(module):
            self.masked = (*self.masked, (module, places))
        if getattr(module, "spread_late", False) and not has_unconverted(module):
            self.late.append(module)
            for layer in module.modules():
                if isinstance(layer, FastWeight):
                    layer._late = True

    def end(self) -> None:
        """The pass is over, or broke off."""
        self.plan = None

    def masks(self, module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        """What of a stage's arguments is as long as the batch only by chance."""
        for stage, places in self.masked:
            if stage is module:
                return masks_given(places, args, kwargs)
        return []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.plan is None:
            return None
        late = self.plan[2] == "repeat" and any(module is stage for stage in self.late)
        if late and torch.compiler.is_compiling():
            return None
        return spread_tree((args, kwargs), *self.plan, self.masks(module, args, kwargs))


class SpreadInTurn(SpreadAt):
    """The same, and members may go through the stage a few at a time, where a pass and the stage allow it.

    One by one where the batch fills the device by itself: each is a plain network with its own weights
    then, and memory is that of one. Otherwise those of one draw at a time, as rows. Their outputs are
    joined as rows behind the stage.

    A stage allows it with an attribute ``in_turn = True``. That is a promise: it returns a row for each
    row that it is given, in every tensor, and leaves nothing behind that anybody reads. Where an earlier
    stage has spread the batch, what has a row for each member and example is taken for its work: members
    are given their own rows of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cast: Cast | None = None  # of a pass that allows it
        self._begun = False  # whether a stage of this pass has spread the batch
        self._turn: _Turn | None = None  # of the last members, in the stage's own call

    def add_to(self, module: nn.Module) -> None:
        super().add_to(module)
        module.register_forward_hook(self.join)

    def end(self) -> None:
        super().end()
        self.cast, self._begun, self._turn = None, False, None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._turn is not None:
            self._turn.depth += module is self._turn.module  # a stage that calls itself
            return None
        if self.plan is None:
            return None
        batch, members, _ = self.plan
        examples = batched((args, kwargs), batch, self.masks(module, args, kwargs))
        if examples and self.cast is not None and goes_in_turn(module):
            few = _at_a_time(examples, members, self.cast.members)
            if few < members:
                return self._in_turn(module, args, kwargs, self.plan, self.cast, few)
        self._begun = self._begun or len(examples) > 0  # torch 2.11 does not compile bool(list)
        return super().__call__(module, args, kwargs)

    def _in_turn(
        self, module: nn.Module, args: Any, kwargs: Any, plan: Plan, cast: Cast, few: int
    ) -> tuple[Any, Any]:
        """All members but the last few, and what these are called with."""
        batch, members, _ = plan
        self.plan = None  # a stage within the stage has rows already
        rows = batch * members if self._begun else None  # of what is spread already
        self._begun = True
        masks = self.masks(module, args, kwargs)

        def turn(start: int) -> tuple[Any, Any]:
            part = take(cast.draws, start, few)
            count = part[0].members
            cast.choose(part, batch * count, start)
            own = slice(batch * start, batch * (start + count))

            def mine(x: Tensor) -> Tensor:
                # A view: a stage that changes it changes the caller's rows, as it would with all members.
                return x[own] if rows is not None and is_batched(x, rows, masks) else x

            return tree_map_only(Tensor, mine, copied((args, kwargs), batch, count, masks))

        *earlier, last = range(0, members, few)
        outputs: list[Any] = []
        for start in earlier:
            own_args, own_kwargs = turn(start)
            outputs.append(module.forward(*own_args, **own_kwargs))
            _require_rows(module, outputs[-1], batch * few)
        self._turn = _Turn(module, plan, outputs)
        return turn(last)

    def join(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The members' outputs as rows, after the turn of the last."""
        turn = self._turn
        if turn is None or turn.module is not module:
            return output
        if turn.depth:
            turn.depth -= 1
            return output
        assert self.cast is not None
        self._turn, self.plan = None, turn.plan
        batch, members, _ = turn.plan
        self.cast.choose(self.cast.draws, batch * members)
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
    parts = [module] if torch.compiler.is_compiling() else module.modules()
    return sum(len(p._forward_pre_hooks) + len(p._forward_hooks) for p in parts) <= 2  # ours


def _require_rows(module: nn.Module, output: Any, rows: int) -> None:
    leaves = tree_leaves(output)
    if not all(isinstance(leaf, Tensor) and is_batched(leaf, rows) for leaf in leaves):
        raise RuntimeError(
            f"{type(module).__name__} has in_turn = True and got {rows} rows, but returned "
            f"{[tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]}. "
            "Fix: in_turn = False, so that its members are computed together."
        )


def fills_device(examples: Sequence[Tensor], full: Mapping[str, int]) -> bool:
    """Whether the inputs of a call keep the device busy without a second member beside them."""
    kind = "cpu" if all(tensor.device.type == "cpu" for tensor in examples) else "cuda"
    return sum(tensor.numel() for tensor in examples) >= full[kind]


def _at_a_time(examples: Sequence[Tensor], members: int, draw: int) -> int:
    """How many members go through a stage together; ``draw``: those of one draw."""
    compiling = torch.compiler.is_compiling()
    few = 1 if fills_device(examples, FULL if compiling else FULL_STAGE) else draw
    if not compiling:
        return few
    return next((n for n in (few, draw) if members <= n * UNROLLED), members)


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
