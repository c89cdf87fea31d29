"""Pictures from files, in the shape a network was trained on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

MODES = {1: "L", 3: "RGB"}


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
    try:
        with Image.open(path) as picture:
            wanted = picture.convert(MODES[channels]).resize(
                (width, height), Image.Resampling.BICUBIC
            )
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file.") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder; give image files.") from error
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read: damaged, or no image ({error}).") from error
    pixels = torch.from_numpy(np.asarray(wanted, dtype=np.uint8).copy())
    return pixels.view(height, width, channels).permute(2, 0, 1).contiguous()
