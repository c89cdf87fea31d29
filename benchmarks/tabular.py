"""LPBNNClassifier and LPBNNRegressor beside scikit-learn's estimators, five-fold, defaults for all.

    python -m benchmarks.tabular run results/tabular.csv    # appends the sets that the file lacks
    python -m benchmarks.tabular show results/tabular.csv   # the tables of docs/howto/scikit-learn.md

Nothing is tuned. Multilayer perceptrons get standardised inputs. scikit-learn's regressors predict no
variance: theirs is that of the residuals on 15 % of the training data, held out for this alone; the mean is
that of an estimator trained on all of it. Ours hold the same share out for early stopping.
"""

import argparse
import csv
import json
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
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
from lpbnn import metrics
from lpbnn.training.environment import environment

FOLDS = 5
LARGEST = 1000  # examples, a random part of a larger set
Z90 = 1.6448536269514722  # 90 % of a normal distribution are within so many standard deviations
SMALLEST_PROBABILITY = (
    1e-12  # in the NLL: forests give classes that no tree has seen the probability 0
)


class Table(NamedTuple):
    """A data set.

    Args:
        name: the set.
        source: the package that ships it, and its licence.
        X: (n, features).
        y: labels, or targets (n,) or (n, targets).
        classes: False for regression.
    """

    name: str
    source: str
    X: np.ndarray
    y: np.ndarray
    classes: bool


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


CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "HistGradientBoosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "RandomForest": lambda seed: RandomForestClassifier(random_state=seed),
    "MLP": lambda seed: make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
    "lpbnn": lambda seed: lpbnn.LPBNNClassifier("lpbnn", random_state=seed),
    "batchensemble": lambda seed: lpbnn.LPBNNClassifier("batchensemble", random_state=seed),
}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "HistGradientBoosting": lambda seed: HistGradientBoostingRegressor(random_state=seed),
    "RandomForest": lambda seed: RandomForestRegressor(random_state=seed),
    "MLP": lambda seed: make_pipeline(StandardScaler(), MLPRegressor(random_state=seed)),
    "lpbnn": lambda seed: lpbnn.LPBNNRegressor("lpbnn", random_state=seed),
    "batchensemble": lambda seed: lpbnn.LPBNNRegressor("batchensemble", random_state=seed),
}


def classify(
    make: Callable[[int], Any], X: Any, y: Any, X_test: Any, y_test: Any
) -> dict[str, float]:
    """Return accuracy, NLL and ECE of an estimator."""
    probs = torch.as_tensor(make(0).fit(X, y).predict_proba(X_test))
    labels = torch.as_tensor(y_test)
    own = probs.gather(1, labels.unsqueeze(1)).clamp_min(SMALLEST_PROBABILITY)
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": -float(own.log().mean()),
        "ece": metrics.ece(probs, labels),
    }


def regress(
    make: Callable[[int], Any], X: Any, y: Any, X_test: Any, y_test: Any
) -> dict[str, float]:
    """Return RMSE and NLL of standardised targets, and the coverage and width of the 90 % interval."""
    scale = y.std(0)
    several = y.ndim > 1 and isinstance(make(0), HistGradientBoostingRegressor)
    if isinstance(make(0), lpbnn.LPBNNRegressor):
        mean, std = make(0).fit(X, y).predict(X_test, return_std=True)
    else:

        def new() -> Any:
            return MultiOutputRegressor(make(0)) if several else make(0)

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


FIELDS = [
    "set",
    "source",
    "examples",
    "features",
    "classes",
    "model",
    "fold",
    "accuracy",
    "rmse",
    "nll",
]
FIELDS += [
    "ece",
    "coverage90",
    "width90",
    "seconds",
    "commit",
    "dirty",
    "device",
    "torch",
    "sklearn",
]


def run(path: Path) -> None:
    """Measure the sets that the file lacks, and append a row for every model and fold."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # of the MLPs' default number of epochs
    done = {row["set"] for row in read(path)} if path.exists() else set()
    facts = environment()
    made = {key: facts[key] for key in ("commit", "dirty", "device")}
    made |= {"torch": torch.__version__, "sklearn": sklearn.__version__}
    for name, source, X, y, classes in sorted(tables(), key=lambda table: len(table.X)):
        if name in done:
            continue
        measure = classify if classes else regress
        chosen = np.random.default_rng(0).permutation(len(X))[:LARGEST]
        X, y = X[chosen], y[chosen]
        kind = StratifiedKFold if classes else KFold
        folds = list(kind(FOLDS, shuffle=True, random_state=0).split(X, y if classes else None))
        rows = []
        for model, make in (CLASSIFIERS if classes else REGRESSORS).items():
            for fold, (train, test) in enumerate(folds):
                start = time.perf_counter()
                found = measure(make, X[train], y[train], X[test], y[test])
                row = {"set": name, "source": source, "model": model, "fold": fold}
                row |= {"examples": len(X), "features": X.shape[1]}
                row |= {"classes": len(np.unique(y)) if classes else ""}
                rows.append({**row, **found, "seconds": time.perf_counter() - start, **made})
            print(name, model, rows[-1], flush=True)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def show(path: Path) -> str:
    """Return the tables of a file as Markdown: means over the folds; the best of a set in bold."""
    rows = read(path)
    parts = []
    for classes, columns in (
        (True, {"accuracy": 1, "nll": -1, "ece": -1}),
        (False, {"rmse": -1, "nll": -1, "coverage90": 0, "width90": 0}),
    ):
        those = [row for row in rows if bool(row["classes"]) == classes]
        sets, models = ([*dict.fromkeys(row[key] for row in those)] for key in ("set", "model"))
        lines = [f"| set | examples | {' | '.join(f'{m}' for m in models)} |"]
        lines += ["|---" * (len(models) + 2) + "|"]
        for name in sets:
            mine = [row for row in those if row["set"] == name]
            means = {
                model: {
                    key: float(np.mean([float(row[key]) for row in mine if row["model"] == model]))
                    for key in columns
                }
                for model in models
            }
            cells = []
            for model in models:
                shown = []
                for key, sign in columns.items():
                    value = means[model][key]
                    best = max(sign * means[other][key] for other in models)
                    text = f"{value:.3f}"
                    shown.append(f"**{text}**" if sign and sign * value == best else text)
                cells.append(" / ".join(shown))
            lines.append(f"| {name} | {mine[0]['examples']} | {' | '.join(cells)} |")
        parts.append(f"{' / '.join(columns)}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tabular", description=__doc__)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given.file)
    else:
        print(show(given.file))


if __name__ == "__main__":
    main()
