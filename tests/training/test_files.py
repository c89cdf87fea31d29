"""Nothing that happens while a file is written harms what was there before."""

import errno
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from lpbnn.atomic import write_atomic
from lpbnn.training import RunError, checkpoint, files
from lpbnn.training.rundir import RunDir


class FullDisk:
    """A file that takes some bytes and then no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        taken = self.file.write(bytes(data)[: self.room])
        self.room -= taken
        if taken < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_full(path: Path, mode: str = "r", *rest: Any) -> Any:
        file = opened(path, mode, *rest)
        return FullDisk(file, room=100) if "x" in mode else file

    monkeypatch.setattr(Path, "open", open_full)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")  # not through Path.open
    before = contents(tmp_path)
    with pytest.raises(
        RunError, match=r"\(1,000 bytes\) could not be written: the disk is full"
    ) as e:
        write_atomic(tmp_path / "a", bytes(1000))
    assert "What was there before is untouched" in str(e.value)
    assert contents(tmp_path) == before  # nor is a half-written file left lying about


def test_a_limit_of_the_system_is_met_the_same_way(tmp_path: Path) -> None:
    """No simulation: the kernel itself cuts the write short."""
    path = tmp_path / "a"
    write_atomic(path, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match="could not be written"):
            write_atomic(path, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == {"a": b"before"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_any_interruption_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    write_atomic(tmp_path / "a", b"before")

    def stop(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(error):
        write_atomic(tmp_path / "a", b"after")
    assert contents(tmp_path) == {"a": b"before"}


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"before")
    with path.open("rb") as reading:
        write_atomic(path, b"after it")
        assert reading.read() == b"before"  # replaced as a whole, not written over
    assert path.read_bytes() == b"after it"


def test_numbers_that_json_lacks_become_null() -> None:
    text = files.to_json({"a": [float("nan"), 1.5], "b": (float("inf"),)})
    assert files.from_json(text, Path("a.json")) == {"a": [None, 1.5], "b": [None]}


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"epochs": 1')
    with pytest.raises(RunError, match="bad.json is damaged: it is no JSON"):
        RunDir(tmp_path).read_json("bad.json")
    with pytest.raises(RunError, match="has no config.json; it holds bad.json"):
        RunDir(tmp_path).read_json("config.json")
    with pytest.raises(RunError, match="nowhere does not exist"):
        RunDir(tmp_path / "nowhere").read_json("config.json")
    with pytest.raises(RunError, match="bad.json is a file; expected the folder of a run"):
        RunDir(tmp_path / "bad.json").read_json("config.json")


class Tied(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.register_buffer("part", self.one.bias.detach()[:2])  # a view of another's storage
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("steps", torch.tensor(3))


def test_shared_tensors_are_kept_once_and_come_back(tmp_path: Path) -> None:
    model, folder = Tied(), RunDir(tmp_path)
    folder.save_weights(model)
    other = Tied()
    folder.load_weights(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.two.weight is other.one.weight
    stored = folder.state_dict()
    assert stored["one.weight"].data_ptr() == stored["two.weight"].data_ptr()


def test_weights_of_another_architecture_are_named(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.save_weights(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(RunError) as error:
        folder.load_weights(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    text = str(error.value)
    assert "another architecture; 6 entries do not fit" in text
    assert "0.weight: (3, 3) there, (4, 3) here" in text
    assert "; and 3 more" in text
    with pytest.raises(RunError, match="1.weight: unknown here"):
        folder.load_weights(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize("keep", [0, 5, 60, -10])
def test_cut_short_weights_are_told(tmp_path: Path, keep: int) -> None:
    data = checkpoint.to_safetensors(nn.Linear(9, 9).state_dict())
    (tmp_path / "weights.safetensors").write_bytes(data[:keep])
    with pytest.raises(RunError, match="damaged or cut short"):
        RunDir(tmp_path).load_weights(nn.Linear(9, 9))


@pytest.mark.parametrize(
    "aliases", ["[]", "null", "3", '"x"', '{"a": []}', '{"a": "b"}', "[" * 10**4, "{", "NaN"]
)
def test_weights_with_odd_names_of_shared_tensors_are_told(tmp_path: Path, aliases: str) -> None:
    state = nn.Linear(2, 2).state_dict()
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors", {"aliases": aliases})
    with pytest.raises(RunError, match="damaged or cut short"):
        RunDir(tmp_path).state_dict()


def test_a_packed_checkpoint_is_told_before_it_takes_memory(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(2**20)}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "checkpoint.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(RunError, match=r"4,19\d,\d+ bytes when unpacked"):
        RunDir(tmp_path).checkpoint()


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, ("touch " + str(tmp_path / "ran"),))

    torch.save({"model": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(RunError, match="checkpoint.pt is damaged"):
        RunDir(tmp_path).checkpoint()
    assert not (tmp_path / "ran").exists()


def test_arrays_are_kept_without_pickles(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    arrays = {"a/b": np.arange(3), "names": np.array(["x", "yy"]), "one": np.array("layer")}
    folder.write_arrays(arrays)
    for name, array in folder.arrays().items():
        np.testing.assert_array_equal(array, arrays[name])
    with pytest.raises(TypeError, match="bad: expected numbers or strings"):
        folder.write_arrays({"bad": np.array([None])})
    folder.write("predictions.npz", (tmp_path / "predictions.npz").read_bytes()[:50])
    with pytest.raises(RunError, match="predictions.npz is damaged"):
        folder.arrays()


def test_the_log_keeps_terms_that_come_and_go(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    rows = [
        {"epoch": 1, "loss": 0.1 + 0.2, "seconds": 1.0},
        {"epoch": 2, "loss": float("nan"), "kl": 1e-30, "seconds": 2.0},
    ]
    folder.write_log(rows)
    header = (tmp_path / "log.csv").read_text().splitlines()[0]
    assert header == "epoch,loss,kl,seconds"
    first, second = folder.log()
    assert first == rows[0]  # to the last digit
    assert second["kl"] == 1e-30
    assert folder.log(epochs=1) == rows[:1]
    folder.write("log.csv", b"epoch,loss\nx,1\n")
    with pytest.raises(RunError, match="log.csv is damaged"):
        folder.log()


def test_channels_last_is_the_layout_of_every_tensor_of_four_dimensions() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    net.register_buffer("stack", torch.randn(2, 3, 4, 5))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    checkpoint.channels_last(net)
    for tensor in (net[0].weight, net.stack):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert net[2].weight.is_contiguous()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
