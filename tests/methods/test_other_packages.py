"""Methods of other packages: registered or found by entry point; docs/howto/add-a-method.md as written."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import lpbnn
from lpbnn import cli, methods
from lpbnn.methods import mcp

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "add-a-method.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The files of the page, in a folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def python(folder: Path, *args: str) -> str:
    paths = [str(folder), str(Path(lpbnn.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_runs_and_its_method_passes_the_conformance_tests(package: Path) -> None:
    assert set(FILES) == {"weightnoise.py", "train.py", "test_weightnoise.py"}
    assert "tensor([" in python(package, "train.py")
    said = python(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_weightnoise.py")
    assert re.search(r"^\d\d passed", said, re.MULTILINE)


def test_names_and_texts_of_a_package_are_only_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "\x1b]0;owned\x07"
    (tmp_path / "oddity.py").write_text(f'"""{odd}: [bold]{odd}."""\nConfig = build = None\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods, "_installed", lambda: {odd: "oddity"})
    cli.main(["ls"])
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert "[bold]" in shown
    assert "\x1b]" not in shown


def test_an_installed_package_is_found_by_its_entry_point(package: Path) -> None:
    """By the command too, which reads the module without importing it."""
    info = package / "weightnoise-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightnoise\nVersion: 1.0\n")
    toml = re.search(r'entry-points."lpbnn.methods"]\n(\w+) = "(\w+)"', PAGE)
    assert toml is not None
    (info / "entry_points.txt").write_text(f"[lpbnn.methods]\n{toml[1]} = {toml[2]}\n")
    assert "Weight noise: members whose weights are off" in python(package, "-m", "lpbnn", "ls")
    options = python(package, "-m", "lpbnn", "ls", "weightnoise")
    assert "of the noise, relative to a weight" in options
    built = "from torch import nn; net = nn.Sequential(nn.Linear(2, 2)); "
    built += "import lpbnn; print(type(lpbnn.build(net, 'weightnoise')).__name__)"
    assert "WeightNoise" in python(package, "-c", built)


def test_a_registered_method_is_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registered", {})
    lpbnn.register("plain", mcp)
    lpbnn.register("plain", mcp)  # again, as when a notebook's cell is run twice
    assert "plain" in methods.names()
    assert methods.load("plain") is mcp
    assert methods.options("plain") == methods.options("mcp")


def test_names_are_in_alphabetical_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registered", {})
    methods.register("zzz", mcp)
    methods.register("aaa", mcp)
    assert methods.names()[0] == "aaa"
    assert methods.names() == sorted(methods.names())


def test_a_wrong_registration_is_named() -> None:
    with pytest.raises(ValueError, match=r"no method has. lpbnn.methods.lpbnn has it"):
        lpbnn.register("lpbnn", mcp)
    with pytest.raises(ValueError, match=r"name='no name': expected a Python name"):
        lpbnn.register("no name", mcp)
    with pytest.raises(TypeError, match=r"expected a module, got str. Fix: import it"):
        lpbnn.register("mine", "mine")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"empty has no Config and no build. A method is"):
        lpbnn.register("empty", ModuleType("empty"))
    lost = ModuleType("lost")
    lost.Config, lost.build = mcp.Config, mcp.build  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"lost is not in sys.modules"):
        lpbnn.register("lost", lost)


def test_a_broken_package_is_named_and_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"lost": "no_such_module", "empty": "lpbnn.registry", "plain": "lpbnn.methods.mcp"}
    monkeypatch.setattr(methods, "_installed", lambda: others)
    why = r"'lost' is 'no_such_module' of another package, which cannot be used: .*Fix: repair"
    for use in (methods.load, methods.describe, methods.options):
        with pytest.raises(ValueError, match=why):
            use("lost")
    with pytest.raises(ValueError, match="lpbnn.registry has no Config and no build"):
        lpbnn.build(nn.Linear(2, 2), "empty")
    cli.main(["ls"])
    listed = " ".join(capsys.readouterr().out.split())
    assert "'no_such_module' of another package" in listed
    assert "plain MCP: the plain network" in listed
