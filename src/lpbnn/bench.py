"""``lpbnn bench``: time and memory of each method on a network, relative to the plain network."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Timer

from lpbnn import backbones, methods
from lpbnn.build import build
from lpbnn.predict import predict

PLAIN = "mcp"
REPEAT_SECONDS, MOST_CALLS = 0.05, 50  # a repeat calls quick work as often as fits
WARM_UP = 3  # training steps before the first one that counts
RATE = 1e-3  # labels are random: the loss must only stay finite


@dataclass(frozen=True)
class Network:
    """A network of ``lpbnn ls``, or MODULE:NAME, and the random batch that it is measured with.

    Args:
        input: the shape of one example.
    """

    backbone: str
    input: tuple[int, ...]
    classes: int
    batch: int
    device: torch.device

    def model(self, method: str, members: int) -> Any:
        """Return the network by a method."""
        net = backbones.build(self.backbone, self.classes, self.input[0])
        dense = backbones.load(self.backbone).dense
        options: dict[str, Any] = {"members": members} if has_members(method) else {}
        if "num_data" in methods.load(method).Config.__dataclass_fields__:
            options["num_data"] = 50_000
        task = "segmentation" if dense else "classification"
        return build(net, method, task=task, **options).to(self.device)

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels, one per example or pixel."""
        dense = backbones.load(self.backbone).dense
        shape = (self.batch, *self.input[1:]) if dense else (self.batch,)
        x = torch.randn(self.batch, *self.input, device=self.device)
        return x, torch.randint(0, self.classes, shape, device=self.device)


def has_members(method: str) -> bool:
    """Return True if a method has more than one network.

    >>> has_members("lpbnn"), has_members("edl")
    (True, False)
    """
    option = methods.load(method).Config.__dataclass_fields__.get("members")
    return option is not None and option.default != 1


@dataclass(frozen=True)
class Cost:
    """Parameters, seconds of a training step and of a prediction, peak of a GPU's memory in training."""

    parameters: float
    train: float
    predict: float
    memory: float | None = None


class Trial:
    """A model that trains on one batch and predicts it."""

    def __init__(self, network: Network, method: str, members: int) -> None:
        self.cuda = network.device.type == "cuda"
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.model, (self.x, self.y) = network.model(method, members), network.examples()
        groups = self.model.parameter_groups(lr=RATE)
        self.optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
        self.model.train()
        self.model.before_epoch(0, 2)
        for _ in range(WARM_UP):
            self.train()
        self.memory = torch.cuda.max_memory_allocated() - before if self.cuda else None

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.x, self.y)["loss"].backward()
        self.optimizer.step()
        self.model.after_step(RATE)

    def prepare(self) -> None:
        """End the training."""
        self.model.eval()
        self.model.after_fit([(self.x, self.y)])
        self.predict()

    def predict(self) -> None:
        predict(self.model, self.x, keep_members=False)

    def cost(self, train: Sequence[float], predict: Sequence[float]) -> Cost:
        parameters = sum(p.numel() for p in self.model.parameters())
        return Cost(parameters, median(train), median(predict), self.memory)


def interleaved(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of one call of each work, ``repeats`` times, timed in turn.

    >>> sorted(interleaved({"a": lambda: None, "b": lambda: None}, repeats=2))
    ['a', 'b']
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("work()", globals={"work": work}, num_threads=threads)
        for name, work in works.items()
    }
    once = {name: timer.timeit(1).median for name, timer in timers.items()}
    calls = {name: min(MOST_CALLS, math.ceil(REPEAT_SECONDS / t)) for name, t in once.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer.timeit(calls[name]).median)
    return times


def measure(network: Network, method: str, members: int, repeats: int) -> tuple[Cost, Cost]:
    """Return the cost of a method and that of the plain network, from the same repeats."""
    trials = {"own": Trial(network, method, members), "plain": Trial(network, PLAIN, 1)}
    train = interleaved({name: trial.train for name, trial in trials.items()}, repeats)
    for trial in trials.values():
        trial.prepare()
    answers = interleaved({name: trial.predict for name, trial in trials.items()}, repeats)
    own, plain = (trial.cost(train[name], answers[name]) for name, trial in trials.items())
    return own, plain


def measured(
    network: Network, names: Sequence[str], members: int, repeats: int
) -> Iterator[tuple[str, Cost | None, Cost | None, str]]:
    """Yield each method with its cost and the plain network's, or with the reason why it has none."""
    network.model(PLAIN, 1)  # what is wrong with the network is an error
    for name in dict.fromkeys(names):
        methods.load(name)  # and a wrong name
        try:
            yield name, *measure(network, name, members, repeats), ""
        except Exception as error:  # out of memory, or a network that the method cannot convert
            # Errors of compilers have pages.
            lines = str(error).strip().splitlines() or [""]
            yield name, None, None, f"{type(error).__name__}: {lines[0][:300]}"


def table(rows: Sequence[tuple[str, Cost | None, Cost | None, str]], members: int) -> Table:
    """Return the costs of methods as a table: absolute, and in brackets relative to the plain network."""
    units = {"parameters": ("parameters, M", 1e6), "train": ("train, ms", 1e-3)}
    units |= {"predict": ("predict, ms", 1e-3), "memory": ("train, MiB", 2**20)}
    shown = Table(box=SIMPLE_HEAD)
    for title in ("method", "J", *(title for title, _ in units.values())):
        shown.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    first = next((plain for _, _, plain, _ in rows if plain is not None), None)
    for name, own, plain, _ in [(PLAIN, first, first, ""), *rows]:
        cells = [_cell(own, plain, key, unit) for key, (_, unit) in units.items()]
        if own is not None:
            shown.add_row(name, str(members if has_members(name) else 1), *cells)
    return shown


def _cell(own: Cost | None, plain: Cost | None, key: str, unit: float) -> str:
    value, usual = getattr(own, key, None), getattr(plain, key, None)
    if not value or not usual:
        return "–"
    digits = 2 if value < 10 * unit else 1 if value < 100 * unit else 0
    return f"{value / unit:.{digits}f} ({value / usual:.2f})"
