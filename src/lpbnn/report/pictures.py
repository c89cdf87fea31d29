"""Images and maps as PNG inside the page."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

WIDEST = 220  # pixels: street scenes are shown as thumbnails
# Positive, negative: opaque at one, clear at zero, so that it reads on a light and a dark page.
POSITIVE, NEGATIVE = (58, 110, 205), (222, 110, 40)


def data_uri(image: Image.Image) -> str:
    """As a PNG for an ``img`` element's ``src``."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(values: np.ndarray) -> Image.Image:
    """An input (C, H, W), grey or colour, bytes or shares in [0, 1].

    >>> picture(np.zeros((1, 8, 6), np.uint8)).size
    (6, 8)
    """
    if values.dtype != np.uint8:
        values = (np.nan_to_num(values).clip(0, 1) * 255).astype(np.uint8)
    channels = np.repeat(values[:1], 3, 0) if values.shape[0] != 3 else values
    return _thumbnail(Image.fromarray(np.moveaxis(channels, 0, -1)))


def correlation(matrix: np.ndarray) -> Image.Image:
    """A correlation matrix: blue together, orange opposed, clear where unrelated."""
    strength = np.nan_to_num(matrix).clip(-1, 1)
    pixels = np.where(strength[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    alpha = np.abs(strength)[..., None] * 255
    return Image.fromarray(np.concatenate([pixels, alpha], -1).astype(np.uint8), "RGBA")


def classes(labels: np.ndarray, count: int, outside: Sequence[int] = ()) -> Image.Image:
    """A map of class numbers in distinct colours; ``outside`` (the anomaly) in black."""
    palette = _palette(count)
    known = (labels >= 0) & (labels < count)
    pixels = np.where(known[..., None], palette[labels.clip(0, count - 1)], np.uint8(128))
    for value in outside:
        pixels[labels == value] = 0
    return _thumbnail(Image.fromarray(pixels.astype(np.uint8)), Image.Resampling.NEAREST)


def shares(values: np.ndarray) -> Image.Image:
    """A map of numbers in [0, 1], black to white."""
    pixels = (np.nan_to_num(values).clip(0, 1) * 255).astype(np.uint8)
    return _thumbnail(Image.fromarray(pixels))


def similar_first(matrix: np.ndarray) -> np.ndarray:
    """An order in which neighbours correlate: by the angle between the first two eigenvectors.

    >>> block = np.kron(np.eye(2), np.ones((2, 2)))[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    >>> order = similar_first(block)
    >>> float(np.abs(np.diff(block[order][:, order], axis=0)).sum())  # one border, two blocks
    4.0
    """
    if len(matrix) < 3:
        return np.arange(len(matrix))
    vectors = np.linalg.eigh(np.nan_to_num(matrix).astype(np.float64))[1]
    angle = np.arctan2(vectors[:, -2], vectors[:, -1])
    order = np.argsort(angle, kind="stable")
    gaps = np.diff(angle[order], append=angle[order[0]] + 2 * np.pi)
    return np.roll(order, -int(np.argmax(gaps)) - 1)  # the circle is cut where it is thinnest


def _palette(count: int) -> np.ndarray:
    """Hues a golden angle apart: any number of classes, the same colours every time."""
    hue = (np.arange(count) * 0.618034) % 1
    light = 0.55 + 0.3 * ((np.arange(count) % 3) - 1) / 2
    wave = np.array([0, 1 / 3, 2 / 3])
    rgb = light[:, None] + 0.35 * np.cos(2 * np.pi * (hue[:, None] - wave))
    return (rgb.clip(0, 1) * 255).astype(np.uint8)


def _thumbnail(image: Image.Image, how: Image.Resampling = Image.Resampling.BOX) -> Image.Image:
    if image.width <= WIDEST:
        return image
    return image.resize((WIDEST, round(image.height * WIDEST / image.width)), how)
