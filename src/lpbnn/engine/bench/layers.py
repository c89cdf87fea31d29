"""One convolution, forward and backward: plain, BatchEnsemble and LP-BNN.

LP-BNN draws its factors and adds its two penalties in every step, as in training.
"""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.engine.bench.clock import interleaved, threads_of
from lpbnn.rank_one.factors import PointFactors
from lpbnn.rank_one.layer import RankOneLayer
from lpbnn.rank_one.vae import LatentFactors, LatentPosterior


@dataclass(frozen=True)
class Cost:
    """Seconds (median) of one layer, and the ratio to the first of its run."""

    name: str
    seconds: float
    ratio: float
    spread: float  # interquartile range over the median


@dataclass(frozen=True)
class LayerBench:
    """A table of costs and where it was measured."""

    title: str
    rows: list[Cost]
    repeats: int
    threads: int
    torch: str
    machine: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_layers(
    members: int = 4,
    channels: int = 64,
    size: int = 32,
    batch: int = 32,
    repeats: int = 40,
    threads: int = 1,
) -> LayerBench:
    """A 3x3 convolution, forward and backward, inputs and weights, on the CPU."""
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
        "BatchEnsemble": (RankOneLayer(conv(), PointFactors(members, channels, channels)), None),
        "LP-BNN": (RankOneLayer(conv(), latent), latent),
    }
    steps = {name: _step(layer, factors, x, upstream) for name, (layer, factors) in layers.items()}
    with threads_of(threads):
        timings = interleaved(steps, repeats)
    plain = timings["plain"].median
    rows = [
        Cost(name, timing.median, timing.median / plain, timing.spread)
        for name, timing in timings.items()
    ]
    title = (
        f"conv {channels}->{channels} 3x3 on [{batch}, {channels}, {size}, {size}], "
        f"forward + backward, J = {members}"
    )
    return LayerBench(title, rows, repeats, threads, torch.__version__, platform.machine())


def _step(
    layer: nn.Module, factors: LatentFactors | None, x: Tensor, upstream: Tensor
) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        outputs, gradients = [layer(x)], [upstream]
        if factors is not None:
            posterior = LatentPosterior([factors])
            outputs.append((posterior.kl() + posterior.squared_error(of_samples=False)).sum())
            gradients.append(torch.ones(()))
        torch.autograd.backward(outputs, gradients)

    return step
