"""The cost of each method on a network: training step, prediction and memory, relative to the plain network.

Every method is timed in turn with the plain network (``mcp``), repeat by repeat, because the clock of a
shared machine drifts; the results are ratios of medians. The training step is that of ``lpbnn train``.

Memory is that of one piece of work alone. On a GPU it is what the allocator gave out beyond what it had given
before. On the CPU, where a process's resident peak says little and never falls, the bytes alive in tensors
are counted: exact, the same on every machine, and blind to what a compiler allocates for itself.
"""

import copy
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer, set_torch_threads
from tyro.conf import arg

from lpbnn import backbones, methods
from lpbnn.build import build
from lpbnn.model import UncertainModel
from lpbnn.predict import predict
from lpbnn.training.config import OptimConfig, Precision, RunConfig
from lpbnn.training.cuda_graph import WARM_UP
from lpbnn.training.distributed import launch
from lpbnn.training.step import Step, fast_convolutions

PLAIN = "mcp"
REPEAT_SECONDS, MOST_CALLS = 0.05, 50  # a repeat calls quick work as often as fits
COLUMNS = {  # of a table: title, and the unit of the number
    "parameters": ("parameters, M", 1e6),
    "train": ("train, ms", 1e-3),
    "predict": ("predict, ms", 1e-3),
    "train_bytes": ("train, MiB", 2**20),
}
Row = dict[str, Any]  # the result of ``Bench.measure``, as it stands in a JSON record
Mode = Literal["eager", "graph", "compiled"]


@dataclass(frozen=True)
class Setup:
    """A network, the shape of its batches, and how they are run and timed."""

    backbone: str = "resnet18"
    """A network of lpbnn ls, or MODULE:NAME for one of your own (docs/howto/own-data.md)."""
    input: tuple[int, ...] = (3, 32, 32)
    """Shape of one example: channels, height and width; or the length of a vector."""
    classes: int = 10
    batch: int = 128
    test_batch: int | None = None
    """Examples of one prediction; left out: as many as in training."""
    mode: Mode | None = None
    """graph: the training step replayed as a CUDA graph. compiled: by torch.compile, and replayed on a GPU.
    Left out: what lpbnn train does, graph on a GPU and eager on a CPU."""
    predict: bool = True
    """Measure prediction too."""
    samples: int = 1
    """Draws of each member in a prediction; the plain network has one."""
    chunk: int | None = None
    """Rows (draw, member, example) that go through the network at once in a prediction; left out: all."""
    repeats: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | None = None
    """Left out: bf16 on a GPU, 32 on a CPU."""
    memory_budget: float = 1.0
    """compiled: share of the activations that a training step may keep for the backward pass."""
    threads: int = 1
    """On a CPU; more than there are free cores make the times useless."""
    seed: int = 0
    check: bool = True
    """Compare the fast path of a model with the reference on its first batch, as lpbnn train does."""
    options: Annotated[tuple[str, ...], arg(name="set", metavar="NAME=VALUE")] = ()
    """Options of the methods that have them (latent=64) and of the network (backbone.dropout=0.1)."""

    def __post_init__(self) -> None:
        for name in ("classes", "batch", "repeats", "threads", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch finds no CUDA device. Fix: device='cpu'.")
        if not self.input or min(self.input) < 1:
            raise ValueError(f"input is {self.input}; expected a shape such as 3 32 32.")
        backbones.load(self.backbone)  # an unknown name is an error here
        self.config()  # which checks the rest
        if self.mode == "graph" and not self.cuda:
            raise ValueError(
                "mode 'graph' is a CUDA graph and needs a GPU. Fix: eager or compiled."
            )

    @property
    def cuda(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()

    def config(self) -> RunConfig:
        """Return the settings with which ``lpbnn train`` would run such a step."""
        config = RunConfig(
            method=PLAIN,  # the model is built elsewhere
            optim=OptimConfig(lr=1e-3),  # labels are random: the loss must only stay finite
            precision=self.precision or ("bf16" if self.cuda else "32"),
            compile=self.mode == "compiled",
            memory_budget=self.memory_budget,
            graph=self.mode != "eager",
            channels_last=self.cuda and len(self.input) == 3,
            device="cuda" if self.cuda else "cpu",
            progress=False,
        )
        return with_settings(config, self.options)

    def examples(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return random inputs (count, *input) and labels, one per example or pixel."""
        x = torch.randn(count, *self.input, device=device)
        if self.config().channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        dense = backbones.load(self.backbone).dense
        shape = (count, *self.input[1:]) if dense else (count,)
        return x, torch.randint(0, self.classes, shape, device=device)

    def model(self, method: str, members: int) -> UncertainModel:
        """Build the network by a method, with those of the options that the method has.

        >>> Setup("small-cnn", (3, 8, 8), options=("latent=16", "std=0.1")).model(
        ...     "lpbnn", 4
        ... ).members
        4
        """
        config, known = self.config(), methods.load(method).Config.__dataclass_fields__
        net = backbones.build_for(self.input, self.backbone, self.classes, config.backbone_options)
        options = {"num_data": 50_000, **config.method_options}
        if has_members(method):
            options["members"] = members
        options = {name: value for name, value in options.items() if name in known}
        task = "segmentation" if backbones.load(self.backbone).dense else "classification"
        return build(net, method, task=task, check=self.check, **options)


def with_settings(config: RunConfig, settings: tuple[str, ...]) -> RunConfig:
    """Return the config with NAME=VALUE pairs as options of whatever method has them, or of the backbone.

    >>> with_settings(RunConfig(), ("members=8", "backbone.dropout=0.1")).method_options
    {'members': 8}
    """
    import yaml

    chosen: dict[str, dict[str, Any]] = {"": {}, "backbone": {}}
    for setting in settings:
        name, equals, text = setting.partition("=")
        prefix, _, key = name.rpartition(".")
        if not equals or prefix not in chosen or not key:
            raise ValueError(
                f"--set {setting!r}: expected NAME=VALUE, such as latent=64 or backbone.dropout=0.1."
            )
        chosen[prefix][key] = yaml.safe_load(text)  # a number, true, [8, 4]; a word is itself
    return replace(config, method_options=chosen[""], backbone_options=chosen["backbone"])


def has_members(method: str) -> bool:
    """Return True if a method has more than one network.

    >>> has_members("lpbnn"), has_members("edl")
    (True, False)
    """
    option = methods.load(method).Config.__dataclass_fields__.get("members")
    return option is not None and option.default != 1


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


class PeakMemory(TorchDispatchMode):
    """Count every storage that is made inside the block, once.

    >>> with PeakMemory() as meter:
    ...     x = torch.zeros(256)  # 1,024 bytes
    ...     del x
    ...     y = torch.zeros(8)
    >>> meter.peak, meter.alive
    (1024, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known: set[int] = set()

    def reset(self) -> None:
        """Start the peak again from what is alive now."""
        self.peak = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


class CudaPeak:
    """Peak of what the GPU's allocator gives out inside the block, beyond what it had given before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.peak = device, 0, 0

    def __enter__(self) -> "CudaPeak":
        torch.cuda.synchronize(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        self.reset()
        return self

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self.before


def peak_memory_of(device: torch.device) -> PeakMemory | CudaPeak:
    """Return a context whose ``peak`` is the memory of the work in it (or since its ``reset``)."""
    return CudaPeak(device) if device.type == "cuda" else PeakMemory()


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers, shared ones once.

    >>> state_bytes(nn.Linear(3, 2))
    32
    """
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Trial:
    """A model in training on one batch, and a copy of it that predicts another."""

    def __init__(self, setup: Setup, model: UncertainModel, fabric: Any) -> None:
        self.setup, self.fabric, config = setup, fabric, setup.config()
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        self.model = fabric.to_device(model).to(memory_format=layout)
        self.batch = setup.examples(setup.batch, fabric.device)
        self.step = Step(self.model, config, fabric, setup.batch)
        self.model.train()
        self.model.before_epoch(0, 2)
        self.size: dict[str, Any] = {"parameters": sum(p.numel() for p in self.model.parameters())}

    def train(self) -> None:
        recording = self.step.recording
        with nullcontext() if recording is None else recording.on_its_stream():
            self.step(*self.batch, 1.0)

    def predict(self) -> None:
        with self.fabric.autocast():
            samples, chunk = self.setup.samples, self.setup.chunk
            predict(self.predictor, self.test_x, samples=samples, chunk=chunk, keep_members=False)

    def warm_up(self, meter: Any = None) -> None:
        """Train until the step is compiled or recorded.

        The meter counts the last steps alone: choosing kernels takes memory of its own.
        """
        start = time.perf_counter()
        for number in range(WARM_UP + 2):
            self.train()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number == 0:
                self.size["first_step"] = time.perf_counter() - start
            if meter is not None and number == WARM_UP - 2:
                meter.reset()

    def prepare_prediction(self) -> None:
        """Make the copy that predicts, and measure its memory."""
        self.predictor = copy.deepcopy(self.model).eval()
        with self.fabric.autocast():
            self.predictor.after_fit([self.batch])
        compiled = self.setup.mode == "compiled"
        for net in self.predictor.networks if compiled else ():
            net.compile(dynamic=False)
        count = self.setup.test_batch or self.setup.batch
        self.test_x, _ = self.setup.examples(count, self.fabric.device)
        self.predict()
        if self.setup.cuda or not compiled:
            with peak_memory_of(self.fabric.device) as meter:
                self.predict()
            self.size["predict_bytes"] = meter.peak + state_bytes(self.predictor)


class Bench(ExitStack):
    """Measure methods beside the plain network of one setup, which is kept for all of them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.fabric = launch(setup.config())
        self.plain: Trial | None = None

    def __enter__(self) -> "Bench":
        device = self.fabric.device
        self.enter_context(torch.random.fork_rng(devices=[device] if self.setup.cuda else []))
        self.enter_context(fast_convolutions(device))
        self.enter_context(set_torch_threads(self.setup.threads))
        if self.setup.mode == "compiled":
            # The models share code: the compiler would take a second size of it for one that changes
            # from call to call, and give up after eight.
            limits = {"automatic_dynamic_shapes": False, "recompile_limit": 256}
            self.enter_context(torch.compiler.config.patch(limits))  # type: ignore[attr-defined]
            self.callback(torch.compiler.reset)
            torch.compiler.reset()
        return self

    def measure(self, method: str, members: int = 1) -> Row:
        """Return case, sizes and times, and the plain network's from the same repeats."""
        if self.plain is None:
            self.plain = self._trial(PLAIN, 1)
        trial = self.plain if method == PLAIN else self._trial(method, members)
        mode = self.setup.mode or ("graph" if trial.step.recording else "eager")
        case = {"mode": mode, "method": method, "members": members}
        case["backbone"] = self.setup.backbone
        row: Row = {"case": case, "size": trial.size, "reference": self.plain.size}
        for what in ("train", "predict") if self.setup.predict else ("train",):
            works = {"reference": getattr(self.plain, what)}
            if trial is not self.plain:
                works["own"] = getattr(trial, what)
            times = interleaved(works, self.setup.repeats)
            own = times.get("own", times["reference"])
            row[what] = {"own": {"times": own}, "reference": {"times": times["reference"]}}
        return row

    def _trial(self, method: str, members: int) -> Trial:
        gc.collect()
        if self.setup.cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(self.setup.seed)
        # Without a GPU the memory of compiled code is not known.
        counted = self.setup.cuda or self.setup.mode != "compiled"
        setup = replace(self.setup, samples=1, chunk=None) if method == PLAIN else self.setup
        with peak_memory_of(self.fabric.device) if counted else nullcontext() as meter:
            trial = Trial(setup, setup.model(method, members), self.fabric)
            trial.warm_up(meter)
        if meter is not None:
            trial.size["train_bytes"] = meter.peak
        if self.setup.predict:
            trial.prepare_prediction()
        return trial


def seconds(row: Row, what: str, whose: str = "own") -> float | None:
    """Return the median seconds of a training step ("train") or a prediction ("predict")."""
    return median(row[what][whose]["times"]) if row.get(what) else None


def ratio(row: Row, what: str) -> float | None:
    """Return how many times plain a row is: "train", "predict", or a key of its size.

    >>> ratio({"size": {"parameters": 3}, "reference": {"parameters": 2}}, "parameters")
    1.5
    """
    if what in ("train", "predict"):
        own, plain = seconds(row, what), seconds(row, what, "reference")
    else:
        own, plain = row["size"].get(what), row["reference"].get(what)
    return own / plain if own is not None and plain else None


def cell(row: Row, what: str, unit: float = 1.0) -> str:
    """Return a number in the given unit and, in brackets, its ratio to plain.

    >>> cell({"size": {"parameters": 3e6}, "reference": {"parameters": 2e6}}, "parameters", 1e6)
    '3.00 (1.50)'
    """
    own = seconds(row, what) if what in ("train", "predict") else row["size"].get(what)
    if own is None:
        return "–"
    digits = 2 if own < 10 * unit else 1 if own < 100 * unit else 0
    return f"{own / unit:.{digits}f} ({ratio(row, what):.2f})"


def measurements(
    setup: Setup, methods: Iterable[str], members: Sequence[int]
) -> Iterator[tuple[str, Row | None, str]]:
    """Measure the plain network, then every method with every number of members.

    Yields:
        A name, METHOD/J; the row, or None for a method that failed; and why it failed.
    """
    cases = [(PLAIN, 1)] + [
        (method, count)
        for index, count in enumerate(members)
        for method in dict.fromkeys(methods)
        if method != PLAIN and (has_members(method) or not index)
    ]
    with Bench(setup) as bench:
        for method, count in cases:
            count = count if has_members(method) else 1
            try:
                yield f"{method}/{count}", bench.measure(method, count), ""
            except Exception as error:  # out of memory, or a network that the method cannot convert
                if method == PLAIN:
                    raise
                # Errors of compilers have pages.
                lines = str(error).strip().splitlines() or [""]
                yield f"{method}/{count}", None, f"{type(error).__name__}: {lines[0][:300]}"


def table(
    rows: Iterable[Row], columns: Mapping[str, tuple[str, float]] = COLUMNS, **look: Any
) -> Table:
    """Return the costs of methods as a table: absolute, and in brackets relative to plain."""
    cells = [
        [
            "plain" if row["case"]["method"] == PLAIN else row["case"]["method"],
            str(row["case"]["members"]),
            *(cell(row, what, unit) for what, (_, unit) in columns.items()),
        ]
        for row in rows
    ]
    return text_table(("method", "J", *(title for title, _ in columns.values())), cells, **look)


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], **look: Any) -> Table:
    """Return a table for the terminal; all columns but the first are numbers."""
    first, *others = head
    right = (Column(name, justify="right", no_wrap=True) for name in others)
    found = Table(Column(first, no_wrap=True), *right, box=SIMPLE_HEAD, **look)
    for row in rows:
        found.add_row(*row)
    return found
