"""Two processes over gloo: the gradients of one process on the joint batch, and one writer."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lpbnn.data import Splits
from lpbnn.engine import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig, files
from lpbnn.engine.run import run
from lpbnn.engine.rundir import FILES, RunDir

Make = Callable[..., RunConfig]

# Every process runs all configs; which one wrote what is seen from what it returned.
WORKER = """
import json, os, sys
import torch
from dataclasses import replace
from lpbnn import data
from lpbnn.engine import RunConfig, RunError
from lpbnn.engine.run import run
torch.set_num_threads(1)
whole = data.load("digits")
splits = replace(
    whole,
    train=whole.train.take(slice(200)),
    val=whole.val.take(slice(50)),
    test=whole.test.take(slice(80)),
    ood={name: part.take(slice(60)) for name, part in whole.ood.items()},
)
root, said = sys.argv[1], {}
for name, config in json.loads(sys.argv[2]).items():
    try:
        said[name] = sorted(run(RunConfig.from_data(config), f"{root}/{name}", splits=splits))
    except RunError as error:
        said[name] = str(error)
with open(f"{root}/rank{os.environ['RANK']}.json", "w") as file:
    json.dump(said, file)
"""


def run_all(command: list[str]) -> None:
    """Run a command that starts others; if they wait for each other for ever, end them all."""
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = running.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGTERM)  # torchrun ends its workers, which lead sessions too
        _, errors = running.communicate()
    assert running.returncode == 0, errors


def test_two_processes_are_one_on_the_joint_batch(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    gradient = {
        "optim": OptimConfig(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0),
        "schedule": ScheduleConfig("constant"),
    }
    configs = {
        # One step at rate 1: what the weights moved by is the gradient of the whole batch.
        "gradient": make(epochs=1, batch_size=200, drop_last=True, **gradient),
        "longer": make(epochs=2, augment=AugmentConfig(1, True, 2)),
        "noisy": make("lpbnn", epochs=1, evaluate=EvalConfig(corruptions=True, severities=(1,))),
        "taken": make(epochs=1),
    }
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "cat.jpg").write_bytes(b"")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = json.dumps({name: config.to_data() for name, config in configs.items()})
    run_all([*command, str(script), str(tmp_path), given])
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for name in ("gradient", "longer", "noisy"):
        assert "test" in first[name]
        assert second[name] == []  # rank 1 neither measured nor wrote
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == sorted(FILES)
    assert "is not empty and no run folder" in first["taken"]
    assert second["taken"] == first["taken"]  # an error reaches both: none is left waiting
    sessions = files.read_json(tmp_path / "gradient" / "environment.json")["sessions"]
    assert [session["processes"] for session in sessions] == [2]

    for name in ("gradient", "longer"):
        run(configs[name], tmp_path / f"{name}-alone", splits=splits)
        alone, shared = (RunDir(tmp_path / path) for path in (f"{name}-alone", name))
        together = shared.state_dict()
        for key, tensor in alone.state_dict().items():
            torch.testing.assert_close(together[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
        for ours, theirs in zip(alone.log(), shared.log(), strict=True):
            assert abs(ours["loss"] - theirs["loss"]) < 1e-5  # the mean over both processes
