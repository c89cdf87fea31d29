"""Maps in colours: a class for every pixel, and how sure a network is of it, each with its key."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

WIDEST = 240  # pixels of a map in the page
ANOMALY = (0, 229, 255)  # in no other map: the scales below have no such blue
VOID = (0, 0, 0)
# Roads grey-violet, trees green, people red: what most readers of street scenes expect.
COLOURS = {
    "road": (115, 85, 125),
    "road line": (240, 240, 240),
    "pavement": (214, 160, 196),
    "sidewalk": (214, 160, 196),
    "building": (98, 94, 92),
    "wall": (124, 124, 168),
    "fence": (188, 158, 142),
    "pole": (190, 190, 184),
    "sign": (238, 214, 36),
    "traffic sign": (238, 214, 36),
    "traffic light": (246, 164, 48),
    "tree": (84, 138, 52),
    "vegetation": (84, 138, 52),
    "terrain": (168, 218, 150),
    "sky": (104, 152, 206),
    "unlabeled": (104, 152, 206),  # in StreetHazards the sky, mostly
    "pedestrian": (220, 44, 58),
    "person": (220, 44, 58),
    "rider": (252, 116, 80),
    "bicyclist": (252, 116, 80),
    "car": (28, 52, 158),
    "truck": (18, 20, 92),
    "bus": (38, 92, 120),
    "train": (20, 120, 130),
    "motorcycle": (96, 60, 220),
    "bicycle": (126, 28, 52),
    "other": (146, 112, 62),
}
SURE, UNSURE = "magma", "magma_r"  # in both scales pale is sure and dark is not


def palette(classes: Sequence[str], count: int) -> np.ndarray:
    """(count, 3) a colour for each class: by its name where that is known, otherwise hues apart.

    >>> palette(("sky", "dragon"), 2)[0].tolist(), len(palette((), 30))
    ([104, 152, 206], 30)
    """
    hue = (np.arange(count) * 0.618034) % 1  # a golden angle apart, the same every time
    light = 0.55 + 0.3 * ((np.arange(count) % 3) - 1) / 2
    wave = np.array([0, 1 / 3, 2 / 3])
    rgb = light[:, None] + 0.35 * np.cos(2 * np.pi * (hue[:, None] - wave))
    colours = (rgb.clip(0, 1) * 255).astype(np.uint8)
    for number, name in enumerate(classes[:count]):
        if name in COLOURS:
            colours[number] = COLOURS[name]
    return colours


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
    if not mask.any():
        return image
    around = np.pad(mask, 1)
    near = np.zeros_like(mask)
    rows, columns = mask.shape
    for i in range(3):
        for j in range(3):
            near |= around[i : i + rows, j : j + columns]
    pixels = np.array(image.convert("RGB"))
    pixels[near & ~mask] = ANOMALY
    return Image.fromarray(pixels)


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


def overview(picture: np.ndarray, arrays: dict[str, np.ndarray], classes: Sequence[str]) -> Figure:
    """Input and classes above, confidence and epistemic uncertainty below, each with its key."""
    rows, columns = arrays["labels"].shape
    wide = 6.0  # inches of a map
    tall = wide * rows / columns
    colours = palette(classes, len(classes))
    there = shares(arrays["labels"])
    lines = -(-len(there) // 7)
    figure = Figure((2 * wide + 1.2, 2 * tall + 0.9 + 0.25 * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 2)
    _map(top[0], np.moveaxis(picture, 0, -1), "input")
    _map(top[1], colours[arrays["labels"]], "predicted class")
    kind, title = "epistemic", "epistemic uncertainty: what the members disagree about"
    if not arrays[kind].any():
        kind, title = "aleatoric", "uncertainty: entropy (one network has no epistemic part)"
    end = round_top(arrays[kind])
    sure = "confidence: probability of the predicted class"
    _scaled(bottom[0], arrays["confidence"], 1.0, SURE, sure, "dark: unsure")
    _scaled(bottom[1], arrays[kind], end, UNSURE, title, "nats; dark: unsure")
    patches = []
    for number, share in there.items():
        red, green, blue = (float(part) / 255 for part in colours[number])
        text = f"{classes[number]} {percent(share)}"
        patches.append(Patch(facecolor=(red, green, blue), edgecolor="0.7", label=text))
    figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False, fontsize=10)
    return figure


def _scaled(axes: Axes, values: np.ndarray, top: float, scale: str, title: str, unit: str) -> None:
    """A map of numbers with its scale, as tall as the map."""
    _map(axes, np.asarray(shaded(values, top, scale).convert("RGB")), title)
    beside = axes.inset_axes((1.02, 0.0, 0.025, 1.0))
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, top), scale), cax=beside)
    bar.set_label(unit, fontsize=9)
    bar.ax.tick_params(labelsize=9)


def _map(axes: Axes, pixels: np.ndarray, title: str) -> None:
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_axis_off()


def percent(share: float) -> str:
    """A share of the pixels, rounded; one that is there is never 0."""
    return f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def shares(labels: np.ndarray) -> dict[int, float]:
    """The classes that occur and their shares of the pixels, the largest first."""
    numbers, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {int(numbers[i]): float(counts[i] / labels.size) for i in order}
