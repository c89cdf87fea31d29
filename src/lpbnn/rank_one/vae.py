"""The latent posterior: fast weights drawn through a small variational autoencoder per layer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.likelihoods import at_least_float32
from lpbnn.rank_one.factors import (
    Factors,
    Init,
    full_precision,
    gaussian,
    initial,
    kl_to_standard_normal,
    repeat,
    stack,
    stacked,
)

LARGEST = 2.0  # of D in any direction of the codes; elsewhere it has a standard deviation of 0.5


def _decoding(drawn: Tensor, codes: Tensor, wanted: Tensor) -> Tensor:
    """D (m, k) that maps codes (J, k) to what is wanted of them (J, m); outside their span as drawn.

    Of as many members as latent numbers, some codes lie nearly in a plane: to tell them apart would take
    a D, and with it noise, without bound. There it goes as far as ``LARGEST``.
    """
    u, s, v = torch.linalg.svd(codes, full_matrices=False)
    told = s > 1e-4 * s[0]
    u, s, v = u[:, told], s[told], v[told]
    columns = wanted.T @ u / s
    size = columns.square().mean(0).sqrt()
    return drawn - drawn @ v.T @ v + columns * (LARGEST / size).clamp_max(1) @ v


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
    autoencoder starts as one: d = 1, and D, random otherwise, maps mu_j to r_j, so that the network
    starts from the members it was given (of k members or more: from what is near them).

    r_j is kept as drawn unless ``train_r``: were it to learn, the reconstruction could be made small by
    moving r to r^, and the members drift together. Without ``train_decoder`` D is kept as drawn too (d
    learns): then only sigma says how much r^ varies, and the KL holds it to the prior's; a D that learns
    can make the noise small whatever sigma is.

    log sigma^2 is ``pace`` times what the encoder says, from the same start: SGD moves it pace^2 times as
    quickly, without a rate of its own. At 1 it hardly leaves its start within a training.

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
    pace: Tensor | None  # None: 1

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        latent: int = 32,
        spread: float = 0.1,
        init: Init = "normal",
        train_r: bool = False,
        train_decoder: bool = False,
        log_variance: float = -2.0,
        pace: float = 1.0,
    ) -> None:
        super().__init__(members, inputs, outputs)
        self.latent = latent
        # Among the weights, because these mean nothing without it.
        self.register_buffer("pace", None if pace == 1 else torch.tensor(float(pace)))
        r = initial(members, inputs, spread, init)
        if train_r:
            self.r = nn.Parameter(r)
        else:
            self.register_buffer("r", r)
        self.s = nn.Parameter(initial(members, outputs, spread, init))
        # rows: the mean, then the log variance
        self.encoder = nn.Linear(inputs, 2 * latent, dtype=r.dtype)
        self.decoder = nn.Linear(latent, inputs, dtype=r.dtype)
        with torch.no_grad():
            apart = float((r - 1).square().mean().sqrt().clamp_min(0.01))
            self.encoder.weight[:latent].normal_(std=1 / apart)  # mu ~ N(0, 1), however close the r
            self.encoder.weight[latent:].normal_(std=0.1 / pace)
            self.encoder.bias[:latent] = 0.0
            self.encoder.bias[latent:] = log_variance / pace
            self.decoder.weight.normal_(std=0.5)
            self.decoder.bias.fill_(1.0)
            mu = self.encoder((r - 1) / inputs**0.5)[:, :latent]
            code = mu / latent**0.5
            self.decoder.weight.copy_(_decoding(self.decoder.weight, code, r - 1))
        self.decoder.weight.requires_grad_(train_decoder)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault("pace", None)  # pickled before there was one

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, latent={self.latent}"

    def stack_key(self) -> tuple[object, ...]:
        paced = self.pace is not None
        return (type(self), self.members, self.latent, paced, self.s.device, self.s.dtype)

    @classmethod
    def draw_stack(cls, many: Sequence[Factors], samples: int) -> list[tuple[Tensor, Tensor]]:
        return Autoencoders(many).draw(samples)  # type: ignore[arg-type]

    @staticmethod
    def terms(many: Sequence["LatentFactors"], with_noise: bool = True) -> tuple[Tensor, Tensor]:
        """KL and squared error of every layer, (L,) each: see ``Autoencoders.terms``."""
        stacks = Stacks(many)
        kl, squared = stacks.terms(with_noise)
        return kl[stacks.places], squared[stacks.places]

    def mean(self) -> tuple[Tensor, Tensor]:
        stack = Autoencoders([self])
        return stack.decode(stack.mu)[0][0], self.s

    def covariance_factor(self) -> Tensor:
        """A (J, m, latent) with Cov(r^_j) = A_j A_j^T, A_j = D diag(sigma_j) / sqrt(latent)."""
        stack = Autoencoders([self])
        weight = at_least_float32(self.decoder.weight)
        return weight * (stack.sigma[0] / self.latent**0.5).unsqueeze(1)


class Autoencoders:
    """The autoencoders of layers with codes of one size, computed together.

    Neighbours of equal width share their products; the codes of all are one tensor (L, J, latent). A loss
    needs them twice, for the draw and for its terms: both come from one of these, so that each parameter is
    read once and gets one gradient.
    """

    def __init__(self, layers: Sequence[LatentFactors], for_loss: bool = False) -> None:
        self.layers = layers
        self.for_loss = for_loss  # after a draw come the terms: the means are decoded with it
        self.latent = layers[0].latent
        same = _runs(layers)
        self.sizes = [len(many) for many in same]
        with self._exactly():
            self.r = [stack(many, "r") for many in same]
            self.decoder_weights = [stack(many, "decoder.weight") for many in same]
            self.decoder_biases = [stack(many, "decoder.bias").unsqueeze(2) for many in same]
            encoders = [stack(many, "encoder.weight") for many in same]
            # The weight is the left factor: its gradient comes as the parameters lie, not transposed.
            codes = [
                torch.bmm(weight, ((r - 1) / r.shape[-1] ** 0.5).mT)
                for weight, r in zip(encoders, self.r, strict=True)
            ]
            bias = stack(layers, "encoder.bias")
            code = (torch.cat(codes) + bias.unsqueeze(2)).mT
            self.mu, self.log_variance = code.chunk(2, dim=-1)
            if layers[0].pace is not None:
                self.log_variance = stack(layers, "pace").view(-1, 1, 1) * self.log_variance
            self.sigma = (0.5 * self.log_variance).exp()
        self.center: list[Tensor] | None = None  # r^ of the means, where a draw had it computed

    def _exactly(self) -> AbstractContextManager[Any]:
        return full_precision(self.layers[0].s.device)

    def decode(self, z: Tensor) -> list[Tensor]:
        """z (L, rows, latent) to r^ of every width, (layers of it, rows, m)."""
        with self._exactly():
            codes = (z / self.latent**0.5).mT.split(self.sizes)
            parts = zip(self.decoder_biases, self.decoder_weights, codes, strict=True)
            return [torch.baddbmm(bias, weight, code).mT for bias, weight, code in parts]

    def draw(
        self, samples: int = 1, rows: int | None = None, copies: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """r^ and s of every layer: ``samples`` draws of each member, or one for each of ``rows`` rows.

        Each draw of r^ is given so many ``copies``, beside each other.
        """
        mu, sigma = self.mu, self.sigma
        if rows is not None:
            each = rows // mu.shape[1]
            mu, sigma = (part.repeat_interleave(each, dim=1) for part in (mu, sigma))
        z = gaussian(mu, sigma, samples).flatten(1, 2)
        if self.for_loss:
            both = self.decode(torch.cat([z, self.mu], 1))
            sizes = [z.shape[1], self.mu.shape[1]]
            r_hats, self.center = map(list, zip(*(r.split(sizes, 1) for r in both), strict=True))
        else:
            r_hats = self.decode(z)
        if copies > 1:
            r_hats = [r.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2) for r in r_hats]
        drawn = [r for same in r_hats for r in same]
        return [(r, repeat(f.s, samples)) for r, f in zip(drawn, self.layers, strict=True)]

    def terms(self, with_noise: bool = True) -> tuple[Tensor, Tensor]:
        r"""KL(q(z|r) || N(0, I)) and E ||r - r^||^2 of every layer, (L,) each, averaged over members.

        The expectation is taken in closed form: the decoder is linear, so
        :math:`E\|r - \hat r\|^2 = \|r - E \hat r\|^2 + \frac1k \sum_i \sigma_i^2 \|D_i\|^2`
        (columns of D). Not ``with_noise``: of the mean alone, the first of the two.
        """
        with self._exactly():
            centers = self.decode(self.mu) if self.center is None else self.center
            missing = [
                F.mse_loss(center, r, reduction="none").sum((1, 2))
                for center, r in zip(centers, self.r, strict=True)
            ]
            squared = torch.cat(missing)
            if with_noise:
                columns = torch.cat([w.square().sum(1) for w in self.decoder_weights])  # (L, k)
                noise = (self.sigma.square() * columns.unsqueeze(1)).sum((1, 2))
                squared = squared + noise / self.latent
            squared = squared / self.mu.shape[1]
            kl = kl_to_standard_normal(self.mu, self.log_variance).sum(-1).mean(-1)
        return kl, squared


def _runs(layers: Sequence[LatentFactors]) -> list[list[LatentFactors]]:
    """The layers in their order, neighbours of equal width together."""
    runs: list[list[LatentFactors]] = []
    for layer in layers:
        if not runs or runs[-1][0].inputs != layer.inputs:
            runs.append([])
        runs[-1].append(layer)
    return runs


class Stacks:
    """All autoencoders of a network: one group, unless device, precision, latent size or pace differ.

    ``layers`` are in the groups' order, ``places`` says where each is in the order they were given in.
    """

    def __init__(self, many: Sequence[LatentFactors], for_loss: bool = False) -> None:
        groups = stacked(many)
        self.parts = [Autoencoders([many[i] for i in group], for_loss) for group in groups]
        order = [i for group in groups for i in group]
        self.places = sorted(range(len(order)), key=order.__getitem__)

    @property
    def layers(self) -> list[LatentFactors]:
        return [layer for part in self.parts for layer in part.layers]

    def draw(self, rows: int | None = None, copies: int = 1) -> list[tuple[Tensor, Tensor]]:
        """One draw of every layer, in the order they were given in (``Autoencoders.draw``)."""
        drawn = [pair for part in self.parts for pair in part.draw(rows=rows, copies=copies)]
        return [drawn[place] for place in self.places]

    def terms(self, with_noise: bool = True) -> tuple[Tensor, Tensor]:
        """KL and squared error of every one of ``layers``, (L,) each (``Autoencoders.terms``).

        Of layers on several devices they are on the first one's.
        """
        terms = [part.terms(with_noise) for part in self.parts]
        device = terms[0][0].device
        kl, squared = zip(*((kl.to(device), error.to(device)) for kl, error in terms), strict=True)
        return torch.cat(kl), torch.cat(squared)
