"""A compiled step keeps no more than it must for its backward pass, and its gradients stay the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lpbnn
from lpbnn.kernels import recompute as kept
from lpbnn.training.step import TrainStep

SIZE = 8
MAP = SIZE * 8 * 8 * 8 * 4  # bytes of eight channels of 8x8, for every example

Kept = tuple[int, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def quickly_compiled() -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1, "cpp.threads": 1}):  # plain loops are compiled sooner
        yield
    torch._dynamo.reset()


class Branches(nn.Module):
    """Three convolutions of one map, as in ASPP, and one of what they make, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(3))
        self.join = nn.Conv2d(24, 5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.join(torch.cat([branch(x) for branch in self.branches], 1)).mean((2, 3))


class Blocks(nn.Module):
    """Residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x.sigmoid())
        return self.head(x.square().mean((2, 3)))


class Attention(nn.Module):
    """Three linear layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.flatten(2)[:, :2].mT.reshape(len(x), -1, 8))
        weights = (self.queries(x) @ self.keys(x).mT).softmax(-1)
        return self.head((weights @ self.values(x)).mean(1))


def parted(method: str, net: nn.Module, budget: float = 1.0, **options: Any) -> Kept:
    """Bytes that a compiled step keeps for its backward pass, beside the weights; and its gradients."""
    if method == "lpbnn":
        options = {"members": 2, "num_data": 100, **options}
    torch.manual_seed(0)
    model = lpbnn.build(net, method, **options).train()
    step = TrainStep(model, SIZE, budget)
    x, y = torch.randn(SIZE, 3, 8, 8), torch.randint(0, 5, (SIZE,))
    step(x, y)  # the first call compares the compiled loss with the plain one
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x, y)}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step(x, y)["loss"]
    loss.backward()
    torch._dynamo.reset()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(found.values()), gradients


def made(net: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return net()


def as_torch_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "compiled", lambda f, *_: torch.compile(f))
    monkeypatch.setattr("lpbnn.training.step.compiled", kept.compiled)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "spared"), [(Branches, 2 + 3), (Blocks, 3), (Attention, 2 / 4)])
def test_what_can_be_multiplied_again_is_not_kept(
    net: type[nn.Module], spared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of r * x for three layers of one x, one; beside a concatenated x, none; and no sums of blocks."""
    ours, gradients = parted("lpbnn", made(net))
    as_torch_would(monkeypatch)
    theirs, expected = parted("lpbnn", made(net))
    assert spared <= (theirs - ours) / MAP < spared + 1  # and a little of the factors
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_plain_network_keeps_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = parted("mcp", made(Branches))
    as_torch_would(monkeypatch)
    assert parted("mcp", made(Branches))[0] == ours


class BySize(nn.Module):
    """A product with a number that a compiler does not know where pictures come in several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x * x.shape[-1]).mean((2, 3))


def test_a_product_with_a_size_is_no_map_of_ours() -> None:
    step = TrainStep(lpbnn.build(BySize(), "mcp").train(), SIZE)
    for size in (8, 10):
        step(torch.randn(SIZE, 3, size, size), torch.randint(0, 5, (SIZE,)))["loss"].backward()


def small() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3)
    return nn.Sequential(convolution, nn.GELU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("lpbnn", {"include": "0"}), ("mcdropout", {})])
def test_a_memory_budget_keeps_less_and_the_gradients(method: str, options: dict[str, Any]) -> None:
    """Those of the noise that was drawn in the forward pass; and no step takes another's code."""
    found = {budget: parted(method, small(), budget, **options) for budget in (1.0, 0.3, 0.0)}
    all_of_it, some, least = (kept for kept, _ in found.values())
    assert all_of_it > some > least
    for _, gradients in found.values():
        torch.testing.assert_close(gradients, found[1.0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "norm", "task", "in_loops"),
    [
        ("lpbnn", nn.BatchNorm2d(4), "classification", True),
        ("lpbnn", nn.BatchNorm2d(4), "segmentation", False),
        ("lpbnn", nn.GroupNorm(2, 4), "classification", False),
        ("mcp", nn.BatchNorm2d(4), "classification", False),
    ],
)
def test_sums_by_rows_are_in_loops_and_no_others(
    method: str, norm: nn.Module, task: str, in_loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda f, options: given.append(options) or f)
    options: dict[str, Any] = {"members": 2, "num_data": 100} if method == "lpbnn" else {}
    dense = task == "segmentation"
    head = nn.Conv2d(4, 5, 1) if dense else nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    model = lpbnn.build(nn.Sequential(nn.Conv2d(3, 4, 3), norm, head), method, task=task, **options)
    y = torch.randint(0, 5, (SIZE, 6, 6) if dense else (SIZE,))
    TrainStep(model.train(), SIZE)(torch.randn(SIZE, 3, 8, 8), y)
    assert ("triton.persistent_reductions" in given[0]) is in_loops
