"""StreetHazards, BDD-Anomaly and CamVid from small files in their published layouts."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import streets
import torch
from PIL import Image

from lpbnn import data
from lpbnn.data import Dataset, Splits
from lpbnn.data.files import FileDataset

SETS: dict[str, Callable[[Path], Path]] = {
    "camvid": streets.camvid,
    "camvid-anomaly": streets.camvid,
    "streethazards": streets.streethazards,
    "bdd-anomaly": streets.bdd,
}
FOLDERS = {
    "camvid": "camvid",
    "camvid-anomaly": "camvid",
    "streethazards": ".",
    "bdd-anomaly": "bdd100k",
}
CLASSES = {"camvid": 11, "camvid-anomaly": 10, "streethazards": 13, "bdd-anomaly": 17}


def ids_shown(x: torch.Tensor) -> torch.Tensor:
    """What the red channel says: see streets.write_pair."""
    return x[..., 0, :, :].long()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "lpbnn")


@pytest.mark.parametrize("name", SETS)
def test_contract(name: str, tmp_path: Path) -> None:
    root = SETS[name](tmp_path)
    kept, lazy = data.load(name, root), data.load(name, root, memory=0)
    assert (kept.name, kept.task, kept.num_classes) == (name, "segmentation", CLASSES[name])
    assert len(kept.classes) == CLASSES[name]
    assert kept.description.startswith(data.entries()[name].description)
    assert kept.source == str(root / FOLDERS[name])
    assert kept.ignore_index == 255
    assert kept.ood_index == (None if name == "camvid" else CLASSES[name])
    assert kept.shape == lazy.shape == (3, *streets.SIZE)
    assert kept.class_counts == lazy.class_counts
    assert sum(kept.class_counts) == (kept.train[:][1] < 255).sum()
    for part in ("train", "val", "test"):
        one, other = getattr(kept, part), getattr(lazy, part)
        assert isinstance(one, Dataset)
        assert isinstance(other, FileDataset)
        assert all(torch.equal(a, b) for a, b in zip(one[:], other[:], strict=True))
    allowed = {*range(CLASSES[name]), 255}
    assert set(kept.train[:][1].unique().tolist()) <= allowed  # no anomaly is ever trained on
    assert set(kept.test[:][1].unique().tolist()) <= allowed | {kept.ood_index}


def test_camvid_keeps_its_ids(tmp_path: Path) -> None:
    splits = data.load("camvid", streets.camvid(tmp_path))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [4, 2, 3]
    assert splits.classes[0] == "sky"
    assert splits.classes[10] == "bicyclist"
    x, y = splits.train[:]
    shown = ids_shown(x)
    assert torch.equal(y, shown.where(shown != 11, 255))


def test_camvid_anomaly_holds_the_bicyclist_out(tmp_path: Path) -> None:
    root = streets.camvid(tmp_path)
    splits = data.load("camvid-anomaly", root)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [4, 2, 1]
    x, y = splits.train[:]
    shown = ids_shown(x)
    assert (shown == 10).any()
    assert (y[(shown == 10) | (shown == 11)] == 255).all()
    x, y = splits.test[:]
    assert torch.equal(y == splits.ood_index, ids_shown(x) == 10)
    without = data.load("camvid-anomaly", root, exclude=True)
    assert len(without.train) == 2
    assert not (ids_shown(without.train[:][0]) == 10).any()
    assert "trained on the 2 images without one" in without.description


def test_streethazards_ids_begin_at_one(tmp_path: Path) -> None:
    splits = data.load("streethazards", streets.streethazards(tmp_path))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [4, 2, 4]
    assert splits.classes[0] == "unlabeled"
    assert splits.classes[12] == "traffic sign"
    x, y = splits.test[:]
    assert torch.equal(y, ids_shown(x) - 1)
    assert (y == 13).any()


def test_streethazards_may_lie_in_a_folder_of_its_name_and_id_0_is_void(tmp_path: Path) -> None:
    root = streets.streethazards(tmp_path / "streethazards")
    some = sorted((root / "train" / "annotations" / "training" / "t1").iterdir())[0]
    Image.fromarray(np.zeros(streets.SIZE, np.uint8)).save(some)
    splits = data.load("streethazards", tmp_path)
    assert splits.source == str(root)
    assert (splits.train[0][1] == 255).all()


@pytest.mark.parametrize("old", [True, False])
def test_bdd_moves_motorcycles_and_trains_to_the_test(tmp_path: Path, old: bool) -> None:
    splits = data.load("bdd-anomaly", streets.bdd(tmp_path, old), memory=0)
    # Second and third of each part have one: 5 - 2 train, 4 - 2 validate, 2 + 2 test.
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [3, 2, 4]
    assert splits.classes[15:] == ("bus", "bicycle")
    assert not {"train", "motorcycle"} & set(splits.classes)
    assert isinstance(splits.test, FileDataset)
    names = [path.name for path in splits.test.images]
    assert names == ["1a-1b.jpg", "2a-2b.jpg"] * 2
    for number, label in enumerate(splits.test.targets.paths):
        found, y = np.array(Image.open(label)), splits.test[number][1].numpy()
        assert np.array_equal(y == 17, (found == 16) | (found == 17))
        assert np.array_equal(y == 16, found == 18)
        assert np.array_equal(y == 255, found == 255)
        assert np.array_equal(y[found < 16], found[found < 16])


def test_another_number_of_images_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lpbnn")
    splits = data.load("camvid", streets.camvid(tmp_path))
    said = "not the published number of images: 4 of 367 train, 2 of 101 val, 3 of 233 test"
    assert said in splits.description
    assert said in caplog.text


def test_a_size_resizes_every_part(tmp_path: Path) -> None:
    root = streets.camvid(tmp_path)
    for memory in (0, 2):
        splits = data.load("camvid", root, size=(6, 8), memory=memory)
        assert splits.shape == (3, 6, 8)
        assert splits.test[0][1].shape == (6, 8)
        assert "resized from 16x12 to 8x6" in splits.description
    for wrong in ((6,), (0, 8), 6, (6.0, 8.0)):
        with pytest.raises(ValueError, match=r"camvid: size=.*; expected \(height, width\)"):
            data.load("camvid", root, size=wrong)


def test_splits_move_to_a_device_without_being_read(tmp_path: Path) -> None:
    splits: Splits = data.load("camvid", streets.camvid(tmp_path), memory=0).to("cpu")
    assert isinstance(splits.train, FileDataset)
