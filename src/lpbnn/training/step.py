"""One training step: loss, gradients, clipping, optimizer, the model's ``after_step``, sums for the log.

All of it is on the device; on one GPU it is replayed as a CUDA graph (``cuda_graph``). The learning rate is
a pure function of the step: nothing to save or restore.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpbnn.check import compiled_loss_agrees
from lpbnn.kernels.recompute import compiled
from lpbnn.kernels.row_norm import RowNorm, use_row_norms
from lpbnn.members.call import as_call
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.model import LossStep, Terms, UncertainModel
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.training.config import RunConfig, ScheduleConfig
from lpbnn.training.cuda_graph import Recording, make_recordable, records

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class TrainStep(LossStep):
    """The model's loss as a forward pass, compiled for batches of one size if ``compiled_for`` is given.

    In a compiled step the batch norms behind the points where the batch is expanded become ``RowNorm``,
    whose sums a compiler fuses with those of the member factors; ``restore_batch_norms`` undoes that.

    Fabric's ``mark_forward_method("loss")`` would do for DDP, but on a single device it bypasses autocast.
    """

    def __init__(
        self, model: UncertainModel, compiled_for: int | None = None, memory_budget: float = 1.0
    ) -> None:
        super().__init__(model)
        self.size, self.memory_budget = compiled_for, memory_budget
        self.compiled: Callable[..., Terms] | None = None

    def forward(self, x: Any, y: Tensor, weight: Tensor | None = None) -> Terms:
        # A second batch size would make the compiler give up the fast kernels of the first one: the
        # smaller batch at the end of an epoch runs uncompiled.
        if self.size is None or len(y) != self.size:
            return super().forward(x, y, weight)
        if self.compiled is None:
            self.compiled = self._compile(x, y)
        return self.compiled(x, y, weight)

    def _compile(self, x: Any, y: Tensor) -> Callable[..., Terms]:
        """Return the compiled loss, or the plain one if the two differ on this batch."""
        model = self.model
        if isinstance(model, MemberEnsemble):  # a comparison cannot be part of a compiled graph
            model.call(*as_call(x), model.members)
        if isinstance(model, RankOneEnsemble):
            for path in model.expand_at:
                use_row_norms(model.net.get_submodule(path))
        labels = model.task == "classification"  # one softmax for each example, not each pixel
        by_rows = labels and any(isinstance(module, RowNorm) for module in model.modules())
        step = compiled(model.loss, self.memory_budget, by_rows)
        if model.check_first_batch and not compiled_loss_agrees(model, step, x, y):
            warnings.warn(
                "the compiled loss does not equal the plain one on the first batch. lpbnn trains without a "
                "compiler from now on, which is right and slower.",
                UserWarning,
                stacklevel=2,
            )
            return model.loss
        return step


class Step:
    """The step of a run: ``step(x, y, scale)`` trains on a batch at ``scale`` times the full rate.

    Args:
        size: examples of a full batch in this process; only full ones are compiled and recorded.
    """

    def __init__(
        self, model: UncertainModel, config: RunConfig, fabric: "Fabric", size: int
    ) -> None:
        self.model, self.config, self.fabric, self.size = model, config, fabric, size
        recorded = records(config, fabric)
        optimizer = make_optimizer(model, config, fabric.device, capturable=recorded)
        compiled_for = size if config.compile else None
        part = TrainStep(model, compiled_for, config.memory_budget)
        self.module, self.optimizer = fabric.setup(part, optimizer)
        self.recording = Recording(self._work, fabric.device) if recorded else None
        self.rate: float | Tensor = config.optim.lr
        self.names: list[str] = []
        self.sums = torch.zeros((), device=fabric.device)
        self.reset()

    def reset(self) -> None:
        """Prepare for an optimizer whose state was replaced."""
        if self.recording is not None:
            self.recording.forget()
            make_recordable(self.optimizer, self.fabric.device)
            self.rate = torch.tensor(self.config.optim.lr, device=self.fabric.device)

    def begin(self) -> AbstractContextManager[Any]:
        """Set the sums to zero and return the context of an epoch.

        A recorded step is kept over epochs: ``before_epoch`` changes buffers only, which it reads anew.
        """
        self.sums = self.sums.zero_() if self.names else self.sums
        return nullcontext() if self.recording is None else self.recording.on_its_stream()

    def __call__(self, x: Any, y: Tensor, scale: float) -> None:
        set_rate(self.optimizer, scale)
        rate = self.config.optim.lr * scale
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            self.rate = rate
        if self.recording is not None and len(y) == self.size:
            self.recording(x, y)
        else:
            self._work(x, y)

    def _work(self, x: Any, y: Tensor) -> None:
        self.optimizer.zero_grad()
        terms = self.module(x, y)
        self.fabric.backward(terms["loss"])
        if self.config.optim.clip is not None:
            self.fabric.clip_gradients(
                self.module,
                self.optimizer,
                max_norm=self.config.optim.clip,
                error_if_nonfinite=False,  # asking would wait for the device
            )
        self.optimizer.step()
        self.model.after_step(self.rate)
        if not self.names:
            self.names = [*terms, "examples"]
            self.sums = torch.zeros(len(self.names), device=self.fabric.device)
        values = [term.detach().float() for term in terms.values()]
        self.sums.add_(torch.stack([*values, torch.ones_like(values[0])]), alpha=len(y))

    def means(self) -> dict[str, float]:
        """Return the mean of every term since ``begin`` and the number of examples, over all processes.

        It waits for the device.
        """
        sums: list[float] = self.fabric.all_reduce(self.sums.clone(), reduce_op="sum").tolist()  # type: ignore[union-attr]
        means = {name: s / sums[-1] for name, s in zip(self.names, sums, strict=True)}
        return {**means, "examples": sums[-1]}


def make_optimizer(
    model: UncertainModel, config: RunConfig, device: torch.device, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return SGD or AdamW over the model's own groups; each remembers its full rate as ``initial_lr``.

    Args:
        capturable: its steps will be recorded as part of a CUDA graph.
    """
    optim = config.optim
    groups = model.parameter_groups(weight_decay=optim.weight_decay, lr=optim.lr)
    for pattern, factor in optim.parts.items():
        groups = _slowed(groups, matching(model, pattern), factor, optim.lr)
    for group in groups:
        group["initial_lr"] = group.setdefault("lr", optim.lr)
    # One kernel for all weights. It unscales fp16 gradients itself, and so cannot be clipped before.
    scaled = config.precision == "fp16" and optim.clip is not None
    fused = True if device.type == "cuda" and not scaled else None
    if optim.name == "adamw":
        betas = (optim.momentum, 0.999)
        return torch.optim.AdamW(groups, optim.lr, betas, fused=fused, capturable=capturable)
    return torch.optim.SGD(
        groups, optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused
    )


def matching(model: UncertainModel, pattern: str) -> set[int]:
    """Return the ids of the parameters whose path in the network (of each member) fits a glob."""
    # A model holds its network as ``net``, an ensemble a list of them.
    prefix = r"^net\." if model.networks == [model.net] else r"^net\.\d+\."
    paths = {id(p): re.sub(prefix, "", name) for name, p in model.named_parameters()}
    found = {key for key, path in paths.items() if fnmatchcase(path, pattern)}
    if not found:
        tops = ", ".join(dict.fromkeys(path.partition(".")[0] for path in paths.values()))
        raise ValueError(
            f"optim.parts[{pattern!r}] matches no parameter; expected globs of paths below {tops}, such "
            f"as {tops.partition(',')[0]}.*"
        )
    return found


def _slowed(
    groups: list[dict[str, Any]], chosen: set[int], factor: float, lr: float
) -> list[dict[str, Any]]:
    """Return groups with the chosen parameters apart, at ``factor`` times the rate of the others."""
    made = []
    for group in groups:
        there = [p for p in group["params"] if id(p) in chosen]
        rest = [p for p in group["params"] if id(p) not in chosen]
        made += [{**group, "params": rest}] if rest else []
        made += [{**group, "params": there, "lr": factor * group.get("lr", lr)}] if there else []
    return made


def set_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Give every group ``scale`` times its full rate."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * scale
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def factor(schedule: ScheduleConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    r"""Return what ``optim.lr`` is multiplied by at ``step``, counted from 0 over the whole run.

    After a linear warm-up, with t in [0, 1) the progress through the rest:

    - constant: 1
    - step: gamma ^ (number of milestones reached)
    - cosine: $(1 + \cos \pi t) / 2$
    - poly: $(1 - t)^{power}$

    >>> step = ScheduleConfig("step", milestones=(1, 2))
    >>> [round(factor(step, s, steps_per_epoch=2, epochs=3), 4) for s in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    >>> cosine = ScheduleConfig("cosine", warmup=1)
    >>> [round(factor(cosine, s, steps_per_epoch=2, epochs=3), 4) for s in range(6)]
    [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]
    """
    warmup = round(schedule.warmup * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, epochs * steps_per_epoch - warmup)
    if schedule.name == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if schedule.name == "poly":
        return (1 - progress) ** schedule.power
    if schedule.name == "step":
        return schedule.gamma ** sum(step >= m * steps_per_epoch for m in schedule.milestones)
    return 1.0


@contextmanager
def fast_convolutions(device: torch.device) -> Iterator[None]:
    """cuDNN tries its algorithms once per shape: shapes do not change in training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
