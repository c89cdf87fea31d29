"""Two examples of noise through the network before anything is written: do data and outputs fit?"""

import torch

from lpbnn import registry
from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.predict import evaluating
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig
from lpbnn.training.files import RunError

EXAMPLES = 2
TRIED = 64  # pixels: the largest side of the pictures that a network is tried with
NEEDED = {
    "classification": "one output for every class",
    "segmentation": "classes for every pixel",
    "regression": "a mean and a scale for every target",
}


def try_out(model: UncertainModel, config: RunConfig, splits: Splits, info: DataInfo) -> None:
    """Refuse a network that does not take the data, or whose outputs do not fit the task.

    >>> from lpbnn.training.build import build_model, load_data
    >>> options = {"output_stride": 8}
    >>> config = RunConfig("mcp", backbone="deeplab-resnet18", backbone_options=options)
    >>> splits = load_data(config)
    >>> info = DataInfo.of(splits)
    >>> try_out(build_model(config, info), config, splits, info)
    Traceback (most recent call last):
    ...
    lpbnn.training.files.RunError: backbone 'deeplab-resnet18' gives outputs of shape (2, 10, 8, 8) for ...
    """
    shape, window = splits.shape, None
    if splits.task == "segmentation":  # a corner of what training sees: whole frames take seconds
        crop = config.augment.over(splits.augment).crop
        window = tuple(c or s for c, s in zip(crop, shape[1:], strict=True))
        sides = zip(window, shape[1:], strict=True)  # the test pictures are whole
        shape = (shape[0], *(min(*both, TRIED) for both in sides))
    try:
        with evaluating(model), torch.random.fork_rng(devices=[]), torch.no_grad():
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
