"""Noise: gaussian, shot, impulse. Independent for every pixel and channel, at any image size."""

from __future__ import annotations

import torch
from torch import Tensor

from lpbnn.data.corruptions.ops import Corruption, Draws


def gaussian_noise(x: Tensor, sigma: float, draw: Draws) -> Tensor:
    """x + sigma e, e ~ N(0, 1).

    >>> grey = torch.full((4, 3, 32, 32), 0.5)
    >>> noisy = gaussian_noise(grey, 0.1, Draws("key", rows=4, block=4))
    >>> f"{noisy.std():.2f}"
    '0.10'
    """
    return x + sigma * draw.normal(*x.shape[1:])


def _poisson_table(photons: int) -> Tensor:
    """P(K <= k) of K ~ Poisson(photons v / 255), for the 256 values v and k < photons."""
    rate = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    k = torch.arange(photons, dtype=torch.float64)
    log_mass = torch.xlogy(k, rate) - rate - torch.lgamma(k + 1)
    return log_mass.exp().cumsum(1).clamp(max=1)


def shot_noise(x: Tensor, photons: int, draw: Draws) -> Tensor:
    """K / photons, K ~ Poisson(photons x): variance x / photons.

    Drawn by inversion from one uniform number per pixel, because a rejection sampler would make an
    image's noise depend on the images before it. An image has 256 values, so the distribution
    functions fit in one sorted table, row v shifted by v; what exceeds `photons` is white.

    >>> grey = torch.full((4, 3, 32, 32), 0.5)
    >>> noisy = shot_noise(grey, 50, Draws("key", rows=4, block=4))
    >>> f"{noisy.mean():.2f} {noisy.var():.3f}"
    '0.50 0.010'
    """
    value = (x * 255).round().double()
    levels = torch.arange(256, dtype=torch.float64)[:, None]
    table = (levels + _poisson_table(photons)).flatten().to(x.device)
    point = value + draw.uniform(*x.shape[1:], dtype=torch.float64)
    count = torch.searchsorted(table, point) - value.long() * photons
    return count.to(x) / photons


def impulse_noise(x: Tensor, amount: float, draw: Draws) -> Tensor:
    """A share `amount` of the values becomes salt (1) or pepper (0), half each, per channel.

    >>> noisy = impulse_noise(torch.full((64, 3, 32, 32), 0.5), 0.06, Draws("key", 64, 64))
    >>> f"{(noisy == 1).float().mean():.2f} {(noisy == 0).float().mean():.2f}"
    '0.03 0.03'
    """
    u = draw.uniform(*x.shape[1:])
    return x.masked_fill(u < amount / 2, 1.0).masked_fill((u >= amount / 2) & (u < amount), 0.0)


FAMILY = {
    "gaussian_noise": Corruption(gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Corruption(shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
}
