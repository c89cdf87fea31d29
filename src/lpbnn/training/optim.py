"""The optimizer, and its learning rate as a pure function of the step: nothing to save or restore."""

import math
import re
from fnmatch import fnmatchcase
from typing import Any

import torch

from lpbnn.model import UncertainModel
from lpbnn.training.config import RunConfig, ScheduleConfig


def make_optimizer(
    model: UncertainModel, config: RunConfig, device: torch.device, capturable: bool = False
) -> torch.optim.Optimizer:
    """SGD or AdamW over the model's own groups; each remembers its full rate as ``initial_lr``.

    ``capturable``: its steps will be recorded as part of a CUDA graph.
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
    """The parameters whose path in the network, or in each network of an ensemble, fits a glob."""
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
    """The chosen parameters in groups of their own, at ``factor`` times the rate of the others."""
    made = []
    for group in groups:
        there = [p for p in group["params"] if id(p) in chosen]
        rest = [p for p in group["params"] if id(p) not in chosen]
        made += [{**group, "params": rest}] if rest else []
        made += [{**group, "params": there, "lr": factor * group.get("lr", lr)}] if there else []
    return made


def recordable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep the rates on the device, where a recorded step reads them anew each time.

    A checkpoint of a run on another device has brought its own kind of step along: this one's is kept.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        kinds = ("fused", "capturable", "foreach")
        group |= {kind: optimizer.defaults[kind] for kind in kinds if kind in optimizer.defaults}
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def set_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Give every group ``scale`` times its full rate."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * scale
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def factor(schedule: ScheduleConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    r"""What ``optim.lr`` is multiplied by at ``step``, counted from 0 over the whole run.

    After a linear warm-up, with t in [0, 1) the progress through the rest:

    - constant: 1
    - step: gamma ^ (number of milestones reached)
    - cosine: :math:`(1 + \cos \pi t) / 2`
    - poly: :math:`(1 - t)^{power}`

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
