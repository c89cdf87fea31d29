"""Many samples of every member, against plain inference, network for network.

``predict(samples=64)`` of four members is 256 networks. If it cost its operations alone, it would predict
1/256 as many pictures per second as the plain network; ``chunk`` bounds the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

from benchmarks import records
from benchmarks.networks import setup_of
from lpbnn.model import UncertainModel
from lpbnn.predict import predict
from lpbnn.training.bench import PLAIN, Bench, Setup, Trial, build_model, interleaved
from lpbnn.training.memory import peak_memory_of, state_bytes


@dataclass(frozen=True)
class Draws:
    """Pictures, the networks that predict them, and the rows that go through a network at once."""

    backbone: str = "wrn-28-10"
    method: str = "lpbnn"
    members: int = 4
    samples: int = 64
    images: int | None = None
    """Left out: 512, on a CPU 16."""
    chunks: tuple[int, ...] = ()
    """Rows (member, picture) at once. Left out: one, two, four and eight times the pictures."""
    repeats: int = 5
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    threads: int = 1


def measure(settings: Draws) -> records.Record:
    """Return a record with the rows per second of plain inference and of every chunk."""
    cuda = Setup(device=settings.device).cuda
    setup = replace(
        setup_of(settings.backbone, small=not cuda),
        device="cuda" if cuda else "cpu",
        mode="eager",
        threads=settings.threads,
    )
    images = settings.images or (512 if cuda else 16)
    chunks = settings.chunks or tuple(images * n for n in (1, 2, 4, 8))
    settings = replace(settings, images=images, chunks=chunks)
    with Bench(setup) as bench:
        device = bench.fabric.device
        record = records.new(device, settings)
        torch.manual_seed(settings.seed)
        plain, ensemble = (
            Trial(setup, build_model(setup, method, settings.members), bench.fabric).model.eval()
            for method in (PLAIN, settings.method)
        )
        x, _ = setup.examples(images, device)

        def work(model: UncertainModel, samples: int, chunk: int) -> Callable[[], None]:
            def run() -> None:
                with bench.fabric.autocast():
                    predict(model, x, samples=samples, chunk=chunk, keep_members=False)

            return run

        ways = {"plain": (plain, 1, images)}
        ways |= {f"chunk {chunk}": (ensemble, settings.samples, chunk) for chunk in chunks}
        works = {name: work(*way) for name, way in ways.items()}
        timings = interleaved(works, settings.repeats)
        for name, (model, samples, chunk) in ways.items():
            with peak_memory_of(device) as meter:
                works[name]()
            networks = model.members * samples
            rate = networks * images / median(timings[name])
            rates = [row["rows_per_second"] for row in record["rows"]] or [rate]
            record["rows"].append(
                {
                    "name": name,
                    "chunk": chunk,
                    "networks": networks,
                    "peak_bytes": meter.peak + state_bytes(model),
                    "timing": {"times": timings[name]},
                    "rows_per_second": rate,
                    "relative": rate / rates[0],
                }
            )
    return record
