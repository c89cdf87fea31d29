r"""The gradient of s behind a batch norm, by sums over pixels that do not wait for batch norm's.

The output of a converted layer is s * c, c = conv(W, r * x), and the gradient of s is, by row, the sum of
g * c over pixels, g the gradient by s * c. If a batch norm that sums by rows comes next (``lpbnn.norms``),

.. math::
    g = k_1 m + k_2 c + k_3, \qquad
    \sum g \odot c = k_1 \sum m \odot c + k_2 \sum c \odot c + k_3 \sum c

with m the gradient that comes into the batch norm and k a number for each row and channel. Batch norm's own
sums are in k, so g * c is summed after them: a second pass over the same maps. The sums on the right read m
and c alone, as batch norm's do, and a compiler makes one pass of all of them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims
PIXELS = [2, 3]  # dimensions of a map: rows, channels, height, width
DEEPEST = 12  # operations from g to what it is made of; batch norm's backward pass has eight


class Term(NamedTuple):
    """A map (None: ones) times factors: numbers, or one number for each row and channel."""

    map: fx.Node | None
    factors: tuple[fx.Node | float, ...]


def share_sums(graph: fx.Graph) -> int:
    """Rewrite a joint graph's sums of g * c by those of m and c, in place; how many there were.

    What is not exactly of that form is left as it is.
    """
    found = 0
    for node in list(graph.nodes):
        if (parts := _parts(node)) is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_summed(graph, node, *parts))
            graph.erase_node(node)
            found += 1
    if found:
        graph.eliminate_dead_code()  # the products; and g, where the gradient of s was all it was for
    return found


def _parts(node: fx.Node) -> tuple[fx.Node, list[Term]] | None:
    """c and the terms of g, if a node is a sum of g * c as above."""
    over_pixels = node.target is aten.sum.dim_IntList and node.args[1:] == (PIXELS, True)
    if not over_pixels or node.kwargs or _value(node) is None:
        return None
    product = node.all_input_nodes[0]
    if product.target is not aten.mul.Tensor or len(product.users) > 1:  # then it is made anyway
        return None
    for g, multiple in (product.args, product.args[::-1]):
        c = _convolution(multiple)
        if c is None or not isinstance(g, fx.Node) or not _same(_shape(g), _shape(c)):
            continue
        terms = _terms(g, c)
        maps = {term.map for term in terms}
        known = all(_value(map) is not None for map in maps if map is not None)
        if known and len(maps) == 3 and maps > {c, None}:
            return c, terms
    return None


def _convolution(node: Any) -> fx.Node | None:
    """The convolution whose output a node is."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.mul.Scalar and node.args[1] == 1:  # so addcmul's backward pass has it
        return _convolution(node.args[0])
    shape = _shape(node)
    # Maps of one pixel cannot be told from factors, and there is nothing to sum.
    is_map = len(shape) == 4 and _floating(node) and not _same(shape[2:], (1, 1))
    return node if is_map and node.target is aten.convolution.default else None


def _terms(node: fx.Node, c: fx.Node, depth: int = 0) -> list[Term]:
    """What a map is a sum of. Maps without c in them stay in one piece: it is read as it is elsewhere."""
    itself = [Term(node, ())]
    if node is c:
        return itself
    if _is_factor(node, c):
        return [Term(None, (node,))]
    if depth == DEEPEST or not _floating(node):
        return itself
    terms: list[Term] = []
    for one, factor in _addends(node):
        if not _is_factor(factor, c):
            one, factor = factor, one
        if not isinstance(one, fx.Node) or not _is_factor(factor, c):
            return itself
        of_it = _terms(one, c, depth + 1)
        terms += [Term(map, (*factors, factor)) for map, factors in of_it]
    maps = {term.map for term in terms}
    return terms if terms and (c in maps or len(maps - {None}) < 2) else itself


def _addends(node: fx.Node) -> list[tuple[Any, Any]]:
    """The products of two that a node is the sum of; none where it is not that simple."""
    if node.kwargs:
        return []
    match node.target, node.args:
        case ((aten.expand.default | prims.convert_element_type.default), (a, *_)):
            return [(a, 1)]
        case aten.neg.default, (a,):
            return [(a, -1)]
        case ((aten.div.Scalar | aten.div.Tensor), (a, int() | float() as b)) if b:
            return [(a, 1 / b)]
        case ((aten.mul.Tensor | aten.mul.Scalar), (a, b)):
            return [(a, b)]
        case aten.add.Tensor, (a, b):
            return [(a, 1), (b, 1)]
        case aten.sub.Tensor, (a, b):
            return [(a, 1), (b, -1)]
        case aten.addcmul.default, (a, b, c):
            return [(a, 1), (b, c)]
    return []


def _summed(graph: fx.Graph, node: fx.Node, c: fx.Node, terms: list[Term]) -> fx.Node:
    """The sum of the terms times c over pixels, in at least float32, as the node has it in the end."""
    dtype = torch.promote_types(c.meta["val"].dtype, torch.float32)

    def precise(a: fx.Node, dtype: torch.dtype = dtype) -> fx.Node:
        same = a.meta["val"].dtype == dtype
        return a if same else _call(graph, prims.convert_element_type.default, a, dtype)

    sums: dict[fx.Node | None, fx.Node] = {}
    for map in dict.fromkeys(term.map for term in terms):
        product = precise(c)
        if map is not None:
            product = _call(graph, aten.mul.Tensor, precise(map), product)
        sums[map] = _call(graph, aten.sum.dim_IntList, product, PIXELS, True)

    def times(a: fx.Node, factor: fx.Node | float) -> fx.Node:
        if factor == 1:
            return a
        by = precise(factor) if isinstance(factor, fx.Node) else factor
        return _call(graph, aten.mul.Tensor, a, by)

    parts = [reduce(times, term.factors, sums[term.map]) for term in terms]
    total = reduce(lambda a, b: _call(graph, aten.add.Tensor, a, b), parts)
    return precise(total, node.meta["val"].dtype)


def _call(graph: fx.Graph, operation: Any, *args: Any) -> fx.Node:
    """A new node, which knows its shape and precision as the others do."""
    from torch._guards import detect_fake_mode

    node = graph.call_function(operation, args)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    with detect_fake_mode(values) or nullcontext(), torch.no_grad():
        node.meta["val"] = operation(*values)
    return node


def _is_factor(a: Any, c: fx.Node) -> bool:
    """Whether an argument is a number, or has one for each row and channel of c.

    One for each channel alone is of a batch norm that sums all rows at once: nothing to share with it.
    """
    return isinstance(a, int | float) or _same(_shape(a), (*_shape(c)[:2], 1, 1))


def _same(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal whatever the sizes are that a compiler does not know yet."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if len(shape) != len(other):
        return False
    return all(statically_known_true(a == b) for a, b in zip(shape, other, strict=True))


def _shape(a: Any) -> Sequence[Any]:
    value = _value(a)
    return () if value is None else value.shape


def _floating(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.is_floating_point()


def _value(a: Any) -> Tensor | None:
    value = a.meta.get("val") if isinstance(a, fx.Node) else None
    return value if isinstance(value, Tensor) else None
