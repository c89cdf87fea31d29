"""The tables of the fair comparison (docs/results/protocol.md), from records of ``python -m benchmarks.fair``.

``make_tables`` writes the CSV, a row for each run and noise scale; ``make_results`` writes the page.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student
from tools.columns import Column, Row, flat

from benchmarks.rows import markdown
from lpbnn.report.runs import title

FOLDER = "fair-cifar10"  # of the archive; the CSV has the same name
ORDER = (
    *("mcp", "batchensemble", "mcdropout", "rank1", "meanfield", "edl", "lpbnn", "lpbnn-paper"),
    "ensemble",
)
REFERENCE = "lpbnn"
LEVEL = 0.95

ACCURACY = Column("raw/test/accuracy", "accuracy % ↑", percent=True)
NLL, NLL_T = (
    Column("raw/test/nll", "NLL ↓"),
    Column("tempered/test/nll", "NLL with T ↓"),
)
ECE, ECE_T = (
    Column("raw/test/ece", "ECE ↓"),
    Column("tempered/test/ece", "ECE with T ↓"),
)
CA = Column("raw/corruption/ca", "cA % ↑", percent=True)
CE, CE_T = (
    Column("raw/corruption/ce", "cE ↓"),
    Column("tempered/corruption/ce", "cE with T ↓"),
)
AUROC = {
    (data, score): Column(f"raw/ood/{data}/{score}/auroc", f"{name}, {words} ↑")
    for data, name in (("svhn", "SVHN"), ("cifar100", "CIFAR-100"))
    for score, words in (("max", "1 - max"), ("entropy", "entropy"))
}
MAIN = (ACCURACY, NLL, NLL_T, ECE, ECE_T, CA, CE, CE_T)
COMPARED = (
    *(ACCURACY, NLL_T, ECE, ECE_T, CE, CE_T),
    *(AUROC["svhn", "entropy"], AUROC["cifar100", "entropy"]),
)


def record_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each noise scale with which a run was measured."""
    config, training = record.get("config", {}), record.get("training", {})
    environment = record["environment"]
    stage, _, rest = record["job"].partition("-")  # final-METHOD-CANDIDATE-SEED, ensemble-NUMBER
    own = {
        "run": record["job"],
        "stage": stage,
        "method": rest.rsplit("-", 2)[0] if config else stage,
        "options": json.dumps(config["method_options"]) if config else "",
        "weight_decay": config.get("optim", {}).get("weight_decay", ""),
        "seed": config.get("seed", ""),
        "members": " ".join(record.get("members", ())),
        "commit": environment["commit"],
        "device": environment["device"],
        "torch": environment["versions"]["torch"],
        "seconds": training.get("seconds", ""),
        "beside": environment["beside"],
    }
    rows = []
    for noise, found in record["noise"].items():
        numbers = {
            f"{kind}/{path}": value
            for kind in ("raw", "tempered")
            for path, value in flat(found[kind]).items()
            if not path.startswith("corruption/sets/")  # they are in the record alone
        }
        scale = {"noise": noise, "scale": found["scale"], "temperature": found["temperature"]}
        rows.append({**own, **scale, **numbers})
    return rows


def csv_text(content: Mapping[str, bytes]) -> str:
    """Return the CSV of the records in an archive.

    A run that was made again lies in a folder below the first one's, and counts in its place.
    """
    names = sorted(name for name in content if name.startswith(f"{FOLDER}/"))
    latest = {Path(name).name: name for name in sorted(names, key=lambda name: name.count("/"))}
    rows = [
        row for _, name in sorted(latest.items()) for row in record_rows(json.loads(content[name]))
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


class Interval(NamedTuple):
    """The mean of paired differences and the half width of its t interval."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Interval:
    """Return the mean difference first - second over the seeds that both have, with its interval.

    >>> paired({"0": 1.0, "1": 2.0, "2": 3.0}, {"0": 0.5, "1": 1.5, "2": 2.0})
    Interval(mean=0.666..., half=0.717...)
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if len(differences) < 2:
        return Interval(fmean(differences) if differences else math.nan, math.inf)
    count = len(differences)
    quantile = float(student.ppf((1 + LEVEL) / 2, count - 1))
    return Interval(fmean(differences), quantile * stdev(differences) / math.sqrt(count))


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the measured rows by method and noise, in the order of the tables."""
    kinds = [(method, noise) for method in ORDER for noise in ("trained", "fitted")]
    measured = [row for row in rows if row["stage"] != "trial"]
    found = {
        kind: [row for row in measured if (row["method"], row["noise"]) == kind] for kind in kinds
    }
    return {kind: own for kind, own in found.items() if own}


def by_seed(rows: Sequence[Row], column: Column) -> dict[str, float]:
    return {row["seed"]: float(row[column.key]) for row in rows}


def name_of(method: str) -> str:
    """Return the name of a method of the plan.

    >>> name_of("lpbnn-paper")
    'LP-BNN (paper)'
    """
    base, _, variant = method.partition("-")
    return f"{title(base)} ({variant})" if variant else title(base)


def label(kind: tuple[str, str], rows: Sequence[Row]) -> str:
    """Return a row's name, with the noise scale where it was fitted."""
    method, noise = kind
    if noise == "trained":
        return name_of(method)
    return f"{name_of(method)}, tau {fmean(float(row['scale']) for row in rows):.2f}"


def spread(rows: Sequence[Row], column: Column) -> str:
    """Return mean ± standard deviation; of ensembles, which overlap, the mean alone."""
    text = column.mean(rows)
    return text.partition(" ")[0] if rows[0]["method"] == "ensemble" else text


def main_table(rows: Sequence[Row], columns: Sequence[Column] = MAIN) -> str:
    """Return the table of means and standard deviations over seeds."""
    lines = [
        [label(kind, own), str(len(own)), *(spread(own, column) for column in columns)]
        for kind, own in groups(rows).items()
    ]
    return markdown(["method", "n", *(column.title for column in columns)], lines)


def difference(first: Sequence[Row], second: Sequence[Row], column: Column) -> str:
    """Return a paired difference with its interval; bold where that excludes zero."""
    found = paired(by_seed(first, column), by_seed(second, column))
    text = f"{column.text(found.mean, '+')} ±{column.text(found.half)}"
    return f"**{text}**" if found.excludes_zero else text


def difference_table(rows: Sequence[Row], noise: str) -> str:
    """Return LP-BNN with ``noise`` minus every other row."""
    found = groups(rows)
    reference = found.get((REFERENCE, noise), [])
    lines = [
        [label(kind, own), *(difference(reference, own, column) for column in COMPARED)]
        for kind, own in found.items()
        if kind != (REFERENCE, noise) and kind[0] != "ensemble" and reference
    ]
    return markdown(
        [f"{title(REFERENCE)} ({noise}) minus", *(column.title for column in COMPARED)],
        lines,
    )


def score_table(rows: Sequence[Row]) -> str:
    """Return the AUROC of both scores, and their paired difference: entropy minus 1 - max."""
    lines = []
    for kind, own in groups(rows).items():
        line = [label(kind, own), str(len(own))]
        for data in ("svhn", "cifar100"):
            line += [spread(own, AUROC[data, score]) for score in ("max", "entropy")]
            text = difference_of_scores(own, data)
            line.append(text)
        lines.append(line)
    heads = ["method", "n"]
    for data in ("svhn", "cifar100"):
        heads += [AUROC[data, "max"].title, AUROC[data, "entropy"].title, "difference"]
    return markdown(heads, lines)


def difference_of_scores(rows: Sequence[Row], data: str) -> str:
    """Return the AUROC of the entropy minus that of 1 - max, of the same runs."""
    entropy, maximum = (
        {row["run"]: float(row[AUROC[data, score].key]) for row in rows}
        for score in ("entropy", "max")
    )
    found = paired(entropy, maximum)
    if rows[0]["method"] == "ensemble":
        return f"{found.mean:+.4f}"
    text = f"{found.mean:+.4f} ±{found.half:.4f}"
    return f"**{text}**" if found.excludes_zero else text


def trial_table(rows: Sequence[Row]) -> str:
    """Return the trials on the held-out images, by which the settings were chosen."""
    lines = []
    for row in sorted(
        (row for row in rows if row["stage"] == "trial"),
        key=lambda row: (ORDER.index(row["method"]), row["run"]),
    ):
        chosen = any(
            (other["method"], other["options"], other["weight_decay"])
            == (row["method"], row["options"], row["weight_decay"])
            for other in rows
            if other["stage"] == "final"
        )
        options = json.loads(row["options"]) or {"weight decay": row["weight_decay"]}
        setting = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items())
        numbers = (
            f"{100 * float(row['raw/held_out/accuracy']):.2f}",
            *(f"{float(row[f'tempered/held_out/{key}']):.4f}" for key in ("nll", "ece")),
            f"{float(row['temperature']):.3f}",
        )
        lines.append([name_of(row["method"]), setting, *numbers, "yes" if chosen else ""])
    heads = ["method", "setting", "accuracy %", "NLL with T", "ECE with T", "T", "chosen"]
    return markdown(heads, lines)
