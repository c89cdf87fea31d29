"""The README tells the truth about the tree, and its examples run."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lpbnn"
FILES = sorted(path for path in SOURCE.rglob("*.py"))


def test_every_file_has_its_line() -> None:
    readme = (ROOT / "README.md").read_text()
    wrong = []
    for path in FILES:
        claim = (ast.get_docstring(ast.parse(path.read_text())) or "").strip().splitlines()
        line = f"{path.name} "
        if not claim or not any(
            text.strip().startswith(line) and text.strip().endswith(claim[0].strip())
            for text in readme.splitlines()
        ):
            wrong.append(str(path.relative_to(SOURCE)))
    assert not wrong, f"README's tree lacks, or tells otherwise of: {wrong}"


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(SOURCE)): n for path in FILES if (n := _lines(path)) > 300}
    assert not long


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("name", ["own_loop.py", "lightning_module.py"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name))
    assert capsys.readouterr().out


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
