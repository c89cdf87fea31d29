"""Small folders of pictures, a folder for each class."""

from pathlib import Path

import numpy as np
from PIL import Image

from lpbnn import data
from lpbnn.data import Splits

SIZE = (10, 8)  # width, height


def picture(path: Path, size: tuple[int, int] = SIZE, mode: str = "RGB") -> Path:
    """A picture that no other path has, so that pictures can be told apart."""
    random = np.random.RandomState([*path.as_posix().encode()])
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def classes(folder: Path, *names: str, each: int = 10, mode: str = "RGB") -> Path:
    for name in names:
        for number in range(each):
            picture(folder / name / f"{number:02}.png", mode=mode)
    return folder


def load(root: Path, **options: object) -> Splits:
    return data.load("folder", root, **options)
