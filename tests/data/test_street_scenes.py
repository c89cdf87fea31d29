"""The generated streets: seeded, labelled, and strange only in the test part."""

import numpy as np
import pytest
import torch

from lpbnn import data
from lpbnn.data import Splits
from lpbnn.data.street_scenes import scene


@pytest.fixture(scope="module")
def streets() -> Splits:
    return data.load("street-scenes", train=12, val=3, test=12)


def test_contract(streets: Splits) -> None:
    assert (streets.task, streets.source, streets.shape) == (
        "segmentation",
        "generated",
        (3, 64, 128),
    )
    assert [len(part) for part in (streets.train, streets.val, streets.test)] == [12, 3, 12]
    for part in (streets.train, streets.val, streets.test):
        x, y = part[:]
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert y.shape == (len(part), 64, 128)
    x = streets.normalise(streets.train[:][0]).double()
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_every_class_is_in_the_training_part_and_no_anomaly(streets: Splits) -> None:
    assert min(streets.class_counts) > 50
    assert set(streets.train[:][1].unique().tolist()) == {*range(9), 255}
    assert (streets.val[:][1] != 9).all()


def test_every_test_scene_has_an_anomaly(streets: Splits) -> None:
    pixels = (streets.test[:][1] == streets.ood_index).flatten(1).sum(1)
    assert pixels.min() > 8
    assert 0.005 < pixels.float().mean() / (64 * 128) < 0.1


def test_the_sky_is_above_and_the_road_below(streets: Splits) -> None:
    y = streets.train[:][1]
    rows = torch.arange(64)[None, :, None].expand_as(y).double()
    heights = {name: rows[y == k].mean() for k, name in enumerate(streets.classes)}
    assert heights["sky"] < heights["building"] < heights["car"] < heights["road"]


def test_a_scene_depends_on_its_numbers_alone(streets: Splits) -> None:
    torch.rand(3)
    np.random.rand(3)  # the global generators play no part
    more = data.load("street-scenes", train=13, val=1, test=1)
    assert torch.equal(more.train[:12][0], streets.train[:][0])
    assert torch.equal(more.test[0][1], streets.test[0][1])
    other = data.load("street-scenes", train=1, val=1, test=1, seed=1)
    assert not torch.equal(other.train[0][0], streets.train[0][0])
    pictures = {x.numpy().tobytes() for part in (more.train, streets.test) for x in part[:][0]}
    assert len(pictures) == 25


def test_any_size_is_painted() -> None:
    for size in ((16, 16), (33, 47), (90, 40)):
        picture, labels = scene([0, 2, 0], size, strange=True)
        assert picture.shape == (3, *size)
        assert labels.shape == size
        assert (labels == 9).any()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"street-scenes: train=0, .* at least one scene"):
        data.load("street-scenes", train=0)
    with pytest.raises(ValueError, match=r"size=\(8, 8\), seed=0; .* of at least 16"):
        data.load("street-scenes", size=(8, 8))
