"""ABNN: a member is the network with other scales in its norms; the loss weighs classes by member."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from networks import ConvNet, Mlp, ResNet, Vit, settle
from torch import Tensor, nn

import lpbnn
from lpbnn.methods.abnn import ABNN, NORMS, Affines

NETWORKS = {kind.__name__: kind for kind in (Mlp, ConvNet, ResNet, Vit)}


def build(net: nn.Module, **options: float) -> ABNN:
    model = lpbnn.build(net, "abnn", **options)
    assert isinstance(model, ABNN)
    return model


def member_network(net: nn.Module, affines: Affines, member: int) -> nn.Module:
    """The given network with a member's scales and shifts written into its norms, or its layers."""
    own = copy.deepcopy(net)
    norms = [m for m in own.modules() if isinstance(m, NORMS)]
    layers = norms or [m for m in own.modules() if "bias" in m._parameters]
    with torch.no_grad():
        for layer, scale, shift in zip(layers, affines.scales, affines.shifts, strict=True):
            if norms:
                layer.weight.copy_(scale[member])
            elif isinstance(layer, nn.ConvTranspose2d):
                for g in range(layer.groups):  # the rows of a group make that group's outputs
                    rows = layer.in_channels // layer.groups
                    out = layer.out_channels // layer.groups
                    part = scale[member][g * out : (g + 1) * out].view(1, -1, 1, 1)
                    layer.weight[g * rows : (g + 1) * rows].mul_(part)
            else:
                layer.weight.mul_(scale[member].view(-1, *(1,) * (layer.weight.dim() - 1)))
            if shift is not None:
                layer.bias.copy_(shift[member])
    return own


@pytest.mark.parametrize("name", NETWORKS)
def test_a_member_equals_the_network_with_its_scales(name: str) -> None:
    net = settle(NETWORKS[name]()).double()
    x = torch.randn(4, *net.shape, dtype=torch.float64)
    model = build(copy.deepcopy(net), members=3, std=0.3).eval()
    affines = model.sample(2)
    rows = model.run(affines, model.call((x,), {}, 6)).view(6, 4, 3)
    for member in range(6):
        torch.testing.assert_close(rows[member], member_network(net, affines, member)(x))
    assert model.execution == "batched"


@pytest.mark.parametrize("steps", [5, 3])  # 3: as many as there are outputs
def test_a_linear_layer_scales_the_outputs_of_every_step_of_a_sequence(steps: int) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.randn(2, steps, 4, dtype=torch.float64)
    model = build(copy.deepcopy(net), members=3, std=0.3).eval()
    affines = model.sample()
    rows = model.run(affines, model.call((x,), {}, 3)).view(3, 2, steps, 3)
    for member in range(3):
        torch.testing.assert_close(rows[member], member_network(net, affines, member)(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_without_noise_an_untrained_model_is_the_network_and_undo_returns_it(name: str) -> None:
    net = settle(NETWORKS[name]())
    x = torch.randn(4, *net.shape)
    state, expected = copy.deepcopy(net.state_dict()), net(x)
    model = build(net, std=0.0).eval()
    for member in model(x):
        torch.testing.assert_close(member, expected)
    restored = lpbnn.undo(model)
    assert all(torch.equal(value, state[key]) for key, value in restored.state_dict().items())


def test_draws_repeat_the_members_in_their_order() -> None:
    model = build(Mlp(), members=3, std=0.0)
    with torch.no_grad():
        for parameter in model.fast_parameters():
            parameter.normal_()
    drawn = model.sample(2)
    for norm, scale, shift in zip(model.layers, drawn.scales, drawn.shifts, strict=True):
        for copies, own in ((scale, norm.member_scale), (shift, norm.member_shift)):
            assert torch.equal(copies, torch.cat([own, own]))


@pytest.mark.parametrize("name", NETWORKS)
def test_undo_merges_what_was_learned(name: str) -> None:
    net = settle(NETWORKS[name]()).double()
    x = torch.randn(4, *net.shape, dtype=torch.float64)
    model = build(net, members=1, std=0.0).eval()
    with torch.no_grad():
        for norm in model.layers:
            norm.member_scale.uniform_(0.5, 1.5)
    expected = model(x)[0]
    torch.testing.assert_close(lpbnn.undo(model)(x), expected)


def test_undo_merges_scales_into_a_transposed_convolution_of_several_groups() -> None:
    net = nn.ConvTranspose2d(4, 6, 3, groups=2).double()
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    model = build(nn.Sequential(net), members=1, std=0.0).eval()
    with torch.no_grad():
        model.layers[0].member_scale.uniform_(0.5, 1.5)
    expected = model(x)[0]
    torch.testing.assert_close(lpbnn.undo(model)(x), expected)


def test_the_noise_has_its_standard_deviation_and_scale() -> None:
    model = build(nn.Sequential(nn.Linear(4, 50), nn.LayerNorm(50), nn.Linear(50, 3)), std=0.2)
    with torch.no_grad():
        model.layers[0].member_scale.fill_(3.0)
    for scale in (1.0, 0.5, 0.0):
        model.set_noise_scale(scale)
        drawn = model.sample(200).scales[0]
        assert drawn.mean().item() == pytest.approx(3, abs=0.02)
        assert drawn.std().item() == pytest.approx(3 * 0.2 * scale, rel=0.03)


def weighted(model: ABNN, outputs: Tensor, y: Tensor, ignored: int = -100) -> Tensor:
    """The NLL with each member's class weights, by torch's cross-entropy on one member at a time."""
    total, count = 0.0, 0.0
    classes = torch.arange(outputs.shape[2])
    for j in range(model.members):
        labels = classes.repeat(model.members)
        eta = model.emphasis(labels, len(classes)).view(model.members, -1)[j]
        total += F.cross_entropy(outputs[j], y, eta, reduction="sum", ignore_index=ignored)
        count += eta[y[y != ignored]].sum()
    return total / count


def test_each_member_emphasises_classes_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 10))
    model = build(net, std=0.0, class_weight=3.0, batch_mode="repeat").train()
    x, y = torch.randn(8, 5), torch.arange(8)
    every = torch.arange(10).repeat(4)
    eta = model.emphasis(every, 10).view(4, 10)
    assert (eta == 3).sum(1).tolist() == [3] * 4  # floor(sqrt(10))
    assert len({tuple(row.tolist()) for row in eta}) > 1
    torch.testing.assert_close(model.loss(x, y)["loss"], weighted(model, model(x), y))
    plain = F.cross_entropy(model(x).flatten(0, 1), y.repeat(4))
    torch.testing.assert_close(model.eval().loss(x, y)["loss"], plain)  # none in evaluation


def test_a_weight_counts_as_repetition_beside_the_emphasis() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 10))
    model = build(net, std=0.0, class_weight=3.0, batch_mode="repeat").train()
    x, y, times = torch.randn(4, 5), torch.arange(4), torch.tensor([1, 2, 0, 3])
    rows = torch.arange(4).repeat_interleave(times)
    expected = model.loss(x[rows], y[rows])["loss"]
    torch.testing.assert_close(model.loss(x, y, times.float())["loss"], expected)


def test_an_uneven_split_counts_every_example_once() -> None:
    """Five examples for four members: three are seen twice."""
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 10))
    model = build(net, std=0.0, class_weight=1.0).train()
    x, y = torch.randn(5, 5), torch.arange(5)
    torch.testing.assert_close(model.loss(x, y)["loss"], F.cross_entropy(model(x)[0], y))


def test_pixels_are_emphasised_and_void_ones_are_not() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1))
    options = {"task": "segmentation", "ignore_index": 255, "batch_mode": "repeat", "std": 0.0}
    model = build(net, **options).train()
    x, y = torch.randn(2, 3, 4, 4), torch.randint(5, (2, 4, 4))
    y[0, :2] = 255
    expected = weighted(model, model(x), y, 255)
    torch.testing.assert_close(model.loss(x, y)["loss"], expected)


def test_members_go_apart_in_training() -> None:
    model = build(ResNet(), std=0.0, class_weight=4.0).train()
    x, y = torch.randn(24, 3, 8, 8), torch.arange(24) % 3
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(x, y)["loss"].backward()
        optimizer.step()
    outputs = model.eval()(x)
    assert all((outputs[0] - other).abs().max() > 1e-3 for other in outputs[1:])


def test_what_cannot_be_built_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    build(net)
    with pytest.raises(
        ValueError, match=r"converted already \(NoisyScale\). Call lpbnn.undo first"
    ):
        build(net)
    for options in ({"std": -1.0}, {"class_weight": 0.0}, {"batch_mode": "slice"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            build(nn.Sequential(nn.Linear(4, 3)), **options)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="computes its weight itself"):
        build(nn.Sequential(normed))


class NormsInAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.order = [self.fc, self.norm, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


def test_a_norm_that_cannot_be_replaced_everywhere_is_refused_by_name() -> None:
    net = NormsInAList()
    with pytest.raises(ValueError, match="'norm' is also kept in the plain attribute 'order'"):
        build(net)
    assert type(net.norm) is nn.LayerNorm


def test_classes_beyond_those_that_are_ordered_are_not_emphasised() -> None:
    model = build(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    most = model.class_order.shape[1]
    labels = torch.arange(most + 10).repeat(model.members)
    eta = model.emphasis(labels, most + 10).view(model.members, -1)
    assert (eta[:, most:] == 1).all()
    assert ((eta > 1).sum(1) == math.isqrt(most + 10)).all()


def test_the_weight_and_bias_of_a_norm_say_whether_they_learn() -> None:
    for learns in (True, False):
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).requires_grad_(learns))
        norm = build(net).net[1]
        assert norm.weight.requires_grad == norm.bias.requires_grad == learns
