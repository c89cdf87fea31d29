"""Freezing, compiling, exporting, copying, saving: no graph break, no warning, the same numbers."""

import copy
from pathlib import Path

import onnxruntime
import pytest
import torch
from networks import ConvNet, Mlp, ResNet, Vit, settle
from safetensors.torch import load_model, save_model
from torch import nn
from torch.export import Dim

import lpbnn
from lpbnn.rank_one.layer import member_weights

KINDS = {"Mlp": Mlp, "ConvNet": ConvNet, "ResNet": ResNet, "Vit": Vit}
PARTIAL = {"include": ["stage2", "head"]}
CASES = {
    "Mlp": ("Mlp", {}),
    "ConvNet": ("ConvNet", {}),
    "ResNet": ("ResNet", {}),
    "ResNet, its last stages": ("ResNet", PARTIAL),
    "Vit": ("Vit", {}),
}


def build(kind: str, method: str = "lpbnn", **options: object) -> lpbnn.UncertainModel:
    net = settle(KINDS[kind]())
    return lpbnn.build(net, method, members=3, num_data=10, **options).eval()


def inputs(kind: str, size: int = 4) -> torch.Tensor:
    return torch.randn(size, *KINDS[kind].shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_ensemble_is_what_predict_would_sample(kind: str) -> None:
    model, x = build(kind), inputs(kind)
    frozen = lpbnn.freeze(model, samples=2, seed=5)
    assert torch.equal(frozen(x), frozen(x))
    assert frozen.members == 6
    expected = lpbnn.predict(model, x, samples=2, seed=5)
    torch.testing.assert_close(lpbnn.predict(frozen, x).members, expected.members)
    torch.testing.assert_close(lpbnn.predict(frozen, x, chunk=5).members, expected.members)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert model.net is not frozen.net
    model.loss(x, torch.zeros(4, dtype=torch.int64))["loss"].backward()  # the model is untouched


def test_freezing_a_partial_conversion_keeps_its_expansion_points() -> None:
    model, x = build("ResNet", **PARTIAL), inputs("ResNet")
    frozen = lpbnn.freeze(model, seed=1)
    assert frozen.expand_at == model.expand_at == ["stage2", "head"]
    torch.testing.assert_close(
        lpbnn.predict(frozen, x).members, lpbnn.predict(model, x, seed=1).members
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_network_carries_the_mean_weight(kind: str) -> None:
    model = build(kind).double()
    expected = {
        layer.path: member_weights(layer.layer, mean).mean(0)
        for layer, mean in zip(model.layers, model.posterior().mean(), strict=True)
    }
    if kind == "Vit":  # attention is packed again
        expected = {path: w for path, w in expected.items() if "self_attn" not in path}
    net = lpbnn.mean_network(model)
    assert not any("RankOneLayer" in type(module).__name__ for module in net.modules())
    for path, weight in expected.items():
        torch.testing.assert_close(net.get_submodule(path).weight.data, weight.data)
    assert net(inputs(kind).double()).shape == (4, 3)


def test_the_mean_network_stands_for_the_ensemble_to_second_order() -> None:
    """Halving the members' differences quarters the distance to the mean of the members (supplementary A.2)."""
    x = torch.randn(16, 5, dtype=torch.float64)
    base = Mlp().double()
    directions = [(torch.randn(6, 5), torch.randn(6, 7)), (torch.randn(6, 7), torch.randn(6, 6))]
    directions.append((torch.randn(6, 6), torch.randn(6, 3)))

    def distance(scale: float) -> torch.Tensor:
        model = lpbnn.build(copy.deepcopy(base), "batchensemble", members=6, init_std=0.0)
        with torch.no_grad():
            for layer, (r, s) in zip(model.layers, directions, strict=True):
                layer.factors.r += scale * r
                layer.factors.s += scale * s
            return (model(x).mean(0) - lpbnn.mean_network(model)(x)).norm()

    ratios = [distance(2 * scale) / distance(scale) for scale in (0.004, 0.002)]
    assert all(3.5 < ratio < 4.5 for ratio in ratios), ratios


def test_a_mean_weight_needs_a_weight_to_set() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="'0' computes its weight itself"):
        lpbnn.mean_network(lpbnn.build(net, "batchensemble"))


QUICK = {"Vit", "ResNet, its last stages"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_compile_without_a_break(case: str) -> None:
    kind, options = CASES[case]
    model = build(kind, **options)
    frozen = lpbnn.freeze(model)
    compiled = torch.compile(frozen, fullgraph=True, backend="eager")
    for size in (4, 7):
        x = inputs(kind, size)
        torch.testing.assert_close(compiled(x), frozen(x))

    model.train()
    x, y = inputs(kind, 6), torch.randint(3, (6,))
    torch.manual_seed(0)
    eager = model.loss(x, y)
    torch.manual_seed(0)
    compiled_loss = torch.compile(model.loss, fullgraph=True, backend="eager")
    terms = compiled_loss(x, y)
    torch.testing.assert_close(terms, eager)
    terms["loss"].backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    model = build("Mlp").train()
    x, y = inputs("Mlp", 6), torch.randint(3, (6,))
    torch.compile(model.loss, fullgraph=True)(x, y)["loss"].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_export_with_a_dynamic_batch(case: str) -> None:
    kind, options = CASES[case]
    model = build(kind, **options)
    frozen = lpbnn.freeze(model, samples=2)
    batch = ({0: Dim("batch")},)
    program = torch.export.export(frozen, (inputs(kind),), dynamic_shapes=batch).module()
    for size in (2, 3, 9):
        x = inputs(kind, size)
        torch.testing.assert_close(program(x), frozen(x))
    # The stochastic model itself: it still draws in every call.
    program = torch.export.export(model, (inputs(kind),), dynamic_shapes=batch).module()
    x = inputs(kind, 7)
    assert program(x).shape == (3, 7, 3)
    assert not torch.equal(program(x), program(x))


def test_split_recurrent_layers_export_with_a_dynamic_batch() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    net = lpbnn.split_recurrent(Reader())
    frozen = lpbnn.freeze(lpbnn.build(net, "lpbnn", num_data=10), samples=2)
    batch = ({0: Dim("batch")},)
    program = torch.export.export(frozen, (torch.randn(5, 7, 4),), dynamic_shapes=batch).module()
    x = torch.randn(9, 7, 4)
    torch.testing.assert_close(program(x), frozen(x))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.onnx.*")
@pytest.mark.parametrize("kind", ["Mlp", "ResNet"])
def test_onnx(kind: str, tmp_path: Path) -> None:
    frozen = lpbnn.freeze(build(kind), samples=2)
    path = tmp_path / "frozen.onnx"
    torch.onnx.export(
        frozen,
        (inputs(kind),),
        path,
        dynamo=True,
        dynamic_shapes=({0: Dim("batch")},),
        input_names=["x"],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = inputs(kind, 7)
    (answer,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(answer), frozen(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1", "mcp"])
def test_state_goes_through_safetensors(kind: str, method: str, tmp_path: Path) -> None:
    options = {} if method == "mcp" else {"members": 3}
    make = lambda: lpbnn.build(settle(KINDS[kind]()), method, num_data=10, **options)  # noqa: E731
    model, other = make(), make()
    save_model(model, str(tmp_path / "weights.safetensors"))
    load_model(other, str(tmp_path / "weights.safetensors"))
    x = inputs(kind)
    assert torch.equal(
        lpbnn.predict(model, x, seed=0).members, lpbnn.predict(other, x, seed=0).members
    )


@pytest.mark.parametrize("kind", ["Mlp", "ResNet", "Vit"])
@pytest.mark.parametrize("mode", ["split", "repeat"])
def test_bfloat16_autocast_trains(kind: str, mode: str) -> None:
    model = build(kind, batch_mode=mode).train()
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.loss(inputs(kind, 6), torch.randint(3, (6,)))
    terms["loss"].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    p = lpbnn.predict(model, inputs(kind))
    assert p.probs.dtype == torch.float32


def test_a_copy_after_a_pass_is_independent() -> None:
    model = build("ResNet", **PARTIAL)
    x = inputs("ResNet")
    lpbnn.predict(model, x)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.allclose(clone(x)[0], clone(x)[1])
    assert clone(x).shape == (3, 4, 3)


def test_a_frozen_model_keeps_what_the_given_one_was_built_with() -> None:
    likelihood = {"ignore_index": 2, "class_weights": [1.0, 2.0, 3.0]}
    model = build("ResNet", expand_at="stage2", **PARTIAL, **likelihood)
    frozen = lpbnn.freeze(model)
    assert frozen.expand_at == model.expand_at == ["stage2"]
    x, y = inputs("ResNet"), torch.tensor([0, 1, 2, 1])
    probs = lpbnn.predict(frozen, x).members
    assert probs is not None
    counted = torch.tensor([0, 1, 3])
    weights = torch.tensor([1.0, 2.0, 2.0])
    log_p = probs[:, counted, y[counted]].log()
    expected = -(log_p * weights).sum() / (3 * weights.sum())
    torch.testing.assert_close(frozen.loss(x, y)["nll"], expected)


def test_a_deterministic_model_has_each_member_once() -> None:
    assert lpbnn.freeze(build("Mlp", "batchensemble"), samples=4).members == 3


def test_what_is_found_for_a_frozen_model_is_not_said_of_the_given_one() -> None:
    model = build("Mlp")
    frozen = lpbnn.freeze(model)
    frozen(inputs("Mlp"))
    assert frozen.checks
    assert not model.checks


@pytest.mark.parametrize("check", [False, True])
def test_a_frozen_model_knows_what_was_found_for_its_model(check: bool) -> None:
    model, x = lpbnn.build(Mlp(), "lpbnn", num_data=10, check=check), torch.randn(6, 5)
    lpbnn.predict(model, x)
    frozen = lpbnn.freeze(model)
    assert frozen.checks == model.checks
    assert bool(frozen.checks) == check
    assert frozen.checks is not model.checks
    assert frozen.check_first_batch == check


def test_a_frozen_model_has_no_further_draws_and_no_noise_to_scale() -> None:
    frozen, x = lpbnn.freeze(build("Mlp"), samples=2), inputs("Mlp")
    once, often = (lpbnn.predict(frozen, x, samples=n, keep_members=True) for n in (1, 3))
    assert torch.equal(once.members, often.members)
    assert len(once.members) == frozen.members
    with pytest.raises(TypeError, match="has no noise to scale"):
        frozen.set_noise_scale(0.5)
    assert torch.equal(lpbnn.freeze(frozen, samples=3)(x), frozen(x))
