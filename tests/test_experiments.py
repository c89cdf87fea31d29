"""Experiments run whole in a small form, print the paper's numbers beside ours, and resume."""

import io
import multiprocessing
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markupsafe import Markup
from processes import a_command
from rich.console import Console

from lpbnn import data, experiments, methods
from lpbnn.data import Splits
from lpbnn.experiments import _demo_pictures as pictures
from lpbnn.experiments import _suite, demo, diversity, stability, table1
from lpbnn.experiments._suite import in_processes, run_all
from lpbnn.report.page import Picture
from lpbnn.training import EvalConfig, RunConfig
from lpbnn.training.build import build_model, load_data


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200)


def test_names_and_descriptions() -> None:
    assert {"demo", "stability", "diversity", "calibration", "table1"} <= set(experiments.names())
    for name in experiments.names():
        assert experiments.describe(name).endswith(".")
    with pytest.raises(ValueError, match="stability"):
        experiments.load("stabilty")


@pytest.mark.slow
def test_stability(tmp_path: Path, console: Console) -> None:
    page = tmp_path / "r.html"
    config = stability.Config(
        out=tmp_path, epochs=1, rates=(0.2, 0.01), seeds=2, jobs=1, report=page
    )
    stability.run(config, console)
    shown = console.export_text()
    for text in ("Mean-field BNN (lr=0.2)", "LP-BNN (lr=0.01)", "paper 22.48", "paper 63.73"):
        assert text in shown
    assert page.exists()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    stability.run(config, console)  # finished runs are not trained again
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    console.export_text()
    stability.run(stability.Config(source=tmp_path, report=page), console)
    again = console.export_text()
    rows = [{line for line in text.splitlines() if "(lr=" in line} for text in (shown, again)]
    assert rows[0] == rows[1]


class Finished:
    """What `stability.verdicts` and `diversity.at_chance` read of a run."""

    def __init__(
        self, method: str, lr: float, accuracy: float, diverged: int | None = None
    ) -> None:
        self.method, self.settings, self.diverged = method, {"optim.lr": lr}, diverged
        self.results = {"test": {"accuracy": accuracy}}
        self.data = SimpleNamespace(num_classes=10)

    def at(self, part: str, key: str | None = None) -> Any:
        return self.results[part] if key is None else self.results[part][key]


def test_stability_does_not_call_a_network_at_chance_stable() -> None:
    runs: Any = [
        Finished("lpbnn", 0.01, 0.9),
        Finished("lpbnn", 0.2, 0.9, diverged=3),
        Finished("meanfield", 0.01, 0.11),
    ]
    assert stability.verdicts(runs) == [
        "BNN (mean-field) stays at chance at 0.01.",
        "LP-BNN trains at 0.01; it diverges at 0.2.",
    ]


def test_diversity_warns_of_members_at_chance() -> None:
    runs: Any = [Finished("lpbnn", 0.1, 0.12), Finished("ensemble", 0.1, 0.9)]
    (warning,) = diversity.at_chance(runs)
    assert "lpbnn: 12.0% accuracy is chance" in warning


def test_runs_are_named_by_their_data_network_method_and_seed() -> None:
    options = {"seeds": 2, "methods": ("mcp", "lpbnn")}
    digits = diversity.configs(diversity.Config(preset="digits", **options))
    assert list(digits) == ["digits-mcp-0", "digits-lpbnn-0", "digits-mcp-1", "digits-lpbnn-1"]
    for name, found in digits.items():
        assert name == f"digits-{found.method}-{found.seed}"
    others = diversity.Config(preset="cifar10", backbone="wrn-16-4", **options)
    assert list(diversity.configs(others))[:2] == [
        "cifar10-wrn-16-4-mcp-0",
        "cifar10-wrn-16-4-lpbnn-0",
    ]


def test_the_demo_and_diversity_share_their_settings() -> None:
    assert diversity.settings(diversity.Config(), "lpbnn", 0) == demo.settings("lpbnn", 0)


def test_every_answer_of_the_demo_averages_as_many_predictions() -> None:
    """Four where a method has members; those of one network, and MIMO's heads, have what they have."""
    for name in methods.names():
        run, options = demo.settings(name, 0), methods.load(name).Config()
        assert run.evaluate.samples * getattr(options, "members", 1) in {1, 3, 4}
        assert not run.method_options


def test_the_demo_draws_its_pictures_with_the_numbers_of_this_run() -> None:
    for picture in (pictures.two_moons(steps=3), pictures.regression(steps=3)):
        assert picture.svg.startswith("<svg")
        assert "LP-BNN" in picture.svg
        assert "Adam" in picture.text[-1]  # which settings suit the case
    assert re.search(r"LP-BNN: NLL \S+, coverage \d\.\d\d, AUROC \d\.\d\d", picture.text[1])


@pytest.mark.slow
def test_the_demo_draws_a_street_and_times_a_larger_network() -> None:
    street = pictures.street_scene(epochs=1)
    assert "AUROC total 0." in street.text[1]
    assert "<image" in street.svg
    price, sentence = pictures.cost(repeats=2)
    assert "LP-BNN takes ×" in sentence
    assert "×4.00" in price.text[0]


@pytest.mark.slow
def test_functions_run_in_processes_of_one_thread_each() -> None:
    assert in_processes([torch.get_num_threads] * 2, 2) == [1, 1]


@pytest.mark.slow
def test_the_demos_page_opens_with_pictures_and_ends_with_its_link(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    picture = Picture("moons", "Two moons", ("what they show",), Markup("<svg></svg>"))
    monkeypatch.setattr(demo, "pictures", lambda jobs: [picture])
    page = tmp_path / "a [b] page.html"

    def cost() -> tuple[Picture, str]:
        seen.append(page.read_text())  # the first page, before the runs are compared
        return picture._replace(name="price"), "LP-BNN is cheap"

    monkeypatch.setattr(demo, "measured_cost", cost)
    demo.run(
        demo.Config(out=tmp_path / "d", report=page, seeds=1, methods=("mcp",), jobs=1), console
    )
    (first,), whole = seen, page.read_text()
    assert "what they show" in first
    assert 'id="comparison"' not in first
    order = [whole.index(f'id="{name}"') for name in ("moons", "price", "comparison")]
    assert order == sorted(order)
    assert "<p>LP-BNN is cheap.</p>" in whole
    shown = console.export_text()
    assert "LP-BNN is cheap." in shown
    assert shown.rstrip().endswith(f"the whole report: {page.as_uri()}")


@pytest.mark.slow
def test_diversity_shows_the_runs_of_the_demo(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Picture("moons", "Two moons", ("what they show",), Markup("<svg></svg>"))
    monkeypatch.setattr(demo, "pictures", lambda jobs: [picture])
    monkeypatch.setattr(demo, "measured_cost", lambda: (picture, "LP-BNN is cheap"))
    config = demo.Config(
        out=tmp_path / "demo", report=tmp_path / "r.html", seeds=1, methods=("mcp", "lpbnn"), jobs=2
    )
    assert demo.run(config, console) == tmp_path / "r.html"
    assert "LP-BNN" in console.export_text()
    kept = diversity.Config(source=config.out, report=tmp_path / "d.html")  # from run folders
    diversity.run(kept, console)
    shown = console.export_text()
    texts = ("digits, lenet, 12 epochs", "Ratio-error", "paper 0.8390", "supplementary A.5")
    for text in (*texts, "lower is more diverse"):
        assert text in shown
    assert "Members should agree" in (tmp_path / "d.html").read_text()


def test_table1_is_the_papers_setting_by_preset() -> None:
    config = table1.Config(preset=("cifar10",), backbone=("wrn-28-10",), methods=("lpbnn", "duq"))
    runs = table1.configs(config)
    assert len(runs) == 6
    run = runs["cifar10-wrn-28-10-lpbnn-0"]
    assert (run.epochs, run.batch_size, run.optim.lr, run.optim.weight_decay) == (
        250,
        128,
        0.1,
        1e-4,
    )
    assert run.schedule.milestones == (80, 160, 200)
    assert run.augment.cutout == 16
    assert runs["cifar10-wrn-28-10-duq-0"].optim.lr == 0.05
    with pytest.raises(ValueError, match="unknown method"):
        table1.configs(table1.Config(methods=("lpbn",)))
    paper = table1.paper("cifar10").rows["lpbnn"]
    assert paper["accuracy"] == pytest.approx(0.9502)
    assert (paper["auroc"], paper["ece"]) == (0.9691, 0.0094)
    assert "auroc" not in table1.paper("cifar100-fast").rows["lpbnn"]


@pytest.mark.parametrize("compiled", [True, False])
def test_table1_on_a_gpu(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = table1.Config(methods=("mcp",), seeds=1, compile=compiled)
    (run,) = table1.configs(config).values()
    assert (run.precision, run.channels_last, run.compile) == ("bf16", True, compiled)


def test_one_command_for_all_of_table1_one_seed_first() -> None:
    config = table1.Config(
        preset=("cifar10-fast", "cifar100-fast"),
        backbone=("wrn-16-4", "wrn-28-10"),
        methods=("mcp", "lpbnn"),
        seeds=2,
        corruption_images=1000,
        corruption_root="c",
    )
    runs = table1.configs(config)
    assert [run.seed for run in runs.values()] == [0] * 8 + [1] * 8
    assert {(run.data, run.backbone) for run in list(runs.values())[:8]} == {
        (data, net) for data in ("cifar10", "cifar100") for net in ("wrn-16-4", "wrn-28-10")
    }
    measured = runs["cifar100-fast-wrn-28-10-lpbnn-1"].evaluate
    assert (measured.corruption_images, measured.corruption_root) == (1000, "c/cifar100")
    with pytest.raises(ValueError, match="unknown backbone"):
        table1.configs(table1.Config(backbone=("wrn",)))


def small(method: str, seed: int = 0) -> RunConfig:
    measure = EvalConfig(examples=0)
    return RunConfig(method, backbone="mlp", epochs=1, seed=seed, evaluate=measure, device="cpu")


def test_the_shortest_try_of_table1_can_be_built() -> None:
    """The two epochs of warm-up must leave some for training."""
    for epochs, warmup in ((1, 0.25), (8, 2.0), (None, 2.0)):
        runs = table1.configs(table1.Config(methods=("mcp",), seeds=1, epochs=epochs))
        assert [run.schedule.warmup for run in runs.values()] == [warmup]
    for epochs, milestones in ((1, (1,)), (2, (1, 2)), (250, (80, 160, 200))):
        config = table1.Config(preset=("cifar10",), methods=("mcp",), seeds=1, epochs=epochs)
        assert [run.schedule.milestones for run in table1.configs(config).values()] == [milestones]


def test_a_run_that_breaks_does_not_stop_the_others(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: RunConfig, folder: Path, **options: Any) -> None:
        if config.method == "mcp":
            raise RuntimeError("CUDA out of memory.\nand more")
        real_run(config, folder, **options)

    real_run = _suite.run
    monkeypatch.setattr(_suite, "run", run)
    configs = {name: small(name) for name in ("mcp", "lpbnn")}
    with pytest.raises(ValueError, match=r"1 of 2 runs broke:\n  mcp: CUDA out of memory\.\nFix"):
        run_all(configs, tmp_path, console, jobs=1)
    assert (tmp_path / "lpbnn" / "results.json").exists()


def test_the_data_is_read_once_and_every_run_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[RunConfig] = []

    def load(config: RunConfig) -> Splits:
        read.append(config)
        return load_data(config)

    monkeypatch.setattr(_suite, "load_data", load)
    console = Console(file=io.StringIO(), width=20)
    configs = {f"mcp-{seed}": small("mcp", seed) for seed in (0, 1)}
    run_all(configs, tmp_path, console, jobs=1)
    assert len(read) == 1
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(" s, ")[0].rstrip("0123456789") for line in lines if line] == [
        f"mcp-{seed}: trained " for seed in (0, 1)
    ]
    run_all(configs, tmp_path, console, jobs=1)  # finished: not looked at again
    assert len(read) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_missing_files_are_told_before_any_process_starts(
    jobs: int, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in ("_train_in_processes", "_one"):
        monkeypatch.setattr(_suite, slow, lambda *_, **__: pytest.fail("it is too late to look"))
    root = tmp_path / "nowhere"
    config = table1.Config(data_root=str(root), out=tmp_path / "runs", jobs=jobs)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist") as told:
        table1.run(config, console)
    said = str(told.value)
    assert "--data-root" in said
    assert "--set" not in said  # an option of lpbnn train
    assert f"lpbnn data download cifar10 --data-root {root}" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "camvid", "bdd-anomaly", "streethazards"])
def test_files_of_a_data_set_can_be_looked_for_without_reading_them(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="--data-root|lacks"):
        data.require_files(name, tmp_path)
    data.require_files("digits", tmp_path)  # has none


def test_runs_that_are_finished_need_no_data(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {"mcp": small("mcp")}
    run_all(configs, tmp_path, console, jobs=1)
    monkeypatch.setattr(data, "require_files", lambda *_: pytest.fail("no file is needed"))
    assert run_all(configs, tmp_path, console, jobs=1) == [tmp_path / "mcp"]


def test_bad_input_leaves_no_data_in_memory(tmp_path: Path, console: Console) -> None:
    wrong = replace(small("mcp"), backbone_options={"widht": 3})
    with pytest.raises(ValueError, match="widht"):
        run_all({"mcp": wrong}, tmp_path, console, jobs=1)
    assert _suite._loaded.cache_info().currsize == 0


@pytest.mark.parametrize("method", ["mcp", "lpbnn"])
def test_nothing_of_a_run_is_left_for_the_next_one(
    method: str, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a model that lingers is memory that the next run's peak would count."""
    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def watched(*given: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        models.append(weakref.ref(model := build_model(*given)))
        return model

    monkeypatch.setattr("lpbnn.training.run.build_model", watched)
    configs = {str(seed): small(method, seed) for seed in range(2)}
    run_all(configs, tmp_path, console, jobs=1)
    assert alive == [0, 0]


def test_no_run_outlives_a_command_that_was_killed() -> None:
    context = multiprocessing.get_context("spawn")
    listening, here = context.Pipe(duplex=False)
    command = context.Process(target=a_command, args=(here,))
    command.start()
    here.close()
    assert listening.poll(60)
    assert listening.recv() == "training"
    command.kill()
    command.join()
    assert listening.poll(60)  # the other end is closed
    with pytest.raises(EOFError):
        listening.recv()
