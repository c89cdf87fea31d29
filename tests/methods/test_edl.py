"""EDL: the loss against its Dirichlet, and the vacuity as OOD score."""

from typing import Any

import pytest
import torch
from networks import Mlp
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence

import lpbnn
from lpbnn import likelihoods
from lpbnn.methods.edl import EDL, Config, bayes_risk, kl_to_uniform

RISKS = ("squared", "digamma", "log_marginal")


def identity(**options: Any) -> EDL:
    """Return a model whose network returns its inputs."""
    return lpbnn.build(nn.Identity(), "edl", **options)


ALPHA = torch.tensor([[1.0, 1.0, 1.0], [0.5, 2.0, 7.0], [30.0, 1.0, 2.0]], dtype=torch.float64)
LABELS = torch.tensor([2, 0, 0])


def sampled_risk(p: Tensor, y: Tensor, risk: str) -> Tensor:
    """Return what the expectation of is the risk, for samples p of probabilities."""
    return {
        "squared": lambda: (y - p).square().sum(-1),
        "digamma": lambda: -(y * p.log()).sum(-1),
        "log_marginal": lambda: (y * p).sum(-1),
    }[risk]()


@pytest.mark.parametrize("risk", RISKS)
def test_risk_is_the_expectation_under_the_dirichlet(risk: Any) -> None:
    samples = Dirichlet(ALPHA).sample((200_000,))
    values = sampled_risk(samples, nn.functional.one_hot(LABELS, 3), risk)
    deviation = values.std(0) / len(values) ** 0.5
    found = bayes_risk(ALPHA, LABELS[:, None], risk)
    found = (-found).exp() if risk == "log_marginal" else found  # -log of an expectation
    assert ((found - values.mean(0)).abs() < 4 * deviation).all()


@pytest.mark.parametrize("risk", ["squared", "digamma"])
def test_the_risk_of_soft_labels_is_an_expectation_too(risk: Any) -> None:
    samples = Dirichlet(ALPHA).sample((200_000,))
    labels = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8]], dtype=torch.float64)
    values = sampled_risk(samples, labels, risk)
    deviation = values.std(0) / len(values) ** 0.5
    assert ((bayes_risk(ALPHA, labels, risk) - values.mean(0)).abs() < 4 * deviation).all()


@pytest.mark.parametrize("risk", RISKS)
def test_risk_is_the_integral_over_a_beta(risk: Any) -> None:
    a, b = 2.5, 0.8
    p = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    density = torch.distributions.Beta(a, b).log_prob(p).exp()
    both = torch.stack([p, 1 - p], 1)
    values = sampled_risk(both, torch.tensor([1, 0]), risk)
    integral = (density * values).sum() / density.sum()
    found = bayes_risk(torch.tensor([[a, b]], dtype=torch.float64), torch.tensor([[0]]), risk)
    found = (-found).exp() if risk == "log_marginal" else found
    torch.testing.assert_close(found[0], integral, rtol=1e-3, atol=0)


@pytest.mark.parametrize("risk", RISKS)
def test_integer_labels_equal_their_one_hot_vectors(risk: Any) -> None:
    model = identity(risk=risk, class_weights=[1.0, 2.0, 0.5])
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    one_hot = nn.functional.one_hot(y, 3).double()
    torch.testing.assert_close(model.loss(x, one_hot), model.loss(x, y))


@pytest.mark.parametrize("risk", RISKS)
def test_the_gradient_with_100_classes_is_that_of_finite_differences(risk: Any) -> None:
    model, y = identity(risk=risk), torch.randint(100, (2,))
    x = torch.randn(2, 100, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model.loss(x, y)["loss"], x)


def test_with_100_classes_the_squared_risk_has_almost_no_gradient_and_the_others_have_one() -> None:
    def gradient(risk: str) -> float:
        x = torch.zeros(1, 100, requires_grad=True)
        identity(risk=risk).loss(x, torch.tensor([0]))["risk"].backward()
        return x.grad[0, 0].abs().item()

    assert gradient("squared") < 0.02
    assert gradient("digamma") > 0.4
    assert gradient("log_marginal") > 0.4


def test_squared_risk_is_the_equation_written_out() -> None:
    alpha, labels = 1 + torch.rand(6, 4, dtype=torch.float64) * 5, torch.randint(4, (6,))
    y, strength = nn.functional.one_hot(labels, 4), alpha.sum(1, keepdim=True)
    p = alpha / strength
    written = ((y - p).square() + p * (1 - p) / (strength + 1)).sum(1)
    torch.testing.assert_close(bayes_risk(alpha, labels[:, None]), written)


def test_kl_equals_that_of_torch_distributions() -> None:
    alpha = 1 + torch.rand(7, 5, dtype=torch.float64) * 20
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
    torch.testing.assert_close(kl_to_uniform(alpha), expected)


def test_evidence_for_the_right_class_costs_no_kl() -> None:
    model, x = identity(full_kl=1), torch.tensor([[50.0, -50.0, -50.0]])
    assert model.loss(x, torch.tensor([0]))["kl"] < 1e-6
    assert model.loss(x, torch.tensor([1]))["kl"] > 1


@pytest.mark.parametrize("classes", [2, 3, 10, 19, 100])
@pytest.mark.parametrize("right", [5, 9])
@pytest.mark.parametrize("risk", RISKS)
def test_the_best_confidence_under_the_default_kl_is_the_accuracy(
    classes: int, right: int, risk: str
) -> None:
    assert abs(best_confidence(classes, right, risk=risk) - right / 10) < 0.07


def test_the_best_confidence_under_the_kl_of_the_paper_is_far_below_the_accuracy() -> None:
    assert best_confidence(10, 5, full_kl=1) < 0.12
    assert best_confidence(10, 9, full_kl=1) < 0.4
    assert best_confidence(100, 9, full_kl=1) < 0.02


def best_confidence(classes: int, right: int, **options: object) -> float:
    """Return the confidence with the least loss in a class that is right so many times of ten."""
    model, labels = identity(**options), (torch.arange(10) >= right).long()
    outputs = torch.full((400, classes), -1e4)  # its evidence is 0 in float32
    outputs[:, 0] = torch.linspace(-7, 10, 400)  # evidence for one class alone
    losses = [model.loss(row.expand(10, -1), labels)["loss"] for row in outputs]
    best = outputs[int(torch.stack(losses).argmin())]
    return lpbnn.predict(model, best.unsqueeze(0)).confidence.item()


def test_the_default_kl_learns_overlapping_classes_and_that_of_the_paper_does_not() -> None:
    accuracy, confidence, possible = trained()
    assert accuracy > 0.9 * possible
    assert abs(confidence - accuracy) < 0.1
    accuracy, confidence, _ = trained(full_kl=1)
    assert accuracy < 0.8 * possible
    assert confidence < 0.2


def trained(**options: object) -> tuple[float, float, float]:
    """Return accuracy and confidence on ten overlapping classes, and the best possible accuracy."""
    centres = torch.randn(10, 8, generator=torch.Generator().manual_seed(3))

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (n,))
        return centres[y] + 1.5 * torch.randn(n, 8), y

    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10))
    model = lpbnn.build(net, "edl", **options)
    sgd = torch.optim.SGD(model.parameter_groups(), lr=0.1, momentum=0.9)
    for step in range(240):
        model.before_epoch(step // 8, epochs=30)
        sgd.zero_grad()
        model.loss(*draw(128))["loss"].backward()
        sgd.step()
    x, y = draw(4000)
    confidence, predicted = lpbnn.predict(model.eval(), x).probs.max(1)
    nearest = torch.cdist(x, centres).argmin(1)
    means = [(predicted == y).float().mean(), confidence.mean(), (nearest == y).float().mean()]
    accuracy, confident, possible = torch.stack(means).tolist()
    return accuracy, confident, possible


def test_a_compiled_step_uses_the_kl_weight_of_its_epoch() -> None:
    model, x, y = identity(), torch.randn(5, 3), torch.randint(3, (5,))
    full, step = model.loss(x, y)["kl"], torch.compile(model.loss, backend="aot_eager")
    for epoch in (0, 4, 10):
        model.before_epoch(epoch, epochs=30)
        torch.testing.assert_close(step(x, y)["kl"], epoch / 10 * full)


def test_the_full_kl_weight_is_one_over_the_classes_squared_by_default() -> None:
    x, y = torch.randn(5, 4), torch.randint(4, (5,))
    paper = identity(full_kl=1).loss(x, y)
    torch.testing.assert_close(identity().loss(x, y)["kl"], paper["kl"] / 16)
    torch.testing.assert_close(identity(full_kl=0.1).loss(x, y)["kl"], paper["kl"] / 10)
    assert identity(full_kl=0).loss(x, y)["kl"] == 0
    written = kl_to_uniform(identity().alpha(x).scatter(1, y[:, None], 1.0)).mean()
    torch.testing.assert_close(paper["kl"], written)


def test_the_kl_weight_grows_over_ten_epochs_and_depends_on_the_epoch_alone() -> None:
    model, x, y = identity(), torch.randn(5, 3), torch.randint(3, (5,))
    full = model.loss(x, y)["kl"]  # without before_epoch
    for epoch, share in ((12, 1.0), (3, 0.3), (0, 0.0), (10, 1.0)):
        model.before_epoch(epoch, epochs=50)
        torch.testing.assert_close(model.loss(x, y)["kl"], share * full)
    at_once = identity(anneal=0)
    at_once.before_epoch(0, 50)
    torch.testing.assert_close(at_once.loss(x, y)["kl"], full)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 0.5])])
def test_pixels_count_as_examples_and_ignored_ones_do_not_count(weights: Tensor | None) -> None:
    x, y = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randint(3, (2, 4, 5))
    y[0, :2] = 255
    pixels = identity(task="segmentation", ignore_index=255, class_weights=weights).loss(x, y)
    rows, labels = x.movedim(1, -1)[y != 255], y[y != 255]
    plain = identity(class_weights=weights).loss(rows, labels)
    torch.testing.assert_close(pixels, plain)


def test_class_weights_give_a_weighted_mean() -> None:
    weights, x, y = torch.tensor([1.0, 2.0, 0.5]), torch.randn(8, 3), torch.randint(3, (8,))
    each = torch.stack([identity().loss(x[i : i + 1], y[i : i + 1])["loss"] for i in range(8)])
    loss = identity(class_weights=weights).loss(x, y)["loss"]
    torch.testing.assert_close(loss, (each * weights[y]).sum() / weights[y].sum())


def test_example_weights_give_a_weighted_mean() -> None:
    weight, x, y = torch.tensor([1.0, 0.0, 3.0]), torch.randn(3, 4), torch.randint(4, (3,))
    each = torch.stack([identity().loss(x[i : i + 1], y[i : i + 1])["loss"] for i in range(3)])
    loss = identity().loss(x, y, weight)["loss"]
    torch.testing.assert_close(loss, (each * weight).sum() / weight.sum())


def test_tokens_with_classes_last_are_those_with_classes_second() -> None:
    x, y = torch.randn(2, 3, 5), torch.randint(3, (2, 5))
    second = identity(task="segmentation")
    last = identity(likelihood=likelihoods.Categorical(dim=-1))
    torch.testing.assert_close(last.loss(x.movedim(1, -1), y), second.loss(x, y))
    expected, found = lpbnn.predict(second, x), lpbnn.predict(last, x.movedim(1, -1))
    torch.testing.assert_close(found.probs.movedim(-1, 1), expected.probs)
    torch.testing.assert_close(found.ood_score, expected.ood_score)


def test_probabilities_are_the_mean_of_the_dirichlet_and_the_score_is_its_vacuity() -> None:
    model = identity().eval()
    x = torch.tensor([[1.0, 1.0, 4.0], [99.0, 99.0, 399.0]]).log()
    prediction = lpbnn.predict(model, x)
    torch.testing.assert_close(prediction.probs[0], torch.tensor([2, 2, 5]) / 9)
    torch.testing.assert_close(prediction.probs[1], torch.tensor([1, 1, 4]) / 6)
    vacuity = torch.tensor([3 / 9, 3 / 600])
    torch.testing.assert_close(model.ood_score(model(x))[0], vacuity)
    torch.testing.assert_close(prediction.ood_score, vacuity)


def test_the_score_may_be_that_of_the_likelihood() -> None:
    model, x = lpbnn.build(Mlp(), "edl", score="entropy"), torch.randn(4, 5)
    assert model.ood_score(model(x)) is None
    prediction = lpbnn.predict(model, x)
    assert torch.equal(prediction.ood_score, prediction.total)


@pytest.mark.parametrize("risk", RISKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_outputs_in_half_precision_stay_finite(risk: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1e4, -1e4, 30.0], [-1e4, 1e4, 0.0]], dtype=dtype, requires_grad=True)
    model = identity(risk=risk)
    loss = model.loss(x, torch.tensor([0, 0]))["loss"]
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert lpbnn.predict(model, x).probs.sum(1).sub(1).abs().max() < 1e-6


def test_training_lowers_the_loss() -> None:
    model, x, y = lpbnn.build(Mlp(), "edl"), torch.randn(16, 5), torch.randint(3, (16,))
    sgd, losses = torch.optim.SGD(model.parameter_groups(), lr=0.2), []
    for _ in range(90):
        sgd.zero_grad()
        losses.append(model.loss(x, y)["loss"])
        losses[-1].backward()
        sgd.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 4}, "members=4: expected 1, this method is one network; use 'ensemble'"),
        ({"risk": "log"}, "risk='log': choose 'squared', 'digamma' or 'log_marginal'"),
        ({"score": "max"}, "score='max': choose 'vacuity' or 'entropy'"),
        ({"anneal": -1}, "anneal=-1: expected a number of at least 0"),
        ({"full_kl": -0.1}, "full_kl=-0.1: expected a number of at least 0, or None"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"task": "regression"}, "task='regression' (likelihood Gaussian)"),
        ({"task": "multilabel"}, "task='multilabel' (likelihood MultiLabel)"),
        (
            {"likelihood": {"a": likelihoods.Categorical()}},
            "task='multihead' (likelihood MultiHead)",
        ),
    ],
)
def test_other_likelihoods_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="'classification' and 'segmentation'") as error:
        lpbnn.build(Mlp(), "edl", **options)
    assert f"edl has no {name}" in str(error.value)


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs integer labels of shape \(2,\)"):
        identity().loss(torch.randn(2, 3), torch.rand(2))


def test_labels_that_are_no_classes_are_refused() -> None:
    with pytest.raises(IndexError, match=r"labels are 0 to 2.*got \[-1, 7\]"):
        identity().loss(torch.randn(4, 3), torch.tensor([0, 7, -1, -100]))


def test_labels_of_any_integer_type_are_accepted() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    for dtype in (torch.int32, torch.uint8):
        torch.testing.assert_close(identity().loss(x, y.to(dtype)), identity().loss(x, y))


@pytest.mark.parametrize(
    ("net", "task", "shape"),
    [
        (nn.Linear(5, 1), "classification", (4, 5)),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), "classification", (4, 5)),
        (nn.Conv2d(3, 1, 1), "segmentation", (2, 3, 4, 4)),
    ],
)
def test_evidence_for_one_class_is_refused_in_prediction_and_loss(
    net: nn.Module, task: Any, shape: tuple[int, ...]
) -> None:
    model, x = lpbnn.build(net, "edl", task=task), torch.randn(shape)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    for refused in (lambda: lpbnn.predict(model, x), lambda: model.loss(x, y)):
        with pytest.raises(ValueError, match=r"yes-or-no question has two classes: give the last"):
            refused()
