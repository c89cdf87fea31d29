"""The figure of the out-of-distribution score shows the score that the printed AUROC is of."""

from pathlib import Path

import numpy as np
import pytest
from report.conftest import Make, arrays, info

from lpbnn.report import write_report
from lpbnn.report.figures import score_samples
from lpbnn.report.runs import Group, grouped, read_runs


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """The chance that an example of the second set has the larger score."""
    return float((outside[:, None] > inside[None]).mean())


def scored(random: np.random.Generator, shift: float) -> dict[str, np.ndarray]:
    """Confidences that separate the sets perfectly, and scores that hardly do."""
    found = arrays(random, 1, latent=False)
    found["histogram/test"] = np.eye(50, dtype=int)[49] * 500
    found["histogram/ood/photos"] = np.eye(50, dtype=int)[5] * 500
    found["test/scores"] = random.normal(0, 1, 500).astype(np.float32)
    found["ood/photos/scores"] = random.normal(shift, 1, 500).astype(np.float32)
    return found


def group(*folders: Path) -> Group:
    (found,) = grouped(read_runs(folders))
    return found


def test_the_drawn_score_has_the_printed_auroc(make: Make) -> None:
    """DUQ's AUROC is of its kernel; the confidence tells the sets apart perfectly."""
    found = scored(np.random.default_rng(0), 0.25)
    exact = auroc(found["test/scores"], found["ood/photos/scores"])
    curves = score_samples(group(make("duq", with_arrays=found)), "photos")
    assert curves is not None
    assert auroc(*curves) == pytest.approx(exact, abs=0.01)
    assert exact == pytest.approx(0.57, abs=0.03)


def test_seeds_are_pooled_with_equal_weight(make: Make) -> None:
    random = np.random.default_rng(0)
    parts = [scored(random, 0.0), scored(random, 2.0)]
    parts[1]["test/scores"] = np.repeat(parts[1]["test/scores"], 7)
    curves = score_samples(
        group(*(make("duq", seed, with_arrays=one) for seed, one in enumerate(parts))), "photos"
    )
    assert curves is not None
    middle = (np.median(parts[0]["test/scores"]) + np.median(parts[1]["test/scores"])) / 2
    assert np.median(curves[0]) == pytest.approx(middle, abs=0.1)


def test_an_old_record_shows_the_usual_score_and_no_other(make: Make, tmp_path: Path) -> None:
    """Records of 0.1 hold histograms of the confidence, from which only 1 - confidence follows."""
    usual, own = group(make("mcp")), group(make("duq"))
    curves = score_samples(usual, "photos")
    assert curves is not None
    counts = usual.runs[0].arrays["histogram/test"]
    share = float((curves[0] <= 0.5 + 1e-6).mean())  # as many as are surer than one half
    assert share == pytest.approx(counts[25:].sum() / counts.sum(), abs=0.01)
    assert score_samples(own, "photos") is None
    page = write_report([make("mcp"), make("duq")], tmp_path / "r.html").read_text("utf-8")
    assert "Not shown: DUQ (not stored)" in page.partition('id="detection"')[2]


def test_regression_names_its_score_and_has_the_target_s_unit(
    regression: Make, tmp_path: Path
) -> None:
    data = info("regression", "cubic", shape=(1,), mean=(0.0,), std=(1.0,), target_std=50.0)
    variance = np.linspace(0.01, 1, 100, dtype=np.float32)
    found = {"test/scores": variance, "ood/outside/scores": 4 * variance}
    numbers = {"total": 0.25, "aleatoric": 0.16, "epistemic": 0.09}
    both = {"test": numbers, "outside": {name: 4 * value for name, value in numbers.items()}}
    paths = [
        regression(m, known=data, with_arrays=found, uncertainty=both) for m in ("mcp", "lpbnn")
    ]
    curves = score_samples(group(paths[0]), "outside")
    assert curves is not None
    assert curves[0].max() == pytest.approx(50)  # a deviation in the unit of the target
    assert curves[1].max() == pytest.approx(100)
    page = write_report(paths, tmp_path / "r.html").read_text("utf-8")
    assert "Out-of-distribution score: the predicted variance" in page
    assert "largest probability" not in page
    table = page.partition("Uncertainty and its parts")[2]
    for shown in ("25.0", "20.0", "15.0", "50.0", "40.0", "30.0"):
        assert f">{shown}" in table, shown
    assert "in nats" not in table.partition("</section>")[0]
