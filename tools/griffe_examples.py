"""Griffe extension for the reference pages: doctests of docstrings become their section "Examples".

Griffe knows that section alone. Without it a doctest is read as Markdown, and ``[a][b]`` in it as a link.
"""

import re
from typing import Any

import griffe

DOCTEST = re.compile(
    r"(?:^Examples?:\n)?(?P<code>(?:^(?: {4})?>>> .*\n?(?:^(?! *$).*\n?)*\n*)+)", re.MULTILINE
)


def sectioned(text: str) -> str:
    """Return a docstring whose doctests are sections.

    Examples:
        >>> sectioned("Add.\\n\\n>>> 1 + 1\\n2")
        'Add.\\n\\nExamples:\\n    >>> 1 + 1\\n    2'
    """

    def section(found: re.Match[str]) -> str:
        lines = found["code"].rstrip("\n").split("\n")
        if not lines[0].startswith("    "):
            lines = [f"    {line}" if line else line for line in lines]
        return "Examples:\n" + "\n".join(lines) + "\n\n"

    return DOCTEST.sub(section, text).rstrip()


class Examples(griffe.Extension):
    """Give the doctests of every docstring a section."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = sectioned(obj.docstring.value)
