"""Runs that share a GPU: one at a time has it, waiting is not training, and a turn always ends."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lpbnn.data import Splits
from lpbnn.training import RunConfig, turns
from lpbnn.training import run as run_module
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.run import run
from lpbnn.training.rundir import RunDir
from lpbnn.training.train import _Loop, fit

pytest.importorskip("fcntl", reason="needs POSIX locks")
Make = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(turns.TURNS, str(tmp_path / "turns"))
    yield tmp_path / "turns"
    assert not turns._held


def work(log: Path, name: str) -> None:
    with turns.until_the_end():
        turns.take()
        with log.open("a") as file:
            file.write(f"{name} begins\n")
            file.flush()
            time.sleep(0.2)
            file.write(f"{name} ends\n")
        if name == "killed":
            multiprocessing.current_process().kill()


def test_one_process_at_a_time_has_its_turn_even_after_one_that_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    started = [context.Process(target=work, args=(log, name)) for name in ("a", "killed", "b")]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    lines = log.read_text().splitlines()
    assert sorted(line.split()[0] for line in lines) == ["a", "a", "b", "b", "killed", "killed"]
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin.split()[0], begin.split()[1]) == (end.split()[0], "begins")


def test_a_turn_is_taken_once_within_a_run_and_ends_with_the_outermost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert turns.take() == 0.0  # not in a run: nobody would give it back
    assert not turns._held
    with turns.until_the_end():
        assert turns.take() >= 0
        assert turns.take() == 0.0  # it has it: otherwise this would wait for itself
        with turns.until_the_end():
            assert turns.take() == 0.0
        assert turns._held
    assert not turns._held
    monkeypatch.delenv(turns.TURNS)
    with turns.until_the_end():
        assert turns.take() == 0.0
        assert not turns._held


def test_turns_are_for_single_compiled_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert turns.are_taken(True, gpu, 1)
    assert not turns.are_taken(False, gpu, 1)
    assert not turns.are_taken(True, torch.device("cpu"), 1)
    assert not turns.are_taken(True, gpu, 2)
    monkeypatch.delenv(turns.TURNS)
    assert not turns.are_taken(True, gpu, 1)


def test_a_turn_that_is_over_is_not_kept_by_a_child(file: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with turns.until_the_end():
        turns.take()
        child = os.dup(turns._held[0].fileno())  # as a forked process has it
    with file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # would raise
    os.close(child)


def test_waiting_is_not_training(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _Loop.run

    def on_a_gpu(loop: _Loop) -> None:
        loop.takes_turns = True
        own(loop)

    waits = iter([1000.0, 0.0])
    monkeypatch.setattr(_Loop, "run", on_a_gpu)
    monkeypatch.setattr(turns, "take", lambda: next(waits))
    config = make("mcp", epochs=2, batch_size=16)
    training = fit(build_model(config, DataInfo.of(splits)), splits, config)
    assert list(waits) == []  # it asked in every epoch
    assert -1000 < training.rows[0]["seconds"] < 0 < training.rows[1]["seconds"]


def test_a_run_gives_its_turn_back_however_it_ends(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    own = _Loop.run

    def on_a_gpu(loop: _Loop) -> None:
        loop.takes_turns = True
        own(loop)
        held.append(len(turns._held))
        if len(held) == 2:
            raise KeyError("nonsense")

    monkeypatch.setattr(_Loop, "run", on_a_gpu)
    run(make("mcp", epochs=1), tmp_path / "a", splits=splits)  # fewer steps than a recording takes
    assert not turns._held
    with pytest.raises(KeyError, match="nonsense"):
        run(make("mcp", epochs=1), tmp_path / "b", splits=splits)
    assert held == [1, 1]
    assert not turns._held


def test_a_run_that_was_trained_is_measured_in_its_turn(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "are_taken", lambda *_: True)
    own, held = run_module._measure, []

    def measure(*args: Any) -> dict[str, Any]:
        held.append(len(turns._held))
        if len(held) == 1:
            raise KeyError("stopped")
        return own(*args)

    monkeypatch.setattr(run_module, "_measure", measure)
    config = make("mcp", epochs=1)
    with pytest.raises(KeyError, match="stopped"):
        run(config, tmp_path / "a", splits=splits)
    run(config, tmp_path / "a", resume=True, splits=splits)  # nothing is left to be trained
    assert held == [1, 1]
    assert [one["in_turn"] for one in RunDir(tmp_path / "a").sessions()] == [True, True]
