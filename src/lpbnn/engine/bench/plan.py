"""What is to be measured, in which order, and for how long."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from lpbnn import methods as known_methods
from lpbnn.engine.bench import peers
from lpbnn.engine.bench.record import Case, Mode
from lpbnn.engine.bench.workload import REFERENCE, Workload, has_members, workload
from lpbnn.engine.config import Precision

METHODS = ("lpbnn", "batchensemble", "rank1", "meanfield", "ensemble")
BACKBONES = ("wrn-28-10", "wrn-16-4", "resnet18", "deeplab")
COMPILING = 60.0  # seconds that a first compiled network is taken to need


@dataclass(frozen=True)
class Plan:
    """The configurations: every backbone in every mode by every method with every number of members.

    The plain network (mcp) is the reference of each backbone and mode, and comes by itself.
    """

    backbones: tuple[str, ...] = BACKBONES
    """Networks of ``lpbnn ls``."""
    methods: tuple[str, ...] = METHODS
    """Methods of ``lpbnn ls``; torch_uncertainty's layers come by themselves where they are installed."""
    members: tuple[int, ...] = (4, 1, 2, 8, 16)
    """J, in the order in which they are measured."""
    modes: tuple[Mode, ...] = ()
    """eager; graph: the step replayed as a CUDA graph; compiled: and compiled by torch. Left out: all that
    the device has."""
    only: tuple[str, ...] = ()
    """Globs of which one must match BACKBONE/MODE/METHOD/J, such as '*/compiled/lpbnn/4'."""
    predict: bool = True
    """Measure prediction too."""
    repeats: int = 10
    seconds: float | None = None
    """Stop in time: a configuration that would end later than this is left out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | None = None
    """Left out: bf16 on a GPU, 32 on a CPU."""
    memory_budget: float = 1.0
    """compiled: share of the activations that a training step may keep for the backward pass. The plain
    network of the same mode gets it too."""
    size: Literal["auto", "full", "small"] = "auto"
    """small: networks and pictures that a CPU can do. auto: small on a CPU."""
    batch: int | None = None
    """Examples of a training step; left out: 128, of street scenes 4."""
    test_batch: int | None = None
    """Examples of a prediction; left out: 128, of street scenes 1."""
    image: tuple[int, ...] = ()
    """Height and width of the pictures."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the methods, where they take them."""
    seed: int = 0
    threads: int = 1
    """On a CPU."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; expected at least 1.")
        if self.repeats < 2:
            raise ValueError(f"repeats is {self.repeats}; expected at least 2.")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; expected a number above 0.")
        budget = self.memory_budget
        if not 0 <= budget <= 1:
            raise ValueError(f"memory_budget is {budget}; expected a share from 0 to 1.")
        if budget != 1 and self.modes and "compiled" not in self.modes:
            raise ValueError(
                f"memory_budget is {budget}, but modes is {self.modes}; expected compiled among them. Fix: "
                "add --modes compiled."
            )
        if len(self.image) not in (0, 2) or any(side < 1 for side in self.image):
            raise ValueError(f"image is {self.image}; expected height and width, such as 32 32.")
        if not self.members or min(self.members) < 1:
            raise ValueError(f"members is {self.members}; expected numbers of at least 1.")
        for name in self.backbones:
            workload(name)
        for name in self.methods:
            if name not in peers.NAMES:
                known_methods.load(name)

    def torch_device(self) -> torch.device:
        there = torch.cuda.is_available()
        if self.device == "cuda" and not there:
            raise ValueError("device is 'cuda', but torch finds no CUDA device. Fix: device='cpu'.")
        return torch.device("cuda:0" if there and self.device != "cpu" else "cpu")

    def settled(self) -> "Plan":
        """With everything that was left to the device filled in."""
        cuda = self.torch_device().type == "cuda"
        modes: tuple[Mode, ...] = ("eager", "graph", "compiled") if cuda else ("eager", "compiled")
        if "graph" in self.modes and not cuda:
            raise ValueError(
                "mode 'graph' is a CUDA graph: it needs a GPU. Fix: eager or compiled."
            )
        return replace(
            self,
            device="cuda" if cuda else "cpu",
            modes=self.modes or modes,
            precision=self.precision or ("bf16" if cuda else "32"),
            size=self.size if self.size != "auto" else ("full" if cuda else "small"),
        )

    def workload(self, backbone: str) -> Workload:
        """What a backbone is measured on."""
        base = workload(backbone, small=self.size == "small")
        image = (self.image[0], self.image[1]) if self.image else base.image
        return replace(
            base,
            batch=self.batch or base.batch,
            test_batch=self.test_batch or base.test_batch,
            image=image,
        )

    def groups(self) -> Iterator[list[Case]]:
        """Cases that share a reference, which is the first of each group."""
        for backbone in self.backbones:
            for mode in self.modes:
                rest = [case for case in self._cases(backbone, mode) if self._wanted(case)]
                reference = Case(backbone, mode, REFERENCE, 1)
                if rest or (REFERENCE in self.methods and self._wanted(reference)):
                    yield [reference, *rest]

    def _cases(self, backbone: str, mode: Mode) -> Iterator[Case]:
        added = peers.available() if self.workload(backbone).include is None else []
        chosen = [m for m in dict.fromkeys((*self.methods, *added)) if m != REFERENCE]
        for index, members in enumerate(self.members):
            for method in chosen:
                if has_members(method):
                    yield Case(backbone, mode, method, members)
                elif index == 0:
                    yield Case(backbone, mode, method, 1)

    def _wanted(self, case: Case) -> bool:
        return not self.only or any(fnmatchcase(case.name, pattern) for pattern in self.only)


class Budget:
    """Seconds that may be spent; what a case takes is judged by those of its mode before it.

    A reference is judged by references, for the first of a process also warms the compiler up.
    """

    def __init__(self, total: float | None, clock: Any = time.monotonic) -> None:
        self.total, self.clock, self.start = total, clock, clock()
        self.longest: dict[tuple[str, bool], float] = {}

    def allows(self, case: Case) -> bool:
        if self.total is None:
            return True
        reference = case.method == REFERENCE
        unknown = COMPILING if case.mode == "compiled" and self.longest else 0.0
        other = self.longest.get((case.mode, not reference), unknown)
        expected = self.longest.get((case.mode, reference), other)
        return self.clock() - self.start + expected < self.total

    def spent(self, case: Case, seconds: float) -> None:
        kind = case.mode, case.method == REFERENCE
        self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))
