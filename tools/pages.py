"""Run the code of documentation pages, and write what it prints and draws back into them.

    python tools/pages.py docs/tutorials/two-moons.md

The rules are in CONTRIBUTING.md ("Code in the documentation"); tests/test_docs.py applies them to every page.
"""

import argparse
import contextlib
import io
import linecache
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)``` *$"
    r"|^<!-- (?P<hidden>python)\n(?P<unseen>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"^<!-- (\w+)(?:: (.*?))? -->$", re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"# (\w+\.py)\n")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+)(?:e[-+]?\d+)?")
SHELLS = ("bash", "console", "sh")
# What a page may call; everything else that bash does not find is passed over.
PROGRAMS = ("lpbnn", "python", "torchrun")


@dataclass(frozen=True)
class Block:
    """A block of code, and the output that the page shows below it."""

    language: str
    code: str
    line: int
    """Lines of the page above the code."""
    run: bool
    """True for Python, and for commands below a line ``<!-- run -->``."""
    output: str | None
    span: tuple[int, int]
    """Where the output is in the page."""


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page in order, without those that are outputs.

    >>> page = "```python\\nprint(1)\\n```\\n\\n```text\\n1\\n```\\n"
    >>> [(block.code, block.output) for block in blocks(page)]
    [('print(1)\\n', '1\\n')]
    """
    found: list[Block] = []
    before = 0
    last: re.Match[str] | None = None
    for match in FENCE.finditer(text):
        language = match["hidden"] or match["language"]
        group = "unseen" if match["hidden"] else "code"
        code = textwrap.dedent(match[group])
        between = text[before : match.start()]
        if language == "text" and last is not None and not between.strip() and found[-1].run:
            old = found.pop()
            span = match.span(group)
            found.append(Block(old.language, old.code, old.line, old.run, code, span))
        else:
            line = text[: match.start(group)].count("\n")
            asked = between.rstrip().endswith("<!-- run -->")
            run = language == "python" or (language in SHELLS and asked)
            found.append(Block(language, code, line, run, None, (0, 0)))
        before, last = match.end(), match
    return found


def marks(text: str) -> dict[str, str]:
    """Return the comments of a page that say how it is run: slow, warns, needs.

    >>> marks("# Title\\n<!-- slow -->\\n<!-- needs: transformers peft -->\\n")
    {'slow': '', 'needs': 'transformers peft'}
    """
    found = {name: value or "" for name, value in MARK.findall(text)}
    return {name: found[name] for name in ("slow", "warns", "needs") if name in found}


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Run a page in the current folder, and yield each block with what it printed.

    The blocks of a page share one namespace. One that starts with ``# NAME.py`` is that file, which
    is written and run on its own.
    """
    module = types.ModuleType("page")
    known, path = set(sys.modules), list(sys.path)
    sys.modules["page"] = module
    sys.path.insert(0, str(Path.cwd()))
    linecache.checkcache(str(page))
    try:
        for block in blocks(page.read_text("utf-8")):
            if block.run:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    _run(block, page, module)
                yield block, printed.getvalue()
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - known:
            place = getattr(sys.modules[name], "__file__", None) or ""
            if name == "page" or Path(place).parent == Path.cwd():
                del sys.modules[name]  # another page may have a file of the same name


def _run(block: Block, page: Path, module: types.ModuleType) -> None:
    name = FILE.match(block.code)
    if block.language in SHELLS:
        from lpbnn import cli

        for words in commands(block.code):
            if words[0] != "lpbnn":
                raise ValueError(f"{page}: only lpbnn is run, not {words[0]}")
            cli.main(words[1:])
    elif name:
        Path(name[1]).write_text(block.code, "utf-8")
        runpy.run_path(name[1], run_name="__main__")
    else:  # with the page's line numbers, for errors
        exec(compile("\n" * block.line + block.code, str(page), "exec"), module.__dict__)


def commands(script: str) -> list[list[str]]:
    """Return the commands of PROGRAMS that bash would start for a script: none of them is started.

    >>> commands('for v in 1 2; do lpbnn train --seed $v; done  # twice\\nlpbnn ls > "a b"')
    [['lpbnn', 'train', '--seed', '1'], ['lpbnn', 'train', '--seed', '2'], ['lpbnn', 'ls']]
    """
    lines = script.splitlines(keepends=True)
    if any(line.startswith("$ ") for line in lines):  # a transcript: commands among their outputs
        script = "".join(line[2:] for line in lines if line.startswith("$ "))
    note = "() { printf '%s\\0' \"$FUNCNAME\" \"$@\" $'\\n' >&9; }\n"
    known = "".join(name + note for name in PROGRAMS)
    rest = "command_not_found_handle() { :; }\nPATH=/nowhere\n"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-c", f"exec 9>&1 >/dev/null\n{known}{rest}{script}"],
            capture_output=True,
            cwd=folder,
            text=True,
            check=False,
        )
    return [words.split("\0")[:-1] for words in done.stdout.split("\n\0")[:-1]]


def differences(shown: str, printed: str) -> str:
    """Return how an output differs from what a page shows; "" if it does not.

    Words and whole numbers have to be equal. Decimals may differ by a fifth, or by .05: processors and
    releases of torch round differently, and training amplifies that.

    >>> differences("accuracy 0.951 of 40", "accuracy  0.947 of 40")
    ''
    >>> differences("accuracy 0.951 of 40", "accuracy 0.947 of 50")
    'shown: accuracy # of 40\\nprinted: accuracy # of 50'
    >>> differences("NLL 1.5", "NLL 2.5")
    'shown: 1.5, printed: 2.5'
    """
    texts = [" ".join(NUMBER.sub("#", text).split()) for text in (shown, printed)]
    if texts[0] != texts[1]:
        return f"shown: {texts[0]}\nprinted: {texts[1]}"
    for a, b in zip(*(map(float, NUMBER.findall(text)) for text in (shown, printed)), strict=True):
        if abs(a - b) > max(0.05, 0.2 * abs(a)):
            return f"shown: {a:g}, printed: {b:g}"
    return ""


def figures(page: Path) -> dict[Path, Path]:
    """Return the pictures that a page has drawn into the current folder, and where it shows them."""
    targets = IMAGE.findall(page.read_text("utf-8"))
    shown = [Path(os.path.normpath(page.resolve().parent / target)) for target in targets]
    return {Path(path.name): path for path in shown if Path(path.name).exists()}


def copy(drawn: Path, shown: Path) -> None:
    """Copy a picture; a PNG with 256 colours, which takes a third of the space."""
    if drawn.suffix == ".png":
        from PIL import Image

        with Image.open(drawn) as picture:
            picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
                shown, optimize=True
            )
    else:
        shutil.copyfile(drawn, shown)


def write(page: Path) -> None:
    """Run a page in a folder of its own and write its outputs and pictures back."""
    page, start = page.resolve(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = list(run(page))
        for drawn, shown in figures(page).items():
            shown.parent.mkdir(parents=True, exist_ok=True)
            copy(drawn, shown)
            print(f"{shown.relative_to(ROOT)}: {shown.stat().st_size / 1000:.0f} kB")
    text = page.read_text("utf-8")
    for block, printed in reversed(found):
        if block.output is not None:
            printed = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
            first, last = block.span
            text = text[:first] + printed + "\n" + text[last:]
    page.write_text(text, "utf-8")
    print(f"{page.relative_to(ROOT)}: {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    settings = {"MPLBACKEND": "agg", "SOURCE_DATE_EPOCH": "0", "COLUMNS": "80"}
    os.environ.update(settings)  # pictures and tables are then the same on every machine
    import torch

    torch.set_num_threads(1)
    for page in parser.parse_args().pages:
        write(page)


if __name__ == "__main__":
    main()
