"""MIMO: heads see independent inputs in training and the same one in evaluation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import ConvNet, Mlp, ResNet, UsersOwn, Vit, settle
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones, likelihoods
from lpbnn.methods.mimo import MIMO, FirstLayer, LastLayer, find_ends


def build(net: nn.Module, check: bool = False, **options: Any) -> MIMO:
    """Return a model that does not compare rows at its first batch, unless ``check``."""
    model = lpbnn.build(net, "mimo", check=check, **options)
    assert isinstance(model, MIMO)
    return model


def watch_inputs(model: MIMO) -> list[Tensor]:
    """Return a list that gets the inputs of the heads, (M, rows, ...), of every call."""
    seen: list[Tensor] = []
    first = model.net.get_submodule(model.first)

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        seen.append(args[0].detach().unflatten(0, (model.members, -1)))

    first.register_forward_pre_hook(note)
    return seen


def test_heads_see_independent_inputs_in_training_and_the_same_in_evaluation() -> None:
    model = build(Mlp()).train()
    seen = watch_inputs(model)
    x = torch.arange(40.0).unsqueeze(1).expand(-1, 5)
    y = torch.randint(0, 3, (40,))
    model.loss(x, y)
    inputs = seen[0][..., 0]
    assert inputs.shape == (3, 160)  # each of the 40 examples four times
    for head in inputs:
        assert head.long().bincount().tolist() == [4] * 40
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(torch.corrcoef(inputs[[a, b]])[0, 1]) < 0.3
        assert (inputs[a] == inputs[b]).float().mean() < 0.2
    model.eval().loss(x, y)
    model(x)
    for same in seen[1:]:
        assert torch.equal(same, x.expand(3, -1, -1))


@pytest.mark.parametrize(("share", "equal"), [(0.0, 0), (0.5, 80), (1.0, 160)])
def test_a_share_of_the_rows_repeats_its_input(share: float, equal: int) -> None:
    model = build(Mlp(), input_repetition=share).train()
    examples = model.shuffled_examples(40, torch.device("cpu"))
    assert examples.shape == (3, 160)
    assert all(head.bincount().tolist() == [4] * 40 for head in examples)
    tail = examples[:, 160 - equal :]
    assert torch.equal(tail, tail[:1].expand(3, -1))
    head = examples[:, : 160 - equal]
    assert equal == 160 or (head[0] == head[1]).float().mean() < 0.3


def test_the_loss_is_a_sum_over_heads_with_their_own_labels() -> None:
    torch.manual_seed(1)
    weights = torch.tensor([1.0, 2.0, 5.0])
    model = build(Mlp(), batch_repetitions=2, class_weights=weights).double().train()
    x, y = torch.randn(5, 5).double(), torch.randint(0, 3, (5,))
    torch.manual_seed(2)
    examples = model.shuffled_examples(5, x.device)
    rows = model.net(x[examples.flatten()]).unflatten(0, (3, 10))
    expected = sum(F.cross_entropy(rows[m], y[examples[m]], weights.double()) for m in range(3))
    torch.manual_seed(2)
    terms = model.loss(x, y)
    torch.testing.assert_close(terms["loss"], expected)
    torch.testing.assert_close(terms["nll"], expected)
    model.eval()
    expected = sum(F.cross_entropy(outputs, y, weights.double()) for outputs in model(x))
    torch.testing.assert_close(model.loss(x, y)["loss"], expected)


def test_example_weights_follow_the_examples_to_their_rows() -> None:
    model = build(Mlp(), batch_repetitions=2).double().train()
    x, y, weight = torch.randn(5, 5).double(), torch.randint(0, 3, (5,)), torch.rand(5).double()
    torch.manual_seed(2)
    examples = model.shuffled_examples(5, x.device)
    rows = model.net(x[examples.flatten()]).unflatten(0, (3, 10))
    expected = torch.zeros((), dtype=torch.float64)
    for head, own in zip(rows, examples, strict=True):
        each = F.cross_entropy(head, y[own], reduction="none")
        expected += (each * weight[own]).sum() / weight[own].sum()
    torch.manual_seed(2)
    torch.testing.assert_close(model.loss(x, y, weight)["nll"], expected)
    with pytest.raises(ValueError, match=r"weights of examples are a tensor of shape \(5,\)"):
        model.loss(x, y, torch.ones(10))


ENDS = [
    (nn.Linear(4, 6), (4,)),
    (nn.Linear(4, 6, bias=False), (3, 4)),
    (nn.Conv2d(4, 6, 3, padding=1), (4, 5, 5)),
    (nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular"), (4, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 5)),
]


def alone(layer: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return torch.func.functional_call(layer, tensors, (x,))


@pytest.mark.parametrize(("layer", "shape"), ENDS)
def test_the_first_layer_adds_up_a_layer_for_each_input(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    first, x = FirstLayer(copy.deepcopy(layer), 3), torch.randn(3, 2, *shape)
    weights = first._copies("weight", first.axis)
    assert [tuple(weight.shape) for weight in weights] == [tuple(layer.weight.shape)] * 3
    torch.testing.assert_close(weights[0] * 3**0.5, layer.weight.detach())
    expected = sum(alone(layer, w, None, part) for w, part in zip(weights, x, strict=True))
    if layer.bias is not None:  # it was added three times
        expected = expected - 2 * layer.bias.view(-1, *(1,) * (len(shape) - 1))
    torch.testing.assert_close(first(x.flatten(0, 1)), expected, atol=1e-5, rtol=1e-5)
    same = first(x[:1].expand_as(x).flatten(0, 1))
    torch.testing.assert_close(first.restore()(x[0]), same, atol=1e-5, rtol=1e-5)
    assert repr(first.layer) == repr(layer)


@pytest.mark.parametrize(("layer", "shape"), ENDS)
def test_the_last_layer_is_a_layer_for_each_head(layer: nn.Module, shape: tuple[int, ...]) -> None:
    last, x = LastLayer(copy.deepcopy(layer), 3), torch.randn(2, *shape)
    heads = last(x).unflatten(0, (3, 2))
    for head, weight in zip(heads, last._copies("weight", last.axis), strict=True):
        torch.testing.assert_close(head, alone(layer, weight, layer.bias, x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(heads[0], heads[1])
    torch.testing.assert_close(last.restore()(x), heads[0], atol=1e-5, rtol=1e-5)
    assert repr(last.layer) == repr(layer)
    assert torch.equal(last.layer.weight, layer.weight)


@pytest.mark.parametrize(("layer", "shape"), ENDS)
def test_undo_takes_the_bias_of_the_first_head(layer: nn.Module, shape: tuple[int, ...]) -> None:
    last, x = LastLayer(copy.deepcopy(layer), 3), torch.randn(2, *shape)
    if last.layer.bias is not None:
        nn.init.normal_(last.layer.bias)  # training gives every head its own
    expected = last(x)[:2]
    torch.testing.assert_close(last.restore()(x), expected, atol=1e-5, rtol=1e-5)


def test_the_scale_of_the_given_initialiser_is_kept() -> None:
    net = backbones.build("wrn-16-4", 10)
    x = torch.randn(30, 3, 16, 16)
    before = net.conv1(x).std().item()
    model = build(copy.deepcopy(net))
    after = model.net.conv1(x).std().item()
    assert after == pytest.approx(before, rel=0.15)
    weight = model.net.head.layer.weight.detach()
    torch.testing.assert_close(weight.std(), net.head.weight.detach().std(), atol=0, rtol=0.01)


@pytest.mark.parametrize("kind", [Mlp, ConvNet, ResNet, Vit])
def test_undo_returns_the_network_of_the_first_head(kind: type[nn.Module]) -> None:
    net = settle(kind())
    model = build(net).double().eval()
    x = torch.randn(4, *net.shape).double()
    expected = model(x)[0]
    assert lpbnn.undo(model) is net
    torch.testing.assert_close(net(x), expected)
    assert [repr(m) for m in net.modules()] == [repr(m) for m in kind().double().eval().modules()]


def test_undo_moves_the_users_hooks_back_to_the_layers() -> None:
    net, seen = Mlp(), []
    for name in ("0", "4"):
        hook = lambda module, args, output, name=name: seen.append((name, module, len(output)))  # noqa: E731
        net.get_submodule(name).register_forward_hook(hook)
    first, last = net[0], net[4]
    model = build(net)
    model(torch.randn(4, 5))
    lpbnn.undo(model)
    net(torch.randn(4, 5))
    assert [(name, rows) for name, _, rows in seen[:2]] == [("0", 4), ("4", 12)]
    assert seen[2:] == [("0", first, 4), ("4", last, 4)]


def test_modules_around_the_two_layers_run_for_each_input_and_output() -> None:
    """LeNet pads its images, the MLP flattens and checks them."""
    for name, options in (("lenet", {}), ("mlp", {"in_channels": 3, "image_size": 8})):
        model = build(backbones.build(name, 10, **options), members=2)
        assert model(torch.randn(5, 3, 8, 8)).shape == (2, 5, 10)
        model.loss(torch.randn(5, 3, 8, 8), torch.randint(0, 10, (5,)))["loss"].backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_each_head_learns_to_predict_for_its_own_input() -> None:
    x = torch.randn(256, 4)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    model = build(net, members=2, batch_repetitions=2)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.01), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        model.loss(x, y)["loss"].backward()
        optimizer.step()
    other = torch.randperm(256)
    heads = model.net(torch.cat([x, x[other]])).unflatten(0, (2, 256)).argmax(2)
    assert (heads[0] == y).float().mean() > 0.8
    assert (heads[1] == y[other]).float().mean() > 0.8
    assert (heads[0] == y[other]).float().mean() < 0.5
    assert (lpbnn.predict(model, x).labels == y).float().mean() > 0.9


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_predictions_do_not_depend_on_the_chunk(chunk: int) -> None:
    model, x = build(settle(ResNet())), torch.randn(5, 3, 8, 8)
    whole = lpbnn.predict(model, x, samples=3)
    assert whole.members.shape == (3, 5, 3)
    torch.testing.assert_close(lpbnn.predict(model, x, chunk=chunk).members, whole.members)


@pytest.mark.parametrize("chunk", [3, 7, 9, 100])
def test_a_chunk_bounds_the_rows_of_all_heads_together(chunk: int) -> None:
    model = build(Mlp())
    seen = watch_inputs(model)
    lpbnn.predict(model, torch.randn(8, 5), chunk=chunk)
    assert max(inputs.shape[0] * inputs.shape[1] for inputs in seen) <= chunk


@pytest.mark.parametrize("batch", range(1, 6))
def test_any_batch_size(batch: int) -> None:
    model = build(ResNet(), batch_repetitions=4).train()
    x, y = torch.randn(batch, 3, 8, 8), torch.randint(0, 3, (batch,))
    model.loss(x, y)["loss"].backward()
    assert lpbnn.predict(model, x).probs.shape == (batch, 3)


def test_segmentation_and_regression() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model = build(net, task="segmentation")
    x, y = torch.randn(2, 3, 6, 6), torch.randint(0, 2, (2, 6, 6))
    model.loss(x, y)["loss"].backward()
    p = lpbnn.predict(model, x)
    assert p.members.shape == (3, 2, 2, 6, 6)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(2, 6, 6))
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    model = build(net, task="regression")
    model.loss(torch.randn(4, 5), torch.randn(4, 1))["loss"].backward()
    assert lpbnn.predict(model, torch.randn(4, 5)).mean.shape == (4, 1)


def test_saves_copies_compiles_and_mixes_precision(tmp_path: Path) -> None:
    model, x, y = build(ResNet()), torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))
    model.loss(x, y)["loss"].backward()
    expected = lpbnn.predict(model, x).probs
    assert torch.equal(lpbnn.predict(copy.deepcopy(model), x).probs, expected)
    save_model(model, tmp_path / "model.safetensors")
    other = build(ResNet())
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(lpbnn.predict(other, x).probs, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model.loss(x, y)["loss"])
        assert lpbnn.predict(model, x).probs.dtype == torch.float32
    compiled = torch.compile(build(Mlp()).loss, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(3, 5), torch.tensor([0, 1, 2]))["loss"].backward()


def test_the_exported_network_takes_any_batch() -> None:
    model = build(settle(ResNet())).eval()
    dynamic = {"x": {0: torch.export.Dim("batch", max=64)}}
    program = torch.export.export(model, (torch.randn(4, 3, 8, 8),), dynamic_shapes=dynamic)
    x = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(x), model(x))


def test_the_ends_are_found_or_named() -> None:
    assert find_ends(ResNet(), None, None) == ("stem", ["head"])
    assert find_ends(Vit(), None, None) == ("embed", ["head"])
    assert find_ends(UsersOwn(), "shared", "mix.0") == ("shared", ["mix.0"])
    model = build(ResNet(), first="stage1.body.0", last="stage2.skip")
    assert isinstance(model.net.stage1.body[0], FirstLayer)
    assert isinstance(model.net.stage2.skip, LastLayer)
    assert model.net.stem.in_channels == 3


def test_layers_of_attention_are_no_ends() -> None:
    net = nn.Module()
    net.attention = nn.MultiheadAttention(4, 2)
    net.first, net.last, net.more = nn.Linear(4, 4), nn.Linear(4, 3), nn.MultiheadAttention(4, 2)
    assert find_ends(net, None, None) == ("first", ["last"])


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="members=0: expected an integer"):
        build(Mlp(), members=0)
    with pytest.raises(ValueError, match=r"input_repetition=2: expected a share"):
        build(Mlp(), input_repetition=2)
    with pytest.raises(ValueError, match="it needs 2; found: 0"):
        build(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"last='haed' is no Linear.*Did you mean 'head'\?"):
        build(ResNet(), last="haed")
    with pytest.raises(ValueError, match="both 'stem'"):
        build(ResNet(), last="stem")
    net = Mlp()
    nn.utils.parametrizations.weight_norm(net[0])
    with pytest.raises(ValueError, match="'0' computes its weight itself"):
        build(net)
    model = build(UsersOwn())
    with pytest.raises(RuntimeError, match="mimo joins 3 inputs at 'embed'"):
        model(torch.randn(2, 5), torch.randn(2, 3))  # the context goes around the first layer
    model = build(ResNet(), last="stage2.skip")
    with pytest.raises(RuntimeError, match=r"size of tensor|came out"):
        model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("mode", [True, False])
def test_targets_that_do_not_fit_are_refused_before_they_are_shuffled(mode: bool) -> None:
    model, x = build(Mlp()).train(mode), torch.randn(4, 5)
    with pytest.raises(TypeError, match=r"targets are a tensor; got list. Fix: torch.as_tensor"):
        model.loss(x, [0, 1, 2, 0])
    for shape in ((3,), (5,), ()):
        with pytest.raises(ValueError, match=r"got 4 examples and targets of shape .*is 4\."):
            model.loss(x, torch.zeros(shape, dtype=torch.int64))


class TwoHeads(nn.Module):
    """A head of one layer, and one of two."""

    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.body, self.kind = nn.Linear(5, 6), nn.Linear(6, 3)
        self.size = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)) if deep else nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        return {"kind": self.kind(x), "size": self.size(x)}


HEADS = {"kind": likelihoods.Categorical(), "size": likelihoods.Gaussian()}


@pytest.mark.parametrize(
    ("deep", "options"), [(False, {}), (True, {"last": ("kind", "size.1")})], ids=["found", "named"]
)
def test_a_network_with_several_heads_has_a_last_layer_for_each(
    deep: bool, options: dict[str, Any]
) -> None:
    model = build(TwoHeads(deep), likelihood=HEADS, batch_repetitions=2, **options).double()
    x = torch.randn(5, 5).double()
    y = {"kind": torch.randint(3, (5,)), "size": torch.randn(5, 1).double()}
    torch.manual_seed(2)
    terms = model.loss(x, y)
    assert list(terms) == ["loss", "nll", "nll/kind", "nll/size"]
    torch.manual_seed(2)
    examples = model.shuffled_examples(5, x.device)
    kind = model.net(x[examples.flatten()])["kind"].unflatten(0, (3, 10))
    expected = sum(F.cross_entropy(kind[m], y["kind"][examples[m]]) for m in range(3))
    torch.testing.assert_close(terms["nll/kind"], expected)
    prediction = lpbnn.predict(model, x)
    assert prediction["kind"].members.shape == (3, 5, 3)
    assert prediction["size"].members.shape == (3, 5, 1)


def test_a_head_whose_last_layer_was_not_widened_is_an_error() -> None:
    model = build(TwoHeads(deep=True), likelihood=HEADS)
    with pytest.raises(RuntimeError, match=r"'size.0', 'size.1'.*name others with first"):
        model(torch.randn(4, 5))


def test_the_first_loss_compares_rows_and_later_ones_do_not() -> None:
    model, x, y = build(Mlp(), check=True), torch.randn(4, 5), torch.randint(3, (4,))
    seen = watch_inputs(model)
    model.train().loss(x, y)
    assert len(seen) > 2
    seen.clear()
    model.loss(x, y)
    model.eval().loss(x, y)
    assert len(seen) == 2


class JoinsViews(Mlp):
    """Two views of every example are rows of one batch, in front of the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(super().forward(torch.cat([x, 2 * x])).chunk(2)).mean(0)


class Backwards(nn.Module):
    """The layer that is called last was registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("kind", [JoinsViews, Backwards])
def test_a_network_whose_rows_meet_the_wrong_heads_is_refused(kind: type[nn.Module]) -> None:
    model, x, y = build(kind(), check=True), torch.randn(4, 5), torch.randint(3, (4,))
    for _ in range(2):  # not only once
        with pytest.raises(ValueError, match="what each subnetwork predicts alone"):
            lpbnn.predict(model, x)
        with pytest.raises(ValueError, match="what each subnetwork predicts alone"):
            model.loss(x, y)
    if kind is Backwards:
        named = build(kind(), check=True, first="body", last="head").eval()
        alone = [named.run_alone(j, (x,), {}) for j in range(named.members)]
        torch.testing.assert_close(named(x), torch.stack(alone))


class GraphNetwork(nn.Module):
    """Every row is a node, and the rows exchange messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(x + x.roll(1, 0))


def test_a_network_whose_rows_depend_on_each_other_is_refused_in_training() -> None:
    model, x, y = build(GraphNetwork(), check=True), torch.randn(6, 5), torch.randint(3, (6,))
    for _ in range(2):
        with pytest.raises(ValueError, match="depends on the other examples"):
            model.train().loss(x, y)
    assert lpbnn.predict(model, x).probs.shape == (6, 3)
