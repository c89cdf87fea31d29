"""Calibrate a trained run on its validation part, and store the result in the run folder.

The temperature (or vector scaling) and the scale of the posterior's noise become part of the run's weights,
so that whatever reads the run predicts with them. Conformal scores, for prediction sets and intervals, are a
file beside the weights (``RunDir.conformal``). ``results.json`` is measured anew, with the metrics of the
test set before it as ``calibration``.

Conformal scores need examples that no scaling was fitted on: if there are both, each gets a random half of
the validation part.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lpbnn.calibration import Conformal, calibrate, fit_conformal, fit_noise_scale
from lpbnn.calibration.conformal import IntervalScore, SetScore
from lpbnn.calibration.held_out import CELLS_PER_EXAMPLE, choose_cells
from lpbnn.calibration.scaling import Kind
from lpbnn.data import Examples, Splits
from lpbnn.data.augment import batch_indices
from lpbnn.likelihoods import Categorical
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig
from lpbnn.training.environment import environment
from lpbnn.training.evaluator import Predictor, make_evaluator
from lpbnn.training.files import RunError
from lpbnn.training.run import finished, load_run, measure
from lpbnn.training.rundir import RunDir

if TYPE_CHECKING:
    from lightning.fabric import Fabric

IGNORED = -100  # the label of what counts nowhere


def calibrate_run(
    folder: str | Path,
    kind: Kind | Literal["none"] = "temperature",
    noise: bool = True,
    splits: Splits | None = None,
    data_root: str | None = None,
    trust: bool = False,
    sets: SetScore | None = None,
    intervals: IntervalScore = "normalised",
    level: float = 0.9,
    by_class: bool = False,
) -> dict[str, Any]:
    """Fit the calibration of a finished run and measure the run again.

    An earlier calibration is replaced as a whole.

    Args:
        folder: of a run.
        kind: of classes: "temperature", "vector" or "none".
        noise: of classes: fit the scale of the posterior's noise first, if the method has one.
        splits: the data of the run; loaded if left out.
        data_root: where the data is, if it has moved.
        trust: import the modules that the run's config names.
        sets: of classes: the score of conformal prediction sets, "lac", "aps" or "raps"; None makes none.
        intervals: of numbers: the score of conformal intervals, "normalised" or "absolute".
        level: share of examples that sets and intervals shall cover.
        by_class: sets cover each class that often.

    Returns:
        The new results. Their "calibration" holds ``noise_scale`` (None without posterior noise), ``note``
        (why the noise was left as trained), ``kind``, ``scale``, ``bias``, the number of ``examples``, the
        metrics of the test set ``before``, and ``conformal``: the score, the level, the number of examples,
        and the coverage and mean size of the sets (widths of the intervals) on the test set.
    """
    if not 0 < level < 1:
        raise RunError(f"level {level}: expected a share between 0 and 1, such as 0.9.")
    if by_class and sets is None:
        raise RunError("--by-class is for prediction sets. Fix: --sets lac --by-class.")
    run = finished(folder, splits, data_root, trust, calibrating=True)
    with run as (target, config, splits, fabric):
        numbers = splits.task == "regression"
        if numbers and sets is not None:
            raise RunError(
                f"{target.path} is a regression, and prediction sets are for classes. Fix: leave out --sets; "
                "it gets intervals."
            )
        if not len(splits.val):
            raise RunError(f"{splits.name} has no validation part to calibrate on.")
        if numbers:
            kind, noise = "none", False
        elif kind == "none" and not noise and sets is None:
            raise RunError("nothing is to be fitted. Fix: a kind, noise, or --sets.")
        fit = _Fit(target, config, splits, fabric)
        found = fit.scaling(kind, noise, halved=sets is not None)
        score = intervals if numbers else sets
        conformal = None if score is None else fit.conformal(score, by_class)
        if conformal is not None:
            found["conformal"] = fit.measured(conformal, level)
        return fit.store(found, None if conformal is None else (conformal, level))


class _Fit:
    """The calibration of one run: its model, its data, and how it predicts."""

    def __init__(self, target: RunDir, config: RunConfig, splits: Splits, fabric: "Fabric") -> None:
        self.target, self.config, self.splits, self.fabric = target, config, splits, fabric
        self.info = DataInfo.of(splits)
        self.model = load_run(target.path, fabric.device, trust=True).model
        self.predictor = Predictor(self.model, self.info, config, fabric)
        self.rest = torch.arange(len(splits.val))  # validation examples that nothing was fitted on

    def scaling(self, kind: Kind | Literal["none"], noise: bool, halved: bool) -> dict[str, Any]:
        """Fit noise scale and scaling; return them with the test metrics before."""
        self.model.likelihood.scaling = None  # of an earlier calibration
        try:
            self.model.set_noise_scale(1.0)
        except TypeError:  # it has none
            noise = False
        test, device = self.splits.test, self.fabric.device
        before = self.predictor.over(test, make_evaluator(self.info, device)).metrics()
        found: dict[str, Any] = {"noise_scale": None, "note": None, "kind": kind}
        found |= {"scale": None, "bias": None, "examples": 0, "before": before}
        if not noise and kind == "none":
            return found
        rows = self.rest
        if halved:
            generator = torch.Generator().manual_seed(self.config.seed)
            rows, self.rest = torch.randperm(len(rows), generator=generator).tensor_split(2)
        batches = self._held_out(rows.sort().values)
        samples, seed = self.predictor.samples, self.predictor.seed
        with self.fabric.autocast():
            if noise:
                try:
                    found["noise_scale"] = fit_noise_scale(
                        self.model, batches, samples=samples, seed=seed
                    )
                except ValueError as error:  # the noise is as trained; a temperature may follow
                    found["note"] = str(error).partition(" Fix:")[0]  # it is the next step here
            if kind != "none":
                scaling = calibrate(self.model, batches, kind, samples=samples, seed=seed)
                found |= {"scale": scaling.scale.tolist(), "bias": scaling.bias.tolist()}
        return found | {"examples": len(rows)}

    def conformal(self, score: SetScore | IntervalScore, by_class: bool) -> Conformal:
        """Compute the scores of the examples that nothing was fitted on."""
        parts = []
        generator = torch.Generator().manual_seed(0)
        for raw, y in self._batches(self.rest.sort().values):
            p = self.predictor(raw, keep_members=False)
            if self.info.task == "regression":
                parts.append(fit_conformal(p, self.splits.normalise_targets(y), score))
                continue
            y = self._labels(y)
            chosen = choose_cells((y != IGNORED).cpu(), CELLS_PER_EXAMPLE, generator).to(y.device)
            kept = torch.full_like(y, IGNORED).flatten()
            kept[chosen] = y.flatten()[chosen]
            if len(chosen):
                y = kept.view(y.shape)
                parts.append(fit_conformal(p, y, score, by_class=by_class, ignore_index=IGNORED))
        if not parts:
            raise RunError(f"no label of the validation part of {self.splits.name} counts.")
        groups = zip(*(part.scores for part in parts), strict=True)
        scores = tuple(torch.cat(group).sort(0).values.cpu() for group in groups)
        return replace(parts[0], scores=scores)

    def measured(self, conformal: Conformal, level: float) -> dict[str, Any]:
        """Return the score and the level, and how often and how large sets or intervals are on the test set."""
        right = total = size = 0.0
        for raw, y in self._batches(torch.arange(len(self.splits.test)), self.splits.test):
            p = self.predictor(raw, keep_members=False)
            if self.info.task == "regression":
                low, high = p.interval(level, conformal)
                y = self.splits.normalise_targets(y).reshape(low.shape)
                inside, sizes = (low <= y) & (y <= high), (high - low) * self.info.target_std
            else:
                found, y = p.sets(conformal, level), self._labels(y)
                counted = y != IGNORED
                inside = found.gather(1, y.where(counted, 0).unsqueeze(1)).squeeze(1)[counted]
                sizes = found.sum(1)[counted]
            right, size = right + inside.sum().item(), size + sizes.sum().item()
            total += inside.numel()
        return {
            "score": conformal.method,
            "level": level,
            "by_class": len(conformal.scores) > 1,
            "examples": len(self.rest),
            "coverage": right / total if total else None,
            "size": size / total if total else None,
        }

    def store(
        self, found: dict[str, Any], conformal: tuple[Conformal, float] | None
    ) -> dict[str, Any]:
        """Write everything, and measure the run again."""
        train = self.target.results(calibrating=True)["train"]
        self.target.write_conformal(None)  # the old scores are of the old weights
        self.target.save_weights(self.model)
        self.target.write_conformal(conformal)
        again = environment(self.fabric.device, self.fabric.world_size)
        return measure(
            self.target,
            self.model,
            self.splits,
            self.config,
            self.fabric,
            train,
            measured_again=again,
            calibration=found,
        )

    def _held_out(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return examples of the validation part in batches, inputs prepared for the network."""
        likelihood = self.model.likelihood
        assert isinstance(likelihood, Categorical)
        batches = []
        for raw, y in self._batches(rows):
            y = self._labels(y)
            y = y.masked_fill(y == IGNORED, likelihood.ignore_index)
            batches.append((self.predictor.prepare(raw), y))
        return batches

    def _batches(
        self, rows: Tensor, data: Examples | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield raw inputs and targets, those of the validation part by default."""
        data = self.splits.val if data is None else data
        parts = [rows[part] for part in batch_indices(len(rows), self.predictor.batch_size)]
        return data.to(self.predictor.device).stream(parts)

    def _labels(self, y: Tensor) -> Tensor:
        """Return labels as int64, -100 where none counts."""
        y = y.long()
        for index in (self.splits.ignore_index, self.splits.ood_index):
            if index is not None:
                y = y.masked_fill(y == index, IGNORED)
        return y
