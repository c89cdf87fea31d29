"""Pictures in files: the same examples as in memory, bounded memory, and errors that name the file."""

import gc
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import streets
import torch
from PIL import Image

from lpbnn.data import Dataset, files
from lpbnn.data.augment import batch_indices, epoch_generator
from lpbnn.data.files import AHEAD, FileDataset, LabelMaps, read_image


def maps_of(data: FileDataset) -> tuple[Path, ...]:
    assert isinstance(data.targets, LabelMaps)
    return data.targets.paths


def dataset(folder: Path, count: int = 9, size: tuple[int, int] = streets.SIZE) -> FileDataset:
    images = tuple(folder / f"{i:03}.png" for i in range(count))
    labels = tuple(folder / "labels" / f"{i:03}.png" for i in range(count))
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        streets.write_pair(image, label, streets.ids(i, [0, 1, 2, 255], size))
    return FileDataset(images, LabelMaps(labels, size), (3, *size))


def test_an_index_gives_what_memory_would_give(tmp_path: Path) -> None:
    lazy = dataset(tmp_path)
    whole = lazy.take(slice(None))
    assert isinstance(whole, Dataset)
    assert len(whole) == len(lazy) == 9
    assert whole.inputs.dtype == whole.targets.dtype == torch.uint8  # a byte per label
    assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype) == ((3, 12, 16), torch.uint8)
    indices = (3, -1, slice(2, 5), slice(None, None, 4), torch.tensor([8, 0, 0]), torch.arange(0))
    for index in indices:
        for one, other in zip(lazy[index], whole[index], strict=True):
            assert torch.equal(one, other)
        assert lazy[index][1].dtype == torch.int64
    assert lazy.class_counts(3) == whole.class_counts(3)
    for number, label in enumerate(maps_of(lazy)):
        assert torch.equal(lazy[number][1], torch.from_numpy(np.array(Image.open(label))).long())


@pytest.mark.parametrize("size", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_the_order_asked_for(
    tmp_path: Path, size: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WORKERS", workers)
    lazy = dataset(tmp_path)
    whole = lazy.take(slice(None))
    read, expected = (
        list(d.stream(batch_indices(len(d), size, epoch_generator(0, 3)))) for d in (lazy, whole)
    )
    assert len(read) == len(expected)
    for (x, y), (x_whole, y_whole) in zip(read, expected, strict=True):
        assert torch.equal(x, x_whole)
        assert torch.equal(y, y_whole)


def test_a_data_loader_takes_it(tmp_path: Path) -> None:
    lazy = dataset(tmp_path)
    x, y = next(iter(torch.utils.data.DataLoader(lazy, batch_size=4)))
    assert torch.equal(x, lazy[:4][0])
    assert torch.equal(y, lazy[:4][1])


@pytest.mark.parametrize(("workers", "ahead"), [(1, AHEAD), (2, AHEAD), (8, 4)])
def test_it_reads_no_further_ahead_than_it_says(
    tmp_path: Path, workers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches, or, of two pictures each, as many as eight threads can decode."""
    monkeypatch.setattr(files, "WORKERS", workers)
    lazy = dataset(tmp_path, count=40)
    started, lock = [0], threading.Lock()
    read = FileDataset.read_into

    def counted(self: FileDataset, place: int, x: torch.Tensor, y: torch.Tensor) -> None:
        with lock:
            started[0] += 1
        read(self, place, x, y)

    monkeypatch.setattr(FileDataset, "read_into", counted)
    for number, _ in enumerate(lazy.stream(batch_indices(len(lazy), 2)), start=1):
        assert started[0] <= 2 * (number + ahead)
    assert started[0] == 40


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what decoding needs nor how many batches are alive."""
    monkeypatch.setattr(files, "WORKERS", 2)
    peaks, alive = [], set()
    for count in (8, 64):
        lazy = dataset(tmp_path / str(count), count, (64, 64))
        tracemalloc.start()
        for _ in lazy.stream(batch_indices(len(lazy), 2)):
            if count == 8:  # which looks at every object there is
                alive.add(sum(type(o) is files._Batch for o in gc.get_objects()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(alive) <= AHEAD + 1
    assert peaks[1] < peaks[0] + 200_000  # 56 more pictures are 900 kB, decoded


def test_leaving_the_loop_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    stream = dataset(tmp_path, count=30).stream(list(torch.arange(30).split(2)))
    next(stream)
    assert threading.active_count() > before
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_broken_file_is_named_in_the_loop(tmp_path: Path) -> None:
    lazy = dataset(tmp_path)
    lazy.images[7].write_bytes(lazy.images[7].read_bytes()[:80])
    seen = []
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"007.png cannot be read: damaged, or no image"):
        seen.extend(len(y) for _, y in lazy.stream(batch_indices(len(lazy), 2)))
    assert seen == [2, 2, 2]
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_examples_arrive_on_the_device_through_pinned_memory(tmp_path: Path) -> None:
    lazy = dataset(tmp_path, count=30)
    assert files._Batch(lazy.to("cuda"), torch.tensor([0]), files._threads()).x.is_pinned()
    found = list(lazy.to("cuda").stream(batch_indices(len(lazy.to("cuda")), 4)))
    for (x, y), (x_cpu, y_cpu) in zip(found, lazy.stream(batch_indices(len(lazy), 4)), strict=True):
        assert x.device.type == y.device.type == "cuda"
        assert torch.equal(x.cpu(), x_cpu)
        assert torch.equal(y.cpu(), y_cpu)


# --- conversions and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_other_kinds_of_pictures_become_rgb(tmp_path: Path, mode: str) -> None:
    lazy = dataset(tmp_path, 1)
    grey = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(streets.SIZE))
    picture = grey.convert("RGB").convert(mode)
    ending = ".tif" if mode == "CMYK" else ".png"
    path = tmp_path / f"other{ending}"
    picture.save(path)
    x, _ = FileDataset((path,), lazy.targets, (3, *streets.SIZE))[0]
    assert x.dtype == torch.uint8
    expected = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(x, expected)
    if mode in ("L", "LA"):
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], torch.from_numpy(np.array(grey)))


def test_transparency_is_dropped_and_a_palette_may_have_some(tmp_path: Path) -> None:
    colours = np.random.RandomState(0).randint(0, 256, (*streets.SIZE, 4), dtype=np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(colours).save(path)
    assert np.array_equal(files.read_picture(path, streets.SIZE, streets.SIZE), colours[..., :3])
    palette = Image.fromarray(colours[..., :3]).quantize(16)
    palette.save(path, transparency=bytes([0, 128] + [255] * 14))
    assert files.read_picture(path, streets.SIZE, streets.SIZE).shape == (*streets.SIZE, 3)


def test_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.full(streets.SIZE, 40_000, np.uint16)).save(path)
    with pytest.raises(ValueError, match=r"deep.png has pixels of more than 8 bits \(mode 'I;16"):
        files.read_picture(path, streets.SIZE, streets.SIZE)
    with pytest.raises(ValueError, match=r"deep.png has pixels of more than 8 bits"):
        read_image(path, (1, 8, 8))


@pytest.mark.parametrize("mode", ["L", "P", "I", "1"])
def test_label_maps_of_every_kind_give_their_ids(tmp_path: Path, mode: str) -> None:
    found = streets.ids(0, [0, 1])
    path = tmp_path / ("map.tif" if mode == "I" else "map.png")
    if mode == "P":
        picture = Image.fromarray(found, mode="L").convert("P")
        picture.putpalette([200, 10, 10, 10, 200, 10])
    else:
        picture = Image.fromarray(found * (255 if mode == "1" else 1)).convert(mode)
    picture.save(path)
    labels = files.read_labels(path, streets.SIZE, streets.SIZE, files.SAME)
    assert np.array_equal(labels, found)
    assert files.count_ids([path])[0, :2].tolist() == np.bincount(found.ravel()).tolist()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_coloured_label_maps_are_refused(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "coloured.png"
    Image.fromarray(streets.ids(0, [0, 1])).convert(mode).save(path)
    with pytest.raises(ValueError, match=rf"coloured.png is a picture of mode '{mode}'; .* ids"):
        files.read_labels(path, streets.SIZE, streets.SIZE, files.SAME)
    with pytest.raises(ValueError, match=r"coloured.png .* one class id per pixel"):
        files.header(path, label=True)


def test_ids_beyond_a_byte_are_not_wrapped_around(tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    wide = streets.ids(0, [0, 1]).astype(np.uint16)
    wide[0, 0] = 256  # 0, if only its lower byte were read
    Image.fromarray(wide).save(path)
    for read in (
        lambda: files.read_labels(path, streets.SIZE, streets.SIZE, files.SAME),
        lambda: files.count_ids([path]),
    ):
        with pytest.raises(ValueError, match=r"wide.png holds the label ids 256, which no class"):
            read()


def test_a_file_that_changed_its_size_is_refused(tmp_path: Path) -> None:
    lazy = dataset(tmp_path, 2)
    Image.new("L", (5, 4)).save(maps_of(lazy)[1])
    with pytest.raises(ValueError, match=r"001.png is 5x4 now; it was 16x12 when"):
        lazy[1]


def test_resizing_is_smooth_for_pictures_and_exact_for_labels(tmp_path: Path) -> None:
    half = replace(dataset(tmp_path, 2), size=(3, 6, 8))
    x, y = half[0]
    assert half.shape == (3, 6, 8)
    assert x.shape == (3, 6, 8)
    assert set(y.unique().tolist()) <= {0, 1, 2, 255}
    whole = np.array(Image.open(maps_of(half)[0]))
    assert np.array_equal(y, whole[1::2, 1::2])


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_file_cut_short_is_found_by_its_end(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"cut.{ending}"
    colours = np.random.RandomState(0).randint(0, 256, (200, 100, 3), dtype=np.uint8)
    Image.fromarray(colours).save(path)
    assert files.header(path).size == (200, 100)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 20)  # harmless
    assert files.header(path).size == (200, 100)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"cut.{ending} cannot be read: damaged"):
        files.header(path)
