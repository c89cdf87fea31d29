"""What a trained run says of single files: classes or estimates as a table, scenes as maps to look at."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.markup import escape
from rich.table import Column, Table

from lpbnn import plots
from lpbnn.atomic import write_atomic
from lpbnn.backbones.deeplab import DeepLab
from lpbnn.calibration.conformal import Conformal
from lpbnn.data.files import header, read_images, read_scene, scaled
from lpbnn.model import UncertainModel
from lpbnn.predict import Prediction
from lpbnn.report.formats import as_cell
from lpbnn.report.pictures import round_top
from lpbnn.training import EvalConfig, RunConfig
from lpbnn.training.build import DataInfo
from lpbnn.training.evaluator import Predictor
from lpbnn.training.files import finite, printable

NUMBERS = ("confidence", "total", "aleatoric", "epistemic", "ood_score")
UNSURE = 0.5  # confidence below which no class has the majority
AT_ONCE = 256  # images, each for one member, in the network: a folder of thousands fits the memory
SHOWN = 4  # classes named in the terminal

Answer = dict[str, Any]


class Question(Predictor):
    """A trained model, and how it is to be asked.

    Args:
        model: of the run.
        data: of the run.
        samples: draws of each member.
        seed: of the draws.
        conformal: the run's scores and their level, for prediction sets and intervals.
    """

    allow_not_finite = False

    def __init__(
        self,
        model: UncertainModel,
        data: DataInfo,
        samples: int = 4,
        seed: int = 0,
        conformal: tuple[Conformal, float] | None = None,
    ) -> None:
        self.conformal = conformal
        # Scenes are asked one by one.
        chunk = None if data.task == "segmentation" else AT_ONCE
        config = RunConfig(seed=seed, evaluate=EvalConfig(samples=samples, chunk=chunk))
        super().__init__(model, data, config)
        self.data = data
        self.digits = ".4g" if data.task == "regression" else ".3f"

    @property
    def classes(self) -> tuple[str, ...]:
        names = self.data.classes or tuple(map(str, range(self.data.num_classes or 0)))
        return tuple(map(printable, names))


def require_answerable(data: DataInfo) -> None:
    """Refuse what no picture can be an answer for, from what is known before the network is loaded."""
    if len(data.shape) != 3:
        back = " (of its mean, * data.target_std + data.target_mean)" * (data.task == "regression")
        raise ValueError(
            f"the run is one of {data.task} on {data.name!r}, whose inputs are of shape {data.shape}; "
            "predict takes pictures, (channels, height, width). Fix: in Python, model, _, data = "
            f"lpbnn.training.run.load_run(RUN), then lpbnn.predict(model, data.normalise(inputs)){back}."
        )


def answered(ask: Question, images: Sequence[Path], out: Path | None = None) -> Table:
    """What the run says of the images, as its task has it; with ``out``, also as files."""
    require_answerable(ask.data)
    if ask.data.task == "segmentation":
        return segmented(ask, images, out)
    _require_writable(out, ask.data.task)
    p = ask(read_images(images, ask.data.shape))
    numbers = ask.data.task == "regression"
    columns = {"file": list(map(str, images)), **(_estimates if numbers else _classes)(ask, p)}
    answers = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    shown = [name for name in columns if name not in ("file", "probabilities")]
    table = Table(Column("image", overflow="fold"), *shown)
    for answer in answers:
        cells = (_as_text(answer[name]) for name in ("file", *shown))
        table.add_row(
            *(
                escape(printable(cell)) if isinstance(cell, str) else format(cell, ask.digits)
                for cell in cells
            )
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = WRITERS[out.suffix.lower()](answers)
        write_atomic(out, text.encode(errors="backslashreplace"))  # names of files can be any bytes
        more = "" if numbers else ", with the probability of every class"
        table.caption = f"Written to {escape(printable(str(out)))}{more}"
    return table


def _classes(ask: Question, p: Prediction) -> dict[str, list[Any]]:
    """The label of every image, how sure, and how much of the doubt is ignorance; all probabilities.

    A run with conformal scores names the classes of the prediction set.
    """
    found: dict[str, list[Any]] = {"label": [ask.classes[int(label)] for label in p.labels]}
    found |= {name: getattr(p, name).tolist() for name in NUMBERS}
    if ask.conformal is not None:
        sets = p.sets(ask.conformal[0], ask.conformal[1])
        found["set"] = [[ask.classes[c] for c in one.nonzero().flatten().tolist()] for one in sets]
    rows = p.probs.tolist()  # as exact as they were computed
    found["probabilities"] = [dict(zip(ask.classes, probs, strict=True)) for probs in rows]
    return found


def _estimates(ask: Question, p: Prediction) -> dict[str, list[Any]]:
    """The number that every image is said to have, and its standard deviation, in the targets' own unit.

    The variance is the sum of an aleatoric and an epistemic one. Several targets are numbered from 1.
    """
    std, mean = ask.data.target_std, ask.data.target_mean
    spreads = {"std": p.total, "aleatoric_std": p.aleatoric, "epistemic_std": p.epistemic}
    parts = {"mean": p.mean * std + mean}
    parts |= {name: part.sqrt() * std for name, part in spreads.items()}
    if ask.conformal is not None:
        bounds = p.interval(ask.conformal[1], ask.conformal[0])
        parts |= dict(zip(("lower", "upper"), (b * std + mean for b in bounds), strict=True))
    found: dict[str, list[Any]] = {}
    for k in range(p.mean.shape[1]):
        number = f" {k + 1}" if p.mean.shape[1] > 1 else ""
        found |= {f"{name}{number}": part[:, k].tolist() for name, part in parts.items()}
    return {**found, "ood_score": p.ood_score.tolist()}


def _as_text(value: Any) -> Any:
    """Return a set of classes as text, and anything else as it is."""
    return ", ".join(value) or "none" if isinstance(value, list) else value


def _require_writable(out: Path | None, task: str) -> None:
    if out is None:
        return
    if out.suffix.lower() not in WRITERS:
        raise ValueError(
            f"{out} is neither a {' nor a '.join(WRITERS)} file, which the answers of a {task} run "
            "are written to. Fix: -o answers.csv"
        )
    _require_folder(out.parent)


def _require_folder(path: Path) -> None:
    file = next((p for p in (path, *path.parents) if p.is_file()), None)
    if file is not None:
        raise ValueError(f"{file} is a file; expected a folder to write to. Fix: give another -o.")


def _csv(answers: Sequence[Answer]) -> str:
    """One line for each image; the probability of class cat is in column p(cat)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    flat = [dict(answer) for answer in answers]
    for row in flat:
        row |= {f"p({name})": value for name, value in row.pop("probabilities", {}).items()}
        row |= {name: _as_text(value) for name, value in row.items()}
    writer.writerows([map(as_cell, row) for row in (flat[0].keys(), *map(dict.values, flat))])
    return text.getvalue()


def _json(answers: Sequence[Answer]) -> str:
    """A list of one object for each image; NaN, which JSON has not, is null."""
    return json.dumps(finite(list(answers)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS = {".csv": _csv, ".json": _json}


def segmented(ask: Question, images: Sequence[Path], out: Path | None = None) -> Table:
    """A line for every scene; with ``out`` also its maps, as a picture and as numbers."""
    names = _names(images)
    if out is not None:
        _require_folder(out)
    _require_sizes(ask, images)  # before anything is written
    columns = ("classes, by share of pixels", "confidence", "unsure %", "epistemic")
    table = Table(Column("image", overflow="fold"), *columns)
    for path, name in zip(images, names, strict=True):
        picture = read_scene(path, ask.data.shape[1])
        # One by one: sizes differ, and memory is bounded.
        p = ask(picture[None], keep_members=False)
        found = {
            "labels": p.labels[0].to(torch.uint8 if len(ask.classes) < 256 else torch.int32),
            "confidence": p.confidence[0],
            "aleatoric": p.aleatoric[0],
            "epistemic": p.epistemic[0],
            "ood_score": p.ood_score[0],
        }
        if ask.conformal is not None:
            conformal, level = ask.conformal
            found["set_size"] = p.sets(conformal, level).sum(1)[0].to(torch.int32)
        arrays = {key: value.cpu().numpy() for key, value in found.items()}
        sure = arrays["confidence"]
        table.add_row(
            escape(printable(path.name)),
            escape(_largest(arrays["labels"], ask.classes)),
            f"{sure.mean():.3f}",
            f"{100 * (sure < UNSURE).mean():.1f}",
            f"{arrays['epistemic'].mean():.3f}",
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            named: dict[str, Any] = {"classes": np.array(ask.classes), **arrays}
            maps, page = io.BytesIO(), io.BytesIO()
            np.savez_compressed(maps, **named)
            overview(picture.numpy(), arrays, ask.classes).savefig(page, format="png")
            write_atomic(out / f"{name}.npz", maps.getbuffer())
            write_atomic(out / f"{name}.png", page.getbuffer())
    table.caption = f"means over the pixels; unsure: confidence below {UNSURE}; epistemic in nats"
    if out is not None:
        table.caption += f". Maps: {escape(printable(str(out)))}/NAME.png, as numbers NAME.npz"
    return table


def _largest(labels: np.ndarray, classes: Sequence[str]) -> str:
    """The classes with the most pixels."""
    found = list(shares(labels).items())[:SHOWN]
    return ", ".join(f"{classes[number]} {percent(share)}" for number, share in found)


def _require_sizes(ask: Question, images: Sequence[Path]) -> None:
    """No picture is damaged, as far as its head tells, or smaller than the network can take."""
    strides = [net.output_stride for net in ask.model.modules() if isinstance(net, DeepLab)]
    least = max(strides, default=1)
    for path in images:
        own = header(path).size
        size = scaled(own, ask.data.shape[1])
        if min(size) < least:
            raise ValueError(
                f"{path} is {_text(own)}, resized to the training's height {_text(size)}; expected at least "
                f"{_text((least, least))}, the network's output stride. Fix: cut it to a shape that is less "
                "narrow."
            )


def _text(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


def overview(picture: np.ndarray, arrays: dict[str, np.ndarray], classes: Sequence[str]) -> Figure:
    """Input and classes above, confidence and epistemic uncertainty below, each with its key."""
    rows, columns = arrays["labels"].shape
    wide = 6.0  # inches of a map
    there = shares(arrays["labels"])
    lines = -(-len(there) // 7)
    size = (2 * wide + 1.2, 2 * wide * rows / columns + 0.9 + 0.25 * lines)
    figure = Figure(size, dpi=110, layout="constrained")
    top, bottom = figure.subplots(2, 2)
    plots.picture(top[0], np.moveaxis(picture, 0, -1), "input")
    plots.class_map(top[1], arrays["labels"], classes, title="predicted class")
    kind, title = "epistemic", "epistemic uncertainty: what the members disagree about"
    if not arrays[kind].any():
        kind, title = "aleatoric", "uncertainty: entropy (one network has no epistemic part)"
    sure = "confidence: probability of the predicted class"
    plots.value_map(bottom[0], arrays["confidence"], title=sure, unit="dark: unsure")
    end, unit = round_top(arrays[kind]), "nats; dark: unsure"
    plots.value_map(bottom[1], arrays[kind], end, scale=plots.UNSURE, title=title, unit=unit)
    colours = plots.palette(classes, len(classes)) / 255
    patches = [
        Patch(facecolor=tuple(colours[i]), edgecolor="0.7", label=f"{classes[i]} {percent(share)}")
        for i, share in there.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False, fontsize=10)
    return figure


def percent(share: float) -> str:
    """A share of the pixels, rounded; one that is there is never 0."""
    return f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def shares(labels: np.ndarray) -> dict[int, float]:
    """The classes that occur and their shares of the pixels, the largest first."""
    numbers, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {int(numbers[i]): float(counts[i] / labels.size) for i in order}


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
