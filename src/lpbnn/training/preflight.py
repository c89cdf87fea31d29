"""Checks before a run: whatever can be told to fail is told before anything is written or trained."""

import importlib.util
from pathlib import Path

import torch

from lpbnn import registry
from lpbnn.data import Augment, Dataset, Splits
from lpbnn.data.corruptions import require_files
from lpbnn.data.corruptions.generate import SMALLEST_SIDE
from lpbnn.model import UncertainModel
from lpbnn.training.build import DataInfo
from lpbnn.training.config import EvalConfig, RunConfig
from lpbnn.training.files import RunError
from lpbnn.training.step import matching

EXAMPLES = 2
TRIED = 64  # pixels: the largest side of the pictures that a network is tried with
NEEDED = {
    "classification": "one output for every class",
    "segmentation": "classes for every pixel",
    "regression": "a mean and a scale for every target",
}


def preflight(
    model: UncertainModel, config: RunConfig, splits: Splits, info: DataInfo, world: int = 1
) -> None:
    """Refuse a run that could not be trained or measured.

    Args:
        world: the number of processes.

    Raises:
        ValueError: naming the setting, what it was expected to be, and the fix.
    """
    check_training(config, splits, world)
    check_corruptions(config.evaluate, info)
    for pattern in config.optim.parts:
        matching(model, pattern)
    check_network(model, config, splits, info)


def check_training(config: RunConfig, splits: Splits, world: int = 1) -> None:
    """Refuse batches, labels, augmentation and logs that cannot be."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard is asked for and not installed. Fix: pip install 'lpbnn[logs]', or "
            "tensorboard=False; log.csv holds the same numbers."
        )
    batch, examples = config.batch_size, len(splits.train)
    if batch < world or (config.drop_last and batch > examples):
        raise ValueError(
            f"batch_size={batch} leaves nothing to train on with {examples} examples, {world} "
            f"process(es) and drop_last={config.drop_last}. Fix: a batch of at least one example per "
            "process and at most the examples there are."
        )
    if batch % world:
        raise ValueError(
            f"batch_size={batch} does not divide among {world} processes; it is the batch of all "
            f"together. Fix: a multiple of {world}."
        )
    _check_labels(splits)
    _check_augment(config.augment.over(splits.augment), splits)


def _check_labels(splits: Splits) -> None:
    """Refuse labels without a class, which would stop a GPU without a word; files are checked when read."""
    train, classes, void = splits.train, splits.num_classes, splits.ignore_index
    if classes is None or not isinstance(train, Dataset):
        return
    known = sum(splits.class_counts)
    if void is not None and not 0 <= void < classes:  # a class that is void is counted already
        known += int((train.targets == void).sum())
    if strange := train.targets.numel() - known:
        raise ValueError(
            f"{splits.name!r}: {strange} training labels are outside 0..{classes - 1}"
            f"{'' if void is None else f' and are not ignore_index={void}'}. Fix: check the labels, or "
            "the number of classes; what should not be learned gets the ignore_index."
        )


def _check_augment(augment: Augment, splits: Splits) -> None:
    if splits.task != "segmentation":
        if any(augment.crop):
            raise ValueError(
                f"augment.crop is {augment.crop}, but {splits.name!r} is no segmentation set: its test "
                "pictures keep their size. Fix: leave augment.crop out, or use augment.pad."
            )
        return
    too_large = any(c > s for c, s in zip(augment.crop, splits.shape[1:], strict=True))
    leaves_the_picture = augment.pad > 0 or augment.scale[0] < 1 or too_large
    if splits.ignore_index is None and leaves_the_picture:
        raise ValueError(
            f"{splits.name!r} has no ignore_index, so the border that augment.pad, scale and crop "
            f"({augment}) can add would need a class. Fix: augment.pad=0, no scale below 1, no "
            "crop larger than the pictures."
        )


def check_corruptions(settings: EvalConfig, info: DataInfo) -> None:
    """Refuse corruptions of what has none, and folders that are none."""
    if not settings.corruptions:
        return
    images = len(info.shape) == 3 and info.shape[0] in (1, 3) and info.task == "classification"
    if not images or min(info.shape[1:]) < SMALLEST_SIDE:
        raise ValueError(
            f"evaluate.corruptions is on, but {info.name!r} has the task {info.task} and inputs of "
            f"shape {info.shape}; the corruptions are for the classification of grey or colour "
            f"images of at least {SMALLEST_SIDE}x{SMALLEST_SIDE}. Fix: evaluate.corruptions=False."
        )
    if settings.frost and not Path(settings.frost).is_dir():
        raise ValueError(
            f"evaluate.frost is {settings.frost!r}, which is no folder; expected the published frost "
            "pictures. Fix: correct the path, or leave it out for procedural frost."
        )
    if settings.corruption_root:
        require_files(Path(settings.corruption_root))


def check_network(model: UncertainModel, config: RunConfig, splits: Splits, info: DataInfo) -> None:
    """Refuse a network that does not take the data, or whose outputs do not fit the task.

    Two examples of noise go through it.

    >>> from lpbnn.training.build import build_model, load_data
    >>> options = {"output_stride": 8}
    >>> config = RunConfig("mcp", backbone="deeplab-resnet18", backbone_options=options)
    >>> splits = load_data(config)
    >>> info = DataInfo.of(splits)
    >>> check_network(build_model(config, info), config, splits, info)
    Traceback (most recent call last):
    ...
    lpbnn.atomic.RunError: backbone 'deeplab-resnet18' gives outputs of shape (2, 10, 8, 8) for ...
    """
    shape, window = splits.shape, None
    if splits.task == "segmentation":  # a corner of what training sees: whole frames take seconds
        crop = config.augment.over(splits.augment).crop
        window = tuple(c or s for c, s in zip(crop, shape[1:], strict=True))
        sides = zip(window, shape[1:], strict=True)  # the test pictures are whole
        shape = (shape[0], *(min(*both, TRIED) for both in sides))
    try:
        with model.evaluating(), torch.random.fork_rng(devices=[]), torch.no_grad():
            # Noise, not zeros: a model also compares its fast path with the reference at its first batch.
            noise = torch.Generator().manual_seed(0)
            outputs = model(torch.randn(EXAMPLES, *shape, generator=noise))
    except (RuntimeError, ValueError) as error:
        cut = f", cut to {window} in training" if window not in (None, splits.shape[1:]) else ""
        larger = ", or a larger augment.crop" if cut else ""
        reason = str(error).rstrip(".")
        then = ", or" if "Fix: " in reason else ". Fix:"  # the network's own may come first
        raise RunError(
            f"backbone {config.backbone!r} cannot take {config.data!r}, whose examples are of shape "
            f"{splits.shape}{cut}: {reason}{then} choose another backbone (mlp takes vectors){larger}."
        ) from error
    given = tuple(outputs.shape[1:])  # behind the members, whose number is the method's own affair
    expected = (EXAMPLES, info.outputs, *(shape[1:] if info.task == "segmentation" else ()))
    if given != expected:
        raise RunError(
            f"backbone {config.backbone!r} gives outputs of shape {given} for {EXAMPLES} examples of shape "
            f"{shape}; {config.data!r} needs {NEEDED[info.task]}, {expected}. Fix: {_fix(config, info)}."
        )


def _fix(config: RunConfig, info: DataInfo) -> str:
    pictures = "deeplab" if info.task == "segmentation" else "small-cnn"
    other = (
        f"choose a backbone for {info.task}, such as {pictures if len(info.shape) > 1 else 'mlp'}"
    )
    if registry.is_outside(config.backbone):  # one's own can be mended
        return (
            f"let it give the num_classes={info.outputs} outputs that it is built with, or {other}"
        )
    return other
