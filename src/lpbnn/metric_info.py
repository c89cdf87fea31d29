"""Title, direction and convention of each metric, for tables and reports."""

import math
from dataclasses import dataclass
from typing import Literal

HUGE = 1e5  # from here on a number is shown with an exponent
Direction = Literal["higher", "lower", "target"]


@dataclass(frozen=True)
class MetricInfo:
    """Display of one metric. Values are stored as computed: shares in [0, 1], not percents."""

    key: str
    title: str
    direction: Direction
    convention: str
    digits: int = 4
    percent: bool = False
    target: float | None = None
    significant: bool = False
    """True if ``digits`` counts all digits, for numbers of any size; False if those after the point."""

    @property
    def unit(self) -> str:
        """``"%"`` for the shares that are shown as percents."""
        return "%" if self.percent else ""

    @property
    def arrow(self) -> str:
        """For a table's head.

        >>> METRICS["accuracy"].arrow, METRICS["ece"].arrow, METRICS["coverage"].arrow
        ('↑', '↓', '→ 0.95')
        """
        return {"higher": "↑", "lower": "↓", "target": f"→ {self.target}"}[self.direction]

    @property
    def head(self) -> str:
        """Title, unit and good side: the head of a column and the name of an axis.

        >>> METRICS["accuracy"].head, METRICS["ece"].head
        ('Accuracy % ↑', 'ECE ↓')
        """
        return " ".join(filter(None, (self.title, self.unit, self.arrow)))

    def format(self, value: float) -> str:
        """``value`` as a table shows it, without its unit.

        >>> METRICS["accuracy"].format(0.96331), METRICS["ece"].format(0.00942)
        ('96.33', '0.0094')
        >>> METRICS["rmse"].format(55.9610), METRICS["rmse"].format(1824679012581.4)
        ('55.96', '1.82e+12')
        """
        return self._shown(value, self.decimals(value))

    def spread(self, mean: float, std: float) -> str:
        """Return a deviation over seeds as a table shows it, with as many decimals as its mean.

        >>> METRICS["rmse"].spread(55.9610, 2.1997), METRICS["ece"].spread(0.012, 0.003)
        ('±2.20', '±0.0030')
        """
        return f"±{self._shown(std, self.decimals(mean))}"

    def decimals(self, value: float) -> int:
        """Return the decimals of a value as it is shown."""
        if not self.significant or not value:
            return self.digits
        return max(0, self.digits - 1 - math.floor(math.log10(abs(value))))

    def _shown(self, value: float, decimals: int) -> str:
        shown = value * 100 if self.percent else value
        return f"{shown:.3g}" if abs(shown) >= HUGE else f"{shown:.{decimals}f}"

    def badness(self, value: float) -> float:
        """A number that is smaller for a better value: what to sort by, and whose minimum to bold.

        >>> min([0.91, 0.99, 0.94], key=METRICS["coverage"].badness)
        0.94
        """
        if self.target is not None:
            return abs(value - self.target)
        return -value if self.direction == "higher" else value


_OOD = "OOD is the positive class"
_PAIRS = "mean over the pairs of members"

METRICS: dict[str, MetricInfo] = {
    info.key: info
    for info in (
        MetricInfo(
            "accuracy",
            "Accuracy",
            "higher",
            "share of examples whose most probable class is the label",
            2,
            True,
        ),
        MetricInfo(
            "nll",
            "NLL",
            "lower",
            "mean negative log-likelihood in nats; regression: of the equal Gaussian mixture",
        ),
        MetricInfo(
            "brier", "Brier", "lower", "squared error of the probabilities, summed over classes"
        ),
        MetricInfo(
            "ece", "ECE", "lower", "15 equal-width bins (lo, hi], weighted by the bin's share"
        ),
        MetricInfo("auroc", "AUROC", "higher", f"{_OOD}; ties count half"),
        MetricInfo("aupr", "AUPR", "higher", f"{_OOD}; average precision, no interpolation"),
        MetricInfo(
            "fpr95", "FPR95", "lower", f"{_OOD}; FPR at the first threshold whose TPR reaches .95"
        ),
        MetricInfo(
            "ca", "cA", "higher", "accuracy, unweighted mean over the corruption sets", 2, True
        ),
        MetricInfo("ce", "cE", "lower", "ECE, unweighted mean over the corruption sets"),
        MetricInfo(
            "miou",
            "mIoU",
            "higher",
            "IoU over the data set, mean over the classes that occur; void pixels left out",
            2,
            True,
        ),
        MetricInfo("ratio_error", "Ratio-error", "higher", f"(N10 + N01) / N00, {_PAIRS}"),
        MetricInfo(
            "q_statistic",
            "Q-statistic",
            "lower",
            f"(N11 N00 - N10 N01) / (N11 N00 + N10 N01), {_PAIRS}",
        ),
        MetricInfo(
            "correlation", "Correlation", "lower", f"Pearson, of the error vectors, {_PAIRS}"
        ),
        MetricInfo(
            "disagreement", "Disagreement", "higher", f"share of different labels, {_PAIRS}"
        ),
        MetricInfo(
            "rmse", "RMSE", "lower", "of the mixture's mean, in the target's unit", significant=True
        ),
        MetricInfo(
            "coverage",
            "Coverage",
            "target",
            "share of targets in the mixture's central 95 % interval",
            target=0.95,
        ),
    )
}
