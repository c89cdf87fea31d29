"""The pages on data of one's own as a user would follow them: commands are run, and give what the pages say."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from lpbnn import backbones, cli, data
from lpbnn.data import folder
from lpbnn.training.rundir import RunDir

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "howto" / "own-data.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorials" / "pictures.md").read_text()
BLOCKS = [
    block.splitlines() for block in re.findall(r"```(?:console|bash)\n(.*?)```", PAGE, re.DOTALL)
]


@pytest.mark.slow
def test_the_commands_of_the_tutorial_lead_from_a_folder_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", Console(width=120))
    runpy.run_path(str(ROOT / "examples" / "draw_shapes.py"))["write"](Path("shapes"))
    run_blocks = re.findall(r"<!-- run -->\n```(?:console|bash)\n(.*?)```", TUTORIAL, re.DOTALL)
    for command in "".join(run_blocks).splitlines():
        program, *words = shlex.split(command)
        assert program == "lpbnn"
        quiet = ["--device", "cpu", "--no-progress"] if words[0] == "train" else []
        capsys.readouterr()
        cli.main([*words, *quiet])
    answer = capsys.readouterr().out  # of predict, the last
    assert "circle" in answer
    assert all(f"shapes/ood/00{number}.png" in answer for number in (0, 1))
    for name in ("lpbnn", "mcp"):
        run = RunDir(Path("runs") / name)
        results = run.results()
        assert results["test"]["accuracy"] > 0.8  # chance is 1/3
        assert 0.5 < results["ood"]["ood"]["auroc"] <= 1
        assert run.data().classes == ("circle", "square", "triangle")
        assert run.data().sizes == {"train": 210, "val": 30, "test": 60, "ood/ood": 100}
    page = Path("report.html").read_text()
    for shown in (
        "circle",
        "square",
        "triang",
        "Out of distribution: ood",
        "held out of every class",
    ):
        assert shown in page


def test_the_page_names_every_option_and_field() -> None:
    load = folder.load.__annotations__.keys() - {"root", "return"}
    fields = data.Splits.__dataclass_fields__
    missing = [name for name in load if f"--data.{name} " not in PAGE]
    missing += [name for name in fields if f"`{name}`" not in PAGE]
    assert not missing
    assert str(folder.SAMPLED // 1000) + ",000 training pictures" in PAGE
    assert f"`--data.memory {folder.MEMORY:g}`" in PAGE
    assert f"`--data.val {folder.SHARES['val']} --data.test {folder.SHARES['test']}`" in PAGE


@pytest.mark.parametrize("command", [line for line in BLOCKS[1] if " train " in line])
def test_a_set_and_a_network_of_ones_own(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    python, module, program, *words = shlex.split(command)
    assert (python, module, program) == ("python", "-m", "lpbnn")
    cli.main([*words, "--device", "cpu", "--no-progress"])
    run = RunDir(Path("runs/stripes"))
    assert run.results()["test"]["accuracy"] > 0.9
    assert backbones.load(run.config().backbone).description.startswith("two convolutions")
