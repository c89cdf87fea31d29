"""Conversion: nested, shared, filtered, refused by name, undone bit for bit (trap 5)."""

import copy
import inspect
from typing import Any

import pytest
import torch
from networks import ConvNet, Mlp, ResNet, UsersOwn, Vit, members_and_ordinary, settle
from torch import nn
from torch.nn.utils import parametrizations

import lpbnn
from lpbnn.convert.attention import SplitAttention
from lpbnn.convert.checks import widths
from lpbnn.convert.convert import convert
from lpbnn.rank_one.factors import FixedFactors, PointFactors
from lpbnn.rank_one.layer import RankOneLayer


def fast(layer: nn.Module, path: str) -> RankOneLayer:
    return RankOneLayer(layer, PointFactors(2, *widths(layer)), path)


def converted(net: nn.Module) -> list[str]:
    return [path for path, module in net.named_modules() if isinstance(module, RankOneLayer)]


@pytest.mark.parametrize("kind", [Mlp, ConvNet, ResNet, UsersOwn, Vit])
@pytest.mark.parametrize("method", ["lpbnn", "batchensemble"])
def test_weights_are_kept_and_undo_gives_the_network_back_bit_for_bit(
    kind: type, method: str
) -> None:
    net = kind()
    before = copy.deepcopy(net.state_dict())
    options = {"num_data": 10} if method == "lpbnn" else {}
    model = lpbnn.build(net, method, members=3, **options)
    slow = {id(p) for p in net.parameters()}
    for layer in model.layers:
        assert id(layer.layer.weight) in slow
    assert lpbnn.undo(model) is net
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not converted(net)


class Chain(nn.ModuleList):
    """A network that is a list of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_undo_gives_back_a_list_of_layers_whole() -> None:
    """Only a deep ensemble's list is one of networks, of which the first was given."""
    net = Chain([nn.Linear(4, 6), nn.Linear(6, 3)])
    assert lpbnn.undo(lpbnn.build(net, "batchensemble")) is net
    parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
    convert(parts, fast)
    assert lpbnn.undo(parts) is parts
    assert converted(net) == converted(parts) == []


@pytest.mark.parametrize("kind", [Mlp, ConvNet, ResNet])
def test_one_member_with_unit_factors_is_the_plain_network_to_the_last_bit(kind: type) -> None:
    net = settle(kind()).double()
    x = torch.randn(5, *kind.shape, dtype=torch.float64)
    expected = net(x)
    model = lpbnn.build(net, "batchensemble", members=1, init_std=0.0)
    assert torch.equal(model.eval()(x)[0], expected)


def test_a_network_of_the_users_own() -> None:
    net = UsersOwn()
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10).double()
    assert net.shared is net.again  # used twice, converted once
    assert converted(net) == ["embed", "shared", "mix.0", "mix.2.0"]
    x, context = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    together, alone = members_and_ordinary(model, x, context)
    torch.testing.assert_close(together, alone)
    assert model.loss((x, context), torch.randint(3, (4,)))["loss"].isfinite()
    p = lpbnn.predict(model, {"x": x, "context": context}, chunk=5)
    assert p.members.shape == (3, 4, 3)


def test_a_vision_transformer_is_not_bypassed() -> None:
    model = lpbnn.build(Vit(), "lpbnn", members=3, num_data=10).double().eval()
    names = converted(model.net)
    assert "encoder.layers.0.self_attn.q_proj" in names
    assert "encoder.layers.1.self_attn.out_proj" in names
    assert "encoder.layers.1.linear2" in names
    x = torch.randn(4, 12, 4).double()
    together, alone = members_and_ordinary(model, x)
    torch.testing.assert_close(together, alone)
    padding = torch.zeros(4, 12, dtype=torch.bool)
    padding[1, 8:] = True
    together, alone = members_and_ordinary(model, x, padding)
    torch.testing.assert_close(together, alone)
    with torch.no_grad():  # evaluation without gradients is where the fused path would step in
        for layer in model.layers:
            before = model(x)
            layer.factors.s += 0.5
            assert not torch.allclose(model(x), before, rtol=1e-3), layer.path


def test_the_transformer_computes_what_it_did_before_conversion() -> None:
    net = Vit().double().eval()
    x = torch.randn(4, 12, 4).double()
    expected = net(x)
    model = lpbnn.build(net, "batchensemble", members=2, init_std=0.0).eval()
    torch.testing.assert_close(model(x)[1], expected)
    torch.testing.assert_close(lpbnn.undo(model)(x), expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_dropout_of_an_attention_is_on_in_training_alone(need_weights: bool) -> None:
    attention, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), torch.randn(3, 5, 8)
    split = SplitAttention(attention)
    first, second = (split(x, x, x, need_weights=need_weights)[0] for _ in range(2))
    assert not torch.equal(first, second)
    expected = attention.eval()(x, x, x)[0]
    torch.testing.assert_close(split.eval()(x, x, x, need_weights=need_weights)[0], expected)


def test_a_split_attention_has_the_arguments_and_defaults_of_torchs() -> None:
    theirs = inspect.signature(nn.MultiheadAttention.forward).parameters
    mine = inspect.signature(SplitAttention.forward).parameters
    assert {n: p.default for n, p in mine.items()} == {n: p.default for n, p in theirs.items()}
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    torch.testing.assert_close(SplitAttention(attention)(x, x, x), attention(x, x, x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"kdim": 4, "vdim": 6}, {"bias": False}])
def test_a_restored_attention_has_the_device_precision_and_mode_of_its_parts(
    options: dict[str, Any], training: bool
) -> None:
    for where in ({"dtype": torch.float64}, {"device": "meta"}):
        attention = nn.MultiheadAttention(8, 2, batch_first=True, **options, **where)
        split = SplitAttention(attention.train(training))
        for module in (split, split.restore()):
            kinds = {(p.dtype, p.device) for p in module.parameters()}
            assert kinds == {(attention.out_proj.weight.dtype, attention.out_proj.weight.device)}
            assert {part.training for part in module.modules()} == {training}


def test_the_projections_of_an_attention_share_no_memory() -> None:
    attention = nn.MultiheadAttention(8, 2)
    packed = {p.untyped_storage().data_ptr() for p in attention.parameters()}
    split = SplitAttention(attention)
    own = [p.untyped_storage().data_ptr() for p in split.parameters()]
    assert len(own) == 8 == len(set(own) - packed)


@pytest.mark.parametrize("training", [False, True])
def test_undo_keeps_the_mode_of_an_attention(training: bool) -> None:
    split = SplitAttention(nn.MultiheadAttention(8, 2, dropout=0.5)).train(training)
    modules = list(split.restore().modules())
    assert [module.training for module in modules] == [training] * len(modules)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_attention_over_one_sequence_without_a_batch(
    heads: int, masked: bool, average: bool
) -> None:
    attention = nn.MultiheadAttention(8, heads, batch_first=True).double().eval()
    x, masks = torch.randn(5, 8).double(), {}
    if masked:
        padding = torch.tensor([False, False, True, False, False])
        masks = {"attn_mask": torch.rand(heads, 5, 5) > 0.9, "key_padding_mask": padding}
    expected = attention(x, x, x, **masks, average_attn_weights=average)
    found = SplitAttention(attention)(x, x, x, **masks, average_attn_weights=average)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("stage2.*", None, ["stage2.body.0", "stage2.body.3", "stage2.skip"]),
        ("stage2", None, ["stage2.body.0", "stage2.body.3", "stage2.skip"]),
        (nn.Linear, None, ["head"]),
        (["head", "stem"], None, ["stem", "head"]),
        (None, [nn.Linear, "stage?.body.*"], ["stem", "stage2.skip"]),
        ("stage*", "*.skip", ["stage1.body.0", "stage1.body.3", "stage2.body.0", "stage2.body.3"]),
    ],
)
def test_filters(include: object, exclude: object, expected: list[str]) -> None:
    net = ResNet()
    conversion = convert(net, fast, include, exclude)
    assert list(conversion.converted) == converted(net) == expected
    assert set(conversion.left) == {p for p, _ in everything()} - set(expected)


def everything() -> list[tuple[str, nn.Module]]:
    return [(p, m) for p, m in ResNet().named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def test_a_path_means_what_is_below_it_and_no_longer_name() -> None:
    """The filter "1" chooses neither "10" nor "11"."""

    def net() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(12)))

    assert convert(net(), fast, include="1").converted == ("1.0",)
    assert convert(net(), fast, include=["2", "10"]).converted == ("2.0", "10.0")
    left = convert(net(), fast, exclude="1").left
    assert left == {"1.0": "excluded"}


def test_a_shared_module_is_found_under_either_name() -> None:
    assert convert(UsersOwn(), fast, include="again").converted == ("shared",)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order = [self.a, self.b]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = layer(x)
        return x


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight)


class Rectified(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def nan_net() -> nn.Module:
    net = Mlp()
    net[2].weight.data[0, 0] = float("nan")
    return net


REFUSED = {
    "nothing there": (lambda: nn.Sequential(nn.ReLU()), {}, "no layer of a type that can be"),
    "typo": (
        Mlp,
        {"include": "layer1.*"},
        r"include='layer1.\*' matches no layer.*Layers found: 0",
    ),
    "near": (ResNet, {"include": "stage2.body.9"}, "Did you mean 'stage2.body.3'"),
    "exclude typo": (Mlp, {"exclude": "haed"}, "exclude='haed' matches no layer"),
    "all excluded": (Mlp, {"exclude": nn.Linear}, "nothing to convert in Mlp.*Layers found: 0"),
    "no filter": (Mlp, {"include": [3]}, "a filter is a path glob or a layer type; got 3"),
    "nan": (nan_net, {}, "2.weight holds NaN"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), {}, "'0' is lazy"),
    "plain list": (Lists, {}, "'a' is also kept in the plain attribute 'order'"),
    "time first": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)),
        {},
        r"batch_first=False: its rows are time steps.*exclude='0.self_attn.\*'",
    ),
    "attention with bias_kv": (
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)),
        {},
        r"'0.q_proj' belongs to an attention with bias_kv.*exclude='0.\*'",
    ),
    "own forward": (
        lambda: nn.Sequential(Rectified(3, 3, bias=False)),
        {},
        "'0' is a Rectified with a forward of its own that is not linear.*exclude='0'",
    ),
    "parametrised bias": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3), "bias", dim=None)),
        {},
        "'0' has a parametrised bias",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_layer_and_the_fix(case: str) -> None:
    make, options, message = REFUSED[case]
    net = make()
    with pytest.raises((ValueError, TypeError), match=message):
        convert(net, fast, **options)
    assert not converted(net)  # nothing half done


def test_an_attention_is_left_out_as_its_refusal_says() -> None:
    """Its projections have no names in the user's network: all of them go by one pattern."""
    net = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="exclude=") as caught:
        convert(net, fast)
    pattern = str(caught.value).rpartition("exclude='")[2].split("'")[0]
    assert convert(net, fast, exclude=pattern).converted == ("1",)
    assert isinstance(net[0], nn.MultiheadAttention)


def test_converting_twice_is_refused() -> None:
    net = Mlp()
    lpbnn.build(net, "batchensemble")
    with pytest.raises(ValueError, match="'0' is converted already"):
        lpbnn.build(net, "batchensemble")


def test_a_parent_that_reads_the_weight_gets_an_error() -> None:
    model = lpbnn.build(ReadsWeight(), "batchensemble")
    with pytest.raises(TypeError, match="'inner' uses its .weight directly"):
        model(torch.randn(2, 4))


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble"])
def test_parametrised_layers_are_converted(method: str) -> None:
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4)), nn.ReLU(), nn.Linear(4, 3))
    model = lpbnn.build(net, method, members=2, num_data=10).eval()
    assert model(torch.randn(3, 5)).shape == (2, 3, 3)
    assert model.layers[0].layer.parametrizations.weight


def test_a_lone_layer_can_be_built() -> None:
    assert lpbnn.build(nn.Linear(3, 2), "batchensemble")(torch.randn(5, 3)).shape == (4, 5, 2)


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 1), nn.MultiheadAttention(8, 2, batch_first=True)]
)
def test_a_lone_layer_has_no_parent_to_be_replaced_in_and_stays_as_it_is(layer: nn.Module) -> None:
    before = list(layer.named_modules())
    with pytest.raises(ValueError, match="is itself a .* Wrap it: nn.Sequential"):
        convert(layer, lambda layer, path: layer)
    assert list(layer.named_modules()) == before


class Modulated(nn.Linear):
    """Takes two inputs, so it cannot be tried out before it is converted; it is linear."""

    def forward(self, input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale * super().forward(input)


def test_a_layer_of_two_inputs_without_a_bias_is_converted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = Modulated(4, 6, bias=False), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x, torch.tensor(2.0)))

    net, x = Net(), torch.randn(5, 4)
    expected = net(x)
    model = lpbnn.build(net, "batchensemble", members=3, init_std=0.0)
    assert [layer.path for layer in model.layers] == ["first", "head"]
    torch.testing.assert_close(model(x), expected.expand(3, -1, -1))


def test_factors_must_fit_the_layer() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) inputs and outputs"):
        RankOneLayer(nn.Linear(3, 2), FixedFactors(torch.ones(1, 2), torch.ones(1, 3)))


def test_hooks_and_frozen_weights_of_an_attention_survive_conversion_and_undo() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attention.out_proj.requires_grad_(False)
    calls: list[int] = []
    attention.register_forward_hook(lambda *_: calls.append(1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = attention, nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    net = Net()
    model = lpbnn.build(net, "batchensemble", check=False)
    model(torch.randn(2, 5, 8))
    assert len(calls) == 1
    lpbnn.undo(model)
    net(torch.randn(2, 5, 8))
    assert len(calls) == 2
    assert not net.attention.out_proj.weight.requires_grad
    assert net.attention.in_proj_weight.requires_grad


def test_undo_takes_the_network_out_of_a_wrapped_model() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    assert lpbnn.undo(lpbnn.LossStep(lpbnn.build(net, "batchensemble"))) is net
    assert type(net[0]) is nn.Linear


class ByName(nn.Module):
    """Calls every layer by the name of its argument, as torch calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.rnn = nn.Dropout(0.1), nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(input=self.norm(input=self.conv(input=x)))
        outputs, _ = self.rnn(input=x.flatten(2).mT)
        return self.head(input=outputs[:, -1])


@pytest.mark.parametrize("method", lpbnn.methods.names())
@pytest.mark.filterwarnings("ignore::lpbnn.model.NotFittedWarning")
def test_a_layer_may_be_called_by_the_name_of_its_argument(method: str) -> None:
    own = {"batch_norm": "member"} if method == "lpbnn" else {}
    model = lpbnn.build(lpbnn.split_recurrent(ByName()), method, num_data=10, **own)
    x = torch.randn(6, 3, 5, 5)
    assert model.train().loss(x, torch.tensor([0, 1, 2, 0, 1, 2]))["loss"].isfinite()
    assert lpbnn.predict(model, x).probs.shape == (6, 3)
