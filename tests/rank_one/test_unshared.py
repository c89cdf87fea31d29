"""``unshared``: linear layers of which every member has its own."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import ConvNet, Mlp, ordinary
from torch import nn

import lpbnn
from lpbnn.members.rows import gather
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.rank_one.unshared import MemberLinear

METHODS = ["lpbnn", "batchensemble", "rank1"]
X, Y = torch.randn(7, 5).double(), torch.randint(3, (7,))


def build(method: str = "lpbnn", net: nn.Module | None = None, **options: Any) -> RankOneEnsemble:
    options = {"unshared": "4", "members": 3, "num_data": 10, **options}
    model = lpbnn.build(net or Mlp(), method, **options)
    assert isinstance(model, RankOneEnsemble)
    return model.double()


def head_of(model: nn.Module) -> MemberLinear:
    return next(module for module in model.modules() if isinstance(module, MemberLinear))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_member_is_the_network_with_a_head_of_its_own(method: str, bias: bool) -> None:
    net = Mlp()
    net[4] = nn.Linear(6, 3, bias)
    model = build(method, net).eval()
    sampled, head = model.sample(), head_of(model)
    rows = gather(model.run_rows(sampled, model.call((X,), {}, 3)), 3)
    for j in range(3):
        alone = ordinary(model, sampled, j)
        plain = nn.Linear(6, 3, bias).double()
        own = {"weight": head.member_weight[j]}
        if head.member_bias is not None:
            own["bias"] = head.member_bias[j]
        plain.load_state_dict(own)
        alone[4] = plain
        torch.testing.assert_close(rows[j], alone(X))


@pytest.mark.parametrize("mode", ["repeat", "split"])
def test_rows_and_members_one_by_one_are_equal(mode: Any) -> None:
    model = build("batchensemble")
    sampled, call = model.sample(), model.call((X,), {}, 3)
    together = model.run_rows(sampled, call, mode)
    torch.testing.assert_close(model.run_one_by_one(sampled, call, mode), together)
    assert lpbnn.check(model, X).execution == "batched"


@pytest.mark.parametrize("mode", ["repeat", "split"])
def test_a_head_learns_from_the_rows_of_its_member(mode: Any) -> None:
    model = build(batch_mode=mode).train()
    terms = model.loss(X, Y)
    head = head_of(model)
    terms["loss"].backward()
    assert (head.member_weight.grad.abs().amax((1, 2)) > 0).all()
    assert not any(p.requires_grad for p in head.layer.parameters())
    model.zero_grad()
    model(X)[1].sum().backward()
    assert head.member_weight.grad[1].any()
    assert not head.member_weight.grad[[0, 2]].any()


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 14, 100])
def test_samples_of_a_member_share_its_head_in_portions_of_any_size(chunk: int) -> None:
    model = build()
    whole = lpbnn.predict(model, X, samples=2, seed=0)
    parts = lpbnn.predict(model, X, samples=2, seed=0, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    frozen = lpbnn.freeze(model, samples=2, seed=0)
    torch.testing.assert_close(lpbnn.predict(frozen, X, chunk=chunk).members, whole.members)


def test_state_and_copies_keep_the_heads() -> None:
    model, other = build("batchensemble"), build("batchensemble")
    assert not torch.equal(other(X), model(X))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    assert torch.equal(copy.deepcopy(model)(X), model(X))


def test_undo_and_the_mean_network_have_the_mean_head() -> None:
    model = build("batchensemble")
    head = head_of(model)
    weight, bias = head.member_weight.mean(0), head.member_bias.mean(0)
    for net in (lpbnn.mean_network(model), lpbnn.undo(model)):
        assert type(net[4]) is nn.Linear
        torch.testing.assert_close(net[4].weight, weight)
        torch.testing.assert_close(net[4].bias, bias)
        assert net[4].weight.requires_grad


def test_it_compiles_and_exports() -> None:
    frozen = lpbnn.freeze(build(), samples=2)
    torch._dynamo.reset()
    compiled = torch.compile(frozen, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), frozen(X))
    torch._dynamo.reset()
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(frozen, (X,), dynamic_shapes=batch).module()
    torch.testing.assert_close(program(X[:3]), frozen(X[:3]))


def test_a_head_behind_an_unconverted_part_gets_rows() -> None:
    model = build("batchensemble", include=["2", "4"])
    assert "" not in model.expand_at
    assert lpbnn.check(model, X).execution == "batched"


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (Mlp, {"unshared": "head"}, r"unshared='head': expected paths .* They are 0, 2, 4"),
        (Mlp, {"unshared": ["0", "2", "4"]}, "and not of all"),
        (Mlp, {"exclude": "4"}, r"They are 0, 2\."),
        (ConvNet, {"unshared": "first"}, "'first' is a Conv2d, and only a Linear layer"),
    ],
)
def test_a_layer_that_cannot_be_each_members_own_is_named(
    net: Any, options: dict[str, Any], message: str
) -> None:
    given = net()
    before = copy.deepcopy(given.state_dict())
    with pytest.raises(ValueError, match=message):
        build(net=given, **options)
    after = given.state_dict()
    assert list(after) == list(before)  # as it was given


def test_rows_that_are_not_the_members_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'head' got 4 rows for 3 members"):
        MemberLinear(nn.Linear(2, 2), 3, "head")(torch.zeros(4, 2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_dimensions_between_batch_and_features_are_kept(shape: tuple[int, ...], bias: bool) -> None:
    layer = MemberLinear(nn.Linear(4, 6, bias=bias), members=3)
    x = torch.randn(2 * 3, *shape, 4)
    found = layer(x)
    assert found.shape == (6, *shape, 6)
    for j in range(3):
        own = None if layer.member_bias is None else layer.member_bias[j]
        expected = F.linear(x[2 * j : 2 * j + 2], layer.member_weight[j], own)
        torch.testing.assert_close(found[2 * j : 2 * j + 2], expected)
