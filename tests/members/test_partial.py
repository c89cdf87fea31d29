"""Partial conversion: the unconverted part runs once, and the members share it exactly."""

import copy
import gc
import importlib
import weakref
from collections.abc import Callable

import pytest
import torch
from memory import PeakMemory
from networks import Decoder, EncoderDecoder, Mlp, ResNet, members_and_ordinary, settle
from torch import nn

import lpbnn

PARTIAL = {
    "decoder": (EncoderDecoder, (3, 5, 5), {"include": "decoder.*"}, ["decoder"]),
    "list in it": (
        EncoderDecoder,
        (3, 5, 5),
        {"include": "decoder.out.*"},
        ["decoder.out.0", "decoder.out.1"],
    ),
    "last layer": (ResNet, (3, 8, 8), {"include": "head"}, ["head"]),
    "last stages": (ResNet, (3, 8, 8), {"include": ["stage2.*", "head"]}, ["stage2", "head"]),
    "sequential": (Mlp, (5,), {"exclude": "0"}, ["2", "4"]),
    "chosen": (ResNet, (3, 8, 8), {"include": "head", "expand_at": "stage2"}, ["stage2"]),
}


@pytest.mark.parametrize("case", PARTIAL)
def test_partial_conversion_equals_the_computation_with_the_whole_network_expanded(
    case: str,
) -> None:
    make, shape, options, points = PARTIAL[case]
    net = settle(make()).double()
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, **options).eval()
    x = torch.randn(4, *shape, dtype=torch.float64)
    together, alone = members_and_ordinary(model, x)
    torch.testing.assert_close(together, alone)
    assert model.expand_at == points
    torch.manual_seed(7)
    partly = model(x)
    model.use_expansion_points([""])
    torch.manual_seed(7)
    torch.testing.assert_close(partly, model(x), rtol=0, atol=1e-14)


def test_the_unconverted_part_runs_once_per_example() -> None:
    net = EncoderDecoder()
    options = {"members": 4, "num_data": 10, "include": "decoder", "check": False}
    model = lpbnn.build(net, "lpbnn", **options).eval()
    model(torch.randn(2, 3, 5, 5))
    assert (net.encoder[2].rows, net.decoder.count.rows) == (2, 8)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_partial_conversion_trains_by_split(size: int) -> None:
    net = EncoderDecoder()
    options = {"members": 4, "num_data": 10, "include": "decoder", "check": False}
    model = lpbnn.build(net, "lpbnn", **options).train()
    model.loss(torch.randn(size, 3, 5, 5), torch.randint(3, (size, 5, 5)))["loss"].backward()
    assert (net.encoder[2].rows, net.decoder.count.rows) == (size, 4)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


class Around(nn.Module):
    """A tensor goes around the converted layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return x + self.b(x)


def test_a_tensor_around_the_expansion_point_is_found_by_the_check() -> None:
    model = lpbnn.build(Around().double(), "batchensemble", include="b").double()
    assert model.expand_at == ["b"]
    together, alone = members_and_ordinary(model, torch.randn(3, 4).double())
    assert model.expand_at == [""]
    torch.testing.assert_close(together, alone)


def test_a_tensor_around_the_expansion_point_is_explained_without_a_check() -> None:
    model = lpbnn.build(Around(), "batchensemble", include="b", check=False)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, 4))
    assert "expands the batch to the members at ['b']" in str(caught.value)  # logs drop notes
    assert "build(..., expand_at='') for the whole network" in str(caught.value)
    assert "must match" in str(caught.value)  # torch's own words
    assert type(caught.value.__cause__) is RuntimeError
    model = lpbnn.build(Around(), "batchensemble", include="b", expand_at="")
    assert model(torch.randn(3, 4)).shape == (4, 3, 4)


@pytest.mark.parametrize("names", ["decoder", ("encoder", "decodr"), 3])
def test_expansion_points_that_a_module_names_must_exist(names: object) -> None:
    net = EncoderDecoder()
    net.expand_at = names
    with pytest.raises(ValueError, match="EncoderDecoder has expand_at = .*expected the names of"):
        lpbnn.build(net, "batchensemble", include="decoder")


def test_named_points_that_leave_out_a_converted_layer_are_not_used() -> None:
    net = EncoderDecoder()
    net.decoder.expand_at = ("count", "mix")
    model = lpbnn.build(net, "batchensemble", include="decoder.*")
    assert model.expand_at == ["decoder"]


@pytest.mark.parametrize("check", [True, False])
def test_an_error_of_a_special_kind_keeps_its_type(check: bool) -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")

    model = lpbnn.build(Full(), "batchensemble", include="b", check=check)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.randn(3, 4))
    assert str(caught.value) == "out of memory"
    if not check:
        assert "expands the batch to the members at ['b']" in caught.value.__notes__[0]


def test_several_expansion_points_may_be_named() -> None:
    torch.manual_seed(0)
    net, x = ResNet().eval(), torch.randn(3, 3, 8, 8)
    options = {"members": 3, "include": ["stage2", "head"]}
    found = []
    for points in (["stage2", "head"], "stage2", ""):
        torch.manual_seed(1)
        made = lpbnn.build(copy.deepcopy(net), "batchensemble", expand_at=points, **options)
        found.append(made.eval()(x))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    with pytest.raises(ValueError, match="expand_at='haed' is no module.*mean 'head'"):
        lpbnn.build(net, "batchensemble", expand_at=["stage2", "haed"], **options)
    with pytest.raises(ValueError, match=r"expand_at=\[\] names no module"):
        lpbnn.build(net, "batchensemble", expand_at=[], **options)


class UNet(nn.Module):
    """A skip goes around every expansion point of a partial conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.e1, self.e2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.u1, self.out = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.e1(x))
        return self.out(torch.cat([self.u1(self.e2(skip)), skip], 1))


@pytest.mark.parametrize("batch", [4, 5])
def test_a_skip_around_the_expansion_points_is_found_or_refused_with_advice(batch: int) -> None:
    options = {"include": ["u*", "out"], "task": "segmentation", "num_data": 9}
    x, y = torch.randn(batch, 3, 2, 2), torch.zeros(batch, 2, 2, dtype=torch.int64)
    model = lpbnn.build(UNet(), "lpbnn", **options)
    assert lpbnn.predict(model, x).probs.shape == (batch, 3, 2, 2)
    assert (model.expand_at, model.execution) == ([""], "batched")
    model = lpbnn.build(UNet(), "lpbnn", check=False, **options)
    with pytest.raises(RuntimeError, match=r"(?s)Expected size .*build\(..., expand_at=''\)"):
        lpbnn.predict(model, x)
    helped = lpbnn.build(UNet(), "lpbnn", expand_at="", **options)
    assert helped.train().loss(x, y)["loss"].isfinite()
    assert lpbnn.predict(helped, x).probs.shape == (batch, 3, 2, 2)


def test_expand_at_must_exist() -> None:
    with pytest.raises(ValueError, match="expand_at='decodr' is no module"):
        lpbnn.build(EncoderDecoder(), "batchensemble", expand_at="decodr")


@pytest.mark.parametrize("batch_norm", ["shared", "member"])
@pytest.mark.parametrize("case", PARTIAL)
def test_members_one_by_one_answer_as_members_together(
    case: str, batch_norm: str, fill_device: Callable[[bool], None]
) -> None:
    make, shape, options, paths = PARTIAL[case]
    net = settle(make()).double()
    for path in paths:
        net.get_submodule(path).loop_members = True
    model = lpbnn.build(
        net, "lpbnn", members=3, num_data=10, batch_norm=batch_norm, **options
    ).double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    fill_device(False)
    together = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    fill_device(True)
    one_by_one = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    torch.testing.assert_close(one_by_one.members, together.members, rtol=0, atol=1e-14)
    again = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    assert torch.equal(again.members, one_by_one.members)


class Meeting(nn.Module):
    """A part that reads the rows of members beside examples that are not expanded yet."""

    loop_members = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, skip], 1))


class TwoParts(nn.Module):
    """Two parts that may both run one member at a time; a skip leads from the encoder to the second."""

    expand_at = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.second = nn.Linear(5, 4), Meeting()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.first.loop_members = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.encoder(x).tanh()
        return self.second(self.first(skip), skip)


def test_a_part_behind_another_gives_each_member_its_own_rows(
    fill_device: Callable[[bool], None],
) -> None:
    options = {"members": 3, "include": ["first", "second"]}
    model, x = lpbnn.build(TwoParts(), "batchensemble", **options).double(), torch.randn(2, 5)
    fill_device(False)
    together = lpbnn.predict(model, x.double()).members
    assert model.expand_at == ["first", "second"]
    fill_device(True)
    one_by_one = lpbnn.predict(model, x.double()).members
    torch.testing.assert_close(one_by_one, together, rtol=0, atol=1e-14)


def test_the_shared_part_runs_once_if_members_run_one_by_one(
    fill_device: Callable[[bool], None],
) -> None:
    fill_device(True)
    net = EncoderDecoder()
    options = {"members": 4, "num_data": 10, "include": "decoder", "check": False}
    model = lpbnn.build(net, "lpbnn", **options)
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    assert net.encoder[2].rows == 2
    assert net.decoder.count.calls == [2, 2, 2, 2]  # one member's rows at a time


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_shared_part_runs_once_for_all_samples(
    one_by_one: bool, fill_device: Callable[[bool], None]
) -> None:
    fill_device(one_by_one)
    net = EncoderDecoder()
    options = {"members": 3, "num_data": 10, "include": "decoder", "check": False}
    model = lpbnn.build(net, "lpbnn", **options).double()
    x = torch.randn(2, 3, 5, 5).double()
    once = lpbnn.predict(model, x, samples=4, seed=2)
    assert net.encoder[2].rows == 2
    assert net.decoder.count.calls == ([2] * 12 if one_by_one else [6] * 4)
    again = lpbnn.predict(model, x, samples=4, seed=2, chunk=3)
    torch.testing.assert_close(again.members, once.members, rtol=0, atol=1e-14)
    net.encoder[2].rows = 0
    lpbnn.predict(model, x, samples=20)
    assert (
        net.encoder[2].rows == 2 * 4
    )  # 60 members, 15 for each pass: memory does not grow with them


@pytest.mark.parametrize("batch_norm", [pytest.param("shared", marks=pytest.mark.slow), "member"])
def test_a_compiled_network_runs_its_members_one_by_one(
    batch_norm: str, fill_device: Callable[[bool], None]
) -> None:
    """Written out once, not compiled again for another sample; many members run a few at a time."""
    fill_device(True)
    net = settle(ResNet())
    net.stage2.loop_members = True
    model = lpbnn.build(
        net, "lpbnn", members=3, num_data=10, include="stage2.*", batch_norm=batch_norm
    )
    x = torch.randn(4, 3, 8, 8)
    expected = lpbnn.predict(model, x, seed=1).members
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model.net.compile(backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(lpbnn.predict(model, x, seed=1).members, expected)
    lpbnn.predict(model, x, seed=2)
    convolutions = [node for node in graphs[0].graph.nodes if "conv2d" in str(node.target)]
    assert len(graphs) == 1
    assert len(convolutions) == 1 + 2 + 3 * 3  # stem, stage1; three of stage2 for each member
    lpbnn.predict(model, x, samples=4, chunk=48)
    convolutions = [node for node in graphs[1].graph.nodes if "conv2d" in str(node.target)]
    assert len(convolutions) == 1 + 2 + 3 * 4  # twelve members: three at a time
    torch._dynamo.reset()


class Odd(Decoder):
    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": super().forward(features), "scale": torch.ones(())}


def test_a_users_hook_in_a_part_sees_all_members_together(
    fill_device: Callable[[bool], None],
) -> None:
    fill_device(True)
    net = EncoderDecoder()
    seen: list[int] = []
    net.decoder.out[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model = lpbnn.build(net, "batchensemble", members=3, include="decoder.mix", expand_at="decoder")
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    seen.clear()  # the check is over
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    assert seen == [6]


def test_a_broken_promise_is_refused_and_without_it_members_run_together(
    fill_device: Callable[[bool], None],
) -> None:
    fill_device(True)
    net = EncoderDecoder(Odd())
    model = lpbnn.build(net, "batchensemble", members=3, include="decoder", task="segmentation")
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(
        RuntimeError, match="Odd has loop_members = True and got 2 rows, but returned"
    ):
        lpbnn.predict(model, x)
    net.decoder.loop_members = False
    assert lpbnn.predict(model, x).members.shape == (3, 2, 3, 5, 5)


@pytest.mark.parametrize("member", [0, 2])
def test_a_part_that_raises_leaves_the_model_as_it_was(
    member: int, fill_device: Callable[[bool], None]
) -> None:
    fill_device(True)
    net = EncoderDecoder()
    model = lpbnn.build(net, "batchensemble", members=3, include="decoder")
    x = torch.randn(2, 3, 5, 5)
    before = lpbnn.predict(model, x).members
    calls = iter(range(3))

    def broken(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == member:
            raise RuntimeError("no memory left")
        return x

    net.decoder.count.forward = broken
    with pytest.raises(RuntimeError, match="no memory left"):
        lpbnn.predict(model, x)
    del net.decoder.count.forward
    assert torch.equal(lpbnn.predict(model, x).members, before)
    assert model.slot.get() is None


def test_memory_grows_by_the_outputs_of_a_member_and_not_by_its_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with street scenes: another member adds its logits, 3 channels, where its maps have 8."""
    monkeypatch.setattr(importlib.import_module("lpbnn.predict"), "AT_ONCE", 1)
    x = torch.randn(1, 3, 160, 160)
    peaks = []
    for members in (2, 6):
        model = lpbnn.build(
            EncoderDecoder(),
            "batchensemble",
            members=members,
            include="decoder",
            task="segmentation",
        )
        with PeakMemory() as meter:
            lpbnn.predict(model, x, keep_members=False)
        peaks.append(meter.peak)
    logits = 3 * 160 * 160 * 4
    assert peaks[1] - peaks[0] <= 4 * 2 * logits + 2**16  # once by the member, once joined


def test_undo_takes_every_hook_away() -> None:
    model = lpbnn.build(EncoderDecoder(), "batchensemble", include="decoder")
    net = lpbnn.undo(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
    assert net(torch.randn(2, 3, 5, 5)).shape == (2, 3, 5, 5)


@pytest.mark.parametrize("include", [None, "decoder"])
def test_a_models_memory_is_freed_with_its_last_reference(include: str | None) -> None:
    """It does not refer to itself: its memory is free at once, not when somebody collects garbage."""
    model = lpbnn.build(EncoderDecoder(), "lpbnn", num_data=10, include=include)
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    watched = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert watched() is None
    finally:
        gc.enable()


def test_a_model_that_compares_nothing_expands_at_the_outermost_module() -> None:
    """A tensor may go around the deepest one, and nobody would see it."""

    def net() -> nn.Module:
        part = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), part)

    blind = lpbnn.build(net(), "batchensemble", include="2.2", check=False)
    assert blind.expand_at == ["2"]
    model = lpbnn.build(net(), "batchensemble", include="2.2")
    lpbnn.check(model, torch.randn(3, 4))
    assert model.expand_at == ["2.2"]
