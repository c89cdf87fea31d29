"""What the report draws: the same few images for every method, and one layer's learned posterior.

Images are chosen by their place in the data set, and street scenes by how much of an anomaly they
show; never by what a model thinks of them, so that the figures of two runs on the same data can be laid
side by side.
"""

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import Dataset, Examples, Splits
from lpbnn.data.corruptions import corrupt
from lpbnn.model import UncertainModel
from lpbnn.rank_one.posterior import posterior
from lpbnn.training.corruption import SEED, corruptible
from lpbnn.training.scoring import Predictor

Arrays = dict[str, np.ndarray]
SHOWN = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression")  # one of each family
SEVERITY = 5
WIDEST = 128  # vectors longer than this make a correlation matrix nobody can read
LOOKED_AT = 8  # street scenes, for each that is shown
SIDE = 512  # pixels: of larger maps every second one is kept, or every third


def example_arrays(predictor: Predictor, splits: Splits) -> Arrays:
    """``examples/test/...``, ``examples/corrupted/...`` and ``examples/ood/<name>/...``."""
    count, info = predictor.settings.examples, predictor.info
    if count == 0 or info.task == "regression" or len(info.shape) != 3:
        return {}
    chosen = _telling(splits, count) if info.task == "segmentation" else _chosen(splits.test, count)
    arrays = _of(predictor, splits.test.take(chosen), "examples/test")
    arrays["examples/test/index"] = chosen.numpy()
    if corruptible(info):
        names = [SHOWN[i % len(SHOWN)] for i in range(len(chosen))]
        images, labels = splits.test[chosen]
        bad = torch.stack(
            [corrupt(images, name, SEVERITY, SEED)[i] for i, name in enumerate(names)]
        )
        corrupted = Dataset(bad, labels)
        arrays |= _of(predictor, corrupted, "examples/corrupted")
        arrays["examples/corrupted/corruption"] = np.array(names)
        arrays["examples/corrupted/severity"] = np.full(len(names), SEVERITY)
        arrays["examples/corrupted/index"] = chosen.numpy()
    if predictor.settings.ood:
        for name, data in splits.ood.items():
            chosen = _chosen(data, count)
            arrays |= _of(predictor, data.take(chosen), f"examples/ood/{name}")
            arrays[f"examples/ood/{name}/index"] = chosen.numpy()
    return arrays


def posterior_arrays(model: UncertainModel) -> Arrays:
    """One layer's posterior over r^: the widest that can still be read, or the narrowest.

    >>> posterior_arrays(UncertainModel(torch.nn.Identity()))  # no latent posterior, no arrays
    {}
    """
    try:
        layers = posterior(model)
    except ValueError:
        return {}
    widths = {path: layer.mean.shape[1] for path, layer in layers.items()}
    readable = {path: width for path, width in widths.items() if width <= WIDEST}
    path = (
        max(readable, key=lambda p: readable[p])
        if readable
        else min(widths, key=lambda p: widths[p])
    )
    layer = layers[path]
    return {
        "posterior/layer": np.array(path),
        "posterior/correlation": _numpy(layer.correlation[0]),
        "posterior/mean": _numpy(layer.mean),
        "posterior/std": _numpy(layer.std),
    }


def _chosen(data: Examples, count: int) -> Tensor:
    """``count`` places, evenly spread."""
    count = min(count, len(data))
    return torch.linspace(0, len(data) - 1, count).round().long()


def _telling(splits: Splits, count: int) -> Tensor:
    """Test scenes, evenly spread: of every few neighbours the one with the largest anomaly."""
    candidates = _chosen(splits.test, LOOKED_AT * count)
    if splits.ood_index is None:
        return _chosen(splits.test, count)
    maps = splits.test.take(candidates).targets
    sizes = (maps == splits.ood_index).flatten(1).sum(1).cpu()
    rows = torch.arange(len(candidates)).tensor_split(min(count, len(candidates)))
    return torch.stack([candidates[part[sizes[part].argmax()]] for part in rows])


def _of(predictor: Predictor, data: Dataset, where: str) -> Arrays:
    """The images, their labels and what the members say of them."""
    segments = predictor.info.task == "segmentation"
    parts = [
        predictor(data.inputs[i : i + 1], keep_members=not segments) for i in range(len(data))
    ]  # one by one: the answer must not depend on the others shown
    tensors = {
        "images": data.inputs,
        "labels": data.targets,
        "predicted": torch.cat([p.labels for p in parts]),
        "confidence": torch.cat([p.confidence for p in parts]),
        "aleatoric": torch.cat([p.aleatoric for p in parts]),
        "epistemic": torch.cat([p.epistemic for p in parts]),
    }
    members = [p.members for p in parts if p.members is not None]
    if segments:
        tensors = {name: _small_map(tensor) for name, tensor in tensors.items()}
    elif members:
        tensors["members"] = torch.cat(members, 1)
    return {f"{where}/{name}": _numpy(tensor) for name, tensor in tensors.items()}


def _small_map(maps: Tensor) -> Tensor:
    """(N, ..., H, W) with sides of at most ``SIDE``, class numbers in bytes where they fit."""
    step = -(-max(maps.shape[-2:]) // SIDE)
    maps = maps[..., ::step, ::step]
    fits = maps.dtype == torch.int64 and int(maps.min()) >= 0 and int(maps.max()) < 256
    return maps.to(torch.uint8) if fits else maps


def _numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
