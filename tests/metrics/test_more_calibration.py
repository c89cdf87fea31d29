"""Adaptive and classwise ECE, CRPS, quantile calibration, sets: against brute force and torchmetrics."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error
from torchmetrics.functional.regression import continuous_ranked_probability_score

from lpbnn import metrics


def classes(n: int = 1000) -> tuple[Tensor, Tensor]:
    logits = 2 * torch.randn(n, 4)
    return (1.5 * logits).softmax(1), logits.softmax(1).multinomial(1).squeeze(1)


def mixture(members: int, n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(members, n), torch.rand(members, n) + 0.1, 2 * torch.randn(n)


@pytest.mark.parametrize("num_bins", [1, 7, 15])
def test_adaptive_ece_weights_bins_of_equal_counts(num_bins: int) -> None:
    probs, labels = classes(105)
    rows = sorted(
        (p.max().item(), float(p.argmax() == y)) for p, y in zip(probs, labels, strict=True)
    )
    size = 105 // num_bins
    expected = 0.0
    for b in range(num_bins):
        part = rows[b * size : (b + 1) * size]
        expected += abs(sum(right - p for p, right in part)) / 105
    found = metrics.adaptive_ece(probs, labels, num_bins=num_bins)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n", [3, 15, 16, 29, 100])
def test_adaptive_ece_has_as_many_bins_as_asked_for_whatever_the_number_of_examples(n: int) -> None:
    """Their counts differ by one at most, as those of numpy's array_split."""
    probs, labels = classes(n)
    confidence, predicted = probs.max(1)
    order = confidence.argsort()
    gaps = ((predicted == labels).double() - confidence.double())[order].numpy()
    expected = sum(abs(part.sum()) for part in np.array_split(gaps, 15)) / n
    assert metrics.adaptive_ece(probs, labels) == pytest.approx(expected, abs=1e-6)


def test_classwise_ece_is_the_mean_of_binary_errors() -> None:
    probs, labels = classes()
    each = [
        binary_calibration_error(probs[:, c].clone(), (labels == c).int(), n_bins=15)
        for c in range(4)
    ]
    expected = torch.stack(each).mean().item()
    assert metrics.classwise_ece(probs, labels) == pytest.approx(expected, abs=1e-5)


def test_bins_of_the_classwise_ece_are_closed_above() -> None:
    """0.25 is in the bin with 0.1, not in that with 0.4."""
    probs = torch.tensor([[0.25, 0.3, 0.45], [0.1, 0.3, 0.6], [0.4, 0.3, 0.3]])
    labels, expected = torch.tensor([0, 1, 2]), 0.0
    for c in range(3):
        for b in range(4):
            inside = (b / 4 < probs[:, c]) & (probs[:, c] <= (b + 1) / 4)
            expected += ((labels == c).float() - probs[:, c])[inside].sum().abs().item() / 9
    assert metrics.classwise_ece(probs, labels, num_bins=4) == pytest.approx(expected)


@pytest.mark.parametrize("num_bins", [2, 3, 15])
def test_every_bin_of_an_ece_counts_for_itself(num_bins: int) -> None:
    """Labels that are too frequent in one bin and too rare in the next, so that no two may be one."""
    p = torch.linspace(0.02, 0.999, 20 * num_bins, dtype=torch.float64)
    bins = (p * num_bins).ceil().long() - 1
    right = (bins % 2 == 0).double()
    gaps = [(right - p)[bins == b].sum().abs().item() for b in range(num_bins)]
    expected = sum(gaps) / len(p)
    two = torch.stack([p, 1 - p], 1)
    many = torch.cat([p[:, None], ((1 - p) / 59)[:, None].expand(-1, 59)], 1)
    for name, probs in (("classwise_ece", two), ("ece", many)):
        found = getattr(metrics, name)(probs, 1 - right.long(), num_bins=num_bins)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["adaptive_ece", "classwise_ece"])
def test_maps_count_their_pixels_and_leave_out_the_ignored(name: str) -> None:
    metric = getattr(metrics, name)
    probs, labels = classes(200)
    maps = probs.view(2, 10, 10, 4).movedim(-1, 1)
    targets = labels.view(2, 10, 10).clone()
    targets[0] = 255
    expected = metric(probs[100:], labels[100:])
    assert metric(maps, targets, ignore_index=255) == pytest.approx(expected)


def test_the_bounds_of_an_interval_belong_to_it() -> None:
    targets = torch.tensor([0.0, 1.0, 0.5, -0.1, 1.1])
    found = metrics.interval_coverage(torch.zeros(5), torch.ones(5), targets)
    assert found == pytest.approx(0.6)


@pytest.mark.parametrize("name", ["adaptive_ece", "classwise_ece"])
def test_what_is_no_distribution_is_refused(name: str) -> None:
    probs, labels = classes(10)
    with pytest.raises(ValueError, match="1 rows of probs are negative, NaN"):
        getattr(metrics, name)(probs.index_fill(0, torch.tensor(3), torch.nan), labels)


@pytest.mark.parametrize("members", [1, 3])
def test_crps_is_the_integral_over_the_distribution_function(members: int) -> None:
    means, variances, targets = mixture(members, n=5)

    def squared(x: float, i: int) -> float:
        below = stats.norm.cdf(x, means[:, i].numpy(), variances[:, i].sqrt().numpy()).mean()
        return (below - (targets[i].item() <= x)) ** 2

    each = [
        integrate.quad(squared, -15, 15, args=(i,), points=[targets[i].item()], limit=200)[0]
        for i in range(5)
    ]
    assert metrics.crps(means, variances, targets) == pytest.approx(sum(each) / 5, abs=1e-6)


def test_crps_of_sure_members_is_that_of_torchmetrics() -> None:
    means, _, targets = mixture(6)
    found = metrics.crps(means, torch.full_like(means, 1e-12), targets)
    expected = continuous_ranked_probability_score(means.T, targets).item()
    assert found == pytest.approx(expected, abs=1e-5)


def test_quantiles_of_the_right_distribution_lie_on_the_diagonal() -> None:
    means, variances, _ = mixture(3, 50_000)
    chosen = torch.randint(0, 3, (1, 50_000))
    targets = (means + variances.sqrt() * torch.randn_like(means)).gather(0, chosen).squeeze(0)
    levels, shares = metrics.quantile_calibration(means, variances, targets)
    torch.testing.assert_close(shares, levels, rtol=0, atol=0.01)
    assert metrics.quantile_error(means, variances, targets) < 0.005
    assert metrics.quantile_error(means, 9 * variances, targets) > 0.05


def test_shares_count_targets_below_the_quantile() -> None:
    means, variances, targets = mixture(1)
    levels, shares = metrics.quantile_calibration(means, variances, targets, num_levels=9)
    for level, share in zip(levels.tolist(), shares.tolist(), strict=True):
        quantile = stats.norm.ppf(level, means[0].numpy(), variances[0].sqrt().numpy())
        assert share == pytest.approx((targets.numpy() <= quantile).mean())


def test_sets_are_counted_by_pixel() -> None:
    sets = torch.rand(3, 4, 5, 5) < 0.4
    labels = torch.randint(0, 4, (3, 5, 5))
    labels[0] = 255
    hits, sizes = [], []
    for n in (1, 2):
        for i in range(5):
            for j in range(5):
                hits.append(sets[n, labels[n, i, j], i, j].item())
                sizes.append(sets[n, :, i, j].sum().item())
    found = metrics.set_coverage(sets, labels, ignore_index=255)
    assert found == pytest.approx(sum(hits) / 50)
    assert metrics.set_size(sets, labels, ignore_index=255) == pytest.approx(sum(sizes) / 50)


def test_sets_that_are_no_booleans_are_refused() -> None:
    with pytest.raises(ValueError, match="booleans"):
        metrics.set_size(torch.rand(3, 4))
    with pytest.raises(ValueError, match="outside 0..C-1"):
        metrics.set_coverage(torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="not finite"):
        metrics.interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.0, torch.nan]))
    with pytest.raises(ValueError, match="low is a ndarray; expected a torch.Tensor"):
        metrics.interval_coverage(np.zeros(2), torch.ones(2), torch.zeros(2))  # type: ignore[arg-type]
