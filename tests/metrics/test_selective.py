"""Risk-coverage curves and thresholds, against brute force and scikit-learn."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lpbnn.calibration import ood_threshold, risk_threshold
from lpbnn.metrics import augrc, aurc, fpr95, risk_coverage


def uncertainty_and_errors(n: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    uncertainty = torch.rand(n)
    return uncertainty, torch.bernoulli(0.5 * uncertainty)


def test_aurc_is_the_mean_risk_of_the_most_certain_examples() -> None:
    uncertainty, errors = uncertainty_and_errors()
    ordered = errors[uncertainty.argsort()]
    expected = sum(ordered[:k].mean().item() for k in range(1, len(errors) + 1)) / len(errors)
    assert aurc(uncertainty, errors) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rounded", [False, True])
def test_augrc_follows_from_auroc_and_accuracy(rounded: bool) -> None:
    uncertainty, errors = uncertainty_and_errors()
    if rounded:
        uncertainty = (10 * uncertainty).round() / 10
    accuracy = 1 - errors.mean().item()
    auroc = roc_auc_score(errors.numpy(), uncertainty.numpy())
    expected = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert augrc(uncertainty, errors) == pytest.approx(expected, rel=1e-6)


def test_the_order_of_equal_uncertainties_does_not_matter() -> None:
    uncertainty, errors = uncertainty_and_errors()
    uncertainty = (5 * uncertainty).round() / 5
    order = torch.randperm(len(errors))
    first, second = (
        risk_coverage(uncertainty, errors),
        risk_coverage(uncertainty[order], errors[order]),
    )
    torch.testing.assert_close(first.risk, second.risk)
    shuffled = torch.stack(
        [
            risk_coverage(uncertainty + 1e-6 * torch.rand(len(errors)), errors).generalised_risk
            for _ in range(300)
        ]
    )
    torch.testing.assert_close(first.generalised_risk, shuffled.mean(0), rtol=0, atol=5e-3)


def test_full_coverage_has_the_mean_loss() -> None:
    uncertainty, errors = uncertainty_and_errors()
    curve = risk_coverage(uncertainty, errors)
    assert curve.coverage[-1] == 1
    assert curve.risk[-1].item() == pytest.approx(errors.mean().item())


@pytest.mark.parametrize("risk", [0.05, 0.1, 0.2])
def test_the_risk_threshold_accepts_as_many_as_it_may(risk: float) -> None:
    uncertainty, errors = uncertainty_and_errors()
    uncertainty = (100 * uncertainty).round() / 100
    found = risk_threshold(uncertainty, errors, risk)
    assert errors[uncertainty <= found].mean() <= risk
    larger = uncertainty[uncertainty > found].unique()
    assert all(errors[uncertainty <= threshold].mean() > risk for threshold in larger)


def test_the_risk_threshold_accepts_examples_of_equal_uncertainty_together() -> None:
    """A group whose first few would be within the risk, and whose whole is not."""
    uncertainty = torch.tensor([0.1] * 10 + [0.2] * 10)
    errors = torch.tensor([0] * 10 + [1] * 10)
    for risk in (0.1, 0.3, 0.49):
        assert risk_threshold(uncertainty, errors, risk) == pytest.approx(0.1)
    assert risk_threshold(uncertainty, errors, 0.5) == pytest.approx(0.2)


def test_a_risk_that_is_met_exactly_is_allowed() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        uncertainty = torch.randint(0, 6, (24,), generator=generator).double()
        errors = torch.randint(0, 2, (24,), generator=generator)
        for threshold in uncertainty.unique().tolist():
            risk = errors[uncertainty <= threshold].double().mean().item()
            assert risk_threshold(uncertainty, errors, risk) >= threshold


def test_a_risk_that_cannot_be_reached_names_the_lowest() -> None:
    with pytest.raises(ValueError, match="the lowest is 1. Fix"):
        risk_threshold(torch.rand(5), torch.ones(5), 0.1)
    for wrong in (-0.1, float("nan"), "0.1", None):
        with pytest.raises(ValueError, match="expected a mean loss of at least 0"):
            risk_threshold(torch.rand(5), torch.ones(5), wrong)  # type: ignore[arg-type]


def test_the_ood_threshold_is_that_of_fpr95() -> None:
    known, ood = torch.randn(1000), torch.randn(333) + 1
    threshold = ood_threshold(ood, 0.95)
    assert (ood >= threshold).float().mean() >= 0.95
    assert (ood > threshold).float().mean() < 0.95
    is_ood = torch.cat([torch.zeros(1000), torch.ones(333)]).bool()
    expected = fpr95(torch.cat([known, ood]), is_ood)
    assert (known >= threshold).float().mean().item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("uncertainty", "losses", "message"),
    [
        (torch.tensor([0.1, torch.nan]), torch.ones(2), "1 values of uncertainty are not finite"),
        (torch.rand(2), torch.tensor([1.0, torch.nan]), "1 values of losses are not finite"),
        (torch.rand(2), torch.ones(3), "two tensors of one shape"),
        (torch.rand(2, 2), torch.ones(2, 2), r"two tensors of one shape \(N,\)"),
        (torch.rand(0), torch.ones(0), "at least one"),
        (torch.rand(2), -torch.ones(2), "a loss is negative"),
    ],
)
def test_bad_input_is_refused(
    uncertainty: torch.Tensor, losses: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        aurc(uncertainty, losses)


def test_nan_scores_have_no_ood_threshold() -> None:
    with pytest.raises(ValueError, match="got 1 of 2"):
        ood_threshold(torch.tensor([0.1, torch.nan]))
    with pytest.raises(ValueError, match="expected a share"):
        ood_threshold(torch.rand(3), 95)


def test_a_threshold_needs_a_tensor_of_scores() -> None:
    for wrong in (torch.zeros(0), [0.1, 0.2], torch.zeros(3).numpy()):
        with pytest.raises(ValueError, match=r"expected a tensor of OOD scores.*Fix: p.ood_score"):
            ood_threshold(wrong)


@pytest.mark.parametrize("count", [1, 7, 19, 20, 30])
def test_the_ood_threshold_is_the_highest_that_finds_the_share(count: int) -> None:
    scores = torch.randn(count)
    threshold = ood_threshold(scores, 0.95)
    assert (scores >= threshold).double().mean() >= 0.95
    assert (scores > threshold).double().mean() < 0.95
