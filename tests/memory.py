"""Peak of the bytes alive in tensors: exact, and the same on every machine."""

from benchmarks.measure import PeakMemory

__all__ = ["PeakMemory"]
