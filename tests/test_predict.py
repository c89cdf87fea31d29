"""Prediction: the mean of probabilities, in any portions, repeatable, and nothing left behind."""

from collections.abc import Callable

import pytest
import torch
from memory import PeakMemory
from networks import Mlp, ResNet, settle, small
from torch import nn

import lpbnn
from lpbnn.likelihoods import split_gaussian
from lpbnn.predict import predict
from lpbnn.prediction import entropy
from lpbnn.rank_one.ensemble import FastWeightEnsemble


def test_probabilities_are_averaged_never_logits(model: lpbnn.Model, x: torch.Tensor) -> None:
    p = lpbnn.predict(model, x, samples=2, seed=0)
    assert p.members.shape == (6, 5, 3)
    torch.testing.assert_close(p.members.sum(2), torch.ones(6, 5, dtype=torch.float64))
    torch.testing.assert_close(p.probs, p.members.mean(0))
    assert torch.equal(p.labels, p.probs.argmax(1))
    assert torch.equal(p.confidence, p.probs.max(1).values)


def test_uncertainty_splits_into_its_two_parts(model: lpbnn.Model, x: torch.Tensor) -> None:
    p = lpbnn.predict(model, x, samples=4)
    torch.testing.assert_close(p.total, entropy(p.probs))
    torch.testing.assert_close(p.aleatoric, entropy(p.members, dim=2).mean(0))
    q = p.members
    information = (q * (q.log() - p.probs.log())).sum(2).mean(0)
    torch.testing.assert_close(p.epistemic, information)
    assert (p.epistemic > 0).all()


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 15, 16, 30, 31, 10_000])
def test_the_answer_does_not_depend_on_the_chunk(
    model: lpbnn.Model, x: torch.Tensor, chunk: int
) -> None:
    whole = lpbnn.predict(model, x, samples=2, seed=3)
    parts = lpbnn.predict(model, x, samples=2, seed=3, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    torch.testing.assert_close(parts.probs, whole.probs)
    torch.testing.assert_close(parts.epistemic, whole.epistemic)


def test_no_more_rows_than_the_chunk_go_through(model: lpbnn.Model, x: torch.Tensor) -> None:
    seen: list[int] = []
    model.net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for chunk in (1, 2, 4, 7, 30):
        seen.clear()
        lpbnn.predict(model, x, samples=2, chunk=chunk)
        assert max(seen) <= chunk
        assert sum(seen) == 2 * 3 * 5


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 9, 10, 14])
def test_few_members_with_all_examples_where_nothing_is_shared(
    model: lpbnn.Model, x: torch.Tensor, chunk: int
) -> None:
    """A member with the whole batch is a plain network; behind a shared part that would run again."""
    seen: list[int] = []
    model.net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    lpbnn.predict(model, x, chunk=chunk)
    if chunk < 5:
        rows = [chunk] * (5 // chunk) + [5 % chunk] * (5 % chunk > 0)
        assert seen == rows * 3
    else:
        assert seen == ([10, 5] if chunk >= 10 else [5] * 3)
    part = lpbnn.build(settle(ResNet()), "batchensemble", members=3, include="head")
    part.net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    seen.clear()
    lpbnn.predict(part, x.float(), chunk=9)
    assert seen == [3, 2]  # every example once


@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 8, 15, 30])
def test_a_network_that_changes_its_input_answers_as_ever(chunk: int | None) -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    net.register_forward_pre_hook(lambda module, args: (args[0].add_(1),))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10).double()
    x = torch.randn(5, 4).double()
    given = x.clone()
    whole = lpbnn.predict(model, x, samples=2, seed=1, chunk=15)
    parts = lpbnn.predict(model, x, samples=2, seed=1, chunk=chunk)
    assert torch.equal(x, given)
    torch.testing.assert_close(parts.members, whole.members)


def test_running_sums_equal_kept_members(model: lpbnn.Model, x: torch.Tensor) -> None:
    kept = lpbnn.predict(model, x, samples=5, seed=1)
    sums = lpbnn.predict(model, x, samples=5, seed=1, keep_members=False)
    assert sums.members is None
    for name in ("probs", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(sums, name), getattr(kept, name))


def test_memory_does_not_grow_with_the_samples_unless_members_are_kept() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 13, 1))
    model = lpbnn.build(net, "lpbnn", members=4, num_data=10, task="segmentation")
    x = torch.randn(1, 3, 64, 64)

    def peak(samples: int, keep: bool) -> int:
        with PeakMemory() as memory:
            lpbnn.predict(model, x, samples=samples, keep_members=keep)
        return memory.peak

    few, many = peak(2, False), peak(16, False)  # from the second pass on there is a running sum
    # Only the draws themselves are more: noise, z, r, s and b of two small layers.
    assert many - few < 16 * 4 * 4 * 300
    assert peak(16, True) > 3 * few


def test_seeds(model: lpbnn.Model, x: torch.Tensor) -> None:
    before = torch.get_rng_state()
    a = lpbnn.predict(model, x, seed=1).probs
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(lpbnn.predict(model, x, seed=1).probs, a)
    assert not torch.equal(lpbnn.predict(model, x, seed=2).probs, a)
    assert not torch.equal(lpbnn.predict(model, x).probs, lpbnn.predict(model, x).probs)

    def drawn(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [lpbnn.predict(model, x, generator=generator).probs for _ in range(2)]

    first, again = drawn(4), drawn(4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])  # the generator moves on


def test_training_state_is_given_back(model: lpbnn.Model, x: torch.Tensor) -> None:
    model.train()
    model.net.stage1.eval()
    modes = [module.training for module in model.modules()]
    statistics = model.net.stage2.body[1].running_mean.clone()
    p = lpbnn.predict(model, x)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.net.stage2.body[1].running_mean, statistics)
    assert not p.probs.requires_grad


def test_state_is_given_back_after_an_error(model: lpbnn.Model) -> None:
    model.train()
    with pytest.raises(RuntimeError):
        lpbnn.predict(model, torch.randn(2, 7, 8, 8, dtype=torch.float64))
    assert model.training
    assert all(layer._held is None for layer in model.layers)


@pytest.mark.parametrize("method", ["mcp", "batchensemble"])
def test_deterministic_models_are_not_run_twice(method: str) -> None:
    model = lpbnn.build(Mlp(), method)
    assert len(lpbnn.predict(model, torch.randn(3, 5), samples=7).members) == model.members


def test_regression() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, task="regression").double()
    x = torch.randn(6, 2, dtype=torch.float64)
    frozen = lpbnn.freeze(model, samples=4)
    means, variances = split_gaussian(frozen(x))
    p = lpbnn.predict(frozen, x, chunk=5)
    torch.testing.assert_close(p.mean, means.mean(0))
    torch.testing.assert_close(p.aleatoric, variances.mean(0))
    torch.testing.assert_close(p.epistemic, means.var(0, unbiased=False))
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert p.members.shape == p.member_variances.shape == (12, 6, 2)
    with pytest.raises(AttributeError, match="regression prediction has no probs; use mean"):
        p.probs  # noqa: B018
    y = torch.randn(6, 2, dtype=torch.float64)
    model.loss(x, y)["loss"].backward()


def test_epistemic_variance_survives_a_large_mean() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    model = lpbnn.build(net, "batchensemble", members=4, task="regression", spread=0.0)
    with torch.no_grad():
        model.layers[0].member_bias[:, 0] = 1e4 + torch.arange(4.0)
    p = lpbnn.predict(model, torch.zeros(3, 2))
    torch.testing.assert_close(p.epistemic, torch.full((3, 1), 1.25))


def test_segmentation_maps() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))
    model = lpbnn.build(net, "lpbnn", members=2, num_data=10, task="segmentation", ignore_index=255)
    x, y = torch.randn(3, 3, 6, 7), torch.randint(5, (3, 6, 7))
    p = lpbnn.predict(model, x, chunk=2)
    assert p.probs.shape == (3, 5, 6, 7)
    assert p.labels.shape == p.confidence.shape == p.epistemic.shape == (3, 6, 7)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(3, 6, 7))
    y[:, :2] = 255
    assert model.train().loss(x, y)["loss"].isfinite()  # 3 examples, 2 members: weighted, with void


def test_void_pixels_do_not_count_in_a_weighted_split() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 1))
    model = lpbnn.build(
        net, "batchensemble", members=2, spread=0.0, ignore_index=255, task="segmentation"
    )
    x, y = torch.randn(3, 3, 6, 7), torch.randint(5, (3, 6, 7))
    y[0, :3] = 255
    plain = nn.functional.cross_entropy(model.eval()(x)[0], y, ignore_index=255)
    torch.testing.assert_close(model.train().loss(x, y)["nll"], plain)


class ModelOutput(dict):
    pass


@pytest.mark.parametrize(
    ("wrap", "readout"),
    [
        (lambda y: {"out": y, "aux": y}, None),
        (lambda y: ModelOutput(logits=y), None),
        (lambda y: (y, y), lambda output: output[0]),
    ],
)
def test_networks_that_return_more_than_a_tensor(wrap: object, readout: object) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> object:
            return wrap(self.inner(x))

    model = lpbnn.build(Net(), "lpbnn", num_data=10, readout=readout)
    assert lpbnn.predict(model, torch.randn(5, 4)).probs.shape == (5, 3)


@pytest.mark.parametrize("batch_norm", ["shared", "member"])
def test_members_in_turn_answer_as_members_together(
    monkeypatch: pytest.MonkeyPatch, batch_norm: str
) -> None:
    """On a GPU a large batch is given to one member after the other: the same answers."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, batch_norm=batch_norm).double()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    model.loss(x, torch.tensor([0, 1, 2, 0, 1]))  # statistics that differ between members
    together = predict(model, x, samples=2, seed=1)
    monkeypatch.setattr(FastWeightEnsemble, "_better_in_turn", lambda *call: True)
    in_turn = predict(model, x, samples=2, seed=1)
    torch.testing.assert_close(in_turn.members, together.members, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel, lpbnn.LossStep]
)
def test_a_wrapped_model_is_predicted_with(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = lpbnn.build(small(), "lpbnn", num_data=9), torch.randn(4, 5)
    expected = lpbnn.predict(model, x, seed=0).members
    assert torch.equal(lpbnn.predict(wrap(model), x, seed=0).members, expected)
    both = lpbnn.LossStep(torch.compile(model, backend="eager"))
    assert torch.equal(lpbnn.predict(both, x, seed=0).members, expected)
    with pytest.raises(TypeError, match="got Sequential. A plain network becomes one"):
        lpbnn.predict(wrap(small()), x)
