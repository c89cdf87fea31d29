"""Held-out outputs: those that a prediction averages, however the inputs are given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import methods
from lpbnn.calibration.held_out import batch_pairs, member_outputs, to_cells
from lpbnn.likelihoods import MultiLabel


class Sum(nn.Module):
    """The second input is optional, so that a call without it does not fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.body(a if b is None else a + b.sum(1, keepdim=True))))


def forms(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"tensor": a, "tuple": (a, b), "mapping": {"a": a, "b": b}}


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
@pytest.mark.parametrize("method", methods.names())
def test_they_are_those_that_predict_averages(method: str, form: str) -> None:
    model = lpbnn.build(Sum(), method, num_data=100).train()
    x = forms(torch.randn(6, 5), torch.randn(6, 2))[form]
    if method == "tradi":
        model.after_step()
        model.after_fit([])
    outputs = member_outputs(model, x, samples=2, seed=3)
    predicted = lpbnn.predict(model, x, samples=2, seed=3)
    torch.testing.assert_close(model.likelihood.summary(outputs).values.mean(0), predicted.probs)
    assert not outputs.requires_grad
    assert model.training


@pytest.mark.parametrize("method", methods.names())
def test_every_input_matters(method: str) -> None:
    model = lpbnn.build(Sum(), method, num_data=100)
    a, b = torch.randn(6, 5), torch.randn(6, 2)
    if method == "tradi":
        model.after_step()
        model.after_fit([])
    found = [member_outputs(model, x, 1, seed=0) for x in forms(a, b).values()]
    assert torch.equal(found[1], found[2])
    assert not torch.allclose(found[0], found[1])


def test_draws_follow_one_another_in_the_order_of_their_passes() -> None:
    model = lpbnn.build(Sum(), "lpbnn", members=3, num_data=100)
    x = torch.randn(6, 5)
    both, frozen = member_outputs(model, x, 2, seed=3), lpbnn.freeze(model, samples=2, seed=3)
    torch.testing.assert_close(both, frozen(x))


@pytest.mark.parametrize("given", [3, None, lambda: iter([])])
def test_what_cannot_be_iterated_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="expected batches \\(inputs, targets\\).*got "):
        next(batch_pairs(given))


def test_labels_of_another_shape_are_refused_for_several_labels_too() -> None:
    outputs = torch.randn(2, 6, 3)
    assert to_cells(outputs, torch.ones(6, 3), MultiLabel()).labels.shape == (6, 3)
    for labels in (torch.ones(6, 4), torch.ones(5, 3), torch.ones(6)):
        with pytest.raises(ValueError, match="shape"):
            to_cells(outputs, labels, MultiLabel())
