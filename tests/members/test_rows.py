"""The member axis: member-major rows, for any J and B."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import lpbnn
from lpbnn.kernels.rows import scale_rows, shift_rows
from lpbnn.members.call import Call, copy_tensors
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.members.passes import MemberPass, PassSlot
from lpbnn.members.rows import (
    expand_batch,
    gather,
    member_examples,
    row_weights,
    rows_needed,
)
from lpbnn.rank_one.factors import LayerFactors, SampledFactors

batches, ensembles = st.integers(1, 17), st.integers(1, 6)


@given(batches, ensembles)
def test_repeat_gives_every_example_to_every_member(batch: int, members: int) -> None:
    x = torch.arange(batch * 2).view(batch, 2)
    rows = expand_batch(x, members)
    assert len(rows) == rows_needed(batch, members) == batch * members
    assert all(torch.equal(part, x) for part in gather(rows, members))


@given(batches, ensembles)
def test_split_gives_every_member_examples_and_counts_every_example_once(
    batch: int, members: int
) -> None:
    rows = expand_batch(torch.arange(batch), members, "split")
    assert len(rows) == rows_needed(batch, members, "split")
    assert len(rows) % members == 0
    assert len(rows) < batch + members  # never more than a row per member wasted
    weights = row_weights(batch, members, rows.device)
    assert torch.allclose(torch.zeros(batch).index_add(0, rows, weights), torch.ones(batch))


@given(batches, ensembles)
def test_factors_multiply_the_rows_of_their_member(batch: int, members: int) -> None:
    factor = torch.arange(members, dtype=torch.float).view(members, 1)
    member_of_row = scale_rows(torch.ones(batch * members, 1), factor)
    assert torch.equal(gather(member_of_row, members), factor.view(-1, 1, 1).expand(-1, batch, 1))
    more = scale_rows(torch.ones(batch * members, 2, 1), factor, True, shift=factor)
    assert torch.equal(more[:, 1], 2 * member_of_row)


def test_split_is_free_when_it_divides() -> None:
    x = torch.randn(8, 3)
    assert expand_batch(x, 4, "split") is x
    model = lpbnn.build(nn.Linear(3, 2), "batchensemble", members=4)
    assert model.loss_batch(x, torch.zeros(8).long(), None, "split").weights is None
    with FakeTensorMode():  # nothing that depends on values: a GPU is not waited for
        assert row_weights(128, 3, torch.device("cpu")).shape == (129,)


def test_channels_last_survives() -> None:
    x = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert expand_batch(x, 2).is_contiguous(memory_format=torch.channels_last)
    for members in (1, 2, 4):
        factor = torch.ones(members, 3, dtype=torch.float64)
        assert scale_rows(x[:0], factor).shape == (0, 3, 5, 5)
        for y in (scale_rows(x, factor), scale_rows(x, factor, shift=factor)):
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert y.dtype == x.dtype


def test_only_the_batch_is_expanded() -> None:
    batch, mask, scale = torch.zeros(3, 2), torch.zeros(2, 2), torch.tensor(1.0)
    call = Call((), {"x": [batch, mask], "scale": scale, "flag": True})
    _, tree = call.map_examples(expand_batch, members=2)
    assert [tuple(t.shape) for t in tree["x"]] == [(6, 2), (2, 2)]
    assert tree["scale"] is scale
    assert tree["flag"] is True


@pytest.mark.parametrize("mode", ["repeat", "split"])
def test_gradients_flow_back_to_the_example(mode: str) -> None:
    x = torch.ones(3, requires_grad=True)
    expand_batch(x, 2, mode).sum().backward()
    assert x.grad.tolist() == ([2.0, 2.0, 2.0] if mode == "repeat" else [2.0, 1.0, 1.0])


def test_a_product_may_be_changed_in_place() -> None:
    """A view made without gradients may not be, where gradients are on."""
    for make in (lambda x, f: scale_rows(x, f), lambda x, f: scale_rows(x, f, shift=f), shift_rows):
        with torch.no_grad():
            y = make(torch.ones(4, 3, 2, 2), torch.ones(2, 3))
        y += torch.ones((), requires_grad=True)
        y.sum().backward()


@given(batch=batches, members=ensembles)
def test_examples_of_a_member_are_those_of_its_rows(batch: int, members: int) -> None:
    x = torch.arange(batch).float()
    rows = gather(expand_batch(x, members, "split"), members)
    for member in range(members):
        examples = member_examples(member, batch, members)
        assert torch.equal(Call((x,), {}).take(examples).args[0], rows[member])


def test_parameters_among_the_inputs_are_not_copied() -> None:
    """They are learned: a gradient of a copy would not reach them."""
    table, x = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    copied = copy_tensors((table, {"x": x}))
    assert copied[0] is table
    assert copied[1]["x"] is not x


def test_a_part_of_a_pass_counts_its_members_from_the_first_of_all() -> None:
    """By that number a member finds its own batch norm."""
    factors = LayerFactors(torch.zeros(4, 2), torch.zeros(4, 2))
    part = MemberPass(SampledFactors([factors], first=6), batch=5).take(2, 1)
    assert (part.sampled.first, part.count) == (8, 1)


def test_a_pass_inside_of_another_gives_the_slot_back() -> None:
    slot = PassSlot()
    with slot.use("outer"):
        with slot.use("inner"):
            assert slot.get() == "inner"
        assert slot.get() == "outer"
    assert slot.get() is None


def test_a_pass_that_was_differentiated_is_over() -> None:
    """Its graph lives on with the outputs, and a layer that is called alone has nothing to do with it."""
    model = lpbnn.build(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), "batchensemble")
    assert isinstance(model, MemberEnsemble)
    outputs = model(torch.randn(5, 4))
    outputs.sum().backward(retain_graph=True)
    assert model.slot.get() is None
    outputs.sum().backward()


def test_a_table_is_none_of_the_examples_of_a_call_that_has_as_many_by_chance() -> None:
    x, table = torch.randn(5, 2), torch.randn(3, 2)
    part = Call((x,), {"table": table}).take(slice(0, 3))
    assert [example is part.args[0] for example in part.examples] == [True]
    args, kwargs = part.map_examples(expand_batch, members=2)
    assert args[0].shape == (6, 2)
    assert kwargs["table"] is table


def test_an_input_of_one_row_holds_no_examples_in_a_batch_of_one_either() -> None:
    row = torch.randn(1, 2)
    found = Call((torch.randn(5, 2), row), {}).find_shared()
    assert found == {"": [1]}
    alone = Call((torch.randn(1, 2), row), {}, shared=found[""])
    assert [example is alone.args[0] for example in alone.examples] == [True]
