"""Images and maps as small PNG inside the page, in the colours of ``lpbnn.plots``."""

import base64
import io

import numpy as np
from PIL import Image

WIDEST = 240  # pixels: larger images are shown as thumbnails
ANOMALY = (0, 229, 255)  # in no other map: the scales have no such blue


def data_uri(pixels: np.ndarray) -> str:
    """Encode pixels (H, W, 3) as a PNG for an ``img`` element's ``src``; a palette holds 256 colours."""
    image = Image.fromarray(pixels)
    codes, index = np.unique(pixels.astype(int) @ np.array((65536, 256, 1)), return_inverse=True)
    if len(codes) <= 256:
        image = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8), "P")
        image.putpalette((codes[:, None] >> np.array((16, 8, 0)) & 255).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(values: np.ndarray) -> np.ndarray:
    """Pixels (H, W, 3) of an input (C, H, W), grey or colour, bytes or shares in [0, 1].

    >>> picture(np.zeros((1, 8, 6), np.uint8)).shape
    (8, 6, 3)
    """
    if values.dtype != np.uint8:
        values = (np.nan_to_num(values).clip(0, 1) * 255).astype(np.uint8)
    channels = np.repeat(values[:1], 3, 0) if values.shape[0] != 3 else values
    image = Image.fromarray(np.moveaxis(channels, 0, -1))
    if image.width > WIDEST:
        size = (WIDEST, round(image.height * WIDEST / image.width))
        image = image.resize(size, Image.Resampling.BOX)
    return np.asarray(image)


def outlined(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A map with a line around what ``mask`` (H, W) covers, drawn just outside of it."""
    from scipy.ndimage import binary_dilation

    around = binary_dilation(mask, np.ones((3, 3))) & ~mask
    return np.where(around[..., None], np.array(ANOMALY, np.uint8), pixels)


def thinned(array: np.ndarray, widest: int = WIDEST) -> np.ndarray:
    """(..., H, W) with every second or third pixel alone, where it is wider than ``widest``."""
    step = -(-array.shape[-1] // widest)
    return array[..., ::step, ::step]


def round_top(values: np.ndarray) -> float:
    """A round number that nearly all values stay below: the end of their scale.

    >>> round_top(np.linspace(0, 0.17, 100)), round_top(np.zeros(3))
    (0.2, 0.01)
    """
    high = float(np.quantile(values, 0.995)) if values.size else 0.0
    steps = [round(m * 10.0**e, 2) for e in (-2, -1, 0, 1) for m in (1, 2, 5)]
    return next((step for step in steps if step >= high), high)
