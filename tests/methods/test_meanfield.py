"""Mean-field BNN: the KL, one network per draw, flipout's signs, and the posterior mean."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import ConvNet, Mlp, ResNet, UsersOwn, settle
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

import lpbnn
from lpbnn import likelihoods
from lpbnn.methods.meanfield import Draw, GaussianLayer, MeanFieldBNN, Noise

NETS = {"Mlp": Mlp, "ConvNet": ConvNet, "ResNet": ResNet}


def build(net: nn.Module, num_data: int = 100, **options: Any) -> MeanFieldBNN:
    model = lpbnn.build(net, "meanfield", num_data=num_data, **options)
    assert isinstance(model, MeanFieldBNN)
    return model


def ordinary(model: MeanFieldBNN, noises: list[Noise]) -> nn.Module:
    """Return the plain network with one draw of the weights."""
    net = lpbnn.undo(copy.deepcopy(model.net))
    for layer, noise in zip(model.layers, noises, strict=True):
        plain = net.get_submodule(layer.path)
        with torch.no_grad():
            plain.weight += noise.weight
            if noise.bias is not None:
                plain.bias += noise.bias
    return net


@pytest.mark.parametrize("prior_std", [1.0, 0.1, None])
def test_the_kl_equals_that_of_torch_distributions(prior_std: float | None) -> None:
    model = build(ConvNet(), num_data=50, prior_std=prior_std).double()
    expected = torch.zeros((), dtype=torch.float64)
    for layer in model.layers:
        nn.init.normal_(layer.weight_rho, std=2.0)
        fan_in = layer.layer.weight[0].numel()
        prior = Normal(0.0, math.sqrt(2 / fan_in) if prior_std is None else prior_std)
        for name in ("weight", "bias"):
            mean, rho = getattr(layer.layer, name), getattr(layer, f"{name}_rho")
            if mean is not None:
                q = Normal(mean, nn.functional.softplus(rho))
                expected += kl_divergence(q, prior).sum().double()
    terms = model.loss(torch.randn(2, 4, 9, 9).double(), torch.tensor([0, 1]))
    torch.testing.assert_close(terms["kl"], expected / 50)
    torch.testing.assert_close(terms["loss"], terms["nll"] + terms["kl"])


def test_draws_have_the_mean_and_standard_deviation_of_the_posterior() -> None:
    layer = GaussianLayer(nn.Linear(3, 2), std=0.5)
    nn.init.normal_(layer.bias_rho)
    draws = [layer.draw() for _ in range(4000)]
    for mean, rho, drawn in (
        (layer.layer.weight, layer.weight_rho, torch.stack([d.weight for d in draws])),
        (layer.layer.bias, layer.bias_rho, torch.stack([d.bias for d in draws])),
    ):
        std = nn.functional.softplus(rho)
        torch.testing.assert_close(drawn.mean(0), torch.zeros_like(mean), atol=0.06, rtol=0)
        torch.testing.assert_close(drawn.std(0), std, atol=0, rtol=0.06)


def test_the_posterior_starts_narrow_and_at_the_given_weights() -> None:
    net = ResNet()
    given = copy.deepcopy(net.state_dict())
    model = build(net)
    for layer in model.layers:
        for _, std in layer.gaussians():
            torch.testing.assert_close(std, torch.full_like(std, 1e-3))
    assert lpbnn.undo(model) is net
    torch.testing.assert_close(net.state_dict(), given, rtol=0, atol=0)


@pytest.mark.parametrize("name", NETS)
def test_a_pass_is_an_ordinary_network_with_the_drawn_weights(name: str) -> None:
    net = settle(NETS[name]())
    model = build(net, std=0.2).double().eval()
    x = torch.randn(3, *net.shape).double()
    torch.manual_seed(5)
    noises = [model.draw() for _ in range(model.members)]
    expected = torch.stack([ordinary(model, noise)(x) for noise in noises])
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(lpbnn.predict(model, x, seed=5).members, expected.softmax(2))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20, 100])
def test_predictions_do_not_depend_on_the_chunk(chunk: int) -> None:
    model = build(UsersOwn(), std=0.3, members=3).double()  # calls one layer twice
    x = (torch.randn(5, 5).double(), torch.randn(5, 3).double())
    whole = lpbnn.predict(model, x, samples=2, seed=3)
    assert whole.members.shape == (6, 5, 3)
    assert (whole.epistemic > 0).all()
    parts = lpbnn.predict(model, x, samples=2, seed=3, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)


LAYERS = [
    (nn.Linear(4, 6), (4,)),
    (nn.Linear(4, 6, bias=False), (3, 4)),
    (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 5)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_flipout_gives_every_example_its_own_weights(
    layer: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Example i computes with mean + noise * (t_i s_i^T) and bias mean + t_i * noise."""
    gaussian = GaussianLayer(copy.deepcopy(layer), std=0.5)
    x, noise, signs = torch.randn(5, *shape), gaussian.draw(), []
    made = GaussianLayer._signs

    def spy(self: GaussianLayer, x: Tensor) -> Tensor:
        signs.append(made(self, x))
        return signs[-1]

    monkeypatch.setattr(GaussianLayer, "_signs", spy)
    with gaussian.slot.use(Draw([noise._replace(flip=True)])):
        together = gaussian(x)
    inputs, outputs = signs
    assert inputs.unique().tolist() == outputs.unique().tolist() == [-1, 1]
    for i in range(5):
        s, t = inputs[i].flatten(), outputs[i].flatten()
        alone = copy.deepcopy(layer)
        with torch.no_grad():
            alone.weight += flipped(layer, noise.weight, s, t)
            if noise.bias is not None:
                alone.bias += noise.bias * t
        torch.testing.assert_close(together[i], alone(x[i : i + 1])[0], atol=1e-5, rtol=1e-5)


def flipped(layer: nn.Module, noise: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """noise * (t s^T), group by group."""
    groups = getattr(layer, "groups", 1)
    s, t = s.view(groups, -1), t.view(groups, -1)
    outer = t.unsqueeze(2) * s.unsqueeze(1)  # (groups, outputs, inputs)
    if isinstance(layer, nn.ConvTranspose1d):
        outer = outer.mT
    outer = outer.flatten(0, 1)
    return noise * outer.view(*outer.shape, *(1,) * (noise.dim() - 2))


def test_flipout_is_for_training_only_and_lowers_the_variance_of_the_gradient() -> None:
    x, y = torch.randn(1, 5).expand(64, -1), torch.randint(0, 3, (64,))

    def variance_of_gradients(flipout: bool) -> float:
        torch.manual_seed(0)
        model = build(Mlp(), std=0.3, flipout=flipout)
        weight = model.layers[1].layer.weight
        grads = [torch.autograd.grad(model.loss(x, y)["loss"], weight)[0] for _ in range(60)]
        return torch.stack(grads).var(0).sum().item()

    assert variance_of_gradients(True) < 0.5 * variance_of_gradients(False)
    model = build(Mlp(), std=0.3, flipout=True)
    members = lpbnn.predict(model, x).members
    torch.testing.assert_close(members, members[:, :1].expand_as(members))


def test_training_draws_once_and_evaluation_every_member() -> None:
    model, seen = build(Mlp(), check=False), []
    model.net[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x, y = torch.randn(5, 5), torch.randint(0, 3, (5,))
    model.train().loss(x, y)
    assert seen == [5]
    model.eval().loss(x, y)
    assert seen == [5] * 5


def test_the_kl_is_annealed_over_most_of_training() -> None:
    model, x, y = build(Mlp(), anneal=0.5), torch.randn(5, 5), torch.randint(0, 3, (5,))
    full = model.loss(x, y)["kl"].item()
    weights = []
    for epoch in range(8):
        model.before_epoch(epoch, 8)
        weights.append(model.loss(x, y)["kl"].item() / full)
    assert weights == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_only_parameters_without_a_prior_have_weight_decay() -> None:
    model = build(ResNet(), exclude="head")
    slow, posterior = model.parameter_groups(weight_decay=1e-4, lr=0.1)
    assert (slow["weight_decay"], posterior["weight_decay"]) == (1e-4, 0.0)
    assert any(p is model.net.head.weight for p in slow["params"])
    assert any(p is model.layers[0].weight_rho for p in posterior["params"])
    assert any(p is model.layers[0].layer.weight for p in posterior["params"])
    assert len(slow["params"]) + len(posterior["params"]) == len(list(model.parameters()))
    assert type(model.net.head) is nn.Linear


@pytest.mark.parametrize("flipout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_parameter_learns_in_every_precision(flipout: bool, dtype: torch.dtype) -> None:
    model = build(ConvNet(), flipout=flipout).to(dtype)
    terms = model.loss(torch.randn(3, 4, 9, 9, dtype=dtype), torch.tensor([0, 1, 2]))
    terms["nll"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        assert parameter.grad.dtype == dtype


def test_draws_are_made_in_float32_under_autocast() -> None:
    model = build(Mlp())
    with torch.autocast("cpu", torch.bfloat16):
        assert {noise.weight.dtype for noise in model.draw()} == {torch.float32}
        terms = model.loss(torch.randn(3, 5), torch.tensor([0, 1, 2]))
        assert terms["kl"].dtype == torch.float32
        assert lpbnn.predict(model, torch.randn(3, 5)).probs.dtype == torch.float32


class UnitVariance(nn.Module):
    """y ~ N(w x, 1), whose posterior is known in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.layer(x)
        return torch.cat([mean, torch.full_like(mean, math.log(math.e - 1))], 1)


def test_training_finds_the_exact_posterior_of_a_linear_model() -> None:
    """Any other weight of the KL would give another standard deviation."""
    x = torch.randn(40, 1)
    y = 0.7 * x + torch.randn_like(x)
    precision = 1 / 0.5**2 + x.square().sum()
    model = build(UnitVariance(), 40, task="regression", prior_std=0.5, std=0.05, flipout=True)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.05), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 600)
    for _ in range(600):
        optimizer.zero_grad()
        model.loss(x, y)["loss"].backward()
        optimizer.step()
        schedule.step()
    mean, std = next(model.layers[0].gaussians())
    assert mean.item() == pytest.approx(((x * y).sum() / precision).item(), abs=0.08)
    assert std.item() == pytest.approx(precision.rsqrt().item(), rel=0.2)  # twice the KL: 1.35
    p = lpbnn.predict(model, x, samples=500, seed=0)
    torch.testing.assert_close(p.aleatoric, torch.ones_like(x), atol=1e-4, rtol=0)
    torch.testing.assert_close(p.epistemic, (x * std).detach().square(), atol=1e-4, rtol=0.2)


def test_saves_copies_and_compiles(tmp_path: Path) -> None:
    model, x, y = build(ResNet()), torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))
    model.loss(x, y)["loss"].backward()
    expected = lpbnn.predict(model, x, seed=0).probs
    assert torch.equal(lpbnn.predict(copy.deepcopy(model), x, seed=0).probs, expected)
    save_model(model, tmp_path / "model.safetensors")
    other = build(ResNet())
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(lpbnn.predict(other, x, seed=0).probs, expected)
    for flipout in (False, True):
        model = build(Mlp(), flipout=flipout)
        compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
        compiled(torch.randn(3, 5), torch.tensor([0, 1, 2]))["loss"].backward()


class Tied(nn.Sequential):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
        self[2].weight = self[0].weight


def test_a_weight_shared_by_two_modules_is_refused() -> None:
    net = Tied()
    with pytest.raises(ValueError, match=r"'0' and '2' share one weight.*exclude='2'"):
        build(net)
    assert [type(m) for m in net.modules()] == [type(m) for m in Tied().modules()]  # as it was
    assert net[2].weight is net[0].weight
    model = build(net, exclude="2")
    assert [layer.path for layer in model.layers] == ["0", "4"]
    assert net[2].weight is net[0].layer.weight
    lpbnn.undo(model)
    net[2] = net[0]  # one module in both places
    assert [layer.path for layer in build(net).layers] == ["0", "4"]
    assert net[2] is net[0]


class Checkpointed(nn.Module):
    """Runs its layers again in the backward pass."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.tanh(self.middle(torch.tanh(self.first(x))))

        return self.last(checkpoint(block, x, use_reentrant=False) if self.enabled else block(x))


@pytest.mark.parametrize("flipout", [False, True])
def test_activation_checkpointing_recomputes_with_the_noise_of_its_own_pass(flipout: bool) -> None:
    """Also with two losses before one backward pass."""
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    found = []
    for enabled in (False, True):
        torch.manual_seed(3)
        model = build(Checkpointed(enabled), std=0.3, flipout=flipout)
        losses = [model.loss(x, y)["loss"], model.loss(x.flip(0), y)["loss"]]
        sum(losses).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_copy_has_its_own_slot_that_its_layers_share() -> None:
    model = build(Mlp(), std=0.5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.slot is not model.slot
        assert all(layer.slot is other.slot for layer in other.layers)
        noises, x = other.draw(), torch.randn(3, 5)
        run = other._member
        torch.testing.assert_close(run(noises, x), run(noises, x))


def test_threads_predict_with_noise_of_their_own() -> None:
    model, x = build(Mlp(), std=0.5).eval(), torch.randn(64, 5)
    draws = [model.draw() for _ in range(8)]
    expected = [model._member(noises, x) for noises in draws]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda noises: model._member(noises, x), draws))
            torch.testing.assert_close(found, expected)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        return {"kind": self.kind(x), "size": self.size(x)}


@pytest.mark.parametrize("training", [False, True])
def test_several_heads_share_one_draw(training: bool) -> None:
    heads = {"kind": likelihoods.Categorical(), "size": likelihoods.Gaussian()}
    model = build(TwoHeads(), std=0.3, likelihood=heads).train(training)
    x, y = torch.randn(6, 5), {"kind": torch.randint(3, (6,)), "size": torch.randn(6, 1)}
    terms = model.loss(x, y)
    assert list(terms) == ["loss", "nll", "nll/kind", "nll/size", "kl"]
    torch.testing.assert_close(terms["nll"], terms["nll/kind"] + terms["nll/size"])
    torch.testing.assert_close(terms["loss"], terms["nll"] + terms["kl"])
    terms["loss"].backward()
    assert all(p.grad.any() for p in model.parameters())
    prediction = lpbnn.predict(model, x)
    assert prediction["kind"].members.shape == (4, 6, 3)
    assert prediction["size"].mean.shape == (6, 1)


class Poisson:
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets, reduction="none")

    def summary(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        rate = outputs[:, 0].exp()
        return rate, rate


def test_a_likelihood_of_the_user() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    model, x = build(net, std=0.3, likelihood=Poisson()), torch.randn(6, 5)
    model.loss(x, torch.ones(6))["loss"].backward()
    prediction = lpbnn.predict(model, x)
    assert (prediction.epistemic > 0).all()


def test_example_weights_give_a_weighted_mean() -> None:
    model, x, y = build(Mlp(), std=1e-8), torch.randn(4, 5), torch.randint(3, (4,))
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(model.loss(x, y, weight)["nll"], model.loss(x[:2], y[:2])["nll"])


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="meanfield needs num_data"):
        lpbnn.build(Mlp(), "meanfield")
    with pytest.raises(ValueError, match=r"std=0: expected a number above 0"):
        build(Mlp(), std=0)
    with pytest.raises(ValueError, match=r"prior_std=-1: expected a number above 0"):
        build(Mlp(), prior_std=-1)
    with pytest.raises(ValueError, match=r"anneal=2: expected a share"):
        build(Mlp(), anneal=2)
    net = Mlp()
    nn.utils.parametrizations.weight_norm(net[2])
    with pytest.raises(ValueError, match="'2' computes its weight itself.*exclude='2'"):
        build(net)
    build(net, exclude="2")
    with pytest.raises(TypeError, match=r"the posterior would be bypassed.*exclude='0'"):
        nn.functional.linear(torch.randn(1, 5), net[0].weight)
    assert net[0].in_features == 5


def test_the_posterior_begins_at_the_given_deviation() -> None:
    for std in (1e-3, 0.1, 2.0):
        layer = GaussianLayer(nn.Linear(3, 2), std=std)
        for _, found in layer.gaussians():
            torch.testing.assert_close(found, torch.full_like(found, std), rtol=1e-4, atol=0)


def test_the_deviations_of_frozen_weights_are_frozen() -> None:
    for frozen in ("weight", "bias"):
        net = nn.Sequential(nn.Linear(4, 3))
        getattr(net[0], frozen).requires_grad_(False)
        model = lpbnn.build(net, "meanfield", num_data=10)
        learns = {name: p.requires_grad for name, p in model.named_parameters()}
        assert learns == {name: frozen not in name for name in learns}
