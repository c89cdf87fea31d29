"""The diagrams of regression: the curve and its bands, predictions against targets, intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import erfinv

from lpbnn.report.svg import INK, LINE, MUTED, PAPER, colour, drawing

WIDE = 1.96  # deviations on either side of the middle 95 %
SHOWN = 60  # examples: more intervals than that hide each other
LEVELS = np.linspace(0.05, 0.95, 19)


@dataclass(frozen=True)
class Predicted:
    """What a model says of some examples, all (N,): one input, or many of which none is shown."""

    targets: np.ndarray
    mean: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray
    x: np.ndarray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], where: str) -> "Predicted | None":
        """From the arrays of a run; None where it has none, or predicts several numbers."""
        mean = arrays.get(f"{where}/mean")
        if mean is None or mean.size != len(mean):
            return None

        def column(name: str) -> np.ndarray:
            return arrays[f"{where}/{name}"].reshape(-1).astype(np.float64)

        inputs = arrays[f"{where}/inputs"]
        return cls(
            targets=column("targets"),
            mean=column("mean"),
            aleatoric=column("aleatoric_std"),
            epistemic=column("epistemic_std"),
            x=column("inputs") if inputs.size == len(inputs) else None,
        )

    @property
    def std(self) -> np.ndarray:
        return np.hypot(self.aleatoric, self.epistemic)


def curve(
    test: Predicted,
    outside: Sequence[Predicted],
    limits: tuple[float, float],
    index: int,
    label: str,
    train: tuple[np.ndarray, np.ndarray] | None = None,
) -> str:
    """One input: the mean, its 95 % band, and within it the part the members disagree about.

    ``train`` are the inputs and targets of the training set; runs of 0.1 have not stored them.
    """
    parts = [test, *outside]
    x = np.concatenate([p.x for p in parts if p.x is not None])
    order = np.argsort(x)
    x = x[order]
    mean, std, epistemic, targets = (
        np.concatenate([getattr(p, name) for p in parts])[order]
        for name in ("mean", "std", "epistemic", "targets")
    )
    with drawing(300, 200, f"Prediction of {label} along its input") as d:
        axes = d.axes(38, 8, 254, 160)
        for spread, alpha in ((std, 0.2), (epistemic, 0.4)):
            low, high = mean - WIDE * spread, mean + WIDE * spread
            axes.fill_between(x, low, high, color=colour(index), alpha=alpha, linewidth=0)
        step = max(1, len(x) // 120)
        (dots,) = axes.plot(x[::step], targets[::step], ".", color=MUTED, markersize=2, alpha=0.6)
        d.title(dots, "targets of the test and the outside set")
        (line,) = axes.plot(x, mean, color=colour(index), linewidth=1.8)
        d.title(line, f"{label}: predicted mean")
        if train is not None:
            look = {"color": INK, "markersize": 4.5, "markeredgecolor": PAPER, "zorder": 5}
            (dots,) = axes.plot(train[0].reshape(-1), train[1].reshape(-1), "o", **look)
            d.title(dots, f"{train[0].size} training points")
        if outside and test.x is not None:
            for edge in (test.x.min(), test.x.max()):
                axes.axvline(edge, color=MUTED, linewidth=0.8, dashes=(4, 3))
        axes.set(xlim=(x.min(), x.max()), ylim=limits)
        axes.set_xlabel("input", labelpad=0)
        axes.locator_params(axis="y", nbins=5)
    return d.svg


def parity(test: Predicted, index: int, label: str) -> str:
    """Predictions with their 95 % intervals against the targets."""
    with drawing(204, 196, f"Predictions of {label} against the targets") as d:
        axes = d.axes(36, 8, 160, 150)
        bounds = np.concatenate([test.targets, test.mean])
        low, high = float(np.min(bounds)), float(np.max(bounds))
        axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8, dashes=(4, 3))
        step = max(1, len(test.mean) // SHOWN)
        targets, mean, reach = (a[::step] for a in (test.targets, test.mean, WIDE * test.std))
        axes.vlines(
            targets, mean - reach, mean + reach, color=colour(index), alpha=0.25, linewidth=1
        )
        (dots,) = axes.plot(targets, mean, ".", color=colour(index), markersize=4)
        d.title(dots, f"{label}: median 95 % interval ± {float(np.median(reach)):.3g}")
        air = 0.03 * (high - low)
        ends = float(np.min(mean - reach)), float(np.max(mean + reach))
        axes.set(
            xlim=(low - air, high + air), ylim=(min(low, ends[0]) - air, max(high, ends[1]) + air)
        )
        axes.locator_params(nbins=4)
        axes.set_xlabel("target", labelpad=0)
    return d.svg


def intervals(test: Predicted, index: int, label: str) -> str:
    """How many targets lie in the central intervals of each level."""
    with drawing(204, 196, f"Calibration of the intervals of {label}") as d:
        axes = d.axes(36, 18, 160, 140)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, dashes=(4, 3))
        axes.plot(
            LEVELS, observed(test), color=colour(index), linewidth=1.8, marker="o", markersize=2.8
        )
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.set_xticks((0, 0.5, 1), ("0", ".5", "1"))
        axes.set_yticks((0, 0.5, 1), ("0", ".5", "1"))
        axes.grid(color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("level of the interval", labelpad=0)
        axes.text(0, 1.06, "share of targets in it", color=MUTED, va="bottom")
    return d.svg


def observed(test: Predicted) -> np.ndarray:
    """The share of targets within the central interval of each level, by a Gaussian of that spread.

    >>> sure = Predicted(np.array([0.0, 3.0]), np.zeros(2), np.ones(2), np.zeros(2))
    >>> observed(sure)[[0, -1]]  # the first is met by every interval, the second by none
    array([0.5, 0.5])
    """
    reach = np.sqrt(2) * erfinv(LEVELS)
    away = np.abs(test.targets - test.mean) / np.maximum(test.std, np.finfo(np.float64).tiny)
    return (away[None] <= reach[:, None]).mean(1)
