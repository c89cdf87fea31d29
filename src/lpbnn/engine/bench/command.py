"""What uncertainty costs: medians of repeats in turn, as ratios to the plain network or layer."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from lpbnn.engine.bench import deeplab as runtime
from lpbnn.engine.bench import tables
from lpbnn.engine.bench.draws import Draws, measure_draws, table
from lpbnn.engine.bench.plan import BACKBONES, Plan
from lpbnn.engine.bench.record import Case, Record
from lpbnn.engine.files import write_json

WIDTH = 136  # of a table, where nobody's terminal says
console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
Json = Annotated[Path | None, arg(name="json")]
Options = Annotated[tuple[str, ...], arg(name="set", metavar="NAME=VALUE")]
Planned = Annotated[Plan, arg(name="")]


def networks(
    plan: Planned, options: Options = (), json_file: Json = None, plot: Path | None = None
) -> None:
    """Whole networks: training step, prediction, peak memory, parameters, time of the first step.

    Args:
        options: of the methods, where they take them (latent=64 batch_mode=repeat).
        json_file: write every repeat here, after every configuration: a killed call loses nothing.
        plot: draw cost against J here (.svg, .png, .pdf).
    """
    record = _measure(_with(plan, options), json_file)
    _show([record])
    _draw([record], plot)


def deeplab(plan: Planned = runtime.TABLE3, options: Options = (), json_file: Json = None) -> None:
    """The paper's runtime table: DeepLabv3+ at 1280x720, with its numbers beside ours.

    Args:
        options: of the methods, where they take them.
        json_file: write every repeat here, after every configuration.
    """
    record = _measure(_with(plan, options), json_file)
    _show([record])
    for shown in runtime.tables(record):
        console.print(shown)


def draws(settings: Annotated[Draws, arg(name="")], json_file: Json = None) -> None:
    """Many draws of every member: throughput against plain inference, network for network.

    Args:
        json_file: also write the numbers here.
    """
    measured = measure_draws(settings)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(json_file, measured)
    console.print(table(measured))


def layers(members: int = 4, repeats: int = 40, threads: int = 1, json_file: Json = None) -> None:
    """One convolution, forward and backward, on the CPU.

    Args:
        json_file: also write the numbers here.
    """
    from lpbnn.engine.bench.layers import bench_layers

    measured = bench_layers(members=members, repeats=repeats, threads=threads)
    console.print(tables.layers(measured))
    if json_file is not None:
        write_json(json_file, measured.to_dict())


def paper(
    backbones: tuple[str, ...] = BACKBONES,
    members: tuple[int, ...] = (1, 2, 4, 8, 16),
    latent: int = 32,
    small: bool = False,
) -> None:
    """LP-BNN on paper: operations and bytes from the shapes of a network (docs/cost.md)."""
    from lpbnn.engine.bench.paper import table
    from lpbnn.engine.bench.workload import workload

    for name in backbones:
        console.print(table(workload(name, small), members, latent))


def show(
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE")], plot: Path | None = None
) -> None:
    """The tables of files that were measured before, and the plot of all of them.

    Args:
        files: what networks or deeplab wrote with --json.
        plot: draw cost against J here (.svg, .png, .pdf).
    """
    if not files:
        raise ValueError("no file was given. Fix: lpbnn bench show FILE.json")
    records = [Record.read(path) for path in files]
    _show(records)
    _draw(records, plot)


COMMANDS: dict[str, Callable[..., Any]] = {
    "networks": networks,
    "deeplab": deeplab,
    "draws": draws,
    "layers": layers,
    "paper": paper,
    "show": show,
}


def named(args: list[str]) -> list[str]:
    """The arguments with what is measured in front: the networks, where nothing is named.

    >>> named(["--members", "4"])
    ['networks', '--members', '4']
    >>> named(["layers"])
    ['layers']
    """
    asked = bool(args) and (not args[0].startswith("-") or args[0] in ("-h", "--help"))
    return args if asked else ["networks", *args]


def _with(plan: Plan, options: tuple[str, ...]) -> Plan:
    from lpbnn.engine.config import RunConfig
    from lpbnn.engine.options import with_options

    return replace(plan, options=with_options(RunConfig(), options).method_options)


def _measure(plan: Plan, json_file: Path | None) -> Record:
    from lpbnn.engine.bench.networks import measure

    def tell(record: Record, case: Case) -> None:
        if json_file is not None:
            record.write(json_file)
        last = record.rows[-1] if record.rows else None
        if last is not None and last.case == case:
            console.print(escape(tables.line(last)), highlight=False, soft_wrap=True)

    return measure(plan, tell)


def _show(records: list[Record]) -> None:
    for shown in tables.networks(records):
        console.print(shown)
    for record in records:
        console.print(escape(tables.caption(record)), highlight=False)
        for note in tables.notes(record):
            console.print(escape(note), style="yellow", highlight=False)


def _draw(records: list[Record], path: Path | None) -> None:
    if path is not None:
        from lpbnn.engine.bench.plot import plot

        console.print(f"drew {plot(records, path)}")
