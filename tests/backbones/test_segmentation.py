"""Every method on DeepLabv3+: answers for each pixel, and an encoder that runs once per picture."""

import copy
from typing import Any

import pytest
import torch
from networks import restate_weight, settle
from torch import Tensor, nn
from torch.nn import functional as F

import lpbnn
from lpbnn import backbones, methods
from lpbnn.backbones._decoder import StandardisedConv2d
from lpbnn.backbones.deeplab import DeepLab
from lpbnn.members.rows import gather
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.rank_one.factors import PointFactors, SampledFactors
from lpbnn.rank_one.layer import RankOneLayer, sample_layers

METHODS = [name for name in methods.names() if name != "duq"]
RANK_ONE = ["batchensemble", "rank1", "lpbnn"]
GROUPS: dict[str, Any] = {"norm": "group", "standardise": True}
CLASSES, VOID = 3, 255
SIZE = (33, 40)


def network(**options: Any) -> DeepLab:
    small: dict[str, Any] = {"width": 4, "channels": 16, **options}
    net = backbones.build("deeplab-resnet18", CLASSES, **small)
    assert isinstance(net, DeepLab)
    return net


def build(method: str, net: DeepLab | None = None, **options: Any) -> lpbnn.UncertainModel:
    if method in RANK_ONE:
        options.setdefault("include", "decoder.*")
    kind: dict[str, Any] = {"task": "segmentation", "ignore_index": VOID, "num_data": 100}
    return lpbnn.build(net or network(), method, **kind, **options)


def rank_one(method: str, net: DeepLab | None = None, **options: Any) -> RankOneEnsemble:
    model = build(method, net, **options)
    assert isinstance(model, RankOneEnsemble)
    return model


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    """Pictures whose class can be seen: vertical bands, each bright in one colour; some void."""
    y = torch.randint(0, CLASSES, (size, 1, 4)).repeat_interleave(10, 2).expand(-1, SIZE[0], -1)
    x = 0.3 * torch.randn(size, 3, *SIZE) + 2 * F.one_hot(y, CLASSES).permute(0, 3, 1, 2)
    return x, y.clone().index_fill(1, torch.arange(5), VOID)


def fit(model: lpbnn.UncertainModel, steps: int, lr: float = 0.05) -> list[float]:
    model.train()
    groups = model.parameter_groups(weight_decay=1e-4, lr=lr)
    optimizer, losses = torch.optim.SGD(groups, lr=lr, momentum=0.9), []
    model.before_epoch(0, 1)
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        loss = model.loss(x, y)["loss"]
        loss.backward()
        optimizer.step()
        model.after_step(lr=lr)
        losses.append(loss.item())
    model.after_fit([batch()])
    model.eval()
    return losses


@pytest.mark.parametrize("variant", [{}, GROUPS])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_for_every_pixel(method: str, variant: dict[str, Any]) -> None:
    model = build(method, network(**variant))
    fit(model, 1)
    x, y = batch(2)
    p = lpbnn.predict(model, x, samples=2, seed=0)
    assert p.probs.shape == (2, CLASSES, *SIZE)
    assert p.members is not None
    count = model.members * (2 if model.stochastic else 1)
    assert p.members.shape == (count, 2, CLASSES, *SIZE)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(2, *SIZE))
    assert p.ood_score.shape == p.labels.shape == p.epistemic.shape == (2, *SIZE)
    assert model(x).shape == (model.members, 2, CLASSES, *SIZE)
    whole = lpbnn.predict(model, x, samples=2, seed=0, chunk=3)
    torch.testing.assert_close(whole.probs, p.probs, atol=1e-5, rtol=1e-4)
    model.train().loss(x, y)["loss"].backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


@pytest.mark.parametrize("method", METHODS)
def test_void_pixels_say_nothing(method: str) -> None:
    model, (x, y) = build(method).eval(), batch()
    losses = []
    for label in (VOID, 0):  # the same picture: void left out, and void taken for a class
        torch.manual_seed(0)
        given = torch.where(y == VOID, label, y)
        losses.append(model.loss(x, given)["loss"])
    assert not torch.equal(*losses)
    if method == "mcp":
        expected = F.cross_entropy(model(x)[0][:, :, 5:], y[:, 5:])
        torch.testing.assert_close(losses[0], expected)
        assert model.loss(x[:1], torch.full_like(y[:1], VOID))["loss"] == 0


def test_duq_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="duq has no task='segmentation'"):
        build("duq")


@pytest.mark.parametrize("variant", [{}, {"separable": True}, GROUPS])
@pytest.mark.parametrize("method", RANK_ONE)
def test_the_decoder_is_converted_whole_and_the_encoder_not_at_all(
    method: str, variant: dict[str, Any]
) -> None:
    net = network(**variant)
    expected = {path for path, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    encoder = copy.deepcopy(net.encoder)
    model = rank_one(method, net)
    assert {layer.path for layer in model.layers} == {
        path for path in expected if path.startswith("decoder.")
    }
    assert model.expand_at == ["decoder.aspp", "decoder.refine"]
    assert str(net.encoder) == str(encoder)


def calls(net: DeepLab) -> list[int]:
    """The pictures that went through the encoder, call by call."""
    seen: list[int] = []
    net.encoder.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize("variant", [{}, {"separable": True}, GROUPS])
@pytest.mark.parametrize("method", RANK_ONE)
def test_the_encoder_runs_once_and_the_answer_is_that_of_repeating_everything(
    method: str, variant: dict[str, Any]
) -> None:
    net = network(**variant).double()
    settle(net)
    everything = rank_one(method, copy.deepcopy(net), members=3, expand_at="").double().eval()
    once = rank_one(method, net, members=3).double().eval()
    once.load_state_dict({**everything.state_dict(), "_extra_state": once.get_extra_state()})
    x = batch(2)[0].double()
    for model in (once, everything):
        lpbnn.check(model, x)  # it runs the encoder a few times
    seen, repeated = calls(net), calls(everything.net)  # type: ignore[arg-type]
    with torch.no_grad():
        sampled = once.sample()
        actual = gather(once.run_rows(sampled, once.call((x,), {})), 3)
        expected = gather(everything.run_rows(sampled, everything.call((x,), {})), 3)
    assert seen == [2]
    assert repeated == [6]
    assert torch.equal(actual, expected)
    p = lpbnn.predict(once, x, seed=0)
    q = lpbnn.predict(everything, x, seed=0)
    assert seen == [2, 2]
    assert repeated == [6, 6]
    torch.testing.assert_close(p.probs, q.probs, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(p.epistemic, q.epistemic, atol=1e-12, rtol=1e-9)
    assert p.members is not None
    assert (p.members[0] - p.members[1]).abs().max() > 1e-3  # and members do differ


@pytest.mark.parametrize("variant", [{}, GROUPS])
def test_training_by_slices_sees_each_picture_once(variant: dict[str, Any]) -> None:
    """Batch 4, four members: slices of one. The loss is that of four ordinary networks."""
    net = settle(network(**variant).double())
    assert isinstance(net, DeepLab)
    model = rank_one("batchensemble", net, members=4).double()
    x, y = batch()
    lpbnn.check(model, x.double())
    seen = calls(net)
    model.train()
    for module in model.modules():  # statistics fixed: rows then do not depend on each other
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    loss = model.loss(x.double(), y)["nll"]
    assert seen == [4]
    sampled = model.sample()
    outputs = torch.cat([ordinary(model, sampled, j)(x[j : j + 1].double()) for j in range(4)])
    torch.testing.assert_close(loss, F.cross_entropy(outputs, y, ignore_index=VOID))


def ordinary(model: RankOneEnsemble, sampled: SampledFactors, member: int) -> nn.Module:
    """The plain network of a member: convolutions with W^ * (s r^T), standardised or not."""
    net = copy.deepcopy(model.net)
    layers = [(path, m) for path, m in net.named_modules() if isinstance(m, RankOneLayer)]
    for (path, wrapper), factors in zip(layers, sampled.layers, strict=True):
        layer: Any = wrapper.layer
        plain = copy.deepcopy(layer)
        if isinstance(layer, StandardisedConv2d):
            layer.weight = nn.Parameter(layer.standardised().detach())
            geometry = (layer.padding, layer.dilation, layer.groups, False)
            shape = (layer.in_channels, layer.out_channels, layer.kernel_size, 1)
            plain = nn.Conv2d(*shape, *geometry).double()
        plain.weight = nn.Parameter(restate_weight(layer, factors.r[member], factors.s[member]))
        if wrapper.member_bias is not None:
            plain.bias = nn.Parameter(wrapper.member_bias[member].detach().clone())
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, plain)
    for module in net.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return net


@pytest.mark.parametrize("variant", [{}, GROUPS])
@pytest.mark.parametrize("method", RANK_ONE)
def test_each_member_is_an_ordinary_network(method: str, variant: dict[str, Any]) -> None:
    model = rank_one(method, network(**variant).double(), members=2).double()
    settle(model)
    x = batch(3)[0].double()
    with torch.no_grad():
        sampled = model.sample()
        together = gather(model.run_rows(sampled, model.call((x,), {})), 2)
        alone = torch.stack([ordinary(model, sampled, j)(x) for j in range(2)])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


def test_the_factors_scale_the_standardised_weight() -> None:
    layer = StandardisedConv2d(4, 6, 3, padding=2, dilation=2, bias=False).double()
    members = RankOneLayer(layer, PointFactors(2, 4, 6, init_std=0.5).double())
    x, (factors,) = torch.randn(6, 4, 7, 5).double(), sample_layers([members]).layers
    w = layer.weight
    hat = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), correction=0, keepdim=True)
    expected = [
        F.conv2d(x[3 * j : 3 * j + 3], hat * outer[..., None, None], padding=2, dilation=2)
        for j, outer in enumerate(torch.einsum("jo,ji->joi", factors.s, factors.r))
    ]
    torch.testing.assert_close(members(x), torch.cat(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", [{}, GROUPS])
def test_lpbnn_learns_from_slices_of_one(variant: dict[str, Any]) -> None:
    model = build("lpbnn", network(**variant), members=4)
    losses = fit(model, 40)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    x, y = batch()
    right = (lpbnn.predict(model, x, seed=0).labels == y)[y != VOID]
    assert right.float().mean() > 0.8


def test_batch_norms_of_the_members_take_slices_of_one() -> None:
    model = build("lpbnn", network(), members=4, batch_norm="member")
    assert all(loss == loss for loss in fit(model, 2))


def test_mc_dropout_keeps_to_the_decoder_where_the_network_has_its_own() -> None:
    model: Any = build("mcdropout", network(dropout=0.2))
    dropping = [p for p, m in model.net.named_modules() if isinstance(m, model.member_layer)]
    assert dropping == ["decoder.drop1", "decoder.refine.drop2"]
    assert model.expand_at == ["decoder"]


def test_the_passes_of_mc_dropout_share_the_encoder() -> None:
    net = settle(network(dropout=0.2).double())
    whole = build("mcdropout", copy.deepcopy(net), expand_at="")
    model = build("mcdropout", net)
    x = batch(2)[0].double()
    for one in (model, whole):
        assert lpbnn.check(one, x).ok
    seen, repeated = calls(net), calls(whole.net)  # type: ignore[arg-type]
    p, q = (lpbnn.predict(m, x, seed=0) for m in (model, whole))
    assert (seen, repeated) == ([2], [8])
    torch.testing.assert_close(p.members, q.members, atol=1e-12, rtol=1e-12)


def test_a_deep_ensemble_may_share_the_pretrained_weights() -> None:
    model: Any = build("ensemble", network(), members=3, reinit="decoder")
    states = [net.state_dict() for net in model.net]
    for key, value in states[0].items():
        if key.endswith("conv.weight"):
            equal = [torch.equal(value, state[key]) for state in states[1:]]
            assert equal == [key.startswith("encoder.")] * 2


@pytest.mark.parametrize("variant", [{}, GROUPS])
def test_frozen_and_undone(variant: dict[str, Any]) -> None:
    net = network(**variant)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    model, x = build("lpbnn", net), batch(2)[0]
    frozen = lpbnn.freeze(model, samples=2, seed=3)
    p, q = lpbnn.predict(model, x, samples=2, seed=3), lpbnn.predict(frozen, x)
    torch.testing.assert_close(p.probs, q.probs, atol=1e-5, rtol=1e-4)
    back = lpbnn.undo(model)
    assert back is net
    assert all(torch.equal(before[key], value) for key, value in back.state_dict().items())
