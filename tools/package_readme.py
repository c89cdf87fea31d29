"""Build hook: the readme of the package, without links that lead nowhere outside of the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(
    r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n\*.*?\*\n\n", re.DOTALL
)  # with its caption
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)[^)]*\)")
HIDDEN = re.compile(r"<!--.*?-->\n\n", re.DOTALL)


def without_relative_links(text: str) -> str:
    """Return Markdown whose relative links are their texts, without relative pictures and comments.

    Example:
        >>> without_relative_links(
        ...     "[a](docs/a.md), [`b`](https://b.org) ![c](c.png)\\n\\n*A [c](c.md).*\\n\\nEnd"
        ... )
        'a, [`b`](https://b.org) End'
    """
    return LINK.sub(r"\1", PICTURE.sub("", HIDDEN.sub("", text)))


class PackageReadme(MetadataHookInterface):
    """Give the package the readme that ``without_relative_links`` makes."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field ``readme`` of the project."""
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": without_relative_links(text),
        }
