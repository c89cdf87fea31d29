"""Whatever stops a run, it goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lpbnn import data
from lpbnn.atomic import write_atomic
from lpbnn.data import Splits
from lpbnn.methods.tradi import TRADI
from lpbnn.model import UncertainModel
from lpbnn.training import EvalConfig, Interrupted, OptimConfig, RunConfig, RunError, checkpoint
from lpbnn.training.run import run
from lpbnn.training.rundir import RunDir

Make = Callable[..., RunConfig]


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


KILLED = """
import os, signal, sys
import torch
from dataclasses import replace
from lpbnn import data
from lpbnn.training import RunConfig
from lpbnn.training.run import run
from lpbnn.model import UncertainModel
torch.set_num_threads(1)
steps = 0
def after_step(self, lr):
    global steps
    steps += 1
    if steps == 18:  # in the fifth epoch, between the checkpoints of epochs 3 and 6
        os.kill(os.getpid(), signal.SIGKILL)
UncertainModel.after_step = after_step
whole = data.load("digits")
splits = replace(whole, train=whole.train.take(slice(200)), val=whole.val.take(slice(50)))
run(RunConfig.from_json(sys.argv[1]), sys.argv[2], splits=splits)
"""


def test_a_killed_run_ends_with_the_same_weights(make: Make, tmp_path: Path) -> None:
    whole = data.load("digits")
    splits = replace(whole, train=whole.train.take(slice(200)), val=whole.val.take(slice(50)))
    augment = {"pad": 1, "flip": True, "cutout": 2}
    config = RunConfig.from_data(
        make("lpbnn", epochs=6, checkpoint_every=3).to_data() | {"augment": augment}
    )
    command = [sys.executable, "-c", KILLED, config.to_json(), str(tmp_path / "killed")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    killed = RunDir(tmp_path / "killed")
    state = killed.checkpoint()
    assert state is not None
    assert state["epochs"] == 3
    assert len(killed.log()) == 4  # the log was a step ahead; it is taken back
    assert killed.state() == "unfinished"
    resumed = run(None, killed.path, resume=True, splits=splits)
    through = run(config, tmp_path / "through", splits=splits)
    assert same(killed.state_dict(), RunDir(tmp_path / "through").state_dict())
    assert resumed["test"] == through["test"]
    assert [row["loss"] for row in killed.log()] == [
        row["loss"] for row in RunDir(tmp_path / "through").log()
    ]
    assert len(killed.sessions()) == 2


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def after_step(self: UncertainModel, lr: float) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(UncertainModel, "after_step", after_step)


def test_ctrl_c_leaves_a_run_to_resume_and_says_how(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("rank1", epochs=3)
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        with pytest.raises(KeyboardInterrupt) as error:
            run(config, tmp_path / "a", splits=splits)
    assert isinstance(error.value, Interrupted)
    assert f"Resume with: lpbnn train --resume {tmp_path / 'a'}" in str(error.value)
    assert "stopped after 1 of 3 epochs" in str(error.value)
    with pytest.raises(
        RunError, match="holds an unfinished run. Fix: resume it .*, overwrite it .*, or"
    ):
        run(config, tmp_path / "a", splits=splits)
    run(config, tmp_path / "a", resume=True, splits=splits)
    run(config, tmp_path / "b", splits=splits)
    assert same(RunDir(tmp_path / "a").state_dict(), RunDir(tmp_path / "b").state_dict())


def test_ctrl_c_before_the_first_checkpoint(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        with pytest.raises(Interrupted, match="it starts again"):
            run(make(), tmp_path, splits=splits)
    assert run(None, tmp_path, resume=True, splits=splits)["train"]["epochs"] == 2


def test_ctrl_c_while_evaluating(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lpbnn.training.run.evaluate", stop)
        with pytest.raises(Interrupted, match="training is over, the evaluation was stopped"):
            run(make(), tmp_path, splits=splits)
    assert RunDir(tmp_path).state() == "unfinished"
    monkeypatch.setattr(UncertainModel, "loss", stop)  # not a step more is trained
    assert run(None, tmp_path, resume=True, splits=splits)["train"]["epochs"] == 2


def test_a_full_disk_keeps_the_checkpoint_before(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, written = make(epochs=4), 0
    write = write_atomic

    def fill(path: Path, content: Any) -> None:
        nonlocal written
        written += path.name == "checkpoint.pt"
        if written == 3:
            monkeypatch.setattr(os, "fsync", full)
        write(path, content)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lpbnn.training.rundir.write_atomic", fill)
        with pytest.raises(RunError, match="the disk is full. What was there before is untouched"):
            run(config, tmp_path, splits=splits)
    monkeypatch.undo()
    state = RunDir(tmp_path).checkpoint()
    assert state is not None
    assert state["epochs"] == 2
    assert run(None, tmp_path, resume=True, splits=splits)["train"]["epochs"] == 4


def test_resuming_with_another_config_is_refused(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        with pytest.raises(Interrupted):
            run(make(), tmp_path, splits=splits)
    changed = make(optim=OptimConfig(lr=0.05), seed=3)
    with pytest.raises(RunError, match=r"seed: 0 -> 3; optim.lr: 0.1 -> 0.05"):
        run(changed, tmp_path, resume=True, splits=splits)
    harmless = make(evaluate=EvalConfig(samples=2, examples=0), checkpoint_every=2)
    assert run(harmless, tmp_path, resume=True, splits=splits)["evaluate"]["samples"] == 2


def test_networks_drawn_after_the_last_epoch_are_those_of_a_run_that_was_not_stopped(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("tradi")
    run(config, tmp_path / "through", splits=splits)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TRADI, "after_fit", stop)
        with pytest.raises(Interrupted):
            run(config, tmp_path / "stopped", splits=splits)
    torch.randn(3)  # another state of torch's generator
    run(None, tmp_path / "stopped", resume=True, splits=splits)
    through, stopped = (RunDir(tmp_path / name).state_dict() for name in ("through", "stopped"))
    assert same(through, stopped)


def test_a_checkpoint_is_read_onto_the_device_of_the_run() -> None:
    state = dict.fromkeys(checkpoint.KEYS) | {"model": {"weight": torch.ones(3)}}
    content = bytes(checkpoint.to_bytes(state))
    for device in ("cpu", "meta"):
        found = checkpoint.from_bytes(content, device, "checkpoint.pt")
        assert found["model"]["weight"].device.type == device
