"""One self-contained page: no request, one script of its own, light and dark, wide and narrow."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape

import lpbnn
from lpbnn.atomic import write_atomic
from lpbnn.report import figures, gallery, tables
from lpbnn.report.colours import COLOURS, MARKERS, assign
from lpbnn.report.results import fitting
from lpbnn.report.runs import Group, Run, by_data, grouped, plural, read_runs
from lpbnn.report.settings import made
from lpbnn.report.tables import RULE, PaperTable, Table
from lpbnn.report.verdict import in_words, verdict
from lpbnn.training.rundir import RunDir


class Section(NamedTuple):
    """A part of the page; ``name`` is its anchor and its macro in ``sections.html.j2``."""

    name: str
    title: str
    data: Any


class Picture(NamedTuple):
    """A section before the chapters: a drawing and the paragraphs that explain it."""

    name: str
    """The anchor."""
    title: str
    text: Sequence[str]
    svg: Markup


class Chapter(NamedTuple):
    """The part of the page about one data set."""

    data: str
    prefix: str
    """Of the anchors, where there are several chapters."""
    lead: str
    verdict: Sequence[str]
    figure: figures.Figure | None
    sections: Sequence[Section]


def write_report(
    runs: Iterable[str | Path | RunDir | Run],
    out: str | Path,
    title: str | None = None,
    reference: PaperTable | None = None,
    pictures: Sequence[Picture] = (),
    cost: str = "",
) -> Path:
    """Write the page about some runs.

    Args:
        runs: run folders; runs of several data sets get a part each.
            There may be none where there are pictures.
        out: the file; its folder is made where it is missing, an older page of that name is replaced.
        title: of the page; None names the data.
        reference: published numbers to stand beside ours.
        pictures: sections that open the page.
        cost: the verdict's sentence on cost, in place of the one that the runs give.

    Returns:
        the path of the page.
    """
    target = Path(out)
    runs = list(runs)
    text = page(read_runs(runs) if runs or not pictures else [], title, reference, pictures, cost)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Names of folders can be any bytes.
    write_atomic(target, text.encode(errors="backslashreplace"))
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


def page(
    runs: Sequence[Run],
    title: str | None = None,
    reference: PaperTable | None = None,
    pictures: Sequence[Picture] = (),
    cost: str = "",
) -> str:
    """The page as text; the same runs give the same text."""
    parts = {data: grouped(part) for data, part in by_data(runs).items()}
    # A row has the same colour in every chapter.
    index = assign((group.label, group.method) for groups in parts.values() for group in groups)
    chapters = []
    for number, (data, groups) in enumerate(parts.items()):
        prefix = f"d{number}-" if len(parts) > 1 else ""
        groups = [replace(group, index=index[group.label]) for group in groups]
        with fitting(run.path for run in runs):
            chapters.append(chapter(groups, data, prefix, reference, cost))
    script, style = _own("page.js"), _own("style.css")
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=title or f"Uncertainty on {in_words(list(parts))}",
            pictures=pictures,
            chapters=chapters,
            script=script,
            style=style,
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            version=lpbnn.__version__,
            count=plural(len(runs), "run"),
        )
    )


def chapter(
    groups: Sequence[Group],
    data: str,
    prefix: str = "",
    reference: PaperTable | None = None,
    cost: str = "",
) -> Chapter:
    """The verdict on the runs of a data set and every section that has something to show."""
    comparison = tables.compare(groups, reference)
    trade_offs = figures.trade_offs(groups)
    sections = [
        Section("comparison", "Comparison", comparison),
        Section("tradeoffs", "Trade-offs", trade_offs[1:]),
        Section("calibration", "Calibration", figures.calibration(groups)),
        Section("recalibration", "Before and after calibration", tables.recalibration(groups)),
        Section("conformal", "Prediction sets and intervals", tables.conformal(groups)),
        Section("risk", "Selective prediction", figures.risk_coverage(groups)),
        Section("curves", "Predictions", figures.predictions(groups)),
        Section("intervals", "Intervals", figures.intervals(groups)),
        Section("corruption", "Under corruption", figures.corruption(groups)),
        Section("detection", "Out of distribution", _in_or_out(groups)),
        Section("members", "Members", gallery.member_grid(groups)),
        Section("maps", "Segmentations", gallery.segmentation_grid(groups)),
        Section("diversity", "Diversity", tables.diversity(groups, reference)),
        Section("cost", "Cost", _cost(groups)),
        Section("training", "Training", figures.training(groups)),
        Section("posterior", "Posterior", figures.posterior(groups)),
        Section("settings", "How it was made", made(groups)),
    ]
    shown = [
        section
        for section in sections
        if section.name == "comparison"
        or (section.data.columns if isinstance(section.data, Table) else section.data)
    ]
    figure = trade_offs[0] if trade_offs else None
    return Chapter(data, prefix, _lead(groups), verdict(groups, comparison, cost), figure, shown)


def _in_or_out(groups: Sequence[Group]) -> dict[str, Any]:
    """The scores, and the uncertainties unless there is nothing to compare them with."""
    panels = figures.detection(groups)
    compared = tables.measured_on(groups, "uncertainty") != ["test"]
    parts = tables.uncertainty(groups) if compared else None
    parts = parts if parts is not None and parts.columns else None
    return {"panels": panels, "table": parts} if panels or parts else {}


def _cost(groups: Sequence[Group]) -> dict[str, Any]:
    table = tables.cost(groups)
    return {"charts": figures.costs(groups), "table": table} if table.columns else {}


@cache
def _templates() -> Environment:
    """The templates; whatever comes from a file is escaped."""
    found = Environment(
        loader=PackageLoader("lpbnn.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"COLOURS": COLOURS, "MARKERS": MARKERS, "RULE": RULE, "plural": plural}
    return found


def _own(name: str) -> Markup:
    """A file of this package that is no template."""
    loader = _templates().loader
    assert loader is not None
    return Markup(loader.get_source(_templates(), name)[0])


def _lead(groups: Sequence[Group]) -> str:
    """What was compared, in a sentence or two."""
    runs = [run for group in groups for run in group.runs]
    info = runs[0].data
    networks = ", ".join(dict.fromkeys(str(run.settings["backbone"]) for run in runs))
    methods = len({group.method for group in groups})
    settings = f" in {len(groups)} settings" * (len(groups) > methods)
    counts = f"{plural(methods, 'method')}{settings}, {plural(len(runs), 'run')}"
    diverged = sum(run.diverged is not None for run in runs)
    failed = f" {plural(diverged, 'run')} diverged." if diverged else ""
    what = f"{info.name} ({info.description})" if info.description else info.name
    return f"{counts} of {networks} on {what}.{failed}"
