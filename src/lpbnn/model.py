"""UncertainModel: what every method returns, and the only thing that prediction and training know."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.kernels.autograd import is_traced
from lpbnn.likelihoods import Categorical, Likelihood, require_row_weights
from lpbnn.members.call import (
    Call,
    CallCheck,
    Execution,
    as_call,
    batch_size,
    call_kind,
    mask_arguments,
)
from lpbnn.members.rows import member_rows
from lpbnn.precision import WideBuffers

Terms = dict[str, Tensor]
Outputs = Any  # a tensor (S, B, ...), or a dict of such tensors for a network with several heads
Pass = Callable[..., Outputs]
Readout = Callable[[Any], Outputs]
NOT_GIVEN: Any = object()


class UncertainModel(WideBuffers):
    """A network, a likelihood, and a way to be uncertain about the network's weights.

    A method defines ``outputs`` and, where it differs from one network, ``loss``, ``passes``,
    ``fast_parameters``, ``ood_score`` and the hooks ``before_epoch``, ``after_step`` and ``after_fit``.

    Args:
        net: any module.
        likelihood: scores the outputs against targets and summarises them (``lpbnn.likelihoods``).
        readout: picks the output tensor from what ``net`` returns, if that is not a tensor.
    """

    members: int = 1  # predictions that one pass returns
    stochastic: bool = True  # True if a second pass differs from the first
    fast_lr: float = 1.0  # the learning rate of the fast parameters, as a multiple of the others'
    check_first_batch: bool = True  # False: trust the network, compare nothing with the reference

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood | None = None,
        readout: Readout | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.mask_arguments = mask_arguments(self.networks[0])
        self.checks: dict[str, CallCheck] = {}  # by the kind of call
        self.lock = RunLock()
        tensors = [*net.buffers(), *net.parameters()]
        # That of the outputs, for a network on several devices.
        device = tensors[-1].device if tensors else torch.device("cpu")
        self.likelihood = (likelihood or Categorical()).to(device)
        self.readout = readout or self.likelihood.read_output

    @property
    def task(self) -> str:
        """The likelihood's task, for example "classification"."""
        return self.likelihood.task

    @property
    def networks(self) -> list[nn.Module]:
        """The user's network, or the J networks of a Deep Ensemble."""
        return [self.net]

    # The first argument stands alone so that torch.export's dynamic_shapes can be given as usual.
    def forward(self, x: Any = NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Outputs:
        """Return every member's outputs, (S, B, C, ...); the arguments are the network's."""
        with self.lock.shared():
            return self.outputs(*(args if x is NOT_GIVEN else (x, *args)), **kwargs)

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        """Return the outputs (S, B, C, ...) of the members."""
        raise NotImplementedError

    def run_network(self, *args: Any, **kwargs: Any) -> Outputs:
        """Run the network once and return its outputs (B, C, ...)."""
        batch_size(args, kwargs)  # refuses a call without examples
        return self.readout(self.net(*args, **kwargs))

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        """Return the training loss and its named terms; ``loss`` is the sum of the others.

        Args:
            x: the inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            y: the targets, as the likelihood expects them.
            weight: (B,), how much each example counts; None counts all equally.
        """
        self.likelihood.check_batch(x, y)
        args, kwargs = as_call(x)
        outputs = self.outputs(*args, **kwargs)
        if weight is not None:
            require_row_weights(weight, tree_leaves(outputs)[0].shape[1])
        return with_loss(**self.likelihood.nll_terms(*member_rows(outputs, y, weight)))

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a block in which the model is in evaluation mode; after it modules have their own modes.

        Several threads may be in such blocks.
        """
        return self.lock.evaluating(self)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        """Yield functions of the inputs, each of which runs up to ``width`` members.

        Together they run ``samples`` draws of every member; those of a deterministic model run it once. A
        function may be called several times, for the parts of a batch, before the next one is asked for: a
        method draws its members before it yields the function, so that they are the same for all parts. The
        function of this base class is the model, which draws in every call.
        """
        for _ in range(samples if self.stochastic else 1):
            yield self

    def chunk_sizes(self, batch: int, samples: int, chunk: int | None) -> tuple[int, int]:
        """Return how many members and how many examples go into one pass of a prediction.

        Args:
            batch: examples to predict.
            samples: draws of each member.
            chunk: upper bound for rows (member, example) in the network at once; None sets no bound.
        """
        return self.members, batch if chunk is None else min(chunk, batch)

    @property
    def execution(self) -> Execution:
        """How members run: "loop" if that was found for any kind of call."""
        found: list[Execution] = [check.execution for check in self.checks.values()]
        compared: list[Execution] = [one for one in found if one != "unchecked"]
        if "loop" in compared:
            return "loop"
        return compared[0] if compared else "unchecked"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], members: int = 1) -> Call:
        """Return a call of the network, with what was found for calls of its kind (``Call.check``).

        A compiler cannot compare a new kind of call. It runs members one after another if they had to in
        another kind.

        Args:
            args: the network's arguments.
            kwargs: its keyword arguments.
            members: how many are to run; before several do, a new kind of call is compared.
        """
        kind = call_kind(args, kwargs)
        found = self.checks.get(kind)
        new = found is None or (members > 1 and found.execution == "unchecked")
        if new and self.check_first_batch:
            call = Call(args, kwargs, self.mask_arguments)
            if not is_traced(call.tensors):
                found = self._check(kind, call, members)
        if found is None or found.execution == "unchecked":
            # That of another kind: its shared inputs are other ones.
            loops = (check for check in self.checks.values() if check.execution == "loop")
            known = next(loops, CallCheck())
            found = CallCheck(known.execution, known.independent_rows)
        shared = found.shared_inputs.get("")
        return Call(args, kwargs, self.mask_arguments, found, shared=shared)

    def _check(self, kind: str, call: Call, members: int) -> CallCheck:
        """Return what is known of a kind of call, after a comparison of one that is new."""
        from lpbnn.check import refuse_type_dependence  # imports point the other way

        with self.lock.alone():
            if kind not in self.checks:  # found by another thread in the meantime
                refuse_type_dependence(self, call)
                self.checks[kind] = CallCheck()
            if members > 1 and self.checks[kind].execution == "unchecked":
                self.compare(call)
            return self.checks[kind]

    def compare(self, call: Call) -> None:
        """Find out how calls of a new kind may run: here, if examples of a batch are independent."""
        from lpbnn.check import rows_are_independent  # imports point the other way

        found = CallCheck("single", rows_are_independent(self, call), call.find_shared())
        self.checks[call_kind(call.args, call.kwargs)] = found

    def independent_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call whose batch may be taken apart; refuse one whose examples depend on each other.

        For a prediction that is cut into portions, and a method that mixes examples in training.
        """
        call = self.call(args, kwargs, members=2)
        if call.check.independent_rows is False:
            raise ValueError(
                "the output of an example depends on the other examples of its batch, on their number or "
                "on its place, or on an input that cannot be cut with it (an initial state, indices), so "
                "the batch cannot be taken apart. Fix: predict without chunk; 'mimo', which mixes "
                "examples in training, cannot be used for such a network."
            )
        return call

    def ood_score(self, outputs: Tensor) -> Tensor | None:
        """Return the method's own OOD score of member outputs, (S, B, ...); higher means more likely OOD.

        None if the method has no score besides the one that follows from its probabilities.
        """
        return None

    def set_noise_scale(self, scale: float) -> None:
        """Multiply the standard deviation of the posterior by a number in every draw; 1 is as trained.

        Training draws with it too: set it back to 1 before you go on. A method with noise has the scale in
        the buffer ``noise_scale``.
        """
        found = self._buffers.get("noise_scale")
        if found is None or not self.stochastic:
            raise TypeError(
                f"{type(self).__name__} has no noise to scale. Fix: calibrate it by a temperature, "
                "lpbnn.calibration.calibrate(model, batches)."
            )
        found.fill_(noise_scale_value(scale))

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that learn without weight decay, at ``fast_lr`` times the rate."""
        return []

    def parameter_groups(
        self, weight_decay: float = 0.0, lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Return parameter groups for any torch optimizer: "slow", and "fast" if there are such parameters.

        A scheduler that sets every group's rate to one number (``OneCycleLR`` with a single ``max_lr``)
        drops the factor ``fast_lr``; give it one rate per group.
        """
        if lr is None and self.fast_lr != 1:
            raise ValueError(
                f"the fast weights learn at {self.fast_lr} times the rate, so the rate must be known here. "
                "Fix: parameter_groups(weight_decay=..., lr=...), with the optimizer's own lr."
            )
        fast = {id(p): p for p in self.fast_parameters()}
        slow = [p for p in self.parameters() if id(p) not in fast]
        groups: list[dict[str, Any]] = [
            {"name": "slow", "params": slow, "weight_decay": weight_decay}
        ]
        if fast:
            groups.append({"name": "fast", "params": list(fast.values()), "weight_decay": 0.0})
        if lr is not None:
            for group, rate in zip(groups, (lr, lr * self.fast_lr), strict=False):
                group["lr"] = rate
        return groups

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state dict of a model that was built in the same way."""
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            error.add_note(
                "Fix: build the same network by the method and with the options of the saved model."
            )
            raise

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """Anneal; a training loop calls this before every epoch (from 0) of ``epochs``.

        It may change buffers only: a compiled or recorded step does not see other attributes change.
        """

    def after_step(self, lr: float | Tensor = 0.0) -> None:
        """Update running statistics; a training loop calls this after every optimizer step.

        The gradients are still there. ``lr`` is a tensor if the step is recorded as a CUDA graph: compute
        with it, do not read it.
        """

    def after_fit(self, batches: Iterable[Any]) -> None:
        """Finish training; a training loop calls this once, with the batches (x, y), or the inputs x."""


class RunLock:
    """A readers-writer lock: many threads may run a model at once, or one of them alone checks it.

    A check changes training flags and small weights, and the part that has members, for a moment. It waits
    until no other thread runs the model, and others wait until it has ended. A thread that waits for its own
    check does not count as one that runs, so two of them do not wait for each other.

    Example:
        >>> lock = RunLock()
        >>> with lock.shared(), lock.alone():
        ...     "no other thread is in either block"
        'no other thread is in either block'
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = Counter[int]()  # by thread: how many blocks of ``shared`` it is in
        self._alone: int | None = None
        self._waiting = 0
        # The modes that modules get back when the last of the threads in ``evaluating`` leaves it.
        self._modes: dict[nn.Module, bool] = {}
        self._evaluating = 0

    def __reduce__(self) -> Any:
        return RunLock, ()  # nobody runs a copy

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Return a block that other threads may be in, too, but none that is ``alone``."""
        if torch.compiler.is_compiling():
            yield
            return
        me = threading.get_ident()
        with self._changed:
            inside = me in self._running or self._alone == me
            while not inside and (self._alone is not None or self._waiting):
                self._changed.wait()
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                self._running += Counter()  # drops what is zero
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a block that no other thread is in, nor in one of ``shared``."""
        me = threading.get_ident()
        if self._alone == me:
            yield
            return
        with self._changed:
            own = self._running.pop(me, 0)
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._alone is None and not self._running)
                self._alone = me
            finally:
                self._waiting -= 1
                self._running += Counter({me: own})
        try:
            yield
        finally:
            with self._changed:
                self._alone = None
                self._changed.notify_all()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Return a ``shared`` block in which the model is in evaluation mode.

        The first of several threads sets the mode; the last gives every module its own mode back.
        """
        with self.shared():
            with self._changed:
                if not self._modes:
                    modes = {module: module.training for module in model.modules()}
                    if any(modes.values()):  # setting flags is slow, and seldom needed
                        self._modes = modes
                        model.eval()
                counts = bool(self._modes)
                self._evaluating += counts
            try:
                yield
            finally:
                with self._changed:
                    self._evaluating -= counts
                    if counts and not self._evaluating:
                        modes, self._modes = self._modes, {}
                        for module, mode in modes.items():
                            module.training = mode


def stack_members(outputs: Sequence[Outputs]) -> Outputs:
    """Return the outputs (B, ...) of S members as (S, B, ...), head by head if there are several.

    Example:
        >>> tuple(stack_members([torch.zeros(5, 3), torch.ones(5, 3)]).shape)
        (2, 5, 3)
    """
    if isinstance(outputs[0], Mapping):
        return {name: stack_members([each[name] for each in outputs]) for name in outputs[0]}
    return torch.stack(list(outputs)) if len(outputs) > 1 else outputs[0].unsqueeze(0)


def with_loss(**terms: Tensor) -> Terms:
    """Return {"loss": the sum of the terms, ...the terms}; "nll/head" is a part of "nll" and not added.

    Example:
        >>> parts = {"nll": torch.tensor(3.0), "nll/a": torch.tensor(3.0), "kl": torch.tensor(1.0)}
        >>> with_loss(**parts)["loss"]
        tensor(4.)
    """
    return {"loss": reduce(add, [v for name, v in terms.items() if "/" not in name]), **terms}


class NotFittedWarning(UserWarning):
    """A model predicts whose training ``after_fit`` has not finished.

    A training loop that validates before it calls ``after_fit`` may ignore this category.
    """


class LossStep(nn.Module):
    """``model.loss`` as a forward: what DistributedDataParallel, FSDP or Accelerate should wrap.

    They synchronise the gradients of what goes through ``forward``; ``ddp.module.loss`` bypasses them.

    Example:
        >>> import lpbnn
        >>> step = LossStep(lpbnn.build(nn.Linear(3, 2), "mcp"))
        >>> sorted(step(torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))
        ['loss', 'nll']
    """

    def __init__(self, model: UncertainModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        return self.model.loss(x, y, weight)


def at_least_one(name: str, value: Any) -> int:
    """Return an integer of at least 1, given as any integer type (numpy's too)."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
    return value.__index__()


def noise_scale_value(scale: Any) -> float:
    """Return a scale of noise as a float; refuse anything but a finite number of at least 0."""
    value = float(scale)
    if not 0 <= value < math.inf:
        raise ValueError(f"noise scale {scale!r}: expected a finite number of at least 0.")
    return value
