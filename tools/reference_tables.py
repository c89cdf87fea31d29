"""Tables of the reference pages, from the code: the settings of a run, the conventions of the metrics."""

import ast
import dataclasses
import inspect
from itertools import pairwise

from benchmarks.rows import markdown
from lpbnn.metrics import METRICS
from lpbnn.training import config


def settings(name: str, prefix: str = "") -> str:
    """Return the fields of a dataclass of ``lpbnn.training.config`` as a table.

    Args:
        name: of the dataclass.
        prefix: of the options of the command, such as "optim".

    Example:
        >>> print(settings("ScheduleConfig", "schedule").splitlines()[2])
        | `--schedule.name` | `'cosine'` |  |
    """
    lines = []
    made, meanings = getattr(config, name)(), _meanings(getattr(config, name))
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if dataclasses.is_dataclass(value) or field.name.endswith("_options"):
            continue  # these have tables of their own
        path = ".".join(filter(None, (prefix, field.name.replace("_", "-"))))
        lines.append((f"`--{path}`", f"`{value!r}`", meanings.get(field.name, "")))
    return markdown(("option", "default", "meaning"), lines, 3)


def _meanings(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def conventions() -> str:
    """Return what each metric of a run means.

    Example:
        >>> conventions().splitlines()[2].startswith("| `accuracy` | Accuracy | ↑ |")
        True
    """
    lines = [
        (f"`{info.key}`", info.title, info.arrow, info.convention) for info in METRICS.values()
    ]
    return markdown(("key", "title", "better", "convention"), lines, 4)
