"""cA and cE: the metrics on the test images, corrupted in fifteen ways."""

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
from lpbnn.data.corruptions.generate import frost_kind
from lpbnn.metrics import DiversityMetrics, corruption_means
from lpbnn.training.config import EvalConfig
from lpbnn.training.distributed import Ranks
from lpbnn.training.evaluator import ClassificationEvaluator, NotFinite, Predictor

SEED = 0  # of the corruptions, whatever the run's: all methods meet the same images


class _Found(NamedTuple):
    """The results of one corrupted set."""

    name: str
    severity: str
    origin: str
    frost: str | None
    metrics: dict[str, float]
    error: str


def corruption_results(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Return the metrics of every set, their means by severity and over all, and the members' diversity.

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
    """Return every set's numbers, in order, and one count of the members' agreement over all sets."""
    mine: list[_Found] = []
    diversity: DiversityMetrics | None = None
    for made in _sets(test, predictor.settings, predictor.ranks):
        evaluator = ClassificationEvaluator(predictor.info, predictor.device)
        predictor.over(Dataset(made.images, test.targets), evaluator, alone=True)
        metrics, error = {}, ""
        try:
            metrics = evaluator.metrics()
        except NotFinite as problem:  # all processes have to learn of it
            error = str(problem)
        where = (made.name, str(made.severity), made.origin, made.frost)
        mine.append(_Found(*where, metrics, error))
        diversity = _joined(diversity, evaluator.diversity)
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
    """Yield the sets of this process."""
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
    """Return the published files in ``root`` if it has them, otherwise those generated there."""
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
