"""Street scenes in files, and what users get wrong: found while loading, and told by name."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import streets
from PIL import Image

from lpbnn import data

SETS = ("camvid", "camvid-anomaly", "streethazards", "bdd-anomaly")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "lpbnn")


def broken(tmp_path: Path, change: Callable[[Path], None], name: str = "camvid") -> None:
    root = streets.camvid(tmp_path)
    change(root / "camvid")
    data.load(name, root, memory=0)


def test_ids_outside_the_class_list(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        found = streets.ids(0, [0, 12, 200, 255])
        Image.fromarray(found).save(folder / "valannot" / "001.png")

    with pytest.raises(
        ValueError,
        match=r"valannot/001.png holds the label ids 12, 200, 255, which no class has; expected 0-11",
    ):
        broken(tmp_path, change)


def test_ids_beyond_a_byte_are_told_against_the_sets_own(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        found = streets.ids(0, [0, 1]).astype(np.uint16) + 299
        Image.fromarray(found).save(folder / "valannot" / "001.png")

    with pytest.raises(
        ValueError,
        match=r"valannot/001.png holds the label ids 299, 300, which no class has; expected 0-11\.",
    ):
        broken(tmp_path, change)


def without(ids: list[int], *folders: Path) -> None:
    """Turn these ids into road, in label maps."""
    for path in (path for folder in folders for path in folder.iterdir()):
        found = np.array(Image.open(path))
        Image.fromarray(np.where(np.isin(found, ids), 0, found).astype(np.uint8)).save(path)


def test_camvid_anomaly_without_an_anomaly_in_the_test_part(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"camvid-anomaly: none of the 3 label maps in \S*camvid/testannot has a pixel of label "
        r"id 10 \(the anomaly\), so .* empty\. Fix: give a root \(--data-root\) with such pixels",
    ):
        broken(tmp_path, lambda folder: without([10], folder / "testannot"), "camvid-anomaly")
    data.load("camvid", tmp_path)  # the classes alone need none


def test_bdd_without_an_anomaly(tmp_path: Path) -> None:
    root = streets.bdd(tmp_path)
    labels = root / "bdd100k" / "seg" / "labels"
    without([16], labels / "train", labels / "val")
    assert len(data.load("bdd-anomaly", root).test) == 2  # the motorcycles
    without([17], labels / "train", labels / "val")
    with pytest.raises(
        ValueError,
        match=r"bdd-anomaly: none of the 9 label maps in \S*seg/labels/train, \S*seg/labels/val has a "
        r"pixel of label id 16 or 17 .* Fix: ",
    ):
        data.load("bdd-anomaly", root)


def test_no_picture_left_to_train_on(tmp_path: Path) -> None:
    root = streets.camvid(tmp_path)
    for path in (root / "camvid" / "trainannot").iterdir():
        Image.fromarray(streets.ids(0, [0, 10])).save(path)
    assert len(data.load("camvid-anomaly", root).train) == 4
    with pytest.raises(
        ValueError,
        match=r"of the 4 label maps in \S*trainannot is without label id 10 .* have none",
    ):
        data.load("camvid-anomaly", root, exclude=True)


def test_two_pictures_of_one_label_map(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        Image.open(folder / "val" / "001.png").save(folder / "val" / "001.jpg")

    with pytest.raises(
        ValueError,
        match=r"val/001.jpg and \S*val/001.png have one label map, \S*valannot/001.png; .* Fix: remove",
    ):
        broken(tmp_path, change)


def test_a_picture_and_a_label_map_of_different_size(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        Image.new("L", (16, 11)).save(folder / "testannot" / "002.png")

    with pytest.raises(
        ValueError, match=r"test/002.png is 16x12, its label map .*testannot/002.png is 16x11"
    ):
        broken(tmp_path, change)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_pair_of_another_size(tmp_path: Path, part: str) -> None:
    def change(folder: Path) -> None:
        for kind in (part, f"{part}annot"):
            for path in (
                (folder / kind).iterdir() if part == "test" else [folder / kind / "002.png"]
            ):
                Image.open(path).resize((8, 6), Image.Resampling.NEAREST).save(path)

    with pytest.raises(ValueError, match=r"\.png is 8x6, .*train/000.png is 16x12; expected one"):
        broken(tmp_path, change)


def test_a_missing_label_map(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"trainannot/003.png is missing: the label map of .*train/003.png \(1 of 4",
    ):
        broken(tmp_path, lambda folder: (folder / "trainannot" / "003.png").unlink())


def test_a_missing_picture(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"annot/002.png is a label map without a picture"):
        broken(tmp_path, lambda folder: (folder / "train" / "002.png").unlink())


def test_a_truncated_picture_is_found_before_training(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "val" / "000.png"
        path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(ValueError, match=r"val/000.png cannot be read: damaged, or no image"):
        broken(tmp_path, change)


def test_a_truncated_label_map_is_found_before_training(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "trainannot" / "001.png"
        path.write_bytes(path.read_bytes()[:60])

    with pytest.raises(ValueError, match=r"trainannot/001.png cannot be read: damaged"):
        broken(tmp_path, change)


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train/001.png cannot be read: damaged, or no image"):
        broken(tmp_path, lambda folder: (folder / "train" / "001.png").write_text("hello") and None)


def test_colours_in_the_place_of_ids(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        shutil.copy(folder / "train" / "000.png", folder / "trainannot" / "000.png")

    with pytest.raises(ValueError, match=r"trainannot/000.png is a picture of mode 'RGB'; .* ids"):
        broken(tmp_path, change)


def test_hidden_files_and_texts_are_passed_over(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "train" / "._000.png").write_bytes(b"a Mac was here")
        (folder / "train" / "Thumbs.db").write_bytes(b"so was Windows")

    broken(tmp_path, change)


@pytest.mark.parametrize("name", SETS)
def test_folders_that_are_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks .* does not exist\). Fix: .*--data-root"):
        data.load(name, tmp_path / "nowhere")
    (tmp_path / "something").mkdir()
    with pytest.raises(FileNotFoundError, match=r"lacks .*\(.* holds something\)"):
        data.load(name, tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        for path in (folder / "val").iterdir():
            path.unlink()

    with pytest.raises(FileNotFoundError, match=r"val holds no pictures"):
        broken(tmp_path, change)
