"""The state of autograd and of tracers, as the library asks for it."""

import pytest
import torch
from torch import Tensor

from lpbnn.kernels.autograd import is_traced


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_a_tracer_is_known_by_what_it_does_and_a_tensor_by_its_values() -> None:
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.append(is_traced((x,)))
        return x + 1

    function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    function(torch.ones(2, device="meta"))
    assert found == [False, True, True]
