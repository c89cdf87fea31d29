"""SVHN from small files in the published layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from lpbnn.data import svhn


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 12 examples is whole."""
    monkeypatch.setattr(svhn, "ROWS", 12)


def write(root: Path, rows: int = 12, **changes: object) -> Path:
    """A small ``svhn/test_32x32.mat``: X (32, 32, 3, N) and y (N, 1), 10 for the digit 0."""
    random = np.random.RandomState(0)
    content: dict[str, object] = {
        "X": random.randint(0, 256, (32, 32, 3, rows)).astype(np.uint8),
        "y": (np.arange(rows) % 10 + 1).astype(np.uint8)[:, None],
        **changes,
    }
    path = svhn.path_of(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {key: value for key, value in content.items() if value is not None})
    return path


def test_reads_images(tmp_path: Path) -> None:
    write(tmp_path)
    images = svhn.read(tmp_path)
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3, 12)).astype(np.uint8)
    assert images.shape == (12, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert images[5, 2, 7, 30] == pixels[7, 30, 2, 5]
    assert not svhn.is_published(tmp_path)


def test_the_published_number_of_rows_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"\(32, 32, 3, 12\).*expected \(32, 32, 3, 26032\)"):
        svhn.read(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cannot be read as a MATLAB file.*5,000 bytes"):
        svhn.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": None}, "cannot be read as a MATLAB file with X"),
        ({"X": np.zeros((32, 32, 3, 12))}, r"type float64; expected \(32, 32, 3, 12\)"),
        ({"X": np.zeros((12, 32, 32, 3), np.uint8)}, r"shape \(12, 32, 32, 3\)"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        svhn.read(tmp_path)
