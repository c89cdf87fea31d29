"""The training step recorded as a CUDA graph, which starts all of its kernels at once.

A small network's step is hundreds of kernels of a few microseconds, which the host cannot start as fast as
they end. So the step is recorded once and then started as a whole: the host only hands over the next batch
and the learning rate, which live in tensors.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpbnn.training.config import RunConfig

if TYPE_CHECKING:
    from lightning.fabric import Fabric

WARM_UP = 3  # ordinary steps before the recording: kernels are chosen, the optimizer gets its state
TRIES = 3  # a GPU that others use at the same time may refuse a recording once


def records(config: RunConfig, fabric: "Fabric") -> bool:
    """Return True if the step is recorded: on one GPU alone, without fp16's scaling of the loss."""
    one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
    return config.graph and one_gpu and config.precision != "fp16"


def make_recordable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep the rates on the device, where a recorded step reads them anew each time.

    A checkpoint of a run on another device brings its own kind of step along: this one's is kept.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        kinds = ("fused", "capturable", "foreach")
        group |= {kind: optimizer.defaults[kind] for kind in kinds if kind in optimizer.defaults}
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


class Recording:
    """``work(x, y)``, replayed as a CUDA graph after a few ordinary calls; other shapes are run as usual."""

    def __init__(self, work: Callable[[Any, Tensor], None], device: torch.device) -> None:
        self.work, self.device = work, device
        self.stream = torch.cuda.Stream(device)
        self.warm_up, self.tries = WARM_UP, TRIES
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.y = torch.empty(0)

    def forget(self) -> None:
        """Record anew, after an ordinary step, in which new kernels are chosen."""
        self.graph = None
        self.warm_up = max(self.warm_up, 1)

    def on_its_stream(self) -> AbstractContextManager[Any]:
        """Return the context of all steps: gradients remember the stream they were first made on."""
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
        """Return the step as a graph; None if it failed and may be tried again with the next batch."""
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
