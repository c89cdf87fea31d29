"""Processes of a run: how Fabric starts them, what they share, how they end."""

import atexit
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

from lpbnn.training.config import RunConfig
from lpbnn.training.files import Interrupted, RunError

if TYPE_CHECKING:
    from lightning.fabric import Fabric

T = TypeVar("T")
LOOK_EVERY = 1.0  # seconds, at the other processes
# Errors of collectives of gloo, NCCL and the store when a process at the other end is gone.
LOST = (
    "gloo",
    "Connection closed",
    "Connection reset",
    "Socket",
    "NCCL",
    "TCPStore",
    "Broken pipe",
)


def launch(config: RunConfig, alone: bool = False) -> "Fabric":
    """Return Fabric with the processes, the device and the precision of a run.

    Under torchrun every process calls this and finds its place. Otherwise, with more than one device,
    Fabric starts the other processes by running the same command again.

    Args:
        alone: one process on one device, whatever the config says.

    >>> fabric = launch(RunConfig(device="cpu"))
    >>> fabric.device, fabric.world_size
    (device(type='cpu'), 1)
    """
    accelerator = _accelerator(config)
    devices, nodes = (1, 1) if alone else _processes(config, accelerator)
    fabric_module = _fabric()
    fabric = fabric_module.Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
        **_precision(config, accelerator, fabric_module.plugins.MixedPrecision),
    )
    first = not _is_connected()
    fabric.launch()
    if first and _is_connected():
        # Fabric leaves gloo's connections to the end of the interpreter, where its threads may meet
        # another process's that are gone already.
        atexit.register(_disconnect)
        if type(fabric.strategy.cluster_environment).__name__ == "LightningEnvironment":
            _watch(getattr(fabric.strategy.launcher, "procs", []))
    return fabric


def _fabric() -> Any:
    """Return Fabric's module by either of its names; imported late, as it takes seconds."""
    try:
        module = importlib.import_module("lightning.fabric")
    except ModuleNotFoundError:
        module = importlib.import_module("lightning_fabric")
    importlib.import_module(f"{module.__name__}.plugins")
    return module


def _accelerator(config: RunConfig) -> str:
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ValueError("device is 'cuda', but torch finds no CUDA device. Fix: device='cpu'.")
    accelerator = "cuda" if there and config.device != "cpu" else "cpu"
    if accelerator == "cpu" and config.precision == "fp16":
        raise ValueError("precision is 'fp16', which needs CUDA; on the CPU use 'bf16' or '32'.")
    return accelerator


def _processes(config: RunConfig, accelerator: str) -> tuple[int, int]:
    """Return processes per machine and machines; torchrun has decided both already where it started us."""
    devices, nodes = config.devices, 1
    if distributed.is_available() and distributed.is_torchelastic_launched():
        devices, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        nodes = world // devices
    if accelerator == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(
            f"devices is {devices}, but torch finds {torch.cuda.device_count()} CUDA device(s). Fix: one "
            "process for each, or device='cpu'."
        )
    return devices, nodes


def _precision(config: RunConfig, accelerator: str, mixed: Any) -> dict[str, Any]:
    class Autocast(mixed):
        """Autocast alone: Fabric would also round the inputs and, in regression, the targets."""

        def convert_input(self, data: Any) -> Any:
            return data

    if config.precision == "32":
        return {"precision": "32-true"}
    name = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return {"plugins": [Autocast(name, device=accelerator)]}


class Ranks:
    """This process among those of a run; without a fabric it is the only one.

    Its methods are collectives: every process has to call them, or the others wait.

    >>> ranks = Ranks()
    >>> ranks.gather("mine"), ranks.agree(True)
    (['mine'], True)
    """

    def __init__(self, fabric: "Fabric | None" = None) -> None:
        self.rank = 0 if fabric is None else fabric.global_rank
        self.world = 1 if fabric is None else fabric.world_size

    def gather(self, mine: T) -> list[T]:
        """Return what every process gives, in the order of the ranks; tensors should be on the CPU."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        distributed.all_gather_object(everyone, mine)
        return everyone

    def agree(self, ok: bool) -> bool:
        """Return True if all processes say so."""
        return all(self.gather(ok))

    def rank_zero(self, work: Callable[[], T]) -> T:
        """Return the result of work that rank 0 does alone; its ``RunError`` reaches every process."""
        result: tuple[T | None, str] = (None, "")
        if self.rank == 0:
            try:
                result = (work(), "")
            except RunError as error:
                if self.world == 1:
                    raise
                result = (None, str(error))
        value, problem = self.gather(result)[0]
        if problem:
            raise RunError(problem)
        return value  # type: ignore[return-value]

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers (batch norm's statistics) to all processes.

        Gradients are averaged, buffers are not: without this, processes would measure different models.
        """
        if self.world > 1:
            with torch.no_grad():
                for buffer in model.buffers():
                    distributed.broadcast(buffer, 0)


def is_first() -> bool:
    """Return True in the first, or only, process of a run; works before ``launch``."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


@contextmanager
def ending_well(fabric: "Fabric", farewell: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and the end of another process inside the block into a message: ``farewell``.

    SIGTERM is how torchrun and cluster schedulers end a process.
    """
    try:
        with _termination_as_interrupt():
            try:
                yield
            except RuntimeError as error:
                if not _lost_process(error, fabric):
                    raise
                _ignore_termination()  # torchrun's, before the message is out
                raise RunError(f"another process of this run has ended: {farewell()}") from error
    except Interrupted:
        raise  # a block inside this one knew more
    except KeyboardInterrupt as error:
        raise Interrupted(farewell()) from error


def _lost_process(error: RuntimeError, fabric: "Fabric") -> bool:
    """Return True if an error in the middle of a run means that another process is gone."""
    network = isinstance(error, getattr(distributed, "DistError", ()))
    return fabric.world_size > 1 and (network or any(sign in str(error) for sign in LOST))


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:  # or a block inside this one ignores it now
            signal.signal(signal.SIGTERM, before)


def _ignore_termination() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _disconnect() -> None:
    if _is_connected():
        distributed.destroy_process_group()


def _watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End with a message when a process that Fabric started, or the one that started us, is gone.

    A collective may wait half an hour for a process that is gone; torchrun watches its processes itself.
    """
    started_by = os.getppid()

    def look() -> None:
        while True:
            time.sleep(LOOK_EVERY)
            ended = [child for child in children if child.poll()]
            orphaned = not children and os.getppid() != started_by
            if ended or orphaned:
                time.sleep(LOOK_EVERY)  # most often a collective has noticed by now, and says more
                which = (
                    f"process {ended[0].pid} (exit code {ended[0].returncode})"
                    if ended
                    else "rank 0"
                )
                print(f"error: {which} of this run has ended, so this one does.", file=sys.stderr)
                for child in children:
                    child.kill()
                os._exit(2)

    threading.Thread(target=look, daemon=True, name="lpbnn-watch").start()
