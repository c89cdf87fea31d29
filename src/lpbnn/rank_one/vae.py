"""The latent posterior of LP-BNN: r is sampled through a small variational autoencoder per layer."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.kernels.rows import copy_to_rows, stack_tensors
from lpbnn.members.rows import expand_batch
from lpbnn.rank_one.factors import (
    FactorPosterior,
    Factors,
    Init,
    LayerFactors,
    full_precision,
    group_layers,
    initial,
    kl_to_standard_normal,
    sample_gaussian,
)

# Layers of equal width (on one device, of one precision) are computed together, the narrowest first.
WIDTH = ("inputs", "s.device", "s.dtype")
LARGEST = 2.0  # of D in any direction of the codes; elsewhere it has a standard deviation of 0.5


class LatentPosterior(FactorPosterior):
    """The latent posterior of all layers, computed together.

    Layers of equal width share their products; the codes of all are one tensor (L, J, latent), with the
    layers in the order of ``groups``. Sampling and penalties of one loss use the same object, so
    that every encoder runs once. Layers may differ in device and precision, not in the latent size: their
    codes are on the device of the first of them, in the highest precision.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        self.groups = group_layers(layers, *WIDTH)
        self.latent, device = layers[0].latent, layers[0].s.device
        self.r, self.decoders, self.decoder_biases = [], [], []
        codes, biases = [], []
        with full_precision(device):
            for group in self.groups:
                tensors = zip(*[layers[i].tensors() for i in group], strict=True)
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
        """Decode z (L, rows, latent) to r^ of every width, (layers of it, rows, m)."""
        with full_precision(z.device):
            codes = (z / self.latent**0.5).mT.split(list(map(len, self.groups)))
            parts = zip(self.decoder_biases, self.decoders, codes, strict=True)
            return [torch.baddbmm(bias, D, code.to(D)).mT for bias, D, code in parts]

    def sample(
        self,
        samples: int = 1,
        noise_scale: Tensor | None = None,
        rows: int | None = None,
    ) -> list[LayerFactors]:
        """Sample r^ and s of every layer; see ``FactorPosterior.sample``.

        A loss, which gives ``rows``, needs the mean of r^ for its penalties: it is decoded with the samples.
        """
        z = sample_gaussian(self.mu, self.sigma, samples, noise_scale).flatten(1, 2)
        if rows is None:
            return self._pairs(self.decode(z), samples)
        r_hats, self.center = [], []
        for both in self.decode(torch.cat([z, self.mu], 1)):
            r_hat, center = both.split([z.shape[1], self.mu.shape[1]], 1)
            r_hats.append(copy_to_rows(r_hat, rows))
            self.center.append(center)
        return self._pairs(r_hats, samples)

    def mean(self) -> list[LayerFactors]:
        return self._pairs(self.decode(self.mu), 1)

    def _pairs(self, r_hats: list[Tensor], samples: int) -> list[LayerFactors]:
        """Return (r^, s) of every layer, in the order the layers were given in."""
        pairs: list[Any] = [None] * len(self.layers)
        for group, same in zip(self.groups, r_hats, strict=True):
            for i, r in zip(group, same, strict=True):
                pairs[i] = LayerFactors(r, expand_batch(self.layers[i].s, samples))
        return pairs

    def covariance_factors(self) -> list[Tensor]:
        """Return A (J, m, latent) of every layer, with Cov(r^_j) = A_j A_j^T."""
        scales = iter(self.sigma / self.latent**0.5)  # (J, latent) of every layer
        factors: list[Any] = [None] * len(self.layers)
        for group, same in zip(self.groups, self.decoders, strict=True):
            for i, D in zip(group, same, strict=True):
                factors[i] = D * next(scales).unsqueeze(1).to(D)
        return factors

    def kl(self) -> Tensor:
        """Return KL(q(z|r) || N(0, I)) of every layer, (L,), by width, mean over members."""
        with full_precision(self.mu.device):
            return kl_to_standard_normal(self.mu, self.log_variance).sum(-1).mean(-1)

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

    Franchi et al.: Encoding the latent posterior of Bayesian neural networks for uncertainty
    quantification, 2020.

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

    def tensors(self) -> tuple[Tensor, ...]:
        """Return r, and weight and bias of the encoder and of the decoder."""
        encoder, decoder = self.encoder, self.decoder
        return self.r, encoder.weight, encoder.bias, decoder.weight, decoder.bias

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
