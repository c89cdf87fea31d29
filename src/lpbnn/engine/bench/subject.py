"""One method on one network, ready to be timed: the engine's own training step, and a prediction."""

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lpbnn.engine.bench.clock import seconds, wait
from lpbnn.engine.bench.memory import CudaPeak, PeakMemory, peak_memory_of, state_bytes
from lpbnn.engine.bench.record import Case, Size
from lpbnn.engine.bench.workload import Workload
from lpbnn.engine.config import OptimConfig, Precision, RunConfig
from lpbnn.engine.step import WARM_UP, Step
from lpbnn.model import UncertainModel
from lpbnn.predict import predict

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def run_config(
    case: Case, device: torch.device, precision: Precision, memory_budget: float = 1.0
) -> RunConfig:
    """What a run of the engine in this mode would be told; only a compiled step has a memory budget."""
    cuda, compiled = device.type == "cuda", case.mode == "compiled"
    return RunConfig(
        method="mcp",  # the model is made elsewhere
        optim=OptimConfig(lr=1e-3),  # random labels: nothing is to be learnt, nor to diverge
        precision=precision,
        compile=compiled,
        memory_budget=memory_budget if compiled else 1.0,
        graph=case.mode != "eager",
        channels_last=cuda,
        device="cuda" if cuda else "cpu",
        progress=False,
    )


class Subject:
    """A model in training on one batch; ``predictor`` is a copy of it for prediction alone."""

    def __init__(
        self,
        case: Case,
        workload: Workload,
        fabric: "Fabric",
        precision: Precision,
        options: dict[str, Any] | None = None,
        memory_budget: float = 1.0,
    ) -> None:
        self.case, self.workload, self.fabric = case, workload, fabric
        config = run_config(case, fabric.device, precision, memory_budget)
        self.layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model = workload.model(case.method, case.members, options)
        fabric.to_device(self.model)
        self.model.to(memory_format=self.layout)  # type: ignore[call-overload]
        x, self.y = workload.examples(workload.batch, fabric.device)
        self.x = x.contiguous(memory_format=self.layout)
        self.step = Step(self.model, config, fabric, workload.batch)
        self.model.train()
        self.model.before_epoch(0, 2)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def train(self) -> None:
        """One training step."""
        recording = self.step.recording
        with nullcontext() if recording is None else recording.on_its_stream():
            self.step(self.x, self.y, 1.0)

    def settle(self, meter: CudaPeak | PeakMemory | None = None) -> float:
        """Train until steps are as they will be: compiled, kernels chosen, recorded as a graph.

        Gives the seconds of the first step. A ``meter`` sees the last steps only: the trials with which
        kernels are chosen take memory of their own.
        """
        first = seconds(self.train, self.fabric.device)
        for number in range(1, WARM_UP + 2):
            if meter is not None and number == WARM_UP - 1:
                wait(self.fabric.device)
                meter.reset()
            self.train()
        wait(self.fabric.device)  # a recorded step has a stream of its own
        return first


class Predictor:
    """A trained model's copy that answers for one batch; compiled where the mode says so."""

    def __init__(self, subject: Subject) -> None:
        self.fabric, workload = subject.fabric, subject.workload
        self.model: UncertainModel = copy.deepcopy(subject.model)
        self.model.eval()
        with self.fabric.autocast():
            self.model.after_fit([(subject.x, subject.y)])  # tradi draws its networks here
        if subject.case.mode == "compiled":
            for net in self.model.networks:
                net.compile(dynamic=False)
        x, _ = workload.examples(workload.test_batch, self.fabric.device)
        self.x = x.contiguous(memory_format=subject.layout)

    def __call__(self) -> None:
        """All members of the batch, once each."""
        with self.fabric.autocast():
            predict(self.model, self.x, keep_members=False)

    def peak(self) -> int:
        """Bytes: the weights and buffers, and what a prediction takes beside them."""
        with peak_memory_of(self.fabric.device) as meter:
            self()
        return meter.peak + state_bytes(self.model)


def size_of(
    subject: Subject, predictor: Predictor | None, train_bytes: int | None, first: float
) -> Size:
    """The size of a subject that has settled; its prediction is called for the first time here."""
    device, compiled = subject.fabric.device, subject.case.mode == "compiled"
    if predictor is None:
        return Size(subject.parameters, train_bytes, None, first)
    first_prediction = seconds(predictor, device)
    predictor()
    counted = device.type == "cuda" or not compiled
    peak = predictor.peak() if counted else None
    return Size(subject.parameters, train_bytes, peak, first, first_prediction)
