"""DUQ's step as one compiled graph equals the uncompiled one."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import Mlp, ResNet, UsersOwn, Vit
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lpbnn
from lpbnn import backbones
from lpbnn.methods.duq import DUQ
from lpbnn.model import LossStep, Terms, UncertainModel

pytestmark = pytest.mark.slow  # test_duq.py compiles the loss once

Loss = Callable[[Any, Tensor], Terms]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    with config.patch({"cpp.simdlen": 1, "cpp.threads": 1}):  # plain loops compile faster
        yield
    torch._dynamo.reset()


def build(net: nn.Module, **options: Any) -> DUQ:
    model = lpbnn.build(net, "duq", **({"sigma": 0.5} | options))
    assert isinstance(model, DUQ)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # 1 and 0 may hide a mistake
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model


def trained(model: DUQ, loss: Loss, x: Any, y: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """Train the model; return the last terms and gradients, and the state."""
    sgd = torch.optim.SGD(model.parameters(), 0.02)
    terms: Terms = {}
    for _ in range(steps):
        sgd.zero_grad()
        terms = loss(x, y)
        terms["loss"].backward()
        sgd.step()
        model.after_step()
    gradients = {f"{name}'": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        **{name: term.detach() for name, term in terms.items()},
        **gradients,
        **model.state_dict(),
    }


def both(model: DUQ, x: Any, y: Tensor, **options: Any) -> list[dict[str, Tensor]]:
    """Return ``trained``, uncompiled and compiled."""
    other = copy.deepcopy(model)
    compiled = torch.compile(other.loss, **({"backend": "aot_eager"} | options))
    return [trained(model, model.loss, x, y), trained(other, compiled, x, y)]


def assert_equal(expected: dict[str, Tensor], found: dict[str, Tensor], **within: float) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **within)


def test_one_graph_trains_the_same_weights_centroids_and_statistics() -> None:
    model = build(ResNet()).double().train()
    model.net.stage1.eval()  # a part frozen by its user
    model.net.stem.requires_grad_(False)
    x, y = torch.randn(7, 3, 8, 8).double(), torch.tensor([0, 1, 2, 0, 1, -100, 2])
    expected, found = both(model, x, y, fullgraph=True)
    assert_equal(expected, found, rtol=1e-10, atol=1e-12)
    assert found["net.stage2.body.1.num_batches_tracked"] == 3
    assert "net.stem.weight'" not in found
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor_gives_the_same_numbers() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )
    x, y = torch.randn(5, 1, 6, 6).double(), torch.randint(3, (5,))
    expected, found = both(build(net).double(), x, y, fullgraph=True, backend="inductor")
    assert_equal(expected, found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("precision", [pytest.param("32", marks=pytest.mark.slow), "bf16"])
def test_steps_of_the_engine_are_one_graph(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Wide ResNet, in both precisions, and a smaller last batch."""
    from lpbnn.training import OptimConfig, RunConfig
    from lpbnn.training.distributed import launch
    from lpbnn.training.step import Step

    compile = torch.compile
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", lambda f, options: compile(f, backend=counter))
    model = build(backbones.build("wrn-10-1", 3, 1))
    x, y = torch.randn(8, 1, 8, 8), torch.randint(3, (8,))
    states, sums = [], []
    for compiled in (False, True):
        optim = OptimConfig(lr=0.02, nesterov=False)
        config = RunConfig("duq", device="cpu", precision=precision, compile=compiled, optim=optim)
        step = Step(copy.deepcopy(model).train(), config, launch(config), len(y))
        for _ in range(3):
            step(x, y, 1.0)
        step(x[:5], y[:5], 1.0)  # the rest of an epoch
        states.append(step.model.state_dict())
        sums.append(dict(zip(step.names, step.sums, strict=True)))
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    rounding = {"rtol": 1e-4, "atol": 1e-5} if precision == "32" else {"rtol": 0.05, "atol": 0.02}
    assert_equal(sums[0], sums[1], **rounding)
    assert_equal(states[0], states[1], **rounding)


def test_batches_of_any_size_share_one_graph() -> None:
    """Except with convolutions: torch's second derivative depends on the sizes."""
    model, counter = build(Mlp()), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.loss, backend=counter, dynamic=True, fullgraph=True)
    for size in (4, 7, 9, 12, 5):
        x, y = torch.randn(size, 5), torch.randint(3, (size,))
        torch.testing.assert_close(compiled(x, y), model.loss(x, y))
    assert counter.frame_count <= 2  # torch 2.11 looks twice


def test_losses_without_a_penalty_compile_too() -> None:
    model, x, y = build(Mlp()), torch.randn(4, 5), torch.randint(3, (4,))
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    assert compiled(x, y)["gradient_penalty"] > 0
    with torch.no_grad():
        assert compiled(x, y)["gradient_penalty"] == 0
    model.eval()
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))


def test_replaced_layers_and_changed_modes_are_compiled_anew() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    model, x, y = build(net), torch.randn(4, 5), torch.randint(3, (4,))
    compiled = torch.compile(model.loss, backend="aot_eager")
    compiled(x, y)
    net[1].eval()
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))
    net[0] = nn.Linear(5, 6, bias=False)
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))


class Counts(nn.Module):
    """Replaces one buffer, changes another in place, and keeps an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.hidden = torch.tanh(self.embed(x - self.mean))
        return self.head(self.hidden)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * gradient * x**2


class Odd(nn.Module):
    """An operation in the middle, and a second input after it."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.middle = nn.Linear(5, 6), nn.Linear(6, 3), middle

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x)) + shift))


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def again(x: Tensor) -> Tensor:
    return checkpoint(torch.sin, x, use_reentrant=False)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("net", "inputs", "graphs"),
    [
        (Counts, ("x",), 1),
        (UsersOwn, ("x", "context"), 1),
        (lambda: Odd(torch.sin), ("x", "shift"), 1),
        (lambda: Odd(breaks), ("x", "shift"), 0),
        (lambda: Odd(Cube.apply), ("x", "shift"), 0),
        (lambda: Odd(again), ("x", "shift"), 0),
    ],
)
def test_networks_of_users(
    net: Callable[[], nn.Module], inputs: tuple[str, ...], graphs: int
) -> None:
    """In one graph, or outside the compiler if one graph would give wrong second derivatives."""
    widths = {"x": 5, "context": 3, "shift": 6}
    x = {name: torch.randn(4, widths[name]).double() for name in inputs}
    counter = CompileCounterWithBackend("aot_eager")
    expected, found = both(build(net()).double(), x, torch.randint(3, (4,)), backend=counter)
    assert_equal(expected, found, rtol=1e-10, atol=1e-12)
    assert bool(counters["graph_break"]) != bool(graphs)
    assert sum("gradient_norms" in str(graph.graph) for graph in counter.graphs) == graphs


class Skip(nn.Module):
    """Two paths from the input, one of them larger than the first bucket of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 6)
        )
        self.skip, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x) + self.skip(x)))


class Compiled(LossStep):
    def __init__(self, model: UncertainModel) -> None:
        super().__init__(model)
        self.compiled = torch.compile(model.loss, backend="aot_eager")

    def forward(self, x: Tensor, y: Tensor) -> Terms:
        return self.compiled(x, y)


def test_under_ddp_the_inner_gradient_is_that_of_the_whole_network(tmp_path: Path) -> None:
    """DDP's optimizer compiles a network in parts, one for each bucket."""
    model = build(Skip()).double()
    x, y = torch.randn(4, 5).double(), torch.randint(3, (4,))
    alone = copy.deepcopy(model)
    expected = alone.loss(x, y)
    expected["loss"].backward()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = nn.parallel.DistributedDataParallel(Compiled(model))(x, y)
        found["loss"].backward()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_a_network_that_detaches_its_input_is_an_error() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.detach())

    with pytest.raises(ValueError, match="depend on the inputs.*gradient_penalty=0"):
        build(Detached()).loss(torch.randn(4, 5), torch.randint(3, (4,)))


def test_errors_under_a_compiler_are_those_of_the_uncompiled_loss() -> None:
    tokens = build(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)))
    with pytest.raises(TypeError, match="none of them is of floating point.*gradient_penalty=0"):
        torch.compile(tokens.loss, backend="aot_eager")(
            torch.randint(5, (2, 2)), torch.tensor([0, 1])
        )


@pytest.mark.parametrize("missing", ["comptime", "comptime.graph"])
def test_a_torch_without_the_private_apis_gives_the_same_numbers(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.comptime import ComptimeContext

    if missing == "comptime":
        monkeypatch.setitem(sys.modules, "torch._dynamo.comptime", None)
    else:
        monkeypatch.delattr(ComptimeContext, "graph")
    x, y = torch.randn(4, 5).double(), torch.randint(3, (4,))
    expected, found = both(build(Mlp()).double(), x, y)
    assert_equal(expected, found, rtol=1e-10, atol=1e-12)
    assert counters["graph_break"]


def test_attention_compiles_into_one_graph_with_the_same_numbers() -> None:
    x, y = torch.randn(3, 12, 4).double(), torch.randint(3, (3,))
    expected, found = both(build(Vit()).double(), x, y, fullgraph=True)
    assert_equal(expected, found, rtol=1e-9, atol=1e-11)
