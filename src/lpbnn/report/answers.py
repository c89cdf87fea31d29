"""What a trained run says of single files: a table of classes, or maps with a picture to look at."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.markup import escape
from rich.table import Column, Table

from lpbnn.backbones.deeplab import DeepLab
from lpbnn.data.files import header
from lpbnn.data.images import read_images, read_scene, scaled
from lpbnn.engine.build import DataInfo
from lpbnn.engine.files import finite
from lpbnn.model import Model
from lpbnn.predict import Prediction, predict
from lpbnn.report import maps

COLUMNS = ("label", "confidence", "total", "aleatoric", "epistemic", "score")
UNSURE = 0.5  # confidence below which no class has the majority
AT_ONCE = 256  # images, each for one member, in the network: a folder of thousands fits the memory
SHOWN = 4  # classes named in the terminal

Answer = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A trained model, and how it is to be asked."""

    model: Model
    data: DataInfo
    samples: int = 4
    seed: int = 0

    def __call__(self, images: torch.Tensor, keep_members: bool = True) -> Prediction:
        """The answer for raw images, uint8 (N, C, H, W)."""
        x = self.data.normalise(images)
        how = {"samples": self.samples, "seed": self.seed, "keep_members": keep_members}
        # Scenes are asked one by one.
        chunk = AT_ONCE if self.data.task == "classification" else None
        return predict(self.model, x, chunk=chunk, **how)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes or tuple(map(str, range(self.data.num_classes or 0)))


def answered(
    ask: Question, images: Sequence[Path], out: Path | None = None, full_size: bool = False
) -> Table:
    """What the run says of the images, as its task has it; with ``out``, also as files."""
    if ask.data.task == "segmentation":
        return segmented(ask, images, out, full_size)
    if ask.data.task != "classification":
        raise ValueError(
            f"the run is one of {ask.data.task} ({ask.data.name}); predict shows classes of images. Fix: "
            "in Python, lpbnn.engine.run.load_run and lpbnn.predict."
        )
    if full_size:
        raise ValueError(
            "the run is one of classification, which knows one size; --full-size is for segmentation. "
            "Fix: leave it out."
        )
    return classified(ask, images, out)


def classified(ask: Question, images: Sequence[Path], out: Path | None = None) -> Table:
    """The label of every image, how sure, and how much of the doubt is ignorance.

    With ``out``, a .csv or .json file, also the probability of every class, as exact as it was computed.
    """
    kind = out.suffix.lower() if out is not None else ""
    if out is not None and kind not in WRITERS:
        raise ValueError(
            f"{out} is neither a {' nor a '.join(WRITERS)} file, which the answers of a classification run "
            "are written to. Fix: -o answers.csv"
        )
    if out is not None:
        _require_folder(out.parent)
    p = ask(read_images(images, ask.data.shape))
    score = ask.model.score(p)  # the method's own measure of strangeness
    numbers = torch.stack([p.confidence, p.total, p.aleatoric, p.epistemic, score], 1).tolist()
    labels = [ask.classes[int(label)] for label in p.labels]
    table = Table(Column("image", overflow="fold"), *COLUMNS)
    answers: list[Answer] = []
    for path, label, row, probs in zip(images, labels, numbers, p.probs.tolist(), strict=True):
        table.add_row(escape(str(path)), escape(label), *(f"{value:.3f}" for value in row))
        answer: Answer = {"file": str(path), **dict(zip(COLUMNS, (label, *row), strict=True))}
        answers.append(answer | {"probabilities": dict(zip(ask.classes, probs, strict=True))})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(WRITERS[kind](answers), encoding="utf-8", newline="")
        table.caption = f"Written to {escape(str(out))}, with the probability of every class"
    return table


def _require_folder(path: Path) -> None:
    file = next((p for p in (path, *path.parents) if p.is_file()), None)
    if file is not None:
        raise ValueError(f"{file} is a file; expected a folder to write to. Fix: give another -o.")


def _csv(answers: Sequence[Answer]) -> str:
    """One line for each image; the probability of class cat is in column p(cat)."""
    text = io.StringIO()
    probabilities = [f"p({name})" for name in answers[0]["probabilities"]]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", *COLUMNS, *probabilities])
    for answer in answers:
        row = [answer[name] for name in ("file", *COLUMNS)]
        writer.writerow([*row, *answer["probabilities"].values()])
    return text.getvalue()


def _json(answers: Sequence[Answer]) -> str:
    """A list of one object for each image; NaN, which JSON has not, is null."""
    return json.dumps(finite(list(answers)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS = {".csv": _csv, ".json": _json}


def segmented(
    ask: Question, images: Sequence[Path], out: Path | None = None, full_size: bool = False
) -> Table:
    """A line for every scene; with ``out`` also its maps, as a picture and as numbers."""
    names = _names(images)
    if out is not None:
        _require_folder(out)
    _require_sizes(ask, images, full_size)  # before anything is written
    columns = ("classes, by share of pixels", "confidence", "unsure %", "epistemic")
    table = Table(Column("image", overflow="fold"), *columns)
    for path, name in zip(images, names, strict=True):
        picture = read_scene(path, None if full_size else ask.data.shape[1])
        p = ask(
            picture[None], keep_members=False
        )  # one by one: sizes differ, and memory is bounded
        found = {
            "labels": p.labels[0].to(torch.uint8 if len(ask.classes) < 256 else torch.int32),
            "confidence": p.confidence[0],
            "aleatoric": p.aleatoric[0],
            "epistemic": p.epistemic[0],
            "score": ask.model.score(p)[0],
        }
        arrays = {key: value.cpu().numpy() for key, value in found.items()}
        sure = arrays["confidence"]
        table.add_row(
            escape(path.name),
            escape(_largest(arrays["labels"], ask.classes)),
            f"{sure.mean():.3f}",
            f"{100 * (sure < UNSURE).mean():.1f}",
            f"{arrays['epistemic'].mean():.3f}",
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            named: dict[str, Any] = {"classes": np.array(ask.classes), **arrays}
            np.savez_compressed(out / f"{name}.npz", **named)
            overview(picture.numpy(), arrays, ask.classes).savefig(out / f"{name}.png")
    table.caption = f"means over the pixels; unsure: confidence below {UNSURE}; epistemic in nats"
    if out is not None:
        table.caption += f". Maps: {escape(str(out))}/NAME.png, as numbers NAME.npz"
    return table


def overview(picture: np.ndarray, arrays: dict[str, np.ndarray], classes: Sequence[str]) -> Figure:
    """Input and classes above, confidence and epistemic uncertainty below, each with its key."""
    rows, columns = arrays["labels"].shape
    wide = 6.0  # inches of a map
    tall = wide * rows / columns
    colours = maps.palette(classes, len(classes))
    there = _shares(arrays["labels"])
    lines = -(-len(there) // 7)
    figure = Figure((2 * wide + 1.2, 2 * tall + 0.9 + 0.25 * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 2)
    _map(top[0], np.moveaxis(picture, 0, -1), "input")
    _map(top[1], colours[arrays["labels"]], "predicted class")
    kind, title = "epistemic", "epistemic uncertainty: what the members disagree about"
    if not arrays[kind].any():
        kind, title = "aleatoric", "uncertainty: entropy (one network has no epistemic part)"
    end = maps.round_top(arrays[kind])
    sure = "confidence: probability of the predicted class"
    _scaled(bottom[0], arrays["confidence"], 1.0, maps.SURE, sure, "dark: unsure")
    _scaled(bottom[1], arrays[kind], end, maps.UNSURE, title, "nats; dark: unsure")
    patches = []
    for number, share in there.items():
        red, green, blue = (float(part) / 255 for part in colours[number])
        text = f"{classes[number]} {_percent(share)}"
        patches.append(Patch(facecolor=(red, green, blue), edgecolor="0.7", label=text))
    figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False, fontsize=10)
    return figure


def _scaled(axes: Axes, values: np.ndarray, top: float, scale: str, title: str, unit: str) -> None:
    """A map of numbers with its scale, as tall as the map."""
    _map(axes, np.asarray(maps.shaded(values, top, scale).convert("RGB")), title)
    beside = axes.inset_axes((1.02, 0.0, 0.025, 1.0))
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, top), scale), cax=beside)
    bar.set_label(unit, fontsize=9)
    bar.ax.tick_params(labelsize=9)


def _map(axes: Axes, pixels: np.ndarray, title: str) -> None:
    axes.imshow(pixels, interpolation="nearest")
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_axis_off()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _shares(labels: np.ndarray) -> dict[int, float]:
    """The classes that occur and their shares of the pixels, the largest first."""
    numbers, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {int(numbers[i]): float(counts[i] / labels.size) for i in order}


def _largest(labels: np.ndarray, classes: Sequence[str]) -> str:
    """The classes with the most pixels."""
    found = list(_shares(labels).items())[:SHOWN]
    return ", ".join(f"{classes[number]} {_percent(share)}" for number, share in found)


def _require_sizes(ask: Question, images: Sequence[Path], full_size: bool) -> None:
    """No picture is damaged, as far as its head tells, or smaller than the network can take."""
    strides = [net.output_stride for net in ask.model.modules() if isinstance(net, DeepLab)]
    least, height = max(strides, default=1), ask.data.shape[1]
    for path in images:
        own = header(path, label=False)
        trained = scaled(own, height)
        size, other = (own, trained) if full_size else (trained, own)
        if min(size) >= least:
            continue
        fixes = ["enlarge it" if full_size else "cut it to a shape that is less narrow"]
        if min(other) >= least:
            fixes.append("leave out --full-size" if full_size else "give --full-size")
        if min(size) >= 8:
            fixes.append("train with backbone.output_stride=8")
        resized = f", resized to the training's height {_text(size)}" if size != own else ""
        raise ValueError(
            f"{path} is {_text(own)}{resized}; expected at least {_text((least, least))}, the network's "
            f"output stride. Fix: {', or '.join(fixes)}."
        )


def _text(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


def _names(images: Sequence[Path]) -> list[str]:
    """What the files are called that belong to each image; two that would share one are refused."""
    names = [path.stem for path in images]
    for name in names:
        if names.count(name) > 1:
            same = [str(path) for path in images if path.stem == name]
            raise ValueError(
                f"{' and '.join(same)} would both write {name}.png. Fix: rename one of them, or give them "
                "one at a time, with another -o."
            )
    return names
