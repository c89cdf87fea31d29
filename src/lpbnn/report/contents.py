"""Which tables a report has: the comparison, severities, diversity, uncertainty, cost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from lpbnn.metrics.info import METRICS
from lpbnn.report.entries import score_meaning
from lpbnn.report.quantities import COSTS, DEVIATIONS, UNCERTAINTY
from lpbnn.report.runs import BASELINE, Group, Run, by_data, counted, grouped, read_runs
from lpbnn.report.tables import Cell, Column, PaperTable, Table, build
from lpbnn.training.environment import were_alone
from lpbnn.training.rundir import RunDir

TEST = ("miou", "accuracy", "nll", "rmse", "coverage", "ece", "brier")
DETECTION = ("auroc", "aupr", "fpr95")
DIVERSITY = ("ratio_error", "q_statistic", "correlation", "disagreement")
PIXELS = {"pixels": "anomalies: per image", "pixels_pooled": "anomalies: pooled"}
ALL_SEVERITIES = [1, 2, 3, 4, 5]


def comparison(
    runs: Iterable[str | Path | RunDir | Run], reference: PaperTable | None = None
) -> Table:
    """Every method's metrics, seeds as mean and spread; the runs must be of one data set."""
    found = read_runs(runs)
    parts = by_data(found)
    if len(parts) > 1:
        held = ", ".join(f"{name} ({len(part)} runs)" for name, part in parts.items())
        raise ValueError(
            f"the runs are of several data sets: {held}; expected one, because their numbers do not "
            "compare. Fix: compare one at a time, or write a report, which has a part for each."
        )
    return compare(grouped(found), reference)


def compare(groups: Sequence[Group], reference: PaperTable | None = None) -> Table:
    """The comparison of runs that are read and grouped already."""
    columns = [Column(key, METRICS[key]) for key in TEST]
    paths: dict[str, tuple[str, ...]] = {key: ("test", key) for key in TEST}
    for name in measured_on(groups, "ood"):
        for key in DETECTION:
            columns.append(Column(f"{name}/{key}", METRICS[key], _set_title(name)))
            paths[f"{name}/{key}"] = ("ood", name, key)
    origins = counted(run.origin for group in groups for run in group.runs if run.origin)
    for key in ("ca", "ce"):
        columns.append(Column(key, METRICS[key], "corrupted: " + " / ".join(o for o, _ in origins)))
        paths[key] = ("corruption", key)
    cells = {
        group.label: {key: Cell.of(group.values(*path)) for key, path in paths.items()}
        for group in groups
    }
    data = groups[0].runs[0].data
    notes = _fairness_notes(groups) + _pixel_notes(groups)
    notes += _score_notes(groups) + _corruption_notes(groups)
    return build(f"Comparison on {data.name}", columns, groups, cells, notes, reference)


def severity(
    groups: Sequence[Group],
    keys: Sequence[str] = ("accuracy", "ece"),
    reference: PaperTable | None = None,
) -> Table:
    """Metrics at each severity of corruption, means over the corruptions, then over all (cA, cE)."""
    levels = sorted(
        {n for g in groups for run in g.runs for n in run.at("corruption", "severities") or {}}
    )
    columns, paths = [], {}
    for key in keys:
        for level in levels:
            columns.append(Column(f"{level}/{key}", METRICS[key], f"severity: {level}"))
            paths[f"{level}/{key}"] = ("corruption", "severities", level, key)
        whole = {"accuracy": "ca", "ece": "ce"}[key]
        columns.append(Column(whole, METRICS[whole], "all: severities"))
        paths[whole] = ("corruption", whole)
    cells = {
        group.label: {name: Cell.of(group.values(*path)) for name, path in paths.items()}
        for group in groups
    }
    if reference is not None:  # only the means over all are published
        reference = reference.only("ca", "ce")
    notes = _corruption_notes(groups)
    return build("Under corruption, by severity", columns, groups, cells, notes, reference)


def diversity(groups: Sequence[Group], reference: PaperTable | None = None) -> Table:
    """How differently the members err, on the test images and on corrupted ones."""
    columns, cells = [], {group.label: {} for group in groups}
    for part, words in (("test", "test"), ("corrupted", "corrupted")):
        for key in DIVERSITY:
            columns.append(Column(f"{part}/{key}", METRICS[key], words))
            for group in groups:
                values = group.values("diversity", part, key)
                cells[group.label][f"{part}/{key}"] = Cell.of(values)
    several = [group for group in groups if any(c.values for c in cells[group.label].values())]
    return build("Diversity of the members", columns, several, cells, (), reference, groups)


def uncertainty(groups: Sequence[Group]) -> Table:
    """Mean uncertainty and its two parts, on what was trained for and on what was not."""
    columns, cells = [], {group.label: {} for group in groups}
    regression = groups[0].runs[0].data.task == "regression"
    for name in measured_on(groups, "uncertainty"):
        for key, info in (DEVIATIONS if regression else UNCERTAINTY).items():
            part = name if name == "test" else _set_title(name)
            columns.append(Column(f"{name}/{key}", info, part, marked=False))
            for group in groups:
                values = group.values("uncertainty", name, key)
                if regression:
                    values = [_deviation(run, v) for run, v in zip(group.runs, values, strict=True)]
                cells[group.label][f"{name}/{key}"] = Cell.of(values)
    return build("Uncertainty and its parts", columns, groups, cells)


def cost(groups: Sequence[Group]) -> Table:
    """What a method costs, also relative to the plain network where that is among the rows."""
    columns = [Column(key, info, marked=False) for key, info in COSTS.items()]
    cells = {group.label: {key: _measured(_costs(group, key)) for key in COSTS} for group in groups}
    base = next((group for group in groups if group.method == BASELINE), None)
    notes = _cost_notes(groups)
    if base is not None and len(groups) > 1:
        ours = {key: cell.mean for key, cell in cells[base.label].items()}
        for numbers in cells.values():
            for key, cell in numbers.items():
                base_mean = ours[key]
                if cell.mean is not None and base_mean:
                    numbers[key] = replace(cell, relative=cell.mean / base_mean)
        notes.append(f"×: relative to {base.label}.")
    return build("Cost", columns, groups, cells, notes)


def _deviation(run: Run, variance: float | None) -> float | None:
    """A variance of the standardised target as a deviation in the target's own unit."""
    return None if variance is None else run.data.target_std * math.sqrt(max(variance, 0.0))


def _costs(group: Group, key: str) -> list[float | None]:
    """Of every run; times of those that shared the device only where all of the row did."""
    values = group.values(*key.split("/"))
    alone = [were_alone(run.sessions) for run in group.runs]
    if "second" not in key or not any(alone):
        return values
    return [value if by_itself else None for value, by_itself in zip(values, alone, strict=True)]


def _measured(values: Iterable[float | None]) -> Cell:
    """A zero says that the system does not tell."""
    return Cell.of(value or None for value in values)


def measured_on(groups: Sequence[Group], key: str) -> list[str]:
    """The sets that any run was measured on."""
    return list(dict.fromkeys(n for g in groups for r in g.runs for n in r.at(key) or {}))


def _set_title(name: str) -> str:
    """An out-of-distribution set; of pixels, how their images are taken together.

    >>> _set_title("svhn"), _set_title("pixels_pooled")
    ('OOD: svhn', 'anomalies: pooled')
    """
    return PIXELS.get(name, f"OOD: {name}")


def _pixel_notes(groups: Sequence[Group]) -> list[str]:
    """What was done with the pixels of many images."""
    if groups[0].runs[0].data.task != "segmentation":
        return []
    notes = ["mIoU, ECE and the like are of all test pixels but void and anomalous ones."]
    if any(name in PIXELS for name in measured_on(groups, "ood")):
        notes.append(
            "Anomalies per image: computed in each image that has anomalous pixels, then averaged (the "
            "paper's protocol); pooled: over the pixels of all test images together, by a histogram. Void "
            "pixels are left out of both."
        )
    return notes


def _fairness_notes(groups: Sequence[Group]) -> list[str]:
    """What the rows do not share although a fair comparison would."""
    differing = []
    for name in ("backbone", "epochs", "batch_size", "precision"):
        values = dict.fromkeys(str(group.settings.get(name)) for group in groups)
        if len(values) > 1:
            differing.append(f"{name.replace('_', ' ')} ({', '.join(values)})")
    predictions: dict[int, list[str]] = {}
    for group in groups:
        for number in dict.fromkeys(n for n in group.values("cost", "members") if n):
            predictions.setdefault(number, []).append(group.label)
    if len(predictions) > 1:
        told = "; ".join(f"{n}: {', '.join(predictions[n])}" for n in sorted(predictions))
        differing.append(f"the number of predictions that are averaged ({told})")
    return [f"The rows differ in {', '.join(differing)}."] if differing else []


def _score_notes(groups: Sequence[Group]) -> list[str]:
    """By what strange inputs are told: methods may have a measure of their own."""
    if not measured_on(groups, "ood"):
        return []
    task = groups[0].runs[0].data.task
    usual = f"Out-of-distribution score: {score_meaning(task, 'confidence')}"
    others = [f"{g.label} ({score})" for g in groups if (score := own_score(g)) is not None]
    return [f"{usual}{'; its own has ' * bool(others)}{', '.join(others)}."]


def own_score(group: Group) -> str | None:
    """Return the name of the method's own out-of-distribution score; None for the usual one."""
    score = group.settings.get("method_options.score", "confidence")
    return None if score == "confidence" or group.runs[0].data.task == "regression" else score


def _corruption_notes(groups: Sequence[Group]) -> list[str]:
    """Whose corruptions, of how many images: numbers on different ones do not compare."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            if corruption := run.at("corruption"):
                levels = [int(level) for level in corruption["severities"]]
                text = f"{len(corruption['sets'])} corruptions ({run.origin}), severities "
                text += ", ".join(map(str, levels)) if levels != ALL_SEVERITIES else "1 to 5"
                text += f", {corruption['images']:,} images each"
                found.setdefault(text, []).append(group.label)
    if len(found) == 1:
        return [f"cA and cE: {text}." for text in found]
    return [f"cA and cE of {', '.join(dict.fromkeys(who))}: {text}." for text, who in found.items()]


def _cost_notes(groups: Sequence[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs if run.at("cost")]
    devices = counted(run.at("cost", "device") for run in runs)
    kinds = counted(run.at("cost", "memory") for run in runs)
    notes = []
    if devices:
        caution = "; times on different devices do not compare" * (len(devices) > 1)
        notes.append(f"Measured on {_listed(devices)}{caution}.")
    rows = [[were_alone(run.sessions) for run in group.runs] for group in groups]
    if left_out := sum(alone.count(False) for alone in rows if any(alone)):
        notes.append(
            f"{left_out} runs shared their device with others: their times are left out, because others of "
            "their row had it to themselves."
        )
    if shared := sum(len(alone) for alone in rows if not any(alone)):
        notes.append(f"{shared} runs shared their device with others: alone they are faster.")
    if in_turn := sum(
        were_alone(run.sessions) and any(one.get("beside", 1) > 1 for one in run.sessions)
        for run in runs
    ):
        notes.append(
            f"{in_turn} runs had the device to themselves, but were compiled beside others, which is part "
            "of their training's time: alone they compile faster."
        )
    if kinds:
        shared = any("resident" in kind for kind, _ in kinds)
        caution = ", with all that it held before: compare it only between processes" * shared
        notes.append(f"Memory: {_listed(kinds)}{caution}.")
    return notes


def _listed(values: list[tuple[str, int]]) -> str:
    if len(values) == 1:
        return values[0][0]
    return ", ".join(f"{value} ({n} runs)" for value, n in values)
