"""Lightning Fabric, set up from a config: devices, processes, precision."""

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from lpbnn.engine.config import RunConfig

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def launch(config: RunConfig) -> "Fabric":
    """The processes and the device of a run, ready to use.

    Under torchrun every process comes here and finds its place. Otherwise, with more than one device,
    Fabric starts the other processes by running the same command again.

    >>> fabric = launch(RunConfig(device="cpu"))
    >>> fabric.device, fabric.world_size
    (device(type='cpu'), 1)
    """
    fabric_module = _fabric()
    accelerator = _accelerator(config)
    devices, nodes = _processes(config)
    several = devices * nodes > 1
    fabric = fabric_module.Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if several and config.strategy == "auto" else config.strategy,
        **_precision(config, accelerator, fabric_module.plugins.MixedPrecision),
    )
    fabric.launch()
    return fabric


def _fabric() -> Any:
    """Fabric, under either of the names it is published by; imported late, as it takes seconds."""
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


def _processes(config: RunConfig) -> tuple[int, int]:
    """Processes per node and nodes; torchrun has decided both already where it started us."""
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        return here, world // here
    return config.devices, config.nodes


def _precision(config: RunConfig, accelerator: str, mixed: Any) -> dict[str, Any]:
    class Autocast(mixed):
        """Autocast alone: Fabric would also round the inputs and, in regression, the targets."""

        def convert_input(self, data: Any) -> Any:
            return data

    if config.precision == "32":
        return {"precision": "32-true"}
    name = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return {"plugins": [Autocast(name, device=accelerator)]}
