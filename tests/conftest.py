"""Every test starts from one seed, on one thread: pytest-xdist already fills the cores."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
