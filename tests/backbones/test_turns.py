"""DeepLab's two doors: ASPP for all members together, the large maps in turn, and exact answers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import settle
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones
from lpbnn.rank_one.ensemble import FastWeightEnsemble

DOORS = ["decoder.aspp", "decoder.refine"]
GROUPS: dict[str, Any] = {"norm": "group", "standardise": True}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LP-BNN": ("lpbnn", {}, {}),
    "LP-BNN+GN": ("lpbnn", GROUPS, {}),
    "LP-BNN, member norms": ("lpbnn", {}, {"batch_norm": "member"}),
    "BatchEnsemble": ("batchensemble", {}, {}),
}


def network(**options: Any) -> nn.Module:
    small: dict[str, Any] = {"width": 4, "channels": 16, **options}
    return settle(backbones.build("deeplab-resnet18", 3, **small).double())


def ensemble(method: str, net: nn.Module, **options: Any) -> FastWeightEnsemble:
    given: dict[str, Any] = {"members": 3, "include": "decoder.*", "num_data": 9, **options}
    model = lpbnn.build(net, method, task="segmentation", **given).double().eval()
    assert isinstance(model, FastWeightEnsemble)
    return model


def apart(model: FastWeightEnsemble) -> FastWeightEnsemble:
    """Batch norms of members get statistics of their own."""
    settle(model)
    return model


def repeating(model: FastWeightEnsemble) -> FastWeightEnsemble:
    """The same members, with the batch spread at the network's own door."""
    whole = copy.deepcopy(model)
    whole.stages = [""]
    return whole


def counted(model: FastWeightEnsemble, path: str) -> list[int]:
    """The rows of every call of a part; no hook, which would be shown all members together."""
    module: Any = model.net.get_submodule(path)
    seen: list[int] = []
    forward = module.forward

    def counting(*args: Tensor) -> Tensor:
        seen.append(len(args[-1]))
        assert {len(x) for x in args} == {seen[-1]}
        return forward(*args)

    module.forward = counting
    return seen


def answer(
    model: lpbnn.UncertainModel, x: Tensor, samples: int, **options: Any
) -> lpbnn.Prediction:
    return lpbnn.predict(model, x, samples=samples, seed=5, **options)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_in_turn_and_together_the_answer_is_that_of_repeating_everything(
    kind: str, batch: int, in_turn: Callable[[bool], None]
) -> None:
    method, variant, options = KINDS[kind]
    model = apart(ensemble(method, network(**variant), **options))
    whole = repeating(model)
    assert model.stages == DOORS
    encoder, aspp, refine = (counted(model, path) for path in ("encoder", *DOORS))
    x = torch.randn(batch, 3, 33, 40).double()
    for samples in (1, 2):
        draws = samples if model.stochastic else 1
        in_turn(False)
        expected = answer(whole, x, samples)
        for one_by_one in (True, False):
            in_turn(one_by_one)
            for seen in (encoder, aspp, refine):
                seen.clear()
            p = answer(model, x, samples)
            assert encoder == [batch]
            assert aspp == [3 * draws * batch]
            assert refine == ([batch] * 3 * draws if one_by_one else [3 * batch] * draws)
            torch.testing.assert_close(p.members, expected.members, rtol=0, atol=1e-12)
            torch.testing.assert_close(p.epistemic, expected.epistemic, rtol=0, atol=1e-12)
            sums = answer(model, x, samples, keep_members=False)
            assert sums.members is None
            torch.testing.assert_close(sums.probs, expected.probs, rtol=0, atol=1e-12)
            parts = answer(model, x, samples, chunk=2)
            torch.testing.assert_close(parts.members, expected.members, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_network_writes_out_the_second_part_alone(
    kind: str, in_turn: Callable[[bool], None]
) -> None:
    in_turn(True)
    method, variant, options = KINDS[kind]
    model = apart(ensemble(method, network(**variant), **options))
    x = torch.randn(2, 3, 33, 40).double()
    expected = answer(model, x, 1).members
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = copy.deepcopy(model)
    model.net.compile(backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(answer(model, x, 1).members, expected, rtol=0, atol=1e-12)
    answer(model, x, 1)
    found = [node for node in graphs[0].graph.nodes if "conv2d" in str(node.target)]
    assert len(graphs) == 1
    # The layers that read the encoder's map have the outputs of all members; standardised ones get copies.
    aspp = [tuple(node.meta["example_value"].shape[:2]) for node in found[20:26]]
    assert aspp.count((2, 3 * 16)) == (1 if variant else 5)
    assert aspp.count((3 * 2, 16)) == (5 if variant else 1)
    assert (
        len(found) == 20 + 6 + 3 * 4
    )  # encoder, ASPP; the four of the second part for each member
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("include", "stages"),
    [
        ("decoder.*", DOORS),
        ("decoder.aspp.*", DOORS),  # the second meets what the first gave
        ("decoder.aspp.project.*", DOORS),
        (["decoder.aspp.project.*", "decoder.refine.head"], DOORS),
        ("decoder.refine.*", ["decoder.refine"]),
        ("decoder.refine.fuse2.*", ["decoder.refine.fuse2.conv"]),
    ],
)
def test_a_part_of_the_decoder_has_the_doors_that_it_needs(
    include: str | list[str], stages: list[str], in_turn: Callable[[bool], None]
) -> None:
    model = ensemble("lpbnn", network(), include=include)
    whole = repeating(model)
    assert model.stages == stages
    x = torch.randn(2, 3, 33, 40).double()
    in_turn(True)
    found, expected = (answer(m, x, 1).members for m in (model, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_training_spreads_at_both_doors() -> None:
    for size in (1, 3, 4, 6):
        model = ensemble("lpbnn", network())
        encoder, aspp, refine = (counted(model, path) for path in ("encoder", *DOORS))
        x, y = torch.randn(size, 3, 33, 40).double(), torch.randint(3, (size, 33, 40))
        model.train().loss(x, y)["loss"].backward()
        rows = -(-size // 3) * 3  # as many slices as members, of as few pictures as will do
        assert (encoder, aspp, refine) == ([size], [rows], [rows])


def test_one_frame_of_a_street_stays_together_on_a_gpu_without_a_compiler_and_two_do_not() -> None:
    fine = torch.empty(1, 256, 180, 320, device="meta")
    full = lpbnn.rank_one.stages.FULL_STAGE
    assert not lpbnn.rank_one.stages.fills_device([fine], full)
    assert lpbnn.rank_one.stages.fills_device([fine.expand(2, -1, -1, -1)], full)
    assert lpbnn.rank_one.stages.fills_device([fine], lpbnn.rank_one.stages.FULL)  # compiled
