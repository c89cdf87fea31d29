"""Precision: what must not be computed, or kept, in half precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32, and anything else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, for small tensors that everything else depends on."""
    if device.type == "meta":  # it has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class WideBuffers(nn.Module):
    """A module whose own buffers follow it to a device, but never to half precision.

    In half precision a running average would not move: in bfloat16 0.999 * 13 is 13, and in float16 a weight
    of 1e-8 is 0.

    Example:
        >>> class Average(WideBuffers):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.register_buffer("value", torch.full((1,), 1.001))
        >>> Average().bfloat16().value
        tensor([1.0010])
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            cast = self._buffers[name]
            if buffer is not None and cast is not None and at_least_float32(cast) is not cast:
                self._buffers[name] = at_least_float32(buffer).to(cast.device)
        return self
