"""A run folder: complete, resumable after anything, and never mistaken for another."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lpbnn
from lpbnn import data, methods
from lpbnn.data import Splits
from lpbnn.engine import EvalConfig, Interrupted, OptimConfig, RunConfig, RunError, files
from lpbnn.engine.run import load_run, reevaluate, run
from lpbnn.engine.rundir import FILES, RunDir
from lpbnn.model import Model

Make = Callable[..., RunConfig]
FIRST_DRAWS = OptimConfig(lr=0.02, nesterov=False)


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_a_run_leaves_everything(make: Make, splits: Splits, tmp_path: Path) -> None:
    config = make("lpbnn")
    results = run(config, tmp_path / "a" / "b", splits=splits)
    folder = RunDir(tmp_path / "a" / "b")
    assert sorted(p.name for p in folder.path.iterdir()) == sorted(FILES)
    assert folder.state() == "finished"
    assert folder.config() == config
    assert folder.results() == results
    assert [row["epoch"] for row in folder.log()] == [1, 2]
    (session,) = files.read_json(folder / "environment.json")["sessions"]
    assert session["versions"]["torch"] == torch.__version__
    assert set(session) >= {"commit", "dirty", "command", "device", "python"}
    assert results["train"]["epochs"] == 2
    assert results["train"]["diverged"] is None
    assert results["method"] == "lpbnn"
    assert results["evaluate"]["examples"] == 2


@pytest.mark.parametrize("method", methods.names())
def test_a_loaded_run_predicts_as_the_trained_one(
    make: Make, splits: Splits, tmp_path: Path, method: str
) -> None:
    """Whatever the method keeps must be in its weights; the data is not needed."""
    run(make(method, optim=FIRST_DRAWS, epochs=1), tmp_path, splits=splits)
    model, config, info = load_run(tmp_path)
    assert not model.training
    assert info.num_train == 200
    raw = splits.test.inputs
    p = lpbnn.predict(model, info.normalise(raw), seed=config.seed)
    stored = RunDir(tmp_path).arrays()
    torch.testing.assert_close(p.probs, torch.from_numpy(stored["test/probs"]))
    torch.testing.assert_close(model.score(p), torch.from_numpy(stored["test/scores"]))


KILLED = """
import os, signal, sys
import torch
from dataclasses import replace
from lpbnn import data
from lpbnn.engine import RunConfig
from lpbnn.engine.run import run
from lpbnn.model import Model
torch.set_num_threads(1)
steps = 0
def after_step(self, lr):
    global steps
    steps += 1
    if steps == 18:  # in the fifth epoch, half an epoch after a checkpoint was due and not made
        os.kill(os.getpid(), signal.SIGKILL)
Model.after_step = after_step
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
    assert len(files.read_json(killed / "environment.json")["sessions"]) == 2


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def after_step(self: Model, lr: float) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Model, "after_step", after_step)


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
    with pytest.raises(RunError, match="holds an unfinished run. Fix: resume it, overwrite it, or"):
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
        patch.setattr("lpbnn.engine.run.evaluate", stop)
        with pytest.raises(Interrupted, match="training is over, the evaluation was stopped"):
            run(make(), tmp_path, splits=splits)
    assert RunDir(tmp_path).state() == "unfinished"
    monkeypatch.setattr(Model, "loss", stop)  # not a step more is trained
    assert run(None, tmp_path, resume=True, splits=splits)["train"]["epochs"] == 2


def test_a_full_disk_keeps_the_checkpoint_before(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, written = make(epochs=4), 0
    write = files.write_atomic

    def fill(path: Path, content: Any) -> None:
        nonlocal written
        written += path.name == "checkpoint.pt"
        if written == 3:
            monkeypatch.setattr(files.os, "fsync", full)
        write(path, content)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lpbnn.engine.rundir.write_atomic", fill)
        with pytest.raises(RunError, match="the disk is full. What was there before is untouched"):
            run(config, tmp_path, splits=splits)
    monkeypatch.undo()
    state = RunDir(tmp_path).checkpoint()
    assert state is not None
    assert state["epochs"] == 2
    assert run(None, tmp_path, resume=True, splits=splits)["train"]["epochs"] == 4


def test_a_finished_run_is_not_touched_by_accident(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    first = run(make(), tmp_path, splits=splits)
    with pytest.raises(RunError, match="holds a finished run. Fix: overwrite it, or give another"):
        run(make(), tmp_path, splits=splits)
    with pytest.raises(RunError, match="exclude each other"):
        run(make(), tmp_path, resume=True, overwrite=True, splits=splits)
    assert run(make(), tmp_path, resume=True, splits=splits) == first
    (tmp_path / "notes.txt").write_text("mine")
    second = run(make(seed=1), tmp_path, overwrite=True, splits=splits)
    assert second["seed"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(files.read_json(tmp_path / "environment.json")["sessions"]) == 1


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


def test_folders_that_are_no_runs(make: Make, splits: Splits, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match="is not empty and no run folder: it holds cat.jpg"):
            run(make(), tmp_path / "photos", splits=splits, **options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="cat.jpg is a file; expected a folder"):
        run(make(), tmp_path / "photos" / "cat.jpg", splits=splits)
    with pytest.raises(RunError, match="nowhere does not exist"):
        run(None, tmp_path / "nowhere", resume=True)
    with pytest.raises(RunError, match="nowhere does not exist"):
        load_run(tmp_path / "nowhere")


def test_damaged_folders_are_told(make: Make, splits: Splits, tmp_path: Path) -> None:
    run(make(), tmp_path, splits=splits)
    folder = RunDir(tmp_path)

    def damaged(name: str, content: bytes | None, use: Callable[[], Any], message: str) -> None:
        before = (tmp_path / name).read_bytes()
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RunError, match=message):
            use()
        (tmp_path / name).write_bytes(before)

    def load() -> Any:
        return load_run(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    other = json.dumps(config | {"backbone_options": {"hidden": [8]}}).encode()
    strange = json.dumps(config | {"epochz": 3}).encode()
    gone = json.dumps(config | {"method": "lpbn"}).encode()
    damaged("config.json", b'{"method": ', load, "config.json is damaged: it is no JSON")
    damaged("config.json", strange, load, "has no field 'epochz'. Did you mean 'epochs'")
    damaged("config.json", other, load, r"another architecture; .*\(16, 64\) there, \(8, 64\) here")
    damaged(
        "config.json", gone, load, "cannot be built: unknown method 'lpbn'. Did you mean 'lpbnn'"
    )
    damaged("config.json", None, load, "has no config.json; it holds")
    damaged("data.json", b"[]", load, "data.json does not fit")
    damaged("weights.safetensors", None, load, "has no weights.safetensors")
    whole = (tmp_path / "weights.safetensors").read_bytes()
    damaged("weights.safetensors", whole[:-7], load, "damaged or cut short")
    damaged("results.json", b"{", folder.results, "results.json is damaged")
    (tmp_path / "results.json").unlink()
    with pytest.raises(RunError, match="is not finished: it has no results.json. Fix: resume it"):
        folder.results()
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()

    def resume() -> Any:
        return run(None, tmp_path, resume=True, splits=splits)

    foreign = io.BytesIO()
    torch.save({"model": {}}, foreign)
    for content in (b"", checkpoint[:100], checkpoint[:-300], b"text", foreign.getvalue()):
        damaged("checkpoint.pt", content, resume, "checkpoint.pt is damaged or cut short")


def test_divergence_is_written_as_a_result(make: Make, splits: Splits, tmp_path: Path) -> None:
    results = run(make(optim=OptimConfig(lr=1e30)), tmp_path, splits=splits)
    assert results["train"]["diverged"] == 1
    assert results["train"]["epochs"] == 0
    assert results["train"]["last"]["loss"] is None  # NaN, which JSON lacks
    assert 0 <= results["test"]["accuracy"] <= 1  # of the last finite weights


def test_what_was_asked_for_is_checked_before_training(make: Make, tmp_path: Path) -> None:
    def broken(**changes: Any) -> None:
        run(make(**changes), tmp_path / "a")

    corrupted = EvalConfig(corruptions=True)
    with pytest.raises(ValueError, match="'diabetes' has the task regression"):
        broken(data="diabetes", evaluate=corrupted, backbone_options={})
    with pytest.raises(ValueError, match="frost is '/nowhere', which is no folder"):
        broken(evaluate=replace(corrupted, frost="/nowhere"))
    with pytest.raises(ValueError, match="unknown method 'lpbn'"):
        broken(method="lpbn")
    with pytest.raises(TypeError, match="mcp has no option 'latent'"):
        broken(method_options={"latent": 3})
    assert not (tmp_path / "a").exists()


def test_measuring_again_replaces_the_results(make: Make, splits: Splits, tmp_path: Path) -> None:
    first = run(make("lpbnn"), tmp_path, splits=splits)
    second = reevaluate(tmp_path, EvalConfig(samples=3, examples=1), splits)
    assert second["train"] == first["train"]
    assert second["cost"]["members"] == 12
    assert RunDir(tmp_path).results() == second
    assert RunDir(tmp_path).arrays()["examples/test/members"].shape == (12, 1, 10)
