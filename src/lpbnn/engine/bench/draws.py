"""Ensembles larger than J: many draws of every member, against plain inference, member for member.

``predict(samples=64)`` of a network with four members is 256 networks. At the price of its operations it
answers 1/256 as many pictures per second as the plain network; ``chunk`` bounds the memory.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from rich.table import Table

from lpbnn.engine.bench.clock import Timing, interleaved, threads_of
from lpbnn.engine.bench.memory import peak_memory_of, state_bytes
from lpbnn.engine.bench.plan import Plan
from lpbnn.engine.bench.workload import REFERENCE
from lpbnn.engine.codec import to_data
from lpbnn.engine.config import RunConfig
from lpbnn.engine.environment import environment
from lpbnn.engine.launch import launch
from lpbnn.engine.step import fast_convolutions
from lpbnn.model import UncertainModel
from lpbnn.predict import predict


@dataclass(frozen=True)
class Draws:
    """What is predicted: ``images`` at once, at most ``chunk`` rows of them in the network."""

    backbone: str = "wrn-28-10"
    method: str = "lpbnn"
    members: int = 4
    samples: int = 64
    images: int | None = None
    """Left out: 512, on a CPU 16."""
    chunks: tuple[int, ...] = ()
    """Largest number of rows (member, picture) at once. Left out: one, two, four and eight times the
    pictures."""
    repeats: int = 5
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    threads: int = 1
    """On a CPU."""

    def plan(self) -> Plan:
        return Plan(
            (self.backbone,),
            (self.method,),
            (self.members,),
            repeats=self.repeats,
            device=self.device,
        ).settled()

    def settled(self) -> "Draws":
        images = self.images or (512 if self.plan().device == "cuda" else 16)
        return replace(
            self, images=images, chunks=self.chunks or tuple(images * n for n in (1, 2, 4, 8))
        )


@dataclass(frozen=True)
class DrawsRow:
    """One way to predict: rows per second are pictures times networks over seconds."""

    name: str
    chunk: int
    networks: int
    peak_bytes: int
    timing: Timing
    rows_per_second: float
    relative: float
    """To the plain network, network for network."""


def measure_draws(settings: Draws) -> dict[str, Any]:
    """Plain inference on all pictures at once, then every chunk, in turn; as plain data."""
    settings, plan = settings.settled(), settings.plan()
    device, images = plan.torch_device(), settings.images or 1
    workload = replace(plan.workload(settings.backbone), test_batch=images)
    cuda = device.type == "cuda"
    fabric = launch(RunConfig(device="cuda" if cuda else "cpu", precision=plan.precision or "32"))
    layout = torch.channels_last if cuda else torch.contiguous_format
    generators = torch.random.fork_rng(devices=[device] if cuda else [])
    with generators, fast_convolutions(device), threads_of(settings.threads):
        torch.manual_seed(settings.seed)
        x = workload.examples(images, device)[0].contiguous(memory_format=layout)

        def ready(method: str) -> UncertainModel:
            model = fabric.to_device(workload.model(method, settings.members))
            return model.to(memory_format=layout)  # type: ignore[call-overload]

        plain, ensemble = ready(REFERENCE), ready(settings.method)

        def answers(model: UncertainModel, samples: int, chunk: int) -> Any:
            def work() -> None:
                with fabric.autocast():
                    predict(model, x, samples=samples, chunk=chunk, keep_members=False)

            return work

        ways = {"plain": (plain, 1, images)}
        for chunk in settings.chunks:
            ways[f"chunk {chunk}"] = (ensemble, settings.samples, chunk)
        works = {name: answers(*way) for name, way in ways.items()}
        timings = interleaved(works, settings.repeats, warmup=1, device=device)
        rows: list[DrawsRow] = []
        for name, (model, samples, chunk) in ways.items():
            with peak_memory_of(device) as meter:
                works[name]()
            networks = model.members * samples
            rate = networks * images / timings[name].median
            relative = rate / (rows[0].rows_per_second if rows else rate)
            peak = meter.peak + state_bytes(model)
            rows.append(DrawsRow(name, chunk, networks, peak, timings[name], rate, relative))
    return {
        "environment": environment(device),
        "settings": to_data(settings)
        | {"precision": plan.precision, "workload": to_data(workload)},
        "rows": to_data(rows),
    }


def table(measured: dict[str, Any]) -> Table:
    """Rows per second of every way, relative to plain, and its memory."""
    settings = measured["settings"]
    network, members = settings["workload"]["network"], settings["members"]
    title = (
        f"{network}: predict(samples={settings['samples']}) of {members} members, "
        f"{settings['images']} pictures"
    )
    shown = Table(title=title, caption=measured["environment"]["device"])
    shown.add_column("way")
    for name in ("networks", "seconds", "rows/s", "of plain", "peak memory"):
        shown.add_column(name, justify="right")
    for row in measured["rows"]:
        seconds = Timing(tuple(row["timing"]["times"])).median
        shown.add_row(
            row["name"],
            str(row["networks"]),
            f"{seconds:.3g}",
            f"{row['rows_per_second']:,.0f}",
            f"{100 * row['relative']:.0f} %",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        )
    return shown
