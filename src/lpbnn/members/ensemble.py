"""MemberEnsemble: members as rows of one expanded batch, checked against running them one by one."""

import json
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.convert.wrapper import Wrapper
from lpbnn.likelihoods import require_targets
from lpbnn.members.call import EXECUTIONS, Call, CallCheck, as_call, copy_tensors, raise_with_advice
from lpbnn.members.partial import (
    FULL,
    ExpansionPoints,
    fills_device,
    find_expansion_points,
    given_points,
)
from lpbnn.members.passes import MemberPass, PassSlot, Sampled
from lpbnn.members.rows import (
    BatchMode,
    concatenate,
    expand_batch,
    gather,
    map_tensors,
    member_examples,
    row_weights,
    rows_needed,
)
from lpbnn.model import Outputs, Pass, UncertainModel

# Behind a shared part, several draws of the members run in one pass; the outputs of all are in memory.
MAX_MEMBERS_PER_PASS = 16


class LossBatch(NamedTuple):
    """The batch of a loss: the call of the network, with targets and weights for the rows of all members.

    Args:
        call: of the network.
        mode: how the batch is distributed over the members.
        targets: of the J * n rows, member-major.
        weights: of the rows; None counts all equally.
        rows_per_member: n, in one pass of all members; 1 if they run one after another, or in evaluation.
    """

    call: Call
    mode: BatchMode
    targets: Any
    weights: Tensor | None
    rows_per_member: int


class MemberEnsemble(UncertainModel):
    """A network whose members share one expanded batch.

    Running the members one after another is the reference, and right for every network. Running them
    together as rows is faster, and right if the network treats the rows of its batch independently.
    ``lpbnn.check`` compares the two on a few rows of the first batch; if they differ, the model warns and
    uses the reference from then on.

    A method defines ``member_layer``, ``sample`` and ``probe``; its layers read their part of the sampled
    state from ``slot``, by their ``index``.

    Args:
        net: the converted network.
        expand_at: path of the module in front of which the batch is expanded, or several; "" is the
            whole network; None finds it (``lpbnn.members.partial``).
    """

    member_layer: type[Wrapper]  # the class of the layers in which members differ
    layers: list[Any]  # these layers, in the network's order

    def __init__(
        self,
        net: nn.Module,
        *,
        expand_at: str | Sequence[str] | None = None,
        **model_options: Any,
    ) -> None:
        super().__init__(net, **model_options)
        self.slot = PassSlot()
        self.refresh()
        if expand_at is None:
            self.expansion_choices, points = self.find_expansion_points()
        else:
            points = given_points(net, expand_at)
            self.expansion_choices = [points]
        self.points = ExpansionPoints(net, points, self.slot)

    def refresh(self) -> None:
        """Find the converted layers again, after the user replaced some of them."""
        self.layers = []
        for module in self.net.modules():
            if isinstance(module, self.member_layer) and module.in_place:
                module.slot, module.index = self.slot, len(self.layers)
                self.layers.append(module)
        if not self.layers:
            raise RuntimeError("the network has no converted layer. Build a model again.")

    @property
    def expand_at(self) -> list[str]:
        """The paths of the modules in front of which the batch is expanded."""
        return self.points.paths

    def use_expansion_points(self, paths: Sequence[str]) -> None:
        """Expand the batch at other modules from now on."""
        if list(paths) != self.expand_at:
            self.points.remove()
            self.points = ExpansionPoints(self.net, paths, self.slot)

    def find_expansion_points(self) -> tuple[list[list[str]], list[str]]:
        """Return choices of expansion points to check, and the one to use without a check."""
        return find_expansion_points(self.net, self.member_layer)

    def sample(self, samples: int = 1) -> Sampled:
        """Sample ``samples`` draws of every member."""
        raise NotImplementedError

    def probe(self, count: int) -> Sampled:
        """Return members that differ visibly, for a comparison of two ways to compute them."""
        raise NotImplementedError

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        return self._outputs_of(self.sample(), False, *args, **kwargs)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        sampled = self.sample(samples if self.stochastic else 1)
        for start in range(0, sampled.count, width):
            yield partial(self._outputs_of, sampled.take(start, width), True)

    def _outputs_of(
        self, sampled: Sampled, predicting: bool, /, *args: Any, **kwargs: Any
    ) -> Outputs:
        """Return the outputs of members as (members, examples, ...), for every head of the network."""
        call = self.call(args, kwargs, sampled.count)
        rows = self.run(sampled, call, predicting=predicting)
        return map_tensors(partial(gather, members=sampled.count), rows)

    def chunk_sizes(self, batch: int, samples: int, chunk: int | None) -> tuple[int, int]:
        members = self.members
        if chunk is None:
            most = max(1, MAX_MEMBERS_PER_PASS // members) if self.points.can_loop else 1
            return members * min(samples, most), batch
        if batch * members <= chunk:  # room for several draws at once
            return min(members * samples, chunk // (batch * members) * members), batch
        if self.points.whole_network:  # few members with all examples: nearer to a plain network
            return max(1, chunk // batch), min(batch, chunk)
        width = min(members, chunk)
        return width, max(1, chunk // width)

    def run(
        self,
        sampled: Sampled,
        call: Call,
        mode: BatchMode = "repeat",
        *,
        predicting: bool = False,
    ) -> Outputs:
        """Run members, by the execution that was found to be right; return all rows, member-major.

        Args:
            sampled: the members.
            call: of the network, from ``self.call``.
            mode: how the batch is distributed over the members.
            predicting: run the members one by one where one fills the device: in the whole network, or in
                its modules with ``loop_members``.
        """
        alone = call.check.execution == "loop" or sampled.count == 1
        if predicting and self.points.whole_network and not alone:
            alone = fills_device(call.examples, FULL)
        if alone:
            return self.run_one_by_one(sampled, call, mode)
        return self.run_rows(sampled, call, mode, predicting)

    def run_rows(
        self,
        sampled: Sampled,
        call: Call,
        mode: BatchMode = "repeat",
        predicting: bool = False,
    ) -> Outputs:
        """Run all members in one pass of the network, as rows of one batch (see ``run``)."""
        batch, count, points = call.batch, sampled.count, self.points
        of_draw = self.members if predicting and points.can_loop else 0
        # An input that has by chance as many rows as the expanded batch could be mistaken for it.
        if of_draw and any(x.shape[:1] == (batch * count,) for x in call.tensors):
            of_draw = 0
        shared = call.check.shared_inputs
        state = MemberPass(sampled, batch, mode, of_draw, call.masks, shared)
        args, kwargs = call.args, call.kwargs
        if points.whole_network:
            args, kwargs = call.map_examples(expand_batch, members=count, mode=mode)
        try:
            outputs = self.slot.run(state, self.run_network, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise_with_advice("" if points.whole_network else points.advice(), error)
        for output in tree_leaves(outputs):
            if output.shape[0] != state.rows:
                raise RuntimeError(
                    f"{batch} examples and {count} members make {state.rows} rows, but the network "
                    f"returned {output.shape[0]}. {points.advice()}"
                )
        return outputs

    def run_one_by_one(self, sampled: Sampled, call: Call, mode: BatchMode = "repeat") -> Outputs:
        """Run the members one after another, the reference (see ``run``); the rows are the same."""
        count, outputs = sampled.count, []
        for j in range(count):
            own = call
            if mode == "split" and count > 1:
                own = call.take(member_examples(j, call.batch, count))
            # The network may change its inputs in place.
            args, kwargs = own.args, own.kwargs
            if count > 1:
                args, kwargs = copy_tensors((args, kwargs))
            state = MemberPass(sampled.take(j, 1), own.batch)
            output = self.slot.run(state, self.run_network, *args, **kwargs)
            # The next call may write to the same memory, for example in a recorded CUDA graph.
            outputs.append(output if j == count - 1 else map_tensors(torch.clone, output))
        return concatenate(outputs)

    def loss_batch(self, x: Any, y: Any, weight: Tensor | None, batch_mode: BatchMode) -> LossBatch:
        """Return the batch of a loss: how the members share it, and the targets and weights of all rows.

        Args:
            x: the inputs, as ``loss`` takes them.
            y: the targets.
            weight: (B,), how much each example counts; None counts all equally.
            batch_mode: how the batch is distributed over the members in training mode.
        """
        self.likelihood.check_batch(x, y)
        members = self.members
        call = self.call(*as_call(x), members)
        mode, batch = batch_mode if self.training else "repeat", call.batch
        if call.check.independent_rows is False:
            mode = "repeat"  # examples that depend on each other stay together
            batch = len(tree_leaves(y)[0])  # the batch may be another dimension of the inputs
        require_targets(y, weight, batch)
        expand = partial(expand_batch, members=members, mode=mode)
        targets, weight = map_tensors(expand, (y, weight))
        if mode == "split" and batch % members:  # some examples have two rows
            once = row_weights(batch, members, tree_leaves(y)[0].device)
            weight = once if weight is None else once * weight
        in_one_pass = self.training and members > 1 and call.check.execution != "loop"
        rows = rows_needed(batch, members, mode) // members if in_one_pass else 1
        return LossBatch(call, mode, targets, weight, rows)

    # The check at the first batch of every kind.

    def compare(self, call: Call) -> None:
        """Compare running members as rows with the reference, and warn if they differ."""
        from lpbnn.check import verify  # imports point the other way

        report = verify(self, call)
        if report.warning:
            warnings.warn(report.warning, UserWarning, stacklevel=2)

    def extra_state(self) -> dict[str, Any]:
        """Return what the state dict keeps besides tensors."""
        return {"checks": self.checks, "expand_at": self.expand_at}

    def get_extra_state(self) -> Tensor:
        found = self.extra_state()
        return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if not isinstance(state, Tensor):
            raise ValueError(f"the state of the checks is a tensor; got {type(state).__name__}.")
        found = json.loads(bytes(state.tolist()))
        checks = {}
        for kind, (execution, independent, shared) in found["checks"].items():
            if execution not in EXECUTIONS:
                raise ValueError(f"the state names no way to run members: {execution!r}.")
            places = shared.values() if isinstance(shared, dict) else [None]
            if independent not in (None, True, False) or not all(map(_are_places, places)):
                raise ValueError(
                    f"the state knows calls of another form: {independent!r}, {shared!r}."
                )
            checks[kind] = CallCheck(execution, independent, shared)
        if found["expand_at"] not in self.expansion_choices:
            return  # it was found with other options than this model's: check again
        self.checks = checks
        self.use_expansion_points(found["expand_at"])


def _are_places(found: Any) -> bool:
    return isinstance(found, list) and all(type(place) is int for place in found)
