"""Layers whose rows are not those of the batch: members run one by one, or refused by name."""

import pickle

import pytest
import torch
from networks import members_and_ordinary, ordinary
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


OTHER_ROWS = [(TimeFirst, (6, 8, 5), "rnn"), (Queries, (6, 5), "query")]
ONE_BY_ONE = "members cannot run as rows of one batch in this network: "


def whole_networks(model: lpbnn.UncertainModel, x: Tensor) -> Tensor:
    """The outputs of the members, each as an ordinary network."""
    with torch.no_grad():
        sampled = model.sample()
        return torch.stack([ordinary(model, sampled, j)(x) for j in range(model.members)])


@pytest.mark.parametrize(("net", "shape", "exclude"), OTHER_ROWS)
def test_a_layer_with_other_rows_runs_its_members_one_by_one(
    net: type, shape: tuple[int, ...], exclude: str
) -> None:
    model = lpbnn.build(net().double(), "batchensemble", members=4, exclude=exclude)
    x = torch.randn(*shape).double()
    with pytest.warns(UserWarning, match=ONE_BY_ONE):
        found = model(x)
    torch.testing.assert_close(found, whole_networks(model, x))
    torch.testing.assert_close(model(x), found)  # without a second warning


@pytest.mark.parametrize(("net", "shape", "exclude"), OTHER_ROWS)
def test_a_layer_with_other_rows_is_refused_without_a_check(
    net: type, shape: tuple[int, ...], exclude: str
) -> None:
    model = lpbnn.build(net(), "batchensemble", members=4, exclude=exclude, check=False)
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
    no_layer = [] if kind == "buffer" else ["table"]  # or build warns that it cannot be converted
    model = lpbnn.build(Table(kind).double(), "batchensemble", members=4, exclude=no_layer)
    x = torch.randn(6, 5).double()
    expected = whole_networks(model, x)
    with torch.set_grad_enabled(grad):
        with pytest.warns(UserWarning, match=ONE_BY_ONE + ".*'mix'"):
            found = model(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model(x), expected)  # the second time, too
    left = lpbnn.build(Table(kind), "batchensemble", members=4, exclude=["mix", *no_layer])
    assert left(x.float()).shape == (4, 6, 3)


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


def test_a_parameter_that_goes_into_an_expansion_point_is_no_batch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.fc(x * scale.sum())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 4), Scaled()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x), self.scale)

    net = Net()
    x = torch.randn(6, 5)  # as many examples as the parameter is long
    expected = net(x)
    model = lpbnn.build(net, "batchensemble", include="last", init_std=0.0)
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


@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_is_replaced_in_every_pass(inference: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = lpbnn.build(Replaces(), "batchensemble", members=2)
        with torch.inference_mode(inference):
            assert model.loss(torch.randn(8, 4), torch.randint(0, 3, (8,)))["loss"] > 0


@pytest.mark.parametrize("inference", [False, True])
def test_a_network_for_batches_of_one_size_runs_its_members_one_by_one(inference: bool) -> None:
    model = lpbnn.build(Fills().double(), "batchensemble", members=2)
    x, y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    with torch.inference_mode(inference), pytest.warns(UserWarning, match=ONE_BY_ONE):
        assert model.loss(x, y)["loss"] > 0
    torch.testing.assert_close(lpbnn.predict(model, x).members, whole_networks(model, x).softmax(2))


class Similarity(nn.Module):
    """Compares examples with given prototypes, the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.last = Compare()

    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return self.last(self.embed(x), prototypes)


class Compare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return self.fc(x) @ prototypes.T


@pytest.mark.parametrize("include", [None, "last"])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_input_without_examples_is_known_in_a_batch_of_its_size(
    include: str | None, by_name: bool
) -> None:
    model = lpbnn.build(Similarity(), "batchensemble", members=3, include=include).double().eval()
    x, prototypes = torch.randn(7, 5).double(), torch.randn(4, 6).double()

    def call(batch: int) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        inputs = (x[:batch], prototypes)
        return dict(zip(("x", "prototypes"), inputs, strict=True)) if by_name else inputs

    expected = lpbnn.predict(model, call(7)).members
    again = lpbnn.build(Similarity(), "batchensemble", members=3, include=include).double()
    again.load_state_dict(model.state_dict())
    for one in (model, again):
        for chunk in (None, 2):
            found = lpbnn.predict(one, call(4), chunk=chunk).members
            torch.testing.assert_close(found, expected[:, :4])
    labels = torch.tensor([0, 1, 2, 3])
    assert model.train().loss(call(4), labels)["loss"].isfinite()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "mcp", "ensemble"])
def test_an_input_with_several_rows_for_each_example_of_a_first_batch_holds_none(
    method: str, first: int, nested: bool
) -> None:
    """Eight prototypes, first seen beside two or four examples, then beside eight."""

    class Net(Similarity):
        def forward(self, x: Tensor, prototypes: Tensor | dict[str, Tensor]) -> Tensor:
            table = prototypes["table"] if isinstance(prototypes, dict) else prototypes
            x = super().forward(x, table)
            return x @ table

    torch.manual_seed(0)
    model = lpbnn.build(Net(), method).double()
    table, x = torch.randn(8, 6).double(), torch.randn(9, 5).double()
    given = {"table": table} if nested else table
    lpbnn.predict(model, (x[:first], given), chunk=1)
    expected = lpbnn.predict(model, (x, given), seed=0).members  # nine cannot be mistaken
    for chunk in (None, 2, 5):
        found = lpbnn.predict(model, (x[:8], given), seed=0, chunk=chunk).members
        torch.testing.assert_close(found, expected[:, :8])


class Views(nn.Module):
    """Each example has several views, in rows of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, views: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) + views.reshape(len(x), -1, 6).mean(1))


@pytest.mark.parametrize("method", ["batchensemble", "mcp"])
@pytest.mark.filterwarnings("ignore:members cannot run as rows")
def test_views_of_examples_are_not_torn_from_them(method: str) -> None:
    model = lpbnn.build(Views(), method)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, (torch.randn(6, 5), torch.randn(12, 6)), chunk=2)
    x, views = torch.randn(6, 5), torch.randn(6, 6)  # one view for each
    if method == "batchensemble":
        torch.testing.assert_close(model.eval()(x, views)[0], reference(model, x, views))


def reference(model: lpbnn.UncertainModel, *inputs: Tensor) -> Tensor:
    """The output of the first member as an ordinary network."""
    with torch.no_grad():
        return ordinary(model, model.sample(), 0)(*inputs)


class Looks(nn.Module):
    """Looks examples up in a table of seven rows that the part behind the encoder is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encoder, self.embed = nn.Linear(5, 6), nn.Embedding(7, 6)
        self.register_buffer("table", torch.randn(7, 6))
        self.part = Compare()

    def forward(self, x: Tensor) -> Tensor:
        table = self.table if self.kind == "buffer" else self.embed(torch.arange(7))
        return self.part(torch.tanh(self.encoder(x)), table) @ table


@pytest.mark.parametrize("way", ["as it is", "state dict", "pickle", "freeze"])
@pytest.mark.parametrize("kind", ["buffer", "computed"])
def test_a_table_that_goes_into_an_expansion_point_is_no_batch_of_its_size(
    kind: str, way: str
) -> None:
    torch.manual_seed(0)
    model = lpbnn.build(Looks(kind), "batchensemble", members=3, include="part").double()
    x = torch.randn(9, 5).double()
    expected = lpbnn.predict(model, x).members  # nine examples cannot be mistaken for the table
    assert model.expand_at == ["part"]
    if way == "state dict":
        again = lpbnn.build(Looks(kind), "batchensemble", members=3, include="part").double()
        again.load_state_dict(model.state_dict())
        model = again
    elif way != "as it is":
        model = pickle.loads(pickle.dumps(model)) if way == "pickle" else lpbnn.freeze(model)
    torch.testing.assert_close(lpbnn.predict(model, x[:7]).members, expected[:, :7])


class Portions(nn.Module):
    """Computes a part in portions of eight rows, more than a comparison has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.part = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.part(rows) for rows in self.embed(x).split(8)]))


@pytest.mark.parametrize(
    ("method", "options"),
    [("mcdropout", {}), ("abnn", {}), ("batchensemble", {"batch_norm": "member"})],
)
def test_a_part_of_the_rows_is_not_taken_for_rows_of_the_members(
    method: str, options: dict[str, str]
) -> None:
    """Portions of eight rows tear the fourteen examples of a member apart."""
    model = lpbnn.build(Portions(), method, members=2, **options)
    x = torch.randn(14, 5)
    lpbnn.predict(model, x[:3])
    assert model.execution == "batched"
    with pytest.raises(ValueError, match="in a pass of 28 rows"):
        lpbnn.predict(model, x)


class Adjacent(nn.Module):
    """A graph whose edges are a matrix beside the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(edges @ torch.tanh(self.embed(x)))


@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "ensemble"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:members cannot run", "ignore:Sparse CSR")
def test_a_sparse_matrix_gives_what_a_dense_one_gives(layout: torch.layout, method: str) -> None:
    model, x, edges = lpbnn.build(Adjacent(), method), torch.randn(6, 5), torch.eye(6).roll(1, 0)
    edges[2, 4] = 0.5
    sparse = edges.to_sparse(layout=layout)
    found = lpbnn.predict(model, (x, sparse), seed=0).probs
    torch.testing.assert_close(found, lpbnn.predict(model, (x, edges), seed=0).probs)
    with pytest.raises(ValueError, match="cannot be taken apart"):
        lpbnn.predict(model, (x, sparse), chunk=2)
    edges[2, 4] = float("nan")
    with pytest.raises(ValueError, match="1 of 6 examples are NaN or infinite: examples 2"):
        lpbnn.predict(model, (x, edges.to_sparse(layout=layout)))
