"""One training step, all of it on the device; on one GPU it is replayed as a CUDA graph.

A step is loss, gradients, clipping, the optimizer, the model's ``after_step`` and the sums for the log.
A small network's step is hundreds of kernels of a few microseconds, which the host cannot start as fast
as they end. So the step is recorded once and then started as a whole: the host only hands over the next
batch and the learning rate, which live in tensors.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpbnn.check import compiled_loss_agrees
from lpbnn.kernels.recompute import compiled
from lpbnn.kernels.row_norm import RowNorm, use_row_norms
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.model import LossStep, Terms, UncertainModel, as_call
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.training.config import RunConfig
from lpbnn.training.optim import make_optimizer, recordable, set_rate

if TYPE_CHECKING:
    from lightning.fabric import Fabric

WARM_UP = 3  # ordinary steps before the recording: kernels are chosen, the optimizer gets its state
TRIES = 3  # a GPU that others use at the same time may refuse a recording once


class TrainStep(LossStep):
    """The model's loss as a forward pass, compiled for batches of one size if ``compiled_for`` is given.

    In a compiled step the batch norms behind the points where the batch is expanded become ``RowNorm``,
    whose sums a compiler fuses with those of the member factors; ``restore_batch_norms`` undoes that.

    Fabric's ``mark_forward_method("loss")`` would do for DDP, but on a single device it bypasses autocast.
    """

    def __init__(
        self, model: UncertainModel, compiled_for: int | None = None, memory_budget: float = 1.0
    ) -> None:
        super().__init__(model)
        self.size, self.memory_budget = compiled_for, memory_budget
        self.compiled: Callable[..., Terms] | None = None

    def forward(self, x: Any, y: Tensor, weight: Tensor | None = None) -> Terms:
        # A second batch size would make the compiler give up the fast kernels of the first one: the
        # smaller batch at the end of an epoch runs uncompiled.
        if self.size is None or len(y) != self.size:
            return super().forward(x, y, weight)
        if self.compiled is None:
            self.compiled = self._compile(x, y)
        return self.compiled(x, y, weight)

    def _compile(self, x: Any, y: Tensor) -> Callable[..., Terms]:
        """Return the compiled loss, or the plain one if the two differ on this batch."""
        model = self.model
        if isinstance(model, MemberEnsemble):  # a comparison cannot be part of a compiled graph
            model.ensure_checked(model.members, *as_call(x))
        if isinstance(model, RankOneEnsemble):
            for path in model.expand_at:
                use_row_norms(model.net.get_submodule(path))
        labels = model.task == "classification"  # one softmax for each example, not each pixel
        by_rows = labels and any(isinstance(module, RowNorm) for module in model.modules())
        step = compiled(model.loss, self.memory_budget, by_rows)
        if model.check_first_batch and not compiled_loss_agrees(model, step, x, y):
            warnings.warn(
                "the compiled loss does not equal the plain one on the first batch. lpbnn trains without a "
                "compiler from now on, which is right and slower.",
                UserWarning,
                stacklevel=2,
            )
            return model.loss
        return step


class Step:
    """The step of a run: ``step(x, y, scale)`` trains on a batch at ``scale`` times the full rate.

    Args:
        size: examples of a full batch in this process; only full ones are compiled and recorded.
    """

    def __init__(
        self, model: UncertainModel, config: RunConfig, fabric: "Fabric", size: int
    ) -> None:
        self.model, self.config, self.fabric, self.size = model, config, fabric, size
        recorded = records(config, fabric)
        optimizer = make_optimizer(model, config, fabric.device, capturable=recorded)
        compiled_for = size if config.compile else None
        part = TrainStep(model, compiled_for, config.memory_budget)
        self.module, self.optimizer = fabric.setup(part, optimizer)
        self.recording = Recording(self._work, fabric.device) if recorded else None
        self.rate: float | Tensor = config.optim.lr
        self.names: list[str] = []
        self.sums = torch.zeros((), device=fabric.device)
        self.ready()

    def ready(self) -> None:
        """To be called when the optimizer's state was replaced."""
        if self.recording is not None:
            self.recording.forget()
            recordable(self.optimizer, self.fabric.device)
            self.rate = torch.tensor(self.config.optim.lr, device=self.fabric.device)

    def begin(self) -> AbstractContextManager[Any]:
        """Set the sums to zero and return the context of an epoch.

        A recorded step is kept over epochs: ``before_epoch`` changes buffers only, which it reads anew.
        """
        self.sums = self.sums.zero_() if self.names else self.sums
        return nullcontext() if self.recording is None else self.recording.on_its_stream()

    def __call__(self, x: Any, y: Tensor, scale: float) -> None:
        set_rate(self.optimizer, scale)
        rate = self.config.optim.lr * scale
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            self.rate = rate
        if self.recording is not None and len(y) == self.size:
            self.recording(x, y)
        else:
            self._work(x, y)

    def _work(self, x: Any, y: Tensor) -> None:
        self.optimizer.zero_grad()
        terms = self.module(x, y)
        self.fabric.backward(terms["loss"])
        if self.config.optim.clip is not None:
            self.fabric.clip_gradients(
                self.module,
                self.optimizer,
                max_norm=self.config.optim.clip,
                error_if_nonfinite=False,  # asking would wait for the device
            )
        self.optimizer.step()
        self.model.after_step(self.rate)
        if not self.names:
            self.names = [*terms, "examples"]
            self.sums = torch.zeros(len(self.names), device=self.fabric.device)
        values = [term.detach().float() for term in terms.values()]
        self.sums.add_(torch.stack([*values, torch.ones_like(values[0])]), alpha=len(y))


def records(config: RunConfig, fabric: "Fabric") -> bool:
    """Whether the step is recorded: on one GPU alone, without fp16's scaling of the loss."""
    alone = fabric.world_size == 1 and config.strategy == "auto"
    one_gpu = fabric.device.type == "cuda" and alone
    return config.graph and one_gpu and config.precision != "fp16"


class Recording:
    """``work(x, y)``, replayed as a CUDA graph after a few ordinary calls; other shapes work as ever."""

    def __init__(self, work: Callable[[Any, Tensor], None], device: torch.device) -> None:
        self.work, self.device = work, device
        self.stream = torch.cuda.Stream(device)
        self.warm_up, self.tries = WARM_UP, TRIES
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.y = torch.empty(0)

    def forget(self) -> None:
        """Record anew, after an ordinary step: what the last recording did not do is chosen there."""
        self.graph = None
        self.warm_up = max(self.warm_up, 1)

    def on_its_stream(self) -> AbstractContextManager[Any]:
        """Gradients remember the stream they were first made on: all steps run on this one."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.warm_up:
            self.warm_up -= 1
            self.work(x, y)
            return
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            self.graph = self._record()
        if self.graph is None or x.shape != self.x.shape or y.shape != self.y.shape:
            self.work(x, y)
            return
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """The step as a graph; None if it failed and may be tried again with the next batch."""
        graph = torch.cuda.CUDAGraph()
        self.tries -= 1
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.work(self.x, self.y)
        except RuntimeError as error:
            if self.tries:
                return None
            error.add_note(
                "The training step could not be recorded as a CUDA graph: it waits for the device or "
                "depends on values in Python. Fix: graph=False (--no-graph)."
            )
            raise
        self.tries = TRIES
        return graph


class Means:
    """The means of a step's sums on the host, a little late: nobody waits but at the end of an epoch."""

    def __init__(self, step: Step) -> None:
        self.step, self.fabric = step, step.fabric
        self.host = torch.empty(0)
        self.copied: torch.cuda.Event | None = None

    def peek(self) -> dict[str, float] | None:
        """What has arrived since the last call, if anything has; several processes must agree, and wait."""
        if self.fabric.device.type != "cuda" or self.fabric.world_size > 1:
            return self.read()
        arrived = None
        if self.copied is not None:
            if not self.copied.query():
                return None
            arrived = self._means(self.host.tolist())
        else:
            self.host = torch.empty_like(self.step.sums, device="cpu", pin_memory=True)
        self.host.copy_(self.step.sums, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return arrived

    def read(self) -> dict[str, float]:
        """The means so far over all processes: the one place that waits for the device."""
        sums = self.fabric.all_reduce(self.step.sums.clone(), reduce_op="sum")
        return self._means(sums.tolist())  # type: ignore[union-attr]

    def _means(self, sums: list[float]) -> dict[str, float]:
        means = {name: s / sums[-1] for name, s in zip(self.step.names, sums, strict=True)}
        return {**means, "examples": sums[-1]}


@contextmanager
def fast_convolutions(device: torch.device) -> Iterator[None]:
    """cuDNN tries its algorithms once per shape: shapes do not change in training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
