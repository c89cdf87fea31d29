"""Benchmarks of this repository: ``python -m benchmarks --help`` from a clone; not in the wheel.

``measure`` measures what ``setup`` says, with the training step of ``lpbnn train``: compiled or recorded too,
in bf16, with the memory on a CPU. ``lpbnn bench`` measures a plain step of a network of one's own.
"""
