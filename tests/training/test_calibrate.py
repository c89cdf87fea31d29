"""A run is calibrated on its validation part; whatever reads the folder predicts with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lpbnn
from lpbnn import data
from lpbnn.data import Splits
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, RunError
from lpbnn.training.calibrate import calibrate_run
from lpbnn.training.run import load_run, reevaluate, run
from lpbnn.training.rundir import RunDir

Make = Callable[..., RunConfig]
LONG = {"epochs": 8, "optim": OptimConfig(lr=0.05)}


@pytest.fixture
def held_out(splits: Splits) -> Splits:
    """The digits with enough validation examples for a fit."""
    return replace(splits, val=data.load("digits").val)


def test_a_calibrated_run_predicts_with_its_temperature(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    before = run(make("ensemble", **LONG), tmp_path, splits=held_out)
    results = calibrate_run(tmp_path, splits=held_out)
    found = results["calibration"]
    assert found["before"] == pytest.approx(before["test"])
    assert found["noise_scale"] is None
    model, _, info = load_run(tmp_path)
    assert model.likelihood.scaling is not None
    assert model.likelihood.scaling.scale.item() == pytest.approx(found["scale"])
    p = lpbnn.predict(model, info.normalise(held_out.test.inputs))
    stored = torch.from_numpy(RunDir(tmp_path).arrays()["test/probs"])
    torch.testing.assert_close(p.probs, stored, rtol=1e-4, atol=1e-5)
    assert results["test"] != before["test"]


@pytest.mark.parametrize("method", ["lpbnn", "mcdropout"])
def test_the_noise_scale_travels_with_the_run(
    make: Make, held_out: Splits, tmp_path: Path, method: str
) -> None:
    run(make(method, **LONG), tmp_path, splits=held_out)
    found = calibrate_run(tmp_path, splits=held_out)["calibration"]
    assert (found["noise_scale"] is None) == (found["note"] is not None)
    model, config, info = load_run(tmp_path)
    p = lpbnn.predict(model, info.normalise(held_out.test.inputs), seed=config.seed)
    stored = torch.from_numpy(RunDir(tmp_path).arrays()["test/probs"])
    torch.testing.assert_close(p.probs, stored, rtol=1e-4, atol=1e-5)


def test_a_second_calibration_starts_from_the_run_as_trained(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    run(make("lpbnn", **LONG), tmp_path, splits=held_out)
    first = calibrate_run(tmp_path, splits=held_out)["calibration"]
    assert calibrate_run(tmp_path, splits=held_out)["calibration"] == first
    only = calibrate_run(tmp_path, noise=False, splits=held_out)["calibration"]
    assert only["noise_scale"] is None
    assert only["before"] == first["before"]


def test_measuring_again_keeps_the_calibration(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    run(make("mcp", **LONG), tmp_path, splits=held_out)
    calibrated = calibrate_run(tmp_path, splits=held_out)
    again = reevaluate(tmp_path, EvalConfig(examples=1), held_out)
    assert again["calibration"] == calibrated["calibration"]
    assert again["test"] == pytest.approx(calibrated["test"])


def test_what_cannot_be_calibrated_says_why(make: Make, splits: Splits, tmp_path: Path) -> None:
    run(make("mcp"), tmp_path / "classes", splits=splits)
    with pytest.raises(RunError, match="no validation part"):
        calibrate_run(tmp_path / "classes", splits=replace(splits, val=splits.val.take(slice(0))))
    run(make("mcp", data="diabetes", epochs=1), tmp_path / "numbers")
    with pytest.raises(RunError, match="conformal"):
        calibrate_run(tmp_path / "numbers")
