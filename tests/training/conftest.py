"""A little data and a little network: a whole run takes a fraction of a second."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lpbnn import data
from lpbnn.data import Splits
from lpbnn.training import EvalConfig, RunConfig

Make = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def splits() -> Splits:
    """The digits, a few hundred of them."""
    whole = data.load("digits")
    return replace(
        whole,
        train=whole.train.take(slice(200)),
        val=whole.val.take(slice(50)),
        test=whole.test.take(slice(80)),
        ood={name: part.take(slice(60)) for name, part in whole.ood.items()},
    )


@pytest.fixture
def make() -> Make:
    """A config for a quick run on the CPU; keywords change it."""

    def make(method: str = "mcp", **changes: Any) -> RunConfig:
        quick: dict[str, Any] = {
            "backbone": "mlp",
            "backbone_options": {"hidden": (16,)},
            "epochs": 2,
            "batch_size": 64,
            "device": "cpu",
            "progress": False,
            "evaluate": EvalConfig(examples=2),
        }
        return RunConfig(method, **(quick | changes))

    return make
