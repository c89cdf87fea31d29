"""Costs as ratios to the plain network, from medians of interleaved repeats.

The other benchmarks are modules: python -m benchmarks.architectures, benchmarks.lora, benchmarks.peers,
benchmarks.posthoc and benchmarks.tabular, each with "run FILE" or "show FILE", and python -m benchmarks.fair.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from benchmarks import flops as operations
from benchmarks import tables
from benchmarks.networks import DEEPLAB, METHODS, Record, measure, read, setup_of
from lpbnn.bench import Row, Setup

console = Console() if sys.stdout.isatty() else Console(width=136)
Settings = Annotated[Setup, arg(name="")]
Json = Annotated[Path | None, arg(name="json", help="Write the record here, after every case.")]
Members = Annotated[tuple[int, ...], arg(help="J, in the order in which they are measured.")]


def networks(
    setup: Settings,
    methods: tuple[str, ...] = METHODS,
    members: Members = (4, 1, 2, 8, 16),
    json_file: Json = None,
) -> None:
    """One network: training step, prediction, peak memory, parameters, first step."""
    _show([measure(setup, methods, members, json_file, _report)])


def deeplab(
    setup: Settings = DEEPLAB,
    methods: tuple[str, ...] = ("lpbnn", "batchensemble", "tradi", "ensemble"),
    members: Members = (4,),
    json_file: Json = None,
) -> None:
    """The paper's runtime table (Table 3): DeepLabv3+ at 1280x720, with its numbers beside ours."""
    record = measure(setup, methods, members, json_file, _report)
    _show([record])
    console.print(tables.table_3(record))


def flops(
    backbones: tuple[str, ...] = ("wrn-28-10", "wrn-16-4", "resnet18", "deeplab"),
    method: str = "lpbnn",
    members: tuple[int, ...] = (1, 2, 4, 8, 16),
) -> None:
    """Operations by torch's counter, for every J; nothing is computed (docs/results/cost.md)."""
    for setup in map(setup_of, backbones):
        console.print(operations.table(setup, method, members))


def show(
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE")],
    plot: Annotated[
        Path | None, arg(help="Draw the cost against J here (.svg, .png, .pdf).")
    ] = None,
) -> None:
    """Tables of records that networks or deeplab wrote, and the plot of all of them."""
    if not files:
        raise ValueError("no file was given. Fix: show results/records.tar.xz/bench/FILE.json")
    shown = [read(path) for path in files]
    _show(shown)
    if plot is not None:
        console.print(f"drew {tables.plot(shown, plot)}")


COMMANDS: dict[str, Callable[..., Any]] = {
    command.__name__: command for command in (networks, deeplab, flops, show)
}


def main(args: list[str] | None = None) -> None:
    """Run a command."""
    args = sys.argv[1:] if args is None else args
    prog = "python -m benchmarks"
    try:
        if args and args[0] in COMMANDS:
            tyro.cli(COMMANDS[args[0]], prog=f"{prog} {args[0]}", args=args[1:])
        else:
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog=prog, description=__doc__, args=args
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _report(row: Row) -> None:
    """Print one case while others are still to come."""
    console.print("measured {backbone}, {mode}, {method}, J = {members}".format(**row["case"]))


def _show(shown: list[Record]) -> None:
    for table in tables.networks(shown):
        console.print(table)
    for record in shown:
        for note in tables.notes(record):
            console.print(escape(note), highlight=False)


if __name__ == "__main__":
    main()
