"""Every mistake of the public implementations (SPEC, section 1), tested one by one."""

import copy
import itertools

import pytest
import torch
from networks import NETWORKS, members_and_ordinary, settle
from torch import nn
from torch.distributions import Normal, kl_divergence

import lpbnn
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior

SIZES = list(itertools.product(range(1, 10), range(1, 6)))
METHODS = ("lpbnn", "batchensemble", "rank1")


def build(
    kind: str, method: str = "lpbnn", members: int = 4, **options: object
) -> lpbnn.UncertainModel:
    net = settle(NETWORKS[kind]())
    if method != "batchensemble":
        options = {"num_data": 100, **options}
    return lpbnn.build(net, method, members=members, **options)


def batch(kind: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, *NETWORKS[kind].shape), torch.randint(3, (size,))


# Trap 1: the sampled r^ overwritten, so that passes repeat and the VAE heads get no gradient.


@pytest.mark.parametrize("kind", NETWORKS)
def test_two_passes_differ_in_training_and_in_prediction(kind: str) -> None:
    model = build(kind).double()
    x = batch(kind, 3)[0].double()
    for mode in (True, False):
        model.train(mode)
        assert not torch.allclose(model(x), model(x))


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("mode", ["split", "repeat"])
def test_every_parameter_of_the_vae_learns_from_the_nll_alone(kind: str, mode: str) -> None:
    model = build(kind, batch_mode=mode, variant="paper").train()
    model.loss(*batch(kind, 8))["nll"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# Trap 2: rows laid out in one order and read in another.


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_each_member_is_an_ordinary_network(kind: str, method: str) -> None:
    for size, members in SIZES:
        model = build(kind, method, members).double()
        together, alone = members_and_ordinary(model, batch(kind, size)[0].double())
        assert together.shape == (members, size, 3)
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("kind", NETWORKS)
def test_splitting_trains_each_member_on_its_own_rows(kind: str) -> None:
    for size, members in SIZES:
        model = build(kind, "batchensemble", members).double().train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # statistics of a batch of one say nothing here
        x, y = batch(kind, size)
        _, alone = members_and_ordinary(model, x.double())
        per_example = torch.zeros(size, dtype=torch.float64)
        counts = torch.zeros(size, dtype=torch.float64)
        slice_size = -(-size // members)
        for row in range(slice_size * members):
            member, example = row // slice_size, row % size
            logits = alone[member, example]
            per_example[example] += nn.functional.cross_entropy(logits, y[example])
            counts[example] += 1
        expected = (per_example / counts).mean()
        torch.testing.assert_close(model.loss(x.double(), y)["nll"], expected)


@pytest.mark.parametrize("kind", NETWORKS)
def test_members_do_not_see_each_other_when_one_is_changed(kind: str) -> None:
    model = build(kind, "batchensemble").double()
    x = batch(kind, 4)[0].double()
    before = model(x)
    with torch.no_grad():
        for layer in model.layers:
            layer.factors.r[2] += 0.1
    changed = (model(x) - before).abs().amax((1, 2)) > 0
    assert changed.tolist() == [False, False, True, False]


# Trap 3: one standard deviation sampled, another in the KL.


def test_the_kl_is_that_of_what_is_sampled() -> None:
    factors = LatentFactors(3, 5, 2, latent=4, log_variance=-1.0).double()
    codes = LatentPosterior([factors])
    mu, log_variance = codes.mu, codes.log_variance
    q = Normal(mu[0], (0.5 * log_variance[0]).exp())
    expected = kl_divergence(q, Normal(torch.zeros_like(q.mean), 1.0)).sum(-1).mean()
    torch.testing.assert_close(LatentPosterior([factors]).kl()[0], expected)
    # and q is what is sampled: recover z from r^ by the decoder's pseudo-inverse
    [(r_hat, _)] = LatentPosterior([factors]).sample(20_000)
    z = (r_hat - factors.decoder.bias) @ torch.linalg.pinv(factors.decoder.weight).T * 4**0.5
    projector = torch.linalg.pinv(factors.decoder.weight) @ factors.decoder.weight
    z = z.view(20_000, 3, 4)
    torch.testing.assert_close(z.mean(0), q.mean @ projector.T, atol=0.03, rtol=0.03)
    expected_cov = projector @ torch.diag_embed(q.variance) @ projector.T
    torch.testing.assert_close(
        torch.stack([torch.cov(z[:, j].T) for j in range(3)]), expected_cov, atol=0.02, rtol=0.05
    )


def test_the_reconstruction_is_that_of_what_is_sampled() -> None:
    factors = LatentFactors(3, 5, 2, latent=4, log_variance=-1.0).double()
    with torch.no_grad():
        factors.r += 0.3 * torch.randn_like(factors.r)  # so that the mean misses r as well
    posterior = LatentPosterior([factors])
    sampled = posterior.sample(50_000)[0][0].view(50_000, 3, 5)
    expected = (sampled - factors.r).square().sum(-1).mean()
    found = posterior.squared_error(of_samples=True)[0]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("prior_std", [0.1, 0.5])
def test_rank1_kl_is_that_of_torch(prior_std: float) -> None:
    model = build("Mlp", "rank1", prior_std=prior_std).double()
    expected = torch.zeros((), dtype=torch.float64)
    for layer in model.layers:
        f = layer.factors
        for mean, rho in ((f.r_mean, f.r_rho), (f.s_mean, f.s_rho)):
            prior = Normal(torch.ones_like(mean), prior_std)
            q = Normal(mean, nn.functional.softplus(rho))
            expected = expected + kl_divergence(q, prior).sum() / f.members
    torch.testing.assert_close(model.penalties(model.posterior())["kl"], expected / 100)


def test_rank1_starts_with_the_std_it_is_given() -> None:
    for layer in build("Mlp", "rank1", std=0.3).layers:
        std = nn.functional.softplus(layer.factors.r_rho)
        torch.testing.assert_close(std, torch.full_like(std, 0.3))


def test_the_kl_of_rank1_grows_over_two_thirds_of_the_epochs() -> None:
    model, weights = build("Mlp", "rank1"), []
    for epoch in range(9):
        model.before_epoch(epoch, 9)
        weights.append(round(float(model.kl_weight), 4))
    assert weights[0] < weights[4] < 1
    assert weights[6:] == [1, 1, 1]
    assert weights == sorted(weights)


# Trap 4: odd batches, float64, deepcopy after a forward, the KL before one (torch.export with a
# dynamic batch: test_freeze.py).


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_odd_batches_float64_copies_and_early_penalties(kind: str, method: str) -> None:
    model = build(kind, method).double()
    model.penalties(model.posterior())
    model(batch(kind, 3)[0].double())
    clone = copy.deepcopy(model)
    x = batch(kind, 7)[0].double()
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    assert torch.equal(clone(x), expected)


# Trap 5 is tests/convert/test_convert.py. Trap 6: sums here, means there, divided by the batch.


@pytest.mark.parametrize("variant", ["paper", "default"])
@pytest.mark.parametrize("weighting", ["balanced", "equation", "authors"])
def test_the_terms_are_the_documented_sums(weighting: str, variant: str) -> None:
    model = build("Mlp", weighting=weighting, variant=variant, num_data=1000).double()
    posterior = LatentPosterior([layer.factors for layer in model.layers])
    kl, squared = posterior.kl(), posterior.squared_error(of_samples=variant == "paper")
    order = [i for group in posterior.groups for i in group]
    widths = torch.tensor([posterior.layers[i].inputs for i in order])
    a = {"balanced": 1 / 1000, "equation": 1 / 1000, "authors": 1.0}[weighting]
    b = torch.full((3,), 1e-3) if weighting == "equation" else 1 / widths.double()
    x, y = batch("Mlp", 6)
    terms = model.loss(x.double(), y)
    torch.testing.assert_close(terms["kl"], (a * kl).mean())
    torch.testing.assert_close(terms["reconstruction"], (b * squared).mean(), check_dtype=False)
    torch.testing.assert_close(terms["loss"], terms["nll"] + terms["kl"] + terms["reconstruction"])


def test_the_penalties_do_not_depend_on_batch_or_members_seen() -> None:
    model = build("Mlp")
    reference = model.loss(*batch("Mlp", 8))
    for size in (1, 3, 16):
        terms = model.loss(*batch("Mlp", size))
        for name in ("kl", "reconstruction"):
            assert torch.equal(terms[name], reference[name])


@pytest.mark.parametrize("variant", ["default", "paper"])
def test_variants_and_their_defaults(variant: str) -> None:
    """What is learned, how it is weighted, and how far apart the members start."""
    model = build("Mlp", variant=variant)
    paper = variant == "paper"
    assert model.config.weighting == ("equation" if paper else "balanced")
    assert model.config.init_std == (0.5 if paper else 0.1)
    learned = {
        name.partition("factors.")[2] for name, p in model.named_parameters() if p.requires_grad
    }
    assert ("r" in learned, "decoder.weight" in learned) == (paper, paper)
    assert {"s", "encoder.weight", "encoder.bias", "decoder.bias"} <= learned


def test_the_same_loss_for_copies_of_one_member() -> None:
    """J equal members are one network: nothing in the loss may count them J times."""
    losses = []
    for members in (1, 4):
        torch.manual_seed(0)
        model = build("Mlp", members=members, batch_mode="repeat", log_variance=-60.0).double()
        with torch.no_grad():
            for layer, single in zip(model.layers, first_model(losses, model), strict=True):
                copy_first(layer.factors, single.factors)
                layer.layer.load_state_dict(single.layer.state_dict())
                layer.member_bias.copy_(single.member_bias[:1].expand_as(layer.member_bias))
        torch.manual_seed(1)
        x, y = batch("Mlp", 6)
        losses.append((model, model.loss(x.double(), y)["loss"]))
    torch.testing.assert_close(losses[0][1], losses[1][1])


def first_model(losses: list, model: lpbnn.UncertainModel) -> list:
    return losses[0][0].layers if losses else model.layers


def copy_first(target: LatentFactors, source: LatentFactors) -> None:
    target.encoder.load_state_dict(source.encoder.state_dict())
    target.decoder.load_state_dict(source.decoder.state_dict())
    target.r.copy_(source.r[:1].expand_as(target.r))
    target.s.copy_(source.s[:1].expand_as(target.s))


# Trap 7: a forward that returns (output, kl).


def test_converted_layers_live_in_a_sequential() -> None:
    model = build("Mlp", members=1)
    assert isinstance(model.net, nn.Sequential)
    assert model.net(torch.randn(2, 5)).shape == (2, 3)


# The network starts from the members it was given.


def test_r_hat_starts_at_r() -> None:
    model = build("ResNet", log_variance=-4.0)
    means, sampled = model.posterior().mean(), model.sample().layers
    for layer, (mean, _), own in zip(model.layers, means, sampled, strict=True):
        torch.testing.assert_close(mean, layer.factors.r, atol=2e-3, rtol=0)
        noise = (own.r - layer.factors.r).std()
        assert noise < 0.2, (layer.path, noise)
