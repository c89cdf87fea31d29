"""Data sets and networks of one's own: found by their module, kept with the run, found again."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from lpbnn import backbones, cli, data, registry
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo
from lpbnn.training.run import load_run, reevaluate
from lpbnn.training.run import run as train
from lpbnn.training.rundir import RunDir

EXAMPLES = Path(__file__).parents[1] / "examples"
FAST = ["--epochs", "1", "--device", "cpu", "--no-progress", "--evaluate.examples", "1"]


@pytest.fixture
def _own_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is no part of anything."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_file.py"
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return path


@pytest.mark.usefixtures("_own_set")
def test_the_command_trains_measures_and_predicts_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "stripes"
    named = ["--data", "own_set:stripes", "--backbone", "own_set:two-layers"]
    options = ["--method.members", "2", "--data.noise", "30", "--backbone.width", "4"]
    cli.main(["train", *named, *options, *FAST, "-o", str(run)])
    assert load_run(run, trust=True).model.members == 2
    assert RunDir(run).data().classes == ("across", "down")
    (run / "results.json").unlink()
    cli.main(["train", "--resume", str(run), "--trust"])
    cli.main(["eval", str(run), "--samples", "2", "--trust"])
    picture = tmp_path / "picture.png"
    Image.new("L", (20, 20)).save(picture)
    capsys.readouterr()
    cli.main(["predict", str(run), str(picture), "--trust"])
    shown = capsys.readouterr().out
    assert "across" in shown or "down" in shown


@pytest.mark.usefixtures("_own_set")
def test_their_options_are_checked_as_those_of_others_are() -> None:
    with pytest.raises(ValueError, match="'own_set:stripes' was given option 'nose'; .* noise"):
        data.load("own_set:stripes", nose=3)
    with pytest.raises(
        ValueError, match="'own_set:two-layers' was given option 'wide'; .* width=16"
    ):
        backbones.build("own_set:two-layers", 2, 1, wide=3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "nobodys_file:shapes",
            r"there is no module 'nobodys_file'. Fix: install it, or .*PYTHONPATH",
        ),
        ("lpbnn.nothing:shapes", r"there is no module 'lpbnn.nothing'"),
        ("lpbnn/data:shapes", r"expected MODULE:NAME, such as"),
        (":shapes", r"expected MODULE:NAME"),
        ("json:loads", r"json has no SETS; expected a dictionary SETS = {'loads': Entry"),
        ("lpbnn.data.digits:letters", r"has no 'letters'. It has: digits"),
    ],
)
def test_what_is_missing_is_told(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        data.load(name)


def test_nothing_but_an_entry_is_called(own: Path) -> None:
    """A run folder from elsewhere names a module, and cannot have it run any of its functions."""
    own.write_text("def load(*args):\n    raise SystemExit\n\nSETS = NETS = {'load': load}\n")
    with pytest.raises(
        ValueError, match=r"SETS\['load'\] is a function; expected lpbnn.data.Entry"
    ):
        data.load("own_file:load")
    with pytest.raises(ValueError, match="expected lpbnn.backbones.Entry"):
        backbones.load("own_file:load")


def test_what_a_file_lacks_itself_is_not_taken_for_the_file(own: Path) -> None:
    own.write_text("import nobodys_library\n")
    with pytest.raises(ModuleNotFoundError, match="nobodys_library"):
        registry.find("own_file:shapes", "SETS", data.Entry)


@pytest.mark.parametrize("key", ["data", "backbone"])
def test_what_a_stored_config_names_is_imported_with_consent_only(
    own: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own.write_text("raise RuntimeError('imported')\n")
    run = tmp_path / "run"
    config = RunConfig("mcp", **{key: "own_file:shapes"})
    RunDir(run).prepare(config, DataInfo.of(data.load("digits")))
    finished = {"evaluate": config.to_data()["evaluate"]}
    RunDir(run).write_results(finished)  # only a finished run is measured again
    for command in (["eval", run], ["predict", run, "a.png"], ["train", "--resume", run]):
        with pytest.raises(SystemExit):
            cli.main([str(word) for word in command])
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"the config in {run} names 'own_file:shapes'" in said
        assert "would import the Python module 'own_file'" in said
        assert "--trust" in said
    for read in (load_run, reevaluate, lambda folder: train(None, folder, resume=True)):
        with pytest.raises(ValueError, match="would import the Python module"):
            read(run)
    (run / "results.json").unlink()  # a finished run has nothing to resume
    with pytest.raises(RuntimeError, match="imported"):
        train(None, run, resume=True, trust=True)


def test_nothing_is_imported_from_inside_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "stored_runs" / "a"
    config = RunConfig("mcp", backbone="stored_runs.a.evil:net")
    RunDir(run).prepare(config, DataInfo.of(data.load("digits")))
    (run / "evil.py").write_text("raise RuntimeError('imported')\n")
    with pytest.raises(ValueError, match="inside the run folder: code is never imported"):
        load_run(run, trust=True)
