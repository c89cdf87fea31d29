"""What a person sees of a training: a bar on a terminal, else a line per epoch; and TensorBoard."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_TIMINGS = ("epoch", "lr", "images_per_second", "seconds")


def line(row: Mapping[str, float]) -> str:
    """Return the numbers of an epoch in one line.

    >>> line({"epoch": 3, "lr": 0.1, "loss": 0.4123, "nll": 0.4, "images_per_second": 41234.5})
    'loss 0.4123  nll 0.4  41,234 images/s'
    """
    numbers = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in row.items() if k not in _TIMINGS]
    if "images_per_second" in row:
        numbers.append(f"{int(row['images_per_second']):,} images/s")
    return "  ".join(numbers)


class Bar(Progress):
    """The progress of a training on the standard error, shown inside a ``with`` block.

    Args:
        shown: False shows nothing at all.
        start: the first epoch, from 0.
    """

    def __init__(self, shown: bool, epochs: int, steps: int, start: int) -> None:
        columns = (
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}"),
        )
        moves = shown and sys.stderr.isatty()
        super().__init__(*columns, console=Console(stderr=True), disable=not moves)
        self.epochs, self.per_epoch = epochs, steps
        self.prints = shown and not moves
        fields: dict[str, Any] = {"epoch": start, "epochs": epochs, "text": ""}
        self.bar = self.add_task("", total=epochs * steps, completed=start * steps, **fields)

    def step(self, epoch: int, done: int, means: Mapping[str, float], seconds: float) -> None:
        """Show that ``done`` steps of ``epoch`` (from 0) took ``seconds``."""
        row = {key: value for key, value in means.items() if key != "examples"}
        row["images_per_second"] = means["examples"] / seconds
        completed = epoch * self.per_epoch + done
        self.update(self.bar, completed=completed, epoch=epoch + 1, text=line(row))

    def epoch(self, row: Mapping[str, float]) -> None:
        """Show the numbers of a finished epoch."""
        epoch = int(row["epoch"])
        if self.prints:
            print(f"epoch {epoch}/{self.epochs}  {line(row)}", file=sys.stderr, flush=True)
        self.update(self.bar, completed=epoch * self.per_epoch, epoch=epoch, text=line(row))


def tensorboard(folder: Path | None, start: int) -> AbstractContextManager[Any]:
    """Return a ``SummaryWriter`` that goes on at epoch ``start``; a context of None without a folder."""
    if folder is None:
        return nullcontext()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder), purge_step=start + 1)
