"""EDL: the loss against the Dirichlet it speaks of, and an uncertainty that probabilities do not hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import Mlp
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence

import lpbnn
from lpbnn.methods.edl import Config, Evidential, bayes_risk, kl_to_uniform


def identity(**options: object) -> Evidential:
    """A model whose inputs are its outputs."""
    return lpbnn.build(nn.Identity(), "edl", **options)


def test_risk_is_the_expected_squared_error_under_the_dirichlet() -> None:
    alpha = torch.tensor([[1.0, 1.0, 1.0], [0.5, 2.0, 7.0], [30.0, 1.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0, 0])
    p = Dirichlet(alpha).sample((200_000,))
    errors = (nn.functional.one_hot(labels, 3) - p).square().sum(-1)
    deviation = errors.std(0) / len(errors) ** 0.5
    assert ((bayes_risk(alpha, labels[:, None]) - errors.mean(0)).abs() < 4 * deviation).all()


def test_risk_is_the_integral_over_a_beta() -> None:
    a, b = 2.5, 0.8
    p = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    density = torch.distributions.Beta(a, b).log_prob(p).exp()
    integral = (density * 2 * (1 - p).square()).mean()
    risk = bayes_risk(torch.tensor([[a, b]], dtype=torch.float64), torch.tensor([[0]]))
    torch.testing.assert_close(risk[0], integral, rtol=1e-4, atol=0)


def test_risk_is_the_equation_written_out() -> None:
    alpha, labels = 1 + torch.rand(6, 4, dtype=torch.float64) * 5, torch.randint(4, (6,))
    y, strength = nn.functional.one_hot(labels, 4), alpha.sum(1, keepdim=True)
    p = alpha / strength
    written = ((y - p).square() + p * (1 - p) / (strength + 1)).sum(1)
    torch.testing.assert_close(bayes_risk(alpha, labels[:, None]), written)


def test_kl_is_that_of_torch() -> None:
    alpha = 1 + torch.rand(7, 5, dtype=torch.float64) * 20
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
    torch.testing.assert_close(kl_to_uniform(alpha), expected)


def test_evidence_for_the_right_class_costs_no_kl() -> None:
    model, x = identity(evidence="relu", full_kl=1), torch.tensor([[50.0, -1.0, -1.0]])
    assert model.loss(x, torch.tensor([0]))["kl"] == 0
    assert model.loss(x, torch.tensor([1]))["kl"] > 1


@pytest.mark.parametrize("classes", [2, 3, 10, 19, 100])
@pytest.mark.parametrize("right", [5, 9])
def test_the_default_kl_leaves_a_network_free_to_say_how_often_it_is_right(
    classes: int, right: int
) -> None:
    assert abs(best_confidence(classes, right) - right / 10) < 0.06


def test_the_kl_of_the_paper_makes_it_best_to_say_next_to_nothing() -> None:
    assert best_confidence(10, 5, full_kl=1) < 0.12
    assert best_confidence(10, 9, full_kl=1) < 0.4
    assert best_confidence(100, 9, full_kl=1) < 0.02


def best_confidence(classes: int, right: int, **options: object) -> float:
    """What to say of a class that is right so many times of ten, if the loss is to be least."""
    model, labels = identity(**options), (torch.arange(10) >= right).long()
    outputs = torch.full((400, classes), -torch.inf)
    outputs[:, 0] = torch.linspace(-7, 10, 400)  # evidence for one class alone
    losses = [model.loss(row.expand(10, -1), labels)["loss"] for row in outputs]
    best = outputs[int(torch.stack(losses).argmin())]
    return model.likelihood(best.view(1, 1, -1))[0].amax().item()


def test_the_default_learns_hard_classes_of_which_the_weight_of_the_paper_is_never_sure() -> None:
    accuracy, confidence, possible = trained()
    assert accuracy > 0.9 * possible
    assert abs(confidence - accuracy) < 0.1
    accuracy, confidence, _ = trained(full_kl=1)
    assert accuracy < 0.8 * possible
    assert confidence < 0.2


def trained(**options: object) -> tuple[float, float, float]:
    """Accuracy and confidence on ten overlapping classes, and the best accuracy that there is."""
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


def test_a_compiled_step_sees_the_weight_of_its_epoch() -> None:
    model, x, y = identity(), torch.randn(5, 3), torch.randint(3, (5,))
    full, step = model.loss(x, y)["kl"], torch.compile(model.loss, backend="aot_eager")
    for epoch in (0, 4, 10):
        model.before_epoch(epoch, epochs=30)
        torch.testing.assert_close(step(x, y)["kl"], epoch / 10 * full)


def test_the_full_weight_is_one_over_the_classes_squared_or_what_is_asked_for() -> None:
    x, y = torch.randn(5, 4), torch.randint(4, (5,))
    paper = identity(full_kl=1).loss(x, y)
    torch.testing.assert_close(identity().loss(x, y)["kl"], paper["kl"] / 16)
    torch.testing.assert_close(identity(full_kl=0.1).loss(x, y)["kl"], paper["kl"] / 10)
    assert identity(full_kl=0).loss(x, y)["kl"] == 0
    written = kl_to_uniform(identity().alpha(x).scatter(1, y[:, None], 1.0)).mean()
    torch.testing.assert_close(paper["kl"], written)


def test_the_kl_grows_over_ten_epochs_and_depends_on_the_epoch_alone() -> None:
    model, x, y = identity(), torch.randn(5, 3), torch.randint(3, (5,))
    full = model.loss(x, y)["kl"]  # a loop that knows nothing of epochs trains with all of it
    for epoch, share in ((12, 1.0), (3, 0.3), (0, 0.0), (10, 1.0)):
        model.before_epoch(epoch, epochs=50)
        torch.testing.assert_close(model.loss(x, y)["kl"], share * full)
    at_once = identity(anneal=0)
    at_once.before_epoch(0, 50)
    torch.testing.assert_close(at_once.loss(x, y)["kl"], full)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 0.5])])
def test_pixels_are_examples_and_void_ones_are_none(weights: Tensor | None) -> None:
    x, y = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randint(3, (2, 4, 5))
    y[0, :2] = 255
    pixels = identity(task="segmentation", ignore_index=255, class_weights=weights).loss(x, y)
    rows, labels = x.movedim(1, -1)[y != 255], y[y != 255]
    plain = identity(class_weights=weights).loss(rows, labels)
    torch.testing.assert_close(pixels, plain)


def test_class_weights_are_those_of_a_weighted_mean() -> None:
    weights, x, y = torch.tensor([1.0, 2.0, 0.5]), torch.randn(8, 3), torch.randint(3, (8,))
    each = torch.stack([identity().loss(x[i : i + 1], y[i : i + 1])["loss"] for i in range(8)])
    loss = identity(class_weights=weights).loss(x, y)["loss"]
    torch.testing.assert_close(loss, (each * weights[y]).sum() / weights[y].sum())


def test_probabilities_are_the_mean_of_the_dirichlet_and_do_not_hold_the_uncertainty() -> None:
    model = identity(evidence="relu").eval()
    x = torch.tensor([[-1.0, -2.0, -3.0], [0.0, 0.0, 3.0], [99.0, 99.0, 399.0]])
    probs = lpbnn.predict(model, x).probs
    torch.testing.assert_close(probs[0], torch.full((3,), 1 / 3))
    torch.testing.assert_close(probs[1:], torch.tensor([[1, 1, 4], [1, 1, 4]]) / 6)
    torch.testing.assert_close(model.strangeness(model(x))[0], torch.tensor([1, 3 / 6, 3 / 600]))


def test_vacuity_is_the_score_where_a_prediction_carries_it() -> None:
    own = torch.rand(4)
    model, x = lpbnn.build(Mlp(), "edl"), torch.randn(4, 5)
    assert model.score(SimpleNamespace(strangeness=own, confidence=None)) is own
    plain = lpbnn.build(Mlp(), "edl", score="confidence")
    assert plain.strangeness(plain(x)) is None
    prediction = lpbnn.predict(plain, x)
    assert torch.equal(plain.score(prediction), 1 - prediction.confidence)


@pytest.mark.parametrize(
    ("evidence", "dead"), [("relu", True), ("softplus", False), ("exp", False)]
)
def test_which_evidence_dies_where_all_outputs_are_negative(evidence: str, dead: bool) -> None:
    x = torch.full((2, 3), -4.0, requires_grad=True)
    identity(evidence=evidence).loss(x, torch.tensor([0, 1]))["loss"].backward()
    assert (x.grad == 0).all() == dead


@pytest.mark.parametrize("evidence", ["relu", "softplus", "exp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_outputs_in_half_precision_stay_finite(evidence: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1e4, -1e4, 30.0], [-1e4, 1e4, 0.0]], dtype=dtype, requires_grad=True)
    model = identity(evidence=evidence)
    loss = model.loss(x, torch.tensor([0, 0]))["loss"]
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert model.likelihood(model(x))[0].sum(2).sub(1).abs().max() < 1e-6


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
        ({"members": 4}, "members=4: edl is one network; use 'ensemble'"),
        ({"evidence": "tanh"}, "evidence='tanh' is not known; choose one of exp, softplus, relu"),
        ({"score": "entropy"}, "score='entropy' is not known; choose one of vacuity, confidence"),
        ({"anneal": -1}, "anneal=-1: expected a number of epochs of at least 0"),
        ({"full_kl": -0.1}, "full_kl=-0.1: expected a number of at least 0, or None"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_regression_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="task='regression'.*'classification' and 'segmentation'"):
        lpbnn.build(Mlp(), "edl", task="regression")


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs int64 labels of shape \(2,\); got torch.float32"):
        identity().loss(torch.randn(2, 3), torch.rand(2))


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
