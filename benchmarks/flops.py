"""Operations of a training step and of a prediction, by ``torch.utils.flop_counter``.

The models are on the meta device: nothing is computed, whatever the size of the network.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lpbnn.bench import PLAIN, Setup
from lpbnn.model import UncertainModel
from lpbnn.predict import predict

META = torch.device("meta")


def train_operations(setup: Setup, method: str, members: int = 1) -> int:
    """Count the operations of the loss and its gradients on one batch."""
    model = _model(setup, method, members)
    with FlopCounterMode(display=False) as counter:
        model.loss(*setup.examples(setup.batch, META))["loss"].backward()
    return counter.get_total_flops()


def predict_operations(setup: Setup, method: str, members: int = 1, samples: int = 1) -> int:
    """Count the operations of one prediction."""
    model = _model(setup, method, members)
    x, _ = setup.examples(setup.test_batch or setup.batch, META)
    with FlopCounterMode(display=False) as counter:
        predict(model, x, samples=samples, keep_members=False)
    return counter.get_total_flops()


def parameters(setup: Setup, method: str, members: int = 1) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in _model(setup, method, members).parameters())


def count(setup: Setup, method: str, members: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for plain and for each J: operations and parameters."""
    return [
        {
            "method": name,
            "members": number,
            "train": train_operations(setup, name, number),
            "predict": predict_operations(setup, name, number),
            "parameters": parameters(setup, name, number),
        }
        for name, number in ((PLAIN, 1), *((method, number) for number in members))
    ]


@lru_cache(maxsize=1)  # the three counts of a row are of one model
def _model(setup: Setup, method: str, members: int) -> UncertainModel:
    # A check of the first batch would compare numbers, which are not there.
    return replace(setup, check=False).model(method, members).to(META)
