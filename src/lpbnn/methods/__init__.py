"""The contract of a method: one file here, found by its name.

A method file has, in this order,

- a docstring whose first line is its claim, then the equation and the paper;
- ``Config``: a frozen dataclass with a default for every option of the method; an option that came later
  and whose default is not what was done before says what was, ``field(..., metadata={"then": value})``;
- ``build(net, config, **model_options) -> Model``: wraps the network.

Its model (see ``lpbnn.model.Model``) defines ``outputs`` and, where needed, its own ``loss``,
``passes``, ``likelihood``, ``score``, ``parameter_groups`` and the hooks ``before_epoch``,
``after_step`` and ``after_fit``. Nothing else in the project names a method. Folders added to
``lpbnn.methods.__path__`` are searched too.
"""

import dataclasses
import difflib
import importlib
import math
import numbers
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.likelihoods import TASKS, Task
from lpbnn.model import Model, Readout
from lpbnn.rank_one.layer import SUPPORTED


def names() -> list[str]:
    """Every method, in alphabetical order.

    Example:
        >>> "lpbnn" in names()
        True
    """
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(name for name in found if not name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of a method."""
    if name not in names():
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown method {name!r}.{hint} The methods are: {', '.join(names())}.")
    return importlib.import_module(f"{__name__}.{name}")


def describe(name: str) -> str:
    """The method's claim: the first line of its file."""
    return (load(name).__doc__ or "").strip().splitlines()[0]


def build(
    net: nn.Module,
    method: str = "lpbnn",
    *,
    task: Task = "classification",
    readout: Readout | None = None,
    ignore_index: int = -100,
    class_weights: Tensor | Sequence[float] | None = None,
    **options: Any,
) -> Model:
    """Turn a network into one that knows what it does not know, by the named method.

    The network is wrapped in place and keeps its weights. ``options`` are the method's own, for
    example ``members=4, num_data=len(train)`` (see its ``Config``).

    Where members are rows of the batch (lpbnn, batchensemble, rank1), a converted layer must get a row
    for each example. One that gets a table, of positions for example, is to be left out with ``exclude``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = build(net, "lpbnn", members=4, num_data=100)
        >>> tuple(model(torch.randn(5, 4)).shape)  # (members, batch, classes)
        (4, 5, 3)
    """
    module = load(method)
    if not isinstance(net, nn.Module):
        raise TypeError(f"build wraps an nn.Module; got {type(net).__name__}.")
    if isinstance(net, Model):
        raise TypeError(
            f"the network is a {type(net).__name__} already. Pass its .net, after lpbnn.undo."
        )
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not known; choose one of {', '.join(TASKS)}.")
    if class_weights is not None:
        class_weights = torch.as_tensor(class_weights, dtype=torch.float32).to(_output_device(net))
    if isinstance(net, SUPPORTED):  # a lone layer has no parent in which it could be replaced
        net = nn.Sequential(net)
    return module.build(
        net,
        configure(module, options),
        task=task,
        readout=readout,
        ignore_index=ignore_index,
        class_weights=class_weights,
    )


def _output_device(net: nn.Module) -> torch.device:
    """Where the outputs will be: of a network on several devices, where its last parameter lies."""
    found = [tensor.device for tensor in (*net.buffers(), *net.parameters())]
    return found[-1] if found else torch.device("cpu")


def configure(module: ModuleType, options: Mapping[str, Any]) -> Any:
    """The method's ``Config`` from keyword options; an unknown option names the right one."""
    fields = {field.name: field for field in dataclasses.fields(module.Config)}
    method = module.__name__.rpartition(".")[2]
    for name in options:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{method} has no option {name!r}.{hint} Its options are: {', '.join(fields) or 'none'}."
            )
    return module.Config(**{name: _checked(fields[name], value) for name, value in options.items()})


def as_then(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a run that were written down, and those that came later as what was done before.

    Of a method that is not at hand, somebody's own, as they are.

    >>> as_then("lpbnn", {"members": 4})["reconstruct"], as_then("lpbnn", {"reconstruct": "mean"})
    ('draws', {'train_decoder': True, 'reconstruct': 'mean'})
    """
    fields = dataclasses.fields(load(method).Config) if method in names() else ()
    return {f.name: f.metadata["then"] for f in fields if "then" in f.metadata} | dict(options)


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """A switch is true or false and nothing that merely counts as it; a number is one, and finite."""
    if field.type in (bool, "bool") and not isinstance(value, bool):
        raise ValueError(f"{field.name}={value!r}: expected true or false.")
    optional = field.type in (float | None, "float | None")
    if (optional and value is None) or not (optional or field.type in (float, "float")):
        return value
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{field.name}={value!r}: expected a finite number.")
    return value if isinstance(value, int) else float(value)  # numpy's are not torch's
