"""Blur equals scipy and the published loops where these exist, and takes fine detail away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from lpbnn.data.corruptions import (
    SEVERITIES,
    blur,
    corrupt,
    ops,
)
from lpbnn.data.corruptions.generate import TABLE
from lpbnn.data.corruptions.ops import Draws


def parameter(name: str, severity: int):
    return TABLE[name].severities[severity - 1]


def fine_energy(images: Tensor) -> float:
    x = images.float()
    return ((x[..., 1:] - x[..., :-1]) ** 2).mean().item()


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "zoom_blur"])
def test_blur_takes_fine_detail_and_keeps_the_mean(name: str, photos: Tensor) -> None:
    energy = [fine_energy(corrupt(photos, name, severity)) for severity in SEVERITIES]
    assert energy[0] < fine_energy(photos)
    assert energy[-1] < energy[0]
    out = corrupt(photos, name, 5).float().mean((1, 2, 3))
    assert (out - photos.float().mean((1, 2, 3))).abs().mean() < 4


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_spreads_a_point_over_its_disk(severity: int) -> None:
    point = torch.zeros(1, 1, 33, 33)
    point[..., 16, 16] = 1
    radius, alias = parameter("defocus_blur", severity)
    # A 33-pixel side would scale the lengths by 33/32: the kernel is asked for directly.
    kernel = blur.disk_kernel(radius, alias)
    assert kernel.sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(kernel, kernel.T)
    grid = np.arange(-8, 9)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    reference = ndimage.gaussian_filter(disk / disk.sum(), alias, radius=1)
    reach = len(kernel) // 2
    middle = reference[8 - reach : 9 + reach, 8 - reach : 9 + reach]
    np.testing.assert_allclose(kernel.numpy(), middle, atol=1e-6)
    images = torch.rand(2, 1, 32, 32)
    out = blur.defocus_blur(images, (radius, alias), Draws("key", 2, 2))
    expected = ndimage.correlate(images.numpy()[1, 0], middle, mode="mirror")
    np.testing.assert_allclose(out.numpy()[1, 0], expected, atol=1e-5)


class Given(Draws):
    """Draws whose integers are given."""

    def __init__(self, given: Tensor) -> None:
        super().__init__("key", len(given), len(given))
        self.given = given

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        assert (low, high, *shape) == (-1, 1, *self.given.shape[1:])
        return self.given


def test_glass_blur_is_the_published_walk() -> None:
    """The sequential loop, whose 'swap' of two views writes only one of the two pixels."""
    jumps = torch.randint(-1, 1, (1, 2, 32, 32))
    image = torch.randint(0, 256, (1, 3, 32, 32))
    out = blur.glass_blur(image / 255, (0.05, 1, 1), Given(jumps)) * 255
    walked = image[0].permute(1, 2, 0).numpy().copy()
    for h in range(31, 1, -1):
        for w in range(31, 1, -1):
            dy, dx = jumps[0, :, h, w].tolist()
            here, there = walked[h, w], walked[h + dy, w + dx]
            walked[h, w], walked[h + dy, w + dx] = there, here
    np.testing.assert_array_equal(out[0].permute(1, 2, 0).round().numpy(), walked)


def test_motion_blur_streaks_along_its_angle() -> None:
    image = torch.randint(0, 256, (2, 1, 32, 32)) / 255
    angles = torch.tensor([30.0, -40.0])
    out = blur.streak(image, 6, 2.0, angles)
    kernel = np.exp(-(np.arange(13) ** 2) / 8.0)
    kernel /= kernel.sum()
    for picture, angle, got in zip(image[:, 0].numpy(), angles.tolist(), out[:, 0], strict=True):
        theta = np.deg2rad(angle)
        expected = np.zeros((32, 32))
        for h in range(32):
            for w in range(32):
                for i, weight in enumerate(kernel):
                    y = np.clip(h + int(np.ceil(i * np.sin(theta) - 0.5)), 0, 31)
                    x = np.clip(w + int(np.ceil(i * np.cos(theta) - 0.5)), 0, 31)
                    expected[h, w] += weight * picture[y, x]
        assert np.abs(got.numpy() * 255 - expected * 255).max() < 0.51


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.13, 1.25, 1.75, 2.25])
def test_zoom_is_scipys(factor: float) -> None:
    image = torch.rand(1, 1, 32, 32)
    crop = int(np.ceil(32 / factor))
    top = (32 - crop) // 2
    part = image.numpy()[0, 0, top : top + crop, top : top + crop]
    grown = np.asarray(ndimage.zoom(part, factor, order=1))
    trim = (len(grown) - 32) // 2
    expected = grown[trim : trim + 32, trim : trim + 32]
    np.testing.assert_allclose(ops.zoom(image, factor)[0, 0].numpy(), expected, atol=1e-5)


def test_zoom_blur_averages_the_published_factors() -> None:
    image = torch.rand(1, 1, 32, 32)
    out = blur.zoom_blur(image, 1.06, Draws("key", 1, 1))
    zooms = [ops.zoom(image, 1 + i / 100) for i in range(7)]  # numpy's arange includes 1.06
    torch.testing.assert_close(out, (image + sum(zooms)) / 8)


@pytest.mark.parametrize(("mode", "truncate"), [("nearest", 4.0), ("reflect", 3.0)])
@pytest.mark.parametrize("sigma", [0.25, 0.4, 0.96, 6.4])
def test_gaussian_is_scipys(sigma: float, mode: ops.Border, truncate: float) -> None:
    image = torch.rand(1, 1, 32, 20)
    out = ops.gaussian(image, sigma, truncate, mode)[0, 0].numpy()
    expected = ndimage.gaussian_filter(image[0, 0].numpy(), sigma, mode=mode, truncate=truncate)
    np.testing.assert_allclose(out, expected, atol=1e-5)
