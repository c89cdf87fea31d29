"""Times that can be compared: everything is timed in turn, many times over, and medians are taken.

A shared machine is noisy and its clock wanders; so every repeat times every piece of work once, and
only the ratio of the medians is reported as a result.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lpbnn.engine.codec import settle

Work = Callable[[], object]
ENOUGH = 0.05  # seconds of work between two looks at the clock of a GPU
MOST_CALLS = 50


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, repeat by repeat.

    >>> timing = Timing((0.5, 0.1, 0.2))
    >>> timing.median, Timing((0.4,)).spread
    (0.2, 0.0)
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        settle(self)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """The range of the middle half of the repeats, over the median."""
        if len(self.times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True)
class Compared:
    """Times of one piece of work and, from the same repeats, of the reference.

    >>> Compared(Timing((3.0, 2.0)), Timing((2.0, 2.0))).ratio
    1.25
    """

    own: Timing
    reference: Timing

    def __post_init__(self) -> None:
        settle(self)

    @property
    def ratio(self) -> float:
        return self.own.median / self.reference.median


def wait(device: torch.device) -> None:
    """Until the device has done all it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Work, device: torch.device, calls: int = 1) -> float:
    """Of one call, over ``calls`` of them; on a GPU the host may run ahead between them, as in use."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return (time.perf_counter() - start) / calls


def interleaved(
    works: Mapping[str, Work],
    repeats: int,
    warmup: int = 3,
    device: torch.device | None = None,
) -> dict[str, Timing]:
    """Time every piece of work ``repeats`` times, in turn, after ``warmup`` rounds that do not count.

    >>> sorted(interleaved({"a": lambda: None, "b": lambda: None}, repeats=2))
    ['a', 'b']
    """
    device = device or torch.device("cpu")
    for _ in range(warmup):
        for work in works.values():
            work()
    calls = {name: _calls(work, device) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, device, calls[name]))
    return {name: Timing(tuple(values)) for name, values in times.items()}


def _calls(work: Work, device: torch.device) -> int:
    """How often to call between two looks at the clock: once, but on a GPU for long enough."""
    if device.type != "cuda":
        return 1
    return max(1, min(MOST_CALLS, math.ceil(ENOUGH / max(seconds(work, device), 1e-6))))


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Torch with so many threads on the CPU; more than there are free cores make every time a guess."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
