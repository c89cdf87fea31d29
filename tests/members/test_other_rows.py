"""Rows that are not those of the batch: refused by name, or left as they are."""

import pytest
import torch
from networks import members_and_ordinary
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


@pytest.mark.parametrize(
    ("net", "shape", "exclude"), [(TimeFirst, (6, 8, 5), "rnn"), (Queries, (6, 5), "query")]
)
def test_a_layer_with_other_rows_is_refused(
    net: type, shape: tuple[int, ...], exclude: str
) -> None:
    model = lpbnn.build(net(), "batchensemble", members=4, exclude=exclude)
    with pytest.raises(ValueError, match="first dimension 8, in a pass of 24 rows.*exclude="):
        model(torch.randn(*shape))


class Table(nn.Module):
    """A table of as many rows as there will be of members and examples: 24."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        table = torch.randn(32, 5)
        if kind == "buffer":
            self.register_buffer("table", table[:24].clone())
        elif kind == "row":
            self.table = nn.Parameter(table[:1])
        else:
            self.table = nn.Parameter(table if kind == "slice" else table[:24])
        self.mix, self.fc = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "row":  # a row for each example: as it should be
            return self.fc(x + self.mix(self.table.expand(len(x), -1)))
        return self.fc(
            x + self.mix(self.table[:24] if self.kind == "slice" else self.table).mean(0)
        )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "slice"])
def test_a_table_of_the_network_is_no_batch(kind: str, grad: bool) -> None:
    torch.manual_seed(0)
    no_layer = [] if kind == "buffer" else ["table"]  # or build tells that it cannot be converted
    model = lpbnn.build(Table(kind), "batchensemble", members=4, exclude=no_layer)
    x = torch.randn(6, 5)
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # the second time, too
            with pytest.raises(ValueError, match=r"'mix' got a parameter or buffer.*exclude='mix'"):
                model(x)
    left = lpbnn.build(Table(kind), "batchensemble", members=4, exclude=["mix", *no_layer])
    assert left(x).shape == (4, 6, 3)


def test_a_row_of_the_network_may_be_given_to_every_example() -> None:
    torch.manual_seed(0)
    net, x = Table("row").double(), torch.randn(6, 5).double()
    model = lpbnn.build(net, "batchensemble", members=4).double()
    together, alone = members_and_ordinary(model, x)
    torch.testing.assert_close(together, alone)


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
    model = lpbnn.build(net, "batchensemble", include="stage", init_std=0.0)
    torch.testing.assert_close(model(x)[0], expected)


class Replaces(nn.Module):
    """Its buffer is another tensor after every pass; the old one is gone, and its id is free."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return self.b(self.a(x * 2).relu())


class Fills(nn.Module):
    """Its buffer holds the examples of the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.register_buffer("static", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.static.copy_(x)
        return self.a(self.static)


@pytest.mark.parametrize("net", [Replaces, Fills])
@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_changes_is_no_table(net: type[nn.Module], inference: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = lpbnn.build(net(), "batchensemble", members=2)
        with torch.inference_mode(inference):
            assert model.loss(torch.randn(8, 4), torch.randint(0, 3, (8,)))["loss"] > 0
