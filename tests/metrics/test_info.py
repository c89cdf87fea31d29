"""The table of metrics is complete, and points the right way."""

import pytest
import torch

from lpbnn import metrics
from lpbnn.metrics import METRICS

KEYS = ["accuracy", "nll", "brier", "ece", "auroc", "aupr", "fpr95", "ca", "ce", "miou"]
KEYS += ["ratio_error", "q_statistic", "correlation", "disagreement", "rmse", "coverage"]


def test_every_metric_is_described() -> None:
    assert list(METRICS) == KEYS
    for key, info in METRICS.items():
        assert info.key == key
        assert info.title
        assert info.convention
        assert "\n" not in info.convention
        assert (info.target is not None) == (info.direction == "target")


def test_every_family_speaks_in_these_keys() -> None:
    probs, labels = torch.eye(2), torch.tensor([0, 1])
    scores, is_ood = torch.tensor([[[0.1, 0.9]]]), torch.tensor([[[False, True]]])
    results = {
        metrics.ClassificationMetrics(): (probs, labels),
        metrics.DetectionMetrics(): (scores, is_ood),
        metrics.PooledDetectionMetrics(): (scores, is_ood),
        metrics.ImageDetectionMetrics(): (scores, is_ood),
        metrics.DiversityMetrics(2): (probs.expand(2, 2, 2), labels),
        metrics.RegressionMetrics(): (torch.ones(1, 2), torch.ones(1, 2), torch.ones(2)),
    }
    for metric, inputs in results.items():
        metric.update(*inputs)
        values = metric.compute()
        assert set(values) <= set(METRICS)
        assert all(isinstance(value, float) for value in values.values())
    assert set(metrics.corruption_means([{"accuracy": 1.0, "ece": 0.0}])) <= set(METRICS)


@pytest.mark.parametrize(
    ("key", "better", "worse"),
    [
        ("accuracy", 0.9, 0.8),
        ("ece", 0.1, 0.2),
        ("coverage", 0.94, 0.99),
        ("q_statistic", -0.5, 0.9),
    ],
)
def test_badness_is_smaller_for_the_better_value(key: str, better: float, worse: float) -> None:
    assert METRICS[key].badness(better) < METRICS[key].badness(worse)


def test_shown_values() -> None:
    assert METRICS["accuracy"].format(0.9502) + METRICS["accuracy"].unit == "95.02%"
    assert METRICS["auroc"].format(0.9691) + METRICS["auroc"].unit == "0.9691"
    assert METRICS["nll"].format(float("nan")) == "nan"
