"""One convolution, forward and backward: plain, BatchEnsemble and LP-BNN with its penalties."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.utils.benchmark import set_torch_threads

from benchmarks import records
from lpbnn.rank_one.factors import PointFactors
from lpbnn.rank_one.layer import RankOneLayer
from lpbnn.rank_one.vae import LatentFactors, LatentPosterior
from lpbnn.training.bench import interleaved


@dataclass(frozen=True)
class Layers:
    """A 3x3 convolution on the CPU."""

    members: int = 4
    channels: int = 64
    size: int = 32
    """Height and width of its input."""
    batch: int = 32
    repeats: int = 40
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 2 or self.threads < 1 or self.members < 1 or self.batch % self.members:
            raise ValueError(
                f"repeats={self.repeats}, threads={self.threads}, members={self.members}: expected at least "
                f"2 repeats, 1 thread, and members that divide the batch of {self.batch}."
            )


def measure(settings: Layers) -> records.Record:
    """Return a record with the median seconds of each layer, its ratio to plain and its spread."""
    torch.manual_seed(settings.seed)
    channels, shape = settings.channels, (settings.size, settings.size)
    x = torch.randn(settings.batch, channels, *shape, requires_grad=True)
    upstream = torch.randn_like(x)

    def conv() -> nn.Conv2d:
        return nn.Conv2d(channels, channels, 3, padding=1)

    point = PointFactors(settings.members, channels, channels)
    latent = LatentFactors(settings.members, channels, channels)
    steps = {
        "plain": _step(conv(), None, x, upstream),
        "BatchEnsemble": _step(RankOneLayer(conv(), point), None, x, upstream),
        "LP-BNN": _step(RankOneLayer(conv(), latent), latent, x, upstream),
    }
    record = records.new(torch.device("cpu"), settings)
    with set_torch_threads(settings.threads):
        timings = interleaved(steps, settings.repeats)
    for name, times in timings.items():
        low, middle, high = quantiles(times, n=4, method="inclusive")
        relative = middle / median(timings["plain"])
        row = {"name": name, "seconds": middle, "ratio": relative, "spread": (high - low) / middle}
        record["rows"].append(row)
    return record


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
