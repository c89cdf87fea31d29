"""Several processes over gloo are one: its curve, its numbers, one writer; and when one ends, all do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lpbnn.data import Splits
from lpbnn.engine import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig, files
from lpbnn.engine.build import load_data
from lpbnn.engine.evaluate import evaluate
from lpbnn.engine.launch import launch
from lpbnn.engine.run import load_run, run
from lpbnn.engine.rundir import FILES, RunDir
from lpbnn.engine.shares import check_shareable
from lpbnn.model import Model

# Every process runs all configs; which one wrote what is seen from what it returned.
WORKER = """
import json, os, signal, sys
import torch
from dataclasses import replace
from pathlib import Path
from lpbnn import data
from lpbnn.engine import RunConfig, RunError
from lpbnn.engine.feed import Feed
from lpbnn.engine.run import run
from lpbnn.model import Model
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
root, configs, step = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
steps, epoch = 0, Feed.epoch

def kill(self, lr):
    global steps
    steps += 1
    if steps == step and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def spoiled(self, number):
    for x, y in epoch(self, number):
        yield x * (torch.nan if rank == 1 and number == 1 else 1.0), y

if step:
    Model.after_step = kill
whole = data.load("digits")
splits = replace(
    whole,
    train=whole.train.take(slice(200)),
    val=whole.val.take(slice(50)),
    test=whole.test.take(slice(80)),
    ood={name: part.take(slice(60)) for name, part in whole.ood.items()},
)
said = {}
for name, config in configs.items():
    Feed.epoch = spoiled if name == "spoiled" else epoch
    resume = (root / name / "checkpoint.pt").exists()
    try:
        part = splits if config["data"] == "digits" else None
        found = run(RunConfig.from_data(config), root / name, resume=resume, splits=part)
        said[name] = sorted(found)
    except ValueError as error:
        if step:
            raise
        said[name] = str(error)
(root / f"rank{rank}.json").write_text(json.dumps(said))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def together(
    root: Path,
    configs: dict[str, RunConfig],
    kill_at: int = 0,
    launcher: tuple[str, ...] = TORCHRUN,
) -> subprocess.CompletedProcess[str]:
    """Run configs in two processes; if they wait for each other for ever, end them all."""
    script = root / "worker.py"
    script.write_text(WORKER)
    given = json.dumps({name: config.to_data() for name, config in configs.items()})
    command = [sys.executable, *launcher, str(script), str(root), given, str(kill_at)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = running.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGTERM)  # torchrun ends its workers, which lead sessions too
        _, errors = running.communicate()
    return subprocess.CompletedProcess(command, running.returncode, "", errors)


def quick(method: str = "mcp", **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "backbone": "mlp",
        "backbone_options": {"hidden": (16,)},
        "epochs": 2,
        "batch_size": 64,
        "device": "cpu",
        "progress": False,
        "evaluate": EvalConfig(examples=2, batch_size=32),
    }
    return RunConfig(method, **(settings | changes))


GRADIENT: dict[str, Any] = {
    "optim": OptimConfig(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0),
    "schedule": ScheduleConfig("constant"),
}
ADAMW = OptimConfig("adamw", lr=0.01)
CONFIGS = {
    # One step at rate 1: what the weights moved by is the gradient of the whole batch.
    "gradient": quick(epochs=1, batch_size=200, drop_last=True, **GRADIENT),
    "longer": quick(augment=AugmentConfig(1, True, 2)),
    "sharded": quick(
        strategy="fsdp", optim=OptimConfig(clip=0.5), augment=AugmentConfig(1, True, 2)
    ),
    "tradi": quick("tradi"),
    # Batch norm's statistics differ from process to process; three batches of 32 for two of them.
    "normed": quick("duq", backbone="small-cnn", backbone_options={}, optim=OptimConfig(lr=0.01)),
    "noisy": quick(
        "lpbnn",
        epochs=3,
        optim=ADAMW,
        evaluate=EvalConfig(corruptions=True, severities=(1,), examples=0, batch_size=70),
    ),
    "killed": quick("lpbnn", epochs=3, optim=ADAMW, strategy="fsdp"),
    "curves": quick("batchensemble", data="cubic", evaluate=EvalConfig(batch_size=150)),
    "spoiled": quick(epochs=3),
    "hooked": quick("tradi", strategy="fsdp"),
    "taken": quick(epochs=1),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sharded run of two processes, one of which was killed in its second epoch."""
    root = tmp_path_factory.mktemp("killed")
    done = together(root, {"killed": CONFIGS["killed"]}, kill_at=6)
    assert done.returncode != 0
    return root, done.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, killed: tuple[Path, str]) -> Path:
    """Everything in two processes; the killed run goes on."""
    root = tmp_path_factory.mktemp("ran")
    shutil.copytree(killed[0] / "killed", root / "killed")
    (root / "taken").mkdir()
    (root / "taken" / "cat.jpg").write_bytes(b"")
    done = together(root, CONFIGS)
    assert done.returncode == 0, done.stderr
    return root


def test_one_process_writes_and_all_end_alike(ran: Path) -> None:
    first, second = (json.loads((ran / f"rank{rank}.json").read_text()) for rank in (0, 1))
    refused = {"hooked": "'tradi' looks at the weights", "taken": "is not empty and no run folder"}
    for name in CONFIGS:
        if name in refused:
            assert refused[name] in first[name]
            assert second[name] == first[name]  # an error reaches both: none is left waiting
            continue
        assert "test" in first[name]
        assert second[name] == []  # rank 1 wrote nothing
        assert sorted(p.name for p in (ran / name).iterdir()) == sorted(FILES)
    sessions = files.read_json(ran / "gradient" / "environment.json")["sessions"]
    assert [session["processes"] for session in sessions] == [2]


@pytest.mark.parametrize("name", ["gradient", "longer", "sharded", "tradi"])
def test_the_curve_is_that_of_one_process(
    name: str, ran: Path, splits: Splits, tmp_path: Path
) -> None:
    run(CONFIGS[name], tmp_path, splits=splits)
    alone, shared = RunDir(tmp_path), RunDir(ran / name)
    together = shared.state_dict()
    for key, tensor in alone.state_dict().items():
        torch.testing.assert_close(together[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    for ours, theirs in zip(alone.log(), shared.log(), strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5  # the mean over both processes
        assert abs(ours["val_nll"] - theirs["val_nll"]) < 1e-4


@pytest.mark.parametrize("name", ["longer", "normed", "noisy", "killed", "curves"])
def test_the_numbers_are_those_of_one_process_to_the_last_bit(
    name: str, ran: Path, splits: Splits
) -> None:
    model, config, _ = load_run(ran / name)
    found = evaluate(model, splits if config.data == "digits" else load_data(config), config)
    kept = RunDir(ran / name).results()
    written = json.loads(json.dumps(files._finite(found.results)))
    for key in ("test", "uncertainty", "ood", "diversity", "corruption"):
        assert written[key] == kept[key], key
    arrays = RunDir(ran / name).arrays()
    assert arrays.keys() == found.arrays.keys()
    for key, array in found.arrays.items():
        np.testing.assert_array_equal(arrays[key], array, key)


def test_all_stop_when_one_diverges(ran: Path) -> None:
    folder = RunDir(ran / "spoiled")
    assert folder.results()["train"]["diverged"] == 2
    assert folder.results()["train"]["epochs"] == 1
    assert all(tensor.isfinite().all() for tensor in folder.state_dict().values())


def test_a_killed_process_ends_the_run_and_it_goes_on(
    killed: tuple[Path, str], ran: Path, splits: Splits, tmp_path: Path
) -> None:
    root, errors = killed
    assert "Resume with: lpbnn train --resume" in errors
    assert "(it goes on after epoch 1)" in errors
    assert RunDir(root / "killed").state() == "unfinished"
    # With two processes again: bit for bit what the run without the kill has. That one kept all weights in
    # both processes (ddp), this one a half in each (fsdp).
    through, resumed = RunDir(ran / "noisy").state_dict(), RunDir(ran / "killed").state_dict()
    assert through.keys() == resumed.keys()
    assert all(torch.equal(through[key], resumed[key]) for key in through)
    # With one process: other draws, the same run otherwise.
    shutil.copytree(root / "killed", tmp_path / "one")
    results = run(None, tmp_path / "one", resume=True, splits=splits)
    assert results["train"]["epochs"] == 3
    ours, theirs = (RunDir(path).log() for path in (tmp_path / "one", ran / "killed"))
    assert ours[0]["loss"] == theirs[0]["loss"]
    assert abs(ours[-1]["loss"] - theirs[-1]["loss"]) < 0.2


def test_without_torchrun_a_killed_process_ends_the_run_too(splits: Splits, tmp_path: Path) -> None:
    config = replace(CONFIGS["longer"], epochs=3, devices=2)
    done = together(tmp_path, {"run": config}, kill_at=6, launcher=())
    assert done.returncode != 0
    assert "another process of this run has ended: stopped after 1 of 3 epochs" in done.stderr
    run(replace(config, devices=1), tmp_path / "run", resume=True, splits=splits)
    run(replace(config, devices=1), tmp_path / "through", splits=splits)
    resumed, through = (RunDir(tmp_path / name).log() for name in ("run", "through"))
    assert [row["loss"] for row in resumed] == pytest.approx([r["loss"] for r in through], abs=1e-5)


def test_ctrl_c_stops_all_and_one_says_how_to_go_on(tmp_path: Path) -> None:
    settings = "--data digits --method mcp --backbone mlp --device cpu --devices 2 --epochs 9999"
    command = [
        sys.executable,
        "-m",
        "lpbnn",
        "train",
        *settings.split(),
        "-o",
        str(tmp_path / "run"),
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "run" / "checkpoint.pt").exists() and running.poll() is None:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    try:
        _, errors = running.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    assert running.returncode == 130, errors
    assert errors.count("Resume with") == 1, errors
    assert "Traceback" not in errors


def test_what_cannot_be_started_or_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes is 2, .* torchrun --nnodes 2 --nproc-per-node 1"):
        launch(quick(nodes=2))
    model = Model(torch.nn.Identity())
    for changes, what in (({"compile": True}, "compile"), ({"precision": "fp16"}, "fp16")):
        with pytest.raises(ValueError, match=f"does not go with .*{what}"):
            check_shareable(model, quick(strategy="fsdp", **changes))


def test_one_process_has_nothing_to_share(splits: Splits, tmp_path: Path) -> None:
    run(quick(strategy="fsdp"), tmp_path / "fsdp", splits=splits)
    run(quick(), tmp_path / "plain", splits=splits)
    one, two = (RunDir(tmp_path / name).state_dict() for name in ("fsdp", "plain"))
    assert all(torch.equal(one[key], two[key]) for key in one)
