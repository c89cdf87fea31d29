"""What a person sees of a training: nothing, lines, a bar, TensorBoard."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.loop import Training, fit
from lpbnn.training.rundir import RunDir

Make = Callable[..., RunConfig]


def trained(config: RunConfig, splits: Splits, **options: Any) -> tuple[UncertainModel, Training]:
    model = build_model(config, DataInfo.of(splits))
    return model, fit(model, splits, config, **options)


def prepared(path: Path, config: RunConfig, splits: Splits) -> RunDir:
    folder = RunDir(path)
    folder.prepare(config, DataInfo.of(splits))
    return folder


def test_silence_and_lines(make: Make, splits: Splits, capfd: pytest.CaptureFixture[str]) -> None:
    trained(make(), splits)
    assert capfd.readouterr() == ("", "")
    trained(make(progress=True), splits)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "nll " in err
    assert "val accuracy " in err
    assert " images/s" in err


def test_a_terminal_gets_a_bar(
    make: Make, splits: Splits, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trained(make(progress=True), splits)
    err = capfd.readouterr().err
    assert "epoch 2/2" in err
    assert "images/s" in err


def test_tensorboard_where_it_is_installed(make: Make, splits: Splits, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = make(tensorboard=True)
    trained(config, splits, folder=prepared(tmp_path, config, splits))
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_tensorboard_that_is_missing_is_told_before_training(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lpbnn\[logs\]'"):
        trained(make(tensorboard=True), splits)
