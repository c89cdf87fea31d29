"""Calls with odd values: an answer that is one, or an error of the kind that wrong arguments have."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import methods

TRIES = 60  # of each method
TOLD = (ValueError, TypeError, IndexError)
INPUTS: tuple[Any, ...] = (
    *(torch.randn(shape) for shape in ((4, 5), (1, 5), (4, 6), (4,), (0, 5), (2, 4, 5), ())),
    *(torch.zeros(4, 5, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.float64)),
    *(torch.full((4, 5), value) for value in (math.nan, math.inf, 1e38, -1e38, 1e-45)),
    *(None, "x", [], {}, (), [1.0] * 5, {"x": torch.randn(4, 5)}, (torch.randn(4, 5),) * 2),
)
NUMBERS: tuple[Any, ...] = (None, 0, 1, 2, 3, -1, 2.5, True, "2", math.nan, 10**30, torch.tensor(2))
LABELS: tuple[Any, ...] = (
    *(torch.randint(3, shape) for shape in ((4,), (1,), (4, 5), ())),
    *(torch.full((4,), value) for value in (-1, 3, -100, 255)),
    *(
        torch.rand(4, 3),
        torch.full((4, 3), math.nan),
        torch.full((4,), math.nan),
        None,
        [0, 1, 2, 0],
    ),
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))


def is_answer(p: Any) -> bool:
    """Distributions over classes, with finite scores."""
    values: tuple[Tensor, ...] = (p.probs, p.total, p.epistemic, p.ood_score)
    return all(bool(v.isfinite().all()) for v in values) and bool(
        torch.allclose(p.probs.sum(1), torch.ones(()), atol=1e-4)
    )


def is_of_shapes(error: RuntimeError) -> bool:
    """True for torch's own errors about inputs that a layer does not take."""
    return any(word in str(error) for word in ("shape", "size", "dtype", "expected"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", methods.names())
def test_a_prediction_is_an_answer_or_told(method: str) -> None:
    draw, model = random.Random(method), lpbnn.build(net(), method, num_data=10)
    for _ in range(TRIES):
        options = {name: draw.choice(NUMBERS) for name in ("chunk", "seed") if draw.random() < 0.3}
        if draw.random() < 0.3:
            options["samples"] = draw.choice(NUMBERS[:-2])
        x = draw.choice(INPUTS)
        try:
            found = lpbnn.predict(model, x, **options)
        except TOLD:
            continue
        except RuntimeError as error:
            if not is_of_shapes(error):
                raise
            continue
        assert is_answer(found), (x, options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", methods.names())
def test_a_loss_is_a_number_or_told(method: str) -> None:
    draw, model = random.Random(method), lpbnn.build(net(), method, num_data=10)
    for _ in range(TRIES):
        x, y = draw.choice(INPUTS), draw.choice(LABELS)
        try:
            loss = model.loss(x, y)["loss"]
        except TOLD:
            continue
        except RuntimeError as error:
            if not is_of_shapes(error):
                raise
            continue
        finite = isinstance(x, Tensor) and bool((x.abs() < 1e30).all())
        odd_labels = isinstance(y, Tensor) and y.is_floating_point() and bool(y.isnan().any())
        assert loss.dim() == 0
        assert loss.isfinite() or not finite or odd_labels, (x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", methods.names())
def test_an_option_is_taken_or_told(method: str) -> None:
    draw = random.Random(method)
    names = list(methods.load(method).Config.__dataclass_fields__)
    small = [value for value in NUMBERS if not (type(value) is int and value > 10**6)]
    for _ in range(TRIES):
        options = {"num_data": 10, draw.choice(names): draw.choice(small)}
        try:
            model = lpbnn.build(net(), method, **options)
        except TOLD:
            continue
        assert is_answer(lpbnn.predict(model, torch.randn(4, 5))), options
