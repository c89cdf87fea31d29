"""Linear layers that keep their weight transposed: ``Conv1D`` of transformers, and copies of it.

GPT-2 computes x W + b with W (inputs, outputs). Where such a layer is to be converted, an ``nn.Linear`` with
W^T takes its place first, so that every method finds a layer that it knows. ``undo`` puts the layer back.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.convert.attention import linear_of
from lpbnn.convert.wrapper import move_hooks

PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class _Origin:
    """Holds the replaced layer, without its weights, where ``nn.Module`` does not register it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def is_transposed_linear(module: nn.Module) -> bool:
    """Return True for a linear layer whose weight is (inputs, outputs), known by its name and shapes.

    Example:
        >>> class Conv1D(nn.Module):
        ...     def __init__(self, nf, nx):
        ...         super().__init__()
        ...         self.nf = nf
        ...         self.weight, self.bias = (
        ...             nn.Parameter(torch.zeros(nx, nf)),
        ...             nn.Parameter(torch.zeros(nf)),
        ...         )
        >>> is_transposed_linear(Conv1D(3, 2)), is_transposed_linear(nn.Conv1d(3, 2, 1))
        (True, False)
    """
    weight = module._parameters.get("weight")
    if type(module).__name__ != "Conv1D" or weight is None or weight.dim() != 2:
        return False
    return getattr(module, "nf", None) == weight.shape[1] and not module._modules


def computes_linear(layer: Any) -> bool:
    """Return True if a layer of this kind computes x W + b, with no code of its own that does more."""
    weight, bias, mode = layer.weight, getattr(layer, "bias", None), layer.training
    if weight.is_meta:
        return True
    x = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = x @ weight if bias is None else x @ weight + bias
    try:
        with torch.no_grad():
            found = layer.eval()(x)
    except Exception:
        return False  # its forward wants something else
    finally:
        layer.train(mode)
    scale = 1e-6 + float(expected.detach().abs().max())
    tolerance = scale * 8 * torch.finfo(weight.dtype).eps ** 0.5
    return found.shape == expected.shape and torch.allclose(found, expected, 0.0, tolerance)


def replace_by_linear(layer: nn.Module) -> nn.Linear:
    """Return an ``nn.Linear`` with a copy of the weight, transposed; ``restore_origin`` turns it back."""
    weight: Any = layer._parameters.pop("weight")
    bias = layer._parameters.pop("bias", None)
    linear = linear_of(weight.detach().mT.contiguous(), bias)
    linear.weight.requires_grad_(weight.requires_grad)
    linear.train(layer.training)
    _move_all_hooks(layer, linear)
    linear.__dict__["_origin"] = _Origin(layer)
    return linear


def restore_origin(linear: nn.Module) -> nn.Module | None:
    """Return the layer that ``replace_by_linear`` replaced, with the weight as it is now; None for others."""
    origin = linear.__dict__.pop("_origin", None)
    if origin is None:
        return None
    layer: nn.Module = origin.layer
    weight: Tensor = linear.weight  # type: ignore[assignment]
    transposed = weight.detach().mT.contiguous()
    layer.register_parameter("weight", nn.Parameter(transposed, weight.requires_grad))
    layer.register_parameter("bias", linear._parameters["bias"])
    _move_all_hooks(linear, layer)
    return layer.train(linear.training)


def _move_all_hooks(source: nn.Module, target: nn.Module) -> None:
    move_hooks(source, target)
    for name in PRE_HOOKS:  # these stay with a layer that is called inside of its wrapper
        source.__dict__[name], target.__dict__[name] = (
            target.__dict__[name],
            source.__dict__[name],
        )
