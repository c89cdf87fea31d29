"""Whole networks by method: training step, prediction, peak memory, parameters and compile time.

Each configuration is timed in turn with the plain network of the same mode, which is kept at hand; its
memory is measured apart from everything else that is held. A configuration that fails has its reason in the
record, and the others go on.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lpbnn.engine.bench.clock import Compared, Work, interleaved, threads_of
from lpbnn.engine.bench.memory import PeakMemory, peak_memory_of
from lpbnn.engine.bench.plan import Budget, Plan
from lpbnn.engine.bench.record import Case, Record, Row, Size
from lpbnn.engine.bench.subject import Predictor, Subject, size_of
from lpbnn.engine.bench.workload import REFERENCE
from lpbnn.engine.codec import to_data
from lpbnn.engine.config import Precision, RunConfig
from lpbnn.engine.launch import launch
from lpbnn.engine.step import fast_convolutions

Tell = Callable[[Record, Case], None]


@dataclass(frozen=True)
class Measured:
    """A subject that has settled, with its predictor where prediction is measured."""

    subject: Subject
    predictor: Predictor | None
    size: Size


def measure(plan: Plan, tell: Tell | None = None) -> Record:
    """Everything in the plan; ``tell(record, case)`` is called after every case, to write and to show."""
    plan = plan.settled()
    device = plan.torch_device()
    record = Record.new(device, to_data(plan))
    budget = Budget(plan.seconds)
    generators = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with generators, fast_convolutions(device), threads_of(plan.threads):
        for group in plan.groups():
            with _compiler(group[0].mode):
                record = _measure_group(plan, group, record, budget, tell)
            _free(device)
    return record


def _measure_group(
    plan: Plan, group: list[Case], record: Record, budget: Budget, tell: Tell | None
) -> Record:
    bench = _Bench(plan, group[0])
    reference: Measured | None = None
    for case in group:
        if not budget.allows(case):
            record = record.with_skipped(case.name)
        elif reference is None and case.method != REFERENCE:
            record = record.with_failure(case.name, "its reference, the plain network, has no row")
        else:
            start = time.monotonic()
            try:
                if reference is None:
                    reference = bench.prepare(case)
                    row = bench.alone(case, reference)
                else:
                    row = bench.beside(case, reference)
                record = record.with_row(row)
            except Exception as error:  # out of memory, a compiler's: told, and the others go on
                record = record.with_failure(case.name, _short(error))
            budget.spent(case, time.monotonic() - start)
            _free(bench.device)
        if tell is not None:
            tell(record, case)
    return record


class _Bench:
    """How the cases of one backbone and mode are measured."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self.plan, self.device = plan, plan.torch_device()
        self.workload = plan.workload(case.backbone)
        self.precision: Precision = plan.precision or "32"
        cuda = self.device.type == "cuda"
        self.fabric = launch(RunConfig(device="cuda" if cuda else "cpu", precision=self.precision))
        # Without compiling or recording, a step of the library's prediction is the eager one.
        self.predicts = plan.predict and case.mode != "graph"

    def prepare(self, case: Case) -> Measured:
        """Build and settle one model, its memory measured on the way."""
        if self.device.type == "cuda":
            with peak_memory_of(self.device) as meter:
                subject = self._subject(case)
                first = subject.settle(meter)
            train_bytes = meter.peak
        else:
            train_bytes = self._counted(case) if case.mode == "eager" else None
            subject = self._subject(case)
            first = subject.settle()
        predictor = Predictor(subject) if self.predicts else None
        return Measured(subject, predictor, size_of(subject, predictor, train_bytes, first))

    def _counted(self, case: Case) -> int:
        """On the CPU: a step of another such model, every tensor of it counted."""
        with PeakMemory() as meter:
            self._subject(case).settle(meter)
        return meter.peak

    def _subject(self, case: Case) -> Subject:
        plan = self.plan
        torch.manual_seed(plan.seed)
        return Subject(
            case, self.workload, self.fabric, self.precision, plan.options, plan.memory_budget
        )

    def alone(self, case: Case, made: Measured) -> Row:
        """The row of the reference: it is its own."""
        times = {name: self._compare(work, None) for name, work in _works(made).items()}
        return Row(case, made.size, made.size, **times)

    def beside(self, case: Case, reference: Measured) -> Row:
        """The row of a case, in turn with the reference."""
        made = self.prepare(case)
        plain = _works(reference)
        times = {name: self._compare(work, plain[name]) for name, work in _works(made).items()}
        return Row(case, made.size, reference.size, **times)

    def _compare(self, own: Work, plain: Work | None) -> Compared:
        works = {"own": own} if plain is None else {"plain": plain, "own": own}
        timings = interleaved(works, self.plan.repeats, warmup=2, device=self.device)
        return Compared(timings["own"], timings.get("plain", timings["own"]))


def _works(made: Measured) -> dict[str, Work]:
    works: dict[str, Work] = {"train": made.subject.train}
    return works if made.predictor is None else {**works, "predict": made.predictor}


@contextmanager
def _compiler(mode: str) -> Iterator[None]:
    """Every model compiled as if it were the only one of its process.

    Torch's compiler remembers a function by its code, which the models share: it would take the sizes of
    the second model for sizes that change from call to call, and give up after eight.
    """
    if mode != "compiled":
        yield
        return
    from torch._dynamo import config

    torch.compiler.reset()
    limits: dict[str, Any] = {"automatic_dynamic_shapes": False}
    limits |= {
        name: 256 for name in ("recompile_limit", "cache_size_limit") if hasattr(config, name)
    }
    with config.patch(limits):
        yield
    torch.compiler.reset()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _short(error: Exception) -> str:
    """The first line of an error; compilers write pages."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
