"""Conformal prediction: coverage in finite samples, and the same results as MAPIE."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import lpbnn
from lpbnn.calibration import Conformal, fit_conformal
from lpbnn.calibration.conformal import class_scores, conformal_quantile
from lpbnn.predict import Prediction

# What MAPIE 1.6.0 returns for the inputs below (SplitConformalClassifier and SplitConformalRegressor with
# prefit estimators and random_state=0; aps with include_last_label="randomized"; raps: the quantile for
# k = 2 and lambda = 0.1, which MAPIE would choose itself). A set is written as its classes. MAPIE's sets of
# raps differ from the paper's algorithm 3, and from ours, where the threshold lies among penalised classes:
# its random part divides by the last probability minus the penalty, the paper's by the probability.
MAPIE_SETS = {
    ("lac", 0.8): "3 04 2 13 0 4 2 13 04 4 12 3",
    ("lac", 0.9): "03 04 2 13 0 4 2 13 04 4 12 013",
    ("aps", 0.8): "03 04 24 13 0 4 2 13 04 24 12 13",
    ("aps", 0.9): "013 04 24 13 04 04 12 13 04 24 123 013",
}
MAPIE_RAPS = {0.8: 0.9494965227, 0.9: 0.9934535968}
MAPIE_LOWER = {
    ("absolute", 0.8): [
        0.674907140,
        0.619864087,
        0.460794401,
        0.215209446,
        -0.089855286,
        -0.420816408,
    ],
    ("absolute", 0.9): [
        0.649962019,
        0.594918966,
        0.435849280,
        0.190264325,
        -0.114800407,
        -0.445761529,
    ],
    ("normalised", 0.8): [
        0.701129507,
        0.629379648,
        0.438112341,
        0.174567592,
        -0.120080467,
        -0.420254031,
    ],
    ("normalised", 0.9): [
        0.688846066,
        0.616409564,
        0.423818950,
        0.159536062,
        -0.134683877,
        -0.433592086,
    ],
}


def formula_probs(n: int, shift: float) -> np.ndarray:
    i, c = np.arange(n)[:, None], np.arange(5)[None]
    z = 3 * np.sin(1.7 * i + 2.3 * c * c + shift + 0.01 * i * c)
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def formula_classes() -> tuple[Tensor, Tensor, Tensor]:
    """Held-out probabilities, their labels, and probabilities to predict."""
    held_out = formula_probs(60, 0.0)
    uniform = np.abs(np.sin(12.9898 * np.arange(60))) * 43758.5453 % 1
    labels = [int(np.searchsorted(p.cumsum(), u)) for p, u in zip(held_out, uniform, strict=True)]
    return torch.tensor(held_out), torch.tensor(labels), torch.tensor(formula_probs(12, 0.5))


def classes(probs: Tensor) -> Prediction:
    entropies = torch.special.entr(probs).sum(1)
    return Prediction("classification", probs, entropies, 0 * entropies, 1 - probs.amax(1))


def numbers(mean: Tensor, variance: Tensor) -> Prediction:
    zero = torch.zeros_like(mean)
    return Prediction(
        "regression", mean, variance, zero, variance.sum(1), quantity="mean", class_dim=None
    )


def uncalibrated(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels, and probabilities that are three times too sure and wrong about one class."""
    logits = 1.5 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    labels = logits.softmax(1).multinomial(1, generator=generator).squeeze(1)
    logits[:, 0] += 1
    return (3 * logits).softmax(1), labels


def noisy(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Means, variances that are wrong by a factor that depends on them, and targets."""
    variance = torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.1
    mean = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return mean, variance, mean + variance * noise


def check_binomial(covered: int, draws: int, share: float) -> None:
    """Refuse a count outside of the central 99.99 % of its binomial distribution."""
    low, high = stats.binom.ppf([5e-5, 1 - 5e-5], draws, share)
    assert low <= covered <= high, (covered, low, high)


# Coverage: with n = 99 and a level of 0.9 the chance to cover is exactly 90 / 100.


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("lac", {}),
        ("aps", {}),
        ("aps", {"randomised": True}),
        ("raps", {"penalty": 0.1, "free_classes": 1}),
        ("raps", {"penalty": 0.1, "free_classes": 1, "randomised": True}),
    ],
)
def test_sets_cover_as_often_as_asked_for(method: Any, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(1000):
        probs, labels = uncalibrated(100, generator)
        conformal = fit_conformal(classes(probs[:99]), labels[:99], method, **options)
        covered += int(classes(probs[99:]).sets(conformal, 0.9)[0, labels[99]])
    check_binomial(covered, 1000, 0.9)


def test_class_conditional_sets_cover_every_class() -> None:
    generator = torch.Generator().manual_seed(2)
    covered, seen = [0, 0], [0, 0]
    for _ in range(1000):
        labels = torch.cat(
            [torch.arange(2).repeat(49), torch.randint(0, 2, (1,), generator=generator)]
        )
        own = torch.rand(99, generator=generator, dtype=torch.float64) * (0.3 + 0.7 * labels)
        p = torch.stack([own, 1 - own], 1)
        probs = torch.where(labels.unsqueeze(1) == 0, p, p.flip(1))
        conformal = fit_conformal(classes(probs[:98]), labels[:98], by_class=True)
        last = int(labels[98])
        covered[last] += int(classes(probs[98:]).sets(conformal, 0.9)[0, last])
        seen[last] += 1
    for found, draws in zip(covered, seen, strict=True):
        check_binomial(found, draws, 45 / 50)  # n = 49 of each class


def test_one_threshold_for_all_classes_does_not_cover_each() -> None:
    generator = torch.Generator().manual_seed(3)
    probs, labels = uncalibrated(20_000, generator)
    half = classes(probs[:10_000]), labels[:10_000]
    rest = classes(probs[10_000:])
    index = labels[10_000:].unsqueeze(1)
    shares = {}
    for by_class in (False, True):
        inside = rest.sets(fit_conformal(*half, by_class=by_class), 0.9).gather(1, index).squeeze(1)
        shares[by_class] = [inside[labels[10_000:] == c].double().mean().item() for c in range(5)]
    assert max(abs(share - 0.9) for share in shares[True]) < 0.03
    assert max(abs(share - 0.9) for share in shares[False]) > 0.05


@pytest.mark.parametrize("method", ["absolute", "normalised"])
def test_intervals_cover_as_often_as_asked_for(method: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    covered = 0
    for _ in range(1000):
        mean, variance, targets = noisy(100, generator)
        conformal = fit_conformal(numbers(mean[:99], variance[:99]), targets[:99], method)
        low, high = numbers(mean[99:], variance[99:]).interval(0.9, conformal)
        covered += int((low <= targets[99:]) & (targets[99:] <= high))
    check_binomial(covered, 1000, 0.9)


def test_normalised_intervals_follow_the_variance_and_absolute_ones_do_not() -> None:
    mean, variance, targets = noisy(500, torch.Generator().manual_seed(5))
    p = numbers(mean, variance)
    widths = {}
    for method in ("absolute", "normalised"):
        low, high = p.interval(0.9, fit_conformal(p, targets, method))
        widths[method] = (high - low).squeeze(1)
    assert widths["absolute"].std() < 1e-9
    ratio = widths["normalised"] / variance.sqrt().squeeze(1)
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))


def test_every_target_of_an_example_has_its_own_quantile() -> None:
    mean = torch.zeros(200, 2)
    targets = torch.randn(200, 2) * torch.tensor([1.0, 10.0])
    p = numbers(mean, torch.ones_like(mean))
    _, high = p.interval(0.9, fit_conformal(p, targets, "absolute"))
    for k in range(2):
        alone = numbers(mean[:, k : k + 1], torch.ones(200, 1))
        _, expected = alone.interval(0.9, fit_conformal(alone, targets[:, k], "absolute"))
        torch.testing.assert_close(high[:, k : k + 1], expected)


def test_an_interval_without_conformal_scores_is_the_normal_one() -> None:
    p = numbers(torch.tensor([[2.0]]), torch.tensor([[4.0]]))
    low, high = p.interval(0.95)
    expected = stats.norm.ppf([0.025, 0.975], 2, 2)
    assert [low.item(), high.item()] == pytest.approx(list(expected), rel=1e-6)


# Equal to other definitions


@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_equal_those_of_mapie(method: str, level: float) -> None:
    probs, labels, new = formula_classes()
    draws = {n: torch.tensor(np.random.RandomState(0).uniform(size=(n, 1))) for n in (60, 12)}
    scores = class_scores(probs, method, uniform=draws[60]).gather(1, labels.unsqueeze(1))
    quantile = conformal_quantile(scores.squeeze(1).sort().values, level)
    sets = class_scores(new, method, uniform=draws[12]) <= quantile
    found = ["".join(str(c.item()) for c in row.nonzero()) for row in sets]
    assert found == MAPIE_SETS[method, level].split()
    if method == "lac":
        conformal = fit_conformal(classes(probs), labels, "lac")
        assert torch.equal(classes(new).sets(conformal, level), sets)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_the_threshold_of_raps_equals_that_of_mapie(level: float) -> None:
    probs, labels, _ = formula_classes()
    conformal = fit_conformal(classes(probs), labels, "raps", penalty=0.1, free_classes=2)
    assert conformal.thresholds(level).item() == pytest.approx(MAPIE_RAPS[level], abs=1e-9)


@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("method", ["absolute", "normalised"])
def test_intervals_equal_those_of_mapie(method: Any, level: float) -> None:
    i, j = torch.arange(60, dtype=torch.float64), torch.arange(12, dtype=torch.float64)
    mean, variance = (i / 7).sin(), 0.1 + 0.05 * (i / 5).cos() ** 2
    targets = mean + variance.sqrt() * (3.1 * i * i).sin()
    held_out = numbers(mean.unsqueeze(1), variance.unsqueeze(1))
    new = numbers((j / 3).cos().unsqueeze(1), (0.1 + 0.05 * (j / 2).sin() ** 2).unsqueeze(1))
    low, high = new.interval(level, fit_conformal(held_out, targets, method))
    expected = torch.tensor(MAPIE_LOWER[method, level], dtype=torch.float64)
    torch.testing.assert_close(low[:6, 0], expected, rtol=0, atol=1e-8)
    torch.testing.assert_close((low + high) / 2, new.mean)


def test_adaptive_scores_are_sums_over_the_classes_before() -> None:
    probs, _ = uncalibrated(50, torch.Generator().manual_seed(6))
    u = torch.rand(50, 1, dtype=torch.float64)
    found = class_scores(probs, "raps", 0.1, 2, u)
    without = class_scores(probs, "aps", 0.1, 2, u)
    for i in range(50):
        for c in range(5):
            before = probs[i][probs[i] > probs[i, c]]
            place = len(before) + 1
            score = (before.sum() + (1 - u[i, 0]) * probs[i, c]).item()
            assert without[i, c].item() == pytest.approx(score, abs=1e-12)
            score += 0.1 * max(place - 2, 0)
            assert found[i, c].item() == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (99, 0.9), (100, 0.9), (19, 0.95), (37, 0.5)])
def test_the_quantile_is_an_order_statistic(n: int, level: float) -> None:
    from fractions import Fraction

    place = math.ceil((n + 1) * Fraction(str(level)))
    assert conformal_quantile(torch.arange(1, n + 1).double(), level) == place


def test_higher_levels_give_larger_sets() -> None:
    probs, labels, new = formula_classes()
    conformal = fit_conformal(classes(probs), labels, "aps")
    small, large = (classes(new).sets(conformal, level) for level in (0.6, 0.9))
    assert (large | ~small).all()
    assert large.sum() > small.sum()


def test_maps_have_sets_in_their_layout() -> None:
    model = lpbnn.build(nn.Conv2d(3, 4, 1), "mcp", task="segmentation", ignore_index=255)
    p = lpbnn.predict(model, torch.randn(2, 3, 6, 6))
    labels = torch.randint(0, 4, (2, 6, 6))
    labels[0] = 255
    conformal = fit_conformal(p, labels, ignore_index=255)
    assert len(conformal.scores[0]) == 36
    sets = p.sets(conformal)
    assert sets.shape == p.probs.shape
    expected = 1 - p.probs.double() <= conformal.thresholds(0.9)
    assert torch.equal(sets, expected)


# Bad input


def test_too_few_examples_name_the_number_needed() -> None:
    probs, labels, new = formula_classes()
    conformal = fit_conformal(classes(probs), labels)
    with pytest.raises(
        ValueError, match="level of 0.99 needs at least 99 held-out examples; there are 60"
    ):
        classes(new).sets(conformal, 0.99)


def test_a_class_with_too_few_examples_is_named() -> None:
    probs, labels, new = formula_classes()
    held_out = labels != 2
    conformal = fit_conformal(classes(probs[held_out]), labels[held_out], by_class=True)
    with pytest.raises(ValueError, match="of class 2; there are 0.*by_class=False"):
        classes(new).sets(conformal, 0.5)


@pytest.mark.parametrize("level", [0.0, 1.0, 90, float("nan")])
def test_a_level_that_is_no_share_is_refused(level: float) -> None:
    probs, labels, _ = formula_classes()
    with pytest.raises(ValueError, match="expected a share between 0 and 1"):
        classes(probs).sets(fit_conformal(classes(probs), labels), level)
    with pytest.raises(ValueError, match="expected a share between 0 and 1"):
        numbers(torch.zeros(1, 1), torch.ones(1, 1)).interval(level)


def test_nan_is_refused() -> None:
    probs, labels, new = formula_classes()
    conformal = fit_conformal(classes(probs), labels)
    new[0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 probabilities are not finite"):
        classes(new).sets(conformal)
    mean = torch.zeros(20, 1)
    with pytest.raises(ValueError, match="20 targets are not finite"):
        fit_conformal(numbers(mean, mean + 1), torch.full((20,), torch.nan))


@pytest.mark.parametrize("method", ["absolute", "normalised"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_means_that_are_not_finite_are_refused(method: Any, value: float) -> None:
    mean = torch.zeros(20, 1)
    mean[3] = value
    with pytest.raises(ValueError, match="1 residuals are not finite"):
        fit_conformal(numbers(mean, torch.ones_like(mean)), torch.zeros(20, 1), method)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("by_class", [False, True])
def test_labels_of_any_integer_type_give_the_same_scores(
    dtype: torch.dtype, by_class: bool
) -> None:
    probs, labels, _ = formula_classes()
    expected = fit_conformal(classes(probs), labels, by_class=by_class)
    found = fit_conformal(classes(probs), labels.to(dtype), by_class=by_class)
    assert all(map(torch.equal, found.scores, expected.scores))


def test_targets_of_another_kind_are_refused() -> None:
    probs, labels, _ = formula_classes()
    with pytest.raises(ValueError, match="integer labels of shape \\(60,\\)"):
        fit_conformal(classes(probs), labels[:10])
    with pytest.raises(ValueError, match="labels from 0 to 4"):
        fit_conformal(classes(probs), labels + 1)
    with pytest.raises(ValueError, match="expected targets of shape"):
        fit_conformal(numbers(torch.zeros(5, 1), torch.ones(5, 1)), torch.zeros(4))


def test_a_score_of_the_other_task_is_refused() -> None:
    probs, labels, _ = formula_classes()
    one = numbers(torch.zeros(20, 1), torch.ones(20, 1))
    with pytest.raises(ValueError, match="choose one of lac, aps, raps"):
        fit_conformal(classes(probs), labels, "absolute")
    with pytest.raises(TypeError, match="Fix: interval"):
        classes(probs).sets(fit_conformal(one, torch.zeros(20)))
    with pytest.raises(TypeError, match="Fix: sets"):
        one.interval(0.9, fit_conformal(classes(probs), labels))


def test_variances_of_zero_cannot_normalise() -> None:
    one = numbers(torch.zeros(20, 1), torch.zeros(20, 1))
    with pytest.raises(ValueError, match="method='absolute'"):
        fit_conformal(one, torch.zeros(20), "normalised")


def test_scores_of_another_number_of_classes_are_refused() -> None:
    probs, labels, new = formula_classes()
    conformal = Conformal("lac", fit_conformal(classes(probs), labels, by_class=True).scores[:4])
    with pytest.raises(ValueError, match="4 classes and the prediction has 5"):
        classes(new).sets(conformal, 0.5)


def test_what_is_no_prediction_or_no_tensor_is_refused() -> None:
    probs, labels, _ = formula_classes()
    model: Any = lpbnn.build(nn.Linear(4, 3), "mcp")
    with pytest.raises(TypeError, match=r"got MCP. Fix: fit_conformal\(lpbnn.predict"):
        fit_conformal(model, labels)
    for wrong in (labels.tolist(), labels.numpy()):
        with pytest.raises(TypeError, match=r"Fix: torch.as_tensor"):
            fit_conformal(classes(probs), wrong)


def test_arguments_in_the_wrong_order_name_the_right_call() -> None:
    probs, labels, _ = formula_classes()
    conformal: Any = fit_conformal(classes(probs), labels)
    level: Any = 0.9
    for wrong in (None, level):
        with pytest.raises(TypeError, match=r"Fix: sets\(conformal, level\)"):
            classes(probs).sets(wrong)
    with pytest.raises(TypeError, match=r"Fix: interval\(level, conformal\)"):
        numbers(torch.zeros(1, 1), torch.ones(1, 1)).interval(conformal, level)


@pytest.mark.parametrize(
    "options", [{"penalty": -1.0}, {"penalty": math.nan}, {"free_classes": -1}]
)
def test_a_penalty_is_a_number_of_at_least_0(options: dict[str, Any]) -> None:
    probs, labels, _ = formula_classes()
    with pytest.raises(ValueError, match="both at least 0"):
        fit_conformal(classes(probs), labels, "raps", **options)


@pytest.mark.parametrize("option", ["by_class", "randomised"])
def test_options_of_classes_are_refused_for_numbers(option: str) -> None:
    one = numbers(torch.zeros(20, 1), torch.ones(20, 1))
    with pytest.raises(ValueError, match="are for classes"):
        fit_conformal(one, torch.zeros(20), **{option: True})
