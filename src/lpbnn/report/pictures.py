"""Images and matrices as PNG inside the page."""

import base64
import io

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage

WIDEST = 240  # pixels: larger images are shown as thumbnails
ORDERED = 512  # inputs: the best order of the leaves takes seconds for more
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


def correlation(matrix: np.ndarray, top: float = 1.0) -> Image.Image:
    """A correlation matrix: blue together, orange opposed, clear where unrelated, full from ``top`` on."""
    strength = (np.nan_to_num(matrix) / top).clip(-1, 1)
    pixels = np.where(strength[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    alpha = np.abs(strength)[..., None] * 255
    return Image.fromarray(np.concatenate([pixels, alpha], -1).astype(np.uint8), "RGBA")


def strongest(matrix: np.ndarray) -> float:
    """Return the end of a scale that shows a correlation matrix: nearly all pairs stay below it.

    The diagonal, which is 1 whatever the others are, does not count.

    >>> strongest(np.full((4, 4), 0.15) + 0.85 * np.eye(4))
    0.2
    """
    pairs = np.abs(np.nan_to_num(matrix))[~np.eye(len(matrix), dtype=bool)]
    high = float(np.quantile(pairs, 0.99)) if pairs.size else 1.0
    return next((step for step in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7) if step >= high), 1.0)


def similar_first(matrix: np.ndarray) -> np.ndarray:
    """Return an order in which neighbours correlate: the leaves of a hierarchical clustering.

    Inputs are close if their rows are alike: then they correlate with the same others in the same way.

    >>> block = np.kron(np.eye(2), np.ones((2, 2)))[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    >>> order = similar_first(block)
    >>> float(np.abs(np.diff(block[order][:, order], axis=0)).sum())  # one border, two blocks
    4.0
    """
    if len(matrix) < 3:
        return np.arange(len(matrix))
    rows = np.nan_to_num(matrix).astype(np.float64)
    tree = linkage(rows, "average", optimal_ordering=len(rows) <= ORDERED)
    return leaves_list(tree)


def _thumbnail(image: Image.Image) -> Image.Image:
    if image.width <= WIDEST:
        return image
    return image.resize((WIDEST, round(image.height * WIDEST / image.width)), BOX)
