"""Photographs that are stored turned: read as they are shown, for prediction and from data sets alike."""

from pathlib import Path

import numpy as np
import pytest
import streets
import torch
from PIL import Image, ImageOps

from lpbnn import data
from lpbnn.data import files
from lpbnn.data.files import ORIENTATION, read_image, read_scene

COLOURS = np.random.RandomState(0).randint(0, 256, (*streets.SIZE, 3), dtype=np.uint8)


def stored(path: Path, orientation: int, colours: np.ndarray = COLOURS) -> Path:
    """A picture that is shown as `colours` turned by `orientation`."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    lossless = {"lossless": True} if path.suffix == ".webp" else {}
    Image.fromarray(colours).save(path, exif=exif, **lossless)
    return path


@pytest.mark.parametrize("ending", ["png", "webp", "jpg", "tif"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_photograph_is_read_as_it_is_shown(tmp_path: Path, orientation: int, ending: str) -> None:
    path = stored(tmp_path / f"a.{ending}", orientation)
    with Image.open(path) as picture:
        picture.load()
        shown = np.asarray(ImageOps.exif_transpose(picture))  # Pillow's own
    size = (shown.shape[0], shown.shape[1])
    assert (size != streets.SIZE) == (orientation in (5, 6, 7, 8))
    expected = torch.from_numpy(shown.copy()).permute(2, 0, 1)
    assert torch.equal(read_scene(path, size[0]), expected)
    assert torch.equal(read_image(path, (3, *size)), expected)
    assert read_scene(path, 24).shape == (3, 24, round(24 * size[1] / size[0]))
    assert files.header(path).size == size  # known before it is decoded
    assert np.array_equal(files.read_picture(path, size, size), shown)


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"nonsense"])
def test_broken_exif_data_is_no_reason_to_refuse_a_picture(tmp_path: Path, exif: bytes) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(COLOURS).save(path, exif=exif)
    assert np.array_equal(read_scene(path, len(COLOURS)).permute(1, 2, 0), COLOURS)
    assert files.header(path).size == streets.SIZE


def test_a_label_map_belongs_to_the_picture_as_it_is_shown(tmp_path: Path) -> None:
    folder = streets.camvid(tmp_path) / "camvid" / "train"
    before = data.load("camvid", tmp_path).train[0]
    with Image.open(folder / "000.png") as picture:
        upright = np.array(picture)
    stored(folder / "000.png", 6, np.rot90(upright).copy())  # of a camera held upright
    after = data.load("camvid", tmp_path).train[0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    stored(folder / "000.png", 6, upright)  # its label map is that of the stored pixels
    with pytest.raises(ValueError, match=r"train/000.png is 12x16, its label map .* is 16x12"):
        data.load("camvid", tmp_path)
