"""Peak memory: of a process or GPU, and of one piece of work alone.

The memory of one piece of work on a GPU is what the allocator gave out beyond what it had given before. On
the CPU, where a process's resident peak says little and never falls, the bytes alive in tensors are
counted: exact, the same on every machine, and blind to what a compiler allocates for itself.
"""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew; a process's resident peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes; 0 where the system does not say.

    >>> peak_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_kind(device: torch.device) -> str:
    """What ``peak_memory`` counts, for the table's note."""
    return "CUDA memory allocated" if device.type == "cuda" else "resident set of the process"


class PeakMemory(TorchDispatchMode):
    """Count every storage that is made inside the block, once.

    >>> with PeakMemory() as meter:
    ...     x = torch.zeros(256)  # 1,024 bytes
    ...     del x
    ...     y = torch.zeros(8)
    >>> meter.peak, meter.alive
    (1024, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known: set[int] = set()

    def reset(self) -> None:
        """Start the peak again from what is alive now."""
        self.peak = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


class CudaPeak:
    """Peak of what the GPU's allocator gives out inside the block, beyond what it had given before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.peak = device, 0, 0

    def __enter__(self) -> "CudaPeak":
        torch.cuda.synchronize(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        self.reset()
        return self

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self.before


def peak_memory_of(device: torch.device) -> PeakMemory | CudaPeak:
    """Return a context whose ``peak`` is the memory of the work in it (or since its ``reset``)."""
    return CudaPeak(device) if device.type == "cuda" else PeakMemory()


def state_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, shared ones once.

    >>> state_bytes(nn.Linear(3, 2))
    32
    """
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
