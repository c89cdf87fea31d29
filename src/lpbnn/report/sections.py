"""The parts of the page, in their order; each is left out where the runs have no data for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lpbnn.report import gallery, html, scenes, settings, tables
from lpbnn.report.bars import MOST
from lpbnn.report.panels import (
    calibration,
    corruption,
    detection,
    intervals,
    posterior,
    predictions,
)
from lpbnn.report.runs import Group
from lpbnn.report.tables import PaperTable, Table
from lpbnn.report.tradeoffs import tradeoffs


class Section(NamedTuple):
    """A part of the page; ``name`` is its anchor."""

    name: str
    title: str
    body: str


def sections(groups: Sequence[Group], reference: PaperTable | None = None) -> list[Section]:
    """Every part that has something to show."""
    makers: list[tuple[str, str, Callable[[Sequence[Group]], str]]] = [
        ("comparison", "Comparison", lambda g: html.table(tables.compare(g, reference))),
        ("tradeoffs", "What it costs in accuracy", tradeoffs),
        ("calibration", "Calibration", calibration),
        ("curves", "Predictions", predictions),
        ("intervals", "Intervals", intervals),
        ("corruption", "Under corruption", corruption),
        ("detection", "In or out of distribution", in_or_out),
        ("members", "What the members say", members),
        ("maps", "Segmentations", maps),
        ("diversity", "Diversity", lambda g: diversity(g, reference)),
        ("cost", "Cost", cost),
        ("posterior", "The learned posterior", posterior),
        ("settings", "How it was made", made),
    ]
    found = [Section(name, title, make(groups)) for name, title, make in makers]
    return [section for section in found if section.body]


def in_or_out(groups: Sequence[Group]) -> str:
    """Confidences on what was trained for and on what was not; then uncertainty by its parts."""
    figures = detection(groups)
    if tables.measured_on(groups, "uncertainty") == ["test"]:
        return figures  # nothing to compare it with
    parts = _table(
        "Epistemic uncertainty should be larger on what was never seen than on the test set.",
        tables.uncertainty(groups),
    )
    title = "<h3>Uncertainty and its parts</h3>" if figures and parts else ""
    return figures + title + parts


def members(groups: Sequence[Group]) -> str:
    """The paper's figure of diversity."""
    return html.said(
        "Members should agree on test images (the same bar in every row of a cell) and disagree on "
        f"what was never seen. A cell has a row of bars per member (of more than {MOST}, {MOST} of them), one "
        "bar per class; the true class is bold; below stand the class they choose together and its "
        "probability. Of several seeds the first is shown.",
        gallery.member_grid(groups),
    )


def maps(groups: Sequence[Group]) -> str:
    """The paper's figure of segmentation."""
    return html.said(
        "An object that no network was trained on has no right class: where the outline is, a good network "
        "is unsure, so its two lower maps are dark inside and pale around. Test scenes with large "
        "anomalies, the same for all; of several seeds the first is shown.",
        scenes.segmentation_grid(groups),
    )


def diversity(groups: Sequence[Group], reference: PaperTable | None = None) -> str:
    """How differently the members err."""
    return _table(
        "Members that make different mistakes correct each other; the arrows point to more diversity.",
        tables.diversity(groups, reference),
    )


def cost(groups: Sequence[Group]) -> str:
    """Parameters, time, memory."""
    return _table(
        "What knowing costs, in parameters, time and memory; the grey numbers compare with the "
        "plain network.",
        tables.cost(groups),
    )


def made(groups: Sequence[Group]) -> str:
    """Settings, data, environment, commands."""
    runs = [run for group in groups for run in group.runs]
    blocks = [
        ("Settings", settings.differences(groups) + settings.shared(groups)),
        ("Data", settings.data(runs)),
        ("Environment", settings.environment(runs)),
        ("Commands", settings.commands(runs)),
    ]
    parts = [f"<div><h3>{title}</h3>{body}</div>" for title, body in blocks if body]
    return f'<div class="made">{"".join(parts)}</div>'


def _table(caption: str, table: Table) -> str:
    return html.said(caption, html.table(table, brief=True)) if table.columns else ""
