"""Costs as ratios to the plain network or layer, from medians of interleaved repeats."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from benchmarks import draws as many_draws
from benchmarks import flops as operations
from benchmarks import layers as one_layer
from benchmarks import records, tables
from benchmarks.networks import BACKBONES, DEEPLAB, Plan, measure, setup_of
from benchmarks.plot import plot as draw
from lpbnn.training.bench import Row

console = Console() if sys.stdout.isatty() else Console(width=136)
Json = Annotated[Path | None, arg(name="json", help="Write the record here, after every case.")]
Picture = Annotated[Path | None, arg(help="Draw the cost against J here (.svg, .png, .pdf).")]


def networks(
    plan: Annotated[Plan, arg(name="")], json_file: Json = None, plot: Picture = None
) -> None:
    """Whole networks: training step, prediction, peak memory, parameters, first step."""
    record = _measure(plan, json_file)
    _show([record], plot)


def deeplab(plan: Annotated[Plan, arg(name="")] = DEEPLAB, json_file: Json = None) -> None:
    """The paper's runtime table (Table 3): DeepLabv3+ at 1280x720, with its numbers beside ours."""
    record = _measure(plan, json_file)
    _show([record])
    for table in tables.table_3(record):
        console.print(table)


def draws(settings: Annotated[many_draws.Draws, arg(name="")], json_file: Json = None) -> None:
    """Many samples of every member: rows per second relative to plain inference."""
    record = many_draws.measure(settings)
    records.write(record, json_file)
    console.print(tables.draws(record))


def layers(settings: Annotated[one_layer.Layers, arg(name="")], json_file: Json = None) -> None:
    """One convolution, forward and backward, on the CPU."""
    record = one_layer.measure(settings)
    records.write(record, json_file)
    console.print(tables.layers(record))


def flops(
    backbones: tuple[str, ...] = BACKBONES,
    method: str = "lpbnn",
    members: tuple[int, ...] = (1, 2, 4, 8, 16),
    small: bool = False,
) -> None:
    """Operations by torch's counter, for every J; nothing is computed (docs/cost.md)."""
    for name in backbones:
        setup = setup_of(name, small)
        console.print(tables.flops(setup, operations.count(setup, method, members)))


def show(
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE")], plot: Picture = None
) -> None:
    """Tables of records that networks or deeplab wrote, and the plot of all of them."""
    if not files:
        raise ValueError("no file was given. Fix: show results/bench/FILE.json")
    _show([records.read(path) for path in files], plot)


COMMANDS: dict[str, Callable[..., Any]] = {
    command.__name__: command for command in (networks, deeplab, draws, layers, flops, show)
}


def main(args: list[str] | None = None) -> None:
    """Run a command; ``networks`` if none is named."""
    args = sys.argv[1:] if args is None else args
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        args = ["networks", *args]
    prog = "python -m benchmarks"
    try:
        if args[0] in COMMANDS:
            tyro.cli(COMMANDS[args[0]], prog=f"{prog} {args[0]}", args=args[1:])
        else:
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog=prog, description=__doc__, args=args
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _measure(plan: Plan, json_file: Path | None) -> records.Record:
    def report(record: records.Record, row: Row | None) -> None:
        records.write(record, json_file)
        if row is not None:
            console.print(escape(tables.line(row)), highlight=False, soft_wrap=True)

    return measure(plan, report)


def _show(shown: list[records.Record], path: Path | None = None) -> None:
    for table in tables.networks(shown):
        console.print(table)
    for record in shown:
        for note in tables.notes(record):
            console.print(escape(note), highlight=False)
    if path is not None:
        console.print(f"drew {draw(shown, path)}")


if __name__ == "__main__":
    main()
