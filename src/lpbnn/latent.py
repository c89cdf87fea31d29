"""The latent posterior: fast weights drawn through a small variational autoencoder per layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpbnn.factors import (
    Factors,
    Init,
    device_of,
    full_precision,
    gaussian,
    group_by,
    initial,
    kl_to_standard_normal,
    repeat,
    stack,
)
from lpbnn.losses import at_least_float32


class LatentFactors(Factors):
    r"""LP-BNN: r_j goes through a small variational autoencoder that all members of a layer share.

    .. math::
        (\mu_j, \log\sigma_j^2) = E \frac{r_j - 1}{\sqrt m} + e, \quad z_j = \mu_j + \sigma_j \epsilon,
        \quad \hat r_j = D \frac{z_j}{\sqrt k} + d, \quad W_j = W \odot (\hat r_j s_j^T)

    **Every** pass uses the sampled r^, in training and in prediction; s_j is deterministic. Because
    the decoder is linear, r^_j is Gaussian, with covariance factor D diag(sigma_j) / sqrt(k).

    Encoder and decoder are one linear map each, m inputs to k = ``latent`` numbers and back. Dividing by
    the root of the fan-in (and taking r - 1) changes no function they can be, only how they train: without
    it the penalties alone diverge at the paper's learning rates, the sooner the wider the layer. The
    autoencoder starts as one: d = 1, and D, random otherwise, maps mu_j to r_j (for J <= k), so that the
    network starts from the members it was given.

    r_j is kept as drawn unless ``train_r``: were it to learn, the reconstruction could be made small by
    moving r to r^, and the members drift together.

    Franchi et al.: Encoding the latent posterior of Bayesian neural networks for uncertainty
    quantification, 2020.

    Example:
        >>> factors = LatentFactors(members=4, inputs=64, outputs=2)
        >>> mean, _ = factors.mean()
        >>> torch.allclose(mean, factors.r, atol=1e-4)
        True
    """

    r: Tensor
    s: Tensor

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        latent: int = 32,
        spread: float = 0.5,
        init: Init = "normal",
        train_r: bool = False,
        log_variance: float = -4.0,
    ) -> None:
        super().__init__(members, inputs, outputs)
        self.latent = latent
        r = initial(members, inputs, spread, init)
        if train_r:
            self.r = nn.Parameter(r)
        else:
            self.register_buffer("r", r)
        self.s = nn.Parameter(initial(members, outputs, spread, init))
        self.encoder = nn.Linear(inputs, 2 * latent)  # rows: the mean, then the log variance
        self.decoder = nn.Linear(latent, inputs)
        with torch.no_grad():
            apart = float((r - 1).square().mean().sqrt().clamp_min(0.01))
            self.encoder.weight[:latent].normal_(std=1 / apart)  # mu ~ N(0, 1), however close the r
            self.encoder.weight[latent:].normal_(std=0.1)
            self.encoder.bias[:latent] = 0.0
            self.encoder.bias[latent:] = log_variance
            self.decoder.weight.normal_(std=0.5)
            self.decoder.bias.fill_(1.0)
            mu = self.encoder((r - 1) / inputs**0.5)[:, :latent]
            code = mu / latent**0.5
            missing = r - self.decoder(code)  # corrected in the span of the mu_j, random elsewhere
            self.decoder.weight += (torch.linalg.pinv(code, rtol=1e-4) @ missing).T

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, latent={self.latent}"

    def stack_key(self) -> tuple[object, ...]:
        return (*super().stack_key(), self.latent)

    @staticmethod
    def encode(many: Sequence["LatentFactors"]) -> tuple[Tensor, Tensor]:
        """Mean and log variance of z, (L, J, latent) each."""
        weight, bias = stack(many, "encoder.weight"), stack(many, "encoder.bias")
        scaled = (stack(many, "r") - 1) / many[0].inputs ** 0.5
        code = torch.baddbmm(bias.unsqueeze(1), scaled, weight.mT)
        mu, log_variance = code.chunk(2, dim=-1)
        return mu, log_variance

    @staticmethod
    def decode(many: Sequence["LatentFactors"], z: Tensor) -> Tensor:
        """z (L, rows, latent) to r^ (L, rows, m)."""
        weight, bias = stack(many, "decoder.weight"), stack(many, "decoder.bias")
        return torch.baddbmm(bias.unsqueeze(1), z / many[0].latent ** 0.5, weight.mT)

    @classmethod
    def draw_stack(
        cls, many: Sequence[Factors], samples: int, rows: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        layers: Sequence[LatentFactors] = many  # type: ignore[assignment]
        with full_precision(device_of(many[0])):
            mu, log_variance = cls.encode(layers)
            sigma = (0.5 * log_variance).exp()
            if rows is not None:
                each = rows // mu.shape[1]
                mu, sigma = (part.repeat_interleave(each, dim=1) for part in (mu, sigma))
            z = gaussian(mu, sigma, samples)
            r_hat = cls.decode(layers, z.flatten(1, 2))
        return [(r, repeat(f.s, samples)) for r, f in zip(r_hat, layers, strict=True)]

    def mean(self) -> tuple[Tensor, Tensor]:
        with full_precision(self.s.device):
            return self.decode([self], self.encode([self])[0])[0], self.s

    def covariance_factor(self) -> Tensor:
        """A (J, m, latent) with Cov(r^_j) = A_j A_j^T, A_j = D diag(sigma_j) / sqrt(latent)."""
        with full_precision(self.s.device):
            sigma = (0.5 * self.encode([self])[1][0]).exp()
            return at_least_float32(self.decoder.weight) * (sigma / self.latent**0.5).unsqueeze(1)

    @classmethod
    def terms(cls, many: Sequence["LatentFactors"]) -> tuple[Tensor, Tensor]:
        r"""KL(q(z|r) || N(0, I)) and E ||r - r^||^2 of every layer, (L,) each, averaged over members.

        The expectation is taken in closed form: the decoder is linear, so
        :math:`E\|r - \hat r\|^2 = \|r - E \hat r\|^2 + \frac1k \sum_i \sigma_i^2 \|D_i\|^2` (columns of D).
        """
        kl, error = {}, {}
        for indices in group_by(many, lambda factors: factors.stack_key()):
            layers = [many[i] for i in indices]
            with full_precision(device_of(many[0])):
                mu, log_variance = cls.encode(layers)
                bias_term = stack(layers, "r") - cls.decode(layers, mu)
                columns = (
                    stack(layers, "decoder.weight").square().sum(1) / layers[0].latent
                )  # (L, k)
                noise_term = (log_variance.exp() * columns.unsqueeze(1)).sum(-1)
                squared = (bias_term.square().sum(-1) + noise_term).mean(-1)
                divergence = kl_to_standard_normal(mu, log_variance).sum(-1).mean(-1)
            kl.update(zip(indices, divergence, strict=True))
            error.update(zip(indices, squared, strict=True))
        order = range(len(many))
        return torch.stack([kl[i] for i in order]), torch.stack([error[i] for i in order])
