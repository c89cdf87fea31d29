"""The command: what it prints, what it leaves, and how it fails (one message, exit code 2)."""

import csv
import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lpbnn import cli, experiments, methods, predict, source
from lpbnn.data.files import read_images
from lpbnn.training.run import load_run
from lpbnn.training.rundir import RunDir

FAST = ["--method", "mcp", "--backbone", "mlp", "--epochs", "2", "--device", "cpu", "--no-progress"]
FAST += ["--evaluate.examples", "1"]


def lpbnn(*args: object) -> None:
    cli.main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mcp"
    lpbnn("train", *FAST, "-o", folder)
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "digit.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)
    return path


def failing(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        lpbnn(*args)
    assert stopped.value.code == 2
    return " ".join("".join(capsys.readouterr()).split())  # as one line, however it was wrapped


def test_ls_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    lpbnn("ls")
    shown = capsys.readouterr().out
    for name in (
        *methods.names(),
        "wrn-28-10",
        "lenet",
        "digits",
        "cifar10",
        "stability",
        "table1",
    ):
        assert name in shown
    lines = [line.strip() for line in shown.splitlines()]
    first = lines[lines.index("methods") + 1]  # right below the title
    assert first.split()[0] == methods.names()[0]


@pytest.mark.parametrize("method", methods.names())
def test_ls_of_a_method_shows_every_option(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    fields = dataclasses.fields(methods.load(method).Config)
    options = methods.options(method)
    assert [option.name for option in options] == [field.name for field in fields]
    for option, field in zip(options, fields, strict=True):
        assert option.description, f"{option.name} has no comment in the Config of {method}"
        assert option.default == field.default
    lpbnn("ls", method)
    shown = capsys.readouterr().out
    for option in options:
        assert f" {option.name} " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_comment_of_an_option_may_be_in_any_of_three_places(tmp_path: Path) -> None:
    (tmp_path / "commented.py").write_text(OPTIONS)
    sys.path.insert(0, str(tmp_path))
    try:
        found = [
            (option.name, option.default, option.description)
            for option in source.config_options(importlib.import_module("commented").Config)
        ]
    finally:
        sys.path.remove(str(tmp_path))
    assert found == [
        ("beside", 1, "on its line"),
        ("inherited", 3, "of the base"),
        ("above", None, "above it, on two lines"),
        ("wrapped", "a long one", "inside"),
        ("ignored", 0, "after the tool's"),
        ("documented", 2, "in the docstring, on two lines."),
        ("silent", "", ""),
    ]


OPTIONS = '''
from dataclasses import dataclass

@dataclass
class Base:
    beside: int = 1  # on its line
    inherited: int = 2  # of the base

@dataclass
class Config(Base):
    """Options.

    Args:
        documented: in the docstring,
            on two lines.

    Not an option: this.
    """

    # above it,
    # on two lines
    above: int | None = None
    wrapped: str = (
        "a long one"  # inside
    )
    ignored: int = 0  # type: ignore[assignment]  # after the tool's
    documented: int = 2
    silent: str = ""
    inherited: int = 3
'''


def test_ls_fits_80_columns_and_names_the_nearest_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lpbnn("ls")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert "Did you mean 'lpbnn'?" in failing(capsys, "ls", "lpbn")


def test_help_reads(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ("train", "eval", "experiment", "predict", "bench")
    for args in (["--help"], *([command, "--help"] for command in commands)):
        with pytest.raises(SystemExit) as stopped:
            lpbnn(*args)
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert "usage: lpbnn" in shown
        assert "``" not in shown


def test_help_lists_a_command_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lpbnn("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    first, _, rest = experiments.text("demo").partition("\n\n")
    assert " ".join(first.split()) in shown
    assert " ".join(rest.split())[:40] not in shown


def test_train_compare_report_predict(
    trained: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads((trained / "results.json").read_text())["method"] == "mcp"
    lpbnn("compare", trained)
    assert "MCP" in capsys.readouterr().out
    page = tmp_path / "report.html"
    lpbnn("report", trained, "-o", page)
    assert page.read_text().startswith("<!")
    assert f"wrote {page}\n" in capsys.readouterr().out
    lpbnn("report", trained, "-o", page)
    assert f"wrote {page} (replaced the older one)\n" in capsys.readouterr().out
    lpbnn("predict", trained, image, image)
    shown = capsys.readouterr().out
    for column in ("label", "confidence", "total", "aleatoric", "epistemic"):
        assert column in shown
    lpbnn("eval", trained, "--batch-size", 50)
    settings = json.loads((trained / "results.json").read_text())["evaluate"]
    assert (settings["batch_size"], settings["examples"]) == (50, 1)  # what is not given stays
    lpbnn("calibrate", trained)
    shown = capsys.readouterr().out
    assert "before  calibrated" in shown
    assert "temperature " in shown
    lpbnn("compare", trained, trained)
    shown = capsys.readouterr().out
    assert "n=2" not in shown  # the same run twice is one run
    assert "rows differ" not in shown
    other = tmp_path / "other"
    lpbnn("train", *FAST, "--method", "edl", "--epochs", 1, "-o", other)
    capsys.readouterr()
    lpbnn("compare", trained, other)
    assert "The rows differ in epochs (2, 1)." in capsys.readouterr().out


def test_train_says_where_its_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / ("a-long-name-" * 12)  # it stays on one line
    for args in (("train", *FAST, "-o", run), ("train", "--resume", run)):
        lpbnn(*args)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"run folder: {run}"
        assert lines[-1] == f"finished; run folder: {run}"


def test_answers_as_numbers(
    trained: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of any width when piped; files with all of it, exactly what the library says."""
    deep = tmp_path / ("a-long-name-" * 12) / "[1] 2, 3.png"
    deep.parent.mkdir()
    shutil.copy(image, deep)
    blank = tmp_path / "blank.png"
    Image.new("L", (8, 8)).save(blank)
    lines, objects = tmp_path / "new" / "answers.csv", tmp_path / "answers.json"
    lpbnn("predict", trained, deep, blank, "-o", lines)
    shown = capsys.readouterr().out
    assert str(deep) in shown
    assert str(blank) in shown
    lpbnn("predict", trained, deep, blank, "-o", objects)
    with lines.open(newline="") as file:
        rows = list(csv.DictReader(file))
    answers = json.loads(objects.read_text())
    model, _, info = load_run(trained)
    p = predict(model, info.normalise(read_images([deep, blank], info.shape)), samples=4, seed=0)
    for i, (row, answer, path) in enumerate(zip(rows, answers, (deep, blank), strict=True)):
        label = info.classes[int(p.labels[i])]
        assert (
            (row["file"], row["label"]) == (answer["file"], answer["label"]) == (str(path), label)
        )
        for name in ("confidence", "total", "aleatoric", "epistemic", "ood_score"):
            value = float(getattr(p, name)[i])
            assert float(row[name]) == answer[name] == value
        assert [float(row[f"p({c})"]) for c in info.classes] == p.probs[i].tolist()
        assert answer["probabilities"] == dict(zip(info.classes, p.probs[i].tolist(), strict=True))
    assert list(rows[0])[:3] == ["file", "label", "confidence"]


def test_answers_that_cannot_be_given(
    trained: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in (tmp_path / "maps", tmp_path / "answers.txt"):
        said = failing(capsys, "predict", trained, image, "-o", out)
        assert f"{out} is neither a .csv nor a .json file" in said
        assert not out.exists()


def test_options_reach_method_backbone_and_data(tmp_path: Path) -> None:
    lpbnn(
        "train", *FAST, "--method", "lpbnn", "-o", tmp_path / "run",
        "--method.members", 2, "--method.weighting", "equation", "--backbone.hidden", 8,
        "--optim.lr", 0.01,
    )  # fmt: skip
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["method_options"]["members"] == 2
    assert config["method_options"]["weighting"] == "equation"
    assert config["method_options"]["latent"] == 32  # defaults are written out too
    assert config["backbone_options"] == {"hidden": [8]}
    assert config["optim"]["lr"] == 0.01


def test_a_wrong_option_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--optim.lr" in failing(capsys, "train", "--optim.lrr", 1)
    assert "Did you mean 'lpbnn'" in failing(capsys, "train", "--method", "lpbn")
    said = failing(capsys, "train", "--method.memberz", 2)
    assert "--method.members" in said
    assert "expected a valid integer" not in said
    assert "invalid choice" in failing(capsys, "train", "--method.variant", "papr").lower()
    assert "2.5" in failing(capsys, "train", "--method.members", 2.5)
    assert "digits" in failing(capsys, "train", "--data", "digit")
    assert "lenet" in failing(capsys, "train", "--backbone", "lenett")
    said = failing(capsys, "train", "--method.members", -1)
    assert said == "error: members=-1: expected an integer of at least 1."
    said = failing(capsys, "train", "--optim.lr", -1)
    assert "optim.lr is -1.0; expected a number greater than 0" in said
    assert "tyro" not in said
    assert "lpbnn train --help" in said


def test_a_wrong_command_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'trian'. Did you mean 'train'?" in failing(capsys, "trian")
    said = failing(capsys, "experiment", "stabilty")
    assert "unknown experiment 'stabilty'. Did you mean 'stability'?" in said
    assert "Fix: lpbnn train --method lpbnn" in failing(capsys, "train", "lpbnn")


def test_bad_folders_and_files(
    trained: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    assert "none" in failing(capsys, "compare", missing)
    said = failing(capsys, "train", "--config", missing)
    assert "none could not be read: No such file or directory. Fix: check the path" in said
    assert "none" in failing(capsys, "predict", missing, image)
    assert "none" in failing(capsys, "train", "--resume", missing)
    assert "no such file" in failing(capsys, "predict", trained, tmp_path / "no.png")
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:40])
    assert "cannot be read" in failing(capsys, "predict", trained, broken)
    assert "no image was given" in failing(capsys, "predict", trained)
    for command in (["compare"], ["report"]):
        assert f"no run folder was given. Fix: lpbnn {command[0]} runs/*" in failing(
            capsys, *command
        )
    assert "holds a finished run" in failing(capsys, "train", *FAST, "-o", trained)
    assert "cifar" in failing(capsys, "train", "--data", "cifar10", "--data-root", tmp_path)


def test_a_folder_of_runs_is_no_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = trained.parent, ("-o", trained.parent / "new")
    for command in (
        ["join", runs, *out],
        ["join", runs, trained, *out],
        ["eval", runs],
        ["predict", runs, "a.png"],
        ["train", "--resume", runs],
    ):
        said = failing(capsys, *command)
        assert f"{runs} is a folder of runs, no run itself: it holds {trained.name}." in said
        assert f"{runs}/*" in said  # whole, to be copied
    assert "give a new or empty folder" in failing(capsys, "train", *FAST, "-o", runs)


def test_folders_that_hold_runs_stand_for_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``lpbnn report runs/*`` does after ``make demo``, whose runs are in runs/demo."""
    runs = tmp_path / "runs"
    for name in ("mcp-0", "demo/mcp-1", "demo/deep/mcp-2", "demo/stopped"):
        shutil.copytree(trained, runs / name)
    (runs / "demo" / "stopped" / "results.json").unlink()
    (runs / "empty").mkdir()
    given = [runs / "mcp-0", runs / "demo"]
    lpbnn("compare", *given)
    shown = capsys.readouterr().out
    assert "n=3" in shown
    assert f"left out: {runs / 'demo' / 'stopped'} is not finished" in shown
    lpbnn("report", *given, "-o", tmp_path / "page.html")
    assert "from 3 runs" in (tmp_path / "page.html").read_text()
    assert "empty has no" in failing(capsys, "compare", runs / "empty")


def test_a_network_that_cannot_take_the_data_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failing(
        capsys, "train", "--data", "diabetes", "--backbone", "lenet", "-o", tmp_path / "run"
    )
    assert "'lenet' cannot take 'diabetes', whose examples are of shape (10,)" in said
    assert not (tmp_path / "run").exists()


def test_paths_of_the_evaluation_are_checked_before_training(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--evaluate.corruptions", "--evaluate.corruption-root", image / "inside"]
    said = failing(capsys, "train", *FAST, *options, "-o", tmp_path / "run")
    assert "lacks gaussian_noise.npy" in said
    assert not (tmp_path / "run").exists()


def test_resuming_takes_the_settings_of_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failing(capsys, "train", "--resume", trained, "--epochs", 8, "--backbone.dropout", 0.5)
    assert "cannot take backbone.dropout, epochs" in said
    lpbnn("train", "--resume", trained, "--device", "cpu")  # where it runs may be chosen anew
    assert "test set: Accuracy" in capsys.readouterr().out


def measured_with(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["evaluate"]


@pytest.fixture
def fourfold(trained: Path, tmp_path: Path) -> Path:
    """A run that was measured with other settings than the usual ones."""
    folder = Path(shutil.copytree(trained, tmp_path / "fourfold"))
    config = json.loads((folder / "config.json").read_text())
    config["evaluate"] |= {"samples": 4, "severities": [1, 5]}
    RunDir(folder).write("config.json", json.dumps(config).encode())
    results = json.loads((folder / "results.json").read_text())
    RunDir(folder).write_results({**results, "evaluate": config["evaluate"]})
    return folder


def test_measuring_again_changes_what_is_typed_and_nothing_else(fourfold: Path) -> None:
    before = measured_with(fourfold)
    lpbnn("eval", fourfold, "--samples", 1)  # the usual value, which the run does not have
    assert measured_with(fourfold) == {**before, "samples": 1}
    lpbnn("eval", "--no-ood", fourfold)
    assert measured_with(fourfold) == {**before, "samples": 1, "ood": False}  # as measured last
    lpbnn("train", "--resume", fourfold)  # nothing typed: nothing is measured anew
    assert measured_with(fourfold) == {**before, "samples": 1, "ood": False}


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_resuming_changes_what_is_typed_and_nothing_else(fourfold: Path, state: str) -> None:
    before = measured_with(fourfold)
    if state == "stopped":
        (fourfold / "results.json").unlink()
    lpbnn("train", "--resume", fourfold, "--evaluate.batch-size", 64, "--evaluate.examples", 4)
    assert measured_with(fourfold) == {**before, "batch_size": 64, "examples": 4}
    if state == "stopped":
        config = json.loads((fourfold / "config.json").read_text())
        assert config["evaluate"] == measured_with(fourfold)
        assert (config["device"], config["progress"]) == ("cpu", False)  # not typed: not the usual


def test_resuming_takes_a_usual_value_where_the_run_has_another(trained: Path) -> None:
    """What the run is measured with may change; what it was trained with may be repeated, not changed."""
    lpbnn("train", "--resume", trained, "--epochs", 2, "--evaluate.batch-size", 256)
    assert measured_with(trained)["batch_size"] == 256


def test_resuming_refuses_what_it_would_not_heed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ("train", "--resume", trained)
    assert "cannot take epochs." in failing(
        capsys, *resume, "--epochs", 15
    )  # the usual is typed too
    assert "cannot take optim.parts.a." in failing(capsys, *resume, "--optim.parts", "a", 2)
    assert "cannot take out." in failing(capsys, *resume, "-o", tmp_path / "other")
    assert "cannot take overwrite." in failing(capsys, *resume, "--overwrite")


def test_settings_that_need_each_other_are_checked_together(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of the activations is kept by a compiled step, which this run has and nobody typed."""
    folder = Path(shutil.copytree(trained, tmp_path / "compiled"))
    config = json.loads((folder / "config.json").read_text()) | {"compile": True}
    RunDir(folder).write("config.json", json.dumps(config).encode())
    lpbnn("train", "--resume", folder, "--memory-budget", 0.5)
    assert "without compile" in failing(
        capsys, "train", "--resume", trained, "--memory-budget", 0.5
    )


def test_a_stopped_run_does_not_stand_in_the_way(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(trained, stopped)
    (stopped / "results.json").unlink()
    lpbnn("compare", trained, stopped)
    shown = " ".join(capsys.readouterr().out.split())
    assert "MCP" in shown
    assert "lpbnn train --resume" in shown
    assert "not finished" in failing(capsys, "compare", stopped)


def test_weights_of_another_architecture(
    trained: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    lpbnn("train", *FAST, "-o", other, "--backbone.hidden", 8)
    capsys.readouterr()
    weights = (other / "weights.safetensors").read_bytes()
    (other / "weights.safetensors").write_bytes((trained / "weights.safetensors").read_bytes())
    assert "weights" in failing(capsys, "predict", other, image)
    (other / "weights.safetensors").write_bytes(weights[:100])
    assert "weights" in failing(capsys, "predict", other, image)


METHOD = '''"""Halved: a new method in one file, half as sure as the plain network."""

import dataclasses

from lpbnn.methods.mcp import MCP


@dataclasses.dataclass(frozen=True)
class Config:
    num_data: int | None = None


class Halved(MCP):
    def outputs(self, *args, **kwargs):
        return super().outputs(*args, **kwargs) / 2


def build(net, config, **model_options):
    return Halved(net, **model_options)
'''


def test_a_new_method_is_one_new_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halved.py").write_text(METHOD)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setitem(methods._OWN, "halved", "lpbnn.methods.halved")  # as a new process finds it
    lpbnn("ls")
    assert "Halved: a new method" in capsys.readouterr().out
    lpbnn("train", *FAST, "--method", "halved", "-o", tmp_path / "run")
    lpbnn("compare", tmp_path / "run")
    assert "halved" in capsys.readouterr().out.lower()
    lpbnn("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert "halved" in (tmp_path / "page.html").read_text().lower()
    sys.modules.pop("lpbnn.methods.halved")


def test_a_run_without_its_weights_is_compared_and_reported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many runs are kept by their numbers, without the large files."""
    copy = tmp_path / "mcp-0"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("*.pt", "*.safetensors", "*.npz"))
    lpbnn("compare", copy, "--format", "markdown")
    assert "| MCP | 1 |" in capsys.readouterr().out
    lpbnn("report", copy, "-o", tmp_path / "page.html")


def test_a_run_is_measured_where_its_data_has_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.RandomState(0)
    for number in range(20):
        path = tmp_path / "here" / "pets" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.randint(0, 256, (8, 8), dtype=np.uint8)).save(path)
    run = tmp_path / "run"
    where = ("--data", "folder", "--data-root", tmp_path / "here" / "pets")
    lpbnn("train", *FAST, *where, "--batch-size", 8, "-o", run)
    then = json.loads((run / "results.json").read_text())
    (tmp_path / "here" / "pets").rename(tmp_path / "animals")
    assert "Fix:" in failing(capsys, "eval", run)
    lpbnn("eval", run, "--data-root", tmp_path / "animals")
    again = ("--evaluate.samples", 2, "--data-root", tmp_path / "animals")
    lpbnn("train", "--resume", run, *again)  # finished: measured again, there
    assert json.loads((run / "results.json").read_text())["test"] == then["test"]
    (tmp_path / "animals" / "cat" / "0.png").rename(tmp_path / "animals" / "dog" / "0.png")
    assert "its fingerprint was" in failing(
        capsys, "eval", run, "--data-root", tmp_path / "animals"
    )


def test_every_option_of_a_backbone_or_data_set_has_a_description() -> None:
    table = source.table()
    silent = [
        f"{name}: {option['name']}"
        for kind in ("backbone", "data")
        for name, entry in table[kind].items()
        for option in entry["options"]
        if not option["help"]
    ]
    assert not silent
