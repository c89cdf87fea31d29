"""Starting processes, and how they end: what is refused, SIGTERM, the watch over the others."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import Interrupted, RunConfig
from lpbnn.training.distributed import ending_well, launch
from lpbnn.training.run import run

Make = Callable[..., RunConfig]


def test_what_cannot_be_started_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="devices is 4, but torch finds 1 CUDA device"):
        launch(make(device="cuda", devices=4))


def test_sigterm_is_like_ctrl_c(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: UncertainModel, lr: float) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(UncertainModel, "after_step", end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="Resume with: lpbnn train --resume"):
        run(make(), tmp_path, splits=splits)
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_training_ctrl_c_says_that_nothing_is_lost(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: RunConfig) -> Splits:
        raise KeyboardInterrupt

    monkeypatch.setattr("lpbnn.training.run.load_data", stop)
    with pytest.raises(Interrupted, match="stopped before anything was trained or measured"):
        run(make(), tmp_path)


def test_a_process_ends_when_one_that_it_started_is_gone() -> None:
    """Where no collective notices: the watch alone."""
    code = (
        "import subprocess, time; from lpbnn.training import distributed as d; d.LOOK_EVERY = 0.1; "
        "d._watch([subprocess.Popen(['false'])]); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert "(exit code 1) of this run has ended, so this one does." in done.stderr


NESTED = """
import os, signal
from types import SimpleNamespace
from lpbnn.training import RunError
from lpbnn.training.distributed import ending_well

two = SimpleNamespace(world_size=2)
try:
    with ending_well(two, lambda: "outside"), ending_well(two, lambda: "resume like this"):
        raise RuntimeError("Connection closed by peer")
except RunError as error:
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, which has noticed as well
    print(error)
"""


def test_what_is_said_about_a_lost_process_is_said_even_if_torchrun_ends_this_one() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True)
    assert done.stdout == "another process of this run has ended: resume like this\n", done.stderr


def test_a_block_leaves_sigterm_as_it_was(make: Make) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_well(launch(make()), lambda: ""):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
