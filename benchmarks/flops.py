"""Operations of a training step and of a prediction, by ``torch.utils.flop_counter``.

The models are on the meta device: nothing is computed, whatever the size of the network.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.tables import name_of
from lpbnn.bench import PLAIN, Setup, text_table
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


def table(setup: Setup, method: str, members: Sequence[int]) -> Table:
    """Return the operations and parameters of plain, absolute, and of each J relative to it."""
    counts = (train_operations, predict_operations, parameters)
    rows = [
        (name, j, *(count(setup, name, j) for count in counts))
        for name, j in ((PLAIN, 1), *((method, j) for j in members))
    ]
    _, _, train, predicted, size = rows[0]
    cells = [
        [
            name_of(name),
            str(j),
            f"{own / 1e12:.4g} ({own / train:.4f})",
            f"{answer / 1e12:.4g} ({answer / predicted:.3f})",
            f"{(stored - size) / 1e6:.3g}",
        ]
        for name, j, own, answer, stored in rows
    ]
    title = f"{setup.backbone}, input {setup.input}, batch {setup.batch} / {setup.test_batch or setup.batch}"
    head = ("method", "J", "train, T operations", "predict, T operations", "added parameters, M")
    return text_table(head, cells, title=title)


@lru_cache(maxsize=1)  # the three counts of a row are of one model
def _model(setup: Setup, method: str, members: int) -> UncertainModel:
    # A check of the first batch would compare numbers, which are not there.
    return replace(setup, check=False).model(method, members).to(META)
