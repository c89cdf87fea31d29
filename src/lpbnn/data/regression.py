"""Regression: a real table (diabetes) and the toy curve on which uncertainty can be seen.

- `diabetes`: 442 patients, 10 measurements, disease progression after a year (Efron et al., 2004).
  scikit-learn's default features are standardised over all patients, which leaks the test part;
  the raw ones are used and the statistics come from the training part alone.
- `cubic`: y = x^3 + e, e ~ N(0, 3^2), x ~ U(-4, 4), 20 points (Hernandez-Lobato & Adams, 2015).
  `ood["outside"]` continues the curve to 4 < |x| <= 6, where a network that knows what it does not
  know widens its error bars.

Inputs are (N, features), targets (N, 1), both float32 and in their own units; `Splits.normalise`
and `Splits.normalise_targets` standardise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import Dataset, Entry, Splits, Task

INSIDE, OUTSIDE, NOISE = 4.0, 6.0, 3.0
REGRESSION: Task = "regression"


def _splits(
    name: str,
    train: Dataset,
    val: Dataset,
    test: Dataset,
    source: str,
    ood: dict[str, Dataset] | None = None,
) -> Splits:
    """Splits whose statistics come from `train` and from nothing else."""
    x, y = train.inputs.double(), train.targets.double()
    return Splits(
        name=name,
        task=REGRESSION,
        train=train,
        val=val,
        test=test,
        ood=ood or {},
        num_classes=None,
        mean=tuple(x.mean(0).tolist()),
        std=tuple(x.std(0, correction=0).tolist()),
        target_mean=y.mean().item(),
        target_std=y.std(correction=0).item(),
        description=SETS[name].description,
        source=source,
    )


def load_diabetes(root: Path | None = None) -> Splits:
    """Diabetes with a fixed split of 266 / 88 / 88 patients.

    >>> splits = load_diabetes()
    >>> splits.shape, len(splits.train), len(splits.val), len(splits.test)
    ((10,), 266, 88, 88)
    """
    from sklearn import datasets

    features, progression = datasets.load_diabetes(return_X_y=True, scaled=False)
    x = torch.from_numpy(np.asarray(features, dtype=np.float32))
    y = torch.from_numpy(np.asarray(progression, dtype=np.float32)).unsqueeze(1)
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(x)))
    parts = [Dataset(x[part], y[part]) for part in order.split([266, 88, 88])]
    return _splits("diabetes", *parts, source="embedded")


def _noisy_cube(x: Tensor, random: np.random.RandomState) -> Dataset:
    noise = torch.from_numpy(random.normal(0, NOISE, tuple(x.shape)))
    return Dataset(x.float(), (x**3 + noise).float())


def load_cubic(root: Path | None = None, points: int = 20) -> Splits:
    """The cubic curve, with 200 points for the test and 200 outside.

    Args:
        points: for training, and as many for validation.

    >>> splits = load_cubic()
    >>> outside = splits.ood["outside"].inputs.abs()
    >>> splits.train.inputs.abs().max().item() < 4 < outside.min().item()
    True
    """
    if points < 2:
        raise ValueError(f"points={points}; the curve needs at least 2, the paper uses 20.")
    random = np.random.RandomState(0)

    def inside(count: int) -> Tensor:
        return torch.from_numpy(random.uniform(-INSIDE, INSIDE, (count, 1)))

    train, val, test = (_noisy_cube(inside(n), random) for n in (points, points, 200))
    right = torch.linspace(INSIDE, OUTSIDE, 101, dtype=torch.float64)[1:].unsqueeze(1)
    outside = _noisy_cube(torch.cat([-right.flip(0), right]), random)
    return _splits("cubic", train, val, test, source="generated", ood={"outside": outside})


SETS = {
    "diabetes": Entry(load_diabetes, "disease progression of 442 patients from 10 measurements"),
    "cubic": Entry(
        load_cubic, "y = x^3 + noise on [-4, 4], 20 points; out-of-distribution: 4 < |x| <= 6"
    ),
}
