"""Calibrate a trained run on its validation part, and store the result in the run folder.

The temperature (or vector scaling) and the scale of the posterior's noise become part of the run's weights,
so that whatever reads the run predicts with them. ``results.json`` is measured anew, with the metrics of the
test set before it as ``calibration``.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from lpbnn.calibration import calibrate, fit_noise_scale
from lpbnn.calibration.scaling import Kind
from lpbnn.data import Splits
from lpbnn.data.augment import batch_indices
from lpbnn.likelihoods import Categorical
from lpbnn.model import UncertainModel
from lpbnn.training.build import DataInfo
from lpbnn.training.environment import environment
from lpbnn.training.evaluator import Predictor, make_evaluator
from lpbnn.training.files import RunError
from lpbnn.training.run import finished, load_run, measure


def calibrate_run(
    folder: str | Path,
    kind: Kind = "temperature",
    noise: bool = True,
    splits: Splits | None = None,
    data_root: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Fit the calibration of a finished run and measure the run again.

    Args:
        folder: of a run of classes.
        kind: "temperature" or "vector".
        noise: fit the scale of the posterior's noise first, if the method has one.
        splits: the data of the run; loaded if left out.
        data_root: where the data is, if it has moved.
        trust: import the modules that the run's config names.

    Returns:
        The new results. Their "calibration" holds ``noise_scale`` (None without posterior noise), ``note``
        (why the noise was left as trained), ``kind``, ``scale``, ``bias``, the number of ``examples``, and
        the metrics of the test set ``before``.
    """
    with finished(folder, splits, data_root, trust) as (target, config, splits, fabric):
        if splits.task == "regression":
            raise RunError(
                f"{target.path} is a regression; a temperature is for classes. Fix: conformal intervals, "
                "lpbnn.calibration.fit_conformal."
            )
        if not len(splits.val):
            raise RunError(f"{splits.name} has no validation part to calibrate on.")
        info = DataInfo.of(splits)
        model = load_run(target.path, fabric.device, trust=True).model
        predictor = Predictor(model, info, config, fabric.device, fabric.autocast)
        has_noise = _reset(model)
        before = predictor.over(splits.test, make_evaluator(info, fabric.device)).metrics()
        found: dict[str, Any] = {"noise_scale": None, "note": None, "kind": kind}
        batches = _held_out(predictor, splits)
        options: dict[str, Any] = {"samples": predictor.samples, "seed": predictor.seed}
        with fabric.autocast():
            if has_noise and noise:
                try:
                    found["noise_scale"] = fit_noise_scale(model, batches, **options)
                except (
                    ValueError
                ) as error:  # the noise stays as trained, and a temperature is fitted
                    found["note"] = str(error)
            scaling = calibrate(model, batches, kind, **options)
        found |= {"scale": scaling.scale.tolist(), "bias": scaling.bias.tolist()}
        found |= {"examples": len(splits.val), "before": before}
        target.save_weights(model)
        train, again = target.results()["train"], environment(fabric.device, fabric.world_size)
        return measure(
            target, model, splits, config, fabric, train, measured_again=again, calibration=found
        )


def _reset(model: UncertainModel) -> bool:
    """Take an earlier calibration away; return True if the model has noise to scale."""
    model.likelihood.scaling = None
    try:
        model.set_noise_scale(1.0)
    except TypeError:
        return False
    return True


def _held_out(predictor: Predictor, splits: Splits) -> list[tuple[Tensor, Tensor]]:
    """Return the validation part in batches, inputs prepared for the network."""
    parts = batch_indices(len(splits.val), predictor.batch_size)
    stream = splits.val.to(predictor.device).stream(parts)
    likelihood = predictor.model.likelihood
    assert isinstance(likelihood, Categorical)
    ignored = (splits.ignore_index, splits.ood_index)
    batches = []
    for x, y in stream:
        for index in ignored:
            if index is not None:
                y = y.masked_fill(y == index, likelihood.ignore_index)
        batches.append((predictor.prepare(x), y))
    return batches
