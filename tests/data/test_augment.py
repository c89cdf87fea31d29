"""Augmentation against a slow reference, picture by picture, and batches that can be repeated."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lpbnn.data import Augment, Dataset
from lpbnn.data.augment import Drawn, Padding, Transform, batches, epoch_generator

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def pictures(batch: int = 16, height: int = 12, width: int = 10, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8)


def reference(transform: Transform, images: Tensor, drawn: Drawn) -> Tensor:
    """The same, as one would write it for one picture at a time."""
    pad, flip, cutout, *_ = transform.augment
    mode = "constant" if transform.padding == "zero" else "reflect"
    height, width = images.shape[2:]
    results = []
    for number, image in enumerate(images):
        top, left, flipped, row, column = (int(values[number]) for values in drawn)
        x = (image.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(
            3, 1, 1
        )
        if pad:
            x = F.pad(x, (pad, pad, pad, pad), mode=mode)
            x = x[:, top : top + height, left : left + width]
        if flip and flipped:
            x = x.flip(-1)
        x = x.clone()
        if cutout:
            first_row, first_column = row - cutout // 2, column - cutout // 2
            rows = slice(max(first_row, 0), max(first_row + cutout, 0))
            columns = slice(max(first_column, 0), max(first_column + cutout, 0))
            x[:, rows, columns] = 0
        results.append(x)
    return torch.stack(results)


@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize("cutout", [0, 1, 4, 5, 30])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("pad", [0, 1, 4])
def test_every_pixel_is_the_references(pad: int, flip: bool, cutout: int, padding: Padding) -> None:
    transform = Transform(MEAN, STD, Augment(pad, flip, cutout), padding)
    images = pictures(batch=32)
    drawn = transform.draw(images, torch.Generator().manual_seed(1))
    assert torch.equal(transform(images, drawn), reference(transform, images, drawn))


def test_without_a_draw_it_only_normalises() -> None:
    images = pictures()
    transform = Transform(MEAN, STD, Augment(4, True, 4))
    plain = Transform(MEAN, STD)
    drawn = plain.draw(images, torch.Generator())
    assert torch.equal(transform(images), plain(images, drawn))


def test_the_draws_cover_their_ranges_evenly() -> None:
    transform = Transform(MEAN, STD, Augment(4, True, 8))
    drawn = transform.draw(pictures(20_000), torch.Generator().manual_seed(0))
    for values, outcomes in zip(drawn, (9, 9, 2, 12, 10), strict=True):
        share = values.bincount(minlength=outcomes) / 20_000
        assert len(share) == outcomes
        assert torch.allclose(share, torch.full_like(share, 1 / outcomes), atol=0.012)


def test_the_draws_do_not_follow_one_another() -> None:
    transform = Transform(MEAN, STD, Augment(4, True, 8))
    drawn = transform.draw(pictures(20_000), torch.Generator().manual_seed(0))
    correlation = torch.corrcoef(torch.stack(list(drawn)).double())
    assert (correlation - torch.eye(5)).abs().max() < 0.03


def test_the_generator_decides_and_cutout_does_not_move_the_crops() -> None:
    images = pictures()
    with_hole, without = (Transform(MEAN, STD, Augment(4, True, hole)) for hole in (8, 0))
    one = with_hole.draw(images, torch.Generator().manual_seed(5))
    two = without.draw(images, torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    other = without.draw(images, torch.Generator().manual_seed(6))
    assert not torch.equal(one.top, other.top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_type_and_layout_are_as_asked(
    dtype: torch.dtype, channels_last: bool, random: bool
) -> None:
    images = pictures()
    augment = Augment(4, True, 4)
    transform = Transform(MEAN, STD, augment, dtype=dtype, channels_last=channels_last)
    drawn = transform.draw(images, torch.Generator()) if random else None
    x = transform(images, drawn)
    expected = Transform(MEAN, STD, augment)(images, drawn)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert x.dtype == dtype
    assert x.is_contiguous(memory_format=layout)
    assert torch.equal(x, expected.to(dtype))


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_applying_compiles_to_one_graph(padding: Padding) -> None:
    torch.compiler.reset()
    images = pictures()
    transform = Transform(MEAN, STD, Augment(4, True, 4), padding)
    drawn = transform.draw(images, torch.Generator())
    compiled = torch.compile(transform, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images, drawn), transform(images, drawn))


def test_the_whole_module_moves_but_saves_nothing() -> None:
    transform = Transform(MEAN, STD).to("meta")
    assert transform.normalise.mean.device.type == "meta"
    assert transform.state_dict() == {}


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="negative size"):
        Transform(MEAN, STD, Augment(pad=-1))
    with pytest.raises(ValueError, match="padding='edge'; expected 'zero' or 'reflect'"):
        Transform(MEAN, STD, padding="edge")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"shape \(2, 1, 8, 8\); expected \(batch, 3, height"):
        Transform(MEAN, STD)(pictures(2, 8, 8, channels=1))
    with pytest.raises(ValueError, match="generator is on cpu, the images are on meta"):
        Transform(MEAN, STD).draw(pictures().to("meta"), torch.Generator())
    wide = Transform(MEAN, STD, Augment(pad=12), padding="reflect")
    with pytest.raises(ValueError, match="reflect padding of 12 needs pictures larger than 12"):
        wide(pictures(), wide.draw(pictures(), torch.Generator()))


def numbers(count: int) -> Dataset:
    return Dataset(torch.arange(count, dtype=torch.float32), torch.arange(count))


@pytest.mark.parametrize("size", [1, 3, 7, 10, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_example_comes_once(size: int, shuffle: bool) -> None:
    seen = list(batches(numbers(10), size, epoch_generator(0, 0), shuffle))
    assert torch.cat([y for _, y in seen]).sort().values.tolist() == list(range(10))
    assert all(torch.equal(x, y.float()) for x, y in seen)
    assert [len(y) for _, y in seen[:-1]] == [size] * (len(seen) - 1)


def test_drop_last_keeps_every_batch_full() -> None:
    seen = list(batches(numbers(10), 4, epoch_generator(0, 0), drop_last=True))
    assert [len(y) for _, y in seen] == [4, 4]


def test_an_epoch_is_repeated_from_two_numbers() -> None:
    def order(seed: int, epoch: int, stream: int = 0) -> list[int]:
        generator = epoch_generator(seed, epoch, stream=stream)
        return torch.cat([y for _, y in batches(numbers(50), 8, generator)]).tolist()

    first = [order(3, epoch) for epoch in range(4)]
    torch.rand(7)  # the global generator plays no part
    assert [order(3, epoch) for epoch in (2, 3)] == first[2:]
    different = [*first, order(4, 0), order(2, 1), order(3, 0, stream=1)]
    assert len({tuple(rows) for rows in different}) == len(different)


def test_bad_batches_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="batch_size=0; expected at least 1"):
        batches(numbers(4), 0, shuffle=False)
    with pytest.raises(ValueError, match="shuffle=True needs a generator"):
        batches(numbers(4), 2)
    with pytest.raises(ValueError, match="batch_size=5 and drop_last=True leave nothing of 4"):
        batches(numbers(4), 5, shuffle=False, drop_last=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_on_the_device_nothing_waits_for_the_host() -> None:
    images = pictures(64).cuda()
    transform = Transform(MEAN, STD, Augment(4, True, 4), channels_last=True).cuda()
    data = Dataset(images, torch.arange(64, device="cuda"))
    generator = epoch_generator(0, 0, "cuda")
    drawn = transform.draw(images, generator)
    expected = transform.cpu()(images.cpu(), Drawn(*(values.cpu() for values in drawn)))
    assert torch.allclose(transform.cuda()(images, drawn).cpu(), expected, atol=1e-6)
    order = epoch_generator(0, 0, "cuda", stream=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, _ in batches(data, 16, order):
            transform(x, transform.draw(x, generator))
    finally:
        torch.cuda.set_sync_debug_mode("default")
