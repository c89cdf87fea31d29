"""What the README and the documentation say runs as it is written; CONTRIBUTING.md has the rules."""

import ast
import contextlib
import importlib
import importlib.util
import warnings
from functools import partial, wraps
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import tyro
from tools import pages

import lpbnn
from lpbnn import cli, methods

ROOT = Path(__file__).parents[1]
LARGEST = 150_000  # bytes of a figure


def having(*languages: str, all_quick: bool = False) -> list[Any]:
    """Return the pages with code in one of these languages, each with its marks."""
    found = []
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text("utf-8")
        if any(block.language in languages for block in pages.blocks(text)):
            slow = "slow" in pages.marks(text) and not all_quick
            name = str(page.relative_to(ROOT))
            found.append(pytest.param(page, id=name, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize("page", having("python"))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pages.marks(page.read_text("utf-8"))
    for package in found.get("needs", "").split():
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(methods, "_registered", {})  # a page may register a method of its own
    plt.switch_backend("agg")
    may_warn = warnings.catch_warnings() if "warns" in found else contextlib.nullcontext()
    with may_warn:
        if "warns" in found:
            warnings.simplefilter("default")
        for block, printed in pages.run(page):
            if block.output is not None:
                assert not pages.differences(block.output, printed), f"line {block.line}"
    plt.close("all")
    for shown in pages.figures(page).values():
        assert shown.stat().st_size < LARGEST


@pytest.mark.parametrize("page", having("python", all_quick=True))
def test_the_code_of_a_page_names_what_there_is(page: Path) -> None:
    """The quick part of the test above, for slow pages: syntax, imports, and the names after ``lpbnn.``."""
    for block in pages.blocks(page.read_text("utf-8")):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.code, str(page))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lpbnn"):
                    module = importlib.import_module(node.module or "")
                    assert all(hasattr(module, alias.name) for alias in node.names)
                elif isinstance(node, ast.Attribute):
                    path = ast.unparse(node).split(".")
                    if path[0] == "lpbnn" and all(part.isidentifier() for part in path):
                        place: Any = lpbnn
                        for part in path[1:]:
                            place = getattr(place, part)


@pytest.mark.parametrize("page", having(*pages.SHELLS))
def test_the_commands_of_a_page_can_be_read(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = pages.blocks(page.read_text("utf-8"))
    for block in found:  # files of the page that its commands name
        if (name := pages.FILE.match(block.code)) is not None:
            Path(name[1]).write_text(block.code)
    for block in found:
        for words in pages.commands(block.code) if block.language in pages.SHELLS else []:
            program, *args = words
            if program != "lpbnn":  # python FILE, python -m MODULE, torchrun ... -m MODULE
                if "-m" not in args:
                    assert (ROOT / args[0]).exists()
                    continue
                module, *args = args[args.index("-m") + 1 :]
                if module != "lpbnn":
                    assert importlib.util.find_spec(module)
                    continue
            read(args)


def read(args: list[str]) -> None:
    """Parse the arguments of ``lpbnn``, and run nothing."""
    for option in ("--config", "--resume"):  # files that the reader has and we do not
        if option in args:
            place = args.index(option)
            args = args[:place] + args[place + 2 :]
    if args[0] == "experiment":
        args = args[1:]
        command = cli._experiment(args[0], args)
    else:
        command = cli._commands(args)[args[0]]
    prog, args = args[0], args[1:]
    if isinstance(command, partial):
        command = partial(idle(command.func), *command.args, **command.keywords)
    else:
        command = idle(command)
    with contextlib.suppress(SystemExit) if "--help" in args else contextlib.nullcontext():
        tyro.cli(command, prog=prog, args=args)


def idle(function: Any) -> Any:
    """Return a function with the same arguments that does nothing."""

    @wraps(function)
    def nothing(*args: Any, **options: Any) -> None: ...

    return nothing
