"""Count the functions of the package that one call of the library passes through.

A measure of reading effort: how many functions, in how many files, a newcomer meets who follows one call
from top to bottom. It counts the code objects of ``lpbnn`` that ``sys.setprofile`` sees entered (functions,
comprehensions, lambdas; each once) in a second call, after the check of the first batch, on a network of two
layers. Torch's own code does not count. Python 3.12 inlines most comprehensions: compare numbers of one
version only.

    python tools/trace_calls.py              # the totals
    python tools/trace_calls.py loss         # the functions of one call, by file
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lpbnn

PACKAGE = Path(lpbnn.__file__).parent


def trace(call: Callable[[], Any]) -> dict[str, list[str]]:
    """Return the functions of the package that a call enters, by file, in the order of first entry."""
    seen: dict[tuple[str, str, int], None] = {}

    def record(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            path = str(Path(code.co_filename).relative_to(PACKAGE))
            seen.setdefault((path, code.co_qualname, code.co_firstlineno))

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    found = defaultdict(list)
    for path, name, line in seen:
        found[path].append(f"{name} (line {line})")
    return dict(found)


def calls(method: str) -> dict[str, Callable[[], Any]]:
    """Return the calls to trace, ready for their second time."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = lpbnn.build(net, method, num_data=100)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    model.loss(x, y)
    lpbnn.predict(model, x)

    def build() -> None:
        lpbnn.build(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), method, num_data=1)

    return {
        "build": build,
        "loss": lambda: model.loss(x, y),
        "predict": lambda: lpbnn.predict(model, x),
    }


def main(names: list[str], method: str = "lpbnn") -> None:
    """Print the counts, and the functions of the calls that are named."""
    for name, call in calls(method).items():
        found = trace(call)
        entered = [function for functions in found.values() for function in functions]
        inner = sum("comp>" in each or "<genexpr>" in each for each in entered)
        print(
            f"{name}: {len(entered)} code objects in {len(found)} files, {inner} of them comprehensions"
        )
        for path, functions in found.items() if name in names else ():
            print(f"  {path}")
            for function in functions:
                print(f"    {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
