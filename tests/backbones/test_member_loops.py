"""DeepLab's two expansion points: ASPP for all members together, members one by one for large maps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import settle
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones
from lpbnn.members.partial import FULL, FULL_PART, fills_device
from lpbnn.rank_one.ensemble import RankOneEnsemble

POINTS = ["decoder.aspp", "decoder.refine"]
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


def ensemble(method: str, net: nn.Module, **options: Any) -> RankOneEnsemble:
    given: dict[str, Any] = {"members": 3, "include": "decoder.*", "num_data": 9, **options}
    model = lpbnn.build(net, method, task="segmentation", **given).double().eval()
    assert isinstance(model, RankOneEnsemble)
    report = lpbnn.check(
        model, torch.randn(2, 3, 33, 40).double()
    )  # later passes run no comparison
    assert report.execution == "batched"
    return model


def apart(model: RankOneEnsemble) -> RankOneEnsemble:
    """Batch norms of members get statistics of their own."""
    settle(model)
    return model


def repeating(model: RankOneEnsemble) -> RankOneEnsemble:
    """Return the same members, with the batch expanded in front of the whole network."""
    whole = copy.deepcopy(model)
    whole.use_expansion_points([""])
    return whole


def counted(model: RankOneEnsemble, path: str) -> list[int]:
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
def test_one_by_one_and_together_members_answer_as_when_everything_is_repeated(
    kind: str, batch: int, fill_device: Callable[[bool], None]
) -> None:
    method, variant, options = KINDS[kind]
    model = apart(ensemble(method, network(**variant), **options))
    whole = repeating(model)
    assert model.expand_at == POINTS
    encoder, aspp, refine = (counted(model, path) for path in ("encoder", *POINTS))
    x = torch.randn(batch, 3, 33, 40).double()
    for samples in (1, 2):
        draws = samples if model.stochastic else 1
        fill_device(False)
        expected = answer(whole, x, samples)
        for one_by_one in (True, False):
            fill_device(one_by_one)
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


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "LP-BNN" else pytest.mark.slow) for k in KINDS]
)
def test_a_compiled_network_writes_out_the_second_part_alone(
    kind: str, fill_device: Callable[[bool], None]
) -> None:
    fill_device(True)
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
    ("include", "points"),
    [
        ("decoder.*", POINTS),
        ("decoder.aspp.*", POINTS),  # the second meets what the first gave
        ("decoder.aspp.project.*", POINTS),
        (["decoder.aspp.project.*", "decoder.refine.head"], POINTS),
        ("decoder.refine.*", ["decoder.refine"]),
        ("decoder.refine.fuse2.*", ["decoder.refine.fuse2"]),
    ],
)
def test_a_part_of_the_decoder_has_the_expansion_points_that_it_needs(
    include: str | list[str], points: list[str], fill_device: Callable[[bool], None]
) -> None:
    model = ensemble("lpbnn", network(), include=include)
    whole = repeating(model)
    assert model.expand_at == points
    x = torch.randn(2, 3, 33, 40).double()
    fill_device(True)
    found, expected = (answer(m, x, 1).members for m in (model, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_training_expands_the_batch_at_both_points() -> None:
    for size in (1, 3, 4, 6):
        model = ensemble("lpbnn", network())
        encoder, aspp, refine = (counted(model, path) for path in ("encoder", *POINTS))
        x, y = torch.randn(size, 3, 33, 40).double(), torch.randint(3, (size, 33, 40))
        model.train().loss(x, y)["loss"].backward()
        rows = -(-size // 3) * 3  # as many slices as members, of as few pictures as will do
        assert (encoder, aspp, refine) == ([size], [rows], [rows])


def test_one_frame_of_a_street_stays_together_on_a_gpu_without_a_compiler_and_two_do_not() -> None:
    fine = torch.empty(1, 256, 180, 320, device="meta")
    assert not fills_device([fine], FULL_PART)
    assert fills_device([fine.expand(2, -1, -1, -1)], FULL_PART)
    assert fills_device([fine], FULL)  # compiled
