r"""FastWeight: the one wrapper around an existing layer, y = s * W(r * x) + b, a member for each row.

Four ways to compute it, equal to rounding:

- *scaled activations*: two elementwise products around one call of the layer on all rows;
- *fast convolution*: the same, with a backward pass of its own (``lpbnn.kernels``): training on a GPU
  without a compiler;
- *member weights*: W_j = W * (s_j r_j^T), then the layer's own operation per member. It moves
  J * |W| numbers instead of two activations, which on a CPU costs a convolution 6 % and not 37 %;
- *all members at once*: these weights as one layer of J times the outputs, on a batch not yet spread.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.utils import parametrize

from lpbnn.convert.wrapper import Drawing
from lpbnn.kernels.convolution import Geometry, geometry, member_convolution
from lpbnn.members.rows import (
    Tables,
    plus,
    refuse_table,
    require_multiple,
    require_rows,
    spread,
    times,
)
from lpbnn.rank_one.factors import Factors, draw_all

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SUPPORTED: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
_TRANSPOSED_OPERATION = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


class Draw(NamedTuple):
    """The factors of one layer for M members: r (M, m), s (M, p), bias (M, p) or None.

    In training r may be one draw for each row, (rows, m), rows member-major.
    """

    r: Tensor
    s: Tensor
    bias: Tensor | None

    @property
    def members(self) -> int:
        return self.s.shape[0]

    def take(self, members: slice) -> "Draw":
        return Draw(
            self.r[members], self.s[members], None if self.bias is None else self.bias[members]
        )


def widths(layer: nn.Module) -> tuple[int, int]:
    """Inputs m and outputs p of a supported layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        return layer.in_channels, layer.out_channels
    supported = ", ".join(kind.__name__ for kind in SUPPORTED)
    raise TypeError(f"FastWeight cannot wrap {type(layer).__name__}; it wraps {supported}.")


class FastWeight(Drawing[Draw]):
    """A layer whose rows belong to members: member j computes with W * (s_j r_j^T) and bias b_j.

    The wrapped layer keeps its weight; its bias moves here, once per member. Without a held draw a
    call draws its own factors. Rows are member-major (see ``lpbnn.members``).

    Example:
        >>> from lpbnn.rank_one.factors import PointFactors
        >>> layer = FastWeight(nn.Linear(3, 2), PointFactors(members=4, inputs=3, outputs=2))
        >>> tuple(layer(torch.randn(8, 3)).shape)  # two examples for each of the four members
        (8, 2)
    """

    member_bias: nn.Parameter | None
    _tables: Tables | None = None  # the network's own tensors, in a pass that looks for them

    def __init__(self, layer: nn.Module, factors: Factors, path: str = "") -> None:
        if widths(layer) != (factors.inputs, factors.outputs):
            raise ValueError(
                f"{path or type(layer).__name__} has {widths(layer)} inputs and outputs, the factors "
                f"are made for {(factors.inputs, factors.outputs)}; build them from widths(layer)."
            )
        super().__init__(layer, path)
        self.factors = factors
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        self.register_parameter("member_bias", None)
        if bias is not None:
            copies = bias.detach().repeat(factors.members, 1)
            self.member_bias = nn.Parameter(copies, requires_grad=bias.requires_grad)
            layer._parameters["bias"] = None
        self._rows = 0  # its rows, 0 if nobody said
        self._late = False  # whether examples may come that are not spread yet

    @property
    def known(self) -> bool:
        """Whether the layer is torch's own, untouched: only then do we know its operation."""
        layer = self.layer
        return (
            type(layer) in SUPPORTED
            and not parametrize.is_parametrized(layer)
            and not layer._forward_pre_hooks
        )

    def extra_repr(self) -> str:
        return f"members={self.factors.members}"

    def draw(self, samples: int = 1) -> Draw:
        """Fresh factors for samples * J members."""
        return self._with_bias(self.factors.draw(samples), samples)

    def mean(self) -> Draw:
        """The posterior mean of the factors, J members."""
        return Draw(*self.factors.mean(), self.member_bias)

    def _with_bias(self, factors: tuple[Tensor, Tensor], samples: int) -> Draw:
        bias = self.member_bias
        return Draw(*factors, bias if bias is None or samples == 1 else bias.repeat(samples, 1))

    def restore(self) -> nn.Module:
        """The wrapped layer as it was: the shared weight, and the mean of the members' biases."""
        if self.member_bias is not None:
            first = self.member_bias[0]  # equal biases must come back to the last bit
            mean = first + (self.member_bias - first).mean(0)
            self.layer.bias = nn.Parameter(mean.detach(), self.member_bias.requires_grad)
        return super().restore()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        draw = self._current()
        members = draw.members
        own_weights = draw.r.shape[0] == members  # else a row has its own: no weight is shared
        if self._late and members > 1 and x.shape[0] * members == self._rows:
            if own_weights and self._is_one_product and not args and not kwargs:
                return self._by_all_members(x, draw)
            x = spread(x, members)
        self._check_rows(x, members)
        if own_weights and (members == 1 or self._cheaper_by_weights(x, members)) and self.known:
            return self._by_member_weights(x, draw, *args, **kwargs)
        if not args and not kwargs and (how := self._fast_geometry(x)) is not None:
            y = member_convolution(x, self.layer.weight, draw.r, draw.s, how)  # type: ignore[arg-type]
            return y if draw.bias is None else plus(y, draw.bias)
        return self._by_scaled_activations(x, draw, *args, **kwargs)

    def _check_rows(self, x: Tensor, members: int) -> None:
        name = self.path or "FastWeight"
        require_multiple(x.shape[0], members, name)
        if not torch.compiler.is_compiling():
            require_rows(x.shape[0], self._rows, name)
            if self._tables and members > 1:
                refuse_table(x, self._tables, name)

    def _cheaper_by_weights(self, x: Tensor, members: int) -> bool:
        # A compiler fuses the two products into the neighbouring kernels, and must not be made to
        # specialise on the batch. On a GPU J small convolutions leave it half empty.
        if torch.compiler.is_compiling():
            return False
        if x.is_cuda and not isinstance(self.layer, nn.Linear):
            return False
        inputs, outputs = self.factors.inputs, self.factors.outputs
        return members * self.layer.weight.numel() * inputs <= x.numel() * (inputs + outputs)  # type: ignore[operator,union-attr]

    def _fast_geometry(self, x: Tensor) -> Geometry | None:
        """The convolution, where its own backward pass is wanted and it has one."""
        # A compiler's sums over pixels were measured to be faster (docs/cost.md).
        if torch.compiler.is_compiling() or not x.is_cuda:
            return None
        if not (self.training and torch.is_grad_enabled() and self.known):
            return None
        # torch.func's transformations need a backward pass that they can look into.
        return None if peek_interpreter_stack() is not None else geometry(self.layer)

    def _by_scaled_activations(self, x: Tensor, draw: Draw, *args: Any, **kwargs: Any) -> Tensor:
        linear = isinstance(self.layer, nn.Linear)
        y = self.layer(times(x, draw.r, linear), *args, **kwargs)
        return times(y, draw.s, linear, draw.bias)

    def _by_member_weights(self, x: Tensor, draw: Draw, *args: Any, **kwargs: Any) -> Tensor:
        weights = member_weights(self.layer, draw)
        members = len(weights)
        if isinstance(self.layer, nn.Linear):
            if members == 1:
                return F.linear(x, weights[0], None if draw.bias is None else draw.bias[0])
            rows = x.reshape(members, -1, x.shape[-1])
            if draw.bias is None:
                y = torch.bmm(rows, weights.mT)
            else:
                y = torch.baddbmm(draw.bias.unsqueeze(1), rows, weights.mT)
            return y.reshape(*x.shape[:-1], -1)
        biases = [None] * members if draw.bias is None else draw.bias.unbind()
        outputs = [
            self._operation(part, weight, bias, *args, **kwargs)
            for part, weight, bias in zip(x.chunk(members), weights, biases, strict=True)
        ]
        return outputs[0] if members == 1 else torch.cat(outputs)

    @property
    def _is_one_product(self) -> bool:
        """Whether more outputs are nothing but more rows of the weight."""
        ordinary = isinstance(self.layer, CONVOLUTIONS) and self.layer.groups == 1
        return self.known and (ordinary or isinstance(self.layer, nn.Linear))

    def _by_all_members(self, x: Tensor, draw: Draw) -> Tensor:
        weight = member_weights(self.layer, draw).flatten(0, 1)
        bias = None if draw.bias is None else draw.bias.flatten()
        if isinstance(self.layer, nn.Linear):
            y = F.linear(x, weight, bias).unflatten(-1, (draw.members, -1))
            return y.movedim(-2, 0).flatten(0, 1)
        y = self._operation(x, weight, bias).unflatten(1, (draw.members, -1))
        rows = y.transpose(0, 1).flatten(0, 1)
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return rows.contiguous(memory_format=torch.channels_last) if last else rows.contiguous()

    def _operation(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Any = None
    ) -> Tensor:
        layer = self.layer
        if isinstance(layer, CONVOLUTIONS):
            return layer._conv_forward(x, weight, bias)
        transposed: Any = layer
        padding = transposed._output_padding(
            x,
            output_size,
            transposed.stride,
            transposed.padding,
            transposed.kernel_size,
            len(transposed.kernel_size),
            transposed.dilation,
        )
        operation = _TRANSPOSED_OPERATION[type(transposed)]
        geometry = (
            transposed.stride,
            transposed.padding,
            padding,
            transposed.groups,
            transposed.dilation,
        )
        return operation(x, weight, bias, *geometry)


def member_weights(layer: nn.Module, draw: Draw) -> Tensor:
    r"""W_j = W * (s_j r_j^T) for every member: (M, \*weight.shape), grouped layers included."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    r, s = draw.r.to(weight.dtype), draw.s.to(weight.dtype)
    if isinstance(layer, nn.Linear):
        return weight * (s.unsqueeze(2) * r.unsqueeze(1))
    groups: int = layer.groups  # type: ignore[assignment]
    r, s = r.unflatten(1, (groups, -1)), s.unflatten(1, (groups, -1))
    if isinstance(layer, TRANSPOSED):  # weight: (inputs, outputs / groups, ...)
        outer = r.unsqueeze(3) * s.unsqueeze(2)
    else:  # weight: (outputs, inputs / groups, ...)
        outer = s.unsqueeze(3) * r.unsqueeze(2)
    outer = outer.flatten(1, 2)
    return weight * outer[(...,) + (None,) * (weight.dim() - 2)]


def take(draws: Sequence[Draw], first: int, count: int) -> list[Draw]:
    """``count`` members of every layer's draw, from ``first`` on."""
    return [draw.take(slice(first, first + count)) for draw in draws]


def draw_layers(layers: Sequence[FastWeight], samples: int = 1) -> list[Draw]:
    """Fresh factors of every layer, drawn together."""
    return with_biases(layers, draw_all([layer.factors for layer in layers], samples), samples)


def with_biases(
    layers: Sequence[FastWeight], drawn: Sequence[tuple[Tensor, Tensor]], samples: int = 1
) -> list[Draw]:
    """Drawn factors, with each layer's own biases beside them."""
    return [
        layer._with_bias(factors, samples) for layer, factors in zip(layers, drawn, strict=True)
    ]
