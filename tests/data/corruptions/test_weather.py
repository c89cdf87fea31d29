"""Snow, frost and fog lay on what their equations say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lpbnn.data.corruptions import (
    SEVERITIES,
    corrupt,
    ops,
    weather,
)
from lpbnn.data.corruptions.generate import TABLE
from lpbnn.data.corruptions.ops import Draws


def flat(value: int, n: int = 32) -> Tensor:
    return torch.full((n, 3, 32, 32), value, dtype=torch.uint8)


def parameter(name: str, severity: int):
    return TABLE[name].severities[severity - 1]


def fine_energy(images: Tensor) -> float:
    x = images.float()
    return ((x[..., 1:] - x[..., :-1]) ** 2).mean().item()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_whitens_and_lays_flakes_that_are_symmetric_under_half_a_turn(severity: int) -> None:
    black = corrupt(flat(0), "snow", severity)
    keep = parameter("snow", severity)[6]
    floor = int((1 - keep) * 0.5 * 255 + 1e-3)
    assert abs(int(black.min()) - floor) <= 1
    assert torch.equal(black, black.rot90(2, (2, 3)))
    assert (black > floor + 1).float().mean() > 0.01


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_stays_between_its_bounds(severity: int) -> None:
    amount, _ = parameter("fog", severity)
    m = 200 / 255
    out = corrupt(flat(200), "fog", severity)
    assert out.amax((1, 2, 3)).tolist() == [200] * len(out)
    assert out.amin((1, 2, 3)).float().mean() == pytest.approx(255 * m * m / (m + amount), abs=1)


def test_fog_grows_rougher_as_the_decay_falls() -> None:
    rough = [
        fine_energy(weather.plasma(32, decay, Draws("key", 64, 64))) for decay in (3, 2.5, 2, 1.75)
    ]
    assert rough == sorted(rough)


def test_the_severity_of_fog_says_how_rough_it_is() -> None:
    """The decay of the table reaches the clouds."""
    x = torch.full((32, 1, 32, 32), 0.8)
    rough = [
        fine_energy(weather.fog(x, (1.5, decay), Draws("key", 32, 32))) for decay in (3, 2, 1.75)
    ]
    assert rough == sorted(set(rough))


def picture_folder(root: Path, colours: list[tuple[int, int, int]]) -> Path:
    for name, colour in zip(weather.PICTURES, colours, strict=True):
        picture = Image.new("RGB", (300, 250), colour)
        picture.save(root / name, quality=100)
    return root


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_adds_its_pictures(severity: int, tmp_path: Path) -> None:
    keep, add = parameter("frost", severity)
    folder = picture_folder(tmp_path, [(10 * i, 20 * i, 30 * i) for i in range(1, 6)])
    out = corrupt(flat(80, n=200), "frost", severity, frost=folder).float()
    found = {
        tuple(((colour + 0.5 - keep * 80) / add / 10).round().tolist()) for colour in out[..., 5, 5]
    }
    assert found == {(float(i), float(2 * i), float(3 * i)) for i in range(1, 6)}


def test_frost_says_what_it_lacks(tmp_path: Path, photos: Tensor) -> None:
    folder = picture_folder(tmp_path, [(100, 150, 160)] * 5)
    (folder / "frost4.jpg").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks frost4\.jpg; give the folder .* frost=None"
    ):
        corrupt(photos[:2], "frost", 1, frost=folder)


def test_frost_pictures_too_small_for_the_images(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path, [(100, 150, 160)] * 5)
    wide = torch.zeros(1, 3, 32, 200, dtype=torch.uint8)
    with pytest.raises(ValueError, match="32x200 do not fit into a frost picture of 50x60"):
        corrupt(wide, "frost", 1, frost=folder)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_procedural_frost_is_icy(severity: int) -> None:
    """Tone and contrast as measured on the published pictures: see weather.grow_frost."""
    layer = weather.grow_frost(torch.zeros(200, 3, 32, 32), Draws("key", 200, 200)) * 255
    red, green, blue = layer.mean((0, 2, 3)).tolist()
    assert red < green < blue
    assert 140 < ops.grey(layer).mean() < 175
    assert 18 < ops.grey(layer).std((2, 3)).mean() < 28
    keep, add = parameter("frost", severity)
    out = corrupt(flat(20, n=4), "frost", severity).float()
    assert (out >= keep * 20 - 1).all()
    assert (out <= keep * 20 + add * 255 + 1).all()
