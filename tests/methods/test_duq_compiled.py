"""DUQ's step as one compiled graph, the gradient by the inputs in it: the uncompiled one's numbers."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import Mlp, ResNet, UsersOwn
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lpbnn
from lpbnn import backbones
from lpbnn.engine import OptimConfig, RunConfig
from lpbnn.engine.launch import launch
from lpbnn.engine.step import Step
from lpbnn.methods.duq import RadialBasis
from lpbnn.model import LossStep, Model, Terms

Loss = Callable[[Any, Tensor], Terms]


@pytest.fixture(autouse=True)
def from_the_start() -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    with config.patch({"cpp.simdlen": 1, "cpp.threads": 1}):  # plain loops are compiled sooner
        yield
    torch._dynamo.reset()


def build(net: nn.Module, **options: Any) -> RadialBasis:
    model = lpbnn.build(net, "duq", **({"sigma": 0.5} | options))
    assert isinstance(model, RadialBasis)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # at 1 and 0 a mistake may not show
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model


def trained(model: RadialBasis, loss: Loss, x: Any, y: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """The last terms and gradients, and the state, of a copy that was trained."""
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


def both(model: RadialBasis, x: Any, y: Tensor, **options: Any) -> list[dict[str, Tensor]]:
    """``trained``, uncompiled and compiled."""
    other = copy.deepcopy(model)
    compiled = torch.compile(other.loss, **({"backend": "aot_eager"} | options))
    return [trained(model, model.loss, x, y), trained(other, compiled, x, y)]


def assert_equal(expected: dict[str, Tensor], found: dict[str, Tensor], **within: float) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **within)


def test_one_graph_trains_to_the_same_weights_centroids_and_statistics() -> None:
    model = build(ResNet()).double().train()
    model.net.stage1.eval()  # a part frozen by its user
    model.net.stem.requires_grad_(False)
    x, y = torch.randn(7, 3, 8, 8).double(), torch.tensor([0, 1, 2, 0, 1, -100, 2])
    expected, found = both(model, x, y, fullgraph=True)
    assert_equal(expected, found, rtol=1e-10, atol=1e-12)
    assert found["net.stage2.body.1.num_batches_tracked"] == 3
    assert "net.stem.weight'" not in found
    assert not counters["graph_break"]


def test_kernels_made_for_the_step_have_the_same_numbers() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )
    x, y = torch.randn(5, 1, 6, 6).double(), torch.randint(3, (5,))
    expected, found = both(build(net).double(), x, y, fullgraph=True, backend="inductor")
    assert_equal(expected, found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_the_steps_of_the_engine(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Wide ResNet; what the compiler makes of the same graph has been looked at above."""
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


def test_batches_of_any_size_share_a_graph() -> None:
    """Not of convolutions: torch looks at the sizes when it differentiates them twice."""
    model, counter = build(Mlp()), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.loss, backend=counter, dynamic=True, fullgraph=True)
    for size in (4, 7, 9, 12, 5):
        x, y = torch.randn(size, 5), torch.randint(3, (size,))
        torch.testing.assert_close(compiled(x, y), model.loss(x, y))
    assert counter.frame_count <= 2  # torch 2.11 looks twice


def test_other_losses_are_compiled_as_well() -> None:
    model, x, y = build(Mlp()), torch.randn(4, 5), torch.randint(3, (4,))
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    assert compiled(x, y)["gradient_penalty"] > 0
    with torch.no_grad():
        assert compiled(x, y)["gradient_penalty"] == 0
    model.eval()
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))


def test_a_layer_that_is_replaced_and_a_mode_that_changes_are_noticed() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    model, x, y = build(net), torch.randn(4, 5), torch.randint(3, (4,))
    compiled = torch.compile(model.loss, backend="aot_eager")
    compiled(x, y)
    net[1].eval()
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))
    net[0] = nn.Linear(5, 6, bias=False)
    torch.testing.assert_close(compiled(x, y), model.loss(x, y))


class Counts(nn.Module):
    """Buffers replaced and changed in place, and an activation kept."""

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
    """Something in the middle, and an input behind it."""

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
def test_users_networks(net: Callable[[], nn.Module], inputs: tuple[str, ...], graphs: int) -> None:
    """In one graph, or outside the compiler where no one graph gives the second derivatives."""
    widths = {"x": 5, "context": 3, "shift": 6}
    x = {name: torch.randn(4, widths[name]).double() for name in inputs}
    counter = CompileCounterWithBackend("aot_eager")
    expected, found = both(build(net()).double(), x, torch.randint(3, (4,)), backend=counter)
    assert_equal(expected, found, rtol=1e-10, atol=1e-12)
    assert bool(counters["graph_break"]) != bool(graphs)
    assert sum("input_penalty" in str(graph.graph) for graph in counter.graphs) == graphs


class Skip(nn.Module):
    """Two ways from the input, one of them more than the first bucket of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 6)
        )
        self.skip, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x) + self.skip(x)))


class Compiled(LossStep):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.compiled = torch.compile(model.loss, backend="aot_eager")

    def forward(self, x: Tensor, y: Tensor) -> Terms:
        return self.compiled(x, y)


def test_ddp_cuts_no_graph_with_a_gradient_in_it(tmp_path: Path) -> None:
    """Its optimizer compiles a network in parts, bucket by bucket, and a part is not the network."""
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


def test_a_network_that_does_not_look_at_its_input_is_told() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.detach())

    with pytest.raises(ValueError, match="do not depend on the inputs.*gradient_penalty=0"):
        build(Blind()).loss(torch.randn(4, 5), torch.randint(3, (4,)))


def test_errors_are_those_of_the_uncompiled_loss() -> None:
    tokens = build(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)))
    with pytest.raises(TypeError, match="none of them is of floating point.*gradient_penalty=0"):
        torch.compile(tokens.loss, backend="aot_eager")(
            torch.randint(5, (2, 2)), torch.tensor([0, 1])
        )
