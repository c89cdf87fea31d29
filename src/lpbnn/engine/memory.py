"""Peak memory: what the GPU's allocator held, or the process's resident set."""

import sys

import torch

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
