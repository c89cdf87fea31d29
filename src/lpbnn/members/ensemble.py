"""MemberEnsemble: members as rows of one expanded batch, checked against running them one by one."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lpbnn.kernels.autograd import is_traced
from lpbnn.likelihoods import require_row_weights, require_targets
from lpbnn.members.partial import (
    FULL,
    ExpansionPoints,
    fills_device,
    find_expansion_points,
    given_points,
    raise_with_advice,
)
from lpbnn.members.passes import MemberPass, PassSlot, Sampled
from lpbnn.members.rows import (
    Argument,
    BatchMode,
    batched,
    call_kind,
    copy_tensors,
    expand_tree,
    find_masks,
    gather,
    member_examples,
    row_weights,
    rows_needed,
    take_examples,
)
from lpbnn.model import (
    EXECUTIONS,
    MODES,
    CallCheck,
    Outputs,
    Pass,
    UncertainModel,
    as_call,
    batch_size,
)

# Behind a shared part, several draws of the members run in one pass; the outputs of all are in memory.
MAX_MEMBERS_PER_PASS = 16


class MemberEnsemble(UncertainModel):
    """A network whose members share one expanded batch.

    Running the members one after another is the reference, and right for every network. Running them
    together as rows is faster, and right if the network treats the rows of its batch independently.
    ``lpbnn.check`` compares the two on a few rows of the first batch; if they differ, the model warns and
    uses the reference from then on.

    A method defines ``sample`` and ``probe``; its layers read ``slot``.

    Args:
        net: the converted network.
        expand_at: path of the module in front of which the batch is expanded, or several; "" is the
            whole network; None finds it (``lpbnn.members.partial``).
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        expand_at: str | Sequence[str] | None = None,
        **model_options: Any,
    ) -> None:
        super().__init__(net, **model_options)
        self.slot = PassSlot()
        if expand_at is None:
            self.expansion_choices, points = self.find_expansion_points()
        else:
            points = given_points(net, expand_at)
            self.expansion_choices = [points]
        self.points = ExpansionPoints(net, points, self.slot)

    @property
    def expand_at(self) -> list[str]:
        """The paths of the modules in front of which the batch is expanded."""
        return self.points.paths

    def use_expansion_points(self, paths: Sequence[str]) -> None:
        """Expand the batch at other modules from now on."""
        if list(paths) != self.expand_at:
            self.points.remove()
            self.points = ExpansionPoints(self.net, paths, self.slot)

    def is_converted(self, module: nn.Module) -> bool:
        """Return True if members differ in this module."""
        raise NotImplementedError

    def find_expansion_points(self) -> tuple[list[list[str]], list[str]]:
        """Return choices of expansion points to check, and the one to use without a check."""
        return find_expansion_points(self.net, self.is_converted)

    def sample(self, samples: int = 1) -> Sampled:
        """Sample ``samples`` draws of every member."""
        raise NotImplementedError

    def probe(self, count: int) -> Sampled:
        """Return members that differ visibly, for a comparison of two ways to compute them."""
        raise NotImplementedError

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        sampled = self.sample()
        return gather_outputs(self.run(sampled, args, kwargs), sampled.count)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        sampled = self.sample(samples if self.stochastic else 1)
        for start in range(0, sampled.count, width):
            yield partial(self._predict, sampled.take(start, width), start)

    def _predict(self, sampled: Sampled, first: int, /, *args: Any, **kwargs: Any) -> Outputs:
        rows = self.run(sampled, args, kwargs, first=first, predicting=True)
        return gather_outputs(rows, sampled.count)

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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: BatchMode = "repeat",
        *,
        first: int = 0,
        predicting: bool = False,
    ) -> Outputs:
        """Run members, by the execution that was found to be right; return all rows, member-major.

        Args:
            sampled: the members; ``first`` is the number of the first of them.
            args: the network's arguments.
            kwargs: its keyword arguments.
            mode: how the batch is distributed over the members.
            predicting: run the members one by one where one fills the device: in the whole network, or in
                its modules with ``loop_members``.
        """
        known = self.ensure_checked(sampled.count, args, kwargs)
        alone = known.execution == "loop" or sampled.count == 1
        if predicting and self.points.whole_network and not alone:
            alone = fills_device(batched((args, kwargs), batch_size(args, kwargs)), FULL)
        if alone:
            return self.run_one_by_one(sampled, args, kwargs, mode, first, known.shared_inputs)
        return self.run_rows(sampled, args, kwargs, mode, first, known.shared_inputs, predicting)

    def run_rows(
        self,
        sampled: Sampled,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: BatchMode = "repeat",
        first: int = 0,
        shared: Sequence[Argument] = (),
        loops: bool = False,
    ) -> Outputs:
        """Run all members in one pass of the network, as rows of one batch (see ``run``).

        ``shared`` are the arguments that are known to hold no examples.
        """
        batch, count = batch_size(args, kwargs), sampled.count
        # An input that has by chance as many rows as the expanded batch could be mistaken for it.
        loops = loops and self.points.can_loop and not batched((args, kwargs), batch * count)
        masks = find_masks([*self.mask_arguments, *shared], args, kwargs)
        draw = self.members if loops else 0
        state = MemberPass(sampled.take(0, count), batch, first, mode, draw, masks)
        if self.points.whole_network:
            args, kwargs = expand_tree((args, kwargs), batch, count, mode, masks)
        try:
            outputs = self.slot.run(state, self.run_network, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise_with_advice(self._advice(error, batch), error)
        for output in tree_leaves(outputs):
            if output.shape[0] != state.rows:
                raise RuntimeError(
                    f"{batch} examples and {count} members make {state.rows} rows, but the network "
                    f"returned {output.shape[0]}. {self.points.advice()}"
                )
        return outputs

    def run_one_by_one(
        self,
        sampled: Sampled,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: BatchMode = "repeat",
        first: int = 0,
        shared: Sequence[Argument] = (),
    ) -> Outputs:
        """Run the members one after another, the reference (see ``run_rows``); the rows are the same."""
        batch, count = batch_size(args, kwargs), sampled.count
        outputs = []
        for j in range(count):
            own, size = (args, kwargs), batch
            if mode == "split" and count > 1:
                examples = member_examples(j, batch, count)
                arguments = [*self.mask_arguments, *shared]
                own = take_examples(arguments, args, kwargs, batch, examples)
                size = len(examples)
            if count > 1:  # the network may change its inputs in place
                own = copy_tensors(own)
            state = MemberPass(sampled.take(j, 1), size, first + j)
            output = self.slot.run(state, self.run_network, *own[0], **own[1])
            # The next call may write to the same memory, for example in a recorded CUDA graph.
            outputs.append(output if j == count - 1 else tree_map(torch.clone, output))
        return outputs[0] if count == 1 else tree_map(lambda *own: torch.cat(own), *outputs)

    def run_for_loss(
        self,
        x: Any,
        y: Any,
        weight: Tensor | None,
        batch_mode: BatchMode,
        sample: Callable[[int], Sampled],
    ) -> tuple[Outputs, Any, Tensor | None]:
        """Run the members on a training batch; return all rows, and the target and the weight of each.

        Args:
            x: the inputs, as ``loss`` takes them.
            y: the targets.
            weight: (B,), how much each example counts; None counts all equally.
            batch_mode: how the batch is distributed over the members in training mode.
            sample: samples the members, given how many rows of one pass each of them has.
        """
        self.likelihood.check_batch(x, y)
        args, kwargs = as_call(x)
        batch, members = batch_size(args, kwargs), self.members
        known = self.ensure_checked(members, args, kwargs)
        mode = batch_mode if self.training else "repeat"
        if known.independent_rows is False:
            mode = "repeat"  # examples that depend on each other stay together
            batch = len(tree_leaves(y)[0])  # the batch may be another dimension of the inputs
        require_targets(y, batch)
        require_row_weights(weight, batch)
        # A compiled loss may copy the factors to the rows of their member, if all run in one pass.
        in_one_pass = self.training and members > 1 and known.execution != "loop"
        sampled = sample(rows_needed(batch, members, mode) // members if in_one_pass else 1)
        outputs = self.run(sampled, args, kwargs, mode)
        targets, weight = expand_tree((y, weight), batch, members, mode)
        once = row_weights(batch, members, mode, tree_leaves(outputs)[0].device)
        if once is not None:  # every example counts once
            weight = once if weight is None else once * weight
        return outputs, targets, weight

    def _advice(self, error: Exception, batch: int) -> str:
        """Return what helps against an error of the network, or an empty string."""
        return "" if self.points.whole_network else self.points.advice()

    # The check at the first batch of every kind.

    def ensure_checked(
        self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallCheck:
        """Return what is known of calls of this kind.

        Before several members run together, the first call of each kind is compared with the reference.
        """
        kind = call_kind(args, kwargs)
        if kind in self.checks or not self.check_first_batch or count == 1:
            return self.known_check(args, kwargs)
        if is_traced((args, kwargs)):  # a comparison cannot be part of a graph
            return self.known_check(args, kwargs)
        from lpbnn.check import verify  # imports point the other way

        with MODES:  # it sets training flags: other threads wait for its result
            if kind not in self.checks:
                report = verify(self, args, kwargs)
                if report.warning:
                    warnings.warn(report.warning, UserWarning, stacklevel=2)
        return self.checks[kind]

    def require_independent_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.ensure_checked(2, args, kwargs)
        super().require_independent_rows(args, kwargs)

    def extra_state(self) -> dict[str, Any]:
        """Return what the state dict keeps besides tensors."""
        return {"checks": self.checks, "expand_at": self.expand_at}

    def get_extra_state(self) -> Tensor:
        found = self.extra_state()
        return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        found = json.loads(bytes(state.tolist()))
        checks = {}
        for kind, (execution, independent, shared) in found["checks"].items():
            if execution not in EXECUTIONS:
                raise ValueError(f"the state names no way to run members: {execution!r}.")
            arguments = tuple(Argument(*one) for one in shared)
            checks[kind] = CallCheck(execution, independent, arguments)
        if found["expand_at"] not in self.expansion_choices:
            return  # it was found with other options than this model's: check again
        self.checks = checks
        self.use_expansion_points(found["expand_at"])


def gather_outputs(rows: Outputs, members: int) -> Outputs:
    """Return member-major rows as (members, examples, ...), for every head of a network."""
    return tree_map(partial(gather, members=members), rows)
