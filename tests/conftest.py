"""Every test starts from one seed, on one thread: pytest-xdist already fills the cores."""

import os

# Some virtual machines announce Intel's matrix unit (AMX) and die of an illegal instruction when
# torch's bfloat16 kernels use it. Read when torch loads, so it is set before.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from networks import ResNet, settle

import lpbnn
from lpbnn.members import ensemble, partial

torch.set_num_threads(1)
# `make test` tries the same examples every time; `make test-all` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fill_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose whether every batch counts as one that fills the device, or none."""

    def choose(yes: bool) -> None:
        full = dict.fromkeys(partial.FULL, 0 if yes else 2**60)
        for module in (partial, ensemble):
            monkeypatch.setattr(module, "FULL", full)
        monkeypatch.setattr(partial, "FULL_PART", full)

    return choose


@pytest.fixture
def model() -> lpbnn.UncertainModel:
    """Three members of a small network, whose inputs are ``x``."""
    return lpbnn.build(settle(ResNet()), "lpbnn", members=3, num_data=10).double()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 3, 8, 8, dtype=torch.float64)
