"""A folder of pictures to try the command with: circles, squares, triangles, and crosses as strange ones.

python examples/draw_shapes.py shapes
lpbnn train --data folder --data-root shapes --data.size 32 --backbone lenet -o runs/shapes
"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

EACH = 100


def draw(shape: str, chance: random.Random) -> Image.Image:
    """One shape in a colour of its own, somewhere on a picture of some size."""
    size = chance.randint(40, 72), chance.randint(40, 72)
    ground, colour = ([chance.randint(low, low + 115) for _ in range(3)] for low in (0, 140))
    picture = Image.new("RGB", size, tuple(ground))
    r = chance.randint(6, min(size) // 2 - 6)
    x, y = (chance.randint(r + 2, side - r - 2) for side in size)
    brush, fill = ImageDraw.Draw(picture), tuple(colour)
    if shape == "circle":
        brush.ellipse((x - r, y - r, x + r, y + r), fill)
    elif shape == "square":
        brush.rectangle((x - r, y - r, x + r, y + r), fill)
    elif shape == "triangle":
        brush.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
    else:
        brush.line((x - r, y - r, x + r, y + r), fill, width=r // 2)
        brush.line((x - r, y + r, x + r, y - r), fill, width=r // 2)
    return picture


def write(folder: Path, each: int = EACH, seed: int = 0) -> None:
    """``each`` pictures of every class in a folder of its name, and as many crosses in ``ood``."""
    chance = random.Random(seed)
    for name, shape in {**{s: s for s in ("circle", "square", "triangle")}, "ood": "cross"}.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            draw(shape, chance).save(folder / name / f"{number:03}.png")
    print(f"wrote {4 * each} pictures into {folder}")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "shapes"))
