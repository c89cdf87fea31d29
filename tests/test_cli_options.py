"""What is typed changes a run's settings, whatever its value; what is not typed stays as the run has it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from lpbnn import cli, data
from lpbnn.cli.options import Start, read_config, resumable, resumed
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.training.build import DataInfo, resolved
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
    start = resumable(folder)
    return resumed(start, tyro.cli(RunConfig, default=start, args=args), folder, [])


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


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    cli.main(["train", *args, "--print-config"])
    return capsys.readouterr().out


LINES = [
    "",
    "--method duq --method.sigma 0.2 --backbone mlp --backbone.hidden 8 4 --data cubic",
    "--method.include conv* head --optim.parts encoder.* 0.1 --evaluate.no-ood --precision bf16",
    "--data folder --data.size 48 64 --data-root x --optim.lr 1e-5 --method.weighting equation",
    "--backbone wrn-40-2 --backbone.dropout 0.3 --optim.clip 1",
]


@pytest.mark.parametrize("line", LINES)
def test_a_printed_config_reads_back_to_the_same(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *line.split())
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert printed(capsys, "--config", str(path)) == text
    path.write_text(json.dumps(read_config(path).to_data()))  # JSON is YAML
    assert printed(capsys, "--config", str(path)) == text


def test_what_is_typed_comes_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: mimo\nmethod_options: {members: 2}\noptim: {lr: 1e-2}\n")
    given = ["--config", str(path)]
    start = Start.of(given)
    assert (start.config.optim.lr, start.options["method"].members) == (0.01, 2)
    assert Start.of([*given, "--method", "ensemble"]).options["method"].members == 4  # its own
    assert "members: 5" in printed(capsys, *given, "--method.members", "5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: lpbn", "Did you mean 'lpbnn'"),
        ("method_options: {memberz: 2}", "method has no field 'memberz'. Did you mean 'members'"),
        ("method_options: {members: two}", "method.members is 'two'; expected a valid integer"),
        ("backbone_options: {dropout: a}", "backbone.dropout is 'a'; expected a valid number"),
        ("optim: {lrr: 1}", "is no config: optim has no field 'lrr'. Did you mean 'lr'"),
        ("optim: [", "is no config"),
        ("x: !!int ''", "is no config"),
        ("data: 'os:path'", "would import the Python module 'os'"),
    ],
)
def test_mistakes_in_a_file_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Start.of(["--config", str(path)])
