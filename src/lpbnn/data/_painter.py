"""A canvas in perspective that paints colours and labels together: for generated street scenes.

World coordinates are metres: x to the right, y up from the ground, z away from the camera. Everything
is painted far to near, three times finer than it is shown; colours are then averaged, labels taken
from the middle, so that both have the same outline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, floor

import numpy as np

FINE = 3  # painted pixels per shown pixel, in both directions
Colour = np.ndarray  # (3,), or (rows, columns, 3) from a Shader; 0..1
Shader = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # fine rows (h, 1), columns (1, w) -> colours
Point = tuple[float, float]


class Canvas:
    """Colours (h, w, 3) and labels (h, w) of one scene, and the camera that looks at it."""

    def __init__(
        self, height: int, width: int, horizon: float, centre: float, eye: float, haze: Colour
    ) -> None:
        self.rows, self.columns = height * FINE, width * FINE
        self.colour = np.zeros((self.rows, self.columns, 3), np.float32)
        self.label = np.zeros((self.rows, self.columns), np.uint8)
        self.horizon, self.centre, self.eye = horizon * self.rows, centre * self.columns, eye
        self.focal = 0.75 * self.columns
        self.haze = haze

    def project(self, x: float, y: float, z: float) -> tuple[float, float]:
        """The fine (column, row) of a point."""
        return self.centre + self.focal * x / z, self.horizon + self.focal * (self.eye - y) / z

    def fog(self, colour: Colour, z: float | np.ndarray) -> Colour:
        """A colour as it looks from `z` metres away."""
        share = 1 - np.exp(np.asarray(z, np.float32) / np.float32(-90))[..., None]
        return colour + (self.haze - colour) * share

    def polygon(self, points: Sequence[Point], colour: Colour | Shader, label: int | None) -> None:
        """A convex polygon of (column, row) corners; without a label, what was there keeps its own."""
        across, down = zip(*points, strict=True)
        box = self._box((min(across), min(down)), (max(across), max(down)))
        if box is None:
            return
        rows, columns = _centres(box)
        corners = [*points, points[0]]
        area = sum(x * v - u * y for (x, y), (u, v) in pairwise(corners))
        inside = np.ones((rows.size, columns.size), bool)
        for (x, y), (u, v) in pairwise(corners):
            side = np.float32(u - x) * (rows - np.float32(y))
            side = side - np.float32(v - y) * (columns - np.float32(x))
            inside &= side >= 0 if area > 0 else side <= 0
        self._fill(box, inside, colour, label)

    def ellipse(
        self,
        centre: Point,
        radii: Point,
        colour: Colour,
        label: int | None,
        strength: float = 1.0,
    ) -> None:
        """An ellipse; `strength` below 1 lets through what was there, as a shadow does."""
        (x, y), (wide, tall) = centre, radii
        box = self._box((x - wide, y - tall), (x + wide, y + tall))
        if box is None:
            return
        rows, columns = _centres(box)
        across, down = (columns - x) / wide, (rows - y) / tall
        self._fill(box, across**2 + down**2 <= 1, colour, label, strength)

    def quad(
        self, x: tuple[float, float], y: tuple[float, float], z: float, colour: Colour, label: int
    ) -> None:
        """An upright rectangle that faces the camera."""
        left, bottom = self.project(x[0], y[0], z)
        right, top = self.project(x[1], y[1], z)
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        self.polygon(corners, self.fog(colour, z), label)

    def trapezium(
        self,
        x: float,
        y: tuple[float, float],
        halves: tuple[float, float],
        z: float,
        colour: Colour,
        label: int,
    ) -> None:
        """Upright, facing the camera, with half widths at its lower and its upper end."""
        (low, high), (wide, narrow) = y, halves
        corners = [(x - wide, low), (x + wide, low), (x + narrow, high), (x - narrow, high)]
        points = [self.project(across, up, z) for across, up in corners]
        self.polygon(points, self.fog(colour, z), label)

    def disc(
        self, at: tuple[float, float, float], radii: tuple[float, float], colour: Colour, label: int
    ) -> None:
        """An upright ellipse that faces the camera."""
        scale = self.focal / at[2]
        size = (radii[0] * scale, radii[1] * scale)
        self.ellipse(self.project(*at), size, self.fog(colour, at[2]), label)

    def shadow(self, x: float, z: float, width: float) -> None:
        """Darken the ground below an object."""
        reach = self.focal * width / z
        dark = np.zeros(3, np.float32)
        self.ellipse(self.project(x, 0, z), (reach, 0.18 * reach), dark, None, strength=0.45)

    def shown(self, light: Colour, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The picture, uint8 (3, H, W), under a light and with noise (H, W, 3); labels (H, W)."""
        fine = (self.colour[i::FINE, j::FINE] for i in range(FINE) for j in range(FINE))
        picture = np.clip(sum(fine) * (light / FINE**2) + noise, 0, 1)
        middle = self.label[FINE // 2 :: FINE, FINE // 2 :: FINE]
        return np.round(255 * picture).astype(np.uint8).transpose(2, 0, 1), middle

    def _box(self, low: Point, high: Point) -> tuple[int, int, int, int] | None:
        """Rows and columns (from, to, from, to) that a shape may touch."""
        left, top = max(0, floor(low[0])), max(0, floor(low[1]))
        right, bottom = min(self.columns, ceil(high[0])), min(self.rows, ceil(high[1]))
        return (top, bottom, left, right) if top < bottom and left < right else None

    def _fill(
        self,
        box: tuple[int, int, int, int],
        inside: np.ndarray,
        colour: Colour | Shader,
        label: int | None,
        strength: float = 1.0,
    ) -> None:
        area = slice(box[0], box[1]), slice(box[2], box[3])
        before = self.colour[area]
        if callable(colour):
            before[inside] = colour(*_centres(box))[inside]
        elif strength < 1:
            before[inside] = before[inside] * np.float32(1 - strength) + colour * strength
        else:
            before[inside] = colour
        if label is not None:
            self.label[area][inside] = label


def _centres(box: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The middles of a box's fine pixels: rows (h, 1) and columns (1, w)."""
    rows = np.arange(box[0], box[1], dtype=np.float32)[:, None] + 0.5
    columns = np.arange(box[2], box[3], dtype=np.float32)[None, :] + 0.5
    return rows, columns
