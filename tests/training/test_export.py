"""A run as an ONNX file: raw inputs in, what lpbnn predict says out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

import lpbnn
from lpbnn import cli, data, export
from lpbnn.data import Splits
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, RunError
from lpbnn.training.calibrate import calibrate_run
from lpbnn.training.export import export_run
from lpbnn.training.run import load_run, run
from lpbnn.training.rundir import RunDir

Make = Callable[..., RunConfig]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.onnx.*"),
]


def ask(path: Path, raw: torch.Tensor) -> dict[str, torch.Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    values = session.run(None, {"inputs": raw.numpy()})
    return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}


def test_a_run_takes_raw_pixels_and_keeps_its_calibration(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    held_out = replace(splits, val=data.load("digits").val)
    folder, path = tmp_path / "run", tmp_path / "model.onnx"
    config = make("mcdropout", epochs=8, optim=OptimConfig(lr=0.05))
    run(config, folder, splits=held_out)
    calibrate_run(folder, sets="lac", level=0.8, splits=held_out)
    exported = export_run(folder, path, samples=2)
    assert exported.inputs == {"inputs": "uint8 (batch, 1, 8, 8)"}
    raw = splits.test.inputs
    model, config, info = load_run(folder)
    p = lpbnn.predict(model, info.normalise(raw), samples=2, seed=config.seed)
    found = ask(path, raw)
    torch.testing.assert_close(found["probs"], p.probs, atol=1e-5, rtol=1e-4)
    conformal, level = RunDir(folder).conformal() or (None, 0.0)
    assert conformal is not None
    assert torch.equal(found["prediction_set"], p.sets(conformal, level))
    stored = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(stored["classes"]) == list(info.classes)
    assert json.loads(stored["normalisation"])["mean"] == list(info.mean)
    assert stored["config_sha256"] == RunDir(folder).results()["config_digest"]
    assert (stored["method"], stored["level"]) == ("mcdropout", "0.8")
    assert float(stored["temperature"]) == pytest.approx(model.likelihood.scaling.temperature)


def test_a_regression_answers_in_the_targets_unit(make: Make, tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "model.onnx"
    run(make("mcp", data="diabetes"), folder)
    calibrate_run(folder)
    export_run(folder, path)
    raw = data.load("diabetes").test.inputs
    model, _, info = load_run(folder)
    p, found = lpbnn.predict(model, info.normalise(raw)), ask(path, raw)
    mean = p.mean * info.target_std + info.target_mean
    torch.testing.assert_close(found["mean"], mean, atol=1e-2, rtol=1e-4)
    assert ((found["lower"] < found["mean"]) & (found["mean"] < found["upper"])).all()


@pytest.mark.slow
def test_scenes_are_answered_pixel_by_pixel(tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "model.onnx"
    config = RunConfig(
        "lpbnn",
        method_options={"include": ["decoder.*"]},
        data="street-scenes",
        data_options={"train": 4, "val": 2, "test": 2, "size": (32, 48)},
        backbone="deeplab-resnet18",
        backbone_options={"width": 4, "channels": 8},
        epochs=1,
        device="cpu",
        progress=False,
        evaluate=EvalConfig(examples=0),
    )
    run(config, folder)
    calibrate_run(folder, "none", noise=False, sets="aps")
    exported = export_run(folder, path)
    assert exported.difference < 1e-4
    found = ask(path, data.load("street-scenes", train=1, val=1, test=3, size=(32, 48)).test.inputs)
    assert found["label"].shape == found["epistemic"].shape == (3, 32, 48)
    assert found["prediction_set"].shape == found["probs"].shape
    assert found["prediction_set"].dtype == torch.bool


def test_the_command_writes_and_refuses(
    make: Make,
    splits: Splits,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*args: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["export", *map(str, args)])
        assert stopped.value.code == 2
        return " ".join("".join(capsys.readouterr()).split())

    folder, path = tmp_path / "run", tmp_path / "model.onnx"
    run(make("mcp"), folder, splits=splits)
    capsys.readouterr()
    cli.main(["export", str(folder), "-o", str(path)])
    shown = capsys.readouterr().out
    assert "output ood_score" in shown
    assert "largest difference to predict" in shown
    assert "is already there" in failing(folder, "-o", path)
    cli.main(["export", str(folder), "-o", str(path), "--force"])
    assert "does not exist" in failing(tmp_path / "none", "-o", tmp_path / "x.onnx")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert "'lpbnn[export]'" in failing(folder, "-o", tmp_path / "x.onnx")


def test_an_unfinished_run_is_refused(make: Make, splits: Splits, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(make("mcp"), folder, splits=splits)
    (folder / "results.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        export_run(folder, tmp_path / "model.onnx")
