"""What a compiled step keeps for its backward pass, and what is computed again there.

Members multiply everything that goes into a layer by r. Where plain convolutions share one map, each of a
method's has its own r * x, and a compiler keeps them all beside x; sums of residual blocks are kept beside
the s * y that they are made of. Both are one cheap kernel away from what is kept anyway.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from lpbnn.model import Terms

LEAST = 1e-6  # of a memory budget: at 0 torch does not look at what must be kept
# Sums by rows are faster in loops than with a row at once (docs/results/cost.md). Softmax of pixels is not.
ROW_OPTIONS: dict[str, Any] = {"triton.persistent_reductions": False}
# Torch keeps what is used in places far apart, or made by a long chain of sums: residual sums are both.
SUMS_AGAIN = {"ban_recompute_used_far_apart": False, "ban_recompute_long_fusible_chains": False}

aten = torch.ops.aten
LAYERS = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def compiled(
    function: Callable[..., Terms], memory_budget: float = 1.0, sums_by_rows: bool = False
) -> Callable[..., Terms]:
    """``function``, compiled; its backward pass has ``memory_budget`` of the activations it would keep.

    Args:
        sums_by_rows: whether most sums of the function are those of ``lpbnn.kernels.row_norm.RowNorm``.
    """
    from torch._functorch import config

    options = {"joint_custom_post_pass": _choice(memory_budget)}
    fast = torch.compile(function, options={**options, **(ROW_OPTIONS if sums_by_rows else {})})
    # Forward and backward are parted when the first call is compiled: the settings are around the call.
    settings = {**SUMS_AGAIN, "activation_memory_budget": max(memory_budget, LEAST)}
    return config.patch(settings)(fast)


@cache
def _choice(memory_budget: float) -> Any:
    """The compiler's pass that marks what to keep and what not.

    There is one for each budget, by which the compiler also tells apart steps of the same code: they would
    share what was compiled for the first of them.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.utils.checkpoint import CheckpointPolicy

    class Choice(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for node in draws(graph):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for node in spare_products(graph):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,), str(memory_budget))

    return Choice()


def draws(graph: fx.Graph) -> Iterator[fx.Node]:
    """Random numbers of a joint graph.

    They are marked at every budget; below 1 torch would draw again in the backward pass, and the gradients
    would be those of other noise (pytorch/pytorch#190758).
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            yield node


def spare_products(graph: fx.Graph) -> Iterator[fx.Node]:
    """Products r * x that go into layers, where x is kept without them: one multiplication from it.

    That is where x goes into a layer as it is, too, or was not made by a pointwise operation (a
    concatenation, say). Of several products of an x that can be made again, the first is kept for it.
    """
    backward = _after_gradients(graph)
    products: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        needed = node not in backward and any(user in backward for user in _readers(node))
        if needed and (x := _multiplied(node)) is not None:
            products.setdefault(x, []).append(node)
    for x, of_it in products.items():
        kept_anyway = torch.Tag.pointwise not in getattr(x.target, "tags", ()) or _feeds_a_layer(x)
        yield from of_it if kept_anyway else of_it[1:]


def _multiplied(node: fx.Node) -> fx.Node | None:
    """The x of a product r * x that goes into a layer."""
    if node.target is not aten.mul.Tensor or not _feeds_a_layer(node):
        return None
    shape = node.meta["val"].shape
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    factors = [a for a in tensors if a.meta["val"].shape == shape]
    return _in_one_shape(factors[0]) if factors else None


def _in_one_shape(x: fx.Node) -> fx.Node:
    """The tensor that x is a view of: layers that share an input each have their own."""
    return _in_one_shape(x.all_input_nodes[0]) if x.target in VIEWS else x


def _feeds_a_layer(node: fx.Node) -> bool:
    return any(reader.target in LAYERS for reader in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a tensor, be it by another shape."""
    for user in node.users:
        if user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user


def _after_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What of a joint graph depends on the gradient that comes in: the backward pass."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        comes_in = node.op == "placeholder" and "tangents" in str(node.target)
        if comes_in or any(before in found for before in node.all_input_nodes):
            found.add(node)
    return found
