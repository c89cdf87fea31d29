"""Tables of the pages in docs/methods: options from the code, measured rows from the records.

A page asks for them with ``<!-- options: METHOD -->`` and ``<!-- measured: METHOD -->``
(``tools.site_hooks``), so they cannot fall behind the code or the records.
"""

from collections import abc
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tools.columns import RESULTS, Column, Row
from tools.make_results import ACCURACY, ECE, NLL

from benchmarks.posthoc import show
from benchmarks.rows import markdown, read
from lpbnn import methods, source
from lpbnn.report.runs import title

CAPTION = (
    "Mean ± standard deviation over the seeds; 30 epochs; "
    "[what the rows and columns mean](index.md#the-measured-tables)."
)
COLUMNS = (
    ACCURACY,
    NLL,
    ECE,
    Column("ood/svhn/auroc", "AUROC, SVHN ↑"),
    Column("corruption/ce", "cE ↓"),
)
FAIR = (
    Column("raw/test/accuracy", "accuracy % ↑", percent=True),
    Column("raw/test/nll", "NLL ↓"),
    Column("raw/test/ece", "ECE ↓"),
    Column("raw/ood/svhn/entropy/auroc", "AUROC, SVHN ↑"),
    Column("raw/corruption/ce", "cE ↓"),
)


def options(method: str) -> str:
    """Return the options of a method, as its ``Config`` declares them.

    Example:
        >>> print(options("mcp").splitlines()[2])
        | `num_data` | the number of training examples, an integer of at least 1 or `None` | `None` | ...
    """
    lines = []
    config = methods.load(method).Config
    hints = get_type_hints(config, include_extras=True)
    for option in source.config_options(config):
        given = option.default
        default = f"{given:.3g}" if isinstance(given, float) else str(given)
        default = f'"{given}"' if isinstance(given, str) else default
        cells = (
            f"`{option.name}`",
            _values(hints[option.name]),
            f"`{default}`",
            _cell(option.description),
        )
        lines.append(cells)
    return markdown(("option", "values", "default", "meaning"), lines, 4)


def measured(method: str, folder: Path = RESULTS) -> str:
    """Return what was measured of a method, beside the plain network of the same records.

    Example:
        >>> print(measured("tradi").splitlines()[2].split("|")[1:5])
        [' CIFAR-10, WRN-16-4 ', ' **TRADI** ', ' 3 ', ' 92.00 ±0.09 ']
    """
    heads = ["data, network", "method", "seeds", *(column.title for column in COLUMNS)]
    lines: list[Sequence[str]] = []
    records = []
    for data, name in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        rows = read(folder / f"{data}.csv")
        for backbone in ("wrn-16-4", "wrn-28-10"):
            own = [row for row in rows if row["backbone"] == backbone]
            found = _beside(method, own, COLUMNS, f"{name}, {backbone.upper()}")
            lines += found
            records += [f"`results/{data}.csv`"] * bool(found)
    fair = read(folder / "fair-cifar10.csv")
    final = [row for row in fair if row["stage"] == "final" and row["noise"] == "trained"]
    chosen = _beside(method, final, FAIR, "CIFAR-10, WRN-16-4, chosen settings")
    records += ["`results/fair-cifar10.csv` (chosen settings)"] * bool(chosen)
    lines += chosen
    if not lines:
        raise ValueError(f"no record of {method!r} in {folder}")
    told = f"{CAPTION} Records: {', '.join(dict.fromkeys(records))}."
    return f"{markdown(heads, lines, 2)}\n{told}"


def posthoc(folder: Path = RESULTS) -> str:
    """Return what was measured of ways to make a trained network uncertain.

    Example:
        >>> print(posthoc().splitlines()[0])
        | way | T | seconds | accuracy % | NLL | ECE | AUROC of photos |
    """
    return show(folder / "posthoc.csv")


def _beside(
    method: str, rows: Sequence[Row], columns: Sequence[Column], where: str
) -> list[Sequence[str]]:
    """Return the lines of a method and of the plain network; none if the method was not measured."""
    lines = []
    for name in dict.fromkeys((method, "mcp")):
        own = [row for row in rows if row["method"] == name]
        if not own:
            return []
        label = title(name)
        cells = [column.mean(own) for column in columns]
        head = f"**{label}**" if name == method else label
        lines.append((where, head, str(len(own)), *cells))
    return lines


def _values(hint: Any) -> str:
    """Return which values an annotation allows, in words.

    Example:
        >>> from typing import Literal
        >>> _values(Literal["a", "b"] | None), _values(str | Sequence[str]), _values(float)
        ('`"a"` or `"b"` or `None`', 'a string or a list', 'a number')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        known = [part for part in parts if part is not NoneType]
        # A sequence of what the first part allows may be given too.
        several = any(get_origin(part) is abc.Sequence for part in known)
        words = [_values(known[0]), *["a list"] * several, *["`None`"] * (NoneType in parts)]
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    if origin is Annotated:
        allowed = next(part for part in parts if hasattr(part, "expected"))
        return str(allowed.low) if allowed.low == allowed.high else allowed.expected
    if origin is Literal:
        choices = [f'`"{choice}"`' for choice in sorted(parts)]
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    return {int: "an integer", float: "a number", bool: "`True` or `False`", str: "a string"}[hint]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
