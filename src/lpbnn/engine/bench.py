"""What uncertainty costs: ratios to the plain layer, measured in one run, interleaved, by medians.

A shared machine is noisy and its clock wanders; so every repeat times every method once, in turn,
and only the ratio of the medians is reported as a result.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.factors import PointFactors
from lpbnn.latent import LatentFactors
from lpbnn.layers import FastWeight


@dataclass(frozen=True)
class Cost:
    """Seconds (median) of one method, and the ratio to the first of its run."""

    name: str
    seconds: float
    ratio: float
    spread: float  # interquartile range over the median


@dataclass(frozen=True)
class Bench:
    """A table of costs and where it was measured."""

    title: str
    rows: list[Cost]
    repeats: int
    threads: int
    torch: str
    machine: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def interleaved(
    steps: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3
) -> list[Cost]:
    """Time every step ``repeats`` times, in turn; the first one is the reference."""
    for _ in range(warmup):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    reference = next(iter(medians.values()))
    return [
        Cost(name, medians[name], medians[name] / reference, _spread(values))
        for name, values in times.items()
    ]


def bench_layers(
    members: int = 4,
    channels: int = 64,
    size: int = 32,
    batch: int = 32,
    repeats: int = 40,
    threads: int = 1,
) -> Bench:
    """A 3x3 convolution, forward and backward, inputs and weights: plain, BatchEnsemble, LP-BNN.

    LP-BNN draws its factors and adds its two penalties in every step, as in training.
    """
    if repeats < 2 or threads < 1 or members < 1 or batch % members:
        raise ValueError(
            f"repeats={repeats}, threads={threads}, members={members}: expected at least 2 repeats, 1 "
            f"thread, and members that divide the batch of {batch}."
        )
    x = torch.randn(batch, channels, size, size, requires_grad=True)
    upstream = torch.randn(batch, channels, size, size)

    def conv() -> nn.Conv2d:
        return nn.Conv2d(channels, channels, 3, padding=1)

    latent = LatentFactors(members, channels, channels)
    layers = {
        "plain": (conv(), None),
        "BatchEnsemble": (FastWeight(conv(), PointFactors(members, channels, channels)), None),
        "LP-BNN": (FastWeight(conv(), latent), latent),
    }
    steps = {name: _step(layer, factors, x, upstream) for name, (layer, factors) in layers.items()}
    with _threads(threads):
        rows = interleaved(steps, repeats)
    title = (
        f"conv {channels}->{channels} 3x3 on [{batch}, {channels}, {size}, {size}], "
        f"forward + backward, J = {members}"
    )
    return Bench(title, rows, repeats, threads, torch.__version__, platform.machine())


def _step(
    layer: nn.Module, factors: LatentFactors | None, x: Tensor, upstream: Tensor
) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        outputs, gradients = [layer(x)], [upstream]
        if factors is not None:
            outputs.append(torch.stack(LatentFactors.terms([factors])).sum())
            gradients.append(torch.ones(()))
        torch.autograd.backward(outputs, gradients)

    return step


def _spread(values: list[float]) -> float:
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
