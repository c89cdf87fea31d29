"""LP-BNN: its posterior, its penalties and their weights, its variants and options."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpbnn
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior
from lpbnn.rank_one.layer import RankOneLayer

X = torch.linspace(-1, 1, 24).view(8, 3)
Y = torch.tensor([0, 1] * 4)


def built(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, **options).double()


@pytest.mark.parametrize(("members", "latent"), [(4, 4), (32, 32), (31, 32), (8, 9), (64, 32)])
def test_as_many_members_as_latent_numbers_do_not_start_in_noise(members: int, latent: int) -> None:
    """Codes that lie nearly in a plane asked for a D, and with it noise, up to fifty times too large."""
    for _ in range(30):
        factors = LatentFactors(members, 64, 2, latent=latent, init_std=0.1)
        scale = factors.decoder.weight.square().sum(1).div(latent).sqrt()
        assert scale.mean() < 1  # 0.5 where D is random
        [(mean, _)] = LatentPosterior([factors]).mean()
        assert (mean - factors.r).abs().max() < 0.6  # six standard deviations of r


def test_samples_have_the_mean_and_covariance_of_their_member() -> None:
    torch.manual_seed(0)
    factors = LatentFactors(members=2, inputs=3, outputs=2, latent=4, log_variance=-1.0).double()
    posterior = LatentPosterior([factors])
    with torch.no_grad():
        [(r, s)] = posterior.sample(200_000)
        [(mean, _)], [factor] = posterior.mean(), posterior.covariance_factors()
        for j, rows in enumerate(r.view(-1, 2, 3).unbind(1)):
            torch.testing.assert_close(rows.mean(0), mean[j], rtol=0, atol=0.01)
            torch.testing.assert_close(rows.T.cov(), factor[j] @ factor[j].T, rtol=0.03, atol=0.005)
    assert torch.equal(s[:2], factors.s)


def test_copies_of_a_sample_lie_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In compiled training every row has its own copy of r, member-major."""
    posterior = LatentPosterior([LatentFactors(2, 3, 2), LatentFactors(2, 5, 2)])
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=compiling: answer)
        torch.manual_seed(3)
        found.append(posterior.sample(rows_per_member=4))
    for (r, s), (rows, same) in zip(*found, strict=True):
        assert torch.equal(rows, r.repeat_interleave(4, 0))
        assert torch.equal(same, s)


def test_penalties_of_layers_of_any_widths_are_each_layers_own() -> None:
    torch.manual_seed(0)
    many = [LatentFactors(2, inputs, 3, latent=4).double() for inputs in (6, 5, 7, 5, 6)]
    posterior = LatentPosterior(many)
    by_width = [many[i] for group in posterior.groups for i in group]
    alone = [LatentPosterior([factors]) for factors in by_width]
    assert set(by_width) == set(many)
    torch.testing.assert_close(posterior.kl(), torch.cat([one.kl() for one in alone]))
    for of_samples in (True, False):
        expected = torch.cat([one.squared_error(of_samples) for one in alone])
        torch.testing.assert_close(posterior.squared_error(of_samples), expected)


def widths_apart() -> Any:
    torch.manual_seed(0)
    sizes = [(16, 64), (64, 16), (16, 64), (64, 16), (16, 2)]
    net = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, variant="paper", weighting="balanced")


def in_half_precision(model: Any) -> None:
    model.net[0].factors.bfloat16()


def of_another_width(model: Any) -> None:
    model.net[0] = RankOneLayer(nn.Linear(4, 64), LatentFactors(2, 4, 64), "0")
    model.refresh()


@pytest.mark.parametrize("option", ["noise", "anneal", "pace", "free_bits", "by_width", "train_r"])
def test_options_of_earlier_versions_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"lpbnn has no option '{option}'"):
        built(**{option: 1})


@pytest.mark.parametrize("change", [in_half_precision, of_another_width])
def test_each_layer_keeps_the_weight_of_its_own_width(change: Callable[[Any], None]) -> None:
    """In any order of the groups, and after a layer was replaced."""
    model = widths_apart()
    change(model)
    posterior = model.posterior()
    factors = [posterior.layers[i] for group in posterior.groups for i in group]
    squared = posterior.squared_error(of_samples=True)
    expected = (squared / torch.tensor([f.inputs for f in factors])).mean()
    found = model.penalties(posterior)["reconstruction"]
    torch.testing.assert_close(found, expected, check_dtype=False)


class Calls(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_calls_of_a_sample_grow_with_the_widths_and_not_with_the_layers() -> None:
    """Noise is drawn once; each width has one product to encode and one to decode."""

    def drawn(widths: list[int]) -> Counter[str]:
        many = [LatentFactors(2, inputs, 3) for inputs in widths]
        with Calls() as calls:
            LatentPosterior(many).sample()
        return calls.by_name

    few, many = drawn([5, 6] * 2), drawn([5, 6] * 9)
    assert few == many
    assert (few["randn"], few["bmm"], few["baddbmm"]) == (1, 2, 2)


def test_r_and_the_decoder_stay_as_they_were_drawn() -> None:
    model = built()
    groups = model.parameter_groups(weight_decay=0.1, lr=0.5)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        optimizer.zero_grad()
        model.loss(X.double(), Y)["loss"].backward()
        optimizer.step()
    after = model.state_dict()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    fixed = {f"net.{i}.factors.{name}" for i in (0, 2) for name in ("r", "decoder.weight")}
    assert kept == {*fixed, "noise_scale"}
    assert not any(
        p.requires_grad for name, p in model.named_parameters() if "decoder.weight" in name
    )
    learning = built()
    learning.load_state_dict(after)  # the same tensors, by the same names
    torch.testing.assert_close(model.posterior().mean(), learning.posterior().mean())


def test_the_error_of_the_mean_is_what_is_left_without_noise_and_moves_no_variance() -> None:
    """By default the noise is no part of the error, so only likelihood and KL size it."""
    model = built()
    factors = [layer.factors for layer in model.layers]
    with torch.no_grad():
        for one in factors:
            one.decoder.bias += 0.3 * torch.randn_like(one.decoder.bias)  # so that it misses r
    posterior = model.posterior()
    pairs = zip(factors, posterior.mean(), strict=True)
    error = torch.stack([(mean - f.r).square().mean() for f, (mean, _) in pairs]).mean()
    found = model.penalties(posterior)["reconstruction"]
    torch.testing.assert_close(found, error)
    found.backward()
    for one in factors:
        for parameter in (one.encoder.weight, one.encoder.bias):
            to_mean, to_variance = parameter.grad.chunk(2)
            assert to_mean.abs().sum() > 0
            assert to_variance.abs().sum() == 0
    parts = zip(factors, posterior.covariance_factors(), strict=True)
    noise = [factor.square().sum((1, 2)).mean() / f.inputs for f, factor in parts]
    paper = built(variant="paper", weighting="balanced")
    paper.load_state_dict(model.state_dict())
    squared = paper.penalties(paper.posterior())["reconstruction"]
    torch.testing.assert_close(error + torch.stack(noise).mean(), squared)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("variant", "code"),
        ("variant", None),
        ("weighting", "paper"),
        ("init_std", -0.1),
        ("init_std", float("nan")),
        ("latent", 0),
        ("log_variance", float("nan")),
        ("log_variance", float("-inf")),
        ("log_variance", "inf"),
        ("log_variance", True),
        ("kl_weight", -0.1),
        ("kl_weight", float("nan")),
        ("kl_weight", "1/150"),  # --set kl_weight=1/150
        ("kl_weight", True),
    ],
)
def test_bad_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        built(**{option: value})


def test_the_weight_of_the_kl_of_much_data_is_not_lost_in_half_precision() -> None:
    model = lpbnn.build(nn.Sequential(nn.Linear(3, 2)), "lpbnn", num_data=10**8)
    expected = model.penalties(model.posterior())["kl"]
    model.half()
    found = model.penalties(model.posterior())["kl"]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_the_weight_of_the_kl_is_not_lost_if_half_precision_is_the_default() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        model = lpbnn.build(nn.Sequential(nn.Linear(3, 2)), "lpbnn", num_data=10**8).float()
    finally:
        torch.set_default_dtype(torch.float32)
    posterior = model.posterior()
    expected = posterior.kl().mean().item() * 1e-8
    assert model.penalties(posterior)["kl"].item() == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_number_of_numpy_is_a_number() -> None:
    model = built(log_variance=np.float32(-1))
    assert model.layers[0].factors.encoder.bias[32:].mean().item() == -1


def test_a_compiled_loss_has_the_uncompiled_ones_value_and_gradients() -> None:
    """More layers of one width than a compiler stacks at once, and copies of r for every row."""
    layers = [nn.Linear(6, 6) for _ in range(10)]
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(2), Mean(), *layers)
    model = lpbnn.build(net, "lpbnn", members=3, num_data=50, latent=4).double()
    other = copy.deepcopy(model)
    compiled = torch.compile(other.loss, backend="eager", fullgraph=True)
    x, y = torch.randn(7, 3, 5, 5).double(), torch.randint(6, (7,))  # 7: two examples come twice
    torch.manual_seed(3)
    expected = model.loss(x, y)
    torch.manual_seed(3)
    found = compiled(x, y)
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)
    expected["loss"].backward()
    found["loss"].backward()
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_a_module_that_expands_late_is_compiled_for_a_repeated_batch() -> None:
    """Its layers get the batch as it is, and an r for every row of the members."""

    class Views(nn.Module):
        expand_in_layers = True  # as DeepLab's ASPP

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(4, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.other(x)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Views(), nn.ReLU(), nn.Conv2d(5, 6, 1))
    options = {"batch_mode": "repeat", "exclude": "0", "latent": 4}
    model = lpbnn.build(net, "lpbnn", task="segmentation", members=3, num_data=50, **options)
    model = model.double()
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    x, y = torch.randn(4, 3, 6, 6).double(), torch.randint(6, (4, 4, 4))
    terms = []
    for loss in (model.loss, compiled):
        torch.manual_seed(3)
        terms.append(loss(x, y))
    torch._dynamo.reset()
    torch.testing.assert_close(*terms)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1)
