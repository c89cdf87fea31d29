"""Benchmarks on a GPU: every mode has its rows, and memory is that of one model alone."""

from pathlib import Path

import pytest
import torch

from benchmarks import records
from benchmarks.__main__ import main
from benchmarks.networks import METHODS, Plan, measure
from lpbnn.training.bench_options import Mode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def quick(
    methods: tuple[str, ...], modes: tuple[Mode, ...], members: tuple[int, ...] = (4,)
) -> Plan:
    return Plan(
        ("small-cnn",), methods, members, modes, repeats=3, image=(16, 16), batch=16, test_batch=16
    )


def test_eager_and_recorded() -> None:
    record = measure(quick((*METHODS, "tradi"), ("eager", "graph")))
    assert not record["failed"]
    assert len(record["rows"]) == 2 * 7
    for row in record["rows"]:
        assert ("predict" in row) == (row["case"]["mode"] != "graph")
        assert row["size"]["train_bytes"] > 12 * row["size"]["parameters"]
    assert record["environment"]["device"] == torch.cuda.get_device_name()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_for_several_sizes() -> None:
    """The second number of members must not be taken for one that changes from call to call."""
    record = measure(quick(("lpbnn",), ("compiled",), (4, 2)))
    assert not record["failed"]
    assert [row["case"]["members"] for row in record["rows"]] == [1, 4, 2]
    assert all("predict" in row for row in record["rows"])


def test_memory_is_that_of_one_model_alone() -> None:
    alone = measure(quick(("lpbnn",), ("graph",)))["rows"][-1]["size"]["train_bytes"]
    later = measure(quick(("ensemble", "lpbnn"), ("graph",)))["rows"][-1]["size"]["train_bytes"]
    assert alone is not None
    assert later == pytest.approx(alone, rel=0.05)


def test_draws(tmp_path: Path) -> None:
    path = tmp_path / "draws.json"
    choice = ("--backbone", "small-cnn", "--samples", "4", "--images", "64", "--repeats", "2")
    main(["draws", *choice, "--json", str(path)])
    assert path.exists()


def test_a_record_of_a_gpu_is_read_again(tmp_path: Path) -> None:
    record = measure(quick(("lpbnn",), ("eager",)))
    records.write(record, tmp_path / "bench.json")
    assert records.read(tmp_path / "bench.json")["rows"] == record["rows"]
