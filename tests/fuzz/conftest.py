"""A finished run, and the command in this process, where a traceback is an exception that fails the test."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lpbnn import cli, data
from lpbnn.training import EvalConfig, RunConfig
from lpbnn.training.run import run

Command = Callable[..., int]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a few digits."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    whole = data.load("digits")
    splits = replace(
        whole,
        train=whole.train.take(slice(60)),
        val=whole.val.take(slice(30)),
        test=whole.test.take(slice(30)),
        ood={name: part.take(slice(20)) for name, part in whole.ood.items()},
    )
    config = RunConfig(
        "batchensemble",
        backbone="mlp",
        backbone_options={"hidden": (8,)},
        epochs=1,
        progress=False,
        evaluate=EvalConfig(examples=2),
    )
    run(config, folder, splits=splits)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def command() -> Command:
    """Run ``lpbnn ...`` and return its exit code; a traceback is an exception here."""

    def call(*args: object) -> int:
        try:
            cli.main(list(map(str, args)))
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call
