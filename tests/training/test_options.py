"""What is typed changes a run's settings, whatever its value; what is not typed stays as the run has it."""

from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from lpbnn import data
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.options import named_run, resumable, resumed
from lpbnn.training.rundir import RunDir

UNUSUAL = RunConfig(
    "lpbnn",
    {"members": 2, "include": ["conv*", "head"], "weighting": "equation"},
    backbone="mlp",
    backbone_options={"hidden": [8, 4]},
    data_options={"val": 100},
    epochs=9,
    optim=OptimConfig(lr=0.01, parts={"encoder.*": 0.1, "a b": 2.0}),
    schedule=ScheduleConfig("step", milestones=(3, 5)),
    evaluate=EvalConfig(
        4, 32, corruptions=True, severities=(1, 5), corruption_root="/c d", examples=2
    ),
    compile=True,
    memory_budget=0.5,
    device="cpu",
    progress=False,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RunDir(tmp_path).prepare(resolved(UNUSUAL), DataInfo.of(data.load("digits")))
    return tmp_path


def typed(folder: Path, *args: str) -> RunConfig:
    return resumed(tyro.cli(RunConfig, default=resumable(folder), args=args), folder)


def test_nothing_typed_changes_nothing(folder: Path) -> None:
    assert typed(folder) == resolved(UNUSUAL)


def test_one_setting_of_the_evaluation_leaves_the_others(folder: Path) -> None:
    evaluate = replace(UNUSUAL.evaluate, batch_size=64)
    assert typed(folder, "--evaluate.batch-size", "64").evaluate == evaluate


@pytest.mark.parametrize(
    ("args", "name", "usual"),
    [
        (("--device", "auto"), "device", "auto"),
        (("--progress",), "progress", True),
        (("--memory-budget", "1"), "memory_budget", 1.0),
        (("--evaluate.samples", "1"), "evaluate", replace(UNUSUAL.evaluate, samples=1)),
        (
            ("--evaluate.no-corruptions",),
            "evaluate",
            replace(UNUSUAL.evaluate, corruptions=False),
        ),
    ],
)
def test_a_usual_value_counts_as_typed(
    folder: Path, args: tuple[str, ...], name: str, usual: object
) -> None:
    assert typed(folder, *args) == replace(resolved(UNUSUAL), **{name: usual})


def test_what_made_the_run_may_be_repeated_but_not_changed(folder: Path) -> None:
    assert typed(folder, "--epochs", "9", "--optim.lr", "0.01") == resolved(UNUSUAL)
    with pytest.raises(ValueError, match=r"it cannot take epochs, optim\.lr\. Fix: leave them out"):
        typed(folder, "--epochs", "15", "--optim.lr", "0.1")  # the usual values
    with pytest.raises(ValueError, match="cannot take optim.parts"):
        typed(folder, "--optim.parts", "head", "3")


def test_a_run_that_was_measured_again_is_what_it_was_measured_with_last(folder: Path) -> None:
    last = EvalConfig(samples=7, ood=False)
    RunDir(folder).write_results(
        {"evaluate": replace(UNUSUAL, evaluate=last).to_data()["evaluate"]}
    )
    assert typed(folder).evaluate == last


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("train --resume a", "a"),
        ("train --resume=a --set members=2 hidden=[8]", "a"),
        ("train --memory-budget 0.5 --unknown 3 --resume a", "a"),
        ("train -o a", None),
        ("eval a", "a"),
        ("eval --severities 1 2 --ood a", "a"),
        ("eval --chunk 8 a", "a"),
        ("eval", None),
        ("eval a --help", None),
        ("compare a", None),
        ("", None),
    ],
)
def test_the_run_is_found_wherever_it_stands(line: str, run: str | None) -> None:
    assert named_run(line.split()) == (None if run is None else Path(run))
