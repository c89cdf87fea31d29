"""Benchmarks on a GPU: every mode has its rows, and memory is that of one model alone."""

from pathlib import Path

import pytest
import torch

from benchmarks import networks
from benchmarks.networks import METHODS, Record, measure
from lpbnn.bench import Mode, Setup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def quick(
    methods: tuple[str, ...],
    mode: Mode,
    members: tuple[int, ...] = (4,),
    path: Path | None = None,
) -> Record:
    setup = Setup("small-cnn", (3, 16, 16), batch=16, test_batch=16, mode=mode, repeats=3)
    return measure(setup, methods, members, path)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_eager_and_recorded(mode: Mode, tmp_path: Path) -> None:
    record = quick((*METHODS, "tradi"), mode, path=tmp_path / "bench.json")
    assert not record["failed"]
    assert len(record["rows"]) == 7
    for row in record["rows"]:
        assert row["size"]["train_bytes"] > 12 * row["size"]["parameters"]
    assert record["environment"]["device"] == torch.cuda.get_device_name()
    assert networks.read(tmp_path / "bench.json")["rows"] == record["rows"]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_for_several_sizes() -> None:
    """The second number of members must not be taken for one that changes from call to call."""
    record = quick(("lpbnn",), "compiled", (4, 2))
    assert not record["failed"]
    assert [row["case"]["members"] for row in record["rows"]] == [1, 4, 2]
    assert all("predict" in row for row in record["rows"])


def test_memory_is_that_of_one_model_alone() -> None:
    alone = quick(("lpbnn",), "graph")["rows"][-1]["size"]["train_bytes"]
    later = quick(("ensemble", "lpbnn"), "graph")["rows"][-1]["size"]["train_bytes"]
    assert later == pytest.approx(alone, rel=0.05)
