"""What holds for all fifteen: the form is kept, the seed decides, bad requests say what to write."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lpbnn.data import load
from lpbnn.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    VERSION,
    corrupt,
)
from lpbnn.data.corruptions.generate import TABLE, block_rows
from lpbnn.data.corruptions.ops import Draws

FIXED = {"brightness", "contrast", "pixelate", "jpeg_compression", "defocus_blur", "zoom_blur"}
GOLDEN = {
    "gaussian_noise": 459.31,
    "shot_noise": 366.15,
    "impulse_noise": 1144.05,
    "defocus_blur": 209.56,
    "glass_blur": 726.13,
    "motion_blur": 305.95,
    "zoom_blur": 351.52,
    "snow": 1506.99,
    "frost": 1829.51,
    "fog": 2105.57,
    "brightness": 1253.35,
    "contrast": 651.76,
    "elastic_transform": 566.05,
    "pixelate": 145.87,
    "jpeg_compression": 137.56,
}
RANDOM = [name for name in CORRUPTIONS if name not in FIXED]


def test_the_fifteen_names_in_the_published_order() -> None:
    assert (
        *("gaussian_noise", "shot_noise", "impulse_noise"),
        *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        *("snow", "frost", "fog"),
        *("brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    ) == CORRUPTIONS
    assert all(len(TABLE[name].severities) == 5 for name in CORRUPTIONS)


# Hendrycks & Dietterich's parameters for images of 32x32, as their program for CIFAR-10-C lists them.
PUBLISHED = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": (1.06, 1.11, 1.16, 1.21, 1.26),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (
        *((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06)),
        *((0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
}


def test_the_severities_are_the_published_ones() -> None:
    """Other tests read them from the table, so a wrong number there would pass."""
    assert {name: corruption.severities for name, corruption in TABLE.items()} == PUBLISHED


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_form_is_kept_and_the_seed_decides(name: str, photos: Tensor) -> None:
    before = photos.clone()
    for severity in SEVERITIES:
        out = corrupt(photos, name, severity, seed=3)
        assert out.dtype == torch.uint8
        assert out.shape == photos.shape
        assert not torch.equal(out, photos)
        assert torch.equal(out, corrupt(photos, name, severity, seed=3))
        # Image i does not depend on what follows it.
        assert torch.equal(out[:5], corrupt(photos[:5], name, severity, seed=3))
        another = corrupt(photos, name, severity, seed=4)
        assert torch.equal(another, out) == (name in FIXED)
    assert torch.equal(photos, before)


def test_a_version_always_gives_the_same_images(photos: Tensor) -> None:
    """Where this fails on purpose, raise VERSION: caches and published numbers depend on it."""
    x = photos[:8].float()
    found = {n: (corrupt(photos[:8], n, 4).float() - x).square().mean().item() for n in CORRUPTIONS}
    assert VERSION == 1
    assert found == pytest.approx(GOLDEN, rel=2e-3)


@pytest.mark.parametrize("name", RANDOM)
def test_images_of_a_batch_get_their_own_draws(name: str, photos: Tensor) -> None:
    twice = corrupt(photos[:1].expand(2, -1, -1, -1), name, 5)
    assert not torch.equal(twice[0], twice[1])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_blocks_do_not_show(name: str) -> None:
    block = block_rows((1, 8, 8))
    digits = load("digits").train.inputs[: block + 30]
    whole = corrupt(digits, name, 3)
    assert torch.equal(whole[: block + 7], corrupt(digits[: block + 7], name, 3))
    if name in RANDOM:  # nor does the second block repeat the first
        twice = corrupt(digits[:1].expand(2 * block, -1, -1, -1), name, 5)
        assert not torch.equal(twice[:block], twice[block:])


def test_all_75_work_on_small_grey_images() -> None:
    digits = load("digits").test.inputs[:64]
    for name, severity in product(CORRUPTIONS, SEVERITIES):
        made = corrupt(digits, name, severity)
        assert made.shape == digits.shape
        assert made.dtype == torch.uint8
        change = (made.float() - digits.float()).abs().mean()
        assert 0.5 < change < 128, f"{name} {severity} changes by {change}"


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_that_are_not_square(name: str, channels: int) -> None:
    images = (torch.rand(2, channels, 72, 96) * 255).to(torch.uint8)
    out = corrupt(images, name, 5)
    assert out.shape == images.shape
    assert not torch.equal(out, images)


# Published severities that do not change more pixels than the one before: see the package's text.
@pytest.mark.parametrize(
    "name", [n for n in CORRUPTIONS if n not in {"frost", "glass_blur", "elastic_transform"}]
)
def test_damage_grows_with_severity(name: str, photos: Tensor) -> None:
    damage = [
        (corrupt(photos, name, severity).float() - photos.float()).abs().mean().item()
        for severity in SEVERITIES
    ]
    if name == "motion_blur":  # (6, 2) and (8, 2) differ by taps beyond six sigma alone
        assert damage[3] == pytest.approx(damage[2], rel=0.1)
        damage.pop(3)
    assert damage == sorted(damage)
    assert damage[-1] > 1.2 * damage[0]


@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n != "jpeg_compression"])
def test_every_tensor_stays_on_the_device_of_the_images(name: str) -> None:
    """Shown without a GPU by the meta device, which refuses to be mixed; jpeg needs the CPU."""
    apply, severities = TABLE[name]
    images = torch.zeros(2, 3, 32, 32, device="meta")
    assert apply(images, severities[4], Draws("key", 2, 2, "meta")).is_meta


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_precision_is_that_of_the_images(name: str) -> None:
    apply, severities = TABLE[name]
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    corrupted = apply(images, severities[4], Draws("key", 2, 2))
    assert (corrupted.dtype, corrupted.shape) == (torch.float64, images.shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_cuda_gives_the_same_images(name: str, photos: Tensor) -> None:
    here, there = corrupt(photos, name, 5), corrupt(photos.cuda(), name, 5)
    assert there.is_cuda
    difference = (here.int() - there.cpu().int()).abs()
    assert difference.float().mean() < 0.02


GOOD = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (GOOD.float(), "fog", 1, r"uint8 .* got torch\.float32 .*\(2, 3, 32, 32\); convert with"),
        (GOOD[0], "fog", 1, r"\(N, C, H, W\) .* got torch\.uint8 of shape \(3, 32, 32\); use"),
        (GOOD.permute(0, 2, 3, 1), "fog", 1, r"C = 1 or 3, got .*permute\(0, 3, 1, 2\)"),
        (GOOD[..., :7], "fog", 1, r"at least 8x8 pixels, got .*\(2, 3, 32, 7\)"),
        (GOOD, "fog", 0, r"severity=0; expected one of 1, 2, 3, 4, 5"),
        (GOOD, "fog", 6, r"severity=6; expected"),
        (
            GOOD,
            "gausian_noise",
            1,
            r"'gausian_noise'\. Did you mean 'gaussian_noise'\? Known: .*fog",
        ),
    ],
)
def test_bad_requests_say_what_to_write(
    images: Tensor, name: str, severity: int, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        corrupt(images, name, severity)


def test_no_images_give_no_images() -> None:
    assert corrupt(GOOD[:0], "fog", 1).shape == (0, 3, 32, 32)
