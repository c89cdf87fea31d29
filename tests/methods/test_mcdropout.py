"""MC dropout: on at prediction, at the right rate, one thinned network per member, and undone."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import Mlp, ResNet, UsersOwn, Vit, settle
from safetensors.torch import load_model, save_model
from torch import nn

import lpbnn
from lpbnn import backbones
from lpbnn.members.passes import MemberPass
from lpbnn.methods.mcdropout import ActiveDropout, DropBefore, DropoutMasks, MCDropout

KINDS = {  # each with the number of dimensions it is for
    nn.Dropout: 2,
    nn.Dropout1d: 3,
    nn.Dropout2d: 4,
    nn.Dropout3d: 5,
    nn.AlphaDropout: 3,
    nn.FeatureAlphaDropout: 4,
}


def build(net: nn.Module, **options: object) -> MCDropout:
    model = lpbnn.build(net, "mcdropout", **options)
    assert isinstance(model, MCDropout)
    return model


def dropping(net: nn.Module) -> list[str]:
    return [path for path, module in net.named_modules() if isinstance(module, DropBefore)]


def test_dropout_is_on_and_batch_norm_is_not() -> None:
    model = build(settle(ResNet())).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    x = torch.randn(5, 3, 8, 8)
    p = lpbnn.predict(model, x, samples=2)
    assert p.members.shape == (8, 5, 3)
    assert len({tuple(member.flatten().tolist()) for member in p.members}) == 8
    assert (p.epistemic > 0).all()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    # without anything dropped, evaluation is the plain network's
    for dropout in model.layers:
        dropout.p = 0.0
    expected = copy.deepcopy(lpbnn.undo(copy.deepcopy(model))).eval()(x)
    torch.testing.assert_close(model.eval()(x), expected.expand(4, -1, -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeded", [False, True])
def test_each_kind_keeps_mean_and_variance_of_its_original(
    kind: type[nn.Module], seeded: bool
) -> None:
    x = torch.full((2000, 8, 2, 2, 2)[: KINDS[kind]], 0.5)
    dropout = ActiveDropout(kind(0.3)).eval()
    masks = DropoutMasks(len(x), range(len(x)) if seeded else None)
    with dropout.slot.use(MemberPass(masks, batch=1)):
        y = dropout(x)
    expected = kind(0.3)(x)
    torch.testing.assert_close(y.unique(), expected.unique())
    torch.testing.assert_close(y.mean(), expected.mean(), atol=0.05, rtol=0)
    torch.testing.assert_close(y.std(), expected.std(), atol=0.05, rtol=0)
    assert not (y == y[:1]).all()
    if y.dim() > 2:  # whether a channel falls or stays as a whole
        entries = y.flatten(2)
        assert (entries == entries[:, :, :1]).all() == (kind is not nn.AlphaDropout)


def test_a_member_is_one_thinned_network() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    model = build(copy.deepcopy(net), rate=0.4, members=3)
    x = torch.randn(6, 5).double()
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (3,)).tolist()
    p = lpbnn.predict(model, x, seed=7)
    for member, seed in enumerate(seeds):
        kept = torch.rand(7, generator=torch.Generator().manual_seed(seed)) >= 0.4
        hidden = net[1](net[0](x)) * kept / 0.6
        torch.testing.assert_close(p.members[member], net[2](hidden).softmax(1))


def test_a_call_gives_every_row_its_own_mask_and_a_prediction_does_not() -> None:
    """Equal rows of a matrix product are equal to rounding only: that is the processor's affair."""
    model = build(Mlp(), rate=0.5).double()
    x = torch.randn(1, 5).double().expand(50, -1)
    members = lpbnn.predict(model, x).members
    torch.testing.assert_close(members, members[:, :1].expand_as(members))
    assert not torch.allclose(members[0], members[1])
    rows = model(x)
    assert not torch.allclose(rows, rows[:, :1].expand_as(rows))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 15, 40, 1000])
def test_the_prediction_does_not_depend_on_the_chunk(chunk: int) -> None:
    model = build(settle(ResNet()), members=3).double()
    seen: list[int] = []
    model.net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x = torch.randn(5, 3, 8, 8).double()
    whole = lpbnn.predict(model, x, samples=2, seed=3)
    seen.clear()
    parts = lpbnn.predict(model, x, samples=2, seed=3, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    assert max(seen) <= chunk


def test_the_network_s_own_dropout_is_used_at_its_rate() -> None:
    net = backbones.build("wrn-16-4", 10, dropout=0.3)
    model = build(net)
    assert len(model.layers) == 6  # once per block
    assert not dropping(net)
    assert {dropout.p for dropout in model.layers} == {0.3}
    lpbnn.undo(model)
    assert {dropout.p for dropout in build(net, rate=0.2).layers} == {0.2}
    lpbnn.undo(net)
    assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {0.3}
    assert not any(isinstance(module, ActiveDropout) for module in net.modules())


@pytest.mark.parametrize("rate", [None, 0.2])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_rate_that_is_changed_after_the_build_has_effect(
    rate: float | None, compiled: bool
) -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(100, 100, bias=False))
    nn.init.eye_(net[1].weight)
    model, x = build(net, rate=rate).eval(), torch.ones(30, 100)
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    layers = [module for module in net.modules() if isinstance(module, nn.Dropout)]
    for p in (rate or 0.5, 0.8, 0.1, 0.0):
        for layer in layers:
            layer.p = p  # as any loop over nn.Dropout does it
        for outputs in (call(x), next(model.passes(1, 4))(x)):
            assert (outputs == 0).float().mean().item() == pytest.approx(p, abs=0.1)
    assert lpbnn.undo(model)[0].p == 0.0
    torch._dynamo.reset()


def test_dropout_layers_of_rate_zero_get_the_default_rate() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 3))
    assert [dropout.p for dropout in build(net).layers] == [0.1]


def test_a_rate_of_zero_stays_beside_another_rate() -> None:
    net = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    assert [dropout.p for dropout in build(net).layers] == [0.0, 0.3]


def test_without_dropout_it_goes_before_every_layer_but_the_first() -> None:
    net = ResNet()
    given = copy.deepcopy(net.state_dict())
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    model = build(net)
    assert {dropout.p for dropout in model.layers} == {0.1}
    assert len(dropping(net)) == len(layers) - 1
    assert "stem" not in dropping(net)
    assert lpbnn.undo(model) is net
    assert [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)] == layers
    assert all(torch.equal(value, given[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"include": "head"}, ["head"]),
        ({"include": ["stem", "head"]}, ["stem", "head"]),
        ({"exclude": "stage*"}, ["head"]),
        ({"exclude": nn.Conv2d}, ["head"]),
        ({"include": "stage2", "exclude": "stage2.skip"}, ["stage2.body.0", "stage2.body.3"]),
    ],
)
def test_filters_choose_the_layers(filters: dict, expected: list[str]) -> None:
    net = ResNet()
    build(net, **filters)
    assert dropping(net) == expected


def test_filters_add_to_the_network_s_own_dropout() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 3))
    model = build(net, include="3")
    assert sorted(dropout.p for dropout in model.layers) == [0.1, 0.3]
    assert [type(layer) for layer in net] == [nn.Linear, ActiveDropout, nn.Linear, DropBefore]


def test_transformers_do_not_skip_their_dropout_in_a_fused_kernel() -> None:
    net = Vit()
    model = build(net, rate=0.2).eval()
    x = torch.randn(2, 12, 4)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
    lpbnn.undo(model)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), net(x))
    assert all(layer.activation_relu_or_gelu for layer in net.encoder.layers)


def test_training_makes_one_pass_and_evaluation_every_member_s() -> None:
    for part, rows in ((0, [5, 5]), (-1, [5, 20])):  # nothing is dropped before the first layer
        model = build(Mlp(), check=False)
        seen: list[int] = []
        model.net[part].register_forward_pre_hook(lambda _, args, s=seen: s.append(len(args[0])))
        x, y = torch.randn(5, 5), torch.randint(0, 3, (5,))
        model.train().loss(x, y)
        model.eval().loss(x, y)
        assert seen == rows


class Parts(nn.Module):
    """An encoder, and a head that has the dropout; what the encoder gave may go around the head."""

    def __init__(self, around: bool = False) -> None:
        super().__init__()
        self.encoder, self.around = nn.Linear(5, 4), around
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.encoder(x)
        return self.head(features) + features if self.around else self.head(features)


def test_what_lies_before_the_dropout_runs_once_with_the_same_answer() -> None:
    net = Parts().double()
    whole = build(copy.deepcopy(net), expand_at="").eval()
    model = build(net).eval()
    assert (model.expand_at, whole.expand_at) == (["head.2"], [""])
    seen: list[int] = []
    net.encoder.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    x = torch.randn(7, 5).double()
    for chunk in (None, 3):
        p = lpbnn.predict(model, x, samples=2, seed=0, chunk=chunk)
        q = lpbnn.predict(whole, x, samples=2, seed=0, chunk=chunk)
        torch.testing.assert_close(p.members, q.members, atol=1e-12, rtol=1e-12)
    assert max(seen) == 7
    lpbnn.undo(model)
    assert not net.head[2]._forward_pre_hooks


def test_a_tensor_around_the_dropout_is_found_or_refused_with_advice() -> None:
    model = build(Parts(around=True))
    assert model(torch.randn(3, 5)).shape == (4, 3, 4)
    assert (model.expand_at, model.execution) == ([""], "batched")
    model = build(Parts(around=True), check=False)
    with pytest.raises(RuntimeError, match=r"members at \['head.2'\].*expand_at=''"):
        model(torch.randn(3, 5))
    assert build(Parts(around=True), expand_at="")(torch.randn(3, 5)).shape == (4, 3, 4)
    with pytest.raises(ValueError, match="Did you mean 'head'"):
        build(Parts(), expand_at="haed")


def test_several_inputs_and_a_shared_module() -> None:
    model = build(UsersOwn(), rate=0.3)
    x = (torch.randn(5, 5), torch.randn(5, 3))
    whole = lpbnn.predict(model, x, seed=0)
    torch.testing.assert_close(lpbnn.predict(model, x, seed=0, chunk=3).members, whole.members)
    model.loss(x, torch.randint(0, 3, (5,)))["loss"].backward()


@pytest.mark.parametrize("rows", [4, 6])
def test_tensors_without_the_members_rows_are_refused(rows: int) -> None:
    dropout = ActiveDropout(nn.Dropout(0.5), path="drop")
    masks = DropoutMasks(3, [1, 2, 3])
    with (
        dropout.slot.use(MemberPass(masks, batch=4)),
        pytest.raises(ValueError, match="'drop' got"),
    ):
        dropout(torch.ones(rows, 100))


@pytest.mark.parametrize("task", ["classification", "regression", "segmentation"])
def test_every_task_trains(task: lpbnn.likelihoods.Task) -> None:
    if task == "segmentation":
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 2, 1))
        x, y = torch.randn(4, 3, 6, 6), torch.ones(4, 6, 6, dtype=torch.int64)
    else:
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        x = torch.randn(4, 5)
        y = torch.randn(4, 2) if task == "regression" else torch.tensor([0, 1, 2, 1])
    model = build(net, task=task)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.02), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        terms = model.loss(x, y)
        terms["loss"].backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(terms["nll"].item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert lpbnn.predict(model, x, samples=3).members.shape[:2] == (12, 4)


def test_saves_copies_compiles_and_mixes_precision(tmp_path: Path) -> None:
    model, x, y = build(ResNet()), torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))
    model.loss(x, y)["loss"].backward()
    expected = lpbnn.predict(model, x, seed=0).probs
    assert torch.equal(lpbnn.predict(copy.deepcopy(model), x, seed=0).probs, expected)
    save_model(model, tmp_path / "model.safetensors")
    other = build(ResNet())
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(lpbnn.predict(other, x, seed=0).probs, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model.loss(x, y)["loss"])
        assert lpbnn.predict(model, x).probs.dtype == torch.float32
    compiled = torch.compile(build(Mlp()), backend="aot_eager", fullgraph=True)
    assert compiled(torch.randn(3, 5)).shape == (4, 3, 3)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"rate=1\.5: expected a number between 0 and 1"):
        build(Mlp(), rate=1.5)
    with pytest.raises(ValueError, match="members=0: expected an integer"):
        build(Mlp(), members=0)
    with pytest.raises(ValueError, match="nothing to convert in Sequential"):
        build(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="include='haed' matches no layer"):
        build(ResNet(), include="haed")
    net = Mlp()
    build(net)
    with pytest.raises(ValueError, match=r"converted already .*Call lpbnn\.undo first"):
        build(net)
    with pytest.raises(TypeError, match="exclude='2'"):
        F.linear(torch.randn(1, 7), net[2].weight)
    assert net[2].in_features == 7
    with pytest.raises(TypeError, match=r"expected one of Dropout.* got ReLU"):
        ActiveDropout(nn.ReLU())


def test_several_places_are_refused_before_anything_is_changed() -> None:
    net = Parts()
    with pytest.raises(ValueError, match="mcdropout takes the path of one module"):
        build(net, expand_at=["head"])
    assert not any(isinstance(module, ActiveDropout) for module in net.modules())


def test_a_rate_of_one_stays_one_at_any_scale_of_the_noise() -> None:
    """Its mask has no standard deviation that could be scaled."""
    dropout = ActiveDropout(nn.Dropout(1.0))
    dropout.noise_scale = 0.5
    assert dropout.rate == 1
