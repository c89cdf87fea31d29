"""Properties of every method; a new method file is tested without being named here."""

from typing import Any

import pytest
import torch
from torch import nn

import lpbnn
from lpbnn import methods, testing

HAVE_SIGNS = [
    name for name in methods.names() if "init" in methods.load(name).Config.__dataclass_fields__
]


class TestEveryMethod(testing.MethodConformance):
    @pytest.fixture(params=methods.names())
    def method(self, request: pytest.FixtureRequest) -> str:
        return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", HAVE_SIGNS)
def test_signs_built_where_another_precision_is_the_default(
    method: str, dtype: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        model = lpbnn.build(net, method, num_data=100, init="signs")
        model.loss(torch.randn(6, 4), torch.arange(6) % 3)["loss"].backward()
        assert lpbnn.predict(model, torch.randn(2, 4)).probs.isfinite().all()
    finally:
        torch.set_default_dtype(before)


def test_methods_have_signs() -> None:
    assert len(HAVE_SIGNS) == 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", methods.names())
def test_weights_of_examples_count_by_their_ratios_and_zero_counts_nothing(
    method: str, training: bool
) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    model = lpbnn.build(net, method, num_data=100).double().train(training)
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    changed = torch.tensor([0, 2, 2, 0, 1])
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0])
    model.loss(x, y)  # the comparison of the first batch is over

    def loss(labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return model.loss(x, labels, weight)["loss"]

    assert not torch.isclose(loss(y, weight), loss(changed, weight), rtol=1e-6)
    torch.testing.assert_close(loss(y, 3 * weight), loss(y, weight))
    weight[1] = 0.0
    torch.testing.assert_close(loss(y, weight), loss(changed, weight))


@pytest.mark.parametrize("method", methods.names())
def test_undo_leaves_no_memory_of_the_members_behind_the_weights(method: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3))
    plain = lpbnn.undo(lpbnn.build(net, method, num_data=100))
    for parameter in plain.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def mixed() -> nn.Module:
    first = (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
    return nn.Sequential(*first, nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", methods.names())
def test_undo_leaves_modes_types_hooks_and_frozen_weights_as_they_were(
    method: str, training: bool
) -> None:
    for remainder in (0, 1):
        net = mixed().train(training)
        kinds = [(path, type(module)) for path, module in net.named_modules()]
        for i, parameter in enumerate(net.parameters()):
            parameter.requires_grad_(i % 2 == remainder)
        learns = {name: p.requires_grad for name, p in net.named_parameters()}
        plain = lpbnn.undo(lpbnn.build(net, method, num_data=10))
        assert {name: p.requires_grad for name, p in plain.named_parameters()} == learns
        assert [(path, type(module)) for path, module in plain.named_modules()] == kinds
        assert {module.training for module in plain.modules()} == {training}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


@pytest.mark.parametrize("method", methods.names())
def test_the_frozen_weights_of_a_network_do_not_learn_in_a_model_of_it(method: str) -> None:
    net = mixed()
    for layer in (net[0], net[1]):
        layer.requires_grad_(False)
    model = lpbnn.build(net, method, num_data=10).train()
    frozen = [(m, torch.clone(m.weight)) for m in model.modules() if type(m) is nn.Conv2d]
    sgd = torch.optim.SGD(model.parameter_groups(lr=0.1), lr=0.1)
    model.loss(torch.randn(6, 3, 2, 2), torch.arange(6) % 3)["loss"].backward()
    sgd.step()
    model.after_step(0.1)
    assert frozen
    assert all(torch.equal(layer.weight, before) for layer, before in frozen)
    assert all(layer.weight.grad is None for layer, _ in frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["lpbnn", "rank1", "meanfield"])
def test_the_penalties_of_half_precision_weights_are_computed_in_float32(
    method: str, dtype: torch.dtype
) -> None:
    model = lpbnn.build(mixed(), method, num_data=10).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data.add_(torch.rand_like(parameter), alpha=3.0 if "rho" in name else 0.1)
    x, y = torch.randn(6, 3, 2, 2), torch.arange(6) % 3
    half = model.loss(x.to(dtype), y)
    whole = model.float().loss(x, y)
    names = half.keys() - {"nll", "loss"}
    assert names
    for name in names:
        assert half[name].dtype == torch.float32
        torch.testing.assert_close(half[name], whole[name], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", methods.names())
def test_a_batch_that_can_be_seen_to_be_wrong_is_refused_before_the_network_runs(
    method: str, training: bool
) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    model, calls = lpbnn.build(net, method, num_data=10).train(training), []
    model.networks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="seem to be swapped"):
        model.loss(torch.arange(6) % 3, 4 * torch.randn(6, 4))
    with pytest.raises(TypeError, match="targets"):
        model.loss(torch.randn(6, 4), [0, 1, 2, 0, 1, 2])
    assert not calls


class TwoInputs(nn.Module):
    """The second input is optional, so that a call that loses it does not fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(torch.tanh(self.body(a if b is None else a + b)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", methods.names())
def test_inputs_by_position_and_by_name_have_one_loss_and_one_output(
    method: str, training: bool
) -> None:
    model = lpbnn.build(TwoInputs(), method, num_data=10).double().train(training)
    a, b, y = torch.randn(6, 4).double(), torch.randn(6, 4).double(), torch.arange(6) % 3

    def both(x: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        loss = model.loss(x, y)["loss"].detach()
        torch.manual_seed(0)
        return loss, model(*args, **kwargs).detach()

    both((a, b), a, b)  # the comparisons of the first batch are over
    both({"a": a, "b": b}, a=a, b=b)
    expected = both((a, b), a, b)
    for found in (both({"a": a, "b": b}, a=a, b=b), both([a, b], a, b=b)):
        torch.testing.assert_close(found, expected)
    for found, whole in zip(both(a, a), expected, strict=True):
        assert not torch.allclose(found, whole)


# Saved besides the parameters: what training computes, and r, which does not learn. Options and what is
# annealed are those of the model that loads the state.
SAVED = {
    "abnn": {"noise_scale", "class_order"},
    "batchensemble": {"noise_scale"},
    "duq": {"N", "m"},
    "lpbnn": {"noise_scale", "net"},
    "meanfield": {"noise_scale"},
    "rank1": {"noise_scale"},
    "tradi": {"memory", "mean", "variance"},
}


@pytest.mark.parametrize("method", methods.names())
def test_a_state_holds_what_was_learned_and_no_options(method: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = lpbnn.build(net, method, num_data=10, class_weights=[1.0, 2.0, 3.0])
    saved = model.state_dict().keys() - dict(model.named_parameters()) - {"_extra_state"}
    assert {name.partition(".")[0] for name in saved} == SAVED.get(method, set())


class ReturnsMore(nn.Module):
    """Returns its output in a mapping, beside other things than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.body(x))
        return {"hidden": hidden, "logits": self.head(hidden), "cache": None, "layers": 2}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", methods.names())
def test_a_network_may_return_more_than_its_output(method: str, training: bool) -> None:
    model = lpbnn.build(ReturnsMore(), method, num_data=10).train(training)
    x = torch.randn(6, 4)
    model.loss(x, torch.arange(6) % 3)["loss"].backward()
    assert model(x).shape == (model.members, 6, 3)


@pytest.mark.parametrize("method", methods.names())
def test_undo_leaves_the_hooks_that_a_user_gave_a_built_model(method: str) -> None:
    model, called = lpbnn.build(mixed(), method, num_data=10), set()
    there = set(model.networks[0].modules())
    for module in there:
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    plain = lpbnn.undo(model)
    plain(torch.randn(2, 3, 2, 2))
    assert called == there.intersection(plain.modules())
    assert len(called) >= 4


@pytest.mark.filterwarnings("ignore::lpbnn.model.NotFittedWarning")
@pytest.mark.parametrize("method", methods.names())
def test_an_evaluation_between_the_loss_and_after_step_changes_nothing(method: str) -> None:
    x, y, other = torch.randn(6, 3, 2, 2), torch.arange(6) % 3, torch.randn(4, 3, 2, 2)
    states = []
    for evaluated in (True, False):
        torch.manual_seed(0)
        model = lpbnn.build(mixed(), method, num_data=10).train()
        model.loss(x, y)["loss"].backward()
        if evaluated:
            before = [(module, module.training) for module in model.modules()]
            lpbnn.predict(model, other)
            assert [(module, module.training) for module in model.modules()] == before
            model.eval().loss(other, torch.tensor([2, 0, 1, 1]))
            model.train()
        model.after_step(0.1)
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        states.append(model.state_dict() | {k: g for k, g in gradients.items() if g is not None})
        states[-1].pop("_extra_state", None)  # what was found for calls of a kind
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_the_class_of_an_example_is_its_bright_quarter() -> None:
    for backbone, (_, shape) in testing.BACKBONES.items():
        x, y = testing.batch(9, backbone)
        assert x.shape == (9, *shape)
        quarters = x.mean(1).unflatten(1, (2, 4)).unflatten(3, (2, 4)).mean((2, 4)).flatten(1)
        assert torch.equal(quarters.argmax(1), y)
        assert (quarters.amax(1) > 0.5).all()
