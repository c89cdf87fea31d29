"""Images, maps of classes and maps of numbers as small PNG inside the page."""

import base64
import io

import matplotlib as mpl
import numpy as np
from PIL import Image

from lpbnn.plots import SURE, VOID

WIDEST = 240  # pixels: larger images are shown as thumbnails
ANOMALY = (0, 229, 255)  # in no other map: the scales have no such blue


def data_uri(image: Image.Image) -> str:
    """Encode a PNG for an ``img`` element's ``src``."""
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
    image = Image.fromarray(np.moveaxis(channels, 0, -1))
    if image.width <= WIDEST:
        return image
    size = (WIDEST, round(image.height * WIDEST / image.width))
    return image.resize(size, Image.Resampling.BOX)


def labelled(labels: np.ndarray, colours: np.ndarray, anomaly: int | None = None) -> Image.Image:
    """A map of class numbers (H, W); the anomaly has a colour of its own, anything else is void."""
    count = len(colours)
    table = np.full((256, 3), VOID, np.uint8)
    table[:count] = colours
    if anomaly is not None:
        table[anomaly] = ANOMALY
    known = ((labels >= 0) & (labels < count)) | (labels == anomaly)
    image = Image.fromarray(np.where(known, labels, 255).astype(np.uint8), "P")
    image.putpalette(table.tobytes())
    return image


def shaded(values: np.ndarray, top: float = 1.0, scale: str = SURE) -> Image.Image:
    """A map of numbers from 0 to ``top`` (H, W) in the colours of a scale."""
    share = (np.nan_to_num(values.astype(np.float64)) / top).clip(0, 1)
    image = Image.fromarray((share * 255).round().astype(np.uint8), "P")
    image.putpalette((mpl.colormaps[scale](np.arange(256))[:, :3] * 255).astype(np.uint8).tobytes())
    return image


def outlined(image: Image.Image, mask: np.ndarray) -> Image.Image:
    """A map with a line around what ``mask`` (H, W) covers, drawn just outside of it."""
    from scipy.ndimage import binary_dilation

    pixels = np.array(image.convert("RGB"))
    pixels[binary_dilation(mask, np.ones((3, 3))) & ~mask] = ANOMALY
    return Image.fromarray(pixels) if mask.any() else image


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
