"""Benchmarks of this repository: ``python -m benchmarks --help`` from a clone; not in the wheel.

``lpbnn bench`` (``lpbnn.bench.measure``) measures one network and is what these use.
"""
