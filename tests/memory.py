"""Peak of the bytes alive in tensors: exact, and the same on every machine."""

from lpbnn.bench import PeakMemory

__all__ = ["PeakMemory"]
