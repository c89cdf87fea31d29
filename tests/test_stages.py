"""Where a part of a network is converted: the rest runs once, and the members share it exactly."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from memory import PeakMemory
from networks import Decoder, EncoderDecoder, Mlp, ResNet, members_and_ordinary, settle
from torch import nn

import lpbnn
from lpbnn import prediction

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
def test_partial_conversion_equals_the_fully_spread_computation(case: str) -> None:
    make, shape, options, stages = PARTIAL[case]
    net = settle(make()).double()
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, **options).eval()
    assert model.expand_at == stages
    x = torch.randn(4, *shape, dtype=torch.float64)
    together, alone = members_and_ordinary(model, x)
    torch.testing.assert_close(together, alone)
    torch.manual_seed(7)
    partly = model(x)
    model.expand_at = [""]
    torch.manual_seed(7)
    torch.testing.assert_close(partly, model(x), rtol=0, atol=1e-14)


def test_the_unconverted_part_runs_once_per_example() -> None:
    net = EncoderDecoder()
    model = lpbnn.build(net, "lpbnn", members=4, num_data=10, include="decoder").eval()
    model(torch.randn(2, 3, 5, 5))
    assert (net.encoder[2].rows, net.decoder.count.rows) == (2, 8)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_partial_conversion_trains_by_split(size: int) -> None:
    net = EncoderDecoder()
    model = lpbnn.build(net, "lpbnn", members=4, num_data=10, include="decoder").train()
    model.loss(torch.randn(size, 3, 5, 5), torch.randint(3, (size, 5, 5)))["loss"].backward()
    assert (net.encoder[2].rows, net.decoder.count.rows) == (size, 4)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_tensor_around_the_stage_is_explained() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return x + self.b(x)

    model = lpbnn.build(Around(), "batchensemble", include="b")
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, 4))
    assert "spreads the batch over the members at ['b']" in str(caught.value)  # logs drop notes
    assert "build(..., expand_at='') for the whole network" in str(caught.value)
    assert "must match" in str(caught.value)  # torch's own words
    assert type(caught.value.__cause__) is RuntimeError
    model = lpbnn.build(Around(), "batchensemble", include="b", expand_at="")
    assert model(torch.randn(3, 4)).shape == (4, 3, 4)


@pytest.mark.parametrize("names", ["decoder", ("encoder", "decodr"), 3])
def test_parts_that_a_module_names_must_exist(names: object) -> None:
    net = EncoderDecoder()
    net.expand_at = names
    with pytest.raises(ValueError, match="EncoderDecoder has expand_at = .*expected the names of"):
        lpbnn.build(net, "batchensemble", include="decoder")


def test_parts_that_leave_out_a_converted_layer_are_not_taken() -> None:
    net = EncoderDecoder()
    net.decoder.expand_at = ("count", "mix")
    model = lpbnn.build(net, "batchensemble", include="decoder.*")
    assert model.expand_at == ["decoder"]


def test_an_error_of_its_own_kind_stays_what_it_is() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")

    model = lpbnn.build(Full(), "batchensemble", include="b")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.randn(3, 4))
    assert str(caught.value) == "out of memory"
    assert "spreads the batch over the members at ['b']" in caught.value.__notes__[0]


def test_several_doors_may_be_named() -> None:
    torch.manual_seed(0)
    net, x = ResNet().eval(), torch.randn(3, 3, 8, 8)
    options = {"members": 3, "include": ["stage2", "head"]}
    found = []
    for doors in (["stage2", "head"], "stage2", ""):
        torch.manual_seed(1)
        made = lpbnn.build(copy.deepcopy(net), "batchensemble", expand_at=doors, **options)
        found.append(made.eval()(x))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    with pytest.raises(ValueError, match="expand_at='haed' is no module.*mean 'head'"):
        lpbnn.build(net, "batchensemble", expand_at=["stage2", "haed"], **options)
    with pytest.raises(ValueError, match=r"expand_at=\[\] names no module"):
        lpbnn.build(net, "batchensemble", expand_at=[], **options)


class UNet(nn.Module):
    """Skips go around every part that a partial conversion makes a door."""

    def __init__(self) -> None:
        super().__init__()
        self.e1, self.e2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.u1, self.out = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.e1(x))
        return self.out(torch.cat([self.u1(self.e2(skip)), skip], 1))


@pytest.mark.parametrize("batch", [4, 5])
def test_a_skip_around_the_doors_is_told_with_its_remedy(batch: int) -> None:
    options = {"include": ["u*", "out"], "task": "segmentation", "num_data": 9}
    model = lpbnn.build(UNet(), "lpbnn", **options)
    x, y = torch.randn(batch, 3, 2, 2), torch.zeros(batch, 2, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"(?s)Expected size .*build\(..., expand_at=''\)"):
        lpbnn.predict(model, x)
    helped = lpbnn.build(UNet(), "lpbnn", expand_at="", **options)
    assert helped.train().loss(x, y)["loss"].isfinite()
    assert lpbnn.predict(helped, x).probs.shape == (batch, 3, 2, 2)


def test_spread_at_must_exist() -> None:
    with pytest.raises(ValueError, match="expand_at='decodr' is no module"):
        lpbnn.build(EncoderDecoder(), "batchensemble", expand_at="decodr")


@pytest.mark.parametrize("batch_norm", ["shared", "member"])
@pytest.mark.parametrize("case", PARTIAL)
def test_members_in_turn_answer_as_members_together(
    case: str, batch_norm: str, in_turn: Callable[[bool], None]
) -> None:
    make, shape, options, paths = PARTIAL[case]
    net = settle(make()).double()
    for path in paths:
        net.get_submodule(path).loop_members = True
    model = lpbnn.build(
        net, "lpbnn", members=3, num_data=10, batch_norm=batch_norm, **options
    ).double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    in_turn(False)
    together = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    in_turn(True)
    turns = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    torch.testing.assert_close(turns.members, together.members, rtol=0, atol=1e-14)
    again = lpbnn.predict(model, x, samples=2, seed=1, chunk=8)
    assert torch.equal(again.members, turns.members)


def test_in_turn_the_shared_part_still_runs_once(in_turn: Callable[[bool], None]) -> None:
    in_turn(True)
    net = EncoderDecoder()
    model = lpbnn.build(net, "lpbnn", members=4, num_data=10, include="decoder")
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    assert net.encoder[2].rows == 2
    assert net.decoder.count.calls == [2, 2, 2, 2]  # one member's rows at a time


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_shared_part_runs_once_for_all_draws(
    one_by_one: bool, in_turn: Callable[[bool], None]
) -> None:
    in_turn(one_by_one)
    net = EncoderDecoder()
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, include="decoder").double()
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


@pytest.mark.parametrize("batch_norm", ["shared", "member"])
def test_a_compiled_network_takes_its_members_in_turn(
    batch_norm: str, in_turn: Callable[[bool], None]
) -> None:
    """Written out once, not compiled again for another draw; many members go a few at a time."""
    in_turn(True)
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


def test_a_hook_in_the_stage_sees_all_members_together(in_turn: Callable[[bool], None]) -> None:
    in_turn(True)
    net = EncoderDecoder()
    seen: list[int] = []
    net.decoder.out[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model = lpbnn.build(net, "batchensemble", members=3, include="decoder.mix", expand_at="decoder")
    lpbnn.predict(model, torch.randn(2, 3, 5, 5))
    assert seen == [6]


def test_a_promise_that_is_not_kept_is_told_and_without_one_members_stay_together(
    in_turn: Callable[[bool], None],
) -> None:
    in_turn(True)
    net = EncoderDecoder(Odd())
    model = lpbnn.build(net, "batchensemble", members=3, include="decoder", task="segmentation")
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(RuntimeError, match="Odd has loop_members = True and got 2 rows, but returned"):
        lpbnn.predict(model, x)
    net.decoder.in_turn = False
    assert lpbnn.predict(model, x).members.shape == (3, 2, 3, 5, 5)


@pytest.mark.parametrize("member", [0, 2])
def test_a_stage_that_breaks_leaves_the_model_as_it_was(
    member: int, in_turn: Callable[[bool], None]
) -> None:
    in_turn(True)
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
    assert all(layer._held is None for layer in model.layers)


def test_memory_grows_by_a_members_outputs_not_by_its_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with street scenes: another member adds its logits, 3 channels, where its maps have 8."""
    monkeypatch.setattr(prediction, "AT_ONCE", 1)
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
def test_a_model_is_gone_when_nobody_uses_it(include: str | None) -> None:
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
