"""Members as rows equal members one by one, or a warning says so: no silently wrong answers."""

import contextlib
import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Counting, EncoderDecoder, Mlp, ResNet, Vit, ordinary, settle
from torch import Tensor, nn

import lpbnn
from lpbnn import methods
from lpbnn.check import CheckReport, compiled_loss_agrees
from lpbnn.members.call import CallCheck

MIXES = "members cannot run as rows of one batch"
BATCHED_METHODS = ["lpbnn", "batchensemble", "rank1", "mcdropout"]
RANK_ONE = ["lpbnn", "batchensemble", "rank1"]


class Siamese(nn.Module):
    """Two views, concatenated along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(12, 3)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        first, second = self.encoder(torch.cat([one, other])).chunk(2)
        return self.head(torch.cat([first, second], 1))


class Graph(nn.Module):
    """Messages along edges: the output of a node depends on its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.embed(nodes))
        messages = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])
        return self.head(h + messages)


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(5, 8, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        outputs, _ = self.rnn(x, state)
        return self.head(outputs[:, -1] if self.rnn.batch_first else outputs[-1])


class Transposing(Recurrent):
    """A time-first layer that is given the batch where it expects it."""

    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return super().forward(x.transpose(0, 1))


class BatchLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.movedim(-1, 0))


class MixesInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h - h.mean(0) if self.training else h)


class RandomInTraining(MixesInTraining):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(x), 0.5, self.training))


class SecondLayerOnly(nn.Module):
    """Blocks in a list, behind an embedding; a mask goes to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([self.block() for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def block(self) -> nn.Module:
        return nn.Sequential(Counting(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class ZeroHead(nn.Sequential):
    """Its outputs say nothing about its members: they are all zero."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.Tanh(), Reversed(), nn.Linear(8, 3))
        nn.init.zeros_(self[3].weight)


class Reversed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


def ring(nodes: int) -> Tensor:
    return torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 5), torch.randn(8, 5)


def build(net: nn.Module, method: str = "lpbnn", **options: object) -> lpbnn.UncertainModel:
    return lpbnn.build(net, method, num_data=10, **options)  # type: ignore[arg-type]


def one_by_one(model: lpbnn.UncertainModel, *inputs: Tensor) -> Tensor:
    """The members' outputs by ordinary networks that carry their weights."""
    sampled = model.sample()
    return torch.stack([ordinary(model, sampled, j)(*inputs) for j in range(model.members)])


@pytest.mark.parametrize(
    ("net", "inputs"),
    [(Siamese, pair()), (Graph, (torch.randn(8, 5), ring(8))), (BatchLast, (torch.randn(5, 8),))],
)
def test_a_network_that_mixes_rows_gives_every_members_own_answer(
    net: type[nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    model = build(net(), "batchensemble").eval()
    with pytest.warns(UserWarning, match=MIXES), torch.no_grad():
        found = model(*inputs)
    torch.testing.assert_close(found, one_by_one(model, *inputs))


@pytest.mark.parametrize("method", BATCHED_METHODS)
def test_a_siamese_network_predicts_the_same_in_portions(method: str) -> None:
    model, x = build(Siamese(), method), pair()
    with pytest.warns(UserWarning, match=MIXES):
        whole = lpbnn.predict(model, x, seed=0)
    parts = lpbnn.predict(model, x, seed=0, chunk=3)
    torch.testing.assert_close(whole.probs, parts.probs)


@pytest.mark.parametrize("method", RANK_ONE)
def test_portions_of_a_graph_are_refused(method: str) -> None:
    model, x = build(Graph(), method), (torch.randn(8, 5), ring(8))
    with pytest.warns(UserWarning, match=MIXES):
        lpbnn.predict(model, x)
    with pytest.raises(ValueError, match="depends on the other examples"):
        lpbnn.predict(model, x, chunk=3)


def test_portions_of_a_graph_are_refused_for_one_network_too() -> None:
    with pytest.raises(ValueError, match="depends on the other examples"):
        lpbnn.predict(build(Graph(), "mcp"), (torch.randn(8, 5), ring(8)), chunk=3)


def test_a_graph_trains_every_member_on_the_whole_batch() -> None:
    model, nodes, y = build(Graph(), "batchensemble"), torch.randn(8, 5), torch.randint(0, 3, (8,))
    with pytest.warns(UserWarning, match="depends on the other examples"):
        loss = model.loss((nodes, ring(8)), y)["nll"]
    outputs = one_by_one(model, nodes, ring(8))
    each = [nn.functional.cross_entropy(output, y) for output in outputs]
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_a_siamese_network_still_trains_on_slices() -> None:
    """Its rows are independent: member j sees its own quarter of the batch."""
    model, (one, other), y = build(Siamese(), "batchensemble"), pair(), torch.randint(0, 3, (8,))
    with pytest.warns(UserWarning, match=MIXES):
        loss = model.loss((one, other), y)["nll"]
    sampled, each = model.sample(), []
    for j in range(4):
        part = slice(2 * j, 2 * j + 2)
        output = ordinary(model, sampled, j)(one[part], other[part])
        each.append(nn.functional.cross_entropy(output, y[part]))
    torch.testing.assert_close(loss, torch.stack(each).mean())


class ByKeyword(Recurrent):
    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return self.head(self.rnn(input=x, hx=state)[0][-1])


@pytest.mark.parametrize("net", [Recurrent, ByKeyword])
@pytest.mark.parametrize("time", [2, 8])
@pytest.mark.parametrize("method", RANK_ONE)
def test_a_time_first_recurrent_layer_is_refused_by_name(
    method: str, time: int, net: type[Recurrent]
) -> None:
    model = build(net(batch_first=False), method, exclude="rnn")
    with pytest.raises(ValueError, match="'rnn' is a LSTM with batch_first=False"):
        lpbnn.predict(model, torch.randn(time, 8, 5))


def test_a_time_first_layer_between_transposes_is_right() -> None:
    model = build(Transposing(), "batchensemble", exclude="rnn").eval()
    x = torch.randn(8, 4, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), one_by_one(model, x))


@pytest.mark.filterwarnings("ignore:The output of an example depends")
@pytest.mark.parametrize("batch", [1, 8])
def test_an_initial_state_of_a_recurrent_layer_is_right(batch: int) -> None:
    model = build(Recurrent(True, nn.GRU), "batchensemble", exclude="rnn").eval()
    x, state = torch.randn(batch, 4, 5), torch.randn(1, batch, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x, state), one_by_one(model, x, state))


def test_mixing_in_training_alone_is_found_by_a_prediction() -> None:
    model = build(MixesInTraining()).eval()
    with pytest.warns(UserWarning, match="in training mode"):
        lpbnn.predict(model, torch.randn(8, 5))


def test_functional_dropout_is_not_taken_for_mixing() -> None:
    model = build(RandomInTraining())
    model.loss(torch.randn(8, 5), torch.randint(0, 3, (8,)))
    assert model.execution == "batched"
    assert "random in training mode" in str(lpbnn.check(model, torch.randn(8, 5)))


def test_a_difference_behind_a_layer_of_zeros_is_found() -> None:
    model = build(ZeroHead())
    with pytest.warns(UserWarning, match="the input of '3' differs"):
        model(torch.randn(8, 5))


def test_the_warning_names_the_first_layer_that_differs() -> None:
    model = build(Siamese())
    with pytest.warns(UserWarning, match="the input of 'encoder.0' differs for member 0"):
        model(*pair())


@pytest.mark.parametrize("method", BATCHED_METHODS)
@pytest.mark.parametrize("net", [Mlp, ResNet, Vit])
def test_ordinary_networks_run_as_rows(method: str, net: type[nn.Module]) -> None:
    model = build(net(), method)
    report = lpbnn.check(model, torch.randn(4, *net.shape))
    assert report.ok
    assert report.execution == model.execution == "batched"


@pytest.mark.parametrize("method", ["mcp", "ensemble", "meanfield", "edl", "tradi"])
def test_methods_that_run_whole_networks_say_so(method: str) -> None:
    report = lpbnn.check(build(Mlp(), method), torch.randn(4, 5))
    assert report.execution == "single"
    assert "whole networks" in str(report)


def test_a_report_says_what_was_compared() -> None:
    report = lpbnn.check(build(Mlp()), torch.randn(4, 5))
    assert isinstance(report, CheckReport)
    assert str(report).startswith("2 members of 3 examples: rows of one batch equal members that")


def test_layers_before_a_converted_part_run_once_per_example() -> None:
    net = SecondLayerOnly()
    model = build(net, include=["blocks.1.*", "head"])
    model(torch.randn(6, 5))
    assert model.expand_at == ["blocks.1", "head"]
    for block in net.blocks:
        block[0].rows = 0
    model(torch.randn(6, 5))
    assert [block[0].rows for block in net.blocks] == [6, 6 * 4, 6 * 4]


def test_a_skip_around_the_deepest_part_expands_the_batch_earlier() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(torch.tanh(self.one(x)))

    net = nn.Sequential(nn.Linear(5, 5), Block(), nn.Linear(5, 3))
    model = build(net, "batchensemble", include="1.two").eval()
    x = torch.randn(6, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), one_by_one(model, x))
    assert model.expand_at == ["1"]


def test_the_check_leaves_no_trace() -> None:
    model, twin = (build(settle(ResNet())) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    twin.check_first_batch = False
    x, y = torch.randn(8, *ResNet.shape), torch.randint(0, 3, (8,))
    losses = []
    for each in (model, twin):
        torch.manual_seed(0)
        losses.append(each.train().loss(x, y)["loss"])
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]


def test_the_check_runs_once_and_on_few_rows() -> None:
    net = nn.Sequential(nn.Linear(5, 6), Counting(), nn.Linear(6, 3))
    model = build(net)
    model(torch.randn(100, 5))
    assert sum(net[1].calls[:-1]) < 100
    net[1].calls.clear()
    model(torch.randn(100, 5))
    assert net[1].calls == [400]


def test_an_error_of_the_network_is_shown_once() -> None:
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        build(nn.Linear(5, 3)).loss(torch.randn(8, 5).double(), torch.zeros(8).long())
    assert caught.value.__context__ is None


@pytest.mark.parametrize("method", BATCHED_METHODS)
def test_a_model_of_a_methods_own_build_is_compared_too(method: str) -> None:
    module = methods.load(method)
    model = module.build(Siamese(), module.Config(members=2, num_data=10))
    with pytest.warns(UserWarning, match=MIXES):
        model(*pair())


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("method", BATCHED_METHODS)
def test_the_draws_of_the_first_prediction_are_those_of_the_next(
    method: str, chunk: int | None
) -> None:
    model, x = build(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), method), pair()[0]
    options = {"samples": 3, "seed": 0, "chunk": chunk, "keep_members": True}
    first, state = lpbnn.predict(model, x, **options), torch.get_rng_state()
    torch.testing.assert_close(first.members, lpbnn.predict(model, x, **options).members)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_check_nothing_is_compared() -> None:
    net = nn.Sequential(nn.Linear(5, 6), Counting(), nn.Linear(6, 3))
    model = build(net, check=False)
    model(torch.randn(10, 5))
    assert net[1].calls == [40]
    assert model.execution == "unchecked"


@pytest.fixture
def looping() -> lpbnn.UncertainModel:
    model = build(Siamese())
    with pytest.warns(UserWarning, match=MIXES):
        model(*pair())
    return model


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy", "freeze"])
def test_the_result_is_remembered(way: str, looping: lpbnn.UncertainModel) -> None:
    if way == "state_dict":
        other = build(Siamese())
        other.load_state_dict(looping.state_dict())
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(looping))
    else:
        other = copy.deepcopy(looping) if way == "deepcopy" else lpbnn.freeze(looping)
    assert other.execution == "loop"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(*pair())


def test_the_expansion_points_are_remembered_with_the_weights() -> None:
    model = build(SecondLayerOnly(), include=["blocks.1.*", "head"])
    model(torch.randn(6, 5))
    other = build(SecondLayerOnly(), include=["blocks.1.*", "head"])
    other.load_state_dict(model.state_dict())
    assert other.expand_at == ["blocks.1", "head"]


def test_a_shared_encoder_is_compared_too() -> None:
    model = build(EncoderDecoder(), include="decoder", task="segmentation")
    report = lpbnn.check(model, torch.randn(3, 3, 4, 4))
    assert (report.execution, report.expand_at) == ("batched", ["decoder"])


def test_a_compiled_model_is_compared_with_the_reference() -> None:
    model = build(Mlp()).eval()
    compiled = torch.compile(model, backend="eager")
    assert "compiled model equals the reference" in str(lpbnn.check(compiled, torch.randn(4, 5)))


def test_a_plain_network_is_refused() -> None:
    with pytest.raises(
        TypeError, match="a model that lpbnn.build or lpbnn.freeze returned; got Mlp"
    ):
        lpbnn.check(Mlp(), torch.randn(4, 5))


@pytest.mark.parametrize("method", RANK_ONE)
def test_threads_share_a_model_in_evaluation_mode(method: str) -> None:
    """Frozen members answer the same whatever other threads run at the same time."""
    model = lpbnn.freeze(build(Mlp(), method))
    x = torch.randn(8, 5)
    expected, wrong = lpbnn.predict(model, x).probs, []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(portion: int) -> None:
        for _ in range(30):
            found = lpbnn.predict(model, x, chunk=portion).probs
            if not torch.allclose(found, expected, atol=1e-6):
                wrong.append(portion)

    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in (3, 8, 20, 64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.parametrize("warm_up", [torch.zeros(4, 5), torch.ones(1, 5)])
def test_equal_examples_do_not_hide_that_rows_depend_on_each_other(warm_up: Tensor) -> None:
    class Centred(MixesInTraining):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.tanh(h - h.mean(0)))

    model = build(Centred(), "mcp")
    lpbnn.predict(model, warm_up)
    with pytest.raises(ValueError, match="depends on the other examples"):
        lpbnn.predict(model, torch.randn(8, 5), chunk=3)


def test_an_infinite_output_hides_no_difference() -> None:
    class Masked(MixesInTraining):
        def forward(self, x: Tensor) -> Tensor:
            y = self.last(self.first(x))
            y = y - y.mean(0)
            return y.masked_fill(torch.tensor([False, False, True]), -torch.inf)

    with pytest.warns(UserWarning, match=MIXES):
        build(Masked())(torch.randn(8, 5))


def test_an_input_of_three_numbers_is_not_taken_for_three_examples() -> None:
    class WithMeans(MixesInTraining):
        def forward(self, x: Tensor, means: Tensor) -> Tensor:  # type: ignore[override]
            return self.last(torch.tanh(self.first(x))) - means

    model = build(WithMeans())
    model(torch.randn(8, 5), torch.randn(3))
    assert model.execution == "batched"
    assert next(iter(model.checks.values())).independent_rows


@pytest.mark.parametrize("first", [1, 2, 3, 8])
def test_a_norm_per_member_stays_behind_the_expanded_batch(first: int) -> None:
    decoder = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    net = nn.ModuleDict({"encoder": nn.Linear(5, 6), "decoder": decoder})
    net.forward = lambda x: decoder(net["encoder"](x))  # type: ignore[method-assign]
    model = build(
        net, "batchensemble", include=["decoder.1", "decoder.3"], batch_norm="member"
    ).eval()
    with torch.no_grad():
        model(torch.randn(first, 5))
        for norm in model.modules():
            if type(norm) is nn.BatchNorm1d:
                norm.running_mean.normal_()
        x = torch.randn(8, 5)
        rows = model.run_rows(model.sample(), model.call((x,), {}))
        alone = model.run_one_by_one(model.sample(), model.call((x,), {}))
    torch.testing.assert_close(rows, alone)


def test_a_failed_build_leaves_the_network_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    net.expand_at = ("nowhere",)
    with pytest.raises(ValueError, match="expand_at"):
        build(net, include="1")
    assert [type(layer) for layer in net] == [nn.Linear, nn.Linear]


def test_a_given_expansion_point_outlives_loaded_weights() -> None:
    model = build(SecondLayerOnly(), include=["blocks.1.*", "head"])
    model(torch.randn(6, 5))
    other = build(SecondLayerOnly(), include=["blocks.1.*", "head"], expand_at="")
    other.load_state_dict(model.state_dict())
    assert other.expand_at == [""]


def test_a_compiled_loop_gives_every_member_its_own_factors() -> None:
    model = build(Siamese()).train()
    x, y = pair(), torch.randint(0, 3, (8,))
    with pytest.warns(UserWarning, match=MIXES):
        model.loss(x, y)
    model.noise_scale.zero_()
    compiled = torch.compile(model.loss, backend="eager")
    torch.testing.assert_close(compiled(x, y)["nll"], model.loss(x, y)["nll"])


def test_threads_that_share_the_first_batch_find_the_same() -> None:
    for _ in range(5):
        model, x, found = build(Mlp()).eval(), torch.randn(8, 5), []
        threads = [
            threading.Thread(target=lambda: found.append(lpbnn.predict(model, x)))  # noqa: B023
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        assert [check[:2] for check in model.checks.values()] == [("batched", True)]


@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["hook", "new"]
)
def test_a_spectral_norm_is_not_taken_for_mixing(norm: Any) -> None:
    """It moves its estimate in every run of training mode: every run starts from the same one."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10)
    report = lpbnn.check(model, torch.randn(7, 6))
    assert report.ok
    assert report.result.independent_rows
    assert "training mode." in report.lines[0]


class Sequence(nn.Module):
    """The rows are one sequence: a row depends on those before it, and on none behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).cumsum(0))


@pytest.mark.parametrize("method", ["batchensemble", "mcp"])
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_rows_that_depend_on_earlier_rows_are_not_cut(method: str) -> None:
    model, x = lpbnn.build(Sequence(), method), torch.randn(6, 5)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, x, chunk=2)
    assert model.train().loss(x, torch.randint(3, (6,)))["loss"].isfinite()


class TimeFirst(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).mean(0))


@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_a_loss_takes_a_target_per_example_where_time_is_first() -> None:
    model = lpbnn.build(TimeFirst(), "batchensemble", members=2).train()
    x, y = torch.randn(7, 4, 5), torch.randint(3, (4,))
    loss = model.loss(x, y)["nll"]
    outputs = torch.stack(list(model.eval()(x)))
    each = [nn.functional.cross_entropy(own, y) for own in outputs]
    torch.testing.assert_close(loss, torch.stack(each).mean())


@pytest.mark.parametrize("include", [None, "head"])
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_one_edge_of_a_graph_is_enough(include: str | None) -> None:
    for edge in ([2, 0], [0, 1], [1, 2], [3, 4], [5, 3]):
        model = lpbnn.build(Graph(), "batchensemble", include=include)
        call = (torch.randn(6, 5), torch.tensor(edge).unsqueeze(1))
        assert lpbnn.check(model, call).result.independent_rows is False, edge


class RandomMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.body(x), 0.5, self.training)
        return self.head(x - x.mean(0) if self.training else x)


def test_mixing_is_found_in_a_network_that_is_random_in_training() -> None:
    model = lpbnn.build(RandomMixing(), "batchensemble", members=3)
    with pytest.warns(UserWarning, match="examples depend on each other where the network is ra"):
        model.train().loss(torch.randn(6, 5), torch.randint(3, (6,)))
    assert model.execution == "loop"
    assert next(iter(model.checks.values())).independent_rows is False


class Vmapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


def test_a_network_that_maps_over_its_examples_runs_members_one_by_one() -> None:
    model = lpbnn.build(Vmapped(), "batchensemble", members=3).eval()
    x = torch.randn(4, 5)
    with pytest.warns(UserWarning, match=MIXES):
        found = model(x)
    sampled = model.sample()
    alone = torch.stack([ordinary(model, sampled, j)(x) for j in range(3)])
    torch.testing.assert_close(found, alone)


@pytest.mark.filterwarnings("ignore:members cannot run as rows")
@pytest.mark.parametrize("method", RANK_ONE)
def test_a_first_input_without_a_batch_does_not_slow_down_the_next_one(method: str) -> None:
    model, x = build(Mlp(), method).eval(), torch.randn(8, 5)
    with contextlib.suppress(ValueError, RuntimeError):
        lpbnn.predict(model, x[0])
    whole = lpbnn.predict(model, x, seed=0)
    assert model.call((x,), {}).check[:2] == ("batched", True)
    torch.testing.assert_close(lpbnn.predict(model, x, seed=0, chunk=5).probs, whole.probs)


@pytest.mark.parametrize("method", RANK_ONE)
def test_a_refused_first_input_leaves_nothing_behind(method: str) -> None:
    """An input without a batch axis: the reference takes it, rows of members do not."""
    model, x = build(Mlp(), method), torch.randn(8, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (model, model.eval(), lambda bad: lpbnn.predict(model, bad)):
            with pytest.raises(ValueError, match="needs outputs"):
                call(x[0])
        assert model.execution == "unchecked"
        lpbnn.predict(model, x)
        assert model.execution == "batched"


class MixesPairs(Mlp):
    """Rows meet only if a second view is given."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if other is None:
            return y
        both = torch.cat([y, super().forward(other)])
        return both[: len(y)] - both.mean(0)


@pytest.mark.parametrize("method", RANK_ONE)
def test_every_kind_of_call_is_compared(method: str) -> None:
    model, (x, other) = build(MixesPairs(), method).eval(), (torch.randn(8, 5), torch.randn(8, 5))
    model(x)
    with pytest.warns(UserWarning, match=MIXES):
        found = lpbnn.predict(model, (x, other), seed=0).probs
    assert model.execution == "loop"
    assert model.call((x,), {}).check.execution == "batched"
    reference = build(MixesPairs(), method, check=False).eval()
    reference.load_state_dict(model.state_dict())
    reference.checks = {"": CallCheck("loop", False)}
    torch.testing.assert_close(found, lpbnn.predict(reference, (x, other), seed=0).probs)


def test_a_string_that_chooses_the_way_through_a_network_is_another_kind_of_call() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            h = self.a(x).tanh()
            return self.head(h + h.flip(0) if mode == "mix" else h)

    model, x = build(Modes(), "batchensemble").eval(), torch.randn(8, 5)
    model(x, mode="plain")
    with pytest.warns(UserWarning, match=MIXES):
        model(x, mode="mix")
    assert model.call((x,), {"mode": "plain"}).check.execution == "batched"
    assert model.call((x,), {"mode": "mix"}).check.execution == "loop"


def test_a_key_that_chooses_the_way_through_a_network_is_another_kind_of_call() -> None:
    class Extras(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(5, 6), nn.Linear(5, 3)

        def forward(self, x: Tensor, extras: dict[str, Tensor]) -> Tensor:
            if "scores" in extras:  # of 5 classes, for every example
                return self.head(x) + extras["scores"][:, :3]
            table = self.a(extras["table"])
            return self.head((self.a(x) @ table.T).softmax(-1) @ extras["table"])

    model, x, table = build(Extras(), "batchensemble").eval(), torch.randn(8, 5), torch.randn(4, 5)
    with pytest.warns(UserWarning, match=MIXES):
        model(x, {"table": table})
    model(x, {"scores": table.repeat(2, 1)})
    assert model.call((x, {"table": table}), {}).check.execution == "loop"
    assert model.call((x, {"scores": x}), {}).check.execution == "batched"


class Gated(Mlp):
    """Adds the mean of the batch through a gate that is closed at first, or nearly."""

    def __init__(self, gate: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.gate * x.mean(0)


def nearly_closed() -> nn.Module:
    return Gated(1e-5)


def scheduled() -> nn.Module:
    """A gate that a schedule opens, beside a sparse buffer."""
    net = Gated()
    del net.gate
    net.register_buffer("gate", torch.zeros(()))
    net.register_buffer("adjacency", torch.eye(3).to_sparse())
    return net


class Centred(Mlp):
    """Subtracts the mean of the batch behind a last layer that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        for tensor in list(self.parameters())[-2:]:
            nn.init.zeros_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(0)


class Numbered(Mlp):
    """Adds the number of an example in its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(len(x)).unsqueeze(1)


class Divided(Mlp):
    """Divides by the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(x)


class LargeBatches(Mlp):
    """Mixes the examples of a batch, if there are more than four."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(0) if len(x) > 4 else x


class Scaled(Mlp):
    """Takes a number beside the examples."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * super().forward(x)


@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "mcp", "ensemble", "mimo"])
def test_a_number_beside_the_examples_is_neither_compared_nor_cut(method: str) -> None:
    model, inputs = build(Scaled(), method), (torch.randn(7, 5), torch.tensor(2.0))
    found = lpbnn.predict(model, inputs, chunk=2, seed=0)
    torch.testing.assert_close(found.probs, lpbnn.predict(model, inputs, seed=0).probs)
    assert model.call(inputs, {}).check.independent_rows


class AddsNoise(Mlp):
    """Draws for every example, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.rand(len(x), 1)


class AlwaysDropsOut(Mlp):
    """The same by an operation that takes no generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=True))


@pytest.mark.parametrize("net", [AddsNoise, AlwaysDropsOut])
@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "mcp", "ensemble", "meanfield"])
def test_a_network_that_draws_for_every_example_is_not_taken_for_mixing(
    method: str, net: type[nn.Module]
) -> None:
    model, x = lpbnn.build(net(), method, num_data=10), torch.randn(7, 5)
    assert lpbnn.predict(model, x, chunk=2).probs.shape == (7, 3)
    assert next(iter(model.checks.values())).independent_rows


@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "mcp", "ensemble", "meanfield"])
@pytest.mark.parametrize(
    "net", [Gated, nearly_closed, scheduled, Centred, Numbered, Divided, LargeBatches]
)
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_examples_that_depend_on_their_batch_are_not_taken_out_of_it(
    method: str, net: Callable[[], nn.Module]
) -> None:
    model, x = lpbnn.build(net(), method, num_data=10), torch.randn(7, 5)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, x, chunk=2)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_weights_of_zero_are_zero_again_after_the_check(inference: bool) -> None:
    net = Gated()
    model, x = build(net), torch.randn(6, 5)
    kept = net.gate.data_ptr(), net.gate._version
    with torch.inference_mode(inference):
        model.eval()(x)
    assert model.execution == "loop"
    assert net.gate.item() == 0
    assert (net.gate.data_ptr(), net.gate._version) == kept


@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_a_check_between_a_loss_and_its_backward_pass_changes_no_gradient() -> None:
    net = Gated()
    model = lpbnn.build(net, "batchensemble")
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    model.train().loss(x, y)["loss"].backward()
    expected, net.gate.grad = net.gate.grad, None
    loss = model.loss(x, y)["loss"]
    lpbnn.check(model, x)
    loss.backward()
    assert torch.equal(net.gate.grad, expected)


class Pooled(Mlp):
    """One answer for all examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0, keepdim=True)


@pytest.mark.parametrize("method", ["batchensemble", "mcp"])
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_one_answer_for_all_examples_is_not_taken_apart(method: str) -> None:
    model, x = lpbnn.build(Pooled(), method), torch.randn(7, 5)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, x, chunk=2)
    assert lpbnn.predict(model, x).probs.shape == (1, 3)


@pytest.mark.parametrize("method", methods.names())
def test_a_loss_agrees_with_itself_as_a_compiled_one(method: str) -> None:
    model = lpbnn.build(ResNet(), method, num_data=100).train()
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 3
    model.loss(x, y)  # which compares members as rows
    before = copy.deepcopy(model.state_dict())
    assert compiled_loss_agrees(model, model.loss, x, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_masks_of_a_compiled_mc_dropout_are_not_compared() -> None:
    model = lpbnn.build(Mlp(), "mcdropout").eval()
    compiled = torch.compile(model, backend="eager")
    assert "was not compared" in str(lpbnn.check(compiled, torch.randn(4, 5)))


class AsksForTypes(nn.Module):
    """Adds a skip around every linear layer, found by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x + y if isinstance(layer, nn.Linear) and i == 2 else y
        return x


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("method", [*BATCHED_METHODS, "abnn", "meanfield", "mimo"])
def test_a_network_that_asks_for_the_type_of_a_layer_is_refused(method: str, members: int) -> None:
    last = {"last": "layers.2"} if method == "mimo" else {}
    net = AsksForTypes()
    if last:
        net.layers = net.layers[:3]
    model, x = build(net, method, members=members, **last), torch.randn(8, 5)
    for _ in range(2):  # not only once
        with pytest.raises(ValueError, match="'layers.2' was converted"):
            lpbnn.predict(model, x)
    model.train()
    with pytest.raises(ValueError, match="'layers.2' was converted"):
        model.loss(x, torch.zeros(8, dtype=torch.int64))


def test_hooks_on_a_converted_layer_are_not_taken_for_a_question_about_its_type() -> None:
    net = Mlp()
    net[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    net[0].register_forward_hook(lambda module, args, output: output + 1)
    model = build(net, "batchensemble")
    net[0].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    net[2].register_forward_hook(lambda module, args, output: 3 * output)
    before = [dict(m.__dict__["_forward_pre_hooks"]) for m in model.modules()]
    lpbnn.predict(model, torch.randn(8, 5))
    assert model.execution == "batched"
    assert before == [dict(m.__dict__["_forward_pre_hooks"]) for m in model.modules()]


class EveryThird(Mlp):
    """Rows differ by their place, and agree in batches of three."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.arange(len(x)).unsqueeze(1) % 3)


@pytest.mark.parametrize("method", BATCHED_METHODS)
def test_rows_that_agree_in_batches_of_one_size_alone_are_found(method: str) -> None:
    model, x = build(EveryThird(), method).eval(), torch.randn(8, 5)
    with pytest.warns(UserWarning, match=MIXES):
        lpbnn.predict(model, x)
    assert model.execution == "loop"


class Sorted(Mlp):
    """Returns its examples in the order of their sums."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1).argsort()])


@pytest.mark.parametrize("method", RANK_ONE)
def test_a_first_batch_of_one_example_does_not_hide_that_rows_change_places(method: str) -> None:
    model, x = build(Sorted(), method).eval(), torch.randn(8, 5)
    with pytest.warns(UserWarning, match=MIXES):
        lpbnn.predict(model, x[:1])
    assert model.execution == "loop"


class ByTwos(Mlp):
    """Rows of a group of two are combined: batches of even sizes agree."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([rows + rows.mean(0) for rows in y.split(2)])


@pytest.mark.parametrize("method", RANK_ONE)
def test_rows_that_agree_in_batches_of_even_sizes_alone_are_found(method: str) -> None:
    model, x = build(ByTwos(), method).eval(), torch.randn(9, 5)
    with pytest.warns(UserWarning, match=MIXES):
        lpbnn.predict(model, x[:3])  # of which two rows are compared
    assert model.execution == "loop"


class ShiftsByTwo(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, :3].roll(2, 0)


@pytest.mark.parametrize("method", ["mcp", "batchensemble"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_that_come_from_the_second_next_place_are_not_cut(method: str) -> None:
    model, x = build(ShiftsByTwo(), method).eval(), torch.randn(9, 5)
    for rows in (3, 9):
        with pytest.raises(ValueError, match="cannot be taken apart"):
            lpbnn.predict(model, x[:rows], chunk=2)


class SeveralRows(Mlp):
    """Adds what belongs to each example in a tensor with several rows for it."""

    def forward(self, x: Tensor, parts: Tensor) -> Tensor:
        return super().forward(x) + parts.view(len(x), -1, 3).sum(1)


@pytest.mark.parametrize("method", ["mcp", "batchensemble", "ensemble"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_input_with_several_rows_for_each_example_is_not_cut(method: str) -> None:
    model, x, parts = build(SeveralRows(), method).eval(), torch.randn(8, 5), torch.randn(16, 3)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, (x, parts), chunk=4)


class Waves(nn.Module):
    """Complex examples, from which the mean of the batch is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.view_as_real(z - z.mean(0)).flatten(1))))


@pytest.mark.parametrize("method", ["mcp", "batchensemble", "mcdropout"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_first_batch_of_one_complex_example_does_not_hide_a_mean(method: str) -> None:
    model, z = build(Waves(), method).eval(), torch.randn(8, 2, dtype=torch.complex64)
    lpbnn.predict(model, z[:1])
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, z, chunk=4)
    z[3, 1] = float("nan")
    with pytest.raises(ValueError, match="inputs of 1 of 8 examples are NaN"):
        lpbnn.predict(model, z)


class MixesThenDrops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(5, 2), nn.Dropout(0.9), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x - x.mean(0))))


def test_dropout_hides_no_mean_of_the_batch() -> None:
    """At a rate of 0.9 the masks of a comparison would leave nothing of two numbers."""
    model, x = build(MixesThenDrops(), "mcdropout").eval(), torch.randn(8, 5)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, x, chunk=4)
