"""Every test starts from one seed, on one thread: pytest-xdist already fills the cores."""

import os

# Some virtual machines announce Intel's matrix unit (AMX) and die of an illegal instruction when
# torch's bfloat16 kernels use it. Read when torch loads, so it is set before.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
