r"""What a method should cost, on paper: operations and bytes from the shapes of a network alone.

A layer with weight W (m inputs, p outputs) that gives P positions of output per row does
:math:`2 P |W|` operations per row forward and twice that backward. The member factors add two products per
layer, over its input and its output, and the autoencoder, whose operations do not grow with the batch:
:math:`2 J m k (2 + S)` for S draws of z, k numbers each. ``docs/cost.md`` says what follows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from lpbnn import backbones
from lpbnn.convert.checks import SUPPORTED, TRANSPOSED, widths
from lpbnn.engine.bench.workload import Workload
from lpbnn.members.rows import rows_needed

NUMBER = 2  # bytes, in bf16
UNFUSED = 8  # times that autograd passes over what is scaled, a kernel for every product and sum


@dataclass(frozen=True)
class Layer:
    """A layer as it is used: numbers per example that come in (x) and go out (y)."""

    path: str
    inputs: int
    outputs: int
    weights: int
    x: int
    y: int
    positions: int
    converted: bool
    biased: bool

    @property
    def operations(self) -> int:
        """Of one example, forward: a product and a sum per weight and position."""
        return 2 * self.positions * self.weights


def trace(net: nn.Module, shape: tuple[int, ...], include: str | None = None) -> list[Layer]:
    """The layers of a network in the order in which they are called for one input of ``shape``.

    >>> [
    ...     layer.operations
    ...     for layer in trace(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), (3, 4, 4))
    ... ]
    [6912]
    """
    found: list[Layer] = []
    paths = {id(module): path for path, module in net.named_modules()}
    device = next(net.parameters()).device

    def note(module: Any, args: tuple[Any, ...], y: Tensor) -> None:
        inputs, outputs = widths(module)
        x, path = args[0], paths[id(module)]
        turned = isinstance(module, TRANSPOSED)  # every position of its input meets every weight
        positions = x.numel() // inputs if turned else y.numel() // outputs
        sizes = (module.weight.numel(), x.numel(), y.numel(), positions)
        converted = include is None or fnmatchcase(path, include)
        biased = module.bias is not None
        found.append(Layer(path, inputs, outputs, *sizes, converted, biased))

    with _hooks(net, note), torch.no_grad():
        training = net.training
        net.eval()(torch.empty(1, *shape, device=device))
        net.train(training)
    return found


@contextmanager
def _hooks(net: nn.Module, hook: Any) -> Iterator[None]:
    handles = [m.register_forward_hook(hook) for m in net.modules() if isinstance(m, SUPPORTED)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_operations(layers: Sequence[Layer], batch: int, members: int = 1) -> int:
    """Of a step on a batch split among members: backward is twice forward, less the pictures' gradient.

    A member has at least one example: with more members than examples, some are dealt out again.
    """
    rows = rows_needed(batch, members, "split")
    total = sum(3 * y.operations * (rows if y.converted else batch) for y in layers)
    return total - layers[0].operations * (rows if layers[0].converted else batch)


def predict_operations(layers: Sequence[Layer], batch: int, networks: int) -> int:
    """Of a prediction by so many networks: what is not converted runs once per example."""
    return batch * sum(y.operations * (networks if y.converted else 1) for y in layers)


def code_operations(
    layers: Sequence[Layer], members: int, latent: int, samples: int = 1, training: bool = False
) -> int:
    """Of the autoencoders: m inputs to 2 k numbers for each member, and k numbers back for each draw.

    In training k numbers back once more, the mean for the penalties; and backward the gradient of the
    encoder's weight and, twice, that by the decoder's input (r and the decoder are kept as drawn).
    """
    inputs = sum(layer.inputs for layer in layers if layer.converted)
    once = 2 * members * latent * inputs
    return once * ((2 + 1 + 1) + (2 + 2)) if training else once * (2 + samples)


def scaled_numbers(layers: Sequence[Layer], batch: int) -> int:
    """Numbers that are multiplied by r (inputs) and by s (outputs) on their way, once."""
    return batch * sum(layer.x + layer.y for layer in layers if layer.converted)


def added_parameters(layers: Sequence[Layer], members: int, latent: int) -> int:
    """Numbers beyond the network's own: s, the members' biases, encoder and decoder."""
    chosen = [layer for layer in layers if layer.converted]
    s = sum(members * layer.outputs for layer in chosen)
    biases = sum((members - 1) * layer.outputs for layer in chosen if layer.biased)
    codes = sum(2 * latent * (layer.inputs + 1) + layer.inputs * (latent + 1) for layer in chosen)
    return s + biases + codes


def layers_of(workload: Workload) -> list[Layer]:
    """The layers of a workload's network; nothing is computed, whatever the size."""
    with torch.device("meta"):
        net = backbones.build(workload.network, workload.classes, **workload.options)
    return trace(net, (3, *workload.image), workload.include)


def table(workload: Workload, members: Sequence[int], latent: int) -> Table:
    """LP-BNN on paper for several J, relative to the plain network."""
    layers = layers_of(workload)
    plain_train = train_operations(layers, workload.batch)
    plain_predict = predict_operations(layers, workload.test_batch, 1)
    moved = UNFUSED * NUMBER * scaled_numbers(layers, workload.batch)
    height, width = workload.image
    shown = Table(
        title=f"{workload.network} at {width}x{height}, on paper: LP-BNN, latent {latent}",
        caption=f"plain: {plain_train / 1e12:.3g} T operations per step of {workload.batch}, "
        f"{plain_predict / 1e12:.3g} T per prediction of {workload.test_batch}; products with r and s, "
        f"unfused, forward and backward: {moved / 1e9:.3g} GB per step in bf16",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("J", "train", "autoencoders", "predict", "added parameters"):
        shown.add_column(name, justify="right")
    for count in members:
        train = train_operations(layers, workload.batch, count)
        codes = code_operations(layers, count, latent, training=True)
        predict = predict_operations(layers, workload.test_batch, count)
        predict += code_operations(layers, count, latent)
        shown.add_row(
            str(count),
            f"{(train + codes) / plain_train:.4f}",
            f"{codes / 1e9:.3g} G",
            f"{predict / plain_predict:.3f}",
            f"{added_parameters(layers, count, latent) / 1e6:.3g} M",
        )
    return shown
