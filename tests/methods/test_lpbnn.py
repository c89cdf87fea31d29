"""LP-BNN's own options: noise by pass or by example, annealed KL, free bits, repeated last epochs."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpbnn
from lpbnn.rank_one.factors import draw_all
from lpbnn.rank_one.layer import RankOneLayer, with_biases
from lpbnn.rank_one.vae import LatentFactors, Stacks

X = torch.linspace(-1, 1, 24).view(8, 3)
Y = torch.tensor([0, 1] * 4)


def built(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, **options).double()


def seen_by_first_layer(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """What the shared weight of the first layer is given in a training pass."""
    seen: list[Tensor] = []
    layer = next(module for module in model.modules() if isinstance(module, RankOneLayer))
    layer.layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model.loss(x, y)
    return seen[0]


@pytest.mark.parametrize(("members", "latent"), [(4, 4), (32, 32), (31, 32), (8, 9), (64, 32)])
def test_as_many_members_as_latent_numbers_do_not_start_in_noise(members: int, latent: int) -> None:
    """Codes that lie nearly in a plane asked for a D, and with it noise, up to fifty times too large."""
    for _ in range(30):
        factors = LatentFactors(members, 64, 2, latent=latent, init_std=0.1)
        scale = factors.decoder.weight.square().sum(1).div(latent).sqrt()
        assert scale.mean() < 1  # 0.5 where D is random
        assert (factors.mean()[0] - factors.r).abs().max() < 0.6  # six standard deviations of r


def test_noise_by_example_is_drawn_for_every_row() -> None:
    model = built(noise="example")
    x = torch.ones(8, 3, dtype=torch.float64)
    inputs = seen_by_first_layer(model, x, Y)  # r^ itself, as x is one
    assert len({tuple(row.tolist()) for row in inputs}) == 8
    with torch.no_grad():
        r, _ = model.layers[0].factors.draw()
    assert r.shape == (2, 3)  # a prediction draws for members, as ever


def test_rows_are_drawn_from_their_members_posterior() -> None:
    """Mean and covariance of the rows of member j are those of r^_j."""
    torch.manual_seed(0)
    factors = LatentFactors(members=2, inputs=3, outputs=2, latent=4, log_variance=-1.0).double()
    layer = RankOneLayer(nn.Linear(3, 2).double(), factors)
    with torch.no_grad():
        (draw,) = with_biases([layer], Stacks([factors]).draw(rows=200_000))
        mean, factor = factors.mean()[0], factors.covariance_factor()
        for j, rows in enumerate(draw.r.chunk(2)):
            torch.testing.assert_close(rows.mean(0), mean[j], rtol=0, atol=0.01)
            torch.testing.assert_close(rows.T.cov(), factor[j] @ factor[j].T, rtol=0.03, atol=0.005)
    assert draw.members == 2


def test_terms_are_each_layers_own_whatever_its_width_and_latent_size() -> None:
    torch.manual_seed(0)
    sizes = [(5, 4), (6, 3), (5, 3), (5, 4), (6, 4)]
    many = [LatentFactors(2, inputs, 3, latent=latent).double() for inputs, latent in sizes]
    kl, squared = LatentFactors.terms(many)
    alone = [LatentFactors.terms([factors]) for factors in many]
    torch.testing.assert_close(kl, torch.cat([one for one, _ in alone]))
    torch.testing.assert_close(squared, torch.cat([one for _, one in alone]))


def widths_apart() -> Any:
    torch.manual_seed(0)
    sizes = [(16, 64), (64, 16), (16, 64), (64, 16), (16, 2)]
    net = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, reconstruct="draws")


def in_half_precision(model: Any) -> None:
    model.net[0].factors.bfloat16()


def of_another_width(model: Any) -> None:
    model.net[0] = RankOneLayer(nn.Linear(4, 64), LatentFactors(2, 4, 64), "0")


@pytest.mark.parametrize("change", [in_half_precision, of_another_width])
def test_each_layer_keeps_the_weight_of_its_own_width(change: Callable[[Any], None]) -> None:
    """Whatever order the stacks have them in, and whatever took the place of one."""
    model = widths_apart()
    change(model)
    factors = [layer.factors for layer in model.layers]
    _, squared = LatentFactors.terms(factors)
    expected = (squared / torch.tensor([f.inputs for f in factors])).mean()
    found = model.penalties()["reconstruction"]
    torch.testing.assert_close(found, expected, check_dtype=False)


class Calls(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_what_a_draw_costs_grows_with_the_widths_and_not_with_the_layers() -> None:
    """Noise is drawn once; each width has one product to encode and one to decode."""

    def drawn(widths: list[int]) -> Counter[str]:
        many = [LatentFactors(2, inputs, 3) for inputs in widths]
        with Calls() as calls:
            draw_all(many)
        return calls.by_name

    few, many = drawn([5, 6] * 2), drawn([5, 6] * 9)
    assert few == many
    assert (few["randn"], few["bmm"], few["baddbmm"]) == (1, 2, 2)


def test_four_draws_of_one_example_vary_a_quarter_as_much() -> None:
    """Both kinds of noise estimate the same expectation; by example, rows of a member are independent."""
    x, y = torch.ones(8, 3, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    found = {}
    for noise in ("pass", "example"):
        model = built(noise=noise, log_variance=0.0)
        torch.manual_seed(1)
        with torch.no_grad():
            found[noise] = torch.stack([model.loss(x, y)["nll"] for _ in range(600)])
    error = (found["pass"].var() / 600 + found["example"].var() / 600).sqrt()
    assert (found["pass"].mean() - found["example"].mean()).abs() < 4 * error
    assert 0.18 < found["example"].var() / found["pass"].var() < 0.34


@pytest.mark.parametrize("mode", ["split", "repeat"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_noise_by_example_takes_any_batch(mode: str, batch: int) -> None:
    model = built(noise="example", batch_mode=mode)
    terms = model.loss(X[:batch].double(), Y[:batch])
    terms["loss"].backward()
    assert terms["loss"].isfinite()


def test_the_kl_is_annealed() -> None:
    model = built(anneal=0.5)
    full = model.penalties()["kl"]
    shares = []
    for epoch in range(4):
        model.before_epoch(epoch, 4)
        shares.append((model.penalties()["kl"] / full).item())
    assert shares == pytest.approx([0.5, 1, 1, 1])


def test_free_bits_cost_nothing_and_give_no_gradient() -> None:
    model = built(free_bits=1e3, latent=4)
    kl = model.penalties()["kl"]
    assert kl.item() == pytest.approx(4e3 / 100)
    kl.backward()
    assert all(layer.factors.encoder.weight.grad.abs().sum() == 0 for layer in model.layers)
    torch.testing.assert_close(
        built(free_bits=1e-9).penalties()["kl"], built().penalties()["kl"], rtol=0, atol=0
    )


def test_a_decoder_as_drawn_leaves_the_noise_to_sigma() -> None:
    model = built(train_decoder=False)
    groups = model.parameter_groups(weight_decay=0.1, lr=0.5)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        optimizer.zero_grad()
        model.loss(X.double(), Y)["loss"].backward()
        optimizer.step()
    after = model.state_dict()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {f"net.{i}.factors.{name}" for i in (0, 2) for name in ("r", "decoder.weight")}
    assert not any(
        p.requires_grad for name, p in model.named_parameters() if "decoder.weight" in name
    )
    learning = built()
    learning.load_state_dict(after)  # the same tensors, by the same names
    for layer, other in zip(model.layers, learning.layers, strict=True):
        torch.testing.assert_close(layer.factors.mean(), other.factors.mean())


def test_the_error_of_the_mean_is_what_is_left_without_noise_and_moves_no_variance() -> None:
    """``reconstruct="mean"``: the noise is no part of the error, so only likelihood and KL size it."""
    model = built(reconstruct="mean")
    factors = [layer.factors for layer in model.layers]
    with torch.no_grad():
        for one in factors:
            one.decoder.bias += 0.3 * torch.randn_like(one.decoder.bias)  # so that it misses r
    error = torch.stack([(f.mean()[0] - f.r).square().mean() for f in factors]).mean()
    found = model.penalties()["reconstruction"]
    torch.testing.assert_close(found, error)
    found.backward()
    for one in factors:
        for parameter in (one.encoder.weight, one.encoder.bias):
            to_mean, to_variance = parameter.grad.chunk(2)
            assert to_mean.abs().sum() > 0
            assert to_variance.abs().sum() == 0
    noise = [f.covariance_factor().square().sum((1, 2)).mean() / f.inputs for f in factors]
    with_noise = [layer.factors for layer in built(reconstruct="draws").layers]
    for one, other in zip(factors, with_noise, strict=True):
        other.load_state_dict(one.state_dict())
    squared = LatentFactors.terms(with_noise)[1] / torch.tensor([f.inputs for f in factors])
    torch.testing.assert_close(error + torch.stack(noise).mean(), squared.mean())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(-2.0, [-2.0, -2.0, -2.0 + math.log(4)]), (-0.5, [-0.5, -0.5, 0.0]), (0.5, [0.5] * 3)],
)
def test_wide_layers_start_with_more_noise_where_asked_to(
    asked: float, expected: list[float]
) -> None:
    """sigma^2 max(1, m / 128), at most 1 unless more was asked for."""
    net = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 512), nn.Linear(512, 2))
    model = lpbnn.build(
        net, "lpbnn", members=2, num_data=100, latent=4, log_variance=asked, by_width=True
    )
    found = [layer.factors.encoder.bias[4:].mean().item() for layer in model.layers]
    assert found == pytest.approx(expected)


def test_the_last_epochs_repeat_the_batch() -> None:
    model, seen = built(repeat_last=0.25), []
    model.net[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    for epoch in range(4):
        model.before_epoch(epoch, 4)
        model.loss(X.double(), Y)
    assert seen == [8, 8, 8, 16]
    assert model.batch_mode == "split"  # what was asked for stays


def test_a_batch_mode_set_later_counts_and_a_small_share_is_an_epoch() -> None:
    model = built(repeat_last=0.1)
    model.before_epoch(2, 3)
    assert model._late
    model.before_epoch(1, 3)
    model.batch_mode, seen = "repeat", []
    model.net[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model.loss(X.double(), Y)
    assert seen == [16]


def test_an_epoch_may_begin_before_the_gradients_are_taken() -> None:
    model = built(anneal=0.5)
    loss = model.loss(X.double(), Y)["loss"]
    model.before_epoch(0, 4)
    loss.backward()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("noise", "row"),
        ("reconstruct", "noise"),
        ("by_width", "off"),  # a word that would count as true
        ("train_r", 1),
        ("train_decoder", None),
        ("log_variance", float("nan")),
        ("log_variance", float("-inf")),
        ("log_variance", "inf"),
        ("log_variance", True),
        ("anneal", 1.5),
        ("kl_weight", -0.1),
        ("kl_weight", float("nan")),
        ("kl_weight", "1/150"),  # --set kl_weight=1/150
        ("kl_weight", True),
        ("pace", 0.0),
        ("pace", float("inf")),
        ("free_bits", -1.0),
        ("free_bits", float("nan")),
        ("repeat_last", -0.1),
    ],
)
def test_bad_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        built(**{option: value})


def test_the_weight_of_the_kl_of_much_data_is_not_lost_in_half_precision() -> None:
    model = lpbnn.build(nn.Sequential(nn.Linear(3, 2)), "lpbnn", num_data=10**8)
    expected = model.penalties()["kl"]
    torch.testing.assert_close(model.half().penalties()["kl"], expected, rtol=1e-2, atol=0)


def test_nor_is_it_where_half_precision_is_the_default() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        model = lpbnn.build(nn.Sequential(nn.Linear(3, 2)), "lpbnn", num_data=10**8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.penalty_weights[0].item() == pytest.approx(1e-8, rel=1e-6)


def test_a_number_of_numpy_is_a_number() -> None:
    model = built(log_variance=np.float32(-1))
    assert model.layers[0].factors.encoder.bias[32:].mean().item() == -1


@pytest.mark.parametrize("noise", ["pass", "example"])
def test_a_compiled_loss_has_the_uncompiled_ones_value_and_gradients(noise: str) -> None:
    """More layers of one width than a compiler stacks at once, and copies of r for every row."""
    layers = [nn.Linear(6, 6) for _ in range(10)]
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(2), Mean(), *layers)
    model = lpbnn.build(net, "lpbnn", members=3, num_data=50, latent=4, noise=noise).double()
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


@pytest.mark.parametrize("noise", ["pass", "example"])
def test_a_stage_that_spreads_late_is_compiled_for_a_repeated_batch(noise: str) -> None:
    """Its layers get the batch as it is, and an r for every row of the members."""

    class Views(nn.Module):
        expand_late = True  # as DeepLab's ASPP

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(4, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.other(x)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Views(), nn.ReLU(), nn.Conv2d(5, 6, 1))
    options = {"noise": noise, "batch_mode": "repeat", "exclude": "0", "latent": 4}
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
