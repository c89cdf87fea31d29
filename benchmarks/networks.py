"""Whole networks by method: every case is timed in turn with the plain network of its mode."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from benchmarks import peers, records
from lpbnn import backbones
from lpbnn import methods as known_methods
from lpbnn.model import UncertainModel
from lpbnn.training.bench import (
    Bench,
    Row,
    build_model,
    first_line,
    has_members,
)
from lpbnn.training.bench_options import PLAIN, Conditions, Mode, Setup

METHODS = ("lpbnn", "batchensemble", "rank1", "meanfield", "ensemble")
BACKBONES = ("wrn-28-10", "wrn-16-4", "resnet18", "deeplab")
COMPILE_SECONDS = 60.0  # what the first compiled case is expected to take

_STREET = Setup(
    "deeplab", (3, 720, 1280), 13, batch=4, test_batch=1, options=("include=decoder.*",)
)
_SMALL_DECODER = ("backbone.width=16", "backbone.channels=64")
SMALL = {  # in place of networks that take minutes per step on a CPU
    "wrn-28-10": Setup("wrn-28-1", batch=32),
    "wrn-16-4": Setup("wrn-16-2", batch=32),
    "resnet18": Setup("resnet18", (3, 16, 16), batch=32),
    "deeplab": replace(
        _STREET,
        backbone="deeplab-resnet18",
        input=(3, 96, 160),
        options=(*_STREET.options, *_SMALL_DECODER),
    ),
}


def setup_of(backbone: str, small: bool = False) -> Setup:
    """Return what a network is measured on, in full or small for a CPU.

    >>> setup_of("deeplab").input, setup_of("deeplab", small=True).input
    ((3, 720, 1280), (3, 96, 160))
    >>> setup_of("wrn-28-10", small=True).backbone
    'wrn-28-1'
    """
    if small and backbone in SMALL:
        return SMALL[backbone]
    if not backbones.load(backbone).dense:
        return Setup(backbone, batch=32 if small else 128)
    return replace(_STREET, backbone=backbone, input=(3, 96, 160) if small else _STREET.input)


@dataclass(frozen=True)
class Case:
    """One method in one mode; ``name`` is what ``--only`` is matched with."""

    backbone: str
    mode: Mode
    method: str
    members: int

    @property
    def name(self) -> str:
        return f"{self.backbone}/{self.mode}/{self.method}/{self.members}"


@dataclass(frozen=True)
class Plan(Conditions):
    """Every backbone in every mode by every method with every number of members."""

    backbones: tuple[str, ...] = BACKBONES
    """Networks of ``lpbnn ls``."""
    methods: tuple[str, ...] = METHODS
    """Methods of ``lpbnn ls``; torch_uncertainty's layers are added where it is installed."""
    members: tuple[int, ...] = (4, 1, 2, 8, 16)
    """J, in the order in which they are measured."""
    modes: tuple[Mode, ...] = ()
    """eager; graph: the step replayed as a CUDA graph; compiled. Left out: all that the device has."""
    only: tuple[str, ...] = ()
    """Globs of which one must match BACKBONE/MODE/METHOD/J, such as '*/compiled/lpbnn/4'."""
    seconds: float | None = None
    """Leave out the cases that would end later than this."""
    size: Literal["auto", "full", "small"] = "auto"
    """small: networks and pictures for a CPU. auto: small on a CPU."""
    batch: int | None = None
    test_batch: int | None = None
    image: tuple[int, ...] = ()
    """Height and width of the pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; expected a number above 0.")
        if len(self.image) not in (0, 2):
            raise ValueError(f"image is {self.image}; expected height and width, such as 32 32.")
        if not self.members or min(self.members) < 1:
            raise ValueError(f"members is {self.members}; expected numbers of at least 1.")
        if not 0 <= self.memory_budget <= 1:
            raise ValueError(
                f"memory_budget is {self.memory_budget}; expected a share from 0 to 1."
            )
        if self.memory_budget != 1 and "compiled" not in self.all_modes():
            raise ValueError(
                f"memory_budget is {self.memory_budget}, but modes is {self.modes}; expected compiled "
                "among them. Fix: add --modes compiled."
            )
        for name in (*self.methods, PLAIN):
            if name not in peers.NAMES:
                known_methods.load(name)
        for name in self.backbones:
            for mode in self.all_modes():
                self.setup(name, mode)

    def all_modes(self) -> tuple[Mode, ...]:
        return self.modes or (
            ("eager", "graph", "compiled") if self.cuda else ("eager", "compiled")
        )

    def setup(self, backbone: str, mode: Mode) -> Setup:
        """Return the setup of the cases that share a plain network."""
        given = {field.name: getattr(self, field.name) for field in fields(Conditions)}
        base = setup_of(backbone, self.size == "small" or (self.size == "auto" and not self.cuda))
        given["options"] = (*base.options, *self.options)
        given["predict"] = self.predict and mode != "graph"  # it is not replayed: as in eager
        given["memory_budget"] = self.memory_budget if mode == "compiled" else 1.0
        return replace(
            base,
            input=(3, *self.image) if self.image else base.input,
            batch=self.batch or base.batch,
            test_batch=self.test_batch or base.test_batch,
            mode=mode,
            **given,
        )

    def groups(self) -> Iterator[list[Case]]:
        """Yield the cases that share a plain network, which is the first of them."""
        for backbone in self.backbones:
            for mode in self.all_modes():
                plain = Case(backbone, mode, PLAIN, 1)
                cases = [case for case in self._cases(backbone, mode) if self._wanted(case)]
                if cases or (PLAIN in self.methods and self._wanted(plain)):
                    yield [plain, *cases]

    def _cases(self, backbone: str, mode: Mode) -> Iterator[Case]:
        added = [] if backbones.load(backbone).dense else peers.available()
        names = [m for m in dict.fromkeys((*self.methods, *added)) if m != PLAIN]
        for index, members in enumerate(self.members):
            for method in names:
                if method in peers.NAMES or has_members(method):
                    yield Case(backbone, mode, method, members)
                elif index == 0:
                    yield Case(backbone, mode, method, 1)

    def _wanted(self, case: Case) -> bool:
        return not self.only or any(fnmatchcase(case.name, pattern) for pattern in self.only)


# The paper's runtime table: ResNet-50 encoder, decoder converted, four members.
DEEPLAB = Plan(
    ("deeplab",), ("lpbnn", "batchensemble", "tradi", "ensemble"), (4,), ("eager", "compiled")
)


def build(setup: Setup, method: str, members: int) -> UncertainModel:
    """Build a model by a method of lpbnn or of a peer."""
    if method not in peers.NAMES:
        return build_model(setup, method, members)
    return peers.build(method, build_model(setup, PLAIN, 1), members)


class Budget:
    """Seconds that may be spent; a case is expected to take as long as the longest of its mode."""

    def __init__(self, total: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.clock, self.start = total, clock, clock()
        self.longest: dict[str, float] = {}

    def allows(self, case: Case) -> bool:
        unknown = COMPILE_SECONDS if case.mode == "compiled" and self.longest else 0.0
        expected = self.longest.get(case.mode, unknown)
        return self.total is None or self.clock() - self.start + expected < self.total

    def spent(self, case: Case, seconds: float) -> None:
        self.longest[case.mode] = max(seconds, self.longest.get(case.mode, 0.0))


def measure(
    plan: Plan, report: Callable[[records.Record, Row | None], Any] | None = None
) -> records.Record:
    """Measure all cases of a plan; ``report(record, row)`` is called after every case.

    A case that fails has its reason in ``failed``, one without time left is in ``skipped``.
    """
    device = torch.device("cuda:0" if plan.cuda else "cpu")
    record = records.new(device, plan) | {"skipped": [], "failed": {}}
    budget = Budget(plan.seconds)
    for group in plan.groups():
        with Bench(plan.setup(group[0].backbone, group[0].mode), build) as bench:
            for case in group:
                row = None
                if not budget.allows(case):
                    record["skipped"].append(case.name)
                else:
                    start = time.monotonic()
                    try:
                        row = bench.measure(case.method, case.members)
                        row["case"]["backbone"] = case.backbone  # small ones stand for it
                        record["rows"].append(row)
                    except Exception as error:  # out of memory, or a compiler's: the others go on
                        record["failed"][case.name] = first_line(error)
                    budget.spent(case, time.monotonic() - start)
                if report is not None:
                    report(record, row)
    return record
