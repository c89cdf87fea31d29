"""Noise has the variance, the law and the share that its parameter states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lpbnn.data.corruptions import (
    SEVERITIES,
    corrupt,
)
from lpbnn.data.corruptions.generate import TABLE
from lpbnn.data.corruptions.noise import shot_noise
from lpbnn.data.corruptions.ops import Draws


def flat(value: int, n: int = 32) -> Tensor:
    return torch.full((n, 3, 32, 32), value, dtype=torch.uint8)


def parameter(name: str, severity: int):
    return TABLE[name].severities[severity - 1]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_has_its_variance(severity: int) -> None:
    noise = (corrupt(flat(128), "gaussian_noise", severity).double() - 127.5) / 255
    assert noise.std().item() == pytest.approx(parameter("gaussian_noise", severity), rel=0.02)
    assert noise.mean().abs() < 1e-3
    channels = torch.corrcoef(noise.transpose(0, 1).flatten(1))
    assert (channels - torch.eye(3)).abs().max() < 0.02


@pytest.mark.parametrize("severity", SEVERITIES)
def test_shot_noise_variance_is_proportional_to_the_mean(severity: int) -> None:
    photons = parameter("shot_noise", severity)
    for value in (20, 60, 120):
        x = value / 255
        count = corrupt(flat(value), "shot_noise", severity).double() / 255 * photons
        # Truncation to 8 bits costs half a level in the mean; photons/255 is one level.
        assert count.mean().item() == pytest.approx(x * photons - photons / 510, abs=0.01 * photons)
        assert count.var().item() == pytest.approx(x * photons, rel=0.04, abs=0.2)
    assert corrupt(flat(0), "shot_noise", severity).max() == 0


def test_shot_noise_is_poisson() -> None:

    photons = 50
    x = torch.full((16, 3, 32, 32), 40 / 255)
    counts = (shot_noise(x, photons, Draws("key", 16, 16)) * photons).round().long().flatten()
    observed = counts.bincount(minlength=30)[:30].double() / len(counts)
    expected = stats.poisson.pmf(np.arange(30), photons * 40 / 255)
    assert np.abs(observed.numpy() - expected).max() < 0.005


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_hits_its_share(severity: int) -> None:
    out = corrupt(flat(100, n=64), "impulse_noise", severity)
    amount = parameter("impulse_noise", severity)
    assert set(out.unique().tolist()) == {0, 100, 255}
    for extreme in (0, 255):
        share = (out == extreme).double().mean().item()
        assert share == pytest.approx(amount / 2, rel=0.1)
    assert ((out == 255).any(1) & (out == 100).any(1)).any()  # channel by channel
