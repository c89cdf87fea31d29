"""Pictures in folders: what is found, held out and brought to one size."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from folders import SIZE, classes, load, picture
from PIL import Image

from lpbnn import data
from lpbnn.data import Augment, Dataset, folder
from lpbnn.data.augment import batch_indices, epoch_generator
from lpbnn.data.files import ORIENTATION, FileDataset, read_image


def held(part: data.Examples) -> set[bytes]:
    return {x.numpy().tobytes() for x in part[:][0]}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two classes without parts."""
    return classes(tmp_path / "pets", "cat", "dog")


# --- what is found --------------------------------------------------------------------------------


def test_parts_are_taken_as_they_are(tmp_path: Path) -> None:
    for part, each in {"train": 4, "val": 2, "test": 3}.items():
        classes(tmp_path / part, "dog", "cat", each=each)
    splits = load(tmp_path)
    assert splits.classes == ("cat", "dog")  # sorted, whatever the order on the disk
    assert splits.class_counts == (4, 4)
    assert splits.shape == (3, 8, 10)
    for part, found in {"train": splits.train, "val": splits.val, "test": splits.test}.items():
        x, y = found[:]
        assert y.tolist() == sorted(y.tolist())
        paths = [p for name in splits.classes for p in sorted((tmp_path / part / name).iterdir())]
        assert torch.equal(x, torch.stack([read_image(p, splits.shape) for p in paths]))
    assert "held out" not in splits.description
    assert splits.source == str(tmp_path)


def test_without_parts_a_share_of_every_class_is_held_out(plain: Path) -> None:
    classes(plain, "owl", each=40)
    splits = load(plain)
    counts = [part.class_counts(3) for part in (splits.train, splits.val, splits.test)]
    assert counts == [(7, 7, 28), (1, 1, 4), (2, 2, 8)]
    parts = [held(part) for part in (splits.train, splits.val, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60  # nothing twice, nothing lost
    assert "held out of every class, by seed 0: 10% for val and 20% for test" in splits.description
    assert held(load(plain).test) == parts[2]
    assert held(load(plain, seed=1).test) != parts[2]


def test_what_is_held_out_of_a_class_does_not_depend_on_the_others(plain: Path) -> None:
    before = held(load(plain).test)
    classes(plain, "ape", each=12)
    assert before < held(load(plain).test)


def test_only_what_is_not_there_is_held_out(tmp_path: Path) -> None:
    classes(tmp_path / "train", "cat", "dog")
    classes(tmp_path / "test", "cat", "dog", each=3)
    splits = load(tmp_path, val=0.3)
    assert [len(p) for p in (splits.train, splits.val, splits.test)] == [14, 6, 6]
    none = load(tmp_path, val=0)
    assert [len(p) for p in (none.train, none.val, none.test)] == [20, 0, 6]


def test_strange_pictures_are_one_set_or_one_for_each_folder(plain: Path) -> None:
    picture(plain / "ood" / "one.png", (30, 20))  # any size: they are brought to that of the others
    flat = load(plain)
    assert flat.classes == ("cat", "dog")
    assert {name: len(part) for name, part in flat.ood.items()} == {"ood": 1}
    assert flat.ood["ood"].shape == flat.shape
    picture(plain / "ood" / "cars" / "red" / "two.png")
    picture(plain / "ood" / "cars" / "three.png")
    picture(plain / "ood" / "trees" / "four.png")
    nested = load(plain)
    assert {n: len(part) for n, part in nested.ood.items()} == {"ood": 1, "cars": 2, "trees": 1}
    assert all(part[:][1].eq(data.NOT_A_CLASS).all() for part in nested.ood.values())
    assert nested.name == flat.name  # a run may be measured with new ones


def test_what_is_no_picture_is_left_out_with_a_word(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(plain)
    for name in ("cat/notes.txt", "cat/.DS_Store", "dog/._00.png", "list.csv"):
        (plain / name).write_bytes(b"no picture")
    (plain / ".ipynb_checkpoints").mkdir()  # would be a class
    splits = load(plain)
    assert splits.classes == ("cat", "dog")
    assert held(splits.train) == held(expected.train)
    assert "left out, hidden, no picture or in no class: 5" in splits.description
    assert "cat/notes.txt" in caplog.text
    assert "\n" not in splits.description


def test_links_to_folders_are_followed(plain: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("cat", "dog"):
        (linked / name).symlink_to(plain / name)
    assert held(load(linked).train) == held(load(plain).train)


def test_names_may_be_any_bytes(plain: Path) -> None:
    shutil.copytree(plain / "cat", plain / os.fsdecode(b"\xff"))
    (plain / "cat" / "00.png").rename(plain / "cat" / os.fsdecode(b"\xfe.png"))
    assert load(plain).num_classes == 3


def test_the_name_tells_other_pictures_and_not_another_place(plain: Path, tmp_path: Path) -> None:
    name = load(plain).name
    assert re.fullmatch(r"pets-[0-9a-f]{6}", name)
    moved = tmp_path / "elsewhere" / "pets"
    shutil.copytree(plain, moved)
    assert load(moved).name == name
    picture(moved / "cat" / "new.png")
    assert load(moved).name != name


# --- one size, one number of channels --------------------------------------------------------------


def test_a_size_is_a_side_or_height_and_width(plain: Path) -> None:
    picture(plain / "cat" / "other.png", (7, 31))
    assert load(plain, size=16).shape == (3, 16, 16)
    splits = load(plain, size=[12, 16])
    assert splits.shape == (3, 12, 16)
    assert "16x12 colour pictures of 2 classes" in splits.description
    assert "stretched" in splits.description


def test_a_size_follows_how_a_picture_is_shown(plain: Path) -> None:
    turned = plain / "cat" / "turned.jpg"
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.new("RGB", SIZE[::-1]).save(turned, exif=exif)  # stored upright, shown lying
    assert load(plain).shape == (3, 8, 10)


def test_grey_pictures_have_one_channel_unless_told_otherwise(tmp_path: Path) -> None:
    classes(tmp_path, "cat", "dog", mode="L")
    assert load(tmp_path).shape[0] == 1
    assert load(tmp_path, channels=3).shape[0] == 3
    classes(tmp_path, "dog")
    assert load(tmp_path).shape[0] == 3
    assert load(tmp_path, channels=1).shape[0] == 1


def test_mean_and_spread_are_those_of_the_training_pictures(plain: Path) -> None:
    splits = load(plain)
    x = splits.normalise(splits.train[:][0])
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_pictures_of_one_colour_do_not_divide_by_zero(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("L", (8, 8), 100).save(tmp_path / name / f"{number}.png")
    splits = load(tmp_path)
    assert splits.normalise(splits.train[:][0]).abs().max() < 1e-6


def test_augmentation_scales_with_the_size(plain: Path) -> None:
    assert load(plain, size=32).augment == Augment(pad=4, flip=True)  # CIFAR's
    assert load(plain, size=[64, 96]).augment == Augment(pad=8, flip=True)


# --- too large for memory --------------------------------------------------------------------------


def test_read_in_their_turn_they_are_the_same(plain: Path) -> None:
    picture(plain / "ood" / "one.png")
    whole, lazy = load(plain), load(plain, memory=0)
    assert isinstance(whole.train, Dataset)
    assert isinstance(lazy.train, FileDataset)
    assert (lazy.mean, lazy.std, lazy.class_counts) == (whole.mean, whole.std, whole.class_counts)
    assert lazy.name == whole.name
    assert "read from the files in every epoch" in lazy.description
    indices = (3, -1, slice(2, 5), torch.tensor([8, 0, 0]), torch.arange(0), slice(None))
    for a, b in ((lazy.train, whole.train), (lazy.ood["ood"], whole.ood["ood"])):
        for index in indices if len(a) > 8 else (0, slice(None)):
            for one, other in zip(a[index], b[index], strict=True):
                assert torch.equal(one, other)
                assert one.dtype == other.dtype
    for size in (1, 4, 50):
        read, expected = (
            list(s.train.stream(batch_indices(len(s.train), size, epoch_generator(0, 1))))
            for s in (lazy, whole)
        )
        assert len(read) == len(expected)
        for one, other in zip(read, expected, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    taken = lazy.train.take(slice(3))
    assert isinstance(taken, Dataset)
    assert torch.equal(taken.inputs, whole.train[:3][0])


def test_a_sample_tells_mean_and_spread_of_a_large_set(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "SAMPLED", 6)
    whole, first, second = load(plain), load(plain, memory=0), load(plain, memory=0)
    assert first.mean == second.mean != whole.mean
    assert first.mean == pytest.approx(whole.mean, abs=0.1)
    assert "mean and spread of 6 training pictures" in first.description
    assert "mean and spread" not in whole.description


def test_a_picture_that_breaks_during_a_run_is_named(plain: Path) -> None:
    lazy = load(plain, memory=0).train
    assert isinstance(lazy, FileDataset)
    lazy.images[5].unlink()
    with pytest.raises(ValueError, match=f"{lazy.images[5].name}: no such file"):
        list(lazy.stream(batch_indices(len(lazy), 2)))
