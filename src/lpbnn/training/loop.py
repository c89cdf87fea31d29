"""The only training loop. It knows the contract of a model, and no method.

Everything random comes from (seed, epoch): the order, the augmentation and, through torch's
generators seeded at the start of every epoch, what the model draws. Checkpoints are made between
epochs, so a resumed run repeats what the uninterrupted one did, on the CPU in float32 bit for bit.

Losses are summed on the device: nothing waits for it before the end of an epoch.

Several processes see the same joint batches, a share each, and agree at the end of every epoch on the
statistics of rank 0's share and on whether to go on. Rank 0 alone validates and writes.
"""

import math
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lpbnn.data import Splits
from lpbnn.kernels.row_norm import restore_batch_norms
from lpbnn.model import NotFittedWarning, UncertainModel
from lpbnn.training import checkpoint
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig
from lpbnn.training.dataloading import TrainLoader, noise_seed
from lpbnn.training.distributed import Ranks, ending_well, launch
from lpbnn.training.environment import peak_memory, reset_peak_memory
from lpbnn.training.evaluator import NotFinite, Predictor, make_evaluator
from lpbnn.training.preflight import check_training
from lpbnn.training.rundir import CHECKPOINT, Row, RunDir
from lpbnn.training.step import Step, factor, fast_convolutions

if TYPE_CHECKING:
    from lightning.fabric import Fabric

TIMINGS = ("epoch", "lr", "images_per_second", "seconds")


@dataclass
class Training:
    """The course of a training; a diverged one is a result like any other."""

    epochs: int = 0
    """Finished ones."""
    diverged: int | None = None
    """The epoch, from 1, in which the loss, a weight or a prediction became non-finite."""
    seconds: float = 0.0
    """Of training alone, without validation; over all sessions of a resumed run."""
    peak_memory: int = 0
    """Bytes: allocated on the GPU, or the process's resident set on the CPU."""
    rows: list[Row] = field(default_factory=list)
    """The log: one row per epoch."""


def fit(
    model: UncertainModel,
    splits: Splits,
    config: RunConfig,
    fabric: "Fabric | None" = None,
    folder: RunDir | None = None,
    resume: bool = False,
) -> Training:
    """Train ``model`` in place; the last finite weights are left in it.

    Ctrl-C (and SIGTERM) raises ``Interrupted``, which says how to resume; a process that ended ends the
    others with a ``RunError`` that says the same.

    Args:
        fabric: that of a run, which has been checked; None checks the settings and launches one.
        folder: where the run is logged and checkpointed.
        resume: go on from the folder's checkpoint.

    >>> from lpbnn.training.build import DataInfo, build_model, load_data
    >>> config = RunConfig("mcp", epochs=2, device="cpu", progress=False)
    >>> splits = load_data(config)
    >>> training = fit(build_model(config, DataInfo.of(splits)), splits, config)
    >>> training.epochs, sorted(training.rows[-1])
    (2, ['epoch', 'images_per_second', 'loss', 'lr', 'nll', 'seconds', 'val_accuracy', 'val_brier', ...])
    """
    if fabric is None:
        fabric = launch(config)
        check_training(config, splits, fabric.world_size)
    state = folder.checkpoint(fabric.device) if folder is not None and resume else None
    loop = _Loop(model, splits, config, fabric, folder, state)
    cuda = [fabric.device] if fabric.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),  # the caller's generators are given back as they were
        fast_convolutions(fabric.device),
        ending_well(fabric, loop.farewell),
    ):
        loop.run()
        restore_batch_norms(model)  # a compiled step may have changed their class
    return loop.training


class _Loop:
    """The state of one training."""

    def __init__(
        self,
        model: UncertainModel,
        splits: Splits,
        config: RunConfig,
        fabric: "Fabric",
        folder: RunDir | None,
        state: dict[str, Any] | None,
    ) -> None:
        self.model, self.splits, self.config, self.fabric = model, splits, config, fabric
        self.folder, self.ranks = folder, Ranks(fabric)
        self.writer = folder if fabric.is_global_zero else None  # one process writes
        self.loader = TrainLoader(
            splits, config, fabric.device, fabric.global_rank, fabric.world_size
        )
        if state is not None:
            checkpoint.restore(model, state.pop("model"), f"{folder and folder / CHECKPOINT}")
        model.to(fabric.device)
        if config.channels_last:
            checkpoint.channels_last(model)
        self.step = Step(model, config, fabric, self.loader.batch_size // self.loader.world)
        # One draw per member: a look at the progress, not the result.
        self.validation = Predictor(model, DataInfo.of(splits), config, fabric, samples=1)
        self.training = Training()
        self.good = checkpoint.snapshot(model)  # the last finite weights
        self.infinite = checkpoint.not_finite(model)  # as given: a mask of attention, say
        self.saved = 0  # the epoch of the last checkpoint
        if folder is not None and state is not None:
            self.restore(folder, state)

    def run(self) -> None:
        config, start = self.config, self.training.epochs
        shown = config.progress and self.fabric.is_global_zero
        board = self.writer.tensorboard() if self.writer and config.tensorboard else None
        reset_peak_memory(self.fabric.device)
        with (
            Bar(shown, config.epochs, self.loader.steps, start) as self.bar,
            tensorboard(board, start) as self.board,
        ):
            while self.training.epochs < config.epochs and self.training.diverged is None:
                self.epoch(self.training.epochs)
        if self.training.epochs > 0:
            torch.manual_seed(noise_seed(config.seed, config.epochs, 0))
            self.model.after_fit(self.loader)

    def epoch(self, epoch: int) -> None:
        started = time.perf_counter()
        means = self.pass_over_data(epoch)
        seconds = time.perf_counter() - started
        self.training.seconds += seconds
        self.training.peak_memory = max(self.training.peak_memory, peak_memory(self.fabric.device))
        images = means.pop("examples")
        row: Row = {
            "epoch": epoch + 1,
            "lr": self.config.optim.lr * self.scale(epoch * self.loader.steps),
            **means,
        }
        # Gradients are averaged over processes, buffers are not: all go on with those of rank 0.
        self.ranks.broadcast_buffers(self.model)
        if self.is_finite(means) and (scores := self.scores(epoch)) is not None:
            row |= scores
            self.training.epochs = epoch + 1
            self.good = checkpoint.snapshot(self.model)
        else:
            self.training.diverged = epoch + 1
            self.model.load_state_dict(self.good)
        row |= {"images_per_second": images / seconds, "seconds": seconds}
        self.record(row)

    def is_finite(self, means: dict[str, float]) -> bool:
        """Return True if the losses and weights of all processes are finite."""
        finite = all(map(math.isfinite, means.values()))
        return self.ranks.agree(finite and checkpoint.not_finite(self.model) <= self.infinite)

    def pass_over_data(self, epoch: int) -> dict[str, float]:
        """Train for one epoch and return the mean of every term and the number of examples."""
        config, model, first = self.config, self.model, epoch * self.loader.steps
        model.train()
        model.before_epoch(epoch, config.epochs)
        torch.manual_seed(noise_seed(config.seed, epoch, self.fabric.global_rank))
        with self.step.begin():
            for number, (x, y) in enumerate(self.loader.epoch(epoch), start=first):
                self.step(x, y, self.scale(number))
                self.bar.step()
            return self.step.means()

    def scale(self, step: int) -> float:
        """Return the learning rate at a step, as a factor of the full one."""
        return factor(self.config.schedule, step, self.loader.steps, self.config.epochs)

    def scores(self, epoch: int) -> dict[str, float] | None:
        """Return the validation metrics if they are due; None if the predictions are not finite."""
        every, last = self.config.validate_every, epoch + 1 == self.config.epochs
        due = every and len(self.splits.val) and ((epoch + 1) % every == 0 or last)
        if not due:
            return {}
        return self.ranks.rank_zero(self.validated)

    def validated(self) -> dict[str, float] | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotFittedWarning)  # after_fit is still to come
                own = make_evaluator(self.validation.info, self.fabric.device)
                found = self.validation.over(self.splits.val, own).metrics()
        except NotFinite:
            return None
        return {f"val_{name}": value for name, value in found.items()}

    def record(self, row: Row) -> None:
        """Show an epoch's numbers, log them, and save a checkpoint if one is due."""
        self.training.rows.append(row)
        self.bar.epoch(row)
        if self.board is not None:
            for name, value in row.items():
                self.board.add_scalar(name, value, row["epoch"])
        over = self.training.epochs == self.config.epochs or self.training.diverged is not None
        if self.writer is not None:
            self.writer.write_log(self.training.rows)
        if over or self.training.epochs % self.config.checkpoint_every == 0:
            if self.writer is not None:
                self.writer.save_checkpoint(self.state())
            self.saved = self.training.epochs

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, which any number of processes can resume.

        No generators and no schedule: both follow from the epoch.
        """
        progress = asdict(self.training)
        del progress["rows"]  # they are in the log
        return {
            **progress,
            "model": self.model.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
        }

    def restore(self, folder: RunDir, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; the model has its weights already."""
        self.step.optimizer.load_state_dict(state.pop("optimizer"))
        self.step.reset()
        self.fabric.strategy.precision.load_state_dict(state.pop("precision"))
        diverged = state["diverged"] is not None
        rows = folder.log(epochs=state["epochs"] + diverged)
        self.training = Training(**state, rows=rows)
        self.saved = self.training.epochs

    def farewell(self) -> str:
        done, of = self.training.epochs, self.config.epochs
        if self.folder is None:
            return f"stopped after {done} of {of} epochs; without a folder nothing was kept."
        where = f"goes on after epoch {self.saved}" if self.saved else "starts again"
        return (
            f"stopped after {done} of {of} epochs. Resume with: lpbnn train --resume "
            f"{self.folder.path} (it {where})."
        )


def line(row: Mapping[str, float]) -> str:
    """Return the numbers of an epoch in one line.

    >>> line({"epoch": 3, "lr": 0.1, "loss": 0.4123, "nll": 0.4, "images_per_second": 41234.5})
    'loss 0.4123  nll 0.4  41,234 images/s'
    """
    numbers = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in row.items() if k not in TIMINGS]
    return "  ".join([*numbers, f"{int(row['images_per_second']):,} images/s"])


class Bar(Progress):
    """The progress of a training on the standard error: a bar on a terminal, else a line per epoch.

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

    def step(self) -> None:
        """Show that one more step is done."""
        if not self.disable:
            self.update(self.bar, advance=1)

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
