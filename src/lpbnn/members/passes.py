"""One forward pass: the state that the converted layers read, and the slot in which they find it.

The model samples what makes its members differ, puts it into the slot, runs the network, and empties the
slot. Layers hold no state of their own. The slot is per thread, so that several threads may predict with
one model in evaluation mode.

Activation checkpointing runs parts of the network again in the backward pass, when the slot is empty.
``PassSlot.run`` hands these parts the state of the pass that is being differentiated.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.kernels.autograd import backward_is_nested, backward_is_running
from lpbnn.members.rows import BatchMode, rows_needed


class Sampled(Protocol):
    """The sampled state that distinguishes members: their factors, or the seeds of their dropout masks."""

    @property
    def count(self) -> int:
        """The number of members."""
        ...

    def take(self, start: int, count: int) -> Self:
        """Return ``count`` members, from ``start`` on."""
        ...


class Loop:
    """A part of the network that runs the members of a pass a few at a time.

    The earlier members' ``outputs`` wait here while the module's own call runs the last ones.
    """

    def __init__(self, module: nn.Module, state: "MemberPass") -> None:
        self.module, self.state = module, state
        self.outputs: list[Any] = []
        self.depth = 0  # calls of the module inside of its own call


class MemberPass:
    """The state of one forward pass of several members.

    Args:
        sampled: what makes the members differ, read by the converted layers.
        batch: the number of examples.
        mode: how the batch is expanded to the members.
        members_of_draw: the number of members of one draw, if parts of the network may run a few members
            at a time; 0: they may not.
        masks: inputs of the network that hold no examples, whatever their size.
        shared: which inputs of its expansion points hold none (``CallCheck.shared_inputs``).
    """

    def __init__(
        self,
        sampled: Any,
        batch: int,
        mode: BatchMode = "repeat",
        members_of_draw: int = 0,
        masks: Sequence[Tensor] = (),
        shared: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.sampled, self.batch = sampled, batch
        self.mode: BatchMode = mode
        self.members_of_draw, self.masks, self.shared = members_of_draw, masks, shared or {}
        self.count = sampled.count
        self.rows = rows_needed(batch, self.count, mode)  # of the expanded batch
        self.expanded = False  # True once an expansion point has expanded the batch
        self.loop: Loop | None = None  # the loop whose members these are
        # One per member, if the layers draw from seeds; every pass begins them anew.
        self.generators: dict[torch.device, list[torch.Generator]] = {}

    def take(self, start: int, count: int) -> "MemberPass":
        """Return the pass of ``count`` of the members, from ``start`` on."""
        return MemberPass(self.sampled.take(start, count), self.batch, self.mode)


def require_member_rows(rows: int, members: int, state: MemberPass | None, path: str) -> None:
    """Refuse rows that are not those of the members: a layer would take them for those of others.

    Args:
        rows: the first dimension of a layer's input.
        members: how many the layer computes.
        state: of the pass under way; None if the layer is called without its model.
        path: of the layer.
    """
    if rows % members:
        raise ValueError(
            f"{path!r} got {rows} rows for {members} members; rows are member-major and a multiple "
            "of the members. Call the built model, or lpbnn.members.rows.expand_batch first."
        )
    if members > 1 and state is not None and rows % state.rows:
        raise ValueError(
            f"{path!r} got an input with first dimension {rows}, in a pass of {state.rows} rows: "
            "its rows are not those of the batch (time first, a part of the batch, or no batch at all). Leave "
            f"the layer out with exclude={path!r}, or put the batch first."
        )


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # Not of the class: a compiled first pass guards on the instance.
        self.current: Any = None
        self.replay: Any = None  # a weak reference to the state of the pass being differentiated


class PassSlot:
    """The slot in which the layers of one model find the state of the pass under way.

    Example:
        >>> slot = PassSlot()
        >>> with slot.use("state"):
        ...     slot.get()
        'state'
        >>> slot.get() is None
        True
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def __reduce__(self) -> Any:
        return PassSlot, ()  # a copy is empty; layers that shared a slot share its copy

    @contextmanager
    def use(self, state: Any) -> Iterator[None]:
        """Let ``get`` return ``state`` within the block."""
        before = self._thread.current
        self._thread.current = state
        try:
            yield
        finally:
            self._thread.current = before

    def run(self, state: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(...)``, whose layers find the state here, in a backward pass too.

        Args:
            state: an object that can be weakly referenced; it lives as long as the outputs' graph.
            function: runs the network.
            *args: its arguments.
            **kwargs: its keyword arguments.
        """
        with self.use(state):
            outputs = function(*args, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return outputs  # a compiled graph recomputes for itself

        def set_replay(gradient: Tensor) -> None:
            # Of this thread: hooks and recomputed parts run where the backward pass does.
            self._thread.replay = weakref.ref(state)

        for output in tree_leaves(outputs):
            if output.requires_grad:
                output.register_hook(set_replay)
        return outputs

    def set(self, state: Any) -> None:
        """Replace the state of the pass under way."""
        self._thread.current = state

    def get(self) -> Any:
        """Return the state of the pass under way, or of the one being differentiated, or None."""
        state = self._thread.current
        if state is None and self._thread.replay is not None:
            replayed = self._thread.replay()
            if replayed is not None and backward_is_running():
                sampled = getattr(replayed, "sampled", None)
                if backward_is_nested() and getattr(sampled, "has_graph", False):
                    raise RuntimeError(
                        "reentrant checkpointing differentiates every block by itself, and the blocks of "
                        "this model share the graph of its sampled factors. Fix: "
                        "checkpoint(..., use_reentrant=False)."
                    )
                return replayed
            self._thread.replay = None
        return state
