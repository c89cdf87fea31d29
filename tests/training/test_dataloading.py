"""What a step sees depends on the seed, the epoch and the step, and on nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lpbnn import data
from lpbnn.data import Augment, Dataset, Splits
from lpbnn.training import AugmentConfig, RunConfig
from lpbnn.training.dataloading import TrainLoader, noise_seed
from lpbnn.training.preflight import check_training

Make = Callable[..., RunConfig]
CROPS = AugmentConfig(pad=2, flip=True, cutout=3)


def test_an_epoch_can_be_repeated_alone(make: Make, splits: Splits) -> None:
    config = make(augment=CROPS)
    through = TrainLoader(splits, config)
    for epoch in range(2):
        list(through.epoch(epoch))
    third, alone = list(through.epoch(2)), list(TrainLoader(splits, config).epoch(2))
    assert len(third) == through.steps == 4
    for (x, y), (x_alone, y_alone) in zip(third, alone, strict=True):
        assert torch.equal(x, x_alone)
        assert torch.equal(y, y_alone)
    assert not torch.equal(third[0][1], next(iter(through.epoch(3)))[1])
    assert not torch.equal(third[0][1], next(iter(TrainLoader(splits, make(seed=1)).epoch(2)))[1])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_share_the_batches_of_one(make: Make, splits: Splits, world: int) -> None:
    """Crops, flips and holes included, to the pixel."""
    config = make(augment=CROPS, batch_size=60)
    one = list(TrainLoader(splits, config).epoch(0))
    feeds = [TrainLoader(splits, config, rank=rank, world=world) for rank in range(world)]
    shares = [list(feed.epoch(0)) for feed in feeds]
    assert {len(share) for share in shares} == {feeds[0].steps}
    for step, (x, y) in enumerate(one):
        joint_x = torch.cat([share[step][0] for share in shares])
        joint_y = torch.cat([share[step][1] for share in shares])
        usable = len(y) // world * world
        assert torch.equal(joint_x, x[:usable])
        assert torch.equal(joint_y, y[:usable])
    seen = sum(len(y) for share in shares for _, y in share)
    assert seen == 200 - 20 % world


def test_a_rest_smaller_than_the_processes_is_left_out(make: Make, splits: Splits) -> None:
    part = replace(splits, train=splits.train.take(slice(65)))  # 64 and 1
    feeds = [TrainLoader(part, make(), rank=rank, world=2) for rank in range(2)]
    assert [[len(y) for _, y in feed.epoch(0)] for feed in feeds] == [[32], [32]]
    assert feeds[0].steps == 1
    assert sum(len(y) for feed in feeds for _, y in feed.epoch(0)) == 64
    assert TrainLoader(part, make()).steps == 2
    assert TrainLoader(part, make(drop_last=True)).steps == 1


def test_each_process_draws_its_own_noise() -> None:
    seeds = {noise_seed(s, e, r) for s in range(4) for e in range(4) for r in range(4)}
    assert len(seeds) == 64


def test_regression_is_standardised(make: Make) -> None:
    table = data.load("diabetes")
    x, y = next(iter(TrainLoader(table, make(batch_size=266)).epoch(0)))
    assert x.mean(0).abs().max() < 1e-5
    assert abs(y.mean()) < 1e-5
    assert abs(y.std(correction=0) - 1) < 1e-5


def test_the_last_look_is_plain_complete_and_repeatable(make: Make, splits: Splits) -> None:
    batches = TrainLoader(splits, make(augment=CROPS))
    for _ in range(2):
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        assert torch.equal(x, splits.normalise(splits.train.inputs))
        assert torch.equal(y, splits.train.targets)


def scenes(ignore_index: int | None) -> Splits:
    """Pictures whose value is their label, 1 to 3: what happens to one must happen to the other."""
    labels = torch.randint(1, 4, (8, 9, 9), generator=torch.Generator().manual_seed(0))
    part = Dataset(labels.unsqueeze(1).to(torch.uint8) * 51, labels)
    return Splits(
        name="scenes",
        task="segmentation",
        train=part,
        val=part,
        test=part,
        num_classes=4,
        mean=(0.0,),
        std=(0.2,),
        description="",
        source="generated",
        ignore_index=ignore_index,
        augment=Augment(pad=2, flip=True),
    )


@pytest.mark.parametrize("ignore", [255, 0, -100])
@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_labels_move_with_their_pictures(make: Make, ignore: int, padding: str) -> None:
    crops = AugmentConfig(padding=padding)  # type: ignore[arg-type]
    feed = TrainLoader(scenes(ignore), make(batch_size=8, augment=crops))
    x, y = next(iter(feed.epoch(0)))
    outside = y == ignore
    assert torch.equal(x[:, 0].round().long().where(~outside, ignore), y)
    assert outside.any() == (padding == "zero")  # a mirrored border has labels of its own
    assert (x[:, 0][outside] == 0).all()


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"batch_size": 3}, 2, "does not divide among 2 processes"),
        ({"batch_size": 1}, 2, "leaves nothing to train on"),
        ({"batch_size": 500, "drop_last": True}, 1, "leaves nothing to train on with 200 examples"),
    ],
)
def test_batches_that_cannot_be(
    make: Make, splits: Splits, changes: dict[str, int], world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_training(make(**changes), splits, world)


def test_a_border_needs_a_label(make: Make) -> None:
    with pytest.raises(ValueError, match="'scenes' has no ignore_index"):
        check_training(make(), scenes(None))
