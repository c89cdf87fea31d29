"""cA and cE: the test images, corrupted in fifteen ways, and what remains of the metrics."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lpbnn.data import Dataset, Splits
from lpbnn.data.corruptions import (
    CORRUPTIONS,
    Archive,
    CorruptedSet,
    cached,
    corrupt,
    read_official,
)
from lpbnn.data.corruptions.generate import SMALLEST_SIDE, frost_kind
from lpbnn.engine.build import DataInfo
from lpbnn.engine.config import EvalConfig
from lpbnn.engine.scoring import ClassificationTally, Predictor
from lpbnn.metrics import DiversityMetrics, corruption_means

SEED = 0  # of the corruptions, whatever the run's: all methods meet the same images


def corruptible(info: DataInfo) -> bool:
    """Whether the fifteen are defined here: labelled grey or colour images of some size."""
    images = len(info.shape) == 3 and info.shape[0] in (1, 3)
    return images and min(info.shape[1:]) >= SMALLEST_SIDE and info.task == "classification"


def check_corruptions(settings: EvalConfig, info: DataInfo) -> None:
    """Better before the training than after it."""
    if settings.corruptions and not corruptible(info):
        raise ValueError(
            f"evaluate.corruptions is on, but {info.name!r} has the task {info.task} and inputs of "
            f"shape {info.shape}; the corruptions are for the classification of grey or colour "
            f"images of at least {SMALLEST_SIDE}x{SMALLEST_SIDE}. Fix: evaluate.corruptions=False."
        )
    if settings.corruptions and settings.frost and not Path(settings.frost).is_dir():
        raise ValueError(
            f"evaluate.frost is {settings.frost!r}, which is no folder; expected the published frost "
            "pictures. Fix: correct the path, or leave it out for procedural frost."
        )
    if settings.corruptions and settings.corruption_root:
        try:
            Path(settings.corruption_root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"evaluate.corruption_root is {settings.corruption_root!r}, which is no folder and cannot "
                f"become one ({error}). Fix: correct the path, or leave it out."
            ) from error


def corruption_results(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Metrics of every set, their means by severity and over all; the members' diversity on them."""
    settings = predictor.settings
    count = min(settings.corruption_images or len(splits.test), len(splits.test))
    test = splits.test.take(slice(count)).to(predictor.device)
    diversity: DiversityMetrics | None = None
    sets: dict[str, dict[str, dict[str, float]]] = {}
    origin, frost = "generated", frost_kind(settings.frost)
    for corrupted in _sets(test, settings):
        tally = ClassificationTally(predictor.info, predictor.device, diversity)
        predictor.over(Dataset(corrupted.images, test.targets), tally)
        diversity = tally.diversity  # one count over all sets
        sets.setdefault(corrupted.name, {})[str(corrupted.severity)] = tally.metrics()
        origin, frost = corrupted.origin, corrupted.frost or frost
    everything = [found for levels in sets.values() for found in levels.values()]
    return {
        **corruption_means(everything),
        **{key: _mean([found[key] for found in everything]) for key in ("nll", "brier")},
        "origin": origin,
        "frost": None if origin == "official" else frost,
        "images": count,
        "severities": {
            str(level): {
                key: _mean([levels[str(level)][key] for levels in sets.values()])
                for key in ("accuracy", "nll", "brier", "ece")
            }
            for level in settings.severities
        },
        "sets": sets,
        "diversity": None if diversity is None else diversity.compute(),
    }


def _sets(test: Dataset, settings: EvalConfig) -> Iterator[CorruptedSet]:
    if settings.corruption_root is None:
        for name in CORRUPTIONS:
            for level in settings.severities:
                images = corrupt(test.inputs, name, level, SEED, settings.frost)
                yield CorruptedSet(name, level, images, "generated", None)
        return
    archive = _archive(test, settings, Path(settings.corruption_root))
    for name in archive.names:
        for level in settings.severities:
            frost = archive.frost if name == "frost" else None
            yield CorruptedSet(name, level, archive.read(name, level), archive.origin, frost)


def _archive(test: Dataset, settings: EvalConfig, root: Path) -> Archive:
    """The published files in ``root`` where they are, otherwise what was generated there."""
    published = (root / f"{CORRUPTIONS[0]}.npy").is_file() and not any(root.glob("*.json"))
    if not published:
        return cached(test.inputs, root, test.targets, SEED, settings.frost)
    archive = read_official(root, len(test))
    if archive.labels is None or not torch.equal(archive.labels, test.targets.cpu()):
        raise ValueError(
            f"{root} holds labels that are not those of the first {len(test)} test images: it is "
            "another data set's. Fix: give the folder of this one (CIFAR-10-C or CIFAR-100-C)."
        )
    return archive


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
