"""Generated street scenes: small pictures with labels, and odd objects that only the test part has.

A street in perspective: sky, houses with windows, road, pavements, trees, lamp posts, signs, cars and
people, in changing light. The bonnet of the car that carries the camera is void. Every test scene has
one or two objects of kinds that training never shows (a cow, a cone, a ball, a crate, a sofa); they
are the anomaly. A scene depends on the seed, its part and its number alone: asking for more scenes
does not change the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from lpbnn.data import Augment, Dataset, Entry, Splits
from lpbnn.data import _street_objects as things
from lpbnn.data._painter import Canvas, Colour
from lpbnn.data._street_objects import (
    ANOMALY,
    BUILDING,
    CLASSES,
    PAVEMENT,
    ROAD,
    SKY,
    Random,
    around,
)
from lpbnn.data.files import VOID

PARTS = ("train", "val", "test")
HIDDEN = 100  # painted pixels of an anomaly, fewer than which are not worth detecting
FAR = 60.0  # metres: where the street ends


def load(
    root: Path | None = None,
    train: int = 200,
    val: int = 40,
    test: int = 60,
    size: Sequence[int] = (64, 128),
    seed: int = 0,
) -> Splits:
    """Generate the scenes of each part.

    Args:
        train, val, test: number of scenes.
        size: height and width.
        seed: of the scenes; independent of the run's.

    >>> splits = load(train=2, val=1, test=1, size=(32, 64))
    >>> splits.shape, splits.num_classes, splits.ood_index, splits.ignore_index
    ((3, 32, 64), 9, 9, 255)
    """
    if min(train, val, test) < 1 or len(size) != 2 or min(size) < 16 or seed < 0:
        raise ValueError(
            f"street-scenes: train={train}, val={val}, test={test}, size={tuple(size)}, seed={seed}; "
            "expected at least one scene of each part, a height and width of at least 16, and a seed "
            "of at least 0."
        )
    parts = [
        _part(number, count, (size[0], size[1]), seed)
        for number, count in enumerate((train, val, test))
    ]
    unit = parts[0].inputs.double().transpose(0, 1).flatten(1) / 255
    return Splits(
        name="street-scenes",
        task="segmentation",
        train=parts[0],
        val=parts[1],
        test=parts[2],
        num_classes=len(CLASSES),
        classes=CLASSES,
        mean=tuple(unit.mean(1).tolist()),
        std=tuple(unit.std(1, correction=0).tolist()),
        ignore_index=VOID,
        ood_index=ANOMALY,
        description=SETS["street-scenes"].description,
        source="generated",
        augment=Augment(flip=True, scale=(0.75, 1.5), colour=0.2),
    )


def _part(part: int, count: int, size: tuple[int, int], seed: int) -> Dataset:
    made = [scene([seed, part, i], size, strange=PARTS[part] == "test") for i in range(count)]
    images, labels = (np.stack(arrays) for arrays in zip(*made, strict=True))
    return Dataset(torch.from_numpy(images), torch.from_numpy(labels))


def scene(
    seed: Sequence[int], size: tuple[int, int], strange: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One picture, uint8 (3, H, W), and its labels, uint8 (H, W)."""
    # numpy promises that a RandomState's stream never changes.
    random = Random(np.array(seed, np.uint32))
    top = around(random, (0.35, 0.55, 0.85), 0.12)
    haze = around(random, (0.78, 0.82, 0.86), 0.08)
    canvas = Canvas(
        *size,
        horizon=random.uniform(0.4, 0.5),
        centre=random.uniform(0.4, 0.6),
        eye=random.uniform(1.4, 1.9),
        haze=haze,
    )
    half = random.uniform(3.2, 5.0)  # of the road
    facade = half + random.uniform(2.5, 4.5)
    _sky(canvas, random, top)
    for side in (-1, 1):
        _houses(canvas, random, side * facade)
    _ground(canvas, random, half)
    for _, paint in sorted(_objects(random, half, facade, strange), key=lambda item: -item[0]):
        paint(canvas)
    if strange and (canvas.label == ANOMALY).sum() < HIDDEN:
        things.cone(canvas, random, 0.0, 6.0)
    _bonnet(canvas, random)
    light = random.uniform(0.7, 1.15) * around(random, (1.0, 0.98, 0.95), 0.05)
    return canvas.shown(light, random.normal(0, 0.02, (*size, 3)).astype(np.float32))


def _objects(
    random: Random, half: float, facade: float, strange: bool
) -> list[tuple[float, Callable[[Canvas], None]]]:
    """Return the objects in the street: the distance of each, and how to paint it."""
    found: list[tuple[float, Callable[[Canvas], None]]] = []

    def add(make: Callable[..., None], low: float, high: float, z: float, *more: object) -> None:
        x = random.uniform(low, high)
        found.append((z, lambda canvas: make(canvas, random, x, z, *more)))

    def depth(near: float = 7.0, far: float = 40.0) -> float:
        return near * (far / near) ** random.uniform()

    for side in (-1, 1):
        kerb, wall = sorted((side * (half + 0.5), side * (facade - 0.6)))
        for _ in range(random.randint(1, 4)):
            add(things.tree, kerb, wall, depth())
        for _ in range(random.randint(0, 3)):
            add(things.person, kerb, wall, depth(6, 20))
        if random.uniform() < 0.7:
            add(things.sign, side * (half + 0.4), side * (half + 0.8), depth(6, 18))
        spacing = random.uniform(9, 14)
        for number in range(4):
            add(
                things.lamp,
                *[side * (half + 0.3)] * 2,
                6 + spacing * (number + random.uniform(0, 0.2)),
                side,
            )
    for _ in range(random.randint(1, 5)):
        add(things.car, 1 - half, half - 1, depth(7, 35))
    if random.uniform() < 0.4:
        add(things.person, -half, half, depth(7, 15))
    if strange:
        for _ in range(random.randint(1, 3)):
            z = depth(5, 11)
            reach = min(half, 0.45 * z)  # not outside the picture
            add(things.STRANGE[random.randint(len(things.STRANGE))], -reach, reach, z)
    return found


def _sky(canvas: Canvas, random: Random, top: Colour) -> None:
    """From the colour above to the haze at the horizon, with some clouds."""
    canvas.label[:] = SKY
    share = np.clip(np.arange(canvas.rows) / canvas.horizon, 0, 1)[:, None, None]
    canvas.colour[:] = top * (1 - share) + canvas.haze * share
    for _ in range(random.randint(0, 7)):
        at = random.uniform(0, canvas.columns), random.uniform(0, 0.8) * canvas.horizon
        reach = random.uniform(0.05, 0.2) * canvas.columns
        white = np.full(3, random.uniform(0.85, 1), np.float32)
        canvas.ellipse(at, (reach, 0.25 * reach), white, None, strength=0.5)


def _houses(canvas: Canvas, random: Random, x: float) -> None:
    """A row of houses along one side, their windows in perspective, painted far to near."""
    ends = [2.0]
    while ends[-1] < FAR:
        ends.append(ends[-1] + random.uniform(6, 14))
    for near, far in reversed(list(pairwise(ends))):
        height = random.uniform(5, 16)
        wall = around(random, (0.62, 0.52, 0.45), 0.16)
        glass = around(random, (0.25, 0.3, 0.36), 0.08)
        storey, bay, gap = random.uniform(2.6, 3.4), random.uniform(2, 3.2), random.uniform(0, 1.5)
        across = sorted((x, x + np.sign(x) * 12))
        canvas.quad((across[0], across[1]), (0, height), near, wall * 0.8, BUILDING)
        end = far - gap

        def shade(
            rows: np.ndarray,
            columns: np.ndarray,
            bounds: tuple[float, float] = (near, end),
            colours: tuple[Colour, Colour] = (wall, glass),
            grid: tuple[float, float] = (storey, bay),
        ) -> np.ndarray:
            offset = columns - canvas.centre
            z = np.clip(canvas.focal * x / np.where(offset == 0, 1e-3, offset), *bounds)
            z = z.astype(np.float32)
            y = (canvas.eye - (rows - canvas.horizon) * (z / canvas.focal)).astype(np.float32)
            up, along = (y % grid[0]) / grid[0], (z % grid[1]) / grid[1]
            window = (up > 0.35) & (up < 0.8) & (along > 0.25) & (along < 0.75)
            return canvas.fog(np.where(window[..., None], colours[1], colours[0]), z)

        side = [(near, 0.0), (near, height), (end, height), (end, 0.0)]
        canvas.polygon([canvas.project(x, y, z) for z, y in side], shade, BUILDING)


def _ground(canvas: Canvas, random: Random, half: float) -> None:
    """Everything below the horizon: road with its dashes, kerbs, pavements."""
    first = int(np.ceil(canvas.horizon + 0.5))
    rows = np.arange(first, canvas.rows, dtype=np.float32)[:, None] + 0.5
    columns = np.arange(canvas.columns, dtype=np.float32)[None, :] + 0.5
    z = (canvas.focal * canvas.eye / (rows - canvas.horizon)).astype(np.float32)  # (h, 1)
    x = np.abs((columns - canvas.centre) * (z / canvas.focal)).astype(np.float32)
    asphalt, stone = around(random, (0.3,) * 3, 0.06), around(random, (0.55, 0.53, 0.5), 0.08)
    road = x < half
    colour = np.where(road[..., None], asphalt, stone)
    colour[(z < 25) & ~road & ((z % 1.6 < 0.12) | (x % 1.6 < 0.06))] *= np.float32(0.85)
    colour[np.abs(x - half) < 0.12] = stone * 1.2
    colour[(x < 0.09) & (z % 5 < 2.6)] = 0.85
    colour *= random.uniform(0.9, 1.1, (*x.shape, 1)).astype(np.float32)
    seen = road | (canvas.label[first:] != BUILDING)  # houses stand at the pavement's far edge
    canvas.colour[first:][seen] = canvas.fog(colour, z)[seen]
    canvas.label[first:][seen] = np.where(road, ROAD, PAVEMENT)[seen]


def _bonnet(canvas: Canvas, random: Random) -> None:
    reach = canvas.columns * random.uniform(0.35, 0.5), canvas.rows * random.uniform(0.05, 0.1)
    paint = around(random, (0.25, 0.25, 0.3), 0.2)
    canvas.ellipse((canvas.columns / 2, canvas.rows), reach, paint, VOID)


SETS = {
    "street-scenes": Entry(
        load,
        "generated street scenes, 9 classes; anomalies: a cow, a cone, a ball, a crate, a sofa",
    )
}
