"""A batch norm for each member: members are then networks apart, in training too."""

import copy

import pytest
import torch
from networks import ConvNet, ResNet, settle
from torch import nn

import lpbnn
from lpbnn.rank_one.factors import FixedFactors
from lpbnn.rank_one.layer import RankOneLayer, sample_layers
from lpbnn.rank_one.norms import MemberNorm


def build(method: str = "lpbnn", **options: object) -> lpbnn.UncertainModel:
    return lpbnn.build(ResNet(), method, members=3, num_data=10, batch_norm="member", **options)


def alone(model: lpbnn.UncertainModel, member: int) -> nn.Module:
    """The ordinary network of one BatchEnsemble member, with that member's batch norms."""
    net = copy.deepcopy(model.net)
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, MemberNorm):
                setattr(parent, name, child.norms[member])
            elif isinstance(child, RankOneLayer):
                own = sample_layers([child]).take(member, 1).layers[0]
                child.factors = FixedFactors(own.r.detach(), own.s.detach())
                if child.member_bias is not None:
                    child.member_bias = nn.Parameter(child.member_bias[member : member + 1])
    return net


def test_each_member_is_normalised_by_its_own_rows_in_training() -> None:
    model = build("batchensemble", batch_mode="repeat").double().train()
    x = torch.randn(6, 3, 8, 8).double()
    expected = torch.stack([alone(model, j).train()(x) for j in range(3)])
    torch.testing.assert_close(model(x), expected)


def test_statistics_of_members_differ_after_training_and_are_used() -> None:
    model = build("batchensemble").double().train()
    for _ in range(3):
        model.loss(torch.randn(6, 3, 8, 8).double(), torch.randint(3, (6,)))["loss"].backward()
    norms = [m for m in model.modules() if isinstance(m, MemberNorm)]
    assert not torch.equal(norms[0].norms[0].running_mean, norms[0].norms[1].running_mean)
    model.eval()
    x = torch.randn(5, 3, 8, 8).double()
    torch.testing.assert_close(model(x), torch.stack([alone(model, j)(x) for j in range(3)]))


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 8, 100])  # 8: passes of two members
def test_members_of_a_chunk_use_their_own_norms(chunk: int) -> None:
    model = build().double()
    for j, norm in enumerate(m for m in model.modules() if isinstance(m, MemberNorm)):
        for i, inner in enumerate(norm.norms):
            inner.running_mean += 0.1 * (i + j)
    x = torch.randn(4, 3, 8, 8).double()
    whole = lpbnn.predict(model, x, samples=2, seed=0)
    parts = lpbnn.predict(model, x, samples=2, seed=0, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    frozen = lpbnn.freeze(model, samples=2, seed=0)
    torch.testing.assert_close(lpbnn.predict(frozen, x, chunk=chunk).members, whole.members)


def test_every_parameter_learns_and_undo_gives_the_network_back() -> None:
    net = settle(ResNet())
    before = copy.deepcopy(net.state_dict())
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, batch_norm="member").train()
    model.loss(torch.randn(6, 3, 8, 8), torch.randint(3, (6,)))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    net = settle(ResNet())
    before = copy.deepcopy(net.state_dict())
    model = lpbnn.build(net, "batchensemble", members=3, batch_norm="member")
    after = lpbnn.undo(model).state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.requires_grad for p in net.parameters())


def test_norms_of_the_unconverted_part_stay_shared() -> None:
    model = build(include=["stage2", "head"])
    where = {path for path, m in model.net.named_modules() if isinstance(m, MemberNorm)}
    assert where == {"stage2.body.1", "stage2.body.4"}
    assert model(torch.randn(4, 3, 8, 8)).shape == (3, 4, 3)


def test_networks_without_batch_norm_and_wrong_names() -> None:
    model = lpbnn.build(ConvNet(), "batchensemble", batch_norm="member")
    assert model(torch.randn(2, 4, 9, 9)).shape == (4, 2, 3)
    with pytest.raises(ValueError, match="batch_norm='own': choose 'shared' or 'member'"):
        lpbnn.build(ConvNet(), "batchensemble", batch_norm="own")


def test_it_compiles_and_exports() -> None:
    frozen = lpbnn.freeze(build().eval())
    x = torch.randn(4, 3, 8, 8)
    compiled = torch.compile(frozen, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), frozen(x))
    torch._dynamo.reset()
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(frozen, (x,), dynamic_shapes=batch).module()
    torch.testing.assert_close(program(x[:3]), frozen(x[:3]))


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_batch_too_small_for_a_norm_per_member_is_refused_with_advice(batch: int) -> None:
    def small(**options: str) -> lpbnn.UncertainModel:
        net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        return lpbnn.build(net, "batchensemble", members=4, **options).train()

    x, y = torch.randn(batch, 5), torch.zeros(batch, dtype=torch.int64)
    message = (
        f"(?s)more than 1 value.*4 members share a batch of {batch}, .*drop_last=True.*'shared'"
    )
    with pytest.raises(ValueError, match=message):
        small(batch_norm="member").loss(x, y)
    assert small(batch_norm="shared").loss(x, y)["loss"].isfinite()
    if batch > 1:
        repeated = small(batch_norm="member", batch_mode="repeat")
        assert repeated.loss(x, y)["loss"].isfinite()


def test_undo_gives_the_mean_of_the_members_norms() -> None:
    norm = MemberNorm(nn.BatchNorm1d(2), members=3)
    for j, inner in enumerate(norm.norms):
        inner.running_mean += j
        nn.init.constant_(inner.weight, 1 + 2 * j)
    plain = norm.restore()
    assert plain.running_mean.tolist() == [1.0, 1.0]
    assert plain.weight.tolist() == [3.0, 3.0]


def test_another_error_of_a_norm_per_member_gets_no_advice_about_batches() -> None:
    norm = MemberNorm(nn.BatchNorm2d(3), members=2)
    with pytest.raises(ValueError, match="4D input") as raised:
        norm(torch.randn(4, 3))
    assert "drop_last" not in str(raised.value)
