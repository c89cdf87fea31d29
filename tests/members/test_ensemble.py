"""A prediction leaves the modules' modes alone, and refresh finds layers that were replaced."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import ResNet, settle
from torch import nn

import lpbnn
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.rank_one.ensemble import RankOneEnsemble


def test_modes_are_set_only_where_something_trains(
    model: lpbnn.UncertainModel, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    train = nn.Module.train

    def counted(module: nn.Module, mode: bool = True) -> nn.Module:
        asked.append(mode)
        return train(module, mode)

    expected = lpbnn.predict(model.eval(), x, seed=0).probs
    monkeypatch.setattr(nn.Module, "train", counted)
    assert torch.equal(lpbnn.predict(model, x, seed=0).probs, expected)
    assert not asked
    model.net.stage2.body[1].training = True  # one batch norm, deep inside
    assert torch.equal(lpbnn.predict(model, x, seed=0).probs, expected)
    assert asked
    assert [module for module in model.modules() if module.training] == [model.net.stage2.body[1]]


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn"])
def test_refresh_finds_layers_that_were_replaced(method: str, x: torch.Tensor) -> None:
    options = {"num_data": 10} if method == "lpbnn" else {}
    model = lpbnn.build(settle(ResNet()), method, members=3, **options).double()
    assert isinstance(model, RankOneEnsemble)
    before = lpbnn.predict(model, x, seed=0).members
    model.net.head = nn.Linear(6, 3).double()
    model.refresh()
    found = lpbnn.predict(model, x, seed=0).members
    assert len(model.layers) == 6
    assert not torch.allclose(found, before)
    model.loss(x, torch.tensor([0, 1, 2, 0, 1]))["loss"].backward()


class Counts(nn.Module):
    """Counts its passes in a buffer that is replaced, and averages its inputs in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.b(self.drop(self.norm(self.a(x))))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "mcdropout"])
def test_the_check_leaves_buffers_modes_and_generators_as_they_were(
    method: str, training: bool
) -> None:
    model = lpbnn.build(Counts(), method, num_data=10).train(training)
    model.net.norm.eval()
    x = torch.randn(6, 4)
    state = {name: value.clone() for name, value in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    report = lpbnn.check(model, x)
    assert report.ok
    assert model.execution == "batched"
    for name, value in model.named_buffers():
        assert torch.equal(value, state[name]), name
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_first_batch_gives_the_same_with_and_without_a_check(x: torch.Tensor) -> None:
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        model = lpbnn.build(settle(ResNet()), "lpbnn", members=3, num_data=10, check=check)
        found.append(model.double().train().loss(x, torch.tensor([0, 1, 2, 0, 1])))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_a_state_that_names_no_way_to_run_members_is_refused(x: torch.Tensor) -> None:
    model = lpbnn.build(ResNet(), "batchensemble")
    lpbnn.check(model, x.float())
    state = model.state_dict()
    text = bytes(state["_extra_state"].tolist()).replace(b"batched", b"batchee")
    state["_extra_state"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(ValueError, match="no way to run members: 'batchee'"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "check",
    [
        ["batched", True, []],
        ["batched", 3, {}],
        ["loop", None, {"": 3}],
        ["loop", None, {"": ["x"]}],
    ],
)
def test_a_state_with_checks_of_another_form_is_refused(check: list[object]) -> None:
    """When it is loaded, not by a traceback of the first prediction."""
    model = lpbnn.build(nn.Linear(4, 3), "batchensemble")
    text = json.dumps({"checks": {"0:2": check}, "expand_at": [""]}).encode()
    state = {**model.state_dict(), "_extra_state": torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(ValueError, match="knows calls of another form"):
        model.load_state_dict(state)


@pytest.mark.parametrize("method", ["batchensemble", "mcdropout"])
@pytest.mark.parametrize("state", [None, [1], "x", 3])
def test_a_state_of_another_type_is_refused(method: str, state: object) -> None:
    model = lpbnn.build(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), method)
    with pytest.raises(ValueError, match="state of the checks is a tensor"):
        model.load_state_dict({**model.state_dict(), "_extra_state": state})


def test_a_state_that_names_inputs_that_a_call_does_not_have_is_read(x: torch.Tensor) -> None:
    model = lpbnn.build(ResNet(), "batchensemble")
    found = {"checks": {"0:4": ["batched", True, {"": [9999, -7]}]}, "expand_at": [""]}
    text = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)
    expected = lpbnn.predict(model, x.float()).probs
    model.load_state_dict({**model.state_dict(), "_extra_state": text})
    assert torch.equal(lpbnn.predict(model, x.float()).probs, expected)


def test_a_state_of_other_expansion_points_leaves_those_that_were_asked_for() -> None:
    def built(**options: str) -> MemberEnsemble:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        model = lpbnn.build(net, "batchensemble", include="2", **options)
        assert isinstance(model, MemberEnsemble)
        return model

    late, whole, x = built(), built(expand_at=""), torch.randn(6, 4)
    expected = lpbnn.predict(late, x).probs
    assert late.expand_at == ["2"]
    whole.load_state_dict(late.state_dict())
    assert whole.expand_at == [""]
    assert not whole.checks  # to be compared again
    torch.testing.assert_close(lpbnn.predict(whole, x).probs, expected)


def test_the_members_of_a_check_have_biases_of_their_own() -> None:
    """Biases for as many members as the model has, so that one with another's is seen."""
    model = lpbnn.build(nn.Linear(4, 3), "batchensemble", members=3)
    assert isinstance(model, RankOneEnsemble)
    (layer,) = model.layers
    assert layer.member_bias is not None
    nn.init.normal_(layer.member_bias)
    for count in (2, 3, 5):
        bias = model.probe(count).select(layer.member_bias)
        expected = torch.stack([layer.member_bias[i % 3] for i in range(count)])
        assert torch.equal(bias, expected)


class Squared(nn.Module):
    """Changes its inputs in place, and mixes the rows of its batch: members run one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x.mul_(x))
        return hidden - hidden.mean(0)


def test_members_that_run_one_by_one_see_the_inputs_as_they_were() -> None:
    model = lpbnn.build(Squared(), "batchensemble", members=3)
    x = torch.randn(5, 4)
    assert lpbnn.check(model, x.clone()).execution == "loop"
    before = x.clone()
    found = model(x)
    assert torch.equal(x, before)
    each = [run(x.clone()) for run in model.passes(1, 1)]
    torch.testing.assert_close(found, torch.cat(each))


@pytest.mark.parametrize("paths", [["stage2"], ("stage2",), "stage2"])
def test_expansion_points_may_be_given_in_any_sequence(paths: Any) -> None:
    options = {"include": ["stage2", "head"], "expand_at": paths}
    model, again = (lpbnn.build(ResNet(), "batchensemble", **options) for _ in range(2))
    assert model.expand_at == ["stage2"]
    model(torch.randn(3, 3, 8, 8))
    again.load_state_dict(model.state_dict())
    assert again.checks == model.checks
    assert model.checks


@pytest.mark.parametrize("expand_at", ["", None])
@pytest.mark.parametrize("method", ["lpbnn", "mcdropout", "batchensemble"])
def test_members_train_together_even_if_each_would_fill_the_device(
    method: str, expand_at: str | None, fill_device: Callable[[bool], None]
) -> None:
    """Their batch norms see the rows of all members."""
    model = lpbnn.build(Counts(), method, num_data=10, expand_at=expand_at).double().train()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    model(x)  # makes the check
    found = []
    for yes in (True, False):
        fill_device(yes)
        own = copy.deepcopy(model)
        torch.manual_seed(0)
        found.append((own(x), own.loss(x, y)["loss"], own.net.norm.running_mean))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
