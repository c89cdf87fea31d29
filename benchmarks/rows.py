"""Records of measurements, works that are timed, and a command that measures and shows."""

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpbnn.model import UncertainModel
from lpbnn.predict import predict
from lpbnn.training.environment import environment

MADE = ("commit", "dirty", "device", "torch")


def made() -> dict[str, Any]:
    """Return where the rows are made."""
    facts = environment() | {"torch": torch.__version__}
    return {key: facts[key] for key in MADE}


def append(path: Path, fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows; a new file gets the names of the fields first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call took, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def works(
    name: str, model: UncertainModel, x: Any, y: Tensor, optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[], object]]:
    """Return a training step and a prediction of a model, as ``train/NAME`` and ``predict/NAME``."""
    model.loss(x, y)  # the check of the first batch is not part of a step

    def step() -> None:
        optimizer.zero_grad()
        model.train().loss(x, y)["loss"].backward()
        optimizer.step()

    return {f"train/{name}": step, f"predict/{name}": lambda: predict(model.eval(), x, seed=0)}


def record(
    device: torch.device | str = "cpu", packages: Sequence[str] = (), **settings: Any
) -> dict[str, Any]:
    """Return the head of a JSON record: date, environment with the versions of further packages, settings."""
    made = environment(device)
    made["versions"] |= {package: metadata.version(package) for package in packages}
    return {"format": 1, "date": time.strftime("%Y-%m-%d"), "environment": made, **settings}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table whose first ``words`` columns are text, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def command(
    name: str, doc: str | None, run: Callable[[Path], None], show: Callable[[Path], str]
) -> None:
    """Run ``python -m NAME run FILE`` or ``python -m NAME show FILE``."""
    whole = (
        argparse.RawDescriptionHelpFormatter
    )  # the text as it is written, commands on lines of their own
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=doc, formatter_class=whole
    )
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        torch.set_num_threads(1)
        run(given.file)
    else:
        print(show(given.file))
