"""Objects of a generated street: trees, lamps, signs, cars, people, and the anomalies.

Every function paints one object at x metres to the right and z metres away, random in size and colour.
"""

from __future__ import annotations

import numpy as np

from lpbnn.data._painter import Canvas, Colour

CLASSES = ("sky", "building", "road", "pavement", "tree", "pole", "sign", "car", "person")
SKY, BUILDING, ROAD, PAVEMENT, TREE, POLE, SIGN, CAR, PERSON = range(9)
ANOMALY = len(CLASSES)
Random = np.random.RandomState
DARK, WHITE = np.full(3, 0.09, np.float32), np.full(3, 0.92, np.float32)
LAMPS = np.array((0.85, 0.12, 0.1), np.float32)
LIVERIES = (
    (0.75, 0.75, 0.78),
    (0.12, 0.12, 0.14),
    (0.65, 0.1, 0.1),
    (0.12, 0.22, 0.5),
    (0.9, 0.9, 0.88),
)


def around(random: Random, colour: tuple[float, ...], spread: float) -> Colour:
    """A colour near the given one: lighter or darker, and a little to one side."""
    shift = random.uniform(-spread, spread) + random.uniform(-spread, spread, 3) / 3
    return np.clip(np.array(colour, np.float32) + shift, 0, 1).astype(np.float32)


def tree(canvas: Canvas, random: Random, x: float, z: float) -> None:
    height, spread = random.uniform(3.5, 7), random.uniform(1, 2)
    trunk, green = around(random, (0.3, 0.22, 0.16), 0.05), around(random, (0.2, 0.38, 0.15), 0.1)
    canvas.shadow(x, z, spread)
    canvas.quad((x - 0.14, x + 0.14), (0, height), z, trunk, TREE)
    for _ in range(9):
        dx, dy = random.uniform(-0.7, 0.7) * spread, random.uniform(-0.5, 0.5) * spread
        reach = spread * random.uniform(0.4, 0.7)
        leaf = green * random.uniform(0.75, 1.25)
        canvas.disc((x + dx, height + dy, z), (reach, reach), leaf, TREE)


def lamp(canvas: Canvas, random: Random, x: float, z: float, side: int) -> None:
    grey, height = around(random, (0.35,) * 3, 0.08), random.uniform(5, 6.5)
    canvas.quad((x - 0.09, x + 0.09), (0, height), z, grey, POLE)
    arm = sorted((x, x - side * 1.1))
    canvas.quad((arm[0], arm[1]), (height - 0.15, height), z, grey, POLE)


def sign(canvas: Canvas, random: Random, x: float, z: float) -> None:
    height = random.uniform(2, 2.6)
    canvas.quad((x - 0.06, x + 0.06), (0, height), z, around(random, (0.45,) * 3, 0.06), POLE)
    face = np.array(((0.8, 0.1, 0.1), (0.1, 0.25, 0.7), (0.9, 0.75, 0.1))[random.randint(3)])
    if random.uniform() < 0.5:
        canvas.disc((x, height + 0.3, z), (0.38, 0.38), face, SIGN)
        canvas.disc((x, height + 0.3, z), (0.22, 0.22), WHITE, SIGN)
    else:
        canvas.quad((x - 0.4, x + 0.4), (height, height + 0.75), z, face, SIGN)
        canvas.quad((x - 0.28, x + 0.28), (height + 0.3, height + 0.45), z, WHITE, SIGN)


def car(canvas: Canvas, random: Random, x: float, z: float) -> None:
    """Seen from behind, or, when it crosses, from the side."""
    paint = around(random, LIVERIES[random.randint(len(LIVERIES))], 0.1)
    glass, tall = around(random, (0.2, 0.25, 0.3), 0.06), random.uniform(1.35, 1.75)
    if random.uniform() < 0.3:
        _car_side(canvas, paint, glass, x, z, tall)
    else:
        _car_back(canvas, paint, glass, x, z, tall)


def _car_back(
    canvas: Canvas, paint: Colour, glass: Colour, x: float, z: float, tall: float
) -> None:
    canvas.shadow(x, z, 1.15)
    for wheel in (-0.75, 0.75):
        canvas.quad((x + wheel - 0.14, x + wheel + 0.14), (0, 0.45), z, DARK, CAR)
    canvas.trapezium(x, (0.28, 0.85), (0.92, 0.92), z, paint, CAR)
    canvas.trapezium(x, (0.85, tall), (0.85, 0.62), z, paint, CAR)
    canvas.trapezium(x, (0.92, tall - 0.12), (0.72, 0.55), z, glass, CAR)
    for lamp in (-0.72, 0.72):
        canvas.quad((x + lamp - 0.14, x + lamp + 0.14), (0.6, 0.78), z, LAMPS, CAR)
    canvas.quad((x - 0.26, x + 0.26), (0.42, 0.55), z, WHITE, CAR)


def _car_side(
    canvas: Canvas, paint: Colour, glass: Colour, x: float, z: float, tall: float
) -> None:
    canvas.shadow(x, z, 2.2)
    canvas.trapezium(x, (0.28, 0.85), (2.1, 2.0), z, paint, CAR)
    canvas.trapezium(x, (0.85, tall), (1.35, 0.85), z, paint, CAR)
    canvas.trapezium(x, (0.9, tall - 0.1), (1.2, 0.8), z, glass, CAR)
    canvas.quad((x - 0.05, x + 0.05), (0.85, tall), z, paint, CAR)
    for wheel in (-1.3, 1.3):
        canvas.disc((x + wheel, 0.33, z), (0.33, 0.33), DARK, CAR)
        canvas.disc((x + wheel, 0.33, z), (0.16, 0.16), WHITE * 0.6, CAR)


def person(canvas: Canvas, random: Random, x: float, z: float) -> None:
    """Legs apart or together, a coat, a head."""
    tall, stride = random.uniform(1.5, 1.9), random.uniform(0.06, 0.2)
    coat, cloth = around(random, (0.4, 0.35, 0.4), 0.3), around(random, (0.2, 0.2, 0.3), 0.12)
    skin = around(random, (0.7, 0.52, 0.42), 0.18)
    canvas.shadow(x, z, 0.4)
    for leg in (-stride, stride):
        canvas.quad((x + leg - 0.09, x + leg + 0.09), (0, 0.5 * tall), z, cloth, PERSON)
    canvas.trapezium(x, (0.45 * tall, 0.85 * tall), (0.2, 0.25), z, coat, PERSON)
    canvas.disc((x, 0.92 * tall, z), (0.12, 0.15), skin, PERSON)


def cow(canvas: Canvas, random: Random, x: float, z: float) -> None:
    hide, spot = around(random, (0.85, 0.8, 0.75), 0.1), around(random, (0.3, 0.2, 0.15), 0.12)
    ahead = random.choice([-1, 1])
    canvas.shadow(x, z, 1.2)
    for leg in (-0.75, -0.55, 0.5, 0.7):
        canvas.quad((x + leg - 0.08, x + leg + 0.08), (0, 0.8), z, hide * 0.85, ANOMALY)
    canvas.disc((x, 1.05, z), (1.05, 0.45), hide, ANOMALY)
    for _ in range(4):
        at = (x + random.uniform(-0.6, 0.6), random.uniform(0.9, 1.25), z)
        canvas.disc(at, (random.uniform(0.12, 0.3), random.uniform(0.1, 0.2)), spot, ANOMALY)
    canvas.disc((x + ahead * 1.2, 1.4, z), (0.34, 0.24), spot, ANOMALY)
    canvas.disc((x + ahead * 1.45, 1.32, z), (0.16, 0.14), hide, ANOMALY)


def cone(canvas: Canvas, random: Random, x: float, z: float) -> None:
    tall, orange = random.uniform(0.9, 1.5), around(random, (0.95, 0.4, 0.08), 0.06)
    canvas.shadow(x, z, 0.5)
    canvas.quad((x - 0.42 * tall, x + 0.42 * tall), (0, 0.08), z, orange * 0.8, ANOMALY)
    canvas.trapezium(x, (0.05, tall), (0.32 * tall, 0.04), z, orange, ANOMALY)
    for low, high in ((0.3, 0.48), (0.62, 0.76)):
        wide = [tall * (0.32 - 0.29 * part) for part in (low, high)]
        canvas.trapezium(x, (low * tall, high * tall), (wide[0], wide[1]), z, WHITE, ANOMALY)


def ball(canvas: Canvas, random: Random, x: float, z: float) -> None:
    reach = random.uniform(0.4, 0.9)
    skin = around(
        random, ((0.9, 0.2, 0.6), (0.2, 0.8, 0.3), (0.95, 0.85, 0.2))[random.randint(3)], 0.1
    )
    canvas.shadow(x, z, reach)
    canvas.disc((x, reach, z), (reach, reach), skin, ANOMALY)
    canvas.disc((x, reach, z), (0.3 * reach, reach), WHITE, ANOMALY)
    canvas.disc((x - 0.35 * reach, 1.4 * reach, z), (0.2 * reach, 0.2 * reach), WHITE, ANOMALY)


def crate(canvas: Canvas, random: Random, x: float, z: float) -> None:
    wide, tall = random.uniform(0.5, 1), random.uniform(0.7, 1.5)
    wood = around(random, (0.7, 0.5, 0.28), 0.08)
    canvas.shadow(x, z, 1.2 * wide)
    canvas.quad((x - wide, x + wide), (0, tall), z, wood, ANOMALY)
    for part in (0.0, 0.3, 0.62, 0.92):
        canvas.quad(
            (x - wide, x + wide), (part * tall, (part + 0.08) * tall), z, wood * 0.6, ANOMALY
        )
    for edge in (-wide, wide - 0.12):
        canvas.quad((x + edge, x + edge + 0.12), (0, tall), z, wood * 0.7, ANOMALY)


def sofa(canvas: Canvas, random: Random, x: float, z: float) -> None:
    cover = around(
        random, ((0.55, 0.15, 0.35), (0.15, 0.45, 0.4), (0.6, 0.5, 0.2))[random.randint(3)], 0.1
    )
    wide = random.uniform(0.9, 1.3)
    canvas.shadow(x, z, 1.1 * wide)
    for leg in (-0.85 * wide, 0.8 * wide):
        canvas.quad((x + leg, x + leg + 0.1), (0, 0.2), z, DARK, ANOMALY)
    canvas.quad((x - wide, x + wide), (0.4, 1.05), z, cover * 0.8, ANOMALY)
    for seat in (-0.85 * wide, 0.03 * wide):
        canvas.quad((x + seat, x + seat + 0.8 * wide), (0.15, 0.55), z, cover, ANOMALY)
    for arm in (-wide - 0.12, wide - 0.12):
        canvas.quad((x + arm, x + arm + 0.26), (0.12, 0.75), z, cover * 0.9, ANOMALY)


STRANGE = (cow, cone, ball, crate, sofa)
