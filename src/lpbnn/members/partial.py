"""Partial conversion: where the batch is expanded to members, so that what comes before runs once.

A network may have an unconverted part, for example a pretrained encoder. The batch is expanded at one or
several *expansion points*, modules in front of whose forward a hook expands the inputs that hold the
examples. Tensors that are expanded already pass through.

A module may make three promises as attributes:

- ``expand_at = ("first", "second")``: its own parts to use as expansion points, in the order of their
  calls. Every tensor of the batch that is combined with a member's output is combined inside one of them.
- ``loop_members = True``: in prediction, it may be called for a few members at a time. It returns a row for
  each row that it is given, in every tensor, and leaves nothing behind that other code reads. Members run
  one by one if the batch fills the device by itself: each is then a plain network with its own weights, and
  memory is that of one.
- ``expand_in_layers = True``: its inputs go only into converted layers, or through operations without weights
  into them. If the batch is repeated, these layers expand it themselves in a compiled graph, so that the
  compiler does not hold one copy r * x per layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lpbnn.convert.checks import SUPPORTED
from lpbnn.convert.transposed import is_transposed_linear
from lpbnn.members.call import Argument, Call, call_kind, is_batched, mask_arguments
from lpbnn.members.passes import Loop, MemberPass, PassSlot
from lpbnn.members.rows import concatenate, expand_batch, map_tensors
from lpbnn.registry import did_you_mean

# Numbers in a batch of images that keep a device busy without a second member beside them. On a CPU
# (measured): a small WRN predicts 24 images in 4.5 passes' time member by member, in 6.7 with all members.
FULL = {"cpu": 2**13, "cuda": 2**19}
VECTORS = 16  # times as many in a batch of vectors or sequences, which members multiply together
# The same behind a shared part, without a compiler: a part is many small calls for each member, and the
# host must start them faster than the GPU finishes them (docs/results/cost.md). DeepLab's fine map of one frame
# of 1280x720 has 15 M numbers: its members run together, and one by one from two frames on.
FULL_PART = {"cpu": 2**16, "cuda": 2**24}
UNROLLED = 8  # a compiler writes out every member of a loop: no more of them than this
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # these have no forward
COSTLY = (*SUPPORTED, nn.RNNBase, nn.MultiheadAttention)  # worth running only once


class ExpansionPoints:
    """Hooks on the expansion points of a network; they act in a pass of several members.

    The hook before a point expands its inputs. If the point may loop over members, that hook runs all members
    but the last few by itself, leaves the last ones to the module's own call, and the hook behind the point
    concatenates the outputs of all.

    Args:
        net: the network.
        paths: the expansion points; "" alone is the whole network, which needs no hook.
        slot: where the pass under way is found.
    """

    def __init__(self, net: nn.Module, paths: Sequence[str], slot: PassSlot) -> None:
        self.paths = list(paths)
        self.slot = slot
        self.whole_network = self.paths == [""]
        # While a check runs: the inputs that hold no examples, by point and kind of call.
        self.observed: dict[str, list[int]] | None = None
        self.can_loop = False  # True if a point may run a few members at a time
        self.modules: dict[nn.Module, str] = {}  # the paths
        self.masks: dict[nn.Module, list[Argument]] = {}
        self.handles: list[RemovableHandle] = []
        for path in self.paths if not self.whole_network else ():
            module = net.get_submodule(path)
            self.modules[module], self.masks[module] = path, mask_arguments(module)
            self.can_loop = self.can_loop or getattr(module, "loop_members", False)
            self.handles.append(module.register_forward_pre_hook(self.expand, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self.concatenate_members))

    def remove(self) -> None:
        """Take the hooks off the network."""
        for handle in self.handles:
            handle.remove()

    def expand(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Expand the batch; or run all members but the last few, and return what these are called with."""
        state: MemberPass | None = self.slot.get()
        if state is not None and state.loop is not None:
            state.loop.depth += module is state.loop.module  # a module that calls itself
            return None
        if state is None or state.count == 1:
            return None
        key, shared = "", None
        if state.shared or self.observed is not None:
            key = f"{self.modules[module]} {call_kind(args, kwargs)}"
            shared = state.shared.get(key)
        own = Call(args, kwargs, self.masks[module], None, state.batch, state.masks, shared)
        if self.observed is not None:
            self.observed.update(own.find_shared(key, state.rows))
        compiling = torch.compiler.is_compiling()
        any_examples = len(own.examples) > 0  # torch 2.11 does not compile bool(list)
        if any_examples and state.members_of_draw and _may_loop(module, compiling):
            few = _members_at_a_time(own.examples, state, compiling)
            if few < state.count:
                return self._run_earlier(module, own, state, few)
        state.expanded = state.expanded or any_examples
        late = state.mode == "repeat" and getattr(module, "expand_in_layers", False)
        if late and compiling and any(getattr(m, "expands_batch", False) for m in module.modules()):
            return None
        return own.map_examples(expand_batch, members=state.count, mode=state.mode)

    def _run_earlier(
        self, module: nn.Module, call: Call, state: MemberPass, few: int
    ) -> tuple[Any, Any]:
        """Run all members but the last ``few``; ``concatenate_members`` adds the outputs of these."""
        *earlier, last = range(0, state.count, few)
        loop = Loop(module, state)
        for start in earlier:
            part = state.take(start, few)
            part.loop = loop
            own_args, own_kwargs = _own_arguments(call, state, start, part.count)
            with self.slot.use(part):
                output = module.forward(*own_args, **own_kwargs)
            _require_rows(module, output, part.rows)
            loop.outputs.append(output)
        part = state.take(last, few)
        part.loop = loop
        own = _own_arguments(call, state, last, part.count)
        self.slot.set(part)  # until the hook behind the module, or the pass ends with an error
        state.expanded = True
        return own

    def concatenate_members(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the outputs of all members of a loop as rows, after the call for the last ones."""
        state: MemberPass | None = self.slot.get()
        loop = None if state is None else state.loop
        if loop is None or loop.module is not module:
            return output
        if loop.depth:
            loop.depth -= 1
            return output
        self.slot.set(loop.state)
        return concatenate([*loop.outputs, output])

    def advice(self) -> str:
        """Return what to do if rows and examples met."""
        return (
            f"lpbnn expands the batch to the members at {self.paths}. If that module is not called, or "
            "a tensor goes around it and meets its output (a skip), expand the batch earlier. Fix: "
            "build(..., expand_at='') for the whole network, or expand_at= the path of an earlier module."
        )


def _own_arguments(call: Call, state: MemberPass, start: int, count: int) -> tuple[Any, Any]:
    """Return the arguments of ``count`` members of a loop, from ``start`` on."""
    own_rows = slice(state.batch * start, state.batch * (start + count))

    def own(x: Tensor) -> Tensor:
        if state.expanded and is_batched(x, state.rows, call.masks):
            return x[own_rows]  # a view: who changes it changes the rows of the caller
        if is_batched(x, call.batch, call.masks):  # each member may change its copy
            return expand_batch(x, count) if count > 1 else x.clone()
        return x

    return map_tensors(own, (call.args, call.kwargs))


def find_expansion_points(
    net: nn.Module, member_layer: type[nn.Module]
) -> tuple[list[list[str]], list[str]]:
    """Return choices of expansion points, those that share most of the network first, and a safe choice.

    The first choice is the deepest: it descends into every module that has unconverted layers. The next ones
    use the modules around these points, and the last is the whole network, [""]. A choice can be wrong (a
    skip may go around a point), so ``lpbnn.check`` compares each with the reference, in this order. The safe
    choice, for a model that compares nothing, is the points that a module names, or the outermost ones
    below the whole network.

    Args:
        net: the network.
        member_layer: the class of its converted layers.
    """
    if not has_unconverted(net, member_layer):
        return [[""]], [""]
    deepest = _descend("", net, member_layer)
    depth = max(point.count(".") for point in deepest)
    choices = [deepest]
    for level in range(depth, 0, -1):
        outer = list(dict.fromkeys(".".join(point.split(".")[:level]) for point in deepest))
        if not any(isinstance(net.get_submodule(point), CONTAINERS) for point in outer):
            choices.append(outer)
    parents = [net.get_submodule(point.rpartition(".")[0]) for point in deepest]
    safe = deepest if all(hasattr(parent, "expand_at") for parent in parents) else choices[-1]
    choices.append([""])
    return [choice for i, choice in enumerate(choices) if choice not in choices[:i]], safe


def _descend(path: str, module: nn.Module, member_layer: type[nn.Module]) -> list[str]:
    """Return the largest modules without an unconverted layer, in the order of registration."""
    if named := _named_points(path, module, member_layer):  # first: a module knows its parts best
        return named
    if path and not isinstance(module, CONTAINERS) and not has_unconverted(module, member_layer):
        return [path]
    return [
        point
        for name, child in module.named_children()
        if _converted(child, member_layer)
        for point in _descend(f"{path}.{name}" if path else name, child, member_layer)
    ]


def _named_points(path: str, module: nn.Module, member_layer: type[nn.Module]) -> list[str]:
    """Return the points that a module names, from the first with a converted layer on."""
    names = getattr(module, "expand_at", ())
    try:
        layers = [_converted(module.get_submodule(name), member_layer) for name in names]
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(module).__name__} has expand_at = {names!r}; expected the names of modules of its "
            "own, in the order of their calls. Fix: expand_at = ('first', 'second')."
        ) from error
    if _converted(module, member_layer) != set().union(*layers):
        return []  # there are converted layers outside of them, too
    first = next(i for i, part in enumerate(layers) if part)
    named = [f"{path}.{name}" if path else name for name in names[first:]]
    return named if len(named) > 1 else []  # a single one may hold a smaller point


def _converted(module: nn.Module, member_layer: type[nn.Module]) -> set[nn.Module]:
    return {inner for inner in module.modules() if isinstance(inner, member_layer)}


def has_unconverted(module: nn.Module, member_layer: type[nn.Module]) -> bool:
    """Return True if a layer below could have been converted and was not."""
    if isinstance(module, member_layer):
        return False
    if isinstance(module, COSTLY) or is_transposed_linear(module):
        return True
    return any(has_unconverted(child, member_layer) for child in module.children())


def given_points(net: nn.Module, expand_at: str | Sequence[str]) -> list[str]:
    """Return the expansion points that a user gave; refuse what is no path in the network."""
    paths = [path for path, _ in net.named_modules()]
    points = [expand_at] if isinstance(expand_at, str) else list(expand_at)
    if not points:
        raise ValueError(
            "expand_at=[] names no module. Fix: None finds one, '' is the whole network."
        )
    for point in points:
        if point not in paths:
            hint = did_you_mean(point, paths)
            raise ValueError(f"expand_at={point!r} is no module of the network.{hint}")
    return points


def _may_loop(module: nn.Module, compiling: bool) -> bool:
    """Return True if a module may be called for a few members at a time without a user's hook noticing."""
    if not getattr(module, "loop_members", False):
        return False
    parts = [module] if compiling else module.modules()
    return sum(len(p._forward_pre_hooks) + len(p._forward_hooks) for p in parts) <= 2  # ours


def _members_at_a_time(examples: Sequence[Tensor], state: MemberPass, compiling: bool) -> int:
    """Return how many members run through a part together."""
    one_draw = min(state.count, state.members_of_draw)
    few = 1 if fills_device(examples, FULL if compiling else FULL_PART) else one_draw
    if not compiling:
        return few
    return next((n for n in (few, one_draw) if state.count <= n * UNROLLED), state.count)


def fills_device(examples: Sequence[Tensor], full: Mapping[str, int]) -> bool:
    """Return True if the inputs of a call keep the device busy without a second member beside them.

    An exported graph is for batches of any size: it may not depend on this one's.
    """
    if torch.compiler.is_exporting():
        return False
    kind, dimensions, numbers = "cpu", 0, 0
    for tensor in examples:
        kind = kind if tensor.device.type == "cpu" else "cuda"
        dimensions = max(dimensions, tensor.dim())
        numbers += tensor.numel()
    together = kind == "cpu" and dimensions < 4  # vectors, which members multiply together
    return numbers >= full[kind] * (VECTORS if together else 1)


def _require_rows(module: nn.Module, output: Any, rows: int) -> None:
    leaves = tree_leaves(output)
    if not all(isinstance(leaf, Tensor) and is_batched(leaf, rows) for leaf in leaves):
        raise RuntimeError(
            f"{type(module).__name__} has loop_members = True and got {rows} rows, but returned "
            f"{[tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]}. "
            "Fix: loop_members = False, so that its members are computed together."
        )


def remove_expansion_hooks(net: nn.Module) -> None:
    """Take the hooks of any model off a network, or off a copy of it."""
    for module in net.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ExpansionPoints):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
