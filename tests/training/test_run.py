"""A run folder: complete, read back as it was written, and never mistaken for another."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import lpbnn
from lpbnn import methods
from lpbnn.data import Splits
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, RunError
from lpbnn.training.build import resolved
from lpbnn.training.environment import environment
from lpbnn.training.run import load_run, reevaluate, run
from lpbnn.training.rundir import CONFORMAL, FILES, RunDir

Make = Callable[..., RunConfig]
FIRST_DRAWS = OptimConfig(lr=0.02, nesterov=False)


def test_a_run_leaves_everything(make: Make, splits: Splits, tmp_path: Path) -> None:
    config = make("lpbnn")
    results = run(config, tmp_path / "a" / "b", splits=splits)
    folder = RunDir(tmp_path / "a" / "b")
    assert sorted(p.name for p in folder.path.iterdir()) == sorted({*FILES} - {CONFORMAL})
    assert folder.state() == "finished"
    assert folder.config() == resolved(config)  # every option of the method written out
    assert folder.results() == results
    assert [row["epoch"] for row in folder.log()] == [1, 2]
    (session,) = folder.sessions()
    assert session["versions"]["torch"] == version("torch")
    assert set(session) >= {"commit", "dirty", "command", "device", "python"}
    assert results["train"]["epochs"] == 2
    assert results["train"]["diverged"] is None
    assert results["train"]["epoch_seconds"] == pytest.approx(folder.log()[1]["seconds"])
    assert results["method"] == "lpbnn"
    assert results["evaluate"]["examples"] == 2


@pytest.mark.parametrize("method", methods.names())
def test_a_loaded_run_predicts_as_the_trained_one(
    make: Make, splits: Splits, tmp_path: Path, method: str
) -> None:
    """Whatever the method keeps must be in its weights; the data is not needed."""
    run(make(method, optim=FIRST_DRAWS, epochs=1), tmp_path, splits=splits)
    model, config, info = load_run(tmp_path)
    assert not model.training
    assert info.num_train == 200
    raw = splits.test.inputs
    p = lpbnn.predict(model, info.normalise(raw), seed=config.seed)
    stored = RunDir(tmp_path).arrays()
    torch.testing.assert_close(p.probs, torch.from_numpy(stored["test/probs"]))
    torch.testing.assert_close(p.ood_score, torch.from_numpy(stored["test/scores"]))


def test_a_finished_run_is_not_touched_by_accident(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    first = run(make(), tmp_path, splits=splits)
    with pytest.raises(
        RunError, match="holds a finished run. Fix: overwrite it .*, or give another"
    ):
        run(make(), tmp_path, splits=splits)
    with pytest.raises(RunError, match="exclude each other"):
        run(make(), tmp_path, resume=True, overwrite=True, splits=splits)
    assert run(make(), tmp_path, resume=True, splits=splits) == first
    faster = make(compile=True, memory_budget=0.5)
    assert run(faster, tmp_path, resume=True, splits=splits) == first
    (tmp_path / "notes.txt").write_text("mine")
    second = run(make(seed=1), tmp_path, overwrite=True, splits=splits)
    assert second["seed"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(RunDir(tmp_path).sessions()) == 1


def test_folders_that_are_no_runs(make: Make, splits: Splits, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match="is not empty and no run folder: it holds cat.jpg"):
            run(make(), tmp_path / "photos", splits=splits, **options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="cat.jpg is a file; expected a folder"):
        run(make(), tmp_path / "photos" / "cat.jpg", splits=splits)
    with pytest.raises(RunError, match="nowhere does not exist"):
        run(None, tmp_path / "nowhere", resume=True)
    with pytest.raises(RunError, match="nowhere does not exist"):
        load_run(tmp_path / "nowhere")


def test_damaged_folders_are_told(make: Make, splits: Splits, tmp_path: Path) -> None:
    run(make(), tmp_path, splits=splits)
    folder = RunDir(tmp_path)

    def damaged(name: str, content: bytes | None, use: Callable[[], Any], message: str) -> None:
        before = (tmp_path / name).read_bytes()
        if content is None:
            (tmp_path / name).unlink()
        else:
            folder.write(name, content)  # as it would be in a folder that is not of this program
        with pytest.raises(RunError, match=message):
            use()
        folder.write(name, before)

    def load() -> Any:
        return load_run(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    other = json.dumps(config | {"backbone_options": {"hidden": [8]}}).encode()
    strange = json.dumps(config | {"epochz": 3}).encode()
    gone = json.dumps(config | {"method": "lpbn"}).encode()
    damaged("config.json", b'{"method": ', load, "config.json is damaged: it is no JSON")
    damaged("config.json", strange, load, "has no field 'epochz'. Did you mean 'epochs'")
    damaged("config.json", other, load, r"another architecture; .*\(16, 64\) there, \(8, 64\) here")
    damaged(
        "config.json", gone, load, "cannot be built: unknown method 'lpbn'. Did you mean 'lpbnn'"
    )
    damaged("config.json", None, load, "has no config.json; it holds")
    damaged("data.json", b"[]", load, "data.json does not fit")
    damaged("weights.safetensors", None, load, "has no weights.safetensors")
    whole = (tmp_path / "weights.safetensors").read_bytes()
    damaged("weights.safetensors", whole[:-7], load, "damaged or cut short")
    damaged("results.json", b"{", folder.results, "results.json is damaged")
    (tmp_path / "results.json").unlink()
    with pytest.raises(RunError, match="is not finished: it has no results.json. Fix: resume it"):
        folder.results()
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()

    def resume() -> Any:
        return run(None, tmp_path, resume=True, splits=splits)

    foreign = io.BytesIO()
    torch.save({"model": {}}, foreign)
    for content in (b"", checkpoint[:100], checkpoint[:-300], b"text", foreign.getvalue()):
        damaged("checkpoint.pt", content, resume, "checkpoint.pt is damaged or cut short")


def test_divergence_is_written_as_a_result(make: Make, splits: Splits, tmp_path: Path) -> None:
    results = run(make(optim=OptimConfig(lr=1e30)), tmp_path, splits=splits)
    assert results["train"]["diverged"] == 1
    assert results["train"]["epochs"] == 0
    assert results["train"]["last"]["loss"] is None  # NaN, which JSON lacks
    assert 0 <= results["test"]["accuracy"] <= 1  # of the last finite weights


def test_what_was_asked_for_is_checked_before_training(make: Make, tmp_path: Path) -> None:
    def broken(**changes: Any) -> None:
        run(make(**changes), tmp_path / "a")

    corrupted = EvalConfig(corruptions=True)
    with pytest.raises(ValueError, match="'diabetes' has the task regression"):
        broken(data="diabetes", evaluate=corrupted, backbone_options={})
    with pytest.raises(ValueError, match="frost is '.*none', which is no folder"):
        broken(evaluate=replace(corrupted, frost=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="unknown method 'lpbn'"):
        broken(method="lpbn")
    with pytest.raises(TypeError, match="mcp has no option 'latent'"):
        broken(method_options={"latent": 3})
    assert not (tmp_path / "a").exists()


def test_measuring_again_replaces_the_results(make: Make, splits: Splits, tmp_path: Path) -> None:
    first = run(make("lpbnn"), tmp_path, splits=splits)
    second = reevaluate(tmp_path, EvalConfig(samples=3, examples=1), splits)
    assert second["train"] == first["train"]
    assert second["cost"]["members"] == 12
    assert RunDir(tmp_path).results() == second
    assert RunDir(tmp_path).arrays()["examples/test/members"].shape == (12, 1, 10)
    assert "measured_again" not in first
    assert set(second["measured_again"]) == set(environment())


def test_a_run_is_not_measured_or_resumed_on_data_that_has_changed(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    """Pictures were added to a folder, say: some of those it was trained on may be for testing now."""
    config = make()
    run(config, tmp_path, splits=splits)
    weights = (tmp_path / "weights.safetensors").read_bytes()
    others = [
        (replace(splits, train=splits.train.take(slice(40))), "num_train was 200 and is 40 now"),
        (replace(splits, name="other"), "name was 'digits' and is 'other' now. Fix: give the data"),
    ]
    for other, said in others:
        with pytest.raises(RunError, match=f"the data has changed since .*: its {said}"):
            reevaluate(tmp_path, EvalConfig(examples=1), other)
    (tmp_path / "results.json").unlink()  # as if it had been stopped
    for other, said in others:
        with pytest.raises(RunError, match=said):
            run(config, tmp_path, resume=True, splits=other)
    assert RunDir(tmp_path).data().num_train == len(splits.train)
    assert (tmp_path / "weights.safetensors").read_bytes() == weights
    more = replace(splits, ood={**splits.ood, "more": splits.ood["photos"]})
    assert (
        "more" in run(config, tmp_path, resume=True, splits=more)["ood"]
    )  # what it never saw may grow


def test_a_finished_run_is_measured_again_where_other_measures_are_asked_for(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    config = make("lpbnn")
    first = run(config, tmp_path, splits=splits)
    weights = (tmp_path / "weights.safetensors").read_bytes()
    more = replace(config, evaluate=replace(config.evaluate, samples=3))
    again = run(more, tmp_path, resume=True, splits=splits)
    assert first["cost"]["members"] == 4
    assert again["cost"]["members"] == 12
    assert (tmp_path / "weights.safetensors").read_bytes() == weights
    assert run(more, tmp_path, resume=True, splits=splits) == again
