"""Stacks of many small tensors, as compilers like them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lpbnn.likelihoods import at_least_float32

IN_ONE_KERNEL = 8  # tensors that a compiler stacks at once


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors stacked, in float32 or better."""
    if len(tensors) == 1:
        return at_least_float32(tensors[0].unsqueeze(0))  # no copy
    if torch.compiler.is_compiling() and len(tensors) > IN_ONE_KERNEL:
        # With more tensors than this the compiler makes a kernel each; with a stack of stacks, one for all.
        starts = range(0, len(tensors), IN_ONE_KERNEL)
        parts = [torch.stack(list(tensors[i : i + IN_ONE_KERNEL])) for i in starts]
        return at_least_float32(torch.cat(parts))
    return at_least_float32(torch.stack(list(tensors)))
