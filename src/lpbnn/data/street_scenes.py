"""Generated street scenes: small pictures with labels, and odd objects that only the test part has.

A street in perspective: sky, houses with windows, road, pavements, trees, lamp posts, signs, cars and
people, in changing light. The bonnet of the car that carries the camera is void. Every test scene has
one or two objects of kinds that training never shows (a cow, a cone, a ball, a crate, a sofa); they
are the anomaly. A scene depends on the seed, its part and its number alone: asking for more scenes
does not change the first ones. Pillow draws the polygons; another version of it may set single pixels
at their edges differently.

World coordinates are metres: x to the right, y up from the ground, z away from the camera.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw

from lpbnn.data import Augment, Dataset, Entry, Splits
from lpbnn.data.files import VOID

CLASSES = ("sky", "building", "road", "pavement", "tree", "pole", "sign", "car", "person")
SKY, BUILDING, ROAD, PAVEMENT, TREE, POLE, SIGN, CAR, PERSON = range(9)
ANOMALY = len(CLASSES)
PARTS = ("train", "val", "test")
FINE = 3  # painted pixels per shown pixel, in both directions
HIDDEN = 100  # painted pixels of an anomaly, fewer than which are not worth detecting
FAR = 60.0  # metres: where the street ends
Colour = np.ndarray  # (3,), 0..1
Random = np.random.RandomState
DARK, WHITE = np.full(3, 0.09), np.full(3, 0.92)
RED, BLUE, YELLOW = np.array(((0.8, 0.1, 0.1), (0.1, 0.25, 0.7), (0.9, 0.75, 0.1)))


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
    """Paint one scene: the picture, uint8 (3, H, W), and its labels, uint8 (H, W)."""
    # numpy promises that a RandomState's stream never changes.
    random = Random(np.array(seed, np.uint32))
    canvas = Canvas(size, random)
    half = random.uniform(3.2, 5.0)  # width of the road
    facade = half + random.uniform(2.5, 4.5)
    _ground(canvas, random, half)
    for side in (-1, 1):
        _houses(canvas, random, side, facade)
    for z, x, shapes in sorted(
        _objects(random, half, facade, strange), key=lambda thing: -thing[0]
    ):
        canvas.stand(shapes, x, z)
    if strange and (canvas.shown_labels() == ANOMALY).sum() * FINE**2 < HIDDEN:
        canvas.stand(cone(random), 0.0, 6.0)
    bonnet = disc(0.5, 1.0, random.uniform(0.35, 0.5), random.uniform(0.05, 0.1))
    canvas.fill(
        bonnet * (canvas.width, canvas.height), around(random, (0.25, 0.25, 0.3), 0.2), VOID
    )
    light = random.uniform(0.7, 1.15) * around(random, (1.0, 0.98, 0.95), 0.05)
    picture = np.asarray(canvas.picture.reduce(FINE)) / 255 * light
    picture = np.clip(picture + random.normal(0, 0.02, (*size, 3)), 0, 1)
    return np.round(255 * picture).astype(np.uint8).transpose(2, 0, 1), canvas.shown_labels()


class Shape(NamedTuple):
    """A part of an object, upright and facing the camera."""

    outline: np.ndarray
    """(corners, 2): metres to the right of the object's foot, and up."""
    colour: Colour
    label: int


def box(x: float, y: float, width: float, height: float, top: float | None = None) -> np.ndarray:
    """Outline of a rectangle, or of a trapezium with another width at the top; y is its lower side."""
    low, high = width / 2, (width if top is None else top) / 2
    return np.array([(x - low, y), (x + low, y), (x + high, y + height), (x - high, y + height)])


def disc(x: float, y: float, wide: float, tall: float) -> np.ndarray:
    """Outline of an ellipse about (x, y) with these radii."""
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    return np.stack([x + wide * np.cos(angles), y + tall * np.sin(angles)], 1)


def around(random: Random, colour: Sequence[float] | Colour, spread: float) -> Colour:
    """A colour near the given one: lighter or darker, and a little to one side."""
    shift = random.uniform(-spread, spread) + random.uniform(-spread, spread, 3) / 3
    return np.clip(np.asarray(colour) + shift, 0, 1)


class Canvas:
    """Picture and labels of a scene, finer than they are shown, and the camera that looks at it."""

    def __init__(self, size: tuple[int, int], random: Random) -> None:
        self.height, self.width = (FINE * side for side in size)
        self.horizon = random.uniform(0.4, 0.5) * self.height
        self.centre = random.uniform(0.4, 0.6) * self.width
        self.eye, self.focal = random.uniform(1.4, 1.9), 0.75 * self.width
        self.haze = around(random, (0.78, 0.82, 0.86), 0.08)
        above = around(random, (0.35, 0.55, 0.85), 0.12)
        share = np.clip(np.arange(self.height) / self.horizon, 0, 1)[:, None, None]
        sky = np.broadcast_to(above + (self.haze - above) * share, (self.height, self.width, 3))
        self.picture = Image.fromarray((255 * sky).astype(np.uint8))
        self.labels = Image.new("L", self.picture.size, SKY)
        for _ in range(random.randint(0, 7)):
            x, y = random.uniform(0, self.width), random.uniform(0, 0.8) * self.horizon
            reach = random.uniform(0.05, 0.2) * self.width
            white = (above + random.uniform(0.85, 1)) / 2
            self.fill(disc(x, y, reach, 0.25 * reach), white, SKY)

    def fill(self, points: np.ndarray, colour: Colour, label: int | None) -> None:
        """Fill a polygon, (corners, 2) columns and rows; without a label, what was there keeps its own."""
        corners = [(x, y) for x, y in points.tolist()]
        red, green, blue = (int(255 * value) for value in np.clip(colour, 0, 1))
        ImageDraw.Draw(self.picture).polygon(corners, (red, green, blue))
        if label is not None:
            ImageDraw.Draw(self.labels).polygon(corners, label)

    def polygon(self, points: Sequence[Sequence[float]], colour: Colour, label: int | None) -> None:
        """Fill a polygon of (corners, 3) world coordinates, in the fog of its distance."""
        x, y, z = np.array(points).T
        columns = self.centre + self.focal * x / z
        rows = self.horizon + self.focal * (self.eye - y) / z
        seen = self.haze + (colour - self.haze) * np.exp(-z.mean() / 90)
        self.fill(np.stack([columns, rows], 1), seen, label)

    def stand(self, shapes: Sequence[Shape], x: float, z: float) -> None:
        """Paint an object at its place, on its shadow."""
        reach = max(np.abs(outline).max(0)[0] for outline, _, _ in shapes)
        shadow = disc(x, z, reach, min(0.3 * reach, 0.5 * z))
        self.polygon([(across, 0, away) for across, away in shadow], 2 * DARK, None)
        for outline, colour, label in shapes:
            self.polygon([(x + across, up, z) for across, up in outline], colour, label)

    def shown_labels(self) -> np.ndarray:
        """The label in the middle of every shown pixel, uint8 (H, W)."""
        return np.array(self.labels)[FINE // 2 :: FINE, FINE // 2 :: FINE]


def _ground(canvas: Canvas, random: Random, half: float) -> None:
    """Road with its dashes, kerbs and pavements, in strips from the horizon to the camera."""

    def strip(
        left: float, right: float, ends: tuple[float, float], colour: Colour, to: int
    ) -> None:
        near, far = ends
        corners = [(left, 0, near), (right, 0, near), (right, 0, far), (left, 0, far)]
        canvas.polygon(corners, colour, to)

    asphalt, stone = around(random, (0.3,) * 3, 0.06), around(random, (0.55, 0.53, 0.5), 0.08)
    for far, near in pairwise(np.geomspace(1000, 0.5, 50)):
        rough = random.uniform(0.95, 1.05)
        strip(-5 * far - 20, 5 * far + 20, (near, far), stone * rough, PAVEMENT)
        strip(-half, half, (near, far), asphalt * rough, ROAD)
        for side in (-half, half):
            strip(side - 0.1, side + 0.1, (near, far), stone * 1.2, PAVEMENT)
    for dash in np.arange(FAR, 0, -5):
        strip(-0.09, 0.09, (dash, dash + 2.6), WHITE, ROAD)


def _houses(canvas: Canvas, random: Random, side: int, facade: float) -> None:
    """A row of houses along one side, their windows in perspective, painted far to near."""
    x = side * facade
    ends = [2.0]
    while ends[-1] < FAR:
        ends.append(ends[-1] + random.uniform(6, 14))
    for near, far in reversed(list(pairwise(ends))):
        height, gap = random.uniform(5, 16), random.uniform(0, 1.5)
        storeys, bays = int(height / random.uniform(2.6, 3.4)), int((far - near) / 2.6)
        wall = around(random, (0.62, 0.52, 0.45), 0.16)
        glass = around(random, (0.25, 0.3, 0.36), 0.08)
        gable = [(x, 0), (x, height), (x + side * 12, height), (x + side * 12, 0)]
        canvas.polygon([(*corner, near) for corner in gable], wall * 0.8, BUILDING)

        def front(z: tuple[float, float], y: tuple[float, float], colour: Colour) -> None:
            corners = [(z[0], y[0]), (z[0], y[1]), (z[1], y[1]), (z[1], y[0])]
            canvas.polygon([(x, up, away) for away, up in corners], colour, BUILDING)

        edges = np.linspace(far - gap, near, bays + 1)
        for back, ahead in pairwise(edges):
            front((ahead, back), (0, height), wall)
            quarter, storey = (back - ahead) / 4, height / storeys
            for floor in range(storeys):
                rows = (floor + 0.35) * storey, (floor + 0.8) * storey
                front((ahead + quarter, back - quarter), rows, glass)


def _objects(
    random: Random, half: float, facade: float, strange: bool
) -> list[tuple[float, float, list[Shape]]]:
    """Return the objects in the street: distance, place across, and parts of each."""
    found: list[tuple[float, float, list[Shape]]] = []

    def add(
        make: Callable[[Random], list[Shape]],
        count: int,
        across: tuple[float, float],
        away: tuple[float, float],
    ) -> None:
        for _ in range(count):
            z = away[0] * (away[1] / away[0]) ** random.uniform()
            found.append((z, random.uniform(*across), make(random)))

    for side in (-1, 1):
        pavement = side * (half + 0.5), side * (facade - 0.6)
        add(tree, random.randint(1, 4), pavement, (7, 40))
        add(person, random.randint(0, 3), pavement, (6, 20))
        add(lamp, random.randint(2, 5), (side * half, side * (half + 0.3)), (6, 50))
        add(sign, random.randint(0, 2), (side * (half + 0.4), side * (half + 0.8)), (6, 18))
    add(car, random.randint(1, 5), (1 - half, half - 1), (7, 35))
    add(person, random.randint(0, 2), (-half, half), (7, 15))
    for _ in range(random.randint(1, 3) if strange else 0):
        add(STRANGE[random.randint(len(STRANGE))], 1, (-2.2, 2.2), (5, 11))
    return found


def tree(random: Random) -> list[Shape]:
    """A trunk and a crown of nine discs."""
    height, spread = random.uniform(3.5, 7), random.uniform(1, 2)
    trunk, green = around(random, (0.3, 0.22, 0.16), 0.05), around(random, (0.2, 0.38, 0.15), 0.1)
    shapes = [Shape(box(0, 0, 0.28, height), trunk, TREE)]
    for _ in range(9):
        x, y = random.uniform(-0.7, 0.7) * spread, height + random.uniform(-0.5, 0.5) * spread
        reach = spread * random.uniform(0.4, 0.7)
        shapes.append(Shape(disc(x, y, reach, reach), green * random.uniform(0.75, 1.25), TREE))
    return shapes


def lamp(random: Random) -> list[Shape]:
    """A post with two arms."""
    grey, height = around(random, (0.35,) * 3, 0.08), random.uniform(5, 6.5)
    outlines = box(0, 0, 0.18, height), box(0, height - 0.15, 2.2, 0.15)
    return [Shape(outline, grey, POLE) for outline in outlines]


def sign(random: Random) -> list[Shape]:
    """A round or a square sign on its pole."""
    height, face = random.uniform(2, 2.6), (RED, BLUE, YELLOW)[random.randint(3)]
    pole = Shape(box(0, 0, 0.12, height), around(random, (0.45,) * 3, 0.06), POLE)
    if random.uniform() < 0.5:
        outlines = disc(0, height + 0.3, 0.38, 0.38), disc(0, height + 0.3, 0.22, 0.22)
    else:
        outlines = box(0, height, 0.8, 0.75), box(0, height + 0.3, 0.56, 0.15)
    return [pole, Shape(outlines[0], face, SIGN), Shape(outlines[1], WHITE, SIGN)]


def car(random: Random) -> list[Shape]:
    """A car from behind, or, when it crosses, from the side."""
    paint = around(random, (WHITE, WHITE * 0.8, DARK, RED, BLUE)[random.randint(5)], 0.1)
    glass, tall = around(random, (0.2, 0.25, 0.3), 0.06), random.uniform(1.35, 1.75)
    if random.uniform() < 0.3:
        parts = [
            (box(0, 0.28, 4.2, 0.57, 4.0), paint),
            (box(0, 0.85, 2.7, tall - 0.85, 1.7), paint),
            (box(0, 0.9, 2.4, tall - 1, 1.6), glass),
            (box(0, 0.85, 0.1, tall - 0.85), paint),
        ]
        for x in (-1.3, 1.3):
            parts += [(disc(x, 0.33, 0.33, 0.33), DARK), (disc(x, 0.33, 0.16, 0.16), WHITE * 0.6)]
    else:
        parts = [(box(x, 0, 0.28, 0.45), DARK) for x in (-0.75, 0.75)]
        parts += [
            (box(0, 0.28, 1.84, 0.57), paint),
            (box(0, 0.85, 1.7, tall - 0.85, 1.24), paint),
            (box(0, 0.92, 1.44, tall - 1.04, 1.1), glass),
            (box(0, 0.42, 0.52, 0.13), WHITE),
        ]
        parts += [(box(x, 0.6, 0.28, 0.18), RED) for x in (-0.72, 0.72)]
    return [Shape(outline, colour, CAR) for outline, colour in parts]


def person(random: Random) -> list[Shape]:
    """Legs apart or together, a coat, a head."""
    tall, stride = random.uniform(1.5, 1.9), random.uniform(0.06, 0.2)
    coat, cloth = around(random, (0.4, 0.35, 0.4), 0.3), around(random, (0.2, 0.2, 0.3), 0.12)
    skin = around(random, (0.7, 0.52, 0.42), 0.18)
    parts = [(box(x, 0, 0.18, 0.5 * tall), cloth) for x in (-stride, stride)]
    parts.append((box(0, 0.45 * tall, 0.4, 0.4 * tall, 0.5), coat))
    parts.append((disc(0, 0.92 * tall, 0.12, 0.15), skin))
    return [Shape(outline, colour, PERSON) for outline, colour in parts]


def cow(random: Random) -> list[Shape]:
    """A spotted cow from the side."""
    hide, spot = around(random, (0.85, 0.8, 0.75), 0.1), around(random, (0.3, 0.2, 0.15), 0.12)
    ahead = random.choice([-1, 1])
    parts = [(box(x, 0, 0.16, 0.8), hide * 0.85) for x in (-0.75, -0.55, 0.5, 0.7)]
    parts.append((disc(0, 1.05, 1.05, 0.45), hide))
    for _ in range(4):
        x, y = random.uniform(-0.6, 0.6), random.uniform(0.9, 1.25)
        parts.append((disc(x, y, random.uniform(0.12, 0.3), random.uniform(0.1, 0.2)), spot))
    parts.append((disc(ahead * 1.2, 1.4, 0.34, 0.24), spot))
    parts.append((disc(ahead * 1.45, 1.32, 0.16, 0.14), hide))
    return [Shape(outline, colour, ANOMALY) for outline, colour in parts]


def cone(random: Random) -> list[Shape]:
    """A traffic cone with two white rings."""
    tall, orange = random.uniform(0.9, 1.5), around(random, (0.95, 0.4, 0.08), 0.06)
    parts = [(box(0, 0, 0.84, 0.06), orange * 0.8), (box(0, 0.05, 0.64, 0.95, 0.06), orange)]
    parts += [(box(0, 0.3, 0.46, 0.18, 0.36), WHITE), (box(0, 0.62, 0.27, 0.14, 0.19), WHITE)]
    return [Shape(tall * outline, colour, ANOMALY) for outline, colour in parts]


def ball(random: Random) -> list[Shape]:
    """A beach ball with a white stripe and a highlight."""
    reach, skin = random.uniform(0.4, 0.9), around(random, (0.9, 0.4, 0.5), 0.3)
    parts = [
        (disc(0, 1, 1, 1), skin),
        (disc(0, 1, 0.3, 1), WHITE),
        (disc(-0.35, 1.4, 0.2, 0.2), WHITE),
    ]
    return [Shape(reach * outline, colour, ANOMALY) for outline, colour in parts]


def crate(random: Random) -> list[Shape]:
    """A wooden crate with four slats and two posts."""
    wide, tall = random.uniform(1, 2), random.uniform(0.7, 1.5)
    wood = around(random, (0.7, 0.5, 0.28), 0.08)
    parts = [(box(0, 0, wide, tall), wood)]
    parts += [(box(0, y * tall, wide, 0.08 * tall), wood * 0.6) for y in (0.0, 0.3, 0.62, 0.92)]
    parts += [(box(x, 0, 0.12, tall), wood * 0.7) for x in (0.06 - wide / 2, wide / 2 - 0.06)]
    return [Shape(outline, colour, ANOMALY) for outline, colour in parts]


def sofa(random: Random) -> list[Shape]:
    """A sofa with two seats."""
    cover, wide = around(random, (0.45, 0.35, 0.35), 0.25), random.uniform(0.9, 1.3)
    parts = [(box(x * wide, 0, 0.1, 0.2), DARK) for x in (-0.8, 0.8)]
    parts.append((box(0, 0.4, 2 * wide, 0.65), cover * 0.8))
    parts += [(box(x * wide, 0.15, 0.8 * wide, 0.4), cover) for x in (-0.45, 0.45)]
    parts += [(box(x * wide, 0.12, 0.26, 0.63), cover * 0.9) for x in (-1, 1)]
    return [Shape(outline, colour, ANOMALY) for outline, colour in parts]


STRANGE = (cow, cone, ball, crate, sofa)
SETS = {
    "street-scenes": Entry(
        load,
        "generated street scenes, 9 classes; anomalies: a cow, a cone, a ball, a crate, a sofa",
    )
}
