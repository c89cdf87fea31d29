"""Pictures from files, in the shape a network was trained on.

A photograph that is stored turned or mirrored, as its EXIF data tells, is read as a viewer shows it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

MODES = {1: "L", 3: "RGB"}
ORIENTATION = 0x0112  # the EXIF tag
UPRIGHT = {  # what undoes each orientation but 1
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DEEP = ("I", "I;16", "I;16B", "I;16L", "F")  # a conversion to 8 bits would clip, not scale


def read_scene(path: Path | str, height: int | None) -> Tensor:
    """One file to uint8 (3, H, W) of a height, its shape kept; None: of its own size."""
    with opened(path) as picture:
        colours = in_mode(picture, "RGB", path)
        tall, wide = scaled((colours.height, colours.width), height)
        if tall != colours.height:
            colours = colours.resize((wide, tall), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(colours, dtype=np.uint8).copy())
    return pixels.permute(2, 0, 1).contiguous()


def scaled(size: tuple[int, int], height: int | None) -> tuple[int, int]:
    """Height and width that a scene of a size is read in.

    >>> scaled((720, 1280), 360), scaled((720, 1280), None)
    ((360, 640), (720, 1280))
    """
    return size if height is None else (height, max(1, round(size[1] * height / size[0])))


def read_images(paths: Sequence[Path | str], shape: tuple[int, ...]) -> Tensor:
    """Files to uint8 (N, C, H, W): converted to grey or RGB, then resized to the network's size.

    A missing or damaged file is an error that names it; transparency is dropped.
    """
    return torch.stack([read_image(path, shape) for path in paths])


def read_image(path: Path | str, shape: tuple[int, ...]) -> Tensor:
    """One file to uint8 (C, H, W)."""
    channels, height, width = shape
    if channels not in MODES:
        raise ValueError(
            f"the network takes {channels} channels; a picture has 1 (grey) or 3 (RGB)."
        )
    with opened(path) as picture:
        converted = in_mode(picture, MODES[channels], path)
        wanted = converted.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(wanted, dtype=np.uint8).copy())
    return pixels.view(height, width, channels).permute(2, 0, 1).contiguous()


@contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """The picture in a file, open; a missing or damaged file is an error that names it."""
    try:
        with Image.open(path) as picture:
            yield picture
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file.") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder; give image files.") from error
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(
            f"{path} cannot be read: damaged, or no image ({error}). Fix: get the file again."
        ) from error


def orientation(picture: Image.Image) -> int:
    """How a picture just opened is stored, 1 to 8, from its head alone; 1, as it is shown."""
    if picture.format == "TIFF":  # Pillow turns it by itself
        return 1
    try:
        # Not the PNG reader's own, which would decode the pixels in search of data behind them.
        found = Image.Image.getexif(picture).get(ORIENTATION, 1)
    except Exception:  # broken EXIF data raises anything, and is no reason to refuse the pixels
        return 1
    return found if found in UPRIGHT else 1


def size_shown(picture: Image.Image) -> tuple[int, int]:
    """Height and width of a picture just opened, as it is shown."""
    width, height = picture.size
    return (width, height) if orientation(picture) >= 5 else (height, width)


def upright(picture: Image.Image) -> Image.Image:
    """A picture just opened, as it is shown."""
    turn = UPRIGHT.get(orientation(picture))
    return picture if turn is None else picture.transpose(turn)


def in_mode(picture: Image.Image, mode: str, path: Path | str) -> Image.Image:
    """A picture just opened, as it is shown, as "L" or "RGB"; transparency is dropped."""
    if picture.mode in DEEP:
        raise ValueError(
            f"{path} has pixels of more than 8 bits (mode {picture.mode!r}), of which a conversion "
            "would keep the lowest. Fix: save it with 8 bits per channel."
        )
    picture = upright(picture)
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert(mode)
