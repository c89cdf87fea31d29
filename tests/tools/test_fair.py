"""The tables of the fair comparison hold the numbers of its records, and its intervals are right."""

import csv
import io
import json
from typing import Any

import pytest
from scipy import stats
from tools import fair

SCORES = {"auroc": 0.9, "aupr": 0.8, "fpr95": 0.2}


def measured(accuracy: float) -> dict[str, Any]:
    part = {"accuracy": accuracy, "nll": 0.2, "brier": 0.1, "ece": 1 - accuracy}
    ood = {data: {"max": SCORES, "entropy": SCORES} for data in ("svhn", "cifar100")}
    corruption = {"ca": 0.6, "ce": 0.2, "nll": 1.0, "brier": 0.5, "sets": {"fog/1": part}}
    return {"held_out": part, "test": part, "ood": ood, "corruption": corruption}


def record(method: str, seed: int, accuracy: float) -> dict[str, Any]:
    both = {"raw": measured(accuracy), "tempered": measured(accuracy)}
    return {
        "job": f"final-{method}-0-{seed}",
        "config": {"method": method, "method_options": {}, "seed": seed, "optim": {}},
        "training": {"seconds": 1.0},
        "environment": {"commit": "c", "device": "d", "versions": {"torch": "t"}, "beside": 6},
        "noise": {"trained": {"scale": 1.0, "temperature": 1.1, **both}},
    }


@pytest.fixture
def rows() -> list[dict[str, str]]:
    records = [record("mcp", seed, 0.9 + 0.01 * seed) for seed in range(3)]
    records += [record("lpbnn", seed, 0.91 + 0.01 * seed) for seed in range(3)]
    content = {f"{fair.FOLDER}/{one['job']}.json": json.dumps(one).encode() for one in records}
    return list(csv.DictReader(io.StringIO(fair.csv_text(content))))


def test_a_run_made_again_counts_in_place_of_the_first() -> None:
    first, again = record("mcp", 0, 0.9), record("mcp", 0, 0.8)
    content = {
        f"{fair.FOLDER}/{first['job']}.json": json.dumps(first).encode(),
        f"{fair.FOLDER}/again/{again['job']}.json": json.dumps(again).encode(),
    }
    only = {f"{fair.FOLDER}/{again['job']}.json": json.dumps(again).encode()}
    assert fair.csv_text(content) == fair.csv_text(only) != fair.csv_text({})


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    first, second = [0.91, 0.92, 0.95, 0.9], [0.9, 0.93, 0.92, 0.88]
    found = fair.paired(
        dict(zip("0123", first, strict=True)), dict(zip("0123", second, strict=True))
    )
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(tuple(expected))


def test_runs_are_paired_by_their_seed() -> None:
    found = fair.paired({"0": 1.0, "1": 3.0, "7": 9.0}, {"1": 2.0, "0": 0.5})
    assert found.mean == 0.75


def test_one_common_seed_excludes_nothing() -> None:
    assert not fair.paired({"0": 1.0}, {"0": 0.0}).excludes_zero


def test_a_row_has_every_number_of_its_record_but_single_sets(rows: Any) -> None:
    one = rows[0]
    assert float(one["raw/test/accuracy"]) == 0.91
    assert float(one["tempered/ood/svhn/entropy/auroc"]) == 0.9
    assert not [column for column in one if "sets" in column]


def test_a_difference_is_bold_where_its_interval_excludes_zero(rows: Any) -> None:
    text = fair.difference_table(rows, "trained")
    assert "**+1.00 ±0.00**" in text  # accuracy, in each seed
    assert "+0.0000 ±0.0000" in text  # cE: equal


def test_trials_are_in_no_table_of_results(rows: Any) -> None:
    trial = {**rows[0], "stage": "trial", "seed": "9"}
    assert fair.main_table([*rows, trial]) == fair.main_table(rows)
