r"""LP-BNN: the posterior of the factors r, encoded in a small latent space per layer.

Every layer has one weight W, and every member j its own factors r_j and s_j, which scale the layer's inputs
and outputs. A small autoencoder per layer, shared by the members, maps r_j to a Gaussian over a few latent
numbers z; a draw of z, decoded, is the factor that the layer uses. So the posterior costs a few small
matrices per layer, and the entries of r are correlated.

$$
z_j \sim N(\mu(r_j), \sigma^2(r_j)), \quad \hat r_j = D z_j + d, \quad
W_j = W \odot (s_j \hat r_j^T)
$$

$$
\mathcal{L} = \overline{NLL} + \frac{1}{L} \sum_{\text{L layers}} \left( a \, KL(q(z|r) \| N(0, I))
+ b \, \|r - \hat r\|^2 \right)
$$

The encoder gives $\mu$ and $\log \sigma^2$; D and d are the decoder. KL and squared error are averaged over
members, as the NLL is. The weightings (N training examples, m inputs of the layer):

| weighting | a | b | meaning |
| --- | --- | --- | --- |
| ``balanced`` | 1 / N | 1 / m | the KL of the bound; a mean squared error that keeps r^ at the drawn r |
| ``equation`` | 1 / N | 1 / N | the paper's equation to the letter, divided by N |
| ``authors`` | 1 | 1 / m | the released code; unstable at large learning rates |

The noise that r^ ends with is about what ``log_variance`` gave every layer: at 1 / N the KL is too weak,
and a training too short, for sigma to be learned. ``kl_weight`` sets another a: NLL and KL balance where
$\sigma_i^2 = a / (a + L h_i)$, h_i the curvature of a member's NLL along z_i.

There are two variants:

| | ``variant="default"`` | ``variant="paper"`` |
| --- | --- | --- |
| learned | encoder, d, s, W | r, encoder, D, d, s, W |
| reconstruction | of the posterior mean of r^ | of the sampled r^ (its exact expectation over z) |
| weighting | "balanced" | "equation" |
| ``init_std`` | 0.1 | 0.5 |

In this file: ``LatentFactors`` has the parameters of one layer. ``LatentPosterior`` encodes r, samples r^ and
computes both penalties for all layers, and ``LPBNN.penalties`` weighs them. ``posterior`` returns what a model
has learned. The NLL is added in ``RankOneEnsemble.loss``, and W_j is applied in ``RankOneLayer.forward``.

Differences from the paper:
    ``variant="paper"`` is the paper to the letter. The default was found by measurement (lab notes).
    Reconstructing the sampled r^ counts noise as error and shrinks it in every step, whatever the data say; a
    learned D makes the noise small whatever sigma is, which the KL does not see; a learned r lets the members
    drift together. In all three cases the network becomes overconfident.

Franchi, Bursuc, Aldea, Dubuisson, Bloch: Encoding the latent posterior of Bayesian neural networks for
uncertainty quantification, IEEE TPAMI 46(4), 2024.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from lpbnn.kernels.rows import copy_to_rows, stack_tensors
from lpbnn.members.rows import expand_batch
from lpbnn.model import Terms, UncertainModel
from lpbnn.options import Count, DataCount, NonNegative, require_num_data
from lpbnn.precision import full_precision
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble, convert_layers
from lpbnn.rank_one.factors import (
    FactorPosterior,
    Factors,
    Init,
    LayerFactors,
    group_layers,
    initial,
)
from lpbnn.rank_one.layer import RankOneLayer

Variant = Literal["default", "paper"]
Weighting = Literal["balanced", "equation", "authors"]
# Layers of equal width (on one device, of one precision) are computed together, the narrowest first.
WIDTH = ("inputs", "s.device", "s.dtype")
AUTOENCODER = ("r", "encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
LARGEST = 2.0  # of D in any direction of the codes; elsewhere it has a standard deviation of 0.5


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of lpbnn."""

    init_std: NonNegative | None = None  # type: ignore[assignment]  # std of r and s; None: 0.1, paper 0.5
    num_data: DataCount | None = None  # N, the number of training examples; required
    # "paper": other learned parts, reconstruction and weighting (see the page of LP-BNN)
    variant: Variant = "default"
    weighting: Weighting | None = None  # weights of KL and squared error; None: the variant's
    latent: Count = 32  # k, the size of z
    log_variance: float = -2.0  # initial log variance of z: the size of the noise
    kl_weight: NonNegative | None = None  # a, the weight of the KL; None: as weighting says

    def __post_init__(self) -> None:
        super().__post_init__()
        paper = self.variant == "paper"
        if self.init_std is None:
            object.__setattr__(self, "init_std", 0.5 if paper else 0.1)
        if self.weighting is None:
            object.__setattr__(self, "weighting", "equation" if paper else "balanced")


class LatentPosterior(FactorPosterior):
    """q(z|r) of all layers, the encoders' output; ``sample`` draws z and decodes it to r^.

    Layers of equal width share their products; the codes of all are one tensor (L, J, k), with the layers
    in the order of ``groups``. Sampling and penalties of one loss use the same object, so that every
    encoder runs once. Layers may differ in device and precision, not in the latent size k: their codes are
    on the device of the first of them, in the highest precision.

    Args:
        layers: the ``LatentFactors`` of every layer.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.groups = group_layers(layers, *WIDTH)
        self.latent, device = layers[0].latent, layers[0].s.device
        self.r, self.decoders, self.decoder_biases = [], [], []
        codes, biases, read = [], [], attrgetter(*AUTOENCODER)
        with full_precision(device):
            for group in self.groups:
                tensors = zip(*map(read, group.values()), strict=True)
                r, encoder, bias, decoder, decoder_bias = map(stack_tensors, tensors)
                # The weight is the left factor: its gradient comes as the parameters lie, not transposed.
                codes.append(torch.bmm(encoder, ((r - 1) / r.shape[-1] ** 0.5).mT).to(device))
                biases.append(bias.to(device))
                self.r.append(r)
                self.decoders.append(decoder)
                self.decoder_biases.append(decoder_bias.unsqueeze(2))
            code = (torch.cat(codes) + torch.cat(biases).unsqueeze(2)).mT
            self.mu, self.log_variance = code.chunk(2, dim=-1)
            self.sigma = (0.5 * self.log_variance).exp()
        self.center: list[Tensor] | None = None  # r^ of the means, if they were decoded

    def decode(self, z: Tensor) -> list[Tensor]:
        """Return r^ = D z + d for z (L, rows, k): for every width, (layers of it, rows, m)."""
        with full_precision(z.device):
            codes = (z / self.latent**0.5).mT.split(list(map(len, self.groups)))
            parts = zip(self.decoder_biases, self.decoders, codes, strict=True)
            return [torch.baddbmm(bias, D, code.to(D)).mT for bias, D, code in parts]

    def sample(
        self,
        samples: int = 1,
        noise_scale: Tensor | None = None,
        rows_per_member: int | None = None,
    ) -> list[LayerFactors]:
        """Sample r^ and s of every layer; see ``FactorPosterior.sample``.

        A loss, which gives the rows, needs the mean of r^ for its penalties: it is decoded with the samples.
        """
        mu, sigma = self.mu, self.sigma
        if noise_scale is not None:
            sigma = sigma * noise_scale.to(sigma)
        layers, members, k = mu.shape
        epsilon = torch.randn(layers, samples, members, k, device=mu.device, dtype=mu.dtype)
        z = torch.addcmul(mu.unsqueeze(1), sigma.unsqueeze(1), epsilon).flatten(1, 2)
        if rows_per_member is None:
            return self._by_layer(self.decode(z), samples)
        r_hats, self.center = [], []
        for both in self.decode(torch.cat([z, mu], 1)):
            r_hat, center = both.split([z.shape[1], mu.shape[1]], 1)
            r_hats.append(copy_to_rows(r_hat, rows_per_member))
            self.center.append(center)
        return self._by_layer(r_hats, samples)

    def mean(self) -> list[LayerFactors]:
        return self._by_layer(self.decode(self.mu), 1)

    def _by_layer(self, r_hats: list[Tensor], samples: int) -> list[LayerFactors]:
        """Return (r^, s) of every layer, in the order the layers were given in."""
        pairs: list[Any] = [None] * len(self.layers)
        for group, same in zip(self.groups, r_hats, strict=True):
            for (i, layer), r in zip(group.items(), same, strict=True):
                pairs[i] = LayerFactors(r, expand_batch(layer.s, samples))
        return pairs

    def covariance_factors(self) -> list[Tensor]:
        """Return A (J, m, k) of every layer, with Cov(r^_j) = A_j A_j^T."""
        scales = iter(self.sigma / self.latent**0.5)  # (J, latent) of every layer
        factors: list[Any] = [None] * len(self.layers)
        for group, same in zip(self.groups, self.decoders, strict=True):
            for i, D in zip(group, same, strict=True):
                factors[i] = D * next(scales).unsqueeze(1).to(D)
        return factors

    def kl(self) -> Tensor:
        """Return KL(q(z|r) || N(0, I)) of every layer, (L,), by width, mean over members."""
        with full_precision(self.mu.device):
            kl = 0.5 * (self.mu.square() + self.log_variance.exp() - 1 - self.log_variance)
            return kl.sum(-1).mean(-1)

    def squared_error(self, of_samples: bool) -> Tensor:
        r"""Return the squared error of r^ of every layer, (L,), by width, mean over members.

        Args:
            of_samples: the expectation over z, $E\|r - \hat r\|^2 = \|r - E \hat r\|^2
                + \frac1k \sum_i \sigma_i^2 \|D_i\|^2$ (columns of D; exact, the decoder is linear).
                False: of the mean alone, the first of the two terms.
        """
        device = self.mu.device
        with full_precision(device):
            centers = self.decode(self.mu) if self.center is None else self.center
            errors = [
                F.mse_loss(center, r, reduction="none").sum((1, 2)).to(device)
                for center, r in zip(centers, self.r, strict=True)
            ]
            squared = torch.cat(errors)
            if of_samples:
                columns = torch.cat([D.square().sum(1).to(device) for D in self.decoders])  # (L, k)
                noise = (self.sigma.square() * columns.unsqueeze(1)).sum((1, 2))
                squared = squared + noise / self.latent
            return squared / self.mu.shape[1]


class LatentFactors(Factors):
    r"""LP-BNN: r_j goes through a small variational autoencoder that all members of a layer share.

    $$
    (\mu_j, \log\sigma_j^2) = E \frac{r_j - 1}{\sqrt m} + e, \quad z_j = \mu_j + \sigma_j \epsilon,
    \quad \hat r_j = D \frac{z_j}{\sqrt k} + d, \quad W_j = W \odot (s_j \hat r_j^T)
    $$

    **Every** pass uses the sampled r^, in training and in prediction; s_j is deterministic. Because
    the decoder is linear, r^_j is Gaussian, with covariance factor D diag(sigma_j) / sqrt(k).

    Encoder and decoder are one linear map each, m inputs to k = ``latent`` numbers and back. Dividing by
    the root of the fan-in (and taking r - 1) changes no function they can be, only how they train: without
    it the penalties alone diverge at the paper's learning rates, the sooner the wider the layer. The
    autoencoder starts as one: d = 1, and D, random otherwise, maps mu_j to r_j, so that the network
    starts from the members it was given (with k members or more: near them).

    Args:
        members: J.
        inputs: m.
        outputs: p.
        latent: k.
        init_std: standard deviation of the initial r and s around 1.
        init: "normal", or "signs" for random +-1.
        train_r: learn r. A learned r can make the reconstruction small by moving to r^, and the members
            drift together.
        train_decoder: learn D. A learned D can make the noise small whatever sigma is, which the KL
            divergence does not see. (d is learned in any case.)
        log_variance: of z, before training.

    Example:
        >>> factors = LatentFactors(members=4, inputs=64, outputs=2)
        >>> [(mean, _)] = LatentPosterior([factors]).mean()
        >>> torch.allclose(mean, factors.r, atol=1e-4)
        True
    """

    posterior = LatentPosterior
    r: Tensor
    s: Tensor

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        latent: int = 32,
        init_std: float = 0.1,
        init: Init = "normal",
        train_r: bool = False,
        train_decoder: bool = False,
        log_variance: float = -2.0,
    ) -> None:
        super().__init__(members, inputs, outputs)
        self.latent = latent
        r = initial(members, inputs, init_std, init)
        if train_r:
            self.r = nn.Parameter(r)
        else:
            self.register_buffer("r", r)
        self.s = nn.Parameter(initial(members, outputs, init_std, init))
        # rows: the mean, then the log variance
        self.encoder = nn.Linear(inputs, 2 * latent, dtype=r.dtype)
        self.decoder = nn.Linear(latent, inputs, dtype=r.dtype)
        with torch.no_grad():
            scale = float((r - 1).square().mean().sqrt().clamp_min(0.01))
            self.encoder.weight[:latent].normal_(std=1 / scale)  # mu ~ N(0, 1) whatever init_std is
            self.encoder.weight[latent:].normal_(std=0.1)
            self.encoder.bias[:latent] = 0.0
            self.encoder.bias[latent:] = log_variance
            self.decoder.weight.normal_(std=0.5)
            self.decoder.bias.fill_(1.0)
            mu = self.encoder((r - 1) / inputs**0.5)[:, :latent]
            fitted = fit_decoder(self.decoder.weight, mu / latent**0.5, r - 1)
            self.decoder.weight.copy_(fitted)
        self.decoder.weight.requires_grad_(train_decoder)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, latent={self.latent}"


def fit_decoder(drawn: Tensor, codes: Tensor, wanted: Tensor) -> Tensor:
    """Return D (m, k) that maps codes (J, k) to wanted (J, m), and equals ``drawn`` off their span.

    With as many members as latent numbers, some codes lie nearly in a plane: to tell them apart would take
    a D, and with it noise, without bound. There it goes as far as ``LARGEST``.
    """
    u, s, v = torch.linalg.svd(codes, full_matrices=False)
    used = s > 1e-4 * s[0]
    u, s, v = u[:, used], s[used], v[used]
    columns = wanted.T @ u / s
    size = columns.square().mean(0).sqrt()
    return drawn - drawn @ v.T @ v + columns * (LARGEST / size).clamp_max(1) @ v


class LPBNN(RankOneEnsemble):
    """J members whose r^ is sampled from the latent posterior in every pass.

    Args:
        net: the converted network.
        config: the options.
        **model_options: ``likelihood`` and ``readout``.

    Example:
        >>> model = build(nn.Sequential(nn.Linear(4, 3)), Config(members=2, num_data=100))
        >>> list(model.loss(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])))
        ['loss', 'nll', 'kl', 'reconstruction']
    """

    config: Config
    inverse_inputs: Tensor  # 1 / m of every layer, in the order of the posterior: by width

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, config, **model_options)
        self.num_data = require_num_data(config, "lpbnn")

    def refresh(self) -> None:
        super().refresh()
        inverse = sorted((1 / layer.factors.inputs for layer in self.layers), reverse=True)
        weight: Any = self.layers[0].layer.weight
        # A tensor that is made once: a GPU would wait for it in every step.
        made = torch.tensor(inverse, device=weight.device, dtype=torch.float32)
        self.register_buffer("inverse_inputs", made, persistent=False)

    def penalties(self, posterior: LatentPosterior) -> Terms:
        """Return the terms ``kl`` and ``reconstruction``, by the weights a and b of the table above."""
        weighting, a = self.config.weighting, self.config.kl_weight
        if a is None:
            a = 1.0 if weighting == "authors" else 1 / self.num_data
        b = 1 / self.num_data if weighting == "equation" else self.inverse_inputs
        squared_error = posterior.squared_error(of_samples=self.config.variant == "paper")
        return {
            "kl": (a * posterior.kl()).mean(),
            "reconstruction": (b * squared_error).mean(),
        }


def build(net: nn.Module, config: Config, **model_options: Any) -> LPBNN:
    """Give every chosen layer of ``net`` the latent factors of J members, in place."""
    paper = config.variant == "paper"
    factors = partial(
        LatentFactors,
        config.members,
        latent=config.latent,
        init_std=float(config.init_std or 0.0),
        train_r=paper,
        train_decoder=paper,
        log_variance=config.log_variance,
    )
    convert_layers(net, config, factors)
    return LPBNN(net, config, **model_options)


@dataclasses.dataclass(frozen=True)
class LayerPosterior:
    r"""r^_j ~ N(mean_j, A_j A_j^T), exact because the decoder is linear.

    Args:
        mean: (J, m).
        factor: A, (J, m, latent).
    """

    mean: Tensor
    factor: Tensor

    @property
    def covariance(self) -> Tensor:
        """A_j A_j^T, (J, m, m)."""
        return self.factor @ self.factor.mT

    @property
    def std(self) -> Tensor:
        """The standard deviation of every entry, (J, m)."""
        return self.factor.square().sum(-1).sqrt()

    @property
    def correlation(self) -> Tensor:
        """The correlation matrix, (J, m, m), with ones on the diagonal."""
        unit = self.factor / self.std.unsqueeze(-1).clamp_min(torch.finfo(self.factor.dtype).tiny)
        return unit @ unit.mT

    def distribution(self, jitter: float = 1e-6) -> LowRankMultivariateNormal:
        """Return a torch distribution in float64.

        Args:
            jitter: the small diagonal that the distribution needs.
        """
        mean, factor = self.mean.double(), self.factor.double()
        return LowRankMultivariateNormal(mean, factor, torch.full_like(mean, jitter))


def posterior(model: nn.Module) -> dict[str, LayerPosterior]:
    """Return the posterior of every layer with latent factors, by path.

    Args:
        model: what ``lpbnn.build(net, "lpbnn", ...)`` returned, or its network.

    Example:
        >>> import lpbnn
        >>> model = lpbnn.build(nn.Sequential(nn.Linear(6, 3)), "lpbnn", members=4, num_data=100)
        >>> layer = posterior(model)["0"]
        >>> tuple(layer.mean.shape), tuple(layer.correlation.shape)
        ((4, 6), (4, 6, 6))
    """
    net = model.net if isinstance(model, UncertainModel) else model
    factors = {
        path: module.factors
        for path, module in net.named_modules()
        if isinstance(module, RankOneLayer) and isinstance(module.factors, LatentFactors)
    }
    if not factors:
        raise ValueError(
            f"{type(model).__name__} has no layer with a latent posterior; posterior takes a model "
            "that lpbnn.build(net, 'lpbnn', ...) returned."
        )
    of_all = LatentPosterior(list(factors.values()))
    with torch.no_grad():
        parts = zip(factors, of_all.mean(), of_all.covariance_factors(), strict=True)
        return {path: LayerPosterior(mean, factor) for path, (mean, _), factor in parts}
