"""Numbers that are not scores: costs with their units, uncertainty and its parts."""

from dataclasses import dataclass

from lpbnn.metrics.info import MetricInfo

Scale = tuple[tuple[float, float, str], ...]  # (from here on, one unit, its name)
COUNT: Scale = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (0, 1, ""))
SECONDS: Scale = ((7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
BYTES: Scale = ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0, 1e3, "kB"))


@dataclass(frozen=True)
class Quantity(MetricInfo):
    """A number without a good side; with a ``scale`` it is shown in three digits and its unit."""

    scale: Scale = ()

    @property
    def arrow(self) -> str:
        return ""

    def format(self, value: float) -> str:
        """With its unit.

        >>> parameters, seconds = COSTS["cost/parameters"], COSTS["train/seconds"]
        >>> parameters.format(36_546_980), parameters.format(310_000), seconds.format(95_400)
        ('36.5 M', '310 k', '26.5 h')
        """
        if not self.scale:
            return f"{value:,.0f}" if value >= 1000 else super().format(value)
        one, unit = next((one, unit) for least, one, unit in self.scale if value >= least)
        number = value / one
        return f"{f'{number:.0f}' if number >= 100 else f'{number:#.3g}'} {unit}".rstrip()

    def spread(self, mean: float, std: float) -> str:
        """A cost's spread as a share of it, none where there is none.

        >>> COSTS["train/seconds"].spread(20, 1), COSTS["cost/parameters"].spread(310_000, 0)
        ('±5 %', '')
        """
        if not self.scale:
            return f"±{self.format(std)}"
        return f"±{100 * std / mean:.0f} %" if std > 0 else ""


COSTS: dict[str, Quantity] = {
    key: Quantity(key, title, "lower", convention, scale=scale)
    for key, title, convention, scale in (
        ("cost/parameters", "Parameters", "all that is trained, of all members", COUNT),
        ("train/seconds", "Training", "wall-clock time, without the evaluation", SECONDS),
        ("train/images_per_second", "Images/s", "training images per second", COUNT),
        (
            "train/epoch_seconds",
            "Epoch",
            "median of all but the first, which compiles",
            SECONDS,
        ),
        ("evaluate_seconds", "Evaluation", "wall-clock time of all that is measured", SECONDS),
        (
            "cost/predict_seconds_per_1000",
            "Prediction",
            "wall-clock time for 1,000 examples, all members",
            SECONDS,
        ),
        ("train/peak_bytes", "Memory, training", "the largest amount in use at any time", BYTES),
        ("cost/predict_peak_bytes", "Memory, prediction", "the same, while predicting", BYTES),
    )
}
UNCERTAINTY: dict[str, Quantity] = {
    key: Quantity(key, key.capitalize(), "lower", convention, digits=3)
    for key, convention in (
        ("total", "entropy of the mean prediction, in nats"),
        ("aleatoric", "mean entropy of the members' own predictions"),
        ("epistemic", "the difference of the two: what the members disagree about"),
    )
}
DEVIATIONS: dict[str, Quantity] = {
    key: Quantity(key, key.capitalize(), "lower", convention, scale=COUNT)
    for key, convention in (
        ("total", "root of the mean predicted variance, in the target's unit"),
        ("aleatoric", "the same of the members' own variances"),
        ("epistemic", "the same of the variance of their means; its square and aleatoric's add up"),
    )
}
