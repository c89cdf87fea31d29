"""Brightness, contrast, elastic, pixelate and jpeg against their definitions and Pillow."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from lpbnn.data.corruptions import (
    SEVERITIES,
    corrupt,
    digital,
)
from lpbnn.data.corruptions.generate import TABLE
from lpbnn.data.corruptions.ops import Draws


def flat(value: int, n: int = 32) -> Tensor:
    return torch.full((n, 3, 32, 32), value, dtype=torch.uint8)


def parameter(name: str, severity: int):
    return TABLE[name].severities[severity - 1]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_raises_v_and_keeps_hue_and_saturation(severity: int, photos: Tensor) -> None:
    out = corrupt(photos, "brightness", severity).float()
    amount = 255 * parameter("brightness", severity)
    before, after = photos.amax(1).float(), out.amax(1)
    free = before + amount < 255
    assert free.float().mean() > 0.5
    assert (after - before - amount)[free].abs().max() <= 1
    assert after[~free].min() >= 254
    bright = free & (before > 60)
    ratio = lambda image: (image / image.amax(1, keepdim=True)).transpose(0, 1)[:, bright]  # noqa: E731
    assert (ratio(out) - ratio(photos.float())).abs().max() < 0.02
    black = corrupt(flat(0), "brightness", severity)
    assert black.unique().tolist() == [int(amount + 1e-3)]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_shrinks_the_deviation_by_its_factor(severity: int, photos: Tensor) -> None:
    out = corrupt(photos, "contrast", severity).float()
    factor = parameter("contrast", severity)
    deviation = lambda image: image.std((2, 3))  # noqa: E731
    wide = deviation(photos.float()) > 20
    torch.testing.assert_close(
        (deviation(out) / deviation(photos.float()))[wide],
        torch.full((int(wide.sum()),), factor),
        atol=0.01,
        rtol=0,
    )
    shift = out.mean((2, 3)) - photos.float().mean((2, 3))
    assert shift.min() > -1.01
    assert shift.max() < 0.01  # truncation darkens by half a level


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_displacement_is_scipys(severity: int) -> None:
    alpha, sigma, _ = (32 * part for part in parameter("elastic_transform", severity))
    image = torch.rand(2, 1, 32, 32)
    still = (
        parameter("elastic_transform", severity)[0],
        parameter("elastic_transform", severity)[1],
    )
    out = digital.elastic_transform(image, (*still, 0.0), Draws("key", 2, 2))
    draw = Draws("key", 2, 2)
    draw.uniform(3, 2)
    field = draw.uniform(2, 32, 32, low=-1, high=1).numpy()[1] if alpha else np.zeros((2, 32, 32))
    moved = [ndimage.gaussian_filter(f, sigma, truncate=3) * alpha for f in field]
    h, w = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    expected = ndimage.map_coordinates(
        image[1, 0].numpy(), [h + moved[1], w + moved[0]], order=1, mode="reflect"
    )
    np.testing.assert_allclose(out[1, 0].numpy(), expected, atol=1e-4)


def test_elastic_affine_moves_the_three_corners_where_it_says() -> None:
    """A ramp of coordinates, warped, shows where every pixel came from."""
    h, w = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    ramps = torch.stack([w, h]).expand(64, 2, 32, 32)
    out = digital.elastic_transform(ramps, (0.0, 0.0, 0.08), Draws("key", 64, 64))
    moved = Draws("key", 64, 64).uniform(3, 2, low=-2.56, high=2.56)
    corners = torch.tensor([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    landed = corners + moved
    # Bilinear interpolation is exact on a ramp, away from the mirrored border.
    x, y = landed[..., 0], landed[..., 1]
    x0, y0 = x.floor().long(), y.floor().long()
    batch = torch.arange(64)[:, None]
    found = torch.zeros(64, 3, 2)
    for dy in (0, 1):
        for dx in (0, 1):
            weight = (1 - (x - x0 - dx).abs()) * (1 - (y - y0 - dy).abs())
            found += weight[..., None] * out.permute(0, 2, 3, 1)[batch, y0 + dy, x0 + dx]
    assert (found - corners).abs().max() < 1e-2


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("side", [8, 32])
def test_pixelate_is_pillows(severity: int, side: int, photos: Tensor) -> None:
    images = photos[..., :side, :side]
    out = corrupt(images, "pixelate", severity)
    small = int(side * parameter("pixelate", severity))
    for image, got in zip(images, out, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        picture = picture.resize((small, small), Image.Resampling.BOX)
        picture = picture.resize((side, side), Image.Resampling.BOX)
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), np.asarray(picture))
        assert len(got.transpose(0, 1).unique(dim=0)) <= small


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(severity: int, channels: int, photos: Tensor) -> None:
    images = photos[:6, :channels]
    out = corrupt(images, "jpeg_compression", severity)
    for image, got in zip(images, out, strict=True):
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        stream = BytesIO()
        picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        picture.save(stream, "JPEG", quality=parameter("jpeg_compression", severity))
        expected = np.asarray(Image.open(stream)).reshape(pixels.shape)
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), expected)


class Growing(Draws):
    """Draws that move every corner of the affine map away from the centre."""

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: object = None
    ) -> Tensor:
        del shape, low, dtype
        return high * torch.tensor([[[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]])


@pytest.mark.parametrize(("height", "width"), [(12, 32), (32, 12), (16, 16)])
def test_an_image_of_any_shape_is_deformed_about_its_centre(height: int, width: int) -> None:
    x = torch.zeros(1, 1, height, width)
    x[0, 0, height // 2, width // 2] = 1
    out = digital.elastic_transform(x, (0, 0, 0.08), Growing("key", 1, 1))
    assert out.flatten().argmax() == x.flatten().argmax()
    assert out.max() == pytest.approx(1.0, abs=1e-4)
