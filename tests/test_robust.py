"""Ways in which a member, a bias or a gradient could silently go wrong, found by attacking the core."""

import copy
from typing import Any

import pytest
import torch
from networks import Mlp, ResNet, small
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import lpbnn
from lpbnn.convert.checks import widths
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior
from lpbnn.rank_one.factors import PointFactors
from lpbnn.rank_one.layer import RankOneLayer

# Training stays finite and members stay apart.


@pytest.mark.parametrize(
    "options",
    [{}, {"train_decoder": True}, {"train_decoder": True, "init_std": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("width", [3, 64, 640, 2048])
def test_the_penalties_are_as_well_conditioned_in_a_wide_layer(
    width: int, options: dict[str, Any]
) -> None:
    factors = LatentFactors(4, width, 2, **options)
    parameters = [p for p in factors.parameters() if p.requires_grad]
    vectors = [torch.randn_like(p) for p in parameters]
    norm = torch.tensor(0.0)
    for _ in range(20):  # power iteration: the largest curvature of the balanced penalties
        posterior = LatentPosterior([factors])
        kl, squared = posterior.kl(), posterior.squared_error(of_samples=True)
        gradients = torch.autograd.grad(
            (kl / 1000 + squared / width).sum(),
            parameters,
            create_graph=True,
            materialize_grads=True,
        )
        along = sum((g * v).sum() for g, v in zip(gradients, vectors, strict=True))
        curved = torch.autograd.grad(along, parameters, materialize_grads=True)
        norm = torch.stack([c.square().sum() for c in curved]).sum().sqrt()
        vectors = [c / norm for c in curved]
    assert norm < 5, norm  # SGD with momentum 0.9 is then stable at any rate in use


def test_members_stay_apart_in_training() -> None:
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    model = lpbnn.build(net, "lpbnn", num_data=60)
    x, y = torch.randn(60, 5), torch.randint(3, (60,))
    optimizer = torch.optim.Adam(model.parameter_groups(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        model.loss(x, y)["loss"].backward()
        optimizer.step()
    for layer, (mean, _) in zip(model.layers, model.posterior().mean(), strict=True):
        assert mean.std(0).mean() > 0.6 * layer.factors.r.std(0).mean()


# Layers that stay reachable unconverted.


class Aliases(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        if kind == "private list":
            self._order = [self.a]
        elif kind == "nested":
            self.order = {"first": [("a", self.a)]}
        elif kind == "attribute":
            object.__setattr__(self, "alias", self.a)
        else:
            self.function = self.a.forward


@pytest.mark.parametrize("kind", ["private list", "nested", "attribute", "bound method"])
def test_hidden_references_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="'a' is also kept in the plain attribute"):
        lpbnn.build(Aliases(kind), "batchensemble")


class LinearThenRelu(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class PaddedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


def test_a_subclass_may_do_anything_before_its_bias_and_nothing_after() -> None:
    with pytest.raises(ValueError, match="LinearThenRelu with a forward of its own.*exclude='0'"):
        lpbnn.build(nn.Sequential(LinearThenRelu(4, 3)), "batchensemble")
    net = nn.Sequential(PaddedConv(3, 4, 3))
    x = torch.randn(2, 3, 6, 6)
    expected, bias = net(x), net[0].bias.detach().clone()
    model = lpbnn.build(net, "batchensemble", init_std=0.0)
    torch.testing.assert_close(model(x)[1], expected)
    assert torch.equal(lpbnn.undo(model)[0].bias, bias)


def test_a_method_called_restore_is_the_users_own() -> None:
    class Restorable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def restore(self) -> None:
            raise AssertionError

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    net = nn.Sequential(Restorable())
    assert lpbnn.undo(lpbnn.build(net, "batchensemble")) is net
    assert isinstance(net[0].fc, nn.Linear)


def test_a_second_conversion_of_another_part_is_refused() -> None:
    net = small()
    lpbnn.build(net, "batchensemble", members=2, include="0")
    with pytest.raises(ValueError, match="'0' is converted already.*include="):
        lpbnn.build(net, "batchensemble", members=4, include="2")


def test_a_model_whose_network_was_undone_says_so() -> None:
    model = lpbnn.build(small(), "lpbnn", num_data=10)
    lpbnn.undo(model)
    with pytest.raises(RuntimeError, match="the network was converted back"):
        model(torch.randn(2, 5))


# Attention.


def test_masks_of_every_head_go_to_their_example() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1))

    net = Net().double()
    x, mask = torch.randn(3, 5, 8).double(), torch.randn(12, 5, 5).double()
    expected = net(x, mask)
    model = lpbnn.build(net, "batchensemble", members=4, init_std=0.0)
    for member in model(x, mask):
        torch.testing.assert_close(member, expected)


def test_tied_weights_survive_the_mean_network() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).mean(1))

    net = Tied()
    before = net.embed.weight.detach().clone()
    plain = lpbnn.mean_network(lpbnn.build(net, "batchensemble"))
    assert torch.equal(plain.embed.weight, before)


# Other layers, other inputs, other options.


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_freezing_after_a_pass_with_old_style_weight_norm() -> None:
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3)))
    model = lpbnn.build(net, "lpbnn", num_data=10)
    model.loss(torch.randn(4, 5), torch.randint(3, (4,)))["loss"].backward()
    frozen = lpbnn.freeze(model)
    assert torch.equal(frozen(torch.ones(2, 5)), frozen(torch.ones(2, 5)))


def test_a_layer_may_be_parametrised_after_the_build() -> None:
    model = lpbnn.build(small(), "batchensemble")
    prune.l1_unstructured(model.layers[0].layer, "weight", amount=0.5)
    parametrizations.spectral_norm(model.layers[1].layer)
    for _ in range(2):
        model.loss(torch.randn(4, 5), torch.randint(3, (4,)))["loss"].backward()


def test_hooks_see_what_the_layer_now_computes() -> None:
    net, seen = small(), []
    handle = net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model = lpbnn.build(net, "batchensemble", members=2)
    x = torch.randn(3, 5)
    model(x)
    torch.testing.assert_close(seen[-1], model.layers[0](torch.cat([x, x])))
    handle.remove()
    count = len(seen)
    model(x)
    assert len(seen) == count


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (nn.Linear(5, 1), torch.randn(4, 5)),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), torch.randn(4, 5)),
    ],
)
def test_one_logit_is_no_distribution(net: nn.Module, x: Tensor) -> None:
    with pytest.raises(ValueError, match="yes-or-no question has two classes"):
        lpbnn.predict(lpbnn.build(net, "mcp"), x)


def test_arguments_reach_the_network_as_they_were_given() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, context: Tensor | None, x: Tensor) -> Tensor:
            return self.fc(x if context is None else x + context)

    model = lpbnn.build(Net(), "batchensemble", init_std=0.0)
    x = torch.randn(4, 5)
    expected = model.net.fc.layer(x) + model.net.fc.member_bias[0]
    for answer in (model(None, x), model(context=None, x=x), model(torch.zeros(4, 5), x=x)):
        torch.testing.assert_close(answer[0], expected)
    batch: dict[str, Any] = {"context": torch.zeros(4, 5), "x": x}
    assert model.loss(batch, torch.zeros(4, dtype=torch.int64))["nll"].isfinite()


def test_ignored_labels_and_class_weights_with_a_batch_that_does_not_divide() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1)).double()
    options = {"class_weights": [1.0, 2.0, 0.5, 1.0], "ignore_index": 255, "task": "segmentation"}
    model = lpbnn.build(net, "batchensemble", members=2, init_std=0.0, **options)
    x, y = torch.randn(3, 3, 4, 4).double(), torch.randint(4, (3, 4, 4))
    y[0, :2] = 255
    weights = torch.tensor(options["class_weights"]).double()
    expected = nn.functional.cross_entropy(model.eval()(x)[0], y, weights, ignore_index=255)
    torch.testing.assert_close(model.train().loss(x, y)["nll"], expected)
    assert model.loss(x, torch.full_like(y, 255))["nll"] == 0


def test_a_factory_that_fails_leaves_the_network_as_it_was() -> None:
    net = ResNet()
    before = copy.deepcopy(net.state_dict())

    def factory(layer: nn.Module, path: str) -> nn.Module:
        if path == "head":
            raise OSError("no")
        return RankOneLayer(layer, PointFactors(2, *widths(layer)))

    with pytest.raises(OSError, match="no"):
        lpbnn.convert(net, factory)
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_freezing_a_deterministic_model_does_not_multiply_it() -> None:
    assert lpbnn.freeze(lpbnn.build(Mlp(), "batchensemble"), samples=3).members == 4
    with pytest.raises(ValueError, match="samples=0"):
        lpbnn.freeze(lpbnn.build(Mlp(), "lpbnn", num_data=5), samples=0)


def test_integers_of_any_library() -> None:
    numpy = pytest.importorskip("numpy")
    model = lpbnn.build(Mlp(), "lpbnn", num_data=numpy.int64(10), members=numpy.int32(2))
    assert len(lpbnn.predict(model, torch.randn(3, 5), samples=numpy.int64(2)).members) == 4
    with pytest.raises(ValueError, match="members=True"):
        lpbnn.build(Mlp(), "lpbnn", num_data=10, members=True)


def test_the_loss_as_a_forward_for_wrappers() -> None:
    model = lpbnn.build(Mlp(), "batchensemble")
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    assert torch.equal(lpbnn.LossStep(model)(x, y)["loss"], model.loss(x, y)["loss"])
