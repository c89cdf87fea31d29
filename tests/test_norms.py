"""A batch norm for each member: members are then networks apart, in training too."""

import copy

import pytest
import torch
from networks import ConvNet, ResNet, settle
from torch import Tensor, nn

import lpbnn
from lpbnn.rank_one import norms
from lpbnn.rank_one.layer import RankOneLayer
from lpbnn.rank_one.norms import MemberNorm, RowNorm, by_rows


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
                draw = child.draw().take(slice(member, member + 1))
                child.factors = lpbnn.rank_one.factors.FixedFactors(
                    draw.r.detach(), draw.s.detach()
                )
                if draw.bias is not None:
                    child.member_bias = nn.Parameter(draw.bias)
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


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 100])
def test_portions_of_members_meet_their_own_norms(chunk: int) -> None:
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


def test_a_part_converted_leaves_the_shared_part_shared() -> None:
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


@pytest.mark.parametrize("momentum", [0.1, 0.7])
@pytest.mark.parametrize("offset", [0.0, 1e4])  # of a size that a sum of squares would drown in
def test_sums_by_rows_are_batch_norm(momentum: float, offset: float) -> None:
    own = nn.BatchNorm2d(4, momentum=momentum).double()
    nn.init.uniform_(own.weight)
    nn.init.normal_(own.bias)
    other = copy.deepcopy(own)
    x = (offset + torch.randn(6, 4, 5, 3).double()).requires_grad_()
    z = x.detach().clone().requires_grad_()
    for _ in range(2):
        expected, found = own(x), by_rows(other, z)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
    torch.testing.assert_close(z.grad, x.grad, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(other.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.state_dict(), own.state_dict(), rtol=1e-9, atol=1e-9)


def test_sums_by_rows_compile_without_a_break_and_keep_the_precision_of_their_input() -> None:
    norm = nn.BatchNorm2d(4)
    compiled = torch.compile(by_rows, backend="eager", fullgraph=True)
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(compiled(norm, x), norm(x))
    assert by_rows(norm, x.bfloat16()).dtype == torch.bfloat16
    torch._dynamo.reset()


def test_batch_norms_of_the_members_part_sum_by_rows_until_undo() -> None:
    net = ResNet()
    keys, shown = list(net.state_dict()), repr(net)
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, include=["stage2", "head"])
    chosen = [path for path, module in net.named_modules() if type(module) is RowNorm]
    assert chosen == ["stage2.body.1", "stage2.body.4"]
    assert "RowNorm" not in repr(model)
    x = torch.randn(6, 3, 8, 8)
    model.train().loss(x, torch.randint(3, (6,)))["loss"].backward()
    assert lpbnn.undo(model) is net
    assert not any(type(module) is RowNorm for module in net.modules())
    assert (list(net.state_dict()), repr(net)) == (keys, shown)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, as a batch norm asks."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize(("shape", "by_row"), [((4, 3, 8, 8), True), ((4, 3, 64, 64), False)])
def test_large_rows_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], by_row: bool
) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(norms, "by_rows", lambda norm, x: calls.append(x) or x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    norms.sum_by_rows(norm := nn.Sequential(nn.BatchNorm2d(3)))
    norm.train()(torch.randn(shape).as_subclass(OnGpu))
    assert bool(calls) is by_row
    norm.eval()(torch.randn(shape).as_subclass(OnGpu))
    assert len(calls) == by_row


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_last_batch_too_small_for_a_norm_of_each_member_is_told(batch: int) -> None:
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
