"""Runs that share a GPU: they get ready side by side, then each has the device to itself.

A compiled run's first minute or two is the compiler's, on the CPU. So several start at once, and when its
steps are compiled and recorded, a run waits for its turn: it trains and is measured alone, as fast as if
nobody else were there. The turn is the lock of a file, so it ends with its process, however that ends.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

try:
    import fcntl
except ImportError:  # Windows: they go on side by side
    fcntl = None  # type: ignore[assignment]

TURNS = "LPBNN_TURNS"  # names the file; commands that name the same one take turns with each other

_held: list[IO[Any]] = []
_runs: list[None] = []  # under way in this process, one within the other


def are_taken(compiles: bool, device: torch.device, processes: int) -> bool:
    """Whether such a run waits for its turn: several processes of one would wait for each other."""
    alone = compiles and device.type == "cuda" and processes == 1
    return alone and fcntl is not None and bool(os.environ.get(TURNS))


def were_alone(sessions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run had the device to itself each time it was started: nobody else was there, or in turn.

    >>> were_alone([{"beside": 1}, {"beside": 4, "in_turn": True}]), were_alone([{"beside": 4}])
    (True, False)
    """
    return all(one.get("beside", 1) == 1 or one.get("in_turn", False) for one in sessions)


@contextmanager
def until_the_end() -> Iterator[None]:
    """Around a run: a turn that is taken in it ends with it, or with the run that it is a part of."""
    _runs.append(None)
    try:
        yield
    finally:
        _runs.pop()
        if not _runs:
            _give()


def take() -> float:
    """Wait for the turn of this run; the seconds waited. Nothing where no file is named, or it has it."""
    if not _runs or _held or fcntl is None or not (path := os.environ.get(TURNS)):
        return 0.0
    started = time.perf_counter()
    file = Path(path).open("a")  # noqa: SIM115 - held until the run is over
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)
    return time.perf_counter() - started


def _give() -> None:
    while _held and fcntl is not None:
        file = _held.pop()
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a child has it open too
        file.close()
