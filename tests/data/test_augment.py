"""Augmentation against a slow reference, pixel by pixel, and batches that can be repeated."""

from math import floor

import pytest
import torch
from torch import Tensor

from lpbnn.data import Augment
from lpbnn.data.augment import LUMA, Chance, Padding, Transform, batch_indices, epoch_generator

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
VOID = 255
SIZE = (9, 12)


def scenes(batch: int = 6) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (batch, 3, *SIZE), dtype=torch.uint8)
    return images, torch.randint(0, 7, (batch, *SIZE))


def reference(
    transform: Transform, image: Tensor, labels: Tensor, chance: list[float]
) -> tuple[Tensor, Tensor]:
    """One picture at a time, as one would say it."""
    u = dict(zip(Chance._fields, chance, strict=True))
    pad, flip, cutout, (low, high), crop, colour = transform.augment
    (rows, columns), (height, width) = SIZE, (c or s for c, s in zip(crop, SIZE, strict=True))
    factor = low * (high / low) ** u["scale"]

    def start(chance: float, size: int, window: int) -> int:
        room = factor * size + 2 * pad - window
        steps = floor(chance * (floor(abs(room)) + 1))
        return (steps if room > 0 else -steps) - pad

    def inside(place: float, size: int) -> tuple[float, bool]:
        if transform.padding == "reflect":
            while not 0 <= place <= size - 1:
                place = -place if place < 0 else 2 * (size - 1) - place
            return place, True
        return min(max(place, 0.0), size - 1.0), -0.5 <= place < size - 0.5

    top, left = start(u["top"], rows, height), start(u["left"], columns, width)
    pixels = torch.zeros(3, height, width)
    found = torch.full((height, width), VOID)
    shown = torch.zeros(height, width, dtype=torch.bool)
    for i in range(height):
        for j in range(width):
            column = width - 1 - j if flip and u["flip"] < 0.5 else j
            y, inside_y = inside((i + top + 0.5) / factor - 0.5, rows)
            x, inside_x = inside((column + left + 0.5) / factor - 0.5, columns)
            if inside_y and inside_x:
                shown[i, j] = True
                found[i, j] = labels[floor(y + 0.5), floor(x + 0.5)]
                above, before = floor(y), floor(x)
                below, after = min(above + 1, rows - 1), min(before + 1, columns - 1)
                dy, dx = y - above, x - before
                pixels[:, i, j] = (
                    image[:, above, before] * (1 - dy) * (1 - dx)
                    + image[:, above, after] * (1 - dy) * dx
                    + image[:, below, before] * dy * (1 - dx)
                    + image[:, below, after] * dy * dx
                ) / 255
    luma = torch.tensor(LUMA).view(3, 1, 1)
    strengths = [1 + colour * (2 * u[k] - 1) for k in ("brightness", "contrast", "saturation")]
    pixels = (pixels * strengths[0]).clamp(0, 1)
    grey = (pixels * luma).sum(0)[shown].mean()
    pixels = (grey + strengths[1] * (pixels - grey)).clamp(0, 1)
    grey = (pixels * luma).sum(0)
    pixels = (grey + strengths[2] * (pixels - grey)).clamp(0, 1)
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    if cutout:
        first = [floor(u["row"] * height) - cutout // 2, floor(u["column"] * width) - cutout // 2]
        row, column = (slice(max(f, 0), max(f + cutout, 0)) for f in first)
        shown[row, column] = False
    return pixels * shown, found


@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize(
    "augment",
    [
        Augment(),
        Augment(flip=True),
        Augment(pad=2, flip=True),
        Augment(pad=4, cutout=5),
        Augment(cutout=4),
        Augment(colour=0.4),
        Augment(scale=(0.5, 2.0)),
        Augment(crop=(5, 6)),
        Augment(crop=(14, 20)),
        Augment(scale=(0.3, 0.7), crop=(6, 20)),
        Augment(1, True, 3, (0.5, 2.0), (7, 11), 0.3),
    ],
)
def test_every_pixel_is_the_references(augment: Augment, padding: Padding) -> None:
    transform = Transform(MEAN, STD, augment, padding, VOID)
    images, labels = scenes()
    chance = transform.draw(images, torch.Generator().manual_seed(1))
    x, y = transform(images, labels, chance)
    assert y is not None
    assert y.dtype == torch.int64
    for number in range(len(images)):
        numbers = [float(values[number]) for values in chance]
        pixels, found = reference(transform, images[number], labels[number], numbers)
        assert torch.equal(y[number], found)
        assert torch.allclose(x[number], pixels, atol=2e-5)


def test_nothing_to_do_changes_nothing() -> None:
    images, labels = scenes()
    transform = Transform(MEAN, STD, Augment(), void=VOID)
    x, y = transform(images, labels, transform.draw(images, torch.Generator()))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    assert torch.equal(x, (images.float() / 255 - mean) / std)
    assert torch.equal(y, labels)


def test_labels_are_never_mixed_and_void_stays_void() -> None:
    images, labels = scenes(32)
    labels[:, :4] = VOID
    transform = Transform(MEAN, STD, Augment(2, True, 3, (0.4, 2.5), (8, 9), 0.3), void=VOID)
    _, y = transform(images, labels * 30 % 256, transform.draw(images, torch.Generator()))
    assert set(y.unique().tolist()) <= {*(torch.arange(7) * 30).tolist(), VOID, VOID * 30 % 256}


def test_the_draws_cover_their_ranges() -> None:
    transform = Transform(MEAN, STD, Augment(scale=(0.5, 2.0)), void=VOID)
    chance = transform.draw(scenes()[0], torch.Generator().manual_seed(0), batch=20_000)
    assert all(values.shape == (20_000,) for values in chance)
    factor = 0.5 * 4**chance.scale
    assert (factor < 1).float().mean() == pytest.approx(0.5, abs=0.02)  # as often halved as doubled
    correlation = torch.corrcoef(torch.stack(list(chance)).double())
    assert (correlation - torch.eye(len(chance))).abs().max() < 0.03


def test_a_window_is_found_anywhere_in_the_picture_and_nowhere_else() -> None:
    images = torch.zeros(4000, 1, *SIZE, dtype=torch.uint8)
    labels = torch.arange(SIZE[0] * SIZE[1]).view(SIZE).expand(4000, *SIZE)
    transform = Transform([0.5], [0.5], Augment(crop=(4, 5)), void=VOID)
    _, y = transform(images, labels, transform.draw(images, torch.Generator().manual_seed(0)))
    assert y is not None
    corners = y[:, 0, 0].bincount(minlength=SIZE[0] * SIZE[1]).view(SIZE)
    assert (corners[:6, :8] > 0).all()
    assert corners[:6, :8].sum() == 4000


def test_crops_do_not_depend_on_colour_and_cutout() -> None:
    images, labels = scenes()
    plain, rich = (
        Augment(scale=(0.5, 2.0), crop=(6, 6)),
        Augment(0, False, 3, (0.5, 2.0), (6, 6), 0.3),
    )
    found = []
    for augment in (plain, rich):
        transform = Transform(MEAN, STD, augment, void=VOID)
        chance = transform.draw(images, torch.Generator().manual_seed(2))
        found.append(transform(images, labels, chance)[1])
    assert torch.equal(*found)


def test_layout_is_as_asked_and_grey_pictures_are_taken() -> None:
    images = torch.randint(0, 256, (2, 1, *SIZE), dtype=torch.uint8)
    transform = Transform([0.5], [0.5], Augment(colour=0.5, flip=True), channels_last=True)
    x, y = transform(images, None, transform.draw(images, torch.Generator()))
    assert y is None
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.shape == images.shape


def test_pixels_that_only_move_stay_exactly_what_they_were() -> None:
    images, _ = scenes(32)
    transform = Transform([0.0] * 3, [1 / 255] * 3, Augment(pad=3, flip=True))
    x, _ = transform(images, None, transform.draw(images, torch.Generator()))
    for moved, image in zip(x, images, strict=True):
        wide = torch.nn.functional.pad(image.float(), (3, 3, 3, 3))
        windows = wide.unfold(1, SIZE[0], 1).unfold(2, SIZE[1], 1).flatten(1, 2).movedim(1, 0)
        both = torch.cat([windows, windows.flip(-1)])
        assert (both - moved).abs().flatten(1).amax(1).min() < 1e-4


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_applying_compiles_to_one_graph(padding: Padding) -> None:
    torch.compiler.reset()
    images, _ = scenes()
    transform = Transform(MEAN, STD, Augment(4, True, 4), padding)
    chance = transform.draw(images, torch.Generator())
    compiled = torch.compile(transform, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images, None, chance)[0], transform(images, None, chance)[0])


def test_the_whole_module_moves_but_saves_nothing() -> None:
    transform = Transform(MEAN, STD).to("meta")
    assert transform.normalise.mean.device.type == "meta"
    assert transform.state_dict() == {}


def test_pictures_of_other_channels_are_refused() -> None:
    grey, chance = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), Chance(*torch.zeros(9, 2))
    with pytest.raises(ValueError, match=r"shape \(2, 1, 8, 8\); expected \(batch, 3, height"):
        Transform(MEAN, STD)(grey, None, chance)


@pytest.mark.parametrize("size", [1, 3, 7, 10, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_example_comes_once(size: int, shuffle: bool) -> None:
    parts = batch_indices(10, size, epoch_generator(0, 0) if shuffle else None)
    assert torch.cat(parts).sort().values.tolist() == list(range(10))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)


def test_drop_last_keeps_every_batch_full() -> None:
    parts = batch_indices(10, 4, epoch_generator(0, 0), drop_last=True)
    assert [len(part) for part in parts] == [4, 4]


def test_an_epoch_is_repeated_from_two_numbers() -> None:
    def order(seed: int, epoch: int, stream: int = 0) -> list[int]:
        return torch.cat(batch_indices(50, 8, epoch_generator(seed, epoch, stream=stream))).tolist()

    first = [order(3, epoch) for epoch in range(4)]
    torch.rand(7)  # the global generator plays no part
    assert [order(3, epoch) for epoch in (2, 3)] == first[2:]
    different = [*first, order(4, 0), order(2, 1), order(3, 0, stream=1)]
    assert len({tuple(rows) for rows in different}) == len(different)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_on_the_device_nothing_waits_for_the_host() -> None:
    images, labels = (part.cuda() for part in scenes())
    transform = Transform(
        MEAN, STD, Augment(1, True, 3, (0.5, 2.0), (7, 11), 0.3), void=VOID
    ).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    transform(images, labels, transform.draw(images, generator))
    torch.cuda.set_sync_debug_mode("error")
    try:
        chance = transform.draw(images, generator)
        x, y = transform(images, labels, chance)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x_cpu, y_cpu = transform.cpu()(images.cpu(), labels.cpu(), Chance(*(u.cpu() for u in chance)))
    assert y is not None
    assert torch.allclose(x.cpu(), x_cpu, atol=1e-4)
    assert torch.equal(y.cpu(), y_cpu)
