"""Images and matrices as PNG inside the page."""

import base64
import io

import numpy as np
from PIL import Image

WIDEST = 240  # pixels: larger images are shown as thumbnails
BOX = Image.Resampling.BOX
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


def _thumbnail(image: Image.Image) -> Image.Image:
    if image.width <= WIDEST:
        return image
    return image.resize((WIDEST, round(image.height * WIDEST / image.width)), BOX)
