"""What a person sees of a run while it goes: a progress bar, or a line per epoch, or TensorBoard."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

_TIMINGS = ("epoch", "lr", "images_per_second", "seconds")


def line(row: Mapping[str, float]) -> str:
    """The numbers of an epoch in one line.

    >>> line({"epoch": 3, "lr": 0.1, "loss": 0.4123, "nll": 0.4, "images_per_second": 41234.5})
    'loss 0.4123  nll 0.4  41,234 images/s'
    """
    numbers = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in row.items() if k not in _TIMINGS]
    if "images_per_second" in row:
        numbers.append(f"{int(row['images_per_second']):,} images/s")
    return "  ".join(numbers)


class Bar:
    """On a terminal a bar that moves, elsewhere (a log file) one line per epoch."""

    def __init__(self, epochs: int, steps: int, start: int) -> None:
        self.epochs, self.steps = epochs, steps
        self.bar: Any = None
        if sys.stderr.isatty():
            self.bar, self.task = _moving(epochs, steps, start)

    def step(self, epoch: int, done: int, means: Mapping[str, float], seconds: float) -> None:
        """``done`` steps of ``epoch`` (from 0) took ``seconds``."""
        row = {key: value for key, value in means.items() if key != "examples"}
        row["images_per_second"] = means["examples"] / seconds
        self._show(epoch * self.steps + done, epoch + 1, row)

    def _show(self, completed: int, epoch: int, row: Mapping[str, float]) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=completed, epoch=epoch, text=line(row))

    def epoch(self, row: Mapping[str, float]) -> None:
        """An epoch is over."""
        if self.bar is None:
            print(f"epoch {row['epoch']}/{self.epochs}  {line(row)}", file=sys.stderr, flush=True)
        else:
            self._show(int(row["epoch"]) * self.steps, int(row["epoch"]), row)


@contextmanager
def progress(shown: bool, epochs: int, steps: int, start: int = 0) -> Iterator[Bar | None]:
    """The bar for the time of a training, on the standard error; None where it is not wanted."""
    if not shown:
        yield None
        return
    bar = Bar(epochs, steps, start)
    with bar.bar or nullcontext():
        yield bar


def _moving(epochs: int, steps: int, start: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    done, total = start * steps, epochs * steps
    return bar, bar.add_task("", total=total, completed=done, epoch=start, epochs=epochs, text="")


@contextmanager
def tensorboard(folder: Path | None, start: int) -> Iterator[Any]:
    """A ``SummaryWriter`` that goes on at epoch ``start``; None where there is no folder."""
    if folder is None:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder), purge_step=start + 1) as writer:
        yield writer
