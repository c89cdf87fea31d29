"""Folders of corrupted sets: the published layout, whole or refused, never mistaken for another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lpbnn.data.corruptions import CORRUPTIONS, archive, cached, corrupt, read_official

NAMES = ("contrast", "gaussian_noise", "frost")


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The corruptions that were really computed, in order."""
    calls: list[str] = []

    def counted(images: Tensor, name: str, severity: int, *rest: object) -> Tensor:
        calls.append(name)
        return corrupt(images, name, severity, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(archive, "corrupt", counted)
    return calls


def publish(root: Path, n: int = 4, side: int = 32) -> np.ndarray:
    """A folder in the layout of CIFAR-10-C; the images of severity s at row i hold 10 s + i."""
    rows = np.repeat(np.arange(1, 6) * 10, n) + np.tile(np.arange(n), 5)
    rows = np.broadcast_to(rows[:, None, None, None], (5 * n, side, side, 3)).astype(np.uint8)
    for name in CORRUPTIONS:
        np.save(root / f"{name}.npy", rows)
    np.save(root / "labels.npy", np.tile(np.arange(n, dtype=np.uint8), 5))
    return rows


# --- cached --------------------------------------------------------------------------------------


def test_layout_is_the_published_one(images: Tensor, tmp_path: Path) -> None:
    sets = cached(images, tmp_path, labels=torch.arange(6), seed=7, names=NAMES)
    rows = np.load(tmp_path / "gaussian_noise.npy")
    assert rows.shape == (30, 32, 32, 3)
    assert rows.dtype == np.uint8
    expected = corrupt(images, "gaussian_noise", 4, seed=7)
    np.testing.assert_array_equal(rows[18:24], expected.permute(0, 2, 3, 1))
    assert torch.equal(sets.read("gaussian_noise", 4).images, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "labels.npy"), np.tile(np.arange(6), 5))
    recipe = json.loads((tmp_path / "frost.json").read_text())
    assert (recipe["seed"], recipe["version"], recipe["frost"]) == (7, 1, "procedural")
    assert (sets.origin, sets.frost) == ("generated", "procedural")
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}  # nothing half-made


def test_a_second_call_computes_nothing(images: Tensor, tmp_path: Path, made: list[str]) -> None:
    first = {(s.name, s.severity): s.images for s in cached(images, tmp_path, names=NAMES)}
    assert len(made) == 15
    for again in cached(images, tmp_path, names=NAMES):
        assert torch.equal(again.images, first[again.name, again.severity])
        assert again.origin == "generated"
        assert again.frost == ("procedural" if again.name == "frost" else None)
    assert len(made) == 15


def test_another_seed_or_other_images_are_made_anew(
    images: Tensor, tmp_path: Path, made: list[str]
) -> None:
    cached(images, tmp_path, names=NAMES)
    cached(images, tmp_path, seed=1, names=NAMES)
    assert len(made) == 30
    cached(255 - images, tmp_path, seed=1, names=NAMES)
    assert len(made) == 45


def test_another_version_is_made_anew(
    images: Tensor, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(images, tmp_path, names=NAMES)
    monkeypatch.setattr(archive, "VERSION", 2)
    cached(images, tmp_path, names=NAMES)
    assert len(made) == 30


def test_other_frost_touches_frost_alone(
    images: Tensor, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(images, tmp_path, names=NAMES)
    made.clear()
    monkeypatch.setattr(archive, "corrupt", lambda x, name, *_: made.append(name) or x)
    sets = cached(images, tmp_path, frost=tmp_path, names=NAMES)
    assert made == ["frost"] * 5
    assert (sets.origin, sets.frost) == ("generated", "pictures")


def test_a_damaged_file_is_noticed_and_made_anew(
    images: Tensor, tmp_path: Path, made: list[str]
) -> None:
    good = cached(images, tmp_path, names=NAMES).read("contrast", 2).images
    path = tmp_path / "contrast.npy"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    made.clear()
    with pytest.warns(UserWarning, match=r"contrast\.npy is damaged"):
        sets = cached(images, tmp_path, names=NAMES)
    assert made == ["contrast"] * 5
    assert torch.equal(sets.read("contrast", 2).images, good)


@pytest.mark.parametrize("text", ["", "[]", '{"unfinished": true}'])
def test_an_unfinished_file_is_made_anew(
    images: Tensor, tmp_path: Path, made: list[str], text: str
) -> None:
    cached(images, tmp_path, names=NAMES)
    (tmp_path / "contrast.json").write_text(text)
    made.clear()
    cached(images, tmp_path, names=NAMES)
    assert made == ["contrast"] * 5


@pytest.mark.parametrize("text", ['{"colour": 3}', "[1]", "notes", "[" * 10**5, "3"])
def test_json_of_somebody_else_is_not_overwritten(
    images: Tensor, tmp_path: Path, text: str
) -> None:
    """A config of others may name any folder as the one of the corrupted sets."""
    (tmp_path / "contrast.json").write_text(text)
    np.save(tmp_path / "labels.npy", np.arange(5))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"contrast\.json was not written by cached\(\)"):
        cached(images, tmp_path, names=NAMES)
    with pytest.raises(FileExistsError, match=r"labels\.npy was not written by cached\(\)"):
        cached(images, tmp_path, torch.zeros(len(images)), names=["fog"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interrupted_run_leaves_no_file_that_counts(
    images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "corrupt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached(images, tmp_path, names=["fog"])
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["fog.json"]
    assert len(list(cached(images, tmp_path, names=["fog"]))) == 5


def test_labels_of_the_users_own_are_never_overwritten(images: Tensor, tmp_path: Path) -> None:
    mine = tmp_path / "labels.npy"
    np.save(mine, np.arange(3))
    before = mine.read_bytes()
    with pytest.raises(FileExistsError, match=r"labels.npy was not written by cached\(\)"):
        cached(images, tmp_path, torch.zeros(len(images), dtype=torch.int64), names=["fog"])
    assert mine.read_bytes() == before
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("name", ["fog.json", "labels.npy"])
def test_a_pipe_among_corrupted_sets_is_neither_waited_for_nor_replaced(
    images: Tensor, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileExistsError, match=rf"{name} was not written by cached\(\)"):
        cached(images, tmp_path, torch.zeros(len(images), dtype=torch.int64), names=["fog"])
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("damage", ["pipe", "["])
def test_published_files_with_a_recipe_that_cannot_be_read_are_read(
    tmp_path: Path, damage: str
) -> None:
    publish(tmp_path)
    recipe = tmp_path / "fog.json"
    os.mkfifo(recipe) if damage == "pipe" else recipe.write_text(damage * 10**5)
    assert read_official(tmp_path).origin == ("official" if damage == "pipe" else "generated")


def test_published_files_are_never_overwritten(images: Tensor, tmp_path: Path) -> None:
    rows = publish(tmp_path)
    with pytest.raises(FileExistsError, match=r"was not written by cached\(\).*read_official"):
        cached(images, tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "fog.npy"), rows)


def test_bad_requests_write_nothing(images: Tensor, tmp_path: Path) -> None:
    root = tmp_path / "new"
    with pytest.raises(ValueError, match="Did you mean 'contrast'"):
        cached(images, root, names=["contrst"])
    with pytest.raises(TypeError, match="takes uint8 images"):
        cached(images.float(), root)
    with pytest.raises(ValueError, match=r"6 images and labels of shape \(5,\)"):
        cached(images, root, labels=torch.arange(5))
    assert not root.exists()
    with pytest.raises(ValueError, match="asked for 'fog' at severity 1; it holds contrast"):
        cached(images, root, names=["contrast"]).read("fog", 1)


def test_grey_digits_are_cached_with_one_channel(tmp_path: Path) -> None:
    grey = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    sets = cached(grey, tmp_path, names=["pixelate"])
    assert np.load(tmp_path / "pixelate.npy").shape == (15, 8, 8, 1)
    assert torch.equal(sets.read("pixelate", 5).images, corrupt(grey, "pixelate", 5))


# --- read_official -------------------------------------------------------------------------------


def test_official_files_are_read_severity_by_severity(tmp_path: Path) -> None:
    publish(tmp_path)
    sets = read_official(tmp_path)
    assert (sets.origin, sets.frost, sets.num) == ("official", None, 4)
    assert sets.labels is not None
    assert sets.labels.tolist() == [0, 1, 2, 3]
    assert sets.labels.dtype == torch.int64
    found = list(sets)
    assert len(found) == 75
    assert found[3].images.shape == (4, 3, 32, 32)
    assert found[3].images[:, 0, 0, 0].tolist() == [40, 41, 42, 43]
    assert found[3].origin == "official"
    first = read_official(tmp_path, n=2)
    assert first.read("fog", 5).images[:, 2, 31, 31].tolist() == [50, 51]
    assert first.labels is not None
    assert first.labels.tolist() == [0, 1]


def test_generated_folders_are_never_called_official(tmp_path: Path) -> None:
    grey = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    cached(grey, tmp_path, labels=torch.tensor([3, 4]))
    sets = read_official(tmp_path)
    assert (sets.origin, sets.frost) == ("generated", "procedural")
    assert {made.origin for made in sets} == {"generated"}


def test_a_broken_official_folder_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    with pytest.raises(ValueError, match=r"n=9; .* has 4 images per severity: give 1 to 4"):
        read_official(tmp_path, n=9)
    np.save(tmp_path / "fog.npy", np.zeros((15, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="files of different lengths"):
        read_official(tmp_path)
    np.save(tmp_path / "fog.npy", np.zeros((20, 32, 32), np.float32))
    with pytest.raises(ValueError, match=r"holds float32 of shape \(20, 32, 32\); expected uint8"):
        read_official(tmp_path)
    (tmp_path / "fog.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"fog\.npy is no complete \.npy file"):
        read_official(tmp_path)
    (tmp_path / "fog.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks fog\.npy; give the unpacked folder"):
        read_official(tmp_path)
