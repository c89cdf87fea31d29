"""One self-contained page: no request, one script of its own, light and dark, wide and narrow."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from lpbnn.report.colours import assign
from lpbnn.report.html import esc
from lpbnn.report.runs import Group, Run, by_data, grouped, read_runs
from lpbnn.report.sections import Section, sections
from lpbnn.report.tables import PaperTable
from lpbnn.training.files import write_atomic
from lpbnn.training.rundir import RunDir

# Whatever a run's names contain, the browser loads nothing and runs nothing but the page's own script.
POLICY = "default-src 'none'; script-src '{script}'; style-src 'unsafe-inline'; img-src data:"
PAGE = """\
<!DOCTYPE html>
<html lang="en" style="--lines:{lines}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
<nav aria-label="Parts of this report">{nav}</nav>
<main>
{main}
</main>
<footer>Made by lpbnn {version} from {count}.</footer>
<script>{script}</script>
</body>
</html>
"""


def write_report(
    runs: Iterable[str | Path | RunDir | Run],
    out: str | Path,
    title: str | None = None,
    reference: PaperTable | None = None,
) -> Path:
    """Write the page about ``runs`` to ``out``, whose folder is made where it is missing.

    Runs of several data sets get a part each. ``reference`` puts published numbers beside ours.
    """
    target = Path(out)
    text = page(read_runs(runs), title, reference)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text.encode())
    return target


def tell_report(
    runs: Iterable[str | Path | RunDir | Run],
    out: str | Path,
    console: Console,
    title: str | None = None,
    reference: PaperTable | None = None,
    lead: str = "wrote",
) -> Path:
    """Write the page and print ``lead``, where it is, and whether it replaced an older file."""
    replaced = " (replaced the older one)" if Path(out).exists() else ""
    written = write_report(runs, out, title=title, reference=reference)
    console.print(escape(f"{lead} {written}{replaced}"), soft_wrap=True, highlight=False)
    return written


def page(runs: Sequence[Run], title: str | None = None, reference: PaperTable | None = None) -> str:
    """The page as text; the same runs give the same text."""
    chapters = {data: grouped(part) for data, part in by_data(runs).items()}
    rows = [(group.label, group.method) for groups in chapters.values() for group in groups]
    index = assign(rows)
    chapters = {
        data: [replace(group, index=index[group.label]) for group in groups]
        for data, groups in chapters.items()
    }
    several = len(chapters) > 1
    main, nav = [], []
    for number, (data, groups) in enumerate(chapters.items()):
        prefix = f"d{number}-" if several else ""
        found = sections(groups, reference)
        if several:
            main.append(f"<h2 class='chapter'>{esc(data)}</h2><p class='lead'>{_lead(groups)}</p>")
        main += [_section(section, prefix) for section in found]
        links = "".join(f'<a href="#{prefix}{s.name}">{esc(s.title)}</a>' for s in found)
        nav.append(f"<span>{f'<b>{esc(data)}</b>' * several}{links}</span>")
    first = next(iter(chapters))
    lead = _lead(chapters[first]) if not several else f"{len(chapters)} data sets."
    script = _own("page.js")
    return PAGE.format(
        policy=POLICY.format(script=_digest(script)),
        title=esc(title or f"Uncertainty on {' and '.join(chapters)}"),
        style=style(),
        lead=lead,
        nav="".join(nav),
        main="\n".join(main),
        version=esc(_version()),
        count=_plural(len(runs), "run"),
        script=script,
        lines=len(chapters),
    )


def style() -> str:
    """The style sheet, which says what every colour is."""
    return _own("style.css")


def _own(name: str) -> str:
    """A file of this package."""
    return resources.files("lpbnn.report").joinpath(name).read_text("utf-8")


def _digest(script: str) -> str:
    """The name of a script in a policy: its hash, so that no other one runs."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _lead(groups: Sequence[Group]) -> str:
    """What was compared, in a sentence or two."""
    runs = [run for group in groups for run in group.runs]
    info = runs[0].data
    networks = ", ".join(dict.fromkeys(str(run.settings["backbone"]) for run in runs))
    counts = f"{_plural(len(groups), 'method')}, {_plural(len(runs), 'run')}"
    diverged = sum(run.diverged is not None for run in runs)
    failed = f" {_plural(diverged, 'run')} diverged." if diverged else ""
    what = f"{info.name} ({info.description})" if info.description else info.name
    return esc(f"{counts} of {networks} on {what}.{failed}")


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _section(section: Section, prefix: str) -> str:
    where = esc(prefix + section.name)
    return f'<section id="{where}"><h2>{esc(section.title)}</h2>{section.body}</section>'


def _version() -> str:
    try:
        return metadata.version("lpbnn")
    except metadata.PackageNotFoundError:
        return ""
