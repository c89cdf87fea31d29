"""Write src/lpbnn/build.pyi and src/lpbnn/options.json from the options of methods, networks and data sets.

    python tools/make_stub.py

The first has an overload of ``lpbnn.build`` for each method, so that editors complete options; the second is
what ``lpbnn ls`` and ``--help`` show without importing torch. tests/test_build_types.py fails if a file is
out of step.
"""

import inspect
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from lpbnn import backbones, data, methods, source
from lpbnn import build as function

PATH = Path(__file__).parents[1] / "src" / "lpbnn" / "build.pyi"
DEFAULT = inspect.signature(function).parameters["method"].default
HEAD = """\
# Written by tools/make_stub.py from the options of the methods: do not edit.
from collections.abc import Mapping, Sequence
from typing import Literal, overload

from torch import Tensor, nn

from lpbnn.likelihoods import Likelihood, Task, UserLikelihood
{classes}
from lpbnn.model import Readout, UncertainModel
"""
COMMON = """\
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
"""


def text(hint: Any) -> str:
    """Return a type as it is written, without ranges.

    >>> text(Annotated[int, "at least 1"] | None)
    'int | None'
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is types.NoneType:
        return "None"
    if origin is Annotated:
        return text(parts[0])
    if origin is Literal:
        return f"Literal[{', '.join(sorted(map(repr, parts)))}]".replace("'", '"')
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(text(part) for part in parts))
    if origin is not None:
        name = "Sequence" if origin is Sequence else origin.__name__
        return f"{name}[{', '.join(map(text, parts))}]"
    return "nn.Module" if hint is nn.Module else hint.__name__


def overload(method: str) -> tuple[str, str]:
    """Return the overload of a method, and the class that it returns."""
    module = methods.load(method)
    hints = get_type_hints(module.Config, include_extras=True)
    returned = get_type_hints(module.build)["return"]
    own = "".join(
        f"    {option.name}: {text(hints[option.name])} = ...,\n"
        for option in source.config_options(module.Config)
    )
    default = " = ..." if method == DEFAULT else ""
    code = (
        f'@overload\ndef build(\n    net: nn.Module,\n    method: Literal["{method}"]{default},\n'
        f"    *,\n{COMMON}{own}) -> {returned.__name__}: ...\n"
    )
    return code, f"from {returned.__module__} import {returned.__name__}"


def built_in() -> list[str]:
    """Return the methods of the package."""
    return [n for n in methods.names() if methods.load(n).__package__ == "lpbnn.methods"]


def table() -> str:
    """Return the text of options.json."""
    found: dict[str, dict[str, dict[str, Any]]] = {"method": {}, "backbone": {}, "data": {}}
    for name in built_in():
        options = source.config_options(methods.load(name).Config)
        found["method"][name] = {"about": methods.describe(name), "options": options}
    for name, net in backbones.entries().items():
        options = source.call_options(net.build, 2)
        found["backbone"][name] = {"about": net.description, "options": options}
    for name, entry in data.entries().items():
        options = source.call_options(entry.load, 1)
        found["data"][name] = {"about": entry.description, "options": options}
    parts = []
    for kind, entries in found.items():  # a line for each name
        lines = (
            f"{json.dumps(name)}: {json.dumps({**one, 'options': source.to_data(one['options'])})}"
            for name, one in entries.items()
        )
        parts.append(json.dumps(kind) + ": {\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def stub() -> str:
    """Return the text of build.pyi."""
    # The default comes first: it is what a call without a method is.
    found = [
        overload(name) for name in sorted(built_in(), key=lambda name: (name != DEFAULT, name))
    ]
    # A method of another package, or one whose name is a variable: options it may have, others as **options.
    rest = (
        "@overload\ndef build(\n    net: nn.Module,\n    method: str,\n    *,\n"
        f"{COMMON}    num_data: int | None = ...,\n    members: int = ...,\n) -> UncertainModel: ...\n"
    )
    classes = "\n".join(sorted({line for _, line in found if "lpbnn.model" not in line}))
    return HEAD.format(classes=classes) + "\n" + "".join([*(code for code, _ in found), rest])


if __name__ == "__main__":
    PATH.write_text(stub())
    source.TABLE.write_text(table())
