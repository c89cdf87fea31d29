"""cA and cE: the test images, corrupted in fifteen ways, and what remains of the metrics."""

import math
from collections.abc import Iterator
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

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
from lpbnn.metrics import DiversityMetrics, corruption_means
from lpbnn.training.build import DataInfo
from lpbnn.training.config import EvalConfig
from lpbnn.training.ranks import Ranks
from lpbnn.training.scoring import Predictor
from lpbnn.training.tally import NotFinite
from lpbnn.training.task_tally import ClassificationTally

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


class _Found(NamedTuple):
    """What one corrupted set gave."""

    name: str
    severity: str
    origin: str
    frost: str | None
    metrics: dict[str, float]
    error: str


def corruption_results(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Metrics of every set, their means by severity and over all; the members' diversity on them.

    Processes share the sets: each is made and measured by one of them.
    """
    settings = predictor.settings
    count = min(settings.corruption_images or len(splits.test), len(splits.test))
    test = splits.test.take(slice(count)).to(predictor.device)
    found, diversity = _measured(predictor, test)
    sets: dict[str, dict[str, dict[str, float]]] = {}
    for one in found:
        sets.setdefault(one.name, {})[one.severity] = one.metrics
    everything = [one.metrics for one in found]
    origin = found[-1].origin
    frost = next((one.frost for one in found if one.frost), frost_kind(settings.frost))
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


def _measured(predictor: Predictor, test: Dataset) -> tuple[list[_Found], DiversityMetrics | None]:
    """Every set's numbers, in order, and one count of the members' agreement over all sets."""
    mine: list[_Found] = []
    diversity: DiversityMetrics | None = None
    for made in _sets(test, predictor.settings, predictor.ranks):
        tally = ClassificationTally(predictor.info, predictor.device)
        predictor.over(Dataset(made.images, test.targets), tally, alone=True)
        metrics, error = {}, ""
        try:
            metrics = tally.metrics()
        except NotFinite as problem:  # all processes have to learn of it
            error = str(problem)
        where = (made.name, str(made.severity), made.origin, made.frost)
        mine.append(_Found(*where, metrics, error))
        diversity = _joined(diversity, tally.diversity)
    states = None if diversity is None else diversity.cpu()
    everyone = predictor.ranks.gather((mine, states))
    shares = [share for share, _ in everyone]
    found = [one for turn in zip_longest(*shares) for one in turn if one is not None]
    if error := next((one.error for one in found if one.error), ""):
        raise NotFinite(error)
    return found, reduce(_joined, [metric for _, metric in everyone], None)


def _joined(
    one: DiversityMetrics | None, other: DiversityMetrics | None
) -> DiversityMetrics | None:
    if one is not None and other is not None:
        one.merge_state(other)
    return other if one is None else one


def _sets(test: Dataset, settings: EvalConfig, ranks: Ranks) -> Iterator[CorruptedSet]:
    """The sets of this process."""
    root, archive = settings.corruption_root, None
    if root is not None:
        archive = _archive(test, settings, Path(root), ranks)
    names = CORRUPTIONS if archive is None else archive.names
    order = [(name, level) for name in names for level in settings.severities]
    for name, level in (order[number] for number in ranks.share(len(order))):
        if archive is None:
            images = corrupt(test.inputs, name, level, SEED, settings.frost)
            yield CorruptedSet(name, level, images, "generated", None)
        else:
            frost = archive.frost if name == "frost" else None
            yield CorruptedSet(name, level, archive.read(name, level), archive.origin, frost)


def _archive(test: Dataset, settings: EvalConfig, root: Path, ranks: Ranks) -> Archive:
    """The published files in ``root`` where they are, otherwise what was generated there."""
    published = (root / f"{CORRUPTIONS[0]}.npy").is_file() and not any(root.glob("*.json"))
    if not published:
        ranks.wait()  # nobody writes before all have looked
        recipe = (test.inputs, root, test.targets, SEED, settings.frost)
        if ranks.world > 1:  # each makes its share of the files
            cached(*recipe, names=[CORRUPTIONS[i] for i in ranks.share(len(CORRUPTIONS))])
            ranks.wait()
        return cached(*recipe)
    archive = read_official(root, len(test))
    if archive.labels is None or not torch.equal(archive.labels, test.targets.cpu()):
        raise ValueError(
            f"{root} holds labels that are not those of the first {len(test)} test images: it is "
            "another data set's. Fix: give the folder of this one (CIFAR-10-C or CIFAR-100-C)."
        )
    return archive


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
