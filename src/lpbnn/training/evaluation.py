"""Every number of a trained model, and every array that the report shows.

Results (``results.json`` holds them with the run's own keys around): ``test``, ``uncertainty``,
``ood``, ``diversity``, ``corruption`` and ``cost``; what was not measured is None. Conventions are
those of ``lpbnn.metrics`` (its ``METRICS`` describes every key).

The examples that the report draws are chosen by their place in the data set, and street scenes by how much
of an anomaly they show; never by what a model predicts for them, so that the figures of two runs on the
same data can be laid side by side.
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import Dataset, Examples, Splits
from lpbnn.data.corruptions import CORRUPTIONS, Published, corrupt
from lpbnn.methods.lpbnn import posterior
from lpbnn.metrics import DetectionMetrics, DiversityMetrics, corruption_means
from lpbnn.model import UncertainModel
from lpbnn.training import checkpoint
from lpbnn.training.build import DataInfo, use_score
from lpbnn.training.config import RunConfig
from lpbnn.training.distributed import launch
from lpbnn.training.environment import (
    device_name,
    memory_kind,
    peak_memory,
    reset_peak_memory,
)
from lpbnn.training.evaluator import (
    ALONE,
    HISTOGRAM_BINS,
    ClassificationEvaluator,
    Evaluator,
    Predictor,
    RegressionEvaluator,
    SegmentationEvaluator,
    make_evaluator,
)
from lpbnn.training.preflight import check_corruptions

if TYPE_CHECKING:
    from lightning.fabric import Fabric

Arrays = dict[str, np.ndarray]
KEPT_NUMBERS = 20_000_000  # of a (N, C) table of probabilities; a larger one is not stored
KEPT_POINTS = 1000  # training examples of a curve that a figure can show
TIMED_IMAGES, TIMED_PIXELS = 256, 2**23
SHOWN = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression")  # one of each family
SEVERITY = 5
SEED = 0  # of the corruptions, whatever the run's: all methods meet the same images
WIDEST = 128  # vectors longer than this make a correlation matrix nobody can read
CANDIDATES = 8  # street scenes, for each that is shown
SIDE = 512  # pixels: of larger maps every second one is kept, or every third


class Evaluation(NamedTuple):
    """The numbers, for ``results.json``, and the arrays, for ``predictions.npz``."""

    results: dict[str, Any]
    arrays: Arrays


def evaluate(
    model: UncertainModel, splits: Splits, config: RunConfig, fabric: "Fabric | None" = None
) -> Evaluation:
    """Measure a model, in one process, as ``config.evaluate`` says.

    Args:
        fabric: that of a run, which has been checked; None checks the settings and launches one.

    >>> from lpbnn.training.build import build_model, load_data
    >>> config = RunConfig("mcp", device="cpu")
    >>> splits = load_data(config)
    >>> found = evaluate(build_model(config, DataInfo.of(splits)), splits, config)
    >>> sorted(found.results["test"]), sorted(found.results["ood"]["photos"])
    (['accuracy', 'brier', 'ece', 'nll'], ['aupr', 'auroc', 'fpr95'])
    """
    info = DataInfo.of(splits)
    if fabric is None:
        check_corruptions(config.evaluate, info)
        fabric = launch(config, alone=True)
    device = fabric.device
    model.to(device)
    use_score(model, config)
    if config.channels_last:  # as training leaves it: a run that was read back is measured alike
        checkpoint.channels_last(model)
    predictor = Predictor(model, info, config, fabric)
    cost = _cost(predictor, splits)  # first: it also warms the device up
    room = len(splits.test) * info.outputs <= KEPT_NUMBERS
    own = make_evaluator(info, device, room, predictor.members)
    test = predictor.over(splits.test, own)
    results: dict[str, Any] = {
        "test": test.metrics(),
        "uncertainty": {"test": test.totals.compute()},
        "ood": {},
        "diversity": {"test": None, "corrupted": None},
        "corruption": None,
        "cost": cost,
    }
    arrays = _test_arrays(test, splits)
    if config.evaluate.ood:
        _add_ood(results, arrays, predictor, splits, test)
    if isinstance(test, ClassificationEvaluator) and test.diversity is not None:
        results["diversity"]["test"] = test.diversity.compute()
    if config.evaluate.corruptions:
        found = corruption_results(predictor, splits)
        results["diversity"]["corrupted"] = found.pop("diversity")
        results["corruption"] = found
    arrays |= _example_arrays(predictor, splits) | _posterior_arrays(model)
    return Evaluation(results, arrays)


def _add_ood(
    results: dict[str, Any], arrays: Arrays, predictor: Predictor, splits: Splits, test: Evaluator
) -> None:
    """Add the detection of each out-of-distribution set against the test set; in segmentation, of pixels."""
    info, device = predictor.info, predictor.device
    if isinstance(test, SegmentationEvaluator):
        results["ood"] |= test.detection()
    for name, data in splits.ood.items():
        if isinstance(test, SegmentationEvaluator):
            found = predictor.over(data, SegmentationEvaluator(info, device, is_ood=True))
            results["ood"] |= {f"{name}/{kind}": v for kind, v in found.detection().items()}
            found.check()
        else:
            kind = RegressionEvaluator if isinstance(test, RegressionEvaluator) else Evaluator
            found = predictor.over(data, kind(info, device))
            found.check()
            metric = DetectionMetrics(**ALONE)
            for is_ood, evaluator in ((False, test), (True, found)):
                scores = evaluator.all_rows("scores").cpu()
                metric.update(scores, torch.full(scores.shape, is_ood))
            results["ood"][name] = metric.compute()
            arrays[f"ood/{name}/scores"] = _numpy(found.all_rows("scores"))
            if isinstance(found, RegressionEvaluator):
                arrays |= _curves(found, data, f"ood/{name}")
        results["uncertainty"][name] = found.totals.compute()
        if info.task != "regression":
            arrays[f"histogram/ood/{name}"] = _numpy(found.totals.histogram)


def _test_arrays(test: Evaluator, splits: Splits) -> Arrays:
    if isinstance(test, RegressionEvaluator):
        scores = {"test/scores": _numpy(test.all_rows("scores"))}
        return scores | _curves(test, splits.test, "test") | _training_points(splits.train)
    arrays: Arrays = {
        "histogram/edges": np.linspace(0, 1, HISTOGRAM_BINS + 1),
        "histogram/test": _numpy(test.totals.histogram),
    }
    assert isinstance(test, ClassificationEvaluator | SegmentationEvaluator)
    bins = test.classes.reliability()
    for name in ("edges", "confidence", "accuracy", "count"):
        arrays[f"reliability/{name}"] = getattr(bins, name).numpy()
    if isinstance(test, ClassificationEvaluator):
        arrays["test/labels"] = _numpy(splits.test[:][1])
        arrays["test/scores"] = _numpy(test.all_rows("scores"))
        if test.keep:
            arrays["test/probs"] = _numpy(test.all_rows("probs"))
    return arrays


def _training_points(data: Examples) -> Arrays:
    """Return the training set of a curve: one input, and few enough examples to draw."""
    if len(data) > KEPT_POINTS:
        return {}
    inputs, targets = data[:]
    if inputs.numel() != len(data):
        return {}
    return {"train/inputs": _numpy(inputs), "train/targets": _numpy(targets)}


def _curves(evaluator: RegressionEvaluator, data: Examples, where: str) -> Arrays:
    """Return a regression's inputs and targets with the predicted mean and its two deviations."""
    inputs, targets = data[:]
    parts = (inputs, targets, *evaluator.all_rows("curves", 1))
    names = ("inputs", "targets", "mean", "aleatoric_std", "epistemic_std")
    return {f"{where}/{name}": _numpy(part) for name, part in zip(names, parts, strict=True)}


def corruption_results(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Return the metrics of every set, their means by severity and over all, and the members' diversity."""
    settings, root = predictor.settings, predictor.settings.corruption_root
    count = min(settings.corruption_images or len(splits.test), len(splits.test))
    test = splits.test.take(slice(count)).to(predictor.device)
    published = None if root is None else Published(Path(root), test.targets)
    agreement = DiversityMetrics(predictor.members, **ALONE) if predictor.members > 1 else None
    sets: dict[str, dict[str, dict[str, float]]] = {}
    for name in CORRUPTIONS:
        sets[name] = {}
        for level in settings.severities:
            if published is None:
                images = corrupt(test.inputs, name, level, SEED, settings.frost)
            else:
                images = published.read(name, level)
            evaluator = ClassificationEvaluator(
                predictor.info, predictor.device, members=predictor.members
            )
            predictor.over(Dataset(images, test.targets), evaluator)
            sets[name][str(level)] = evaluator.metrics()
            if agreement is not None and evaluator.diversity is not None:
                agreement.merge_state(evaluator.diversity)
    everything = [metrics for levels in sets.values() for metrics in levels.values()]
    generated = "procedural" if settings.frost is None else "pictures"
    return {
        **corruption_means(everything),
        **{key: _mean([found[key] for found in everything]) for key in ("nll", "brier")},
        "origin": "generated" if published is None else "official",
        "frost": generated if published is None else None,
        "images": count,
        "severities": {
            str(level): {
                key: _mean([levels[str(level)][key] for levels in sets.values()])
                for key in ("accuracy", "nll", "brier", "ece")
            }
            for level in settings.severities
        },
        "sets": sets,
        "diversity": None if agreement is None else agreement.compute(),
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _cost(predictor: Predictor, splits: Splits) -> dict[str, Any]:
    """Return parameters, and the time and memory of predicting in one process, on a second pass."""
    model, device = predictor.model, predictor.device
    count = _timed(len(splits.test), predictor)
    timed, seconds = splits.test.take(slice(count)).to(device), 0.0
    for _ in range(2):
        reset_peak_memory(device)
        started = time.perf_counter()
        predictor.over(timed, Evaluator(predictor.info, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "members": predictor.members,
        "samples": predictor.samples,
        "predict_seconds_per_1000": 1000 * seconds / count,
        "predict_peak_bytes": peak_memory(device),
        "memory": memory_kind(device),
        "device": device_name(device),
    }


def _timed(examples: int, predictor: Predictor) -> int:
    """Return how many examples are timed: a few batches of small images, or a few street scenes."""
    pixels, batch = math.prod(predictor.info.shape[1:]), predictor.batch_size
    enough = max(1, min(TIMED_IMAGES, TIMED_PIXELS // pixels))
    return min(examples, max(1, enough // batch) * batch)


def _example_arrays(predictor: Predictor, splits: Splits) -> Arrays:
    """Return ``examples/test/...``, ``examples/corrupted/...`` and ``examples/ood/<name>/...``."""
    count, info = predictor.settings.examples, predictor.info
    if count == 0 or info.task == "regression" or len(info.shape) != 3:
        return {}
    segments = info.task == "segmentation"
    chosen = largest_anomalies(splits, count) if segments else _spaced(splits.test, count)
    arrays = _predicted(predictor, splits.test.take(chosen), "examples/test")
    arrays["examples/test/index"] = chosen.numpy()
    if predictor.settings.corruptions:
        names = [SHOWN[i % len(SHOWN)] for i in range(len(chosen))]
        images, labels = splits.test[chosen]
        bad = [corrupt(images, name, SEVERITY, SEED)[i] for i, name in enumerate(names)]
        where = "examples/corrupted"
        arrays |= _predicted(predictor, Dataset(torch.stack(bad), labels), where)
        arrays[f"{where}/corruption"] = np.array(names)
        arrays[f"{where}/severity"] = np.full(len(names), SEVERITY)
        arrays[f"{where}/index"] = chosen.numpy()
    for name, data in splits.ood.items() if predictor.settings.ood else ():
        chosen = _spaced(data, count)
        arrays |= _predicted(predictor, data.take(chosen), f"examples/ood/{name}")
        arrays[f"examples/ood/{name}/index"] = chosen.numpy()
    return arrays


def _spaced(data: Examples, count: int) -> Tensor:
    """Return ``count`` places, evenly spaced."""
    count = min(count, len(data))
    return torch.linspace(0, len(data) - 1, count).round().long()


def largest_anomalies(splits: Splits, count: int) -> Tensor:
    """Return test scenes, evenly spaced: among every few neighbours the one with the largest anomaly."""
    candidates = _spaced(splits.test, CANDIDATES * count)
    if splits.ood_index is None:
        return _spaced(splits.test, count)
    maps = splits.test.take(candidates).targets
    sizes = (maps == splits.ood_index).flatten(1).sum(1).cpu()
    rows = torch.arange(len(candidates)).tensor_split(min(count, len(candidates)))
    return torch.stack([candidates[part[sizes[part].argmax()]] for part in rows])


def _predicted(predictor: Predictor, data: Dataset, where: str) -> Arrays:
    """Return images, their labels and the prediction for each."""
    segments = predictor.info.task == "segmentation"
    parts = [
        predictor(data.inputs[i : i + 1], keep_members=not segments) for i in range(len(data))
    ]  # one by one: the answer must not depend on the others shown
    tensors = {"images": data.inputs, "labels": data.targets}
    tensors["predicted"] = torch.cat([p.labels for p in parts])
    for name in ("confidence", "aleatoric", "epistemic"):
        tensors[name] = torch.cat([getattr(p, name) for p in parts])
    members = [p.members for p in parts if p.members is not None]
    if segments:
        tensors = {name: _small_map(tensor) for name, tensor in tensors.items()}
    elif members:
        tensors["members"] = torch.cat(members, 1)
    return {f"{where}/{name}": _numpy(_single(tensor)) for name, tensor in tensors.items()}


def _small_map(maps: Tensor) -> Tensor:
    """Return (N, ..., H, W) with sides of at most ``SIDE``, class numbers in bytes if they fit."""
    step = -(-max(maps.shape[-2:]) // SIDE)
    maps = maps[..., ::step, ::step]
    fits = maps.dtype == torch.int64 and int(maps.min()) >= 0 and int(maps.max()) < 256
    return maps.to(torch.uint8) if fits else maps


def _posterior_arrays(model: UncertainModel) -> Arrays:
    """Return one layer's posterior over r^: the widest that can still be read, or the narrowest.

    >>> _posterior_arrays(UncertainModel(torch.nn.Identity()))  # no latent posterior, no arrays
    {}
    """
    try:
        layers = posterior(model)
    except ValueError:
        return {}
    widths = {path: layer.mean.shape[1] for path, layer in layers.items()}
    readable = {path: width for path, width in widths.items() if width <= WIDEST}
    path = max(readable, key=readable.__getitem__) if readable else min(widths, key=widths.get)  # type: ignore[arg-type]
    layer = layers[path]
    tensors = {"correlation": layer.correlation[0], "mean": layer.mean, "std": layer.std}
    found = {f"posterior/{name}": _numpy(_single(tensor)) for name, tensor in tensors.items()}
    return {"posterior/layer": np.array(path), **found}


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
