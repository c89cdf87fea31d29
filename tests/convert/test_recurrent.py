"""Recurrent layers: split they compute what torch's do, and members are networks with their own matrices."""

import copy
import itertools
from typing import Any

import pytest
import torch
from networks import restate_weight
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import lpbnn
from lpbnn.convert.recurrent import SplitRecurrent, split_recurrent
from lpbnn.rank_one.ensemble import RankOneEnsemble

RNNS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}
SHAPES = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first}
    for layers, both, first in itertools.product((1, 2), (False, True), (False, True))
]
LENGTHS = torch.tensor([3, 6, 1, 6])


def make(name: str, **options: Any) -> nn.RNNBase:
    kind, own = RNNS[name]
    return kind(4, 5, **{"batch_first": True, **own, **options}).double()


def flat(output: Any) -> list[Tensor]:
    y, state = output
    if not isinstance(y, Tensor):
        y, lengths = pad_packed_sequence(y, batch_first=True)
        return [y, lengths, *(state if isinstance(state, tuple) else (state,))]
    return [y, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RNNS)
def test_a_split_layer_computes_what_torchs_does(name: str, shape: dict[str, Any]) -> None:
    rnn = make(name, **shape)
    split = SplitRecurrent(copy.deepcopy(rnn))
    batch = torch.randn(4, 6, 4, dtype=torch.float64)
    x = batch if shape["batch_first"] else batch.transpose(0, 1)
    packed = [
        pack_padded_sequence(batch, LENGTHS, batch_first=True, enforce_sorted=False),
        pack_padded_sequence(batch, LENGTHS.sort(descending=True)[0], batch_first=True),
    ]
    for given in (x, batch[0], *packed):
        torch.testing.assert_close(flat(split(given)), flat(rnn(given)))
    state = tuple(torch.randn_like(part) for part in flat(rnn(x))[1:])
    hx = state if rnn.mode == "LSTM" else state[0]
    for given in (x, packed[0]):
        torch.testing.assert_close(flat(split(given, hx)), flat(rnn(given, hx)))


@pytest.mark.parametrize("name", RNNS)
def test_restore_gives_torchs_layer_bit_for_bit(name: str) -> None:
    rnn = make(name, num_layers=2, bidirectional=True, dropout=0.25)
    rnn.weight_hh_l1.requires_grad_(False)
    restored = SplitRecurrent(copy.deepcopy(rnn)).restore()
    assert repr(restored) == repr(rnn)
    theirs = dict(rnn.named_parameters())
    assert list(dict(restored.named_parameters())) == list(theirs)
    for path, parameter in restored.named_parameters():
        assert torch.equal(parameter, theirs[path])
        assert parameter.requires_grad == theirs[path].requires_grad
        assert parameter.dtype == theirs[path].dtype


def test_a_split_layer_is_called_and_restored_as_torchs_layer_is() -> None:
    """Arguments and their defaults, the device, the mode."""
    rnn = nn.GRU(4, 5, batch_first=True, device="meta").eval()
    split = SplitRecurrent(rnn)
    assert {tensor.device.type for tensor in split.parameters()} == {"meta"}
    restored = split.restore()
    assert {tensor.device.type for tensor in restored.parameters()} == {"meta"}
    assert not restored.training


@pytest.mark.parametrize("name", RNNS)
def test_the_dropout_between_layers_is_on_in_training_alone(name: str) -> None:
    rnn = make(name, num_layers=2, dropout=0.5)
    split, x = SplitRecurrent(copy.deepcopy(rnn)), torch.randn(4, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(flat(split.eval()(x)), flat(rnn.eval()(x)))
    first, second = (split.train()(x)[0] for _ in range(2))
    assert not torch.equal(first, second)


class Reader(nn.Module):
    """Reads sequences of several lengths from both sides."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4).double()
        self.rnn = make(name, bidirectional=True, num_layers=2, **options)
        width = 2 * (self.rnn.proj_size or 5)
        self.head = nn.Linear(width, 3).double()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if lengths is None:
            y = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))[0]
            return self.head(y.mean(1 if self.rnn.batch_first else 0))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        state = self.rnn(packed)[1]
        last = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([last[-2], last[-1]], 1))


def member_network(net: nn.Module, model: RankOneEnsemble, sampled: Any, member: int) -> nn.Module:
    """The plain network with W * (s r^T) in every matrix."""
    own = copy.deepcopy(net)
    for layer, factors in zip(model.layers, sampled.layers, strict=True):
        path, _, name = layer.path.rpartition(".")
        owner = own.get_submodule(path)
        r, s = factors.r[member], factors.s[member]
        weight = restate_weight(layer.layer, r, s)
        with torch.no_grad():
            if isinstance(owner, nn.RNNBase):
                getattr(owner, f"weight_{name}").copy_(weight)
                if layer.member_bias is not None:
                    getattr(owner, f"bias_{name}").copy_(layer.member_bias[member])
            else:
                target = own.get_submodule(layer.path)
                target.weight.copy_(weight)
                assert layer.member_bias is not None
                target.bias.copy_(layer.member_bias[member])
    return own


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RNNS)
def test_a_member_equals_the_network_with_its_matrices(
    name: str, packed: bool, batch_first: bool
) -> None:
    net = Reader(name, batch_first=batch_first).eval()
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    inputs = (x, LENGTHS) if packed else (x,)
    model = lpbnn.build(
        split_recurrent(copy.deepcopy(net)), "batchensemble", members=3, init_std=0.4
    ).eval()
    assert isinstance(model, RankOneEnsemble)
    assert {layer.path.partition(".")[0] for layer in model.layers} == {"embed", "rnn", "head"}
    sampled = model.sample()
    outputs = model.run(sampled, model.call(inputs, {}, 3)).view(3, 4, 3)
    assert model.execution == "batched"
    for member in range(3):
        expected = member_network(net, model, sampled, member)(*inputs)
        torch.testing.assert_close(outputs[member], expected)


@pytest.mark.parametrize("include", ["rnn", "rnn.hh_l0"])
def test_a_recurrent_part_alone_is_converted(include: str) -> None:
    net = Reader("lstm").eval()
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    for inputs in ((x,), (x, LENGTHS)):
        own = split_recurrent(copy.deepcopy(net))
        model = lpbnn.build(own, "batchensemble", members=2, include=include).eval()
        assert isinstance(model, RankOneEnsemble)
        sampled = model.sample()
        outputs = model.run(sampled, model.call(inputs, {}, 2)).view(2, 4, 3)
        for member in range(2):
            expected = member_network(net, model, sampled, member)(*inputs)
            torch.testing.assert_close(outputs[member], expected)


def test_a_packed_batch_is_expanded_inside_of_a_recurrent_layer() -> None:
    """The lengths of the sequences are repeated with them."""
    x, net = torch.randn(4, 6, 4, dtype=torch.float64), split_recurrent(Reader("lstm"))
    points = ["rnn.ih_l0", "rnn.ih_l0_reverse"]
    model = lpbnn.build(net, "batchensemble", members=2, include="rnn", expand_at=points).eval()
    assert isinstance(model, RankOneEnsemble)
    sampled, call = model.sample(), model.call((x, LENGTHS), {}, 2)
    torch.testing.assert_close(model.run_rows(sampled, call), model.run_one_by_one(sampled, call))
    assert model.execution == "batched"


@pytest.mark.parametrize("method", ["lpbnn", "rank1", "meanfield", "batchensemble"])
def test_a_split_network_trains_predicts_and_comes_back(method: str) -> None:
    net = split_recurrent(Reader("gru"))
    state = copy.deepcopy(net.state_dict())
    model = lpbnn.build(net, method, members=2, num_data=8).double()
    x, y = torch.randn(4, 6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    model.train().loss((x, LENGTHS), y)["loss"].backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    p = lpbnn.predict(model, (x, LENGTHS), samples=2, seed=0)
    assert p.members.shape == (2 * (2 if model.stochastic else 1), 4, 3)
    whole = p.probs
    for chunk in (1, 3):
        parts = lpbnn.predict(model, (x, LENGTHS), samples=2, seed=0, chunk=chunk)
        torch.testing.assert_close(parts.probs, whole)
    restored = lpbnn.undo(model)
    assert type(restored.rnn) is nn.GRU
    for path, value in restored.state_dict().items():
        kind, _, name = path.removeprefix("rnn.").partition("_")
        own = f"rnn.{name}.{kind}" if path.startswith("rnn.") else path
        assert torch.equal(value, state[own])


def test_what_cannot_be_split_is_named() -> None:
    class Own(nn.LSTM):
        pass

    with pytest.raises(ValueError, match="Linear has no recurrent layer to split"):
        split_recurrent(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got Own, which may compute otherwise"):
        SplitRecurrent(Own(2, 2))
    split = SplitRecurrent(make("gru"))
    with pytest.raises(RuntimeError, match=r"initial state of shape \(1, 4, 5\), got \(1, 1, 5\)"):
        split(torch.randn(4, 6, 4).double(), torch.zeros(1, 1, 5).double())
    lone = split_recurrent(make("lstm"))
    assert isinstance(lone, SplitRecurrent)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_packed_outputs_are_in_the_order_of_the_packed_inputs(is_sorted: bool) -> None:
    lengths = [5 - i // 8 for i in range(40)]  # many of equal length
    if not is_sorted:
        lengths = lengths[::-1]
    sequences = [torch.randn(length, 4) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=is_sorted)
    rnn = nn.GRU(4, 5)
    expected, _ = rnn(packed)
    found, _ = split_recurrent(rnn)(packed)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)


def test_a_subclass_may_compute_something_else_and_is_not_split() -> None:
    class Mine(nn.LSTM):
        pass

    net = nn.Sequential(Mine(4, 4))
    with pytest.raises(ValueError, match="no recurrent layer to split"):
        split_recurrent(net)
    assert type(net[0]) is Mine
