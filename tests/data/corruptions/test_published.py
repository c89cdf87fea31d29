"""Folders of published corrupted sets: whole or refused, and of the test images that are measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lpbnn.data.corruptions import CORRUPTIONS, Published


def publish(root: Path, n: int = 4, side: int = 32) -> np.ndarray:
    """A folder in the layout of CIFAR-10-C; the images of severity s at row i hold 10 s + i."""
    rows = np.repeat(np.arange(1, 6) * 10, n) + np.tile(np.arange(n), 5)
    rows = np.broadcast_to(rows[:, None, None, None], (5 * n, side, side, 3)).astype(np.uint8)
    for name in CORRUPTIONS:
        np.save(root / f"{name}.npy", rows)
    np.save(root / "labels.npy", np.tile(np.arange(n, dtype=np.uint8), 5))
    return rows


def test_published_files_are_read_severity_by_severity(tmp_path: Path) -> None:
    publish(tmp_path)
    images = Published(tmp_path, torch.arange(4)).read("fog", 4)
    assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.uint8)
    assert images[:, 0, 0, 0].tolist() == [40, 41, 42, 43]
    first = Published(tmp_path, torch.arange(2))
    assert first.read("fog", 5)[:, 2, 31, 31].tolist() == [50, 51]


@pytest.mark.parametrize("labels", [[0, 1, 2, 4], [0, 1, 2, 3, 0]])
def test_files_of_another_data_set_are_refused(tmp_path: Path, labels: list[int]) -> None:
    publish(tmp_path)
    with pytest.raises(ValueError, match="another data set's. Fix"):
        Published(tmp_path, torch.tensor(labels))


def test_a_broken_folder_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    labels = torch.arange(4)
    np.save(tmp_path / "fog.npy", np.zeros((15, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="files of different lengths"):
        Published(tmp_path, labels)
    np.save(tmp_path / "fog.npy", np.zeros((20, 32, 32), np.float32))
    with pytest.raises(ValueError, match=r"holds float32 of shape \(20, 32, 32\); expected uint8"):
        Published(tmp_path, labels)
    (tmp_path / "fog.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"fog\.npy is no complete \.npy file"):
        Published(tmp_path, labels)
    (tmp_path / "fog.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks fog\.npy; give the unpacked folder"):
        Published(tmp_path, labels)
