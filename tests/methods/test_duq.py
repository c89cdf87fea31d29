"""DUQ: kernels, centroids and the gradient penalty against their equations."""

import copy
import pickle
from typing import Any

import pytest
import torch
from networks import Mlp, ResNet, UsersOwn, Vit, settle
from torch import Tensor, nn
from torch.nn import functional as F

import lpbnn
from lpbnn import backbones, likelihoods
from lpbnn.methods.duq import DUQ, Config, input_penalty


def build(net: nn.Module, **options: Any) -> DUQ:
    model = lpbnn.build(net, "duq", **options)
    assert isinstance(model, DUQ)
    return model


def step(model: DUQ, x: Any, y: Tensor, lr: float = 0.05) -> Tensor:
    sgd = torch.optim.SGD(model.parameter_groups(), lr)
    loss = model.loss(x, y)["loss"]
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    model.after_step()
    return loss


def test_outputs_are_the_logarithms_of_the_kernels() -> None:
    model = build(Mlp(), sigma=0.3, embedding=4).double()
    x = torch.randn(5, 5, dtype=torch.float64)
    features = model.net(x)
    assert features.shape == (5, 6)
    for c in range(3):
        centroid = model.m[:, c] / model.N[c]
        for i in range(5):
            distance = (model.W[:, c] @ features[i] - centroid).square().mean()
            torch.testing.assert_close(model(x)[0, i, c].exp(), (-distance / (2 * 0.3**2)).exp())


def test_bce_equals_that_of_torch_on_the_kernels() -> None:
    model, x, y = build(Mlp(), sigma=1.0).double().eval(), torch.randn(9, 5), torch.randint(3, (9,))
    kernels = model(x.double())[0].exp()
    expected = F.binary_cross_entropy(kernels, F.one_hot(y, 3).double())
    torch.testing.assert_close(model.loss(x.double(), y)["bce"], expected)


@pytest.mark.parametrize(
    ("classes", "bce", "factor"),
    [(10, None, 1), (11, None, 11), (100, None, 100), (100, "mean", 1), (3, "sum", 3)],
)
def test_the_bce_is_a_sum_over_more_than_ten_classes_and_a_mean_over_fewer(
    classes: int, bce: str | None, factor: int
) -> None:
    """A class has 1 / C of the examples; with a mean on top a hundred classes learn nothing."""
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, classes))
    model = build(net, sigma=1.0, bce=bce).double().eval()
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randint(classes, (9,))
    kernels = model(x)[0].exp()
    mean = F.binary_cross_entropy(kernels, F.one_hot(y, classes).double())
    torch.testing.assert_close(model.loss(x, y)["bce"], factor * mean)


def test_bce_is_finite_on_a_centroid_and_far_from_all() -> None:
    model = build(Mlp())
    log_k = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, -1e9]], requires_grad=True)
    loss = model.bce(log_k, torch.tensor([1, 2]))
    loss.backward()
    assert loss.isfinite()
    assert log_k.grad.isfinite().all()


def test_class_weights_and_the_ignored_label_give_a_weighted_mean() -> None:
    weights, log_k, y = torch.tensor([1.0, 2.0, 0.5]), -torch.rand(8, 3), torch.randint(3, (8,))
    y[2] = -100
    each = torch.stack([build(Mlp()).bce(log_k[i : i + 1], y[i : i + 1]) for i in range(8)])
    valid = y != -100
    expected = (each * weights[y.clamp_min(0)])[valid].sum() / weights[y[valid]].sum()
    torch.testing.assert_close(build(Mlp(), class_weights=weights).bce(log_k, y), expected)


def test_example_weights_give_a_weighted_mean_and_weigh_the_centroids() -> None:
    model = build(Mlp(), sigma=1.0, gamma=0.5).double()
    without = copy.deepcopy(model)
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(model.loss(x, y, weight), without.loss(x[:3], y[:3]))
    model.after_step()
    without.after_step()
    torch.testing.assert_close(model.centroids, without.centroids)


def test_soft_labels_that_are_one_hot_equal_integer_labels() -> None:
    model = build(Mlp(), sigma=1.0, gamma=0.5).double()
    other = copy.deepcopy(model)
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(model.loss(x, F.one_hot(y, 3).double()), other.loss(x, y))
    model.after_step()
    other.after_step()
    torch.testing.assert_close(model.centroids, other.centroids)


def test_labels_that_are_no_classes_are_refused() -> None:
    model, x = build(Mlp()), torch.randn(4, 5)
    with pytest.raises(IndexError, match=r"labels are 0 to 2.*got \[-1, 7\]"):
        model.loss(x, torch.tensor([0, 7, -1, -100]))
    with pytest.raises(ValueError, match=r"needs integer labels of shape \(4,\)"):
        model.loss(x, torch.zeros(4))
    loss = model.loss(x, torch.tensor([0, 1, 2, 0], dtype=torch.int32))["bce"]
    torch.testing.assert_close(loss, model.loss(x, torch.tensor([0, 1, 2, 0]))["bce"])
    model.after_step()


@pytest.mark.parametrize("scale", [1e6, 1e15, 1e25])
@pytest.mark.parametrize("gradient_penalty", [0.0, 0.5])
def test_inputs_at_any_distance_have_finite_losses_gradients_and_predictions(
    scale: float, gradient_penalty: float
) -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    model, y = build(net, gradient_penalty=gradient_penalty), torch.tensor([0, 1, 2, 0])
    x = torch.randn(4, 5) * torch.tensor([[1.0], [scale], [1.0], [-scale]])
    model.loss(x, y)["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    prediction = lpbnn.predict(model, x)
    assert prediction.probs.isfinite().all()
    assert prediction.ood_score.isfinite().all()
    assert prediction.ood_score[1] == 1


def test_attention_trains_under_the_gradient_penalty() -> None:
    """Torch's fused attention has no second derivative."""
    model, x, y = build(Vit(), sigma=0.5).train(), torch.randn(4, 12, 4), torch.randint(3, (4,))
    first, *_, last = [step(model, x, y, lr=0.02) for _ in range(10)]
    assert last < first
    terms = model.loss(x, y)
    assert terms["gradient_penalty"] > 0
    terms["loss"].backward()
    attention = model.net.encoder.layers[0].self_attn
    assert attention.in_proj_weight.grad.any()


def test_the_penalty_of_attention_is_that_of_its_jacobian() -> None:
    model = build(Vit(), gradient_penalty=1.0, sigma=0.5).double().train()
    x, y = torch.randn(3, 12, 4, dtype=torch.float64), torch.randint(3, (3,))
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x)[0].exp().sum(1), x)
    norms = torch.stack([jacobian[i, i].norm() for i in range(3)])
    penalty = model.loss(x, y)["gradient_penalty"]
    torch.testing.assert_close(penalty, (norms - 1).square().mean())


def test_centroids_are_the_moving_average_of_the_stepped_network_in_evaluation_mode() -> None:
    model = build(settle(ResNet()), gamma=0.9, count=2.0).double().train()
    count, total = model.N.clone(), model.m.clone()
    for batch in (7, 3, 5):
        x, y = torch.randn(batch, 3, 8, 8, dtype=torch.float64), torch.randint(3, (batch,))
        step(model, x, y)
        features = copy.deepcopy(model).eval().net(x)
        for c in range(3):
            count[c] = 0.9 * count[c] + 0.1 * (y == c).sum()
            total[:, c] *= 0.9
            for i in range(batch):
                if y[i] == c:
                    total[:, c] += 0.1 * (model.W[:, c] @ features[i]).detach()
    torch.testing.assert_close(model.N, count)
    torch.testing.assert_close(model.centroids, total / count)


def test_a_class_without_examples_keeps_its_centroid() -> None:
    model = build(Mlp(), gamma=0.5)
    before = model.centroids.clone()
    step(model, torch.randn(4, 5), torch.tensor([0, 0, 1, -100]))
    torch.testing.assert_close(model.centroids[:, 2], before[:, 2])
    assert not torch.allclose(model.centroids[:, 0], before[:, 0])


def test_after_step_leaves_statistics_modes_and_the_batch_as_they_were() -> None:
    model = build(ResNet()).train()
    model.net.stage1.eval()  # a part frozen by its user
    x, y = torch.randn(6, 3, 8, 8), torch.randint(3, (6,))
    assert model.loss(x, y)["loss"].requires_grad
    assert not x.requires_grad
    statistics = copy.deepcopy(dict(model.net.named_buffers()))
    pickle.loads(pickle.dumps(copy.deepcopy(model)))  # while the batch is held
    model.after_step()
    torch.testing.assert_close(dict(model.net.named_buffers()), statistics)
    assert model.training
    assert not model.net.stage1.training
    assert model._batch is None
    centroids = model.centroids
    model.after_step()  # no new batch: nothing moves
    assert torch.equal(model.centroids, centroids)


def test_the_penalty_of_a_function_with_known_gradient() -> None:
    x = torch.randn(6, 2, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[2.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    assert input_penalty((x * weight).sum(), [x]).item() == pytest.approx((3 - 1) ** 2)
    norms = x.detach().flatten(1).norm(dim=1)
    torch.testing.assert_close(
        input_penalty(x.square().sum() / 2, [x]), (norms - 1).square().mean()
    )
    flat = input_penalty((x * 0).sum(), [x])
    assert flat.item() == 1.0


def test_the_penalty_is_by_all_inputs_of_an_example_together() -> None:
    x, z = torch.randn(3, 1, requires_grad=True), torch.randn(3, 1, requires_grad=True)
    assert input_penalty((3 * x + 4 * z).sum(), [x, z]).item() == pytest.approx(16)


def test_the_penalty_is_on_the_sum_of_kernels_and_trains_the_network() -> None:
    model = build(Mlp(), gradient_penalty=0.7, sigma=0.5).double()
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x)[0].exp().sum(1), x)
    norms = torch.stack([jacobian[i, i].norm() for i in range(4)])
    penalty = model.loss(x, y)["gradient_penalty"]
    torch.testing.assert_close(penalty, 0.7 * (norms - 1).square().mean())
    penalty.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "bias" not in name)


def test_the_penalty_is_zero_in_evaluation_mode_and_without_gradients() -> None:
    model, x, y = build(Mlp()), torch.randn(4, 5), torch.randint(3, (4,))
    assert model.loss(x, y)["gradient_penalty"] > 0
    assert model.eval().loss(x, y)["gradient_penalty"] == 0
    with torch.no_grad():
        assert model.train().loss(x, y)["gradient_penalty"] == 0
    assert build(Mlp(), gradient_penalty=0).loss(x, y)["gradient_penalty"] == 0


def test_probabilities_are_normalised_kernels_and_the_score_is_the_kernel() -> None:
    model, x = build(Mlp(), sigma=0.5).eval(), torch.randn(6, 5)
    kernels = model(x)[0].exp()
    torch.testing.assert_close(
        lpbnn.predict(model, x).probs, kernels / kernels.sum(1, keepdim=True)
    )
    torch.testing.assert_close(model.ood_score(model(x))[0], 1 - kernels.amax(1))
    torch.testing.assert_close(lpbnn.predict(model, x).ood_score, 1 - kernels.amax(1))
    model.net[4] = nn.Linear(6, 6)  # in place of the head: features that go far away
    model.net[4].weight.data *= 100
    far = lpbnn.predict(model, x)
    assert far.confidence.mean() > 0.9  # some centroid is always nearest
    assert (far.ood_score > 0.99).all()


def test_the_score_may_be_that_of_the_likelihood() -> None:
    model, x = build(Mlp(), score="entropy"), torch.randn(4, 5)
    assert model.ood_score(model(x)) is None
    prediction = lpbnn.predict(model, x)
    assert torch.equal(prediction.ood_score, prediction.total)


@pytest.mark.parametrize(
    ("net", "options", "head", "features"),
    [
        (Mlp, {}, "4", 6),
        (ResNet, {}, "head", 6),
        (UsersOwn, {}, "mix.2.0", 8),
        (lambda: backbones.build("small-cnn", 3, 1), {}, "head", 64),
        (Mlp, {"head": "4"}, "4", 6),
        (lambda: nn.Linear(5, 3), {}, "0", 5),
    ],
)
def test_the_head_is_found_and_the_rest_is_kept(
    net: Any, options: dict[str, Any], head: str, features: int
) -> None:
    network = net()
    weights = copy.deepcopy(network.state_dict())
    model = build(network, **options)
    assert isinstance(model.net.get_submodule(head), nn.Identity)
    assert tuple(model.W.shape) == (features, 3, features)
    kept = model.net.state_dict()
    torch.testing.assert_close(kept, {k: v for k, v in weights.items() if k in kept})


def test_the_centroids_follow_the_network_in_precision() -> None:
    model = build(Mlp().double())
    assert {t.dtype for t in (model.W, model.m, model.N)} == {torch.float64}


def test_parts_of_the_network_keep_their_own_precision() -> None:
    net = Mlp()
    net[0].double()
    model = build(net)
    assert (net[0].weight.dtype, net[2].weight.dtype) == (torch.float64, torch.float32)
    assert {t.dtype for t in (model.W, model.m, model.N)} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_moving_averages_move_in_half_precision(dtype: torch.dtype, when: str) -> None:
    torch.manual_seed(0)
    network = Mlp()
    model = build(network.to(dtype)) if when == "before" else build(network).to(dtype)
    assert (model.W.dtype, model.N.dtype, model.m.dtype) == (dtype, *2 * [torch.float32])
    model.to(torch.float16).to(dtype)  # however often it is cast
    x, y = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 0, 0, 0, 1, 1])
    before = model.m.clone()
    step(model, x, y)
    torch.testing.assert_close(
        model.N, torch.tensor([0.999 * 13 + 0.004, 0.999 * 13 + 0.002, 12.987])
    )
    assert (model.m != before).all()
    assert lpbnn.predict(model, x).probs.isfinite().all()


def test_a_batch_of_ignored_labels_changes_nothing() -> None:
    model, x, y = build(Mlp(), gradient_penalty=0), torch.randn(4, 5), torch.full((4,), -100)
    centroids = model.centroids
    loss = step(model, x, y)
    assert loss == 0
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(model.centroids, centroids)


def test_several_inputs_by_position_and_by_name() -> None:
    x, context, y = torch.randn(5, 5), torch.randn(5, 3), torch.randint(3, (5,))
    model = build(UsersOwn())
    step(model, (x, context), y)
    step(model, {"x": x, "context": context}, y)
    assert model(x, context).shape == (1, 5, 3)


def test_under_autocast_distances_keep_full_precision() -> None:
    model, x, y = build(Mlp()).train(), torch.randn(6, 5), torch.randint(3, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.loss(x, y)
    assert {term.dtype for term in terms.values()} == {torch.float32}
    torch.testing.assert_close(terms["bce"], model.loss(x, y)["bce"], rtol=0.1, atol=0)


def test_training_lowers_the_loss() -> None:
    model, x, y = build(Mlp()), torch.randn(16, 5), torch.randint(3, (16,))
    losses = [step(model, x, y, lr=0.02) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_compiled_loss_is_the_same_loss() -> None:
    model, x, y = build(Mlp()), torch.randn(4, 5), torch.randint(3, (4,))
    plain = model.loss(x, y)
    compiled = torch.compile(model.loss, backend="aot_eager")(x, y)
    torch.testing.assert_close(compiled, plain)
    compiled["loss"].backward()
    assert model.W.grad is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 4}, "members=4: expected 1, this method is one network; use 'ensemble'"),
        ({"sigma": 0}, "sigma=0: expected a number above 0"),
        ({"gamma": 1.0}, "gamma=1.0: expected a number with 0 <= gamma < 1"),
        ({"gradient_penalty": -0.5}, "gradient_penalty=-0.5: expected a number of at least 0"),
        ({"embedding": 0}, "embedding=0: expected an integer of at least 1"),
        ({"score": "max"}, "score='max': choose 'kernel' or 'entropy'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({"task": "regression"}, "regression"),
        ({"task": "segmentation"}, "segmentation"),
        ({"likelihood": {"a": likelihoods.Categorical()}}, "multihead"),
    ],
)
def test_other_likelihoods_are_refused_before_the_network_is_changed(
    options: dict[str, Any], task: str
) -> None:
    net = Mlp()
    with pytest.raises(ValueError, match=f"duq has no task='{task}'.* It has 'classification'"):
        build(net, **options)
    assert isinstance(net[4], nn.Linear)


def test_errors_about_the_head_say_what_to_do() -> None:
    with pytest.raises(
        ValueError, match="head='2.0' is no nn.Linear.* Linear layers found: 0, 2, 4"
    ):
        build(Mlp(), head="2.0")
    with pytest.raises(ValueError, match="Sequential has none. Fix: end the network with"):
        build(nn.Sequential(nn.Conv2d(3, 4, 1)))
    with pytest.raises(ValueError, match=r"head with 5 inputs.*shape \(2, 6\).*head='path of"):
        build(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 6)), head="0")(torch.randn(2, 5))
    tokens = build(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)))
    with pytest.raises(TypeError, match="none of them is of floating point.*gradient_penalty=0"):
        tokens.loss(torch.randint(5, (2, 2)), torch.tensor([0, 1]))


def test_a_class_that_is_ignored_does_not_move_its_centroid() -> None:
    model = lpbnn.build(Mlp(), "duq", ignore_index=2)
    before = model.centroids.clone()
    model.loss(torch.randn(6, 5), torch.tensor([0, 1, 2, 2, 0, 2]))
    model.after_step()
    assert torch.allclose(model.centroids[:, 2], before[:, 2])
    assert not torch.allclose(model.centroids[:, 0], before[:, 0])
