"""Operations of a training step and of a prediction, by ``torch.utils.flop_counter``.

The models are on the meta device: nothing is computed, whatever the size of the network.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lpbnn.predict import predict
from lpbnn.training.bench import PLAIN, Setup, build_model


def train_operations(setup: Setup, method: str, members: int = 1) -> int:
    """Count the operations of the loss and its gradients on one batch."""
    model, (x, y) = build_model(setup, method, members).to("meta"), _examples(setup, setup.batch)
    with FlopCounterMode(display=False) as counter:
        model.loss(x, y)["loss"].backward()
    return counter.get_total_flops()


def predict_operations(setup: Setup, method: str, members: int = 1, samples: int = 1) -> int:
    """Count the operations of one prediction."""
    model = build_model(setup, method, members).to("meta")
    x, _ = _examples(setup, setup.test_batch or setup.batch)
    with FlopCounterMode(display=False) as counter:
        predict(model, x, samples=samples, keep_members=False)
    return counter.get_total_flops()


def parameters(setup: Setup, method: str, members: int = 1) -> int:
    return sum(p.numel() for p in build_model(setup, method, members).parameters())


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


def _examples(setup: Setup, count: int) -> Any:
    return setup.examples(count, torch.device("meta"))
