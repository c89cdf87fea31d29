"""The gradient of s stays the same by sums shared with batch norm's, and no other sum is touched."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lpbnn.engine import kept, rowsums
from lpbnn.engine.rowsums import share_sums
from lpbnn.members import times
from lpbnn.norms import by_rows

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def quickly_compiled() -> Iterator[None]:
    from torch._functorch import config as functorch
    from torch._inductor import config

    torch._dynamo.reset()
    # Plain loops are compiled sooner; and of what is in a cache, no pass sees the graph.
    settings = {"cpp.simdlen": 1, "cpp.threads": 1, "fx_graph_cache": False}
    with config.patch(settings), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer with factors by member, and a batch norm that sums by rows where it is compiled."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.r, self.s = (nn.Parameter(1 + 0.5 * torch.randn(2, n)) for n in (inputs, outputs))
        self.bias = nn.Parameter(torch.randn(2, outputs)) if bias else None
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        nn.init.uniform_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = times(self.convolution(times(x, self.r)), self.s, shift=self.bias)
        return by_rows(self.norm, y) if torch.compiler.is_compiling() else self.norm(y)


class Blocks(nn.Module):
    """A layer with biases, and one in a residual block whose sum is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(3, 4, bias=True), Layer(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.second(x)
        return x.sigmoid().square().mean() + x.relu().mean()


class Far(nn.Module):
    """A layer whose every pixel is as far from zero as its input."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(3, 4)
        self.layer.convolution.padding = (0, 0)
        self.register_buffer("weights", torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).relu() * self.weights).mean()


def made(net: type[nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return net().to(dtype), torch.randn(6, 3, 8, 8).to(dtype)


def gradients(net: nn.Module, x: Tensor, step: Callable[[Tensor], Any] | None = None) -> Any:
    """Of all parameters, by name; by ``step`` instead of the network itself, if there is one."""
    net.zero_grad()
    (net if step is None else step)(x).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


class Parted:
    """A backend that parts a joint graph as the compiler does, rewritten before, and compiles nothing."""

    def __init__(self, shared: bool = True) -> None:
        self.shared, self.found = shared, 0
        self.graph = fx.Graph()
        self.before = ""

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        parts = {"fw_compiler": boxed_nop, "bw_compiler": boxed_nop, "partition_fn": self._part}
        return aot_autograd(**parts, decompositions=table)(module, inputs)

    def _part(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.before, self.graph = str(joint.graph), joint.graph
        if self.shared:
            self.found = share_sums(joint.graph)
            joint.graph.lint()
            joint.recompile()
        self.waiting = waiting(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **options)


def waiting(graph: fx.Graph) -> int:
    """Sums of a convolution's output times something that other sums over the same pixels must be in."""
    return sum(
        any(user.target is aten.convolution.default for user in (a, b)) and (late(a) or late(b))
        for node in graph.nodes
        if node.target is aten.sum.dim_IntList and node.args[1] == [2, 3]
        for product in node.all_input_nodes
        if product.target is aten.mul.Tensor and len(product.all_input_nodes) == 2
        for a, b in [map(unscaled, product.all_input_nodes)]
    )


def unscaled(node: fx.Node) -> fx.Node:
    return unscaled(node.all_input_nodes[0]) if node.target is aten.mul.Scalar else node


def late(node: fx.Node) -> bool:
    """Whether a sum over pixels is on the way from the next layer's gradient to a map."""
    if node.target is aten.convolution_backward.default or node.op == "placeholder":
        return False
    if node.target is aten.sum.dim_IntList and node.args[1] == [2, 3]:
        return True
    return any(late(before) for before in node.all_input_nodes)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_compiled_step_has_the_gradients_that_it_has_otherwise(
    dtype: torch.dtype, exact: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(rowsums, "share_sums", lambda graph: found.append(share_sums(graph)))
    expected = gradients(*made(Blocks, dtype))
    for shared in (True, False):
        monkeypatch.setattr(kept, "SUMS_SHARED", shared)
        net, x = made(Blocks, dtype)
        other = gradients(net, x, kept.compiled(net, sums_by_rows=True))
        torch.testing.assert_close(other, expected, rtol=exact, atol=exact)
    assert found == [2]  # and not once where sums are not to be shared


def test_no_sum_waits_for_those_of_batch_norm() -> None:
    """Neither in layers with biases nor where the gradient of batch norm's output is a sum itself."""
    for shared, number in ((False, 2), (True, 0)):
        net, x = made(Blocks, torch.float64)
        parted = Parted(shared)
        found = gradients(net, x, torch.compile(net, backend=parted))
        assert (parted.found, parted.waiting) == (2 - number, number)
        expected = gradients(*made(Blocks, torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_new_nodes_know_what_they_hold_and_are_all_of_use() -> None:
    net, x = made(Blocks)
    parted = Parted()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(net, backend=parted)(x)
    assert parted.found == 2
    holders = [node for node in parted.graph.nodes if node.op == "placeholder"]
    mode = holders[0].meta["val"].fake_mode

    class Compared(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                told = n.meta["val"]
                assert (value.shape, value.stride()) == (told.shape, told.stride())
                assert (value.dtype, value.device) == (told.dtype, told.device)
            return value

    with mode:
        Compared(fx.GraphModule({}, parted.graph)).run(*[node.meta["val"] for node in holders])
    assert not [node for node in parted.graph.nodes if not node.users and not node.is_impure()]


def test_under_autocast_gradients_are_close_to_those_of_float32() -> None:
    expected = gradients(*made(Blocks))
    net, x = made(Blocks)
    parted = Parted()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(net, x, torch.compile(net, backend=parted))
    assert parted.found == 2
    for name, own in expected.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - own).norm() < 0.05 * own.norm(), name


@pytest.mark.parametrize("offset", [0, 100])
def test_maps_far_from_zero_cost_no_digits(offset: float) -> None:
    """Sums of squares lose them; but so does g * c, of which the mean of c is the most part, too."""
    net, x = made(Far)
    x += offset
    expected = gradients(net.double(), x.double())["layer.s"]
    errors = {}
    for shared in (False, True):
        net, _ = made(Far)
        parted = Parted(shared)
        found = gradients(net, x, torch.compile(net, backend=parted))["layer.s"]
        assert parted.found == shared
        errors[shared] = ((found - expected).norm() / expected.norm()).item()
        torch._dynamo.reset()
    assert errors[True] < 3 * errors[False] + 1e-6


@pytest.mark.parametrize(("dimensions", "number"), [((0,), 2), ((0, 2, 3), 0)])
def test_sizes_that_a_compiler_does_not_know(dimensions: tuple[int, ...], number: int) -> None:
    """Rows may be any number, pixels are left alone; a pass that asked for either would fix it."""
    net, x = made(Blocks, torch.float64)
    parted = Parted()
    step = torch.compile(net, backend=parted)
    other = torch.randn([10 if n in dimensions else size for n, size in enumerate(x.shape)])
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(x, dimension)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (x, other.double()):
            torch.testing.assert_close(gradients(net, batch, step), gradients(net, batch))
    assert parted.found == number


class Given(NamedTuple):
    """What one sum is made of: the input and weight of a convolution, m, and k by row."""

    x: Tensor
    weight: Tensor
    m: Tensor
    k: Tensor


def given(dtype: torch.dtype = torch.float32, pixels: int = 5) -> Given:
    torch.manual_seed(0)
    sizes = (2, 3, pixels, pixels), (4, 3, 1, 1), (2, 4, pixels, pixels), (2, 4, 1, 1)
    return Given(*(torch.randn(size).to(dtype) for size in sizes))


def summed(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    c = F.conv2d(x, weight)
    g = (k * m - 3 * (c * k - k)) + (-k).expand_as(c) / 25
    return (g * c).sum((2, 3), keepdim=True)


def traced(function: Callable[..., Any], tensors: Given, mode: Any = "fake") -> fx.GraphModule:
    module = make_fx(function, tracing_mode=mode)(*tensors)
    module.graph.eliminate_dead_code()
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_in_its_own_precision(dtype: torch.dtype) -> None:
    """Summed in at least float32: bfloat16 is nearer to the truth than it was."""
    tensors = given(dtype)
    module = traced(summed, tensors)
    before = module(*tensors)
    assert share_sums(module.graph) == 1
    module.recompile()
    found = module(*tensors)
    assert found.dtype == dtype
    exact = summed(*(tensor.double() for tensor in tensors))
    scale = exact.abs().max()
    error, error_before = (((a - exact) / scale).abs().max() for a in (found, before))
    assert error < max(2 * torch.finfo(dtype).eps, 1e-6 if dtype == torch.float32 else 0)
    assert error <= error_before or dtype != torch.bfloat16


def no_batch_norm(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    return (k * m * F.conv2d(x, weight)).sum((2, 3), keepdim=True)


def two_maps(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    c = F.conv2d(x, weight)
    return ((k * m + c + k + m.exp()) * c).sum((2, 3), keepdim=True)


def not_a_multiple(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    c = F.conv2d(x, weight)
    return ((k * m + c.relu() + k) * c).sum((2, 3), keepdim=True)


def read_elsewhere(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    c = F.conv2d(x, weight)
    product = (k * m + c + k) * c
    return product, product.sum((2, 3), keepdim=True)


def by_channel(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    k = k.sum(0, keepdim=True)
    c = F.conv2d(x, weight)
    return ((k * m + k * c + k) * c).sum((2, 3), keepdim=True)


def over_rows_too(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    c = F.conv2d(x, weight)
    return ((k * m + k * c + k) * c).sum((0, 2, 3), keepdim=True)


def linear(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    c = F.linear(x.movedim(1, -1), weight.flatten(1)).movedim(-1, 1)
    return ((k * m + k * c + k) * c).sum((2, 3), keepdim=True)


def weighted(x: Tensor, weight: Tensor, m: Tensor, k: Tensor) -> Tensor:
    """A sum with a number of its own (alpha) is not looked into."""
    c = F.conv2d(x, weight)
    return (torch.add(k * m + c, k, alpha=2) * c).sum((2, 3), keepdim=True)


OTHERS = [
    no_batch_norm,
    two_maps,
    not_a_multiple,
    read_elsewhere,
    by_channel,
    over_rows_too,
    linear,
    weighted,
]


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_is_not_of_that_form_is_left_as_it_is(function: Callable[..., Any], mode: str) -> None:
    module = traced(function, given(), mode)
    before = str(module.graph)
    assert share_sums(module.graph) == 0
    assert str(module.graph) == before


def test_maps_of_one_pixel_are_left_as_they_are() -> None:
    module = traced(summed, given(pixels=1))
    before = str(module.graph)
    assert share_sums(module.graph) == 0
    assert str(module.graph) == before


def test_nodes_that_do_not_know_what_they_hold() -> None:
    tensors = given()
    for number in range(len(traced(summed, tensors).graph.nodes)):
        module = traced(summed, tensors)
        list(module.graph.nodes)[number].meta.pop("val", None)
        share_sums(module.graph)
        module.graph.lint()
        module.recompile()
        torch.testing.assert_close(module(*tensors), summed(*tensors), rtol=1e-4, atol=1e-4)


class Plain(nn.Module):
    """A network as compiled on a CPU: its batch norm sums all rows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.s = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(times(self.convolution(x), self.s)).relu().square().mean()


def test_a_batch_norm_of_torch_has_no_sums_to_share() -> None:
    net, x = made(Plain)
    parted = Parted()
    torch.compile(net, backend=parted)(x)
    assert parted.found == 0
    assert str(parted.graph) == parted.before
