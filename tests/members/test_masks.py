"""Attention masks hold no examples, even if sequences are as long as the batch; padding masks do."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lpbnn

TIME = 6


class Causal(nn.Module):
    """A transformer that makes its mask of attention itself; that of padding is given."""

    def __init__(self, positional: bool = False, loop_members: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.encoder.loop_members = loop_members
        self.head = nn.Linear(8, 3)
        self.positional = positional

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = torch.full((TIME, TIME), True, device=x.device).triu(1)
        x = self.embed(x)
        if self.positional:
            x = self.encoder(x, mask, padding)
        else:
            x = self.encoder(x, mask=mask, src_key_padding_mask=padding)
        return self.head(x[:, -1])


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    padding = torch.zeros(batch, TIME, dtype=torch.bool)
    padding[::2, 1:3] = True  # other examples, other padding
    return torch.randn(batch, TIME, 4).double(), padding


@pytest.mark.parametrize("batch", [TIME - 1, TIME, 2 * TIME])
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("include", ["encoder", "encoder.layers.0"])
def test_a_part_with_a_mask_gives_what_the_whole_network_gives(
    batch: int, positional: bool, in_rows: bool, include: str, fill_device: Callable[[bool], None]
) -> None:
    fill_device(not in_rows)
    net, found = Causal(positional, loop_members=not in_rows).double(), []
    for whole in ({}, {"expand_at": ""}):
        torch.manual_seed(1)
        made = lpbnn.build(copy.deepcopy(net), "batchensemble", include=include, members=3, **whole)
        found.append(lpbnn.predict(made.double(), inputs_of(batch)).members)
        assert made.expand_at != [""] or whole
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    assert found[0].std(0).min() > 0


def inputs_of(batch: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return inputs(batch)


def test_dropout_in_a_part_with_a_mask() -> None:
    model = lpbnn.build(Causal().double(), "mcdropout", members=3)
    assert model.expand_at == ["encoder"]
    assert lpbnn.predict(model, inputs(TIME)).members.shape == (3, TIME, 3)


class Given(nn.Module):
    """The mask of attention is an input of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, src_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_mask)[:, -1])


@pytest.mark.parametrize("method", ["batchensemble", "mcp", "mimo"])
@pytest.mark.parametrize("chunk", [None, 2, 4])
def test_a_mask_that_is_given_is_neither_expanded_nor_cut(method: str, chunk: int | None) -> None:
    model = lpbnn.build(Given().double(), method)
    x, mask = torch.randn(TIME, TIME, 4).double(), torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    expected = torch.cat([lpbnn.predict(model, (row, mask)).probs for row in x.split(1)])
    for call in ((x, mask), {"x": x, "src_mask": mask}):
        found = lpbnn.predict(model, call, chunk=chunk).probs
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_mask_that_is_given_is_not_repeated() -> None:
    model = lpbnn.build(Given(), "mcdropout", expand_at="")
    mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    assert lpbnn.predict(model, (torch.randn(TIME, TIME, 4), mask)).members.shape == (4, TIME, 3)


def test_a_mask_that_is_given_is_not_mixed_by_mimo() -> None:
    model = lpbnn.build(Given(), "mimo")
    mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    assert model.loss((torch.randn(TIME, TIME, 4), mask), torch.zeros(TIME, dtype=torch.int64))[
        "loss"
    ]


def test_a_part_with_a_mask_compiles() -> None:
    model = lpbnn.build(Causal().double(), "batchensemble", include="encoder", members=3).eval()
    call = inputs(TIME)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*call), model(*call))
    torch._dynamo.reset()


def test_a_users_own_mask_is_expanded_if_it_has_a_row_for_each_example() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), Mean()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(self.first(x), mask)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out((x * mask.unsqueeze(-1)).mean(1))

    model = lpbnn.build(Masked().double(), "batchensemble", include="last", members=3)
    x, mask = torch.randn(TIME, TIME, 4).double(), torch.rand(TIME, TIME).round().double()
    assert lpbnn.predict(model, (x, mask)).members.shape == (3, TIME, 3)


@pytest.mark.parametrize("method", ["batchensemble", "mcdropout", "mcp"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_padding_under_the_name_of_a_mask_of_attention_goes_with_its_examples(
    method: str, chunk: int | None
) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)

        def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
            return self.head((self.drop(self.embed(x)) * attn_mask.unsqueeze(-1)).mean(1))

    model = lpbnn.build(Padded().double(), method)
    x, padding = inputs(TIME + 2)
    found = lpbnn.predict(model, (x, padding.double()), seed=0, chunk=chunk).probs
    assert found.shape == (TIME + 2, 3)
    square = (x[:TIME], padding[:TIME].double())  # as many examples as steps
    again = lpbnn.predict(model, square, seed=0, chunk=chunk).probs
    torch.testing.assert_close(again, found[:TIME])


class ByHead(nn.Module):
    """A transformer that is given a mask of every example and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, src_mask: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x), src_mask=src_mask).mean(1))


def masked(batch: int) -> dict[str, Tensor]:
    mask = torch.rand(2 * batch, TIME, TIME) < 0.5
    mask[..., 0] = False  # one key at least
    return {"x": torch.randn(batch, TIME, 4).double(), "src_mask": mask}


@pytest.mark.parametrize("method", ["mcp", "ensemble", "batchensemble", "lpbnn"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 6])
def test_a_mask_by_head_is_cut_with_the_examples(method: str, chunk: int) -> None:
    """Four rows of two members were taken for the four examples of the mask."""
    some = {"members": 2} if method != "mcp" else {}
    some |= {"exclude": "embed"} if method in ("batchensemble", "lpbnn") else {}
    model = lpbnn.build(ByHead().double(), method, num_data=10, **some)
    call = masked(4)
    expected = lpbnn.predict(model, call, seed=0).members
    found = lpbnn.predict(model, call, seed=0, chunk=chunk).members
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_mask_of_attention_is_no_batch_of_an_ensemble() -> None:
    model = lpbnn.build(ByHead().double(), "ensemble", members=2)
    call = {"x": inputs(TIME)[0], "src_mask": torch.full((TIME, TIME), True).triu(1)}
    expected = lpbnn.predict(model, call).members
    found = lpbnn.predict(model, call, chunk=4).members
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 3, 4, 5])
def test_a_mask_by_head_is_split_with_the_examples(batch: int) -> None:
    """In training too, where J does not divide the batch and the first examples come again."""
    model = lpbnn.build(ByHead().double(), "batchensemble", members=2, init_std=0.0).train()
    call, y = masked(batch), torch.arange(batch) % 3
    plain = lpbnn.build(copy.deepcopy(lpbnn.undo(copy.deepcopy(model))), "mcp").train()
    torch.testing.assert_close(model.loss(call, y)["nll"], plain.loss(call, y)["nll"])


class Renamed(nn.Module):
    """The mask of attention is an input of the network, by a name that torch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, my_mask: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.attention(x, x, x, attn_mask=my_mask)[0][:, -1])


@pytest.mark.parametrize("method", ["batchensemble", "mcp"])
def test_a_mask_for_each_example_and_head_is_cut_with_the_batch(method: str) -> None:
    model = lpbnn.build(Renamed().double(), method).eval()
    x, mask = torch.randn(8, TIME, 4).double(), torch.randn(16, TIME, TIME).double()
    expected = lpbnn.predict(model, (x, mask)).probs
    for chunk in (1, 2, 6, 8, 20):
        found = lpbnn.predict(model, (x, mask), chunk=chunk).probs
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_mask_for_more_examples_than_there_are_is_refused() -> None:
    model = lpbnn.build(Renamed(), "batchensemble", members=1).eval()
    with pytest.raises(ValueError, match=r"attn_mask of shape \(16, 6, 6\) is for 8 examples"):
        model(torch.randn(4, TIME, 4), torch.randn(16, TIME, TIME))


class AddsTable(nn.Module):
    """Adds the sum of a table's rows, which are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) + table.sum(0))


def test_a_frozen_ensemble_knows_the_inputs_that_hold_no_examples() -> None:
    model = lpbnn.build(AddsTable(), "lpbnn", members=3, num_data=10)
    table = torch.randn(3, 4)
    model(torch.randn(5, 4), table)  # seen with another batch size
    x = torch.randn(3, 4)
    found = lpbnn.predict(lpbnn.freeze(model), (x, table))
    expected = lpbnn.predict(model, (x, table), seed=0)
    torch.testing.assert_close(found.probs, expected.probs)


@pytest.mark.parametrize("method", ["mcp", "ensemble", "meanfield", "mcdropout"])
def test_a_batch_in_portions_leaves_whole_an_input_that_holds_no_examples(method: str) -> None:
    model = lpbnn.build(AddsTable(), method, num_data=10)
    table = torch.randn(3, 4)
    lpbnn.predict(model, (torch.randn(5, 4), table), chunk=2)  # seen with another batch size
    x = torch.randn(3, 4)
    found = lpbnn.predict(model, (x, table), seed=0, chunk=2)
    torch.testing.assert_close(found.probs, lpbnn.predict(model, (x, table), seed=0).probs)
