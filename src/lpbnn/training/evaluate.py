"""Every number of a trained model, and every array that the report shows.

Results (``results.json`` holds them with the run's own keys around): ``test``, ``uncertainty``,
``ood``, ``diversity``, ``corruption`` and ``cost``; what was not measured is None. Conventions are
those of ``lpbnn.metrics`` (its ``METRICS`` describes every key).
"""

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import Examples, Splits
from lpbnn.metrics import DetectionMetrics
from lpbnn.model import UncertainModel
from lpbnn.training import weights
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig
from lpbnn.training.corruption import check_corruptions, corruption_results
from lpbnn.training.environment import device_name
from lpbnn.training.examples import Arrays, example_arrays, posterior_arrays
from lpbnn.training.launch import launch
from lpbnn.training.memory import memory_kind, peak_memory, reset_peak_memory
from lpbnn.training.ranks import Ranks
from lpbnn.training.scoring import Predictor
from lpbnn.training.tally import ALONE, HISTOGRAM_BINS, Tally
from lpbnn.training.task_tally import (
    ClassificationTally,
    RegressionTally,
    SegmentationTally,
    tally_of,
)

if TYPE_CHECKING:
    from lightning.fabric import Fabric

KEPT_NUMBERS = 20_000_000  # of a (N, C) table of probabilities; a larger one is not stored
KEPT_POINTS = 1000  # training examples of a curve that a figure can show
TIMED_IMAGES, TIMED_PIXELS = 256, 2**23


class Evaluation(NamedTuple):
    """The numbers, for ``results.json``, and the arrays, for ``predictions.npz``."""

    results: dict[str, Any]
    arrays: Arrays


def evaluate(
    model: UncertainModel, splits: Splits, config: RunConfig, fabric: "Fabric | None" = None
) -> Evaluation:
    """Measure a model as ``config.evaluate`` says.

    Several processes (``fabric``'s) share the batches; each of them returns the same numbers, which are
    those of one process.

    >>> from lpbnn.training.build import build_model, load_data
    >>> config = RunConfig("mcp", device="cpu")
    >>> splits = load_data(config)
    >>> found = evaluate(build_model(config, DataInfo.of(splits)), splits, config)
    >>> sorted(found.results["test"]), sorted(found.results["ood"]["photos"])
    (['accuracy', 'brier', 'ece', 'nll'], ['aupr', 'auroc', 'fpr95'])
    """
    info = DataInfo.of(splits)
    check_corruptions(config.evaluate, info)
    if fabric is None:
        fabric = launch(replace(config, devices=1, nodes=1, strategy="auto"))
    device = fabric.device
    model.to(device)
    if config.channels_last:  # as training leaves it: a run that was read back is measured alike
        weights.channels_last(model)
    predictor = Predictor(model, info, config, device, fabric.autocast, ranks=Ranks(fabric))
    cost = _cost(predictor, splits)  # first: it also warms the device up
    room = len(splits.test) * info.outputs <= KEPT_NUMBERS
    test = predictor.over(splits.test, tally_of(info, device, keep=room))
    results: dict[str, Any] = {
        "test": test.metrics(),
        "uncertainty": {"test": test.uncertainty()},
        "ood": {},
        "diversity": {"test": None, "corrupted": None},
        "corruption": None,
        "cost": cost,
    }
    arrays = _test_arrays(test, splits)
    if config.evaluate.ood:
        _add_ood(results, arrays, predictor, splits, test)
    if isinstance(test, ClassificationTally) and test.diversity is not None:
        results["diversity"]["test"] = test.diversity.compute()
    if config.evaluate.corruptions:
        found = corruption_results(predictor, splits)
        results["diversity"]["corrupted"] = found.pop("diversity")
        results["corruption"] = found
    arrays |= example_arrays(predictor, splits) | posterior_arrays(model)
    return Evaluation(results, arrays)


def _add_ood(
    results: dict[str, Any], arrays: Arrays, predictor: Predictor, splits: Splits, test: Tally
) -> None:
    """Detection of each out-of-distribution set against the test set; of pixels, in segmentation."""
    if isinstance(test, SegmentationTally):
        results["ood"] |= test.detection()
    for name, data in splits.ood.items():
        if isinstance(test, SegmentationTally):
            pixels = SegmentationTally(predictor.info, predictor.device, is_ood=True)
            found = predictor.over(data, pixels)
            results["ood"] |= {f"{name}/{kind}": v for kind, v in pixels.detection().items()}
        else:
            regression = isinstance(test, RegressionTally)
            kind = RegressionTally if regression else Tally
            found = predictor.over(data, kind(predictor.info, predictor.device))
            found.check()
            metric = DetectionMetrics(**ALONE)
            for is_ood, tally in ((False, test), (True, found)):
                scores = tally.scores.cpu()
                metric.update(scores, torch.full(scores.shape, is_ood))
            results["ood"][name] = metric.compute()
            arrays[f"ood/{name}/scores"] = _numpy(found.scores)
            if regression:
                arrays |= _curves(found, data, f"ood/{name}")
        found.check()
        results["uncertainty"][name] = found.uncertainty()
        if predictor.info.task != "regression":
            arrays[f"histogram/ood/{name}"] = _numpy(found.histogram)


def _test_arrays(test: Tally, splits: Splits) -> Arrays:
    if isinstance(test, RegressionTally):
        scores = {"test/scores": _numpy(test.scores)}
        return scores | _curves(test, splits.test, "test") | _training_points(splits.train)
    arrays: Arrays = {
        "histogram/edges": np.linspace(0, 1, HISTOGRAM_BINS + 1),
        "histogram/test": _numpy(test.histogram),
    }
    assert isinstance(test, ClassificationTally | SegmentationTally)
    bins = test.classes.reliability()
    for name in ("edges", "confidence", "accuracy", "count"):
        arrays[f"reliability/{name}"] = getattr(bins, name).numpy()
    if isinstance(test, ClassificationTally):
        arrays["test/labels"] = _numpy(splits.test[:][1])
        arrays["test/scores"] = _numpy(test.scores)
        if test.keep:
            arrays["test/probs"] = _numpy(torch.cat(test.rows("probs")))
    return arrays


def _training_points(data: Examples) -> Arrays:
    """Return the training set of a curve: one input, and few enough examples to draw."""
    if len(data) > KEPT_POINTS:
        return {}
    inputs, targets = data[:]
    if inputs.numel() != len(data):
        return {}
    return {"train/inputs": _numpy(inputs), "train/targets": _numpy(targets)}


def _curves(tally: Tally, data: Examples, where: str) -> Arrays:
    """Regression: inputs and targets with the predicted mean and its two deviations."""
    assert isinstance(tally, RegressionTally)
    inputs, targets = data[:]
    mean, aleatoric, epistemic = torch.cat(tally.rows("curves"), 1)
    parts = {
        "inputs": inputs,
        "targets": targets,
        "mean": mean,
        "aleatoric_std": aleatoric,
        "epistemic_std": epistemic,
    }
    return {f"{where}/{name}": _numpy(part) for name, part in parts.items()}


def _cost(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """What a prediction costs in one process: rank 0 measures, the others leave it the machine."""
    mine = _measured_cost(predictor, splits) if predictor.ranks.rank == 0 else {}
    return predictor.ranks.gather(mine)[0]


def _measured_cost(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Parameters, and the time and memory of a prediction, measured on a second pass."""
    model, device = predictor.model, predictor.device
    count = _timed(len(splits.test), predictor)
    timed = splits.test.take(slice(count)).to(device)
    predictor.over(timed, Tally(predictor.info, device), alone=True)
    reset_peak_memory(device)
    _wait(device)
    started = time.perf_counter()
    predictor.over(timed, Tally(predictor.info, device), alone=True)
    _wait(device)
    seconds = time.perf_counter() - started
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "members": model.members * (predictor.samples if model.stochastic else 1),
        "samples": predictor.samples,
        "predict_seconds_per_1000": 1000 * seconds / count,
        "predict_peak_bytes": peak_memory(device),
        "memory": memory_kind(device),
        "device": device_name(device),
    }


def _timed(examples: int, predictor: Predictor) -> int:
    """How many: of a network for small images a few batches, of one for street scenes a few images."""
    pixels = math.prod(predictor.info.shape[1:])
    enough = max(1, min(TIMED_IMAGES, TIMED_PIXELS // pixels))
    batch = predictor.batch_size
    return min(examples, max(1, enough // batch) * batch)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
