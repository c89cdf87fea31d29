"""Benchmarks time methods in turn with the plain network, and count the memory of one model alone."""

from typing import Any

import pytest
import torch

from benchmarks.measure import Bench, PeakMemory, Row, ratio
from benchmarks.setup import Setup
from lpbnn.training import step


def setup(**changes: Any) -> Setup:
    settings = {"backbone": "small-cnn", "input": (3, 8, 8), "batch": 4, "repeats": 2}
    return Setup(**(settings | {"device": "cpu", "mode": "eager"} | changes))


def measure(*cases: tuple[str, int], **changes: Any) -> list[Row]:
    with Bench(setup(**changes)) as measured:
        return [measured.measure(*case) for case in cases]


def test_ratios_are_of_medians_in_the_same_repeats() -> None:
    times = {"own": {"times": [1.0, 9.0, 2.0]}, "reference": {"times": [1.0, 1.0, 7.0]}}
    assert ratio({"train": times}, "train") == 2
    assert ratio({"train": times}, "predict") is None


def test_costs_of_methods() -> None:
    plain, ours, ensemble = measure(("mcp", 1), ("lpbnn", 2), ("ensemble", 2))
    for row in (plain, ours, ensemble):
        for what in ("train", "predict"):
            assert all(len(found["times"]) == 2 for found in row[what].values())
    assert ratio(plain, "train") == 1
    assert ratio(ensemble, "parameters") == 2
    assert 1.7 < (ratio(ensemble, "train_bytes") or 0) < 2.1
    assert 1 < (ratio(ours, "train_bytes") or 0) < 2
    assert ours["reference"] == plain["size"]


@pytest.mark.slow
def test_memory_is_that_of_one_model_alone() -> None:
    alone = measure(("lpbnn", 2))[-1]
    later = measure(("ensemble", 8), ("lpbnn", 2))[-1]
    for what in ("train_bytes", "predict_bytes"):
        assert alone["size"][what] == later["size"][what]


def test_generators_and_threads_are_left_as_they_were() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    small = {"backbone": "mlp", "input": (5,), "predict": False}  # too small to wait for threads
    measure(("batchensemble", 2), threads=threads + 1, **small)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_a_compiled_step_needs_no_eager_pass_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the first batch is off here: the compiler sees the slot of the pass first."""
    monkeypatch.setattr(step, "compiled", lambda loss, *_: torch.compile(loss, backend="eager"))
    row = measure(("lpbnn", 2), mode="compiled", predict=False)[0]
    assert row["case"]["mode"] == "compiled"
    assert "train_bytes" not in row["size"]  # on a CPU nobody counts what compiled code allocates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 1}, "repeats is 1; expected at least 2"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"samples": 0}, "samples is 0; expected at least 1"),
        ({"backbone": "nope"}, "unknown backbone 'nope'"),
        ({"input": ()}, "expected a shape"),
        ({"batch": 0}, "at least one example"),
        ({"mode": "graph"}, "needs a GPU"),
        ({"memory_budget": 1.5, "mode": "compiled"}, "memory_budget is 1.5"),
        ({"memory_budget": 0.9}, "memory_budget is 0.9 without compile"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="finds no CUDA device"):
        setup(device="cuda")


def test_peak_memory_starts_again_after_a_reset() -> None:
    with PeakMemory() as meter:
        kept = torch.zeros(16)
        torch.zeros(1024)
        meter.reset()
        torch.zeros(32)
    assert meter.peak == 4 * (16 + 32)
    assert meter.alive == kept.untyped_storage().nbytes()
