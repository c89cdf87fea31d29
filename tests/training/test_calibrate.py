"""A run is calibrated on its validation part; whatever reads the folder predicts with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lpbnn
from lpbnn import data, metrics
from lpbnn.calibration.held_out import CELLS_PER_EXAMPLE
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


def test_noise_that_cannot_be_fitted_is_told_without_a_remedy_that_is_taken_anyway(
    make: Make, held_out: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> float:
        raise ValueError("it is not overconfident. Fix: a temperature.")

    monkeypatch.setattr("lpbnn.training.calibrate.fit_noise_scale", refuse)
    run(make("lpbnn"), tmp_path, splits=held_out)
    found = calibrate_run(tmp_path, splits=held_out)["calibration"]
    assert found["note"] == "it is not overconfident."
    assert found["scale"] > 0


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
    with pytest.raises(RunError, match="it gets intervals"):
        calibrate_run(tmp_path / "numbers", sets="lac")
    with pytest.raises(RunError, match="Fix: --sets lac --by-class"):
        calibrate_run(tmp_path / "classes", splits=splits, by_class=True)
    with pytest.raises(RunError, match="nothing is to be fitted"):
        calibrate_run(tmp_path / "classes", "none", noise=False, splits=splits)
    with pytest.raises(RunError, match="level 90: expected a share"):
        calibrate_run(tmp_path / "classes", sets="lac", level=90, splits=splits)


def test_too_few_examples_for_a_level_leave_the_run_as_it_was(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    run(make("mcp"), tmp_path, splits=held_out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="needs at least 999 held-out examples; there are 90"):
        calibrate_run(tmp_path, sets="lac", level=0.999, splits=held_out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# Conformal sets and intervals


def test_sets_are_stored_with_the_run_and_cover(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    run(make("mcp", **LONG), tmp_path, splits=held_out)
    results = calibrate_run(tmp_path, sets="aps", level=0.8, splits=held_out)
    found = results["calibration"]
    assert found["examples"] + found["conformal"]["examples"] == len(held_out.val)
    stored = RunDir(tmp_path).conformal()
    assert stored is not None
    conformal, level = stored
    assert (conformal.method, level) == ("aps", 0.8)
    assert [type(value) for value in (conformal.penalty, conformal.free_classes)] == [float, int]
    assert len(conformal.scores[0]) == found["conformal"]["examples"]
    model, _, info = load_run(tmp_path)
    sets = lpbnn.predict(model, info.normalise(held_out.test.inputs)).sets(conformal, level)
    labels = held_out.test.targets.long()
    covered = metrics.set_coverage(sets, labels)
    assert found["conformal"]["coverage"] == pytest.approx(covered)
    assert found["conformal"]["size"] == pytest.approx(metrics.set_size(sets))
    assert covered > 0.65  # 80 test examples
    assert reevaluate(tmp_path, EvalConfig(examples=1), held_out)["calibration"] == found


def test_without_a_scaling_sets_use_the_whole_validation_part(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    before = run(make("mcp"), tmp_path, splits=held_out)
    results = calibrate_run(tmp_path, "none", sets="lac", by_class=True, splits=held_out)
    conformal, _ = RunDir(tmp_path).conformal() or (None, None)
    assert conformal is not None
    assert sum(map(len, conformal.scores)) == len(held_out.val)
    assert len(conformal.scores) == 10
    assert results["test"] == pytest.approx(before["test"])


def test_intervals_of_a_regression_are_in_the_targets_unit(make: Make, tmp_path: Path) -> None:
    run(make("ensemble", data="diabetes"), tmp_path)
    found = calibrate_run(tmp_path, intervals="absolute", level=0.8)["calibration"]["conformal"]
    splits = data.load("diabetes")
    conformal, level = RunDir(tmp_path).conformal() or (None, 0.0)
    assert conformal is not None
    model, _, info = load_run(tmp_path)
    low, high = lpbnn.predict(model, info.normalise(splits.test.inputs)).interval(level, conformal)
    low, high = (bound * info.target_std + info.target_mean for bound in (low, high))
    covered = metrics.interval_coverage(low, high, splits.test.targets)
    assert found["coverage"] == pytest.approx(covered)
    assert found["size"] == pytest.approx((high - low).mean().item(), rel=1e-4)


def test_a_new_calibration_removes_the_old_scores(
    make: Make, held_out: Splits, tmp_path: Path
) -> None:
    run(make("mcp"), tmp_path, splits=held_out)
    calibrate_run(tmp_path, sets="lac", splits=held_out)
    calibrate_run(tmp_path, splits=held_out)
    assert RunDir(tmp_path).conformal() is None


def test_no_weights_stand_beside_the_scores_of_others(
    make: Make, held_out: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second calibration is stopped right after its weights were written."""
    run(make("mcp", **LONG), tmp_path, splits=held_out)
    calibrate_run(tmp_path, "none", sets="lac", splits=held_out)
    write = RunDir.save_weights

    def stopped(folder: RunDir, model: torch.nn.Module) -> None:
        write(folder, model)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "save_weights", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate_run(tmp_path, sets="lac", splits=held_out)
    assert load_run(tmp_path).model.likelihood.scaling is not None
    assert RunDir(tmp_path).conformal() is None


def test_sets_of_pixels_come_from_some_of_each_map(tmp_path: Path) -> None:
    config = RunConfig(
        "mcp",
        data="street-scenes",
        data_options={"train": 4, "val": 4, "test": 2, "size": (48, 64)},
        backbone="deeplab-resnet18",
        backbone_options={"width": 4, "channels": 8},
        epochs=1,
        batch_size=2,
        device="cpu",
        progress=False,
        evaluate=EvalConfig(examples=0),
    )
    run(config, tmp_path)
    found = calibrate_run(tmp_path, "none", sets="lac")["calibration"]["conformal"]
    conformal, _ = RunDir(tmp_path).conformal() or (None, None)
    assert conformal is not None
    assert 1000 < len(conformal.scores[0]) <= 4 * CELLS_PER_EXAMPLE
    assert found["coverage"] > 0.5


def test_changed_scores_are_refused(make: Make, held_out: Splits, tmp_path: Path) -> None:
    run(make("mcp"), tmp_path, splits=held_out)
    calibrate_run(tmp_path, sets="lac", splits=held_out)
    path = tmp_path / "conformal.npz"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises(RunError, match="its digest is not the one"):
        RunDir(tmp_path).conformal()
    (tmp_path / "manifest.json").unlink()
    wrong = {"method": "none", "penalty": 0.0, "free_classes": 0, "level": 0.9, "groups": 1}
    fine = {"method": "lac", "level": 0.5, "scores/0": np.array([0.5, 1.0])}
    for changes in (
        {},
        {**fine, "scores/0": np.array([2.0, 1.0])},
        {**fine, "scores/0": np.array(["a"])},
        {**fine, "scores/0": np.array([np.nan])},
        {**fine, "penalty": np.nan},
        {**fine, "free_classes": -1},
    ):
        np.savez(path, **{**wrong, **changes})
        with pytest.raises(RunError, match=r"is damaged.*Fix: calibrate"):
            RunDir(tmp_path).conformal()
