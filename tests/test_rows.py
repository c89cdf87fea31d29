"""Rows that are not those of the batch: refused by name, or left as they are."""

import pytest
import torch
from torch import Tensor, nn

import lpbnn


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0])[-1]


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(8, 5))
        self.fc = nn.Linear(5, 5)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.fc(self.query).T)


@pytest.mark.parametrize(("net", "shape"), [(TimeFirst, (6, 8, 5)), (Queries, (6, 5))])
def test_a_layer_with_other_rows_is_refused(net: type, shape: tuple[int, ...]) -> None:
    model = lpbnn.build(net(), "batchensemble", members=4)
    with pytest.raises(ValueError, match="first dimension 8, in a pass of 24 rows.*exclude="):
        model(torch.randn(*shape))


def test_side_inputs_do_not_depend_on_the_chunk() -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 6)

        def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
            return self.fc(x) @ prototypes.T

    prototypes, x = torch.randn(8, 6), torch.randn(16, 5)
    for method in ("batchensemble", "mcp"):
        model = lpbnn.build(Prototypes(), method)
        whole = lpbnn.predict(model, (x, prototypes)).probs
        assert whole.shape == (16, 8)
        for chunk in (4, 8, 24, 32):
            parts = lpbnn.predict(model, (x, prototypes), chunk=chunk).probs
            torch.testing.assert_close(parts, whole)


def test_a_parameter_that_goes_into_a_stage_is_no_batch() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.fc(x * scale.sum())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.stage = nn.Linear(5, 4), Stage()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.stage(self.first(x), self.scale)

    net = Net()
    x = torch.randn(6, 5)  # as many examples as the parameter is long
    expected = net(x)
    model = lpbnn.build(net, "batchensemble", include="stage", spread=0.0)
    torch.testing.assert_close(model(x)[0], expected)
