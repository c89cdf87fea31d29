"""What a trained run says of files: a file that it cannot answer for is named before any map is written."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from lpbnn import cli
from lpbnn.calibration import fit_conformal
from lpbnn.data import Dataset, load
from lpbnn.data.files import read_images
from lpbnn.predict import predict
from lpbnn.report import predict_files
from lpbnn.report.predict_files import Question, answered, segmented
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.rundir import RunDir


def question(method: str, output_stride: int = 16) -> Question:
    """Of an untrained network for pictures of 48x32."""
    net = {"width": 4, "channels": 8, "output_stride": output_stride}
    config = RunConfig(method, backbone="deeplab-resnet18", backbone_options=net)
    info = DataInfo.of(load("street-scenes", train=1, val=1, test=1, size=(32, 48)))
    return Question(build_model(config, info), info, samples=1)


@pytest.mark.parametrize("width", [20, 2])
@pytest.mark.parametrize("method", ["mcp", "lpbnn", "ensemble", "mimo"])
def test_a_picture_too_small_is_named_before_a_map_is_written(
    tmp_path: Path, method: str, width: int
) -> None:
    for name, size in (("a.png", (64, 48)), ("tiny.png", (width, 80))):
        Image.new("RGB", size).save(tmp_path / name)
    ask, out = question(method), tmp_path / "maps"
    with pytest.raises(ValueError, match=f"tiny.png is {width}x80, resized .* Fix: cut it to"):
        segmented(ask, [tmp_path / "a.png", tmp_path / "tiny.png"], out)
    assert not out.exists()


@pytest.mark.parametrize("method", ["mcp", "mcdropout", "lpbnn"])
def test_many_pictures_go_through_the_network_in_parts(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are, so many rows at once; and what is said of each is the same."""
    info = DataInfo.of(load("digits"))
    net = {"dropout": 0.3} if method == "mcdropout" else {}
    config = RunConfig(method, backbone="mlp", backbone_options=net)
    model = build_model(config, info)
    paths = [tmp_path / f"{number}.png" for number in range(9)]
    for path in paths:
        Image.effect_noise((8, 8), 90).save(path)
    sizes: list[int] = []
    within = model.get_submodule("net.drops.0")
    within.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    found = []
    for at_once in (256, 7):  # the check of the first call takes seven rows
        monkeypatch.setattr(predict_files, "AT_ONCE", at_once)
        sizes.clear()
        out = tmp_path / f"{at_once}.JSON"
        answered(Question(model, info, samples=2), paths, out)
        found.append(json.loads(out.read_text()))
    assert max(sizes) <= 7
    for whole, parted in zip(*found, strict=True):
        assert whole.pop("probabilities") == pytest.approx(parted.pop("probabilities"), abs=1e-6)
        assert (whole.pop("file"), whole.pop("label")) == (parted.pop("file"), parted.pop("label"))
        assert whole == pytest.approx(parted, abs=1e-5)


@pytest.mark.parametrize("stride", [8, 16])
def test_a_picture_as_small_as_the_output_stride_is_answered(tmp_path: Path, stride: int) -> None:
    Image.new("RGB", (stride, 32)).save(tmp_path / "a.png")
    segmented(question("lpbnn", stride), [tmp_path / "a.png"], tmp_path / "maps")
    assert (tmp_path / "maps" / "a.npz").exists()


@pytest.mark.parametrize("content", [None, b"hello", b"cut"])
def test_a_damaged_picture_is_named_before_a_map_is_written(
    tmp_path: Path, content: bytes | None
) -> None:
    Image.effect_noise((64, 48), 50).save(tmp_path / "a.png")
    if content is not None:
        whole = (tmp_path / "a.png").read_bytes()
        (tmp_path / "b.png").write_bytes(whole[:900] if content == b"cut" else content)
    with pytest.raises(ValueError, match=r"b.png(: no such file| cannot be read: damaged)"):
        segmented(question("mcp"), [tmp_path / "a.png", tmp_path / "b.png"], tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


@pytest.mark.parametrize("targets", [1, 2])
def test_a_regression_answers_in_the_unit_of_its_targets(tmp_path: Path, targets: int) -> None:
    """Say, the angle of a digit: mean and deviations, to the last digit those of the library."""
    digits = load("digits")
    part = Dataset(digits.train.inputs, torch.randn(len(digits.train), targets))
    unit = {"target_mean": 40.0, "target_std": 7.0}
    none = {"num_classes": None, "classes": (), "ood": {}, **unit}
    splits = replace(digits, task="regression", train=part, val=part, test=part, **none)
    info = DataInfo.of(splits)
    ask = Question(build_model(RunConfig("lpbnn", backbone="mlp"), info), info, samples=2, seed=3)
    paths = [tmp_path / f"[{number}].png" for number in range(3)]
    for path in paths:
        Image.effect_noise((8, 8), 90).save(path)
    lines, objects = tmp_path / "new" / "answers.csv", tmp_path / "answers.JSON"
    for out in (lines, objects):
        table = answered(ask, paths, out)
    with lines.open(newline="") as file:
        rows = list(csv.DictReader(file))
    p = predict(ask.model, info.normalise(read_images(paths, info.shape)), samples=2, seed=3)
    expected = {"mean": p.mean * 7 + 40}
    for name in ("total", "aleatoric", "epistemic"):
        expected[f"{name}_std".removeprefix("total_")] = getattr(p, name).sqrt() * 7
    for i, (row, answer) in enumerate(zip(rows, json.loads(objects.read_text()), strict=True)):
        assert row["file"] == answer["file"] == str(paths[i])
        for name, values in expected.items():
            for k, value in enumerate(values[i].tolist()):
                key = name if targets == 1 else f"{name} {k + 1}"
                assert float(row[key]) == answer[key] == pytest.approx(value, rel=1e-5)
        assert answer["ood_score"] == pytest.approx(p.ood_score[i].item(), rel=1e-5)
        assert len(row) == len(answer) == 2 + 4 * targets
    assert [column.header for column in table.columns] == ["image", *list(rows[0])[1:]]
    assert (p.epistemic > 0).all()
    with pytest.raises(ValueError, match=r"neither a .csv nor a .json .* of a regression run"):
        answered(ask, paths, tmp_path / "maps")


def test_a_run_with_conformal_scores_names_the_classes_of_the_set(tmp_path: Path) -> None:
    digits = load("digits")
    info = DataInfo.of(digits)
    model = build_model(RunConfig("mcp", backbone="mlp"), info)
    held_out = predict(model, info.normalise(digits.val.inputs))
    conformal = fit_conformal(held_out, digits.val.targets.long(), "aps")
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path in paths:
        Image.effect_noise((8, 8), 90).save(path)
    ask = Question(model, info, conformal=(conformal, 0.5))
    table = answered(ask, paths, tmp_path / "a.json")
    answered(ask, paths, tmp_path / "a.csv")
    sets = predict(model, info.normalise(read_images(paths, info.shape))).sets(conformal, 0.5)
    expected = [[info.classes[c] for c in row.nonzero().flatten()] for row in sets]
    assert [row["set"] for row in json.loads((tmp_path / "a.json").read_text())] == expected
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [row["set"] for row in csv.DictReader(file)] == [", ".join(row) for row in expected]
    assert list(table.columns[-1].cells) == [", ".join(row) for row in expected]


def test_a_regression_with_conformal_scores_has_intervals(tmp_path: Path) -> None:
    digits = load("digits")
    part = Dataset(digits.train.inputs[:60], torch.randn(60, 1))
    unit = {"num_classes": None, "classes": (), "ood": {}, "target_mean": 40.0, "target_std": 7.0}
    splits = replace(digits, task="regression", train=part, val=part, test=part, **unit)
    info = DataInfo.of(splits)
    model = build_model(RunConfig("mcp", backbone="mlp"), info)
    conformal = fit_conformal(predict(model, info.normalise(part.inputs)), part.targets)
    Image.effect_noise((8, 8), 90).save(tmp_path / "a.png")
    answered(
        Question(model, info, conformal=(conformal, 0.8)), [tmp_path / "a.png"], tmp_path / "a.json"
    )
    (answer,) = json.loads((tmp_path / "a.json").read_text())
    p = predict(model, info.normalise(read_images([tmp_path / "a.png"], info.shape)))
    low, high = p.interval(0.8, conformal)
    assert answer["lower"] == pytest.approx(low.item() * 7 + 40, rel=1e-5)
    assert answer["upper"] == pytest.approx(high.item() * 7 + 40, rel=1e-5)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_run_on_numbers_takes_no_pictures_and_is_not_loaded_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    info = DataInfo.of(load("diabetes"))
    if task == "classification":
        info = replace(info, task=task, num_classes=2)
    folder = RunDir(tmp_path / "run")
    folder.prepare(RunConfig("mcp", backbone="mlp", data="diabetes"), info)  # it has no weights
    with pytest.raises(SystemExit):
        cli.main(["predict", str(folder.path), str(tmp_path / "a.png")])
    said = " ".join(capsys.readouterr().err.split())
    assert f"is one of {task} on 'diabetes', whose inputs are of shape (10,)" in said
    assert "Fix: in Python, " in said
    assert ("target_std" in said) == (task == "regression")
