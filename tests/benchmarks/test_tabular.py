"""The comparison on tables: every model is measured on the same folds, and the tables are of the records."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LinearRegression

from benchmarks import tabular
from lpbnn import LPBNNRegressor

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets, and models that take no time."""

    def tables() -> Iterator[tabular.Table]:
        yield tabular.Table("sign", "made here", X, (X[:, 0] > 0).astype(int), True)
        yield tabular.Table("plane", "made here", X, X @ np.array([3.0, 2.0, 1.0]), False)

    monkeypatch.setattr(tabular, "tables", tables)
    monkeypatch.setattr(
        tabular,
        "CLASSIFIERS",
        {"prior": DummyClassifier, "again": DummyClassifier},
    )
    models = {
        "mean": lambda random_state: DummyRegressor(),
        "line": lambda random_state: LinearRegression(),
        "ours": partial(LPBNNRegressor, "mcp", epochs=2),
    }
    monkeypatch.setattr(tabular, "REGRESSORS", models)


def test_every_model_is_measured_on_every_fold(small: None, tmp_path: Path) -> None:
    tabular.run(tmp_path / "tabular.csv")
    rows = tabular.read(tmp_path / "tabular.csv")
    assert len(rows) == 5 * tabular.FOLDS
    prior, again = ([row["nll"] for row in rows if row["model"] == m] for m in ("prior", "again"))
    assert prior == again
    assert float(prior[0]) == pytest.approx(np.log(2), abs=0.02)
    mean = [float(row["rmse"]) for row in rows if row["model"] == "mean"]
    assert np.mean(mean) == pytest.approx(1, abs=0.1)  # of standardised targets
    assert max(float(row["rmse"]) for row in rows if row["model"] == "line") < 1e-9
    before = (tmp_path / "tabular.csv").read_text()
    tabular.run(tmp_path / "tabular.csv")  # measured sets are not measured again
    assert (tmp_path / "tabular.csv").read_text() == before


def test_the_best_of_a_set_is_bold_and_coverage_is_not_ranked(small: None, tmp_path: Path) -> None:
    tabular.run(tmp_path / "tabular.csv")
    shown = tabular.show(tmp_path / "tabular.csv")
    line = next(line for line in shown.splitlines() if line.startswith("| plane"))
    _, _, examples, mean, straight, ours, _ = (cell.strip() for cell in line.split("|"))
    assert examples == "60"
    assert straight.startswith("**0.000** / **")
    assert "**" not in mean + ours


def test_heads_are_compared_in_pairs(tmp_path: Path) -> None:
    rows = []
    for method, seed, fold, heads in product(tabular.OURS, "01", range(5), tabular.HEADS):
        own = heads == "own"
        row = {"examples": 9, "model": method, "seed": seed, "fold": fold, "heads": heads}
        numbers = {"rmse": 2 - own, "nll": fold - own, "coverage90": 0.9 + 0.05 * own, "width90": 1}
        labels = {
            "accuracy": 0.5 + 0.1 * own,
            "nll": fold * (1 + 0.1 * own),
            "ece": 0.2 - 0.1 * own,
        }
        rows.append({**row, **numbers, "set": "plane"})
        rows.append({**row, **labels, "set": "sign", "classes": 2})
    tabular.append(tmp_path / "rows.csv", tabular.FIELDS, rows)
    shown = tabular.show(tmp_path / "rows.csv")
    assert "| RMSE | 20 | -1.0000 ± 0.0000, 100 %, 0.002 |" in shown
    assert "| NLL of classes | 20 | +0.2000 ± 0.0471, 0 %," in shown
    assert "| distance of coverage90 to 0.9 | 20 | +0.0500 ±" in shown
    of_seed_0_and_own_heads = "| plane | 9 | **1.000** / **1.000** / 0.950 / 1.000 |"
    assert of_seed_0_and_own_heads in shown


def test_scikit_learns_sets_are_there() -> None:
    found = [table.name for _, table in zip(range(6), tabular.tables(), strict=False)]
    assert found == ["iris", "wine", "breast_cancer", "digits", "diabetes", "linnerud"]


def test_the_page_shows_the_records() -> None:
    page = (ROOT / "docs" / "howto" / "scikit-learn.md").read_text()
    assert tabular.show(ROOT / "results" / "tabular.csv") in page
