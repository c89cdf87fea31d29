"""LPBNNClassifier and LPBNNRegressor beside scikit-learn's estimators, five-fold, defaults for all.

    python -m benchmarks.tabular run results/tabular.csv    # appends what the file lacks
    python -m benchmarks.tabular show results/tabular.csv   # the tables of docs/howto/scikit-learn.md

Nothing is tuned. Multilayer perceptrons get standardised inputs. scikit-learn's regressors predict no
variance: theirs is that of the residuals on 15 % of the training data, held out for this alone; the mean is
that of an estimator trained on all of it. Ours hold the same share out for early stopping. They are measured
with two seeds, with a last layer for each member (``heads`` "own", the default) and with one ("shared").
"""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from scipy.stats import wilcoxon
from sklearn import datasets
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lpbnn
from benchmarks.rows import MADE, append, command, made, markdown, read, timed
from lpbnn import metrics

FOLDS = 5
LARGEST = 1000  # examples, a random part of a larger set
SEEDS = (0, 1)  # of ours; the others have 0 alone
Z90 = 1.6448536269514722  # 90 % of a normal distribution are within so many standard deviations
# In the NLL: forests give classes that no tree has seen the probability 0.
SMALLEST_PROBABILITY = 1e-12


class Table(NamedTuple):
    """A data set: ``X`` is (n, features), ``y`` labels or targets, (n,) or (n, targets)."""

    name: str
    source: str  # the package that ships it, and its licence
    X: np.ndarray
    y: np.ndarray
    classes: bool  # False for regression


def tables() -> Iterator[Table]:
    """Yield the sets of scikit-learn, and those of statsmodels and vega_datasets if these are installed."""
    own = "scikit-learn, BSD-3-Clause"
    for name in ("iris", "wine", "breast_cancer", "digits", "diabetes", "linnerud"):
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        yield Table(name, own, X, y, name not in ("diabetes", "linnerud"))
    for package, read_sets in (("statsmodels", statsmodels), ("vega_datasets", vega)):
        if find_spec(package) is None:
            print(f"{package} is not installed: its sets are left out")
        else:
            yield from read_sets()


def statsmodels() -> Iterator[Table]:
    """Yield three sets of statsmodels."""
    for name, target, licence in (
        ("anes96", "vote", "public domain"),
        ("fair", "affairs", "with permission of the author"),
        ("randhie", "mdvis", "public domain"),
    ):
        data = import_module(f"statsmodels.datasets.{name}").load_pandas().data
        y = data.pop(target).to_numpy(float)
        classes = name != "randhie"
        labels = (y > 0).astype(int)  # a vote for one of two; any affair
        source = f"statsmodels, {licence}"
        yield Table(name, source, data.to_numpy(float), labels if classes else y, classes)


def vega() -> Iterator[Table]:
    """Yield the fuel economy of cars, without the few that lack a number."""
    cars = json.loads(import_module("vega_datasets").data.cars.raw())
    cars = [car for car in cars if None not in car.values()]
    numbers = ["Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration"]
    places = sorted({car["Origin"] for car in cars})
    X = [
        [float(car[name]) for name in numbers]
        + [float(car["Year"][:4])]
        + [float(car["Origin"] == place) for place in places]
        for car in cars
    ]
    y = np.array([car["Miles_per_Gallon"] for car in cars])
    yield Table("cars", "vega_datasets, MIT", np.array(X), y, False)


def _mlp(estimator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: make_pipeline(StandardScaler(), estimator(**options))


Make = Callable[..., Any]
OURS = ("lpbnn", "batchensemble")
HEADS: dict[str, Any] = {"own": {}, "shared": {"unshared": None}}  # method options
CLASSIFIERS: dict[str, Make] = {
    "HistGradientBoosting": HistGradientBoostingClassifier,
    "RandomForest": RandomForestClassifier,
    "MLP": _mlp(MLPClassifier),
    **{method: partial(lpbnn.LPBNNClassifier, method) for method in OURS},
}
REGRESSORS: dict[str, Make] = {
    "HistGradientBoosting": HistGradientBoostingRegressor,
    "RandomForest": RandomForestRegressor,
    "MLP": _mlp(MLPRegressor),
    **{method: partial(lpbnn.LPBNNRegressor, method) for method in OURS},
}


def classify(make: Make, X: Any, y: Any, X_test: Any, y_test: Any) -> dict[str, float]:
    """Return accuracy, NLL and ECE of an estimator."""
    probs = torch.as_tensor(make().fit(X, y).predict_proba(X_test))
    labels = torch.as_tensor(y_test)
    own = probs.gather(1, labels.unsqueeze(1)).clamp_min(SMALLEST_PROBABILITY)
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": -float(own.log().mean()),
        "ece": metrics.ece(probs, labels),
    }


def regress(make: Make, X: Any, y: Any, X_test: Any, y_test: Any) -> dict[str, float]:
    """Return RMSE and NLL of standardised targets, and the coverage and width of the 90 % interval."""
    scale = y.std(0)
    several = y.ndim > 1 and isinstance(make(), HistGradientBoostingRegressor)
    if isinstance(make(), lpbnn.LPBNNRegressor):
        mean, std = make().fit(X, y).predict(X_test, return_std=True)
    else:

        def new() -> Any:
            return MultiOutputRegressor(make()) if several else make()

        part, rest, y_part, y_rest = train_test_split(X, y, test_size=0.15, random_state=0)
        std = np.sqrt(np.square(new().fit(part, y_part).predict(rest) - y_rest).mean(0))
        mean = new().fit(X, y).predict(X_test)
        std = np.broadcast_to(std, mean.shape)
    error, std = (mean - y_test) / scale, std / scale
    nll = 0.5 * np.square(error / std) + np.log(std) + 0.5 * np.log(2 * np.pi)
    return {
        "rmse": float(np.sqrt(np.square(error).mean())),
        "nll": float(nll.mean()),
        "coverage90": float((np.abs(error) <= Z90 * std).mean()),
        "width90": float(2 * Z90 * std.mean()),
    }


MEASURED = ("accuracy", "rmse", "nll", "ece", "coverage90", "width90", "seconds")
FIELDS = ("set", "source", "examples", "features", "classes", "model", "fold", *MEASURED, *MADE)
FIELDS = (*FIELDS, "sklearn", "heads", "seed")


def settings(models: dict[str, Make]) -> Iterator[tuple[str, str, int, Make]]:
    """Yield the name of every model, its heads and its seed, and a function that makes it."""
    for name, make in models.items():
        if name not in OURS:
            yield name, "", 0, partial(make, random_state=0)
            continue
        for seed, (heads, options) in product(SEEDS, HEADS.items()):
            yield name, heads, seed, partial(make, random_state=seed, method_options=options)


def run(path: Path) -> None:
    """Measure the models that the file lacks on a set, and append a row for every fold."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # of the MLPs' default number of epochs
    done = {tuple(row[key] for key in ("set", "model", "heads", "seed")) for row in read(path)}
    here = made() | {"sklearn": sklearn.__version__}
    for name, source, X, y, classes in sorted(tables(), key=lambda table: len(table.X)):
        measure = classify if classes else regress
        chosen = np.random.default_rng(0).permutation(len(X))[:LARGEST]
        X, y = X[chosen], y[chosen]
        kind = StratifiedKFold if classes else KFold
        folds = list(kind(FOLDS, shuffle=True, random_state=0).split(X, y if classes else None))
        for model, heads, seed, make in settings(CLASSIFIERS if classes else REGRESSORS):
            if (name, model, heads, str(seed)) in done:
                continue
            rows = []
            for fold, (train, test) in enumerate(folds):
                parts = (X[train], y[train], X[test], y[test])
                seconds, found = timed(partial(measure, make, *parts))
                row = {"set": name, "source": source, "model": model, "fold": fold}
                row |= {"heads": heads, "seed": seed}
                row |= {"examples": len(X), "features": X.shape[1]}
                row |= {"classes": len(np.unique(y)) if classes else ""}
                rows.append({**row, **found, "seconds": seconds, **here})
            append(path, FIELDS, rows)
            print(name, model, heads, seed, rows[-1], flush=True)


def show(path: Path) -> str:
    """Return the tables of a file as Markdown: means over the folds, and what heads of their own change."""
    rows = read(path)
    default = [row for row in rows if row["heads"] != "shared" and row["seed"] == "0"]
    tables = [
        means_table(default, True, {"accuracy": 1, "nll": -1, "ece": -1}),
        means_table(default, False, {"rmse": -1, "nll": -1, "coverage90": 0, "width90": 0}),
        heads_table(rows),
    ]
    return "\n".join(table for table in tables if table)


def means_table(rows: list[dict[str, str]], classes: bool, columns: dict[str, int]) -> str:
    """Return the means over the folds of classification or regression; the best of a set in bold.

    Args:
        rows: of the file.
        classes: True for classification.
        columns: the measures, with 1 if more is better, -1 if less is, 0 if neither.
    """
    those = [row for row in rows if bool(row["classes"]) == classes]
    sets, models = ([*dict.fromkeys(row[key] for row in those)] for key in ("set", "model"))
    lines = []
    for name in sets:
        mine = [row for row in those if row["set"] == name]
        means = {
            (model, key): float(np.mean([float(row[key]) for row in mine if row["model"] == model]))
            for model in models
            for key in columns
        }
        best = {key: max(sign * means[m, key] for m in models) for key, sign in columns.items()}
        cells = [
            " / ".join(
                f"**{means[model, key]:.3f}**"
                if sign and sign * means[model, key] == best[key]
                else f"{means[model, key]:.3f}"
                for key, sign in columns.items()
            )
            for model in models
        ]
        lines.append((name, mine[0]["examples"], *cells))
    return f"{' / '.join(columns)}:\n\n" + markdown(("set", "examples", *models), lines)


def heads_table(rows: list[dict[str, str]]) -> str:
    """Return what heads of their own change, over pairs of equal set, method, seed and fold; "" without any."""
    shared = {_pair(row): row for row in rows if row["heads"] == "shared"}
    pairs = [
        (row, shared[_pair(row)]) for row in rows if row["heads"] == "own" and _pair(row) in shared
    ]
    lines = []
    for name, key, classes in (
        ("accuracy", "accuracy", True),
        ("NLL of classes", "nll", True),
        ("ECE", "ece", True),
        ("RMSE", "rmse", False),
        ("NLL of numbers", "nll", False),
        ("distance of coverage90 to 0.9", "coverage90", False),
    ):
        cells, count = [], 0
        for methods in (*((method,) for method in OURS), OURS):  # both together last
            values = np.array(
                [
                    [float(row[key]) for row in pair]
                    for pair in pairs
                    if pair[0]["model"] in methods and bool(pair[0]["classes"]) == classes
                ]
            )
            if len(values) == 0:
                return ""
            own, other = (abs(values - 0.9) if key == "coverage90" else values).T
            change = own - other
            count = len(change)
            error, lower = change.std(ddof=1) / len(change) ** 0.5, (change < 0).mean()
            found: Any = wilcoxon(change)  # without pairs that are equal
            p = found.pvalue
            cells.append(f"{change.mean():+.4f} ± {error:.4f}, {100 * lower:.0f} %, {p:.2g}")
        lines.append((name, str(count), *cells))
    return (
        "change, standard error, share of pairs in which it is lower, p of Wilcoxon's test:\n\n"
        + markdown(("own instead of shared", "pairs", *OURS, "both"), lines)
    )


def _pair(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[key] for key in ("set", "model", "seed", "fold"))


if __name__ == "__main__":
    command("benchmarks.tabular", __doc__, run, show)
