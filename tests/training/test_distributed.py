"""Several processes over gloo are one: its curve, its numbers, one writer; and when one ends, all do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from filelock import FileLock

from lpbnn.data import Splits
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig, files
from lpbnn.training.build import load_data
from lpbnn.training.evaluation import evaluate
from lpbnn.training.run import load_run, run
from lpbnn.training.rundir import CONFORMAL, FILES, RunDir

# Every process runs all configs; which one wrote what is seen from what it returned.
WORKER = """
import json, os, signal, sys
import torch
from dataclasses import replace
from pathlib import Path
from lpbnn import data
from lpbnn.training import RunConfig, RunError
from lpbnn.training.dataloading import TrainLoader
from lpbnn.training.run import run
from lpbnn.model import UncertainModel
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
root, configs, victim = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
steps, epoch, after_step = 0, TrainLoader.epoch, UncertainModel.after_step

def kill(self, lr):
    global steps
    steps += 1
    if steps == 6 and rank == 1:  # in the second epoch
        os.kill(os.getpid(), signal.SIGKILL)

def spoiled(self, number):
    for x, y in epoch(self, number):
        yield x * (torch.nan if rank == 1 and number == 1 else 1.0), y

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
    TrainLoader.epoch = spoiled if name == "spoiled" else epoch
    UncertainModel.after_step = kill if name == victim else after_step
    resume = (root / name / "checkpoint.pt").exists()
    try:
        part = splits if config["data"] == "digits" else None
        found = run(RunConfig.from_data(config), root / name, resume=resume, splits=part)
        said[name] = sorted(found)
    except ValueError as error:
        if name == victim:
            raise
        said[name] = str(error)
    (root / f"{victim}-{rank}.json").write_text(json.dumps(said))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def together(
    root: Path,
    configs: dict[str, RunConfig],
    victim: str,
    launcher: tuple[str, ...] = TORCHRUN,
) -> subprocess.CompletedProcess[str]:
    """Run configs in two processes, one of which is killed in the run ``victim``.

    If they wait for each other for ever, all are ended.
    """
    script = root / "worker.py"
    script.write_text(WORKER)
    given = json.dumps({name: config.to_data() for name, config in configs.items()})
    command = [sys.executable, *launcher, str(script), str(root), given, victim]
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
    "clipped": quick(optim=OptimConfig(clip=0.5), augment=AugmentConfig(1, True, 2)),
    "tradi": quick("tradi"),
    # Batch norm's statistics differ from process to process; three batches of 32 for two of them.
    "normed": quick("duq", backbone="small-cnn", backbone_options={}, optim=OptimConfig(lr=0.01)),
    "noisy": quick(
        "lpbnn",
        epochs=3,
        optim=ADAMW,
        evaluate=EvalConfig(corruptions=True, severities=(1,), examples=0, batch_size=70),
    ),
    "curves": quick("batchensemble", data="cubic", evaluate=EvalConfig(batch_size=150)),
    "spoiled": quick(epochs=3),
    "taken": quick(epochs=1),
    "killed": quick("lpbnn", epochs=3, optim=ADAMW),
}
CHILD = quick(epochs=3, devices=2)


class Ran(NamedTuple):
    """Everything in two processes; the last run was killed, and went on without torchrun."""

    root: Path
    errors: str
    later: str  # of another run, killed without torchrun


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    base = tmp_path_factory.getbasetemp()  # pytest-xdist has one below that of all its workers
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-processes"
    with FileLock(f"{root}.lock"):
        if not (root / "said.json").exists():
            _run_everything(root)
    return Ran(root, **json.loads((root / "said.json").read_text()))


def _run_everything(root: Path) -> None:
    (root / "taken").mkdir(parents=True)
    (root / "taken" / "cat.jpg").write_bytes(b"")
    done = together(root, CONFIGS, "killed")
    shutil.copytree(root / "killed", root / "copy")
    again = {"killed": replace(CONFIGS["killed"], devices=2), "child": CHILD}
    later = together(root, again, "child", launcher=())
    assert 0 not in (done.returncode, later.returncode)
    (root / "said.json").write_text(json.dumps({"errors": done.stderr, "later": later.stderr}))


def test_one_process_writes_and_all_end_alike(ran: Ran) -> None:
    said = [json.loads((ran.root / f"killed-{rank}.json").read_text()) for rank in (0, 1)]
    refused = {"taken": "is not empty and no run folder"}
    for name in CONFIGS.keys() - {"killed"}:
        first, second = (one[name] for one in said)
        if name in refused:
            assert refused[name] in first
            assert second == first  # an error reaches both: none is left waiting
            continue
        assert "test" in first
        assert second == []  # rank 1 wrote nothing
        assert sorted(p.name for p in (ran.root / name).iterdir()) == sorted({*FILES} - {CONFORMAL})
    sessions = RunDir(ran.root / "gradient").sessions()
    assert [session["processes"] for session in sessions] == [2]


@pytest.mark.parametrize("name", ["gradient", "longer", "clipped", "tradi"])
def test_the_curve_is_that_of_one_process(
    name: str, ran: Ran, splits: Splits, tmp_path: Path
) -> None:
    run(CONFIGS[name], tmp_path, splits=splits)
    alone, shared = RunDir(tmp_path), RunDir(ran.root / name)
    together = shared.state_dict()
    for key, tensor in alone.state_dict().items():
        torch.testing.assert_close(together[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    for ours, theirs in zip(alone.log(), shared.log(), strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5  # the mean over both processes
        assert abs(ours["val_nll"] - theirs["val_nll"]) < 1e-4


@pytest.mark.parametrize("name", ["longer", "normed", "noisy", "killed", "curves"])
def test_the_numbers_are_those_of_one_process_to_the_last_bit(
    name: str, ran: Ran, splits: Splits
) -> None:
    folder = RunDir(ran.root / name)
    model, config, _ = load_run(folder.path)
    found = evaluate(model, splits if config.data == "digits" else load_data(config), config)
    kept, written = folder.results(), json.loads(json.dumps(files.finite(found.results)))
    for key in ("test", "uncertainty", "ood", "diversity", "corruption"):
        assert written[key] == kept[key], key
    arrays = folder.arrays()
    assert arrays.keys() == found.arrays.keys()
    for key, array in found.arrays.items():
        np.testing.assert_array_equal(arrays[key], array, key)


def test_all_stop_when_one_diverges(ran: Ran) -> None:
    folder = RunDir(ran.root / "spoiled")
    assert folder.results()["train"]["diverged"] == 2
    assert folder.results()["train"]["epochs"] == 1
    assert all(tensor.isfinite().all() for tensor in folder.state_dict().values())


def test_a_killed_process_ends_the_run_and_it_goes_on(ran: Ran, splits: Splits) -> None:
    assert "Resume with: lpbnn train --resume" in ran.errors
    assert "(it goes on after epoch 1)" in ran.errors
    # With two processes again: bit for bit what the run without the kill has.
    through, resumed = (RunDir(ran.root / name).state_dict() for name in ("noisy", "killed"))
    assert through.keys() == resumed.keys()
    assert all(torch.equal(through[key], resumed[key]) for key in through)
    # With one process: other draws, the same run otherwise.
    one = RunDir(ran.root / "copy")
    assert one.state() == "unfinished"
    assert run(None, one.path, resume=True, splits=splits)["train"]["epochs"] == 3
    ours, theirs = one.log(), RunDir(ran.root / "killed").log()
    assert ours[0]["loss"] == theirs[0]["loss"]
    assert abs(ours[-1]["loss"] - theirs[-1]["loss"]) < 0.2


def test_a_killed_process_without_torchrun(ran: Ran, splits: Splits, tmp_path: Path) -> None:
    assert "another process of this run has ended: stopped after 1 of 3 epochs" in ran.later
    config = replace(CHILD, devices=1)
    run(config, ran.root / "child", resume=True, splits=splits)
    run(config, tmp_path, splits=splits)
    resumed, through = RunDir(ran.root / "child").log(), RunDir(tmp_path).log()
    assert [row["loss"] for row in resumed] == pytest.approx([r["loss"] for r in through], abs=1e-5)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What a test starts is stopped by Ctrl-C, however the test itself was started.

    What a script starts in the background (``pytest &``) ignores it, and so does all that is started there.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_all_and_one_says_how_to_go_on(tmp_path: Path) -> None:
    settings = "--data digits --method mcp --backbone mlp --device cpu --devices 2 --epochs 9999"
    command = [*["-m", "lpbnn", "train", "-o"], str(tmp_path / "run"), *settings.split()]
    with subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        checkpoint, latest = tmp_path / "run" / "checkpoint.pt", time.monotonic() + 100
        while not checkpoint.exists() and time.monotonic() < latest:
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; gloo is tested above")
def test_two_gpus_are_one(splits: Splits, tmp_path: Path) -> None:
    config = quick(device="cuda", optim=OptimConfig(clip=0.5))
    done = together(tmp_path, {"shared": config, "killed": config}, "killed")
    assert "Resume with" in done.stderr
    run(config, tmp_path / "alone", splits=splits)
    losses = [[row["loss"] for row in RunDir(tmp_path / n).log()] for n in ("alone", "shared")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
