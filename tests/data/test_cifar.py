"""CIFAR from small files in the published layout; downloads from a server of this machine."""

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from lpbnn import data
from lpbnn.data import cifar, svhn


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 50, 10 and 12 examples are whole."""
    monkeypatch.setattr(cifar, "TRAIN", 50)
    monkeypatch.setattr(cifar, "TEST", 10)
    monkeypatch.setattr(svhn, "ROWS", 12)


pytestmark = pytest.mark.usefixtures("few")


def batch(rows: int, seed: int, classes: int = 10) -> dict[bytes, object]:
    random = np.random.RandomState(seed)
    labels = random.randint(0, classes, rows).tolist()
    pixels = random.randint(0, 256, (rows, 3072)).astype(np.uint8)
    return {
        b"data": pixels,
        b"labels" if classes == 10 else b"fine_labels": labels,
        b"filenames": [b"a.png"] * rows,
    }


def dump(path: Path, content: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))


def write_cifar10(root: Path, protocol: int = 2) -> Path:
    folder = root / "cifar-10-batches-py"
    for number in range(1, 6):
        dump(folder / f"data_batch_{number}", batch(10, number), protocol)
    dump(folder / "test_batch", batch(10, 6), protocol)
    return folder


def write_cifar100(root: Path) -> Path:
    folder = root / "cifar-100-python"
    dump(folder / "train", batch(50, 1, classes=100))
    dump(folder / "test", batch(10, 2, classes=100))
    return folder


def write_svhn(root: Path, rows: int = 12) -> None:
    path = svhn.path_of(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": np.zeros((32, 32, 3, rows), np.uint8), "y": np.ones((rows, 1), np.uint8)})


def small(root: Path, name: str = "cifar10", **options: object) -> data.Splits:
    return data.load(name, root, **{"checksum": "any", **options})


@pytest.mark.parametrize("protocol", range(6))
def test_cifar10_is_read_in_order(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path, protocol)
    write_svhn(tmp_path)
    splits = small(tmp_path)
    expected = np.concatenate([np.asarray(batch(10, n)[b"data"]) for n in range(1, 6)])
    labels = np.concatenate([np.asarray(batch(10, n)[b"labels"]) for n in range(1, 6)])
    assert torch.equal(splits.train.inputs, torch.from_numpy(expected).view(50, 3, 32, 32))
    assert splits.train.targets.tolist() == labels.tolist()
    assert splits.train.inputs.dtype == torch.uint8
    assert splits.train.targets.dtype == torch.int64
    assert (len(splits.val), len(splits.test), len(splits.ood["svhn"])) == (0, 10, 12)
    assert splits.ood["svhn"].targets.unique().tolist() == [data.NOT_A_CLASS]
    assert (splits.num_classes, splits.classes[3], splits.augment.cutout) == (10, "cat", 16)
    assert "a copy" in splits.description


def test_cifar100_reads_the_fine_labels(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    splits = small(tmp_path, "cifar100")
    assert splits.train.targets.tolist() == batch(50, 1, classes=100)[b"fine_labels"]
    assert (splits.num_classes, len(splits.classes), splits.augment.cutout) == (100, 100, 8)


def test_without_svhn_the_splits_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_cifar10(tmp_path)
    with caplog.at_level(logging.WARNING):
        splits = small(tmp_path)
    assert splits.ood == {}
    assert "no out-of-distribution part" in splits.description
    assert "test_32x32.mat is missing" in caplog.text


def test_a_broken_svhn_is_an_error(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_svhn(tmp_path, rows=11)
    with pytest.raises(ValueError, match=r"\(32, 32, 3, 11\)"):
        small(tmp_path)


def test_validation_is_held_out_once_for_all(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole, one, two = small(tmp_path), small(tmp_path, val=20), small(tmp_path, val=20)
    assert (len(one.train), len(one.val), len(one.test)) == (30, 20, 10)
    assert torch.equal(one.val.inputs, two.val.inputs)
    order = torch.from_numpy(np.random.RandomState(0).permutation(50))
    assert torch.equal(one.val.inputs, whole.train.inputs[order[-20:]])
    assert torch.equal(one.train.inputs, whole.train.inputs[order[:-20]])
    assert torch.equal(one.test.inputs, whole.test.inputs)


def test_settings_are_chosen_without_the_test_set(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    usual, choosing = small(tmp_path, val=20), small(tmp_path, val=20, measure="val")
    assert torch.equal(choosing.test.inputs, usual.val.inputs)
    assert torch.equal(choosing.test.targets, usual.val.targets)
    assert torch.equal(choosing.train.inputs, usual.train.inputs)
    assert len(choosing.val) == 0
    assert "not on the test set" in choosing.description
    assert "not on the test set" not in usual.description
    for options in ({"measure": "val"}, {"measure": "train", "val": 20}):
        with pytest.raises(ValueError, match=r"expected 'test', or 'val' and some images"):
            small(tmp_path, **options)


@pytest.mark.parametrize("val", [-1, 50, 60])
def test_a_validation_part_that_leaves_nothing_is_refused(tmp_path: Path, val: int) -> None:
    with pytest.raises(ValueError, match=rf"val={val}; expected 0 <= val < 50"):
        small(tmp_path, val=val)


def test_a_file_without_the_published_md5_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"data_batch_1 .*has md5 .*published is c99c.*='any'"):
        data.load("cifar10", tmp_path)
    with pytest.raises(ValueError, match="checksum='none'; expected 'published' or 'any'"):
        small(tmp_path, checksum="none")


def test_the_published_number_of_rows_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"shape \(10, 3072\).*expected \(10000, 3072\)"):
        data.load("cifar10", tmp_path, checksum="any")


def test_a_truncated_batch_is_refused(tmp_path: Path) -> None:
    path = write_cifar10(tmp_path) / "data_batch_3"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"data_batch_3 cannot be read .*1,000 bytes.*cut short"):
        small(tmp_path)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_cifar10(tmp_path) / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_4; it holds data_batch_1"):
        small(tmp_path)


def test_a_missing_folder_says_what_is_there(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"batches-py is missing: .*holds cifar-100-python"):
        small(tmp_path)


def test_the_folder_itself_is_not_its_parent(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is that folder itself\. Give its parent as root"):
        small(folder)


def test_cifar100_is_not_cifar10(tmp_path: Path) -> None:
    write_cifar100(tmp_path).rename(tmp_path / "cifar-10-batches-py")
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_1.*it holds test, train"):
        small(tmp_path)
    for number in range(1, 6):
        dump(tmp_path / f"cifar-10-batches-py/data_batch_{number}", batch(10, 1, classes=100))
    dump(tmp_path / "cifar-10-batches-py/test_batch", batch(10, 1, classes=100))
    with pytest.raises(ValueError, match=r"needs 'data' and 'labels'\. That is a file of cifar100"):
        small(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"labels": [0] * 9}, r"labels of shape \(9,\).*expected 10 integers from 0 to 9"),
        ({b"labels": [10] * 10}, "expected 10 integers from 0 to 9"),
        ({b"labels": [-1] * 10}, "expected 10 integers from 0 to 9"),
        ({b"labels": [0.5] * 10}, "type float64; expected 10 integers"),
        ({b"data": np.zeros((10, 3072))}, "type float64; expected .* uint8"),
        ({b"data": np.zeros((10, 1024), np.uint8)}, r"\(10, 1024\)"),
    ],
)
def test_other_contents_are_refused(
    tmp_path: Path, change: dict[bytes, object], message: str
) -> None:
    path = write_cifar10(tmp_path) / "test_batch"
    dump(path, {**batch(10, 6), **change})
    with pytest.raises(ValueError, match=message):
        small(tmp_path)


def test_download_gets_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is asked from every host, checked, extracted; SVHN is fetched beside it."""
    author, root = tmp_path / "author", tmp_path / "root"
    folder = write_cifar10(author)
    write_svhn(author)
    asked: list[tuple[list[str], str]] = []

    def fetch(urls: list[str], checksum: str, target: Path, extract: bool = False) -> Path:
        asked.append((urls, checksum))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".mat":
            return svhn.path_of(author).rename(target)
        assert extract
        return folder.rename(target.parent / folder.name)

    monkeypatch.setattr(cifar, "fetch", fetch)
    monkeypatch.setattr(svhn, "fetch", fetch)
    splits = small(root, download=True)
    assert (len(splits.train), len(splits.ood["svhn"])) == (50, 12)
    (archive, archive_md5), (mat, _) = asked
    assert archive[0] == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert archive_md5 == "c58f30108f718f92721af3b95e74349a"
    assert mat == ["http://ufldl.stanford.edu/housenumbers/test_32x32.mat"]
    small(root, download=True)
    assert len(asked) == 2  # nothing is fetched twice


def test_constants_are_the_published_ones() -> None:
    ten, hundred = cifar.CIFAR10, cifar.CIFAR100
    assert (ten.mean, ten.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert (hundred.mean, hundred.std) == ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    assert hundred.archive_md5 == "eb9058c3a382ffc7106e4002c42a8d85"
    assert svhn.MD5 == "eb5a983be6a315427106f1b164d9cef3"
