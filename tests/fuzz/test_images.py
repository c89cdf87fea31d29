"""Pictures of others: read or told, in bounded time and memory."""

import io
import os
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from damage import damaged
from PIL import Image

from lpbnn import data
from lpbnn.data.files import read_image, read_scene, walk

TRIES = 150  # of each format
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO")


def whole(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_pictures_are_read_or_told(tmp_path: Path, kind: str) -> None:
    draw, content, path = random.Random(kind), whole(kind), tmp_path / "a.png"
    for _ in range(TRIES):
        path.write_bytes(damaged(content, draw))
        for read in (lambda: read_image(path, (3, 8, 8)), lambda: read_scene(path, 8)):
            with suppress(ValueError):
                assert read().shape[0] == 3


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def test_a_decompression_bomb_is_told(
    tmp_path: Path, command: Callable[..., int], finished: Path
) -> None:
    path = tmp_path / "bomb.png"
    size = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"\0" * 10**6)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    assert command("predict", finished, path) == 2


def test_a_pipe_is_not_waited_for(
    tmp_path: Path, command: Callable[..., int], finished: Path
) -> None:
    os.mkfifo(tmp_path / "a.png")
    assert command("predict", finished, tmp_path / "a.png") == 2


def test_a_pipe_among_the_pictures_of_a_data_set_is_told(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(9):
            (tmp_path / name / f"{i}.png").write_bytes(whole("PNG"))
    os.mkfifo(tmp_path / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"9\.png is a pipe"):
        data.load("folder", tmp_path)


def test_a_link_that_leads_back_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c.png").touch()
    (tmp_path / "a" / "b" / "again").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path)
    assert walk(tmp_path) == [tmp_path / "a" / "c.png"]


def test_no_program_is_started_for_a_picture(tmp_path: Path) -> None:
    """Pillow would hand PostScript to Ghostscript, whatever the file is called."""
    path = tmp_path / "a.png"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(ValueError, match="is a program that draws"):
        read_image(path, (3, 8, 8))
