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


def test_reads_images_and_digits(tmp_path: Path) -> None:
    write(tmp_path)
    data = svhn.read(tmp_path)
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3, 12)).astype(np.uint8)
    assert data.inputs.shape == (12, 3, 32, 32)
    assert data.inputs.dtype == torch.uint8
    assert data.inputs.is_contiguous()
    assert data.inputs[5, 2, 7, 30] == pixels[7, 30, 2, 5]
    assert data.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert data.targets.dtype == torch.int64
    assert not svhn.is_published(tmp_path)


def test_the_published_number_of_rows_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"12 images and 12 labels; expected 26,032 of each"):
        svhn.read(tmp_path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"test_32x32\.mat is missing\. Give .*download=True"
    ):
        svhn.read(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cannot be read as a MATLAB file.*5,000 bytes"):
        svhn.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.zeros((12, 1), np.uint8)}, "labels from 0 to 0; expected 1 to 10"),
        ({"y": np.full((12, 1), 11, np.uint8)}, "labels from 11 to 11; expected 1 to 10"),
        ({"y": np.ones((11, 1), np.uint8)}, "12 images and 11 labels; expected 12 of each"),
        ({"y": np.ones((12, 1))}, "y of type float64; expected integers"),
        ({"y": None}, "lacks X or y"),
        ({"X": np.zeros((32, 32, 3, 12))}, r"type float64; expected \(32, 32, 3, N\)"),
        ({"X": np.zeros((12, 32, 32, 3), np.uint8)}, r"shape \(12, 32, 32, 3\)"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        svhn.read(tmp_path)
