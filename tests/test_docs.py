"""What the notes for users say runs as it is written, block after block."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [
        "howto/calibration.md",
        "howto/own-loop.md",
        pytest.param("howto/scikit-learn.md", marks=pytest.mark.slow),
    ],
)
def test_every_block_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / name).read_text()
    monkeypatch.chdir(tmp_path)  # what they write is not left behind
    blocks = list(BLOCK.finditer(text))
    assert blocks
    shared: dict[str, Any] = {}
    for block in blocks:
        above = text[: block.start(1)].count("\n")  # an error then names the line of the note
        exec(compile("\n" * above + block[1], str(DOCS / name), "exec"), shared)
    assert capsys.readouterr().out
