"""Finished runs as one ensemble: their answers averaged, a run like any other, and nothing trained."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lpbnn
from lpbnn import cli
from lpbnn.data import Splits
from lpbnn.experiments.table1 import Config, settings
from lpbnn.metrics import ClassificationMetrics
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, RunError
from lpbnn.training import run as run_module
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.ensemble_from_runs import ensemble_config, ensemble_from_runs
from lpbnn.training.run import load_run, run
from lpbnn.training.rundir import RunDir

Make = Callable[..., RunConfig]
SEEDS = (5, 0, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, splits: Splits) -> list[Path]:
    """Three seeds of a small convolutional network, in bf16 with the channels last."""
    place = tmp_path_factory.mktemp("members")
    config = RunConfig(
        "mcp",
        backbone="lenet",
        epochs=2,
        batch_size=64,
        optim=OptimConfig(lr=0.05),
        precision="bf16",
        channels_last=True,
        device="cpu",
        progress=False,
        evaluate=EvalConfig(examples=2, corruptions=True, severities=(1, 5), corruption_images=20),
    )
    for seed in SEEDS:
        run(replace(config, seed=seed), place / f"mcp-{seed}", splits=splits)
    return [place / f"mcp-{seed}" for seed in SEEDS]


@pytest.fixture(scope="module")
def joined(runs: list[Path], splits: Splits) -> RunDir:
    """Of copies that are gone afterwards: the folder needs none of them."""
    place = runs[0].parent / "gone"
    copies = [Path(shutil.copytree(path, place / path.name)) for path in runs]
    ensemble_from_runs(copies, runs[0].parent / "ensemble-5", splits)
    shutil.rmtree(place)
    return RunDir(runs[0].parent / "ensemble-5")


def test_it_answers_with_the_mean_of_its_members(
    runs: list[Path], joined: RunDir, splits: Splits
) -> None:
    each = [RunDir(path).arrays() for path in runs]
    probs = [torch.from_numpy(found["test/probs"]) for found in each]
    stored = joined.arrays()
    answered = torch.from_numpy(stored["test/probs"])
    torch.testing.assert_close(answered, torch.stack(probs).mean(0), rtol=0, atol=1e-7)
    mean = sum(probs[1:], start=probs[0]) / len(probs)  # in predict's order: to the last bit
    assert torch.equal(answered, mean)
    members = np.concatenate([found["examples/test/members"] for found in each])
    np.testing.assert_array_equal(stored["examples/test/members"], members)

    metrics = ClassificationMetrics()
    metrics.update(torch.from_numpy(stored["test/probs"]), splits.test[:][1])
    expected = {key: pytest.approx(float(value)) for key, value in metrics.compute().items()}
    results = joined.results()
    assert results["test"] == {key: expected[key] for key in results["test"]}
    assert set(results["ood"]) == set(RunDir(runs[0]).results()["ood"])
    assert results["corruption"] is not None
    assert results["diversity"]["test"] is not None

    model, _, info = load_run(joined.path)
    alone = [load_run(path).model for path in runs]
    x = info.normalise(splits.test.inputs)
    p = lpbnn.predict(model, x)
    for j, single in enumerate(alone):
        assert torch.equal(p.members[j], lpbnn.predict(single, x).probs)


def test_its_record_is_that_of_an_ensemble_and_names_the_members(
    runs: list[Path], joined: RunDir
) -> None:
    config, results = joined.config(), joined.results()
    first = RunDir(runs[0]).config()
    as_trained = replace(first, method="ensemble", method_options={"members": 3})
    assert config == resolved(as_trained)
    assert (config.seed, results["seed"], results["method"]) == (5, 5, "ensemble")
    parts = [RunDir(path).results()["train"] for path in runs]
    train = results["train"]
    assert train["seconds"] == pytest.approx(sum(part["seconds"] for part in parts))
    assert train["peak_bytes"] == max(part["peak_bytes"] for part in parts)
    speeds = [part["images_per_second"] for part in parts]
    assert train["images_per_second"] == pytest.approx(1 / sum(1 / v for v in speeds))
    assert train["epoch_seconds"] == pytest.approx(sum(part["epoch_seconds"] for part in parts))
    assert (train["epochs"], train["of"], train["diverged"]) == (2, 2, None)
    commit = RunDir(runs[0]).sessions()[-1]["commit"]
    assert [(one["run"], one["seed"]) for one in train["joined"]] == [
        (path.name, seed) for path, seed in zip(runs, SEEDS, strict=True)
    ]
    assert {one["commit"] for one in train["joined"]} == {commit}
    assert results["cost"]["members"] == 3
    singles = [RunDir(path).results()["cost"]["parameters"] for path in runs]
    assert results["cost"]["parameters"] == sum(singles)


@pytest.mark.parametrize(
    ("members", "here", "expected"),
    [
        ([{"beside": 4}, {"beside": 1}], 1, 4),
        ([{"beside": 4}, {"beside": 1}], 5, 5),
        ([{}, {"beside": 1}], 1, 1),
    ],
)
def test_it_says_how_many_runs_shared_the_device(
    runs: list[Path],
    splits: Splits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    members: list[dict[str, Any]],
    here: int,
    expected: int,
) -> None:
    copies = [Path(shutil.copytree(path, tmp_path / path.name)) for path in runs[:2]]
    for path, session in zip(copies, members, strict=True):
        RunDir(path).write("environment.json", json.dumps({"sessions": [session]}).encode())
    monkeypatch.setenv("LPBNN_RUNS_BESIDE", str(here))
    ensemble_from_runs(copies, tmp_path / "joined", splits)
    (session,) = RunDir(tmp_path / "joined").sessions()
    assert session["beside"] == expected


def test_every_command_takes_it(
    runs: list[Path],
    joined: RunDir,
    splits: Splits,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture, page = tmp_path / "digit.png", tmp_path / "page.html"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture)
    cli.main(["compare", str(runs[1]), str(joined.path)])
    cli.main(["predict", str(joined.path), str(picture)])
    assert "Deep Ensembles" in capsys.readouterr().out
    cli.main(["report", str(joined.path), "-o", str(page)])
    assert "trains one again" not in page.read_text()  # its config alone would train another
    cli.main(["report", str(joined.path), str(runs[1]), "-o", str(page)])
    assert f"{runs[1].name}-again" in page.read_text()
    monkeypatch.setattr(run_module, "fit", lambda *_, **__: pytest.fail("nothing is trained"))
    config = RunDir(runs[0]).config()
    wanted = replace(config, method="ensemble", method_options={"members": 3}, data_root="there")
    copy = Path(shutil.copytree(joined.path, tmp_path / "ensemble-5"))
    assert run(wanted, copy, resume=True, splits=splits) == joined.results()
    fewer = replace(wanted, evaluate=EvalConfig(examples=1))
    again = run(fewer, copy, resume=True, splits=splits)  # measured otherwise
    assert again["test"] == joined.results()["test"]
    assert again["train"] == joined.results()["train"]


def test_it_is_the_row_of_table_1() -> None:
    table = Config(preset=("cifar10-fast",), backbone=("wrn-28-10",))
    members = [
        resolved(settings(table, "mcp", seed, "cifar10-fast", "wrn-28-10")) for seed in range(4)
    ]
    assert ensemble_config(members) == resolved(
        settings(table, "ensemble", 0, "cifar10-fast", "wrn-28-10")
    )


def test_the_command_loads_the_data_itself(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        run(make(seed=seed, epochs=1, data="cubic", backbone_options={}), tmp_path / f"{seed}")
    out = tmp_path / "new" / "ensemble"
    cli.main(["join", str(tmp_path / "0"), str(tmp_path / "1"), "-o", str(out)])
    assert "test set: NLL" in capsys.readouterr().out
    assert RunDir(out).arrays()["test/epistemic_std"].max() > 0


def test_runs_that_were_measured_again_are_joined_as_they_are_now(
    runs: list[Path], splits: Splits, tmp_path: Path
) -> None:
    copies = [Path(shutil.copytree(path, tmp_path / path.name)) for path in runs[:2]]
    few = EvalConfig(examples=1, ood=False)
    run_module.reevaluate(copies[0], few, splits)
    with pytest.raises(RunError, match=r"differ in more.*evaluate.ood: False -> True.*lpbnn eval"):
        ensemble_from_runs(copies, tmp_path / "out", splits)
    run_module.reevaluate(copies[1], replace(few, batch_size=50), splits)  # no other number
    results = ensemble_from_runs(copies, tmp_path / "out", splits)
    assert results["corruption"] is None
    assert not results["ood"]
    assert RunDir(tmp_path / "out").config().evaluate == few


def test_bad_input_is_told_before_anything_is_written(
    runs: list[Path], make: Make, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def refused(message: str, *given: Path, to: Path = out, data: Splits = splits) -> None:
        with pytest.raises(RunError, match=message):
            ensemble_from_runs(given, to, data)
        assert not out.exists()

    def changed(name: str, source: Path = runs[1], **changes: Any) -> Path:
        copy = Path(shutil.copytree(source, tmp_path / name))
        config = RunDir(copy).config()
        config = replace(config, **changes)
        RunDir(copy).write("config.json", config.to_json().encode())
        results = RunDir(runs[1]).results() | {"method": config.method, "seed": config.seed}
        RunDir(copy).write_results(results)
        return copy

    refused("two runs or more; got none. Fix: lpbnn join RUN RUN")
    refused("two runs or more; got .*mcp-5 alone", runs[0])
    refused("nowhere does not exist. Fix", runs[0], tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("empty has no results.json; it holds nothing. Fix", runs[0], tmp_path / "empty")
    refused(
        "mcp-0 are the same run.*Fix: give runs of different seeds, each once",
        runs[0],
        runs[1],
        runs[1],
    )
    same = changed("same", device="auto")
    refused(r"mcp-0 and .*same are the same run: .* seed, 0. Fix", runs[1], same)
    rate = changed("rate", seed=9, optim=OptimConfig(lr=0.2))
    refused(r"differ in more than their seeds: optim.lr: 0.05 -> 0.2. Fix", *runs, rate)
    network = changed("network", seed=9, backbone="small-cnn")
    refused("backbone: 'lenet' -> 'small-cnn'", runs[0], network)
    unfinished = changed("unfinished", seed=9)
    (unfinished / "results.json").unlink()
    refused("unfinished is not finished: it has no results.json. Fix", runs[0], unfinished)
    weightless = changed("weightless", seed=9)
    (weightless / "weights.safetensors").unlink()
    refused("weightless has no weights.safetensors", runs[0], weightless)
    fewer = changed("fewer", seed=9)
    info = json.loads((fewer / "data.json").read_text())
    seven = {"num_classes": 7, "classes": list("abcdefg"), "class_counts": [5] * 7}
    RunDir(fewer).write("data.json", json.dumps({**info, **seven}).encode())
    refused(r"fewer was trained on other data .*num_classes: 7 -> 10.* Fix", runs[0], fewer)
    short = replace(splits, test=splits.test.take(slice(30)))
    refused(r"mcp-5 was trained on other data .*sizes.test: 80 -> 30", *runs, data=short)
    assert DataInfo.of(short).sizes["test"] == 30

    for method in ("lpbnn", "edl"):
        run(make(method, epochs=1), tmp_path / method, splits=splits)
        refused(f"is a run of '{method}'; expected 'mcp'.*--method mcp", runs[0], tmp_path / method)
    run(make(optim=OptimConfig(lr=1e30)), tmp_path / "diverged", splits=splits)
    refused("diverged in epoch 1; expected .* Fix: leave it out", runs[0], tmp_path / "diverged")

    refused("mcp-0 holds a run already. Fix: give a new or empty", *runs, to=runs[1])
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    refused("is not empty and no run folder: it holds cat.jpg", *runs, to=tmp_path / "photos")
    refused("cat.jpg is a file", *runs, to=tmp_path / "photos" / "cat.jpg")


def test_a_join_that_was_stopped_is_never_taken_for_a_run(
    runs: list[Path], splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming it would train an ensemble under the names of these members."""

    def stop(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "prepare", stop)
        with pytest.raises(OSError, match="killed"):
            ensemble_from_runs(runs, tmp_path / "out", splits)
    assert RunDir(tmp_path / "out").state() == "empty"
    assert ensemble_from_runs(runs, tmp_path / "out", splits)["method"] == "ensemble"
