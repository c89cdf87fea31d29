"""Make paper.md (the paper's tables) and fair-cifar10.md in docs/results from results/*.csv and *.jsonl.

Command: ``python -m tools.make_results``. The text around the tables is in tools/*_template.md.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tools import fair
from tools.columns import RESULTS, ROOT, Column, Row, numbers, value_of
from tools.make_tables import TABLES

from benchmarks.rows import markdown, read
from benchmarks.tables import COSTS, TABLE_3
from lpbnn.bench import ratio
from lpbnn.experiments import diversity, stability, table1, table2
from lpbnn.report.runs import title

PAGE = ROOT / "docs" / "results" / "paper.md"
TEMPLATE = Path(__file__).with_name("results_template.md")
FAIR_PAGE = ROOT / "docs" / "results" / "fair-cifar10.md"
FAIR_TEMPLATE = Path(__file__).with_name("fair_template.md")
NETWORKS = ("wrn-28-10", "wrn-16-4")
# The authors corrected their code in 2023 and replaced their row of CIFAR-10 (LP_BNN, commit e6f010c).
CORRECTED = {"accuracy": 0.9476, "auroc": 0.9670, "ece": 0.0148, "ca": 0.699, "ce": 0.2421}
RUNTIME_FILES = {
    "eager": ("bench/deeplab-eager-h200.json",),
    "compiled": (
        "bench/deeplab-compiled-h200.json",
        "bench/deeplab-ensemble-compiled-h200.json",
    ),
}
SEGMENTED = {"streethazards": "StreetHazards", "bdd-anomaly": "BDD-Anomaly"}
MARK = "†"  # a row whose record has a note of its own

Paper = Mapping[str, Mapping[str, float]]


ACCURACY = Column("test/accuracy", "accuracy % ↑", "accuracy", percent=True)
NLL, BRIER = Column("test/nll", "NLL ↓"), Column("test/brier", "Brier ↓")
ECE = Column("test/ece", "ECE ↓", "ece")
DETECTION = (
    Column("ood/svhn/auroc", "AUROC ↑", "auroc"),
    Column("ood/svhn/aupr", "AUPR ↑", "aupr"),
    Column("ood/svhn/fpr95", "FPR95 ↓", "fpr95"),
)
CORRUPTION = (
    Column("corruption/ca", "cA % ↑", "ca", percent=True),
    Column("corruption/ce", "cE ↓", "ce"),
    *(
        Column(f"corruption/severities/{severity}/ece", f"ECE, severity {severity} ↓")
        for severity in (1, 3, 5)
    ),
)
SEGMENTATION = (
    Column("test/miou", "mIoU % ↑", "miou", percent=True),
    Column("ood/pixels/auroc", "AUROC ↑", "auroc"),
    Column("ood/pixels/aupr", "AUPR ↑", "aupr"),
    Column("ood/pixels/fpr95", "FPR95 ↓", "fpr95"),
    ECE,
)
PAIRS = tuple(
    Column(f"diversity/{part}/{key}", f"{part}: {words}", f"{part}/{key}")
    for part in ("test", "corrupted")
    for key, words in zip(
        diversity.KEYS, ("ratio-error ↑", "Q-statistic ↓", "correlation ↓"), strict=True
    )
)


def page(folder: Path = RESULTS) -> str:
    """Return docs/results/paper.md; the same files give the same text."""
    tables = {
        name: read(folder / f"{name}.csv")
        for name in ("cifar10", "cifar100", "segmentation", "stability")
    }
    papers = {name: _paper(name) for name in ("cifar10", "cifar100")}
    both = [(name, tables[name], papers[name]) for name in papers]
    runs = sum(len(read(folder / f"{name}.csv")) for name in TABLES)
    columns = (ACCURACY, ECE, NLL, BRIER)
    return TEMPLATE.read_text().format(
        runs=runs,
        cifar10=_cifar(both[:1], columns),
        cifar100=_cifar(both[1:], columns),
        detection=_cifar([both[0], ("cifar100", tables["cifar100"], {})], DETECTION),
        corruption=_cifar(both, CORRUPTION),
        segmentation=_segmentation(tables["segmentation"]),
        runtime=_runtime(folder),
        stability=_stability(tables["stability"]),
        diversity=_diversity(tables["cifar10"]),
    )


def fair_page(folder: Path = RESULTS) -> str:
    """Return docs/results/fair-cifar10.md; the same file gives the same text."""
    rows = read(folder / f"{fair.FOLDER}.csv")
    return FAIR_TEMPLATE.read_text().format(
        trials=fair.trial_table(rows),
        main=fair.main_table(rows),
        trained=fair.difference_table(rows, "trained"),
        fitted=fair.difference_table(rows, "fitted"),
        scores=fair.score_table(rows),
    )


def _paper(name: str) -> dict[str, dict[str, float]]:
    return {method: dict(row) for method, row in table1.paper(name).rows.items()}


def _cifar(sets: Sequence[tuple[str, Sequence[Row], Paper]], columns: Sequence[Column]) -> str:
    """One table of all networks; the methods in the paper's order, then the others."""
    parted = len(sets) > 1
    shown = [
        (column, any(column.paper in row for _, _, paper in sets for row in paper.values()))
        for column in columns
    ]
    heads = [*["data"] * parted, "network", "method", "n"]
    for column, has_paper in shown:
        heads += [column.title, *["paper"] * has_paper]
    lines: list[list[str]] = []
    for name, rows, paper in sets:
        order = list(_paper(name))
        for network in NETWORKS:
            groups = _by(lambda row: row["method"], [r for r in rows if r["backbone"] == network])
            methods = sorted(
                groups, key=lambda m: (order.index(m) if m in order else len(order), m)
            )
            best = _best(groups, columns)
            for method in methods:
                own = groups[method]
                notes = {row["note"] for row in own if not row["note"].startswith("converted")}
                label = title(method) + MARK * bool(notes - {""})
                line = [*[name] * parted, f"`{network}`", label, str(len(own))]
                for column, has_paper in shown:
                    line.append(_cell(own, column, best[column.key] == method))
                    if has_paper:
                        line.append(_beside(paper, name, method, column))
                lines.append(line)
    return markdown(heads, lines, 2 + parted)


def _beside(paper: Paper, data: str, method: str, column: Column) -> str:
    value = paper.get(method, {}).get(column.paper or "")
    if value is None:
        return ""
    new = CORRECTED.get(column.paper or "") if (data, method) == ("cifar10", "lpbnn") else None
    return column.text(value) + (f" ({column.text(new)})" if new is not None else "")


def _segmentation(rows: Sequence[Row]) -> str:
    groups = _by(_variant, rows)
    order = list(table2.PAPER["streethazards"])
    best = _best(groups, SEGMENTATION)
    lines = [
        [
            "CamVid-Anomaly, ours",
            _titled(name),
            str(len(groups[name])),
            *(_cell(groups[name], c, best[c.key] == name) for c in SEGMENTATION),
        ]
        for name in sorted(groups, key=order.index)
    ]
    for data, paper in table2.PAPER.items():
        for name, values in paper.items():
            found = (
                f"{v:.2f}" if c.percent else f"{v:.4f}"
                for c, v in zip(SEGMENTATION, values, strict=True)
            )
            lines.append([f"{SEGMENTED[data]}, paper", _titled(name), "", *found])
    return markdown(["data", "method", "n", *(c.title for c in SEGMENTATION)], lines, 2)


def _runtime(folder: Path) -> str:
    text = (folder / "benchmarks.jsonl").read_text().splitlines()
    files = {line["file"]: line["content"] for line in map(json.loads, text)}
    heads = ["method"]
    for what in ("training time", "training memory", "test time", "test memory"):
        heads += [f"{what}: eager", "compiled", "paper"]
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for mode, names in RUNTIME_FILES.items():
        for one in (row for name in names for row in files[name]["rows"]):
            measured[one["case"]["method"], mode] = one
    lines = []
    for method in ("lpbnn", "batchensemble", "tradi", "ensemble"):
        line = [title(method)]
        for cost, paper in zip(COSTS, TABLE_3[method], strict=True):
            ours = (ratio(measured[method, mode], cost) for mode in RUNTIME_FILES)
            line += [*(f"{value:.2f}" for value in ours), f"{paper:.2f}"]
        lines.append(line)
    return markdown(heads, lines, 1)


def _stability(rows: Sequence[Row]) -> str:
    heads = ["data", "method", "n", *(f"lr {rate:g}" for rate in stability.RATES)]
    lines = []
    for data, own in _by(lambda row: row["data"], rows).items():
        for method in stability.NAMES:
            runs = [
                [r for r in own if r["method"] == method and float(r["lr"]) == rate]
                for rate in stability.RATES
            ]
            n = "/".join(dict.fromkeys(str(len(r)) for r in runs))
            ours = (
                _cell(r, ACCURACY, False) + _diverged(numbers(r, "train/diverged")) for r in runs
            )
            lines.append([data, title(method), n, *ours])
            if data == "cifar10":
                paper = stability.PAPER[method].values()
                theirs = (f"{accuracy:.2f}" + _diverged([e] if e else []) for accuracy, e in paper)
                lines.append([f"{data}, paper", title(method), "", *theirs])
    return markdown(heads, lines, 2)


def _diverged(epochs: Sequence[float]) -> str:
    return f" (diverged: {', '.join(f'{epoch:g}' for epoch in sorted(epochs))})" if epochs else ""


def _diversity(rows: Sequence[Row]) -> str:
    paper = diversity.paper().rows
    lines = []
    for network in NETWORKS:
        groups = _by(lambda row: row["method"], [r for r in rows if r["backbone"] == network])
        for method in diversity.METHODS:
            own = groups[method]
            ours = (_cell(own, c, False) for c in PAIRS)
            lines.append([f"`{network}`", title(method), str(len(own)), *ours])
    for method in diversity.METHODS:
        theirs = (PAIRS[i].text(paper[method][str(c.paper)]) for i, c in enumerate(PAIRS))
        lines.append(["paper", title(method), "", *theirs])
    return markdown(["network", "method", "n", *(c.title for c in PAIRS)], lines, 2)


def _by(key: Callable[[Row], str], rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _variant(row: Row) -> str:
    """Return the name of the row of the paper's Table 2."""
    options = value_of(row["backbone_options"])
    grouped = options.get("norm") == "group" and options.get("standardise")
    return row["method"] + "+gn" * bool(grouped)


def _titled(name: str) -> str:
    method, plus, what = name.partition("+")
    return title(method) + plus + what.upper()


def _best(groups: Mapping[str, Sequence[Row]], columns: Sequence[Column]) -> dict[str, str]:
    """Return the group with the best mean of each column, among those that have learned."""
    accuracy = {name: fmean(numbers(rows, ACCURACY.key)) for name, rows in groups.items()}
    learned = [name for name in groups if accuracy[name] > max(accuracy.values()) / 2]
    found: dict[str, str] = {}
    for column in columns:
        means = {name: fmean(numbers(groups[name], column.key)) for name in learned}
        found[column.key] = (min if "↓" in column.title else max)(
            means, key=lambda name: means[name]
        )
    return found


def _cell(rows: Sequence[Row], column: Column, best: bool) -> str:
    """Return mean ± standard deviation over the runs."""
    count = len(numbers(rows, column.key))
    if not count:
        return "not finite" if rows else ""
    return column.mean(rows, best) + (f" (of {count})" if count < len(rows) else "")


def main() -> None:
    for path, text in ((PAGE, page()), (FAIR_PAGE, fair_page())):
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
