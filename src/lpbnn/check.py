"""Compare the fast ways to run members with the reference, once per model and kind of call.

The reference runs the members one after another, each with its own weights, and is right for every network.
Running them as rows of one batch is right if the network treats its rows independently: no concatenation
along the batch, no messages between rows, no other dimension in the batch's place. ``check`` runs both on a
few rows, with factors that differ strongly from member to member, and compares the output of every
converted layer, so that it can name the first one that differs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.convert.checks import RUNNING_NORMS
from lpbnn.convert.convert import replace_modules
from lpbnn.convert.transposed import PRE_HOOKS
from lpbnn.convert.wrapper import Wrapper, move_hooks
from lpbnn.draws import PrivateDraws
from lpbnn.kernels.autograd import vmap_is_running
from lpbnn.members.call import (
    Call,
    CallCheck,
    Execution,
    as_call,
    call_kind,
    copy_tensors,
    is_batched,
)
from lpbnn.members.rows import gather, map_tensors
from lpbnn.model import UncertainModel
from lpbnn.predict import unwrap

if TYPE_CHECKING:
    from lpbnn.members.ensemble import MemberEnsemble
    from lpbnn.methods.mimo import MIMO

Record = list[tuple[str, Tensor]]  # tensors that a run passed through, with their names
RESULT = "the output"  # of the network, in a record
MAX_ROWS = 3  # rows that are compared
MEMBERS = 2  # members that are compared
HIDES = 0.01  # a weight whose entries are all smaller hides what it multiplies
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest number; half: 0.05
# Modules that are compared in evaluation mode: dropout is random, and norms of members share statistics.
EVAL_ONLY = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    *RUNNING_NORMS,
)

DEPENDENT = (
    "The output of an example depends on the other examples of its batch, on their number or on its place, "
    "or on an input that cannot be cut with it (an initial state, indices): every member trains on whole "
    "batches (batch_mode='repeat'), and predict(chunk=...) is refused."
)


@dataclass(frozen=True)
class CheckReport:
    """The result of ``lpbnn.check``; ``print`` it.

    Args:
        result: what the model does from now on.
        expand_at: modules in front of which the batch is expanded; [""] is the whole network.
        lines: what was compared, and what was found.
        warning: empty if nothing is slower than it could be.
    """

    result: CallCheck
    expand_at: list[str]
    lines: tuple[str, ...] = ()
    warning: str = ""

    @property
    def execution(self) -> Execution:
        """How members run: "batched", "loop" or "single" (see ``CallCheck``)."""
        return self.result.execution

    @property
    def ok(self) -> bool:
        """True if the fast path agrees with the reference."""
        return self.execution != "loop"

    def __str__(self) -> str:
        return "\n".join([*self.lines, *([self.warning] if self.warning else [])])


def check(model: nn.Module, x: Any) -> CheckReport:
    """Compare the fast path of a model with the reference on a batch, and use what is right from now on.

    A built model does this by itself at the first batch of every kind of call, unless ``build(...,
    check=False)``; a compiled model does not, so run one batch, or this function, before ``torch.compile``.
    The network runs a few more times, on about three examples (on all, if it refuses fewer), in evaluation
    and in training mode. Dropout is off, norms use their running statistics, buffers and random generators
    are left as they were.

    Args:
        model: what ``lpbnn.build`` returned; also inside ``torch.compile``, whose outputs are compared too.
        x: a batch of inputs, as ``predict`` takes it.

    Returns:
        A report that says in words what was compared, where the first difference was, and which execution
        the model uses.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "lpbnn", num_data=100)
        >>> print(lpbnn.check(model, torch.randn(5, 4)))
        2 members of 3 examples: rows of one batch equal members that run one by one, ...
    """
    from lpbnn.members.ensemble import MemberEnsemble

    inner = unwrap(model)
    call = Call(*as_call(x), inner.mask_arguments)
    if not isinstance(inner, MemberEnsemble):
        line = f"{type(inner).__name__} runs whole networks: there is no other path to compare."
        return CheckReport(CallCheck("single"), [""], (line,))
    with inner.lock.alone():
        inner.checks.clear()
        refuse_type_dependence(inner, call)
        report = verify(inner, call)
    if model is not inner and hasattr(model, "_orig_mod"):
        line = _compare_compiled(model, inner, call)
        report = replace(report, lines=(*report.lines, line))
    return report


def verify(model: "MemberEnsemble", call: Call) -> CheckReport:
    """Compare every choice of expansion points with the reference until one agrees, and use that.

    Raises:
        ValueError: members must run one by one, and the outputs are none that the likelihood takes: the
            batch axis may be missing. Nothing is remembered of such a call.
        ValueError: a recurrent layer or an attention takes the time axis first, and got the batch there.
    """
    shared, kind = call.find_shared(), call_kind(call.args, call.kwargs)
    before, agrees = model.expand_at, False
    with _unchanged(model), _no_small_weights(model.net), torch.no_grad():
        evaluation = _run_few_rows(
            call, lambda few, cut: _Reference(model, few, cut, training=False)
        )
        rows = evaluation.call.batch
        _refuse_time_first(evaluation)
        references = [evaluation]
        training = _Reference(model, evaluation.call, evaluation.cut, training=True)
        if not _equal(training.members[0], evaluation.members[0]):  # else the mode changes nothing
            references.append(training)
        for reference in references:
            reference.run_comparisons()
        if evaluation.cut and not all(reference.independent for reference in references):
            # Rows may agree by chance: in batches of one size, or because the examples are equal.
            count = _other_count(call, rows, rows + 1)
            more = call.take([i % call.batch for i in range(count)])
            with suppress(Exception):  # it refuses so many
                other = _Reference(
                    model, _change(more, [*range(1, count, 2)]), True, training=False
                )
                other.run_comparisons()
                references.append(other)
        # An input that stayed whole here may stay whole in a prediction, or in training on slices.
        independent = evaluation.cut and all(one.independent for one in references)
        # Members of a network that is random cannot be compared, so its examples must not meet.
        mixes = any(one.random and not one.independent for one in references)
        difference = "examples depend on each other where the network is random" if mixes else ""
        # The points are those of all kinds of calls: a second kind is compared with the points of the first.
        used = any(found.execution == "batched" for found in model.checks.values())
        choices = [model.expand_at] if used else model.expansion_choices
        try:
            for paths in [] if mixes else choices:
                model.use_expansion_points(paths)
                model.points.observed = observed = {}
                difference = _first_difference(model, references)
                agrees = not difference
                if agrees:
                    model.checks[kind] = CallCheck("batched", independent, shared | observed)
                    return _agreement(model, rows, model.checks[kind], references[-1].random)
        finally:
            model.points.observed = None
            if not agrees:
                model.use_expansion_points(before)
        outputs = zip(
            model.likelihood.heads.values(), _outputs(evaluation.members[0]), strict=False
        )
        for likelihood, output in outputs:
            likelihood.summary(output.unsqueeze(0))
    model.checks[kind] = CallCheck("loop", independent, shared)
    return _disagreement(model, rows, model.checks[kind], difference)


def rows_are_independent(model: UncertainModel, call: Call) -> bool:
    """Return True if a model's output for an example does not depend on its batch."""

    def run(own: Call, seed: int = 0) -> list[Tensor]:
        args, kwargs = copy_tensors((own.args, own.kwargs))  # it may change them in place
        with _seeded(model, seed):
            outputs = tree_leaves(run_members(*args, **kwargs))
        return [output.movedim(1, 0) for output in outputs]

    with _unchanged(model), _quiet(model, False), _no_small_weights(model.net), torch.no_grad():
        with _seeded(model):
            run_members = next(model.passes(1, model.members))  # what these draw stays
        few, cut, whole = _run_few_rows(call, lambda few, cut: (few, cut, run(few)))
        if not cut:
            return False  # an input that stayed whole here may stay whole in a prediction
        fixed = all(map(_close, whole, run(few, seed=1)))
        return _keeps_other_rows(run, whole, few, fixed)


def heads_equal_members(model: "MIMO", call: Call) -> bool:
    """Return True if every head of MIMO predicts what its subnetwork does alone."""
    with _unchanged(model), _quiet(model.net, False), _no_small_weights(model.net), torch.no_grad():

        def compare(own: Call, cut: bool) -> bool:
            def run(function: Callable[..., Any]) -> list[Tensor]:
                with _seeded(model):
                    return tree_leaves(function(*copy_tensors((own.args, own.kwargs))))

            together = run(lambda args, kwargs: model.outputs(*args, **kwargs))
            return all(
                _close(rows[j], one)
                for j in range(model.members)
                for rows, one in zip(together, run(partial(model.run_alone, j)), strict=True)
            )

        return _run_few_rows(call, compare)


def refuse_type_dependence(model: UncertainModel, call: Call) -> None:
    """Refuse a network that takes another way because a converted layer is of another type.

    ``isinstance(layer, nn.Linear)`` in its code is false for a converted one. Every run of the converted
    network takes the wrong way then, the reference too, so the network is compared with the layers that it
    was built with in their places.
    """
    layers: list[tuple[str, Wrapper, nn.Module]] = []
    for path, module in model.net.named_modules():
        inner = any(path.startswith(f"{outer}.") for outer, *_ in layers[-1:])
        if isinstance(module, Wrapper) and "layer" in module._modules and not inner:
            layers.append((path, module, module.unconverted()))

    def compare(own: Call, cut: bool) -> str:
        def run() -> list[Tensor]:
            with _same_buffers(model), _seeded(model):
                args, kwargs = copy_tensors((own.args, own.kwargs))
                return tree_leaves(model.run_network(*args, **kwargs))

        try:
            for _, wrapper, layer in layers:  # computes with the layer alone
                wrapper.__dict__["forward"] = layer
            expected = run()
            if all(map(_close, run_in_place(layers, run), expected)):
                return ""
            for one in layers:
                if not all(map(_close, run_in_place([one], run), expected)):
                    return one[0]
            return layers[0][0]
        finally:
            for _, wrapper, _ in layers:
                del wrapper.__dict__["forward"]

    def run_in_place(some: Sequence[tuple[str, Wrapper, nn.Module]], run: Any) -> list[Tensor]:
        """Return the outputs with some of the layers in the places of their wrappers."""
        with ExitStack() as stack:
            for _, wrapper, layer in some:
                stack.enter_context(_in_place_of(wrapper, layer, model.net))
            return run()

    with _unchanged(model), _quiet(model.net, False), _no_small_weights(model.net), torch.no_grad():
        path = _run_few_rows(call, compare) if layers else ""
    if path:
        raise ValueError(
            f"the network computes something else since {path!r} was converted: its code seems to ask for "
            f"the type of a layer, as in isinstance(layer, nn.Linear). Fix: leave it out with "
            f"exclude={path!r}, or let the code tell layers by their names or places."
        )


@contextmanager
def _in_place_of(wrapper: Wrapper, layer: nn.Module, net: nn.Module) -> Iterator[None]:
    """Put a layer into the place of its wrapper, with the hooks of both, inside the block."""
    own = [layer.__dict__[name] for name in PRE_HOOKS]
    replace_modules(net, {id(wrapper): layer})
    move_hooks(wrapper, layer)
    for name, hooks in zip(PRE_HOOKS, own, strict=True):
        layer.__dict__[name] = type(hooks)({**wrapper.__dict__[name], **hooks})
    try:
        yield
    finally:
        for name, hooks in zip(PRE_HOOKS, own, strict=True):
            layer.__dict__[name] = hooks
        move_hooks(layer, wrapper)
        replace_modules(net, {id(layer): wrapper})


def _keeps_other_rows(
    run: Callable[[Call], list[Tensor]], whole: list[Tensor], call: Call, move: bool
) -> bool:
    """Return True if an example's output does not depend on the others, their number or its place.

    Args:
        run: returns the outputs, examples first; ``whole`` are those of ``call``.
        whole: the outputs before the change.
        call: of the network.
        move: compare in other places of a larger batch too; not for outputs that are random.
    """
    rows = call.batch
    for changed in _examples_to_change(rows):
        outputs = run(_change(call, changed))
        stay = [i for i in range(rows) if i not in changed]
        for one, other in zip(whole, outputs, strict=True):
            if one.shape != other.shape or one.shape[:1] != (rows,):
                return False
            if stay and not _close(one[stay], other[stay]):
                return False
    if not move:
        return True
    places = _other_count(call, rows, MEMBERS * rows)
    order = [(-1 - i) % rows for i in range(places)]
    try:
        moved = run(call.take(order))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False  # it takes so many examples alone
    return all(_close(one[order], other) for one, other in zip(whole, moved, strict=True))


def compiled_loss_agrees(model: UncertainModel, compiled: Any, x: Any, y: Any) -> bool:
    """Return True if a compiled ``model.loss`` equals the plain one on a batch.

    The posterior's noise is switched off, buffers and random generators are left as they were. A loss that
    is random in itself (dropout, shuffled inputs), or too large for the memory without a compiler, cannot be
    compared, and counts as equal.
    """
    with _unchanged(model):
        scale = _noise_buffer(model)
        if scale is not None:
            scale.zero_()
        # With gradients: without them a loss may leave out a term, as DUQ leaves out its gradient penalty.
        try:
            expected, again = (model.loss(x, y)["loss"].detach() for _ in range(2))
        except torch.OutOfMemoryError:
            return True  # a compiled step keeps less for its backward pass
        if not torch.allclose(expected, again, rtol=1e-4, equal_nan=True):
            return True
        found = compiled(x, y)["loss"].detach()
    rounding = 0.05 if torch.is_autocast_enabled(found.device.type) else 1e-2
    return torch.allclose(found, expected, rtol=rounding, equal_nan=True)


def _noise_buffer(model: UncertainModel) -> Tensor | None:
    """Return the buffer that scales the posterior's noise; MC dropout has a number instead."""
    return dict(model.named_buffers(recurse=False)).get("noise_scale")


class _Reference:
    """Members that run one after another, in evaluation or training mode: at first one, then two."""

    def __init__(self, model: Any, call: Call, cut: bool, training: bool) -> None:
        self.model, self.call, self.cut, self.training = model, call, cut, training
        self.probe = model.probe(MEMBERS)
        self.members = [self.run(0, call)]
        self.independent, self.random = True, False  # until run_comparisons

    def run_comparisons(self) -> None:
        """Run the other member, and find out if the network is random, and if its rows are independent."""
        self.members.append(self.run(1, self.call))
        # Random in itself (functional dropout, stochastic depth): nothing to compare in this mode.
        self.random = not _equal(self.members[0], self.run(0, self.call))
        whole = self._seeded_outputs(self.call) if self.random else _outputs(self.members[0])
        move = self.cut and not self.random
        self.independent = _keeps_other_rows(self._seeded_outputs, whole, self.call, move)

    def run(self, member: int, call: Call) -> Record:
        """Return the record of one member."""
        run = partial(self.model.run_one_by_one, self.probe.take(member, 1))
        return _record(self.model, self.training, run, call)

    def _seeded_outputs(self, call: Call) -> list[Tensor]:
        """Return the outputs of the network for one member; what it draws is the same in every call."""
        with _seeded(self.model):
            return _outputs(self.run(0, call))


def _record(model: Any, training: bool, run: Callable[..., Any], call: Call) -> Record:
    """Return inputs and outputs of the converted layers, in the order of their calls, and the result.

    Args:
        model: the model whose members run.
        training: the mode of the network.
        run: runs members for a call; it is given copies of the inputs.
        call: of the network.
    """
    record: Record = []
    with ExitStack() as stack:
        # The same buffers for every run: a spectral norm goes on with its estimate in each.
        stack.enter_context(_same_buffers(model.net))
        stack.enter_context(_quiet(model.net, training))
        for path, module in model.net.named_modules():
            if isinstance(module, model.member_layer):

                def keep(_: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                    if vmap_is_running():
                        return  # its tensors end with it
                    # The input too: a layer that gives the same for all would hide that rows are mixed.
                    x = args[0] if args else kwargs["input"]
                    record.append((f"the input of {path!r}", x.detach().clone()))
                    record.append((f"the output of {path!r}", output.detach().clone()))

                stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        result = run(call.replace(*copy_tensors((call.args, call.kwargs))))
    return [*record, *((RESULT, leaf.detach().clone()) for leaf in tree_leaves(result))]


def _outputs(record: Record) -> list[Tensor]:
    """Return the outputs of the network."""
    return [value for name, value in record if name == RESULT]


def _examples_to_change(rows: int) -> list[list[int]]:
    """Return sets of examples to change: for every two examples, one that has the first and not the second.

    Of a few examples the last and the first are enough: rows that can be cut are treated alike.

    Example:
        >>> _examples_to_change(3), _examples_to_change(4)
        ([[2], [0]], [[1, 3], [0, 2], [2, 3], [0, 1]])
    """
    if rows <= MAX_ROWS:
        return [[rows - 1], [0]]
    bits = range((rows - 1).bit_length())
    return [[i for i in range(rows) if (i >> bit) % 2 == one] for bit in bits for one in (1, 0)]


def _change(call: Call, examples: list[int]) -> Call:
    """Return the call with other inputs for some examples, made from those of one that stays."""
    stays = next((i for i in range(call.batch) if i not in examples), 0)
    changed = call.take([stays if i in examples else i for i in range(call.batch)])
    for x in changed.examples:
        numbers = x.is_floating_point() or x.is_complex()
        if numbers and x.layout is torch.strided:  # others even if all were equal
            x[examples] = 0.5 * x[examples] + 0.1
    return changed


def _equal(found: Record, expected: Record) -> bool:
    """Return True if two runs of one member called the same layers, with equal values."""
    return len(found) == len(expected) and all(
        name == expected_name and _close(value, expected_value)
        for (name, value), (expected_name, expected_value) in zip(found, expected, strict=True)
    )


def _first_difference(model: Any, references: list[_Reference]) -> str:
    """Return where running members as rows first differs from the reference; empty if nowhere."""
    for expected in references:
        if expected.random:
            continue
        run = partial(model.run_rows, expected.probe)
        try:
            found = _record(model, expected.training, run, expected.call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            message = str(error).splitlines()[0].rstrip(".") if str(error) else ""
            return f"it raises {type(error).__name__}: {message}"
        if difference := _compare(found, expected.members):
            return difference + (" in training mode" if expected.training else "")
    return ""


def _compare(found: Record, expected: list[Record]) -> str:
    if any(len(found) != len(one) for one in expected):
        return "the network calls other layers for more rows"
    for i, (name, rows) in enumerate(found):
        for j, member in enumerate(expected):
            _, one = member[i]
            if rows.shape[:1] != (one.shape[0] * MEMBERS,):
                return (
                    f"{name} has shape {tuple(rows.shape)} for {MEMBERS} members, and "
                    f"{tuple(one.shape)} for one"
                )
            if not _close(gather(rows.contiguous(), MEMBERS)[j], one):
                return f"{name} differs for member {j}"
    return ""


def _agreement(model: Any, rows: int, result: CallCheck, random: bool) -> CheckReport:
    where = ", ".join(model.expand_at) or "the whole network"
    lines = [
        f"{MEMBERS} members of {rows} examples: rows of one batch equal members that run one by one, "
        f"in evaluation{'' if random else ' and training'} mode. The batch is expanded at {where}."
    ]
    if random:
        lines.append("The network is random in training mode, so that mode was not compared.")
    warning = ""
    if not result.independent_rows:
        lines.append(DEPENDENT)
        warning = DEPENDENT if getattr(model, "batch_mode", "repeat") == "split" else ""
    return CheckReport(result, model.expand_at, tuple(lines), warning)


def _disagreement(model: Any, rows: int, result: CallCheck, difference: str) -> CheckReport:
    line = f"{MEMBERS} members of {rows} examples as rows of one batch: {difference}."
    warning = (
        f"members cannot run as rows of one batch in this network: {difference}. A likely cause is an "
        "operation over the batch axis (a concatenation of two views, messages between nodes, a batch "
        "that is not the first dimension, an initial state). lpbnn runs the members one after another "
        "from now on, which is right and slower. Fix, if speed matters: treat rows independently, or "
        "leave layers out with exclude=..."
    )
    if not result.independent_rows:
        warning += f" {DEPENDENT}"
    return CheckReport(result, model.expand_at, (line,), warning)


def _run_few_rows(call: Call, run: Callable[[Call, bool], Any]) -> Any:
    """Return ``run(few, True)`` for a few examples of a call; ``run(call, False)`` if it cannot be cut.

    Of a single example several copies are taken: an expansion can look right for one row because it
    broadcasts. There are never as many as an input has rows: an input that cannot be cut is then noticed.
    """
    call = call.replace(*map_tensors(Tensor.detach, (call.args, call.kwargs)))
    if not _can_be_cut(call):
        return run(call, False)
    count = _free_count(call, (MAX_ROWS, *range(2, 99)))
    try:
        return run(call.take([i % call.batch for i in range(count)]), True)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        pass  # outside of this block, so that an error of the whole call is shown alone
    return run(call, False)


def _free_count(call: Call, counts: Iterable[int]) -> int:
    """Return the first of some numbers that is the first dimension of no input."""
    sizes = {x.shape[0] for x in call.tensors if x.dim() > 0}
    return next(count for count in counts if count not in sizes)


def _other_count(call: Call, rows: int, least: int) -> int:
    """Return another number of rows that has no divisor in common, so that no pattern fits both."""
    return _free_count(call, (n for n in range(least, 99) if math.gcd(n, rows) == 1 or rows == 1))


def _refuse_time_first(reference: _Reference) -> None:
    """Refuse a module with the time axis first whose input has the examples there."""
    time_first = [
        (path, module)
        for path, module in reference.model.net.named_modules()
        if getattr(module, "batch_first", True) is False
    ]
    if not time_first:
        return
    shapes: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    with ExitStack() as stack:
        for path, module in time_first:

            def record(layer: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                first = next(iter((*args, *kwargs.values())), None)
                if isinstance(first, Tensor) and first.dim() == 3:
                    shapes.append((path, layer, tuple(first.shape)))

            handle = module.register_forward_pre_hook(record, with_kwargs=True)
            stack.callback(handle.remove)
        reference.run(0, reference.call)
    rows = reference.call.batch
    for path, module, shape in shapes:
        if shape[0] == rows != shape[1]:
            raise ValueError(
                f"{path!r} is a {type(module).__name__} with batch_first=False, and its input of shape "
                f"{shape} has the {rows} examples first: it takes them for time steps. Fix: build it with "
                "batch_first=True, and give the network inputs (batch, time, features)."
            )


def _can_be_cut(call: Call) -> bool:
    """Return False for a call with integers beside the batch.

    Integers may be indices of examples, for example the edges of a graph; an index out of range breaks a
    GPU for the rest of the process.
    """
    others = [x for x in call.tensors if x.dim() > 0 and not is_batched(x, call.batch, call.masks)]
    return all(x.is_floating_point() or x.dtype == torch.bool for x in others)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = scale * TOLERANCE.get(a.dtype, 0.05) + 1e-12
    return torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)


@contextmanager
def _quiet(net: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flag everywhere but in dropout and norms, which are in evaluation mode."""
    before = [(module, module.training) for module in net.modules()]
    try:
        for module, _ in before:
            module.training = training and not isinstance(module, EVAL_ONLY)
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Leave buffers and random generators as they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), _same_buffers(model):
        yield


@contextmanager
def _no_small_weights(net: nn.Module) -> Iterator[None]:
    """Give tensors that are all near zero other values inside the block: they hide what meets behind them.

    A gate or a last layer often starts there, and the result of the check is used when it has learned.
    """
    generator, changed = torch.Generator().manual_seed(0), []
    try:
        for name, p in (*net.named_parameters(), *net.named_buffers()):
            if "bias" in name or "running_" in name or not p.is_floating_point():
                continue  # these are added to something, or are of norms
            if p.is_meta or not p.numel() or p.layout is not torch.strided:
                continue
            if not p.detach().abs().amax() < HIDES:  # NaN too
                continue
            changed.append((p, p.data))
            with torch.inference_mode(False):
                values = 0.1 + 0.1 * torch.rand(p.shape, generator=generator)
                if p.dim() > 1:  # as large as weights usually are, so that nothing overflows
                    fan_in = p.numel() / len(p)
                    values = torch.randn(p.shape, generator=generator) / fan_in**0.5
                p.data = values.to(p.device, p.dtype)  # new memory: a graph may need the zeros
        yield
    finally:
        for p, data in changed:
            p.data = data


@contextmanager
def _seeded(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Seed all draws inside the block, and leave torch's generators as they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    # Draws of the method are private, so that other threads do not take part in them.
    with torch.random.fork_rng(devices=devices), PrivateDraws(seed):
        # Not torch.manual_seed: it would reseed GPUs that this model does not use.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Leave buffers as they were."""
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer  # a forward may have put another one there
                if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                    buffer.copy_(value)


def _compare_compiled(model: Any, inner: Any, call: Call) -> str:
    """Compare a compiled model with the reference; the posterior's noise is switched off for it."""
    scale = _noise_buffer(inner)
    if inner.stochastic and scale is None:
        return f"{type(inner).__name__} draws masks in every pass: the compiled model was not compared."
    with _unchanged(inner), _quiet(inner.net, False), torch.no_grad():
        was_training = inner.training
        inner.training = False
        try:
            if scale is not None:
                scale.zero_()
            compiled = model(*call.args, **call.kwargs)
            expected = inner.run_one_by_one(inner.sample(), call)
        finally:
            inner.training = was_training
    pairs = zip(tree_leaves(compiled), tree_leaves(expected), strict=True)
    if all(_close(a.flatten(0, 1), b) for a, b in pairs):
        return "The compiled model equals the reference."
    raise RuntimeError(
        "the compiled model does not equal members that run one by one. Fix: use the model without "
        "torch.compile, or another backend, and report the network."
    )
