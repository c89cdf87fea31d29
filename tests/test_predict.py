"""Prediction: averages over members, in any portions, repeatable, with nothing left behind."""

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from memory import PeakMemory
from networks import Mlp, ResNet, settle, small
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lpbnn
from lpbnn.calibration import fit_conformal
from lpbnn.likelihoods import (
    Categorical,
    Gaussian,
    Likelihood,
    MultiLabel,
    Segmentation,
    Summary,
    entropy,
)
from lpbnn.members.call import Call
from lpbnn.model import UncertainModel, stack_members
from lpbnn.predict import Prediction, merge, predict

module = importlib.import_module("lpbnn.predict")  # as an attribute, lpbnn.predict is the function
UNCERTAINTIES = ("average", "aleatoric", "epistemic", "total", "ood_score")


class Noisy(UncertainModel):
    """Two members with noise in their outputs: the simplest stochastic model."""

    members = 2

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        return next(self.passes(1, 2))(*args, **kwargs)

    def passes(self, samples: int, width: int) -> Iterator[Callable[..., Tensor]]:
        for _ in range(samples):
            noise = torch.randn(2)

            def run(*args: Any, noise: Tensor = noise, **kwargs: Any) -> Tensor:
                output = self.run_network(*args, **kwargs)
                return stack_members([output * (1 + each) for each in noise])

            yield run


class Lazy(UncertainModel):
    """A method that defines its outputs alone, and draws while it computes them."""

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.run_network(*args, **kwargs)
        return stack_members([output + torch.randn_like(output)])


def test_draws_in_the_call_itself_are_seeded_too() -> None:
    model, x = Lazy(nn.Linear(4, 3)), torch.randn(5, 4)
    state = torch.get_rng_state()
    first, again, other = (lpbnn.predict(model, x, samples=3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.probs, other.probs)
    assert first.members is not None
    assert not torch.equal(first.members[0], first.members[1])


class Rate:
    """A user's likelihood: the rate of a Poisson distribution, and its variance."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(outputs, targets, reduction="none").sum(1)

    def summary(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.exp(), outputs.exp()


@pytest.fixture
def noisy() -> Noisy:
    return Noisy(settle(ResNet())).double()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 8, 8, dtype=torch.float64)


def check_equal(found: Prediction, expected: Prediction) -> None:
    for name in UNCERTAINTIES:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


# What is averaged, for every likelihood


def test_probabilities_are_averaged_never_logits(noisy: Noisy, images: Tensor) -> None:
    p = predict(noisy, images, samples=3)
    assert p.members.shape == (6, 5, 3)
    torch.testing.assert_close(p.members.sum(2), torch.ones(6, 5, dtype=torch.float64))
    torch.testing.assert_close(p.probs, p.members.mean(0))
    assert torch.equal(p.labels, p.probs.argmax(1))
    assert torch.equal(p.confidence, p.probs.max(1).values)


def test_total_uncertainty_is_the_entropy_of_the_mean(noisy: Noisy, images: Tensor) -> None:
    p = predict(noisy, images, samples=4)
    torch.testing.assert_close(p.total, entropy(p.probs))
    torch.testing.assert_close(p.aleatoric, entropy(p.members, dim=2).mean(0))


def test_epistemic_uncertainty_is_the_mutual_information(noisy: Noisy, images: Tensor) -> None:
    p = predict(noisy, images, samples=4)
    q = p.members
    torch.testing.assert_close(p.epistemic, (q * (q.log() - p.probs.log())).sum(2).mean(0))
    assert (p.epistemic > 0).all()


def test_a_single_network_has_no_epistemic_uncertainty() -> None:
    for likelihood in (Categorical(), MultiLabel(), Gaussian(), Gaussian(0.1), Rate()):
        model = lpbnn.build(small(4), "mcp", likelihood=likelihood)
        assert predict(model, torch.randn(5, 5)).epistemic.max() < 1e-6


@pytest.mark.parametrize("members", [3, 4, 7])
def test_equal_members_do_not_disagree(members: int) -> None:
    model = lpbnn.build(small(), "ensemble", members=members, reinit="none")
    p = predict(model, torch.randn(50, 5), keep_members=False)
    assert (p.epistemic >= 0).all()
    assert p.epistemic.max() < 1e-6
    torch.testing.assert_close(p.probs.sum(1), torch.ones(50), atol=1e-6, rtol=0)


@pytest.mark.parametrize("variance", ["softplus", "log", 0.3])
def test_the_total_variance_is_that_of_the_mixture(variance: Any) -> None:
    model = lpbnn.build(small(4), "ensemble", likelihood=Gaussian(variance)).double()
    p = predict(model, torch.randn(6, 5, dtype=torch.float64), chunk=5)
    outputs = 4 if variance == 0.3 else 2
    assert p.members.shape == p.member_variances.shape == (4, 6, outputs)
    torch.testing.assert_close(p.mean, p.members.mean(0))
    torch.testing.assert_close(p.aleatoric, p.member_variances.mean(0))
    torch.testing.assert_close(p.epistemic, p.members.var(0, unbiased=False))
    second_moment = (p.members.square() + p.member_variances).mean(0)
    torch.testing.assert_close(p.total, second_moment - p.mean.square())
    torch.testing.assert_close(p.std, second_moment.sub(p.mean.square()).sqrt())
    torch.testing.assert_close(p.ood_score, p.total.sum(1))


def test_epistemic_variance_survives_a_large_mean() -> None:
    model = lpbnn.build(nn.Linear(2, 2), "ensemble", members=4, task="regression")
    with torch.no_grad():
        for j, net in enumerate(model.networks):
            net[0].bias[0] = 1e4 + j
    p = predict(model, torch.zeros(3, 2))
    torch.testing.assert_close(p.epistemic, torch.full((3, 1), 1.25))


def test_each_of_several_labels_has_its_own_uncertainty() -> None:
    model = lpbnn.build(small(), "ensemble", task="multilabel").double()
    p = predict(model, torch.randn(6, 5, dtype=torch.float64))
    assert p.probs.shape == p.labels.shape == p.confidence.shape == p.epistemic.shape == (6, 3)
    torch.testing.assert_close(p.probs, p.members.mean(0))
    assert torch.equal(p.labels, p.probs > 0.5)
    assert (p.confidence >= 0.5).all()
    both = torch.stack([p.members, 1 - p.members])
    mean = torch.stack([p.probs, 1 - p.probs])
    information = (both * (both.log() - mean.log().unsqueeze(1))).sum(0).mean(0)
    torch.testing.assert_close(p.epistemic, information)
    torch.testing.assert_close(p.total, entropy(mean, 0))
    torch.testing.assert_close(p.ood_score, p.total.sum(1))


def test_maps_of_classes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))
    model = lpbnn.build(net, "ensemble", members=2, task="segmentation")
    p = predict(model, torch.randn(3, 3, 6, 7), chunk=2)
    assert p.task == "segmentation"
    assert p.probs.shape == (3, 5, 6, 7)
    for name in ("labels", "confidence", "epistemic", "ood_score"):
        assert getattr(p, name).shape == (3, 6, 7)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(3, 6, 7))


def test_maps_of_numbers() -> None:
    model = lpbnn.build(nn.Conv2d(3, 4, 1), "ensemble", members=2, task="regression")
    p = predict(model, torch.randn(3, 3, 6, 7), chunk=2)
    assert p.mean.shape == p.total.shape == (3, 2, 6, 7)
    assert p.ood_score.shape == (3, 6, 7)


def test_sequences_keep_their_classes_last() -> None:
    likelihood = Categorical(dim=-1)
    model = lpbnn.build(nn.Linear(5, 3), "ensemble", members=2, likelihood=likelihood)
    x = torch.randn(4, 7, 5)
    p = predict(model, x, chunk=3)
    assert p.probs.shape == (4, 7, 3)
    torch.testing.assert_close(p.probs, model(x).softmax(-1).mean(0))
    for name in ("labels", "confidence", "epistemic", "ood_score"):
        assert getattr(p, name).shape == (4, 7)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(4, 7))


def test_a_users_likelihood_has_values() -> None:
    model = lpbnn.build(small(), "ensemble", members=3, likelihood=Rate())
    x = torch.randn(4, 5)
    p = predict(model, x, chunk=2)
    assert p.task == "custom"
    torch.testing.assert_close(p.values, model(x).exp().mean(0))
    torch.testing.assert_close(p.epistemic, model(x).exp().var(0, unbiased=False))
    torch.testing.assert_close(p.aleatoric, p.values)
    torch.testing.assert_close(p.std, (p.aleatoric + p.epistemic).sqrt())
    torch.testing.assert_close(p.ood_score, p.total.sum(1))


class Binary(Likelihood):
    """A yes-or-no question with one output, as a user would write it."""

    quantity = "probs"
    information = True

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def summary(self, outputs: Tensor) -> Summary:
        probs = outputs[:, :, 0].sigmoid()
        return Summary(probs, self.total(probs))

    def total(self, average: Tensor) -> Tensor:
        return entropy(torch.stack([average, 1 - average]), 0)


def test_a_subclass_may_measure_information() -> None:
    model = lpbnn.build(small(1), "ensemble", members=3, likelihood=Binary())
    p = predict(model, torch.randn(4, 5), chunk=3)
    assert p.probs.shape == p.labels.shape == p.epistemic.shape == (4,)
    torch.testing.assert_close(p.total, Binary().total(p.probs))
    torch.testing.assert_close(p.ood_score, p.total)


# Outputs per example, inputs, targets and the shape of the averages.
CASES: dict[str, tuple[Any, nn.Module, tuple[int, ...], Tensor, tuple[int, ...]]] = {
    "classes": (Categorical(), small(), (5,), torch.tensor([0, 1, 2, 0]), (4, 3)),
    "soft labels": (Categorical(), small(), (5,), torch.full((4, 3), 1 / 3), (4, 3)),
    "pixels": (
        Segmentation(),
        nn.Conv2d(2, 3, 1),
        (2, 6, 5),
        torch.ones(4, 6, 5).int(),
        (4, 3, 6, 5),
    ),
    "tokens": (Categorical(dim=-1), small(), (7, 5), torch.ones(4, 7).long(), (4, 7, 3)),
    "numbers": (Gaussian(), small(4), (5,), torch.ones(4, 2), (4, 2)),
    "log variance": (Gaussian("log"), small(4), (5,), torch.ones(4, 2), (4, 2)),
    "fixed variance": (Gaussian(0.1), small(), (5,), torch.ones(4, 3), (4, 3)),
    "dense numbers": (
        Gaussian(),
        nn.Conv2d(2, 4, 1),
        (2, 6, 5),
        torch.ones(4, 2, 6, 5),
        (4, 2, 6, 5),
    ),
    "several labels": (MultiLabel(), small(), (5,), torch.ones(4, 3), (4, 3)),
    "custom": (Rate(), small(), (5,), torch.ones(4, 3), (4, 3)),
    "binary": (Binary(), small(1), (5,), torch.ones(4), (4,)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_every_likelihood_trains_and_predicts(method: str, case: str) -> None:
    likelihood, net, inputs, y, shape = CASES[case]
    model = lpbnn.build(copy.deepcopy(net), method, likelihood=likelihood)
    x = torch.randn(4, *inputs)
    model.loss(x, y, torch.rand(4))["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    p = predict(model, x)
    assert p.average.shape == shape
    assert p.members.shape == (model.members, *shape)
    assert p.aleatoric.shape == p.epistemic.shape == p.total.shape
    assert (p.epistemic >= 0).all()
    assert p.ood_score.shape[0] == 4
    check_equal(predict(model, x, chunk=3, keep_members=False), p)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(x), "size": self.size(x)}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_every_head_has_a_prediction(method: str, chunk: int | None) -> None:
    likelihood = {"kind": Categorical(), "size": Gaussian()}
    model, x = lpbnn.build(Heads(), method, likelihood=likelihood), torch.randn(4, 5)
    found = predict(model, x, chunk=chunk)
    assert list(found) == ["kind", "size"]
    outputs = model(x)
    torch.testing.assert_close(found["kind"].probs, outputs["kind"].softmax(2).mean(0))
    torch.testing.assert_close(found["size"].mean, outputs["size"][..., :1].mean(0))
    assert found["size"].epistemic.shape == (4, 1)


def test_names_of_other_likelihoods_are_refused_with_the_right_one() -> None:
    x = torch.randn(4, 5)
    numbers = predict(lpbnn.build(small(4), "mcp", task="regression"), x)
    for name, instead in (("probs", "mean"), ("labels", "mean"), ("confidence", "total")):
        with pytest.raises(
            AttributeError, match=f"regression prediction has no {name}; use {instead}"
        ):
            getattr(numbers, name)
    classes = predict(lpbnn.build(small(), "mcp"), x)
    with pytest.raises(AttributeError, match="classification prediction has no mean; use probs"):
        classes.mean  # noqa: B018
    with pytest.raises(AttributeError, match="classification prediction has no std; use total"):
        classes.std  # noqa: B018
    custom = predict(lpbnn.build(small(), "mcp", likelihood=Rate()), x)
    with pytest.raises(AttributeError, match="custom prediction has no probs; use values"):
        custom.probs  # noqa: B018


# OOD scores


def test_the_ood_score_of_classes_is_the_entropy(noisy: Noisy, images: Tensor) -> None:
    p = predict(noisy, images)
    assert torch.equal(p.ood_score, p.total)


def test_the_ood_score_of_classes_may_be_the_missing_confidence(images: Tensor) -> None:
    model = lpbnn.build(ResNet().double(), "mcp", likelihood=Categorical(score="confidence"))
    p = predict(model, images)
    assert torch.equal(p.ood_score, 1 - p.confidence)
    with pytest.raises(ValueError, match="score='max': choose 'entropy' or 'confidence'"):
        Categorical(score="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_methods_own_score_is_averaged_over_members(chunk: int | None) -> None:
    class Scored(Noisy):
        def ood_score(self, outputs: Tensor) -> Tensor:
            return outputs.amax(2)

    model, x = Scored(small()), torch.randn(5, 5)
    p = predict(model, x, samples=3, seed=0, chunk=chunk)
    torch.manual_seed(0)
    outputs = torch.cat([run(x) for run in model.eval().passes(3, 2)])
    torch.testing.assert_close(p.ood_score, outputs.amax(2).mean(0))


# Portions and memory


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 10_000])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.1), MultiLabel(), Rate()])
def test_the_result_does_not_depend_on_the_chunk(likelihood: Any, chunk: int) -> None:
    model = Noisy(small(), lpbnn.likelihoods.as_likelihood(likelihood)).double()
    x = torch.randn(5, 5, dtype=torch.float64)
    whole = predict(model, x, samples=2, seed=3)
    parts = predict(model, x, samples=2, seed=3, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    check_equal(parts, whole)


def test_no_more_examples_than_the_chunk_are_in_the_network() -> None:
    model, x = lpbnn.build(small(), "ensemble", members=3, check=False), torch.randn(5, 5)
    seen: list[int] = []
    for net in model.networks:
        net[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for chunk in (1, 2, 4, 7):
        seen.clear()
        predict(model, x, chunk=chunk)
        assert max(seen) <= chunk
        assert sum(seen) == 3 * 5


@pytest.mark.filterwarnings("ignore:The output of an example depends")
def test_an_input_that_cannot_be_cut_is_named() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x, state)[0][:, -1])

    model = lpbnn.build(Reader(), "batchensemble", exclude="rnn")
    inputs = torch.randn(8, 5, 4), torch.randn(1, 8, 6)
    assert predict(model, inputs).probs.shape == (8, 3)
    with pytest.raises(
        ValueError, match=r"cannot be cut with it \(an initial state.*without chunk"
    ):
        predict(model, inputs, chunk=3)


def test_rows_are_asked_to_be_independent_once_if_the_batch_is_cut() -> None:
    class Asked(Noisy):
        def independent_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            asked.append((len(args[0]), self.training, torch.is_grad_enabled()))
            return Call(args, kwargs)

    model, x = Asked(small()), torch.randn(5, 5)
    asked: list[tuple[int, bool, bool]] = []
    predict(model, x, samples=3)
    predict(model, x, samples=3, chunk=5)
    assert asked == []
    predict(model, x, samples=3, chunk=2)
    assert asked == [(5, False, False)]


def test_inputs_that_are_no_batch_are_given_to_every_part() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return self.inner(x) * scale.sum() + shift

    model = lpbnn.build(Scaled(), "mcp")
    x, scale, shift = torch.randn(6, 5), torch.randn(2), torch.randn(6, 1)
    whole = predict(model, (x, scale, shift))
    for chunk in (1, 2, 4, 5):
        torch.testing.assert_close(
            predict(model, (x, scale, shift), chunk=chunk).probs, whole.probs
        )
    named = predict(model, {"x": x, "scale": scale, "shift": shift}, chunk=4)
    torch.testing.assert_close(named.probs, whole.probs)


def test_running_sums_equal_kept_members(noisy: Noisy, images: Tensor) -> None:
    kept = predict(noisy, images, samples=5, seed=1)
    sums = predict(noisy, images, samples=5, seed=1, keep_members=False)
    assert sums.members is None
    for name in UNCERTAINTIES:
        assert torch.equal(getattr(sums, name), getattr(kept, name))


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_members_are_summarised_a_few_at_a_time_to_the_same_result(
    likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lpbnn.build(small(4), "ensemble", members=5, likelihood=likelihood)
    x = torch.randn(6, 5)
    whole = predict(model, x)
    monkeypatch.setattr(module, "AT_ONCE", 2 * 6 * 4)  # two members
    few = predict(model, x)
    assert torch.equal(few.members, whole.members)
    for name in UNCERTAINTIES:
        assert torch.equal(getattr(few, name), getattr(whole, name))


@pytest.mark.parametrize("shape", [(9, 7), (8,), (4, 3, 5)])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("likelihood", [Segmentation(), Gaussian(), MultiLabel()])
def test_maps_are_summed_in_strips_to_the_same_result(
    likelihood: Likelihood, shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)]
    model = Noisy(kind(3, 4, 1), likelihood)
    x = torch.randn(2, 3, *shape)
    whole = predict(model, x, samples=3, seed=0)
    row = 2 * 4 * torch.Size(shape[1:]).numel()
    monkeypatch.setattr(module, "AT_ONCE", rows * row)
    for chunk in (None, 1):
        strips = predict(model, x, samples=3, seed=0, keep_members=False, chunk=chunk)
        assert strips.members is None
        check_equal(strips, whole)


def test_memory_for_probabilities_does_not_grow_with_the_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the result, which is joined from its strips, there is one member's strip at a time."""
    monkeypatch.setattr(module, "AT_ONCE", 2**11)
    model = lpbnn.build(nn.Conv2d(3, 8, 1), "mcp", task="segmentation")
    with PeakMemory() as meter:
        outputs = torch.randn(4, 1, 8, 128, 128)
        sums = module.MemberSums(model.likelihood, keep=False)
        sums.add(outputs, model.ood_score)
        sums.finish()
    result = (8 + 3) * 128 * 128 * 4  # probabilities, two uncertainties and the score
    assert meter.peak - outputs.nbytes < 2.1 * result


def test_memory_does_not_grow_with_the_samples_unless_members_are_kept() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 13, 1))
    model, x = Noisy(net, Segmentation()), torch.randn(1, 3, 64, 64)

    def peak(samples: int, keep: bool) -> int:
        with PeakMemory() as memory:
            predict(model, x, samples=samples, keep_members=keep)
        return memory.peak

    few, many = peak(2, False), peak(16, False)  # from the second pass on there is a running sum
    assert many - few < 16 * 100
    assert peak(16, True) > 3 * few


def test_half_precision_outputs_are_averaged_in_float32() -> None:
    for likelihood in (Categorical(), Gaussian(), MultiLabel(), Rate()):
        model = lpbnn.build(small(4), "ensemble", likelihood=likelihood).to(torch.bfloat16)
        p = predict(model, torch.randn(3, 5, dtype=torch.bfloat16))
        assert all(getattr(p, name).dtype == torch.float32 for name in UNCERTAINTIES)


# State


def test_a_seed_repeats_the_draws_and_leaves_the_generators_alone(
    noisy: Noisy, images: Tensor
) -> None:
    before = torch.get_rng_state()
    first = predict(noisy, images, seed=1).probs
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(predict(noisy, images, seed=1).probs, first)
    assert not torch.equal(predict(noisy, images, seed=2).probs, first)
    assert not torch.equal(predict(noisy, images).probs, predict(noisy, images).probs)


def test_a_generator_gives_a_new_seed_to_every_prediction(noisy: Noisy, images: Tensor) -> None:
    def drawn() -> list[Tensor]:
        generator = torch.Generator().manual_seed(4)
        return [predict(noisy, images, generator=generator).probs for _ in range(2)]

    first, again = drawn(), drawn()
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_the_training_state_is_restored(noisy: Noisy, images: Tensor) -> None:
    noisy.train()
    noisy.net.stage1.eval()
    modes = [module.training for module in noisy.modules()]
    statistics = noisy.net.stage2.body[1].running_mean.clone()
    p = predict(noisy, images)
    assert [module.training for module in noisy.modules()] == modes
    assert torch.equal(noisy.net.stage2.body[1].running_mean, statistics)
    assert not p.probs.requires_grad


def test_the_training_state_is_restored_after_an_error(noisy: Noisy) -> None:
    noisy.train()
    with pytest.raises(RuntimeError):
        predict(noisy, torch.randn(2, 7, 8, 8, dtype=torch.float64))
    assert noisy.training


@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_deterministic_models_run_once(method: str) -> None:
    model = lpbnn.build(Mlp(), method)
    assert len(predict(model, torch.randn(3, 5), samples=7).members) == model.members


def test_a_prediction_is_data_that_can_be_saved() -> None:
    p = predict(lpbnn.build(small(), "mcp", likelihood=Rate()), torch.randn(4, 5))
    check_equal(pickle.loads(pickle.dumps(p)), p)


def test_parts_of_a_batch_are_merged(noisy: Noisy, images: Tensor) -> None:
    parts = [predict(noisy, part, samples=2, seed=0) for part in images.split(2)]
    merged, whole = merge(parts), predict(noisy, images, samples=2, seed=0)
    torch.testing.assert_close(merged.members, whole.members)
    check_equal(merged, whole)


# Wrappers


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "LossStep": lpbnn.LossStep,
    "AveragedModel": AveragedModel,
    "compiled LossStep": lambda model: lpbnn.LossStep(torch.compile(model, backend="eager")),
    "averaged LossStep": lambda model: AveragedModel(lpbnn.LossStep(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_a_wrapped_model_predicts_as_the_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = lpbnn.build(settle(ResNet()), "ensemble", members=2).train(), torch.randn(4, 3, 8, 8)
    expected = predict(model, x).members
    wrapped = wrap(model)
    assert torch.equal(predict(wrapped, x).members, expected)
    assert all(module.training for module in wrapped.modules())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_a_wrapped_plain_network_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(TypeError, match="got Sequential. A plain network becomes one"):
        predict(wrap(small()), torch.randn(4, 5))


def test_averaged_weights_predict() -> None:
    model, x = lpbnn.build(small(), "mcp"), torch.randn(4, 5)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p, before in zip(model.parameters(), first, strict=True):
            p.copy_(before + 0.5)
    torch.testing.assert_close(predict(averaged, x).probs, predict(model, x).probs)


def test_a_module_around_a_model_is_refused_with_its_path() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lpbnn.build(small(), "mcp")

    with pytest.raises(TypeError, match="got Around. It holds one as 'inner'.*give that one"):
        predict(Around(), torch.randn(4, 5))


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples=0: expected an integer of at least 1"),
        ({"chunk": -1}, "chunk=-1"),
        ({"seed": 0, "generator": torch.Generator()}, "seed or generator, not both"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(lpbnn.build(Mlp(), "mcp"), torch.randn(2, 5), **options)


@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_one_output_is_no_class(method: str) -> None:
    with pytest.raises(ValueError, match="give the last layer two outputs"):
        predict(lpbnn.build(small(1), method), torch.randn(4, 5))


@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_an_odd_number_of_outputs_is_no_gaussian(method: str) -> None:
    with pytest.raises(ValueError, match="two outputs per target .*got 3"):
        predict(lpbnn.build(small(3), method, task="regression"), torch.randn(4, 5))


class ChangesInputs(nn.Module):
    """Changes the batch and a shared input, in place or not."""

    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x, scale = (x, scale) if self.in_place else (x.clone(), scale.clone())
        scale.mul_(2)
        return self.head(self.body(x.mul_(scale)).relu_())


WAYS = [(name, {}) for name in ("lpbnn", "batchensemble", "mcdropout", "meanfield", "ensemble")]


@pytest.mark.parametrize(
    ("method", "options"), [*WAYS, ("tradi", {}), ("rank1", {"include": "head"})]
)
def test_a_network_that_changes_its_inputs_gives_every_member_the_same_ones(
    method: str, options: dict[str, Any]
) -> None:
    model = lpbnn.build(ChangesInputs(), method, num_data=100, **options)
    if method == "tradi":
        model.after_step()
        model.after_fit([])
    x, scale = torch.randn(6, 4), torch.rand(1)
    given = x.clone(), scale.clone()
    expected = lpbnn.predict(model, (x, scale), samples=3, seed=0)
    for net in model.networks:
        net.in_place = True
    for chunk in (None, 1, 4, 100):
        found = lpbnn.predict(model, (x, scale), samples=3, seed=0, chunk=chunk)
        torch.testing.assert_close(found.members, expected.members)
    torch.testing.assert_close((x, scale), given)
    if not model.stochastic:
        torch.testing.assert_close(model.eval()(x, scale).softmax(-1), expected.members)


def test_a_converted_network_in_place_of_its_model_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    lpbnn.build(net, "lpbnn", num_data=10)
    with pytest.raises(TypeError, match="give the model that build returned"):
        lpbnn.predict(net, torch.randn(5, 4))


def test_an_interval_has_the_total_variance() -> None:
    model = lpbnn.build(nn.Linear(4, 2), "ensemble", members=5, task="regression")
    p = lpbnn.predict(model, torch.randn(6, 4))
    assert (p.epistemic > 0).all()
    low, high = p.interval(0.95)
    torch.testing.assert_close((high - low) / 2, 1.959964 * (p.aleatoric + p.epistemic).sqrt())


def test_the_confidence_of_several_labels_is_the_probability_that_each_is_right() -> None:
    model = lpbnn.build(nn.Linear(4, 5), "ensemble", task="multilabel")
    p = lpbnn.predict(model, torch.randn(6, 4))
    assert torch.equal(p.labels, p.probs > 0.5)
    torch.testing.assert_close(p.confidence, p.probs.where(p.labels, 1 - p.probs))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("likelihood", [Categorical(), MultiLabel(), Gaussian(), Gaussian(0.1)])
def test_every_number_of_a_prediction_has_the_precision_of_the_outputs(
    likelihood: Likelihood, members: int
) -> None:
    model = lpbnn.build(small(4), "ensemble", members=members, likelihood=likelihood).double()
    for chunk in (None, 2):
        found = predict(model, torch.randn(5, 5).double(), chunk=chunk).to_dict()
        numbers = {name: value.dtype for name, value in found.items() if name != "labels"}
        assert set(numbers.values()) == {torch.float64}, numbers


@pytest.mark.parametrize("level", ["0.9", None, torch.tensor(0.9)])
def test_a_level_that_is_no_number_is_refused(level: Any) -> None:
    x = torch.randn(20, 5)
    for task in ("classification", "regression"):
        model = lpbnn.build(small(4), "mcp", task=task)
        p, y = predict(model, x), torch.zeros(20, dtype=torch.int64)
        scores = fit_conformal(p, y if task == "classification" else torch.zeros(20, 2))
        call = partial(p.sets, scores) if task == "classification" else p.interval
        with pytest.raises(TypeError, match="expected conformal scores and a level; got"):
            call(level)
