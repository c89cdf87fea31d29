"""The scikit-learn estimators keep scikit-learn's contract and work inside of its tools."""

import copy
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from scipy import sparse
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris, load_linnerud
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import lpbnn
from lpbnn import LPBNNClassifier, LPBNNRegressor, methods

IRIS = load_iris(return_X_y=True)
QUICK: dict[str, Any] = {
    "hidden": (16,),
    "dropout": 0.0,
    "epochs": 20,
    "batch_size": 64,
    "lr": 0.05,
}
SMALL: dict[str, Any] = {**QUICK, "random_state": 0}
FEW = {"members": 2}  # of a rank-one method


def classifier(**options: Any) -> LPBNNClassifier:
    return LPBNNClassifier(**{**SMALL, "method_options": FEW, **options})


def regressor(**options: Any) -> LPBNNRegressor:
    return LPBNNRegressor(**{**SMALL, "method_options": FEW, **options})


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        LPBNNClassifier(**QUICK, method_options=FEW),
        LPBNNRegressor(**QUICK, method_options=FEW),
    ]
)
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_classifies_iris(method: str) -> None:
    model = LPBNNClassifier(method, **{**SMALL, "epochs": 60}).fit(*IRIS)
    probs = model.predict_proba(IRIS[0])
    assert model.score(*IRIS) > 0.85
    np.testing.assert_allclose(probs.sum(1), 1)


@pytest.mark.parametrize("method", methods.names())
def test_a_method_does_regression_or_refuses_it_by_name(method: str) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = LPBNNRegressor(method, **SMALL)
    try:
        model.fit(X, y)
    except ValueError as error:
        assert method in str(error)  # noqa: PT017
        assert "regression" in str(error)  # noqa: PT017
        return
    mean, std = model.predict(X, return_std=True)
    assert model.score(X, y) > 0.2
    assert 20 < std.mean() < 120  # in the units of y, whose standard deviation is 77
    assert np.corrcoef(mean, y)[0, 1] > 0.5


def test_the_same_seed_gives_the_same_estimator_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (classifier(random_state=seed).fit(*IRIS) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    probs = first.predict_proba(IRIS[0])
    assert np.array_equal(second.predict_proba(IRIS[0]), probs)
    assert not np.array_equal(other.predict_proba(IRIS[0]), probs)


def test_early_stopping_keeps_the_best_epoch() -> None:
    X, y = IRIS
    y = np.random.default_rng(0).permutation(y)  # nothing to learn: more epochs only overfit
    model = classifier(method="batchensemble", epochs=200, patience=5).fit(X, y)
    nll = model.validation_nll_
    assert model.n_iter_ == len(nll) == int(np.argmin(nll)) + 1 + 5 < 200
    _, held_out = model._split(len(X), y)
    p = model.predict_proba(X[held_out])
    assert -np.log(p[np.arange(len(held_out)), y[held_out]]).mean() == pytest.approx(min(nll))


def test_without_early_stopping_every_epoch_is_trained_on_all_data() -> None:
    model = classifier(epochs=3, early_stopping=False).fit(*IRIS)
    assert model.n_iter_ == 3
    assert model.validation_nll_ == []
    assert model.model_.num_data == len(IRIS[0])


def test_uncertainties_of_a_regressor_are_in_the_units_of_the_targets() -> None:
    X, y = load_linnerud(return_X_y=True)
    small = regressor().fit(X, y)
    large = regressor().fit(X, 1000 * y + 7)
    ours, theirs = small.uncertainty(X), large.uncertainty(X)
    assert ours.members is not None
    assert theirs.members is not None
    torch.testing.assert_close(theirs.mean, 1000 * ours.mean + 7)
    torch.testing.assert_close(theirs.members, 1000 * ours.members + 7)
    torch.testing.assert_close(theirs.total, 1e6 * ours.total)
    torch.testing.assert_close(theirs.ood_score, 1e6 * ours.ood_score)
    np.testing.assert_allclose(large.epistemic(X), 1000 * small.epistemic(X), rtol=1e-5)
    assert small.epistemic(X).shape == y.shape
    spread = ours.members.var(0, correction=0)
    torch.testing.assert_close(ours.epistemic, spread)


def test_epistemic_uncertainty_is_larger_far_from_the_data() -> None:
    X = np.random.default_rng(0).normal(size=(200, 1))
    model = regressor(epochs=100, method_options={"members": 8}).fit(X, np.sin(2 * X[:, 0]))
    near, far = model.epistemic(np.array([[0.0]])), model.epistemic(np.array([[12.0]]))
    assert far > 3 * near


def test_labels_are_of_any_kind() -> None:
    names = load_iris().target_names[IRIS[1]]
    model = classifier().fit(IRIS[0], names)
    assert (model.predict(IRIS[0]) == names).mean() > 0.85
    assert model.epistemic(IRIS[0]).shape == (150,)


def test_an_output_format_set_for_all_transformers_does_not_matter() -> None:
    X, y = load_diabetes(return_X_y=True)
    expected = regressor(epochs=2).fit(X, y).predict(X)
    with sklearn.config_context(transform_output="pandas"):
        found = regressor(epochs=2).fit(X, y).predict(X)
    np.testing.assert_array_equal(found, expected)


def test_an_unfitted_estimator_says_so() -> None:
    for ask in ("predict", "epistemic", "uncertainty"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(classifier(), ask)(IRIS[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lpbn"}, "unknown method 'lpbn'. Did you mean 'lpbnn'?"),
        ({"method_options": {"memberz": 3}}, "has no option 'memberz'"),
        ({"validation_fraction": 1.5}, "validation_fraction=1.5: expected a share"),
        ({"epochs": 0}, "epochs=0: expected an integer of at least 1"),
        ({"hidden": 8}, r"hidden=8: expected a width per layer, \(8,\) for one"),
        ({"hidden": "8"}, r"hidden='8': expected a width per layer, \(8,\) for one"),
        ({"weight_decay": -1}, r"weight_decay=-1: expected .* at least 0"),
        ({"batch_size": 0.5}, "batch_size=0.5: expected an integer of at least 1"),
    ],
)
def test_a_wrong_parameter_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        classifier(**options).fit(*IRIS)


def test_wrong_data_is_named() -> None:
    X, y = IRIS
    with pytest.raises(TypeError, match="Sparse data was passed.*dense data is required"):
        classifier().fit(sparse.csr_array(X), y)
    with pytest.raises(ValueError, match="one class only.*examples of two classes"):
        classifier().fit(X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="contains NaN"):
        classifier().fit(np.where(X > 7, np.nan, X), y)


@pytest.mark.parametrize("early_stopping", [True, False])
def test_a_training_that_diverges_says_so(early_stopping: bool) -> None:
    wild = regressor(lr=1e30, method="mcp", method_options=None, early_stopping=early_stopping)
    with pytest.raises(ValueError, match=r"diverged in epoch 1.* smaller learning rate than lr=1e"):
        wild.fit(*load_diabetes(return_X_y=True))


def test_grid_search_and_pipeline() -> None:
    pipeline = make_pipeline(MinMaxScaler(), classifier())
    grid = {"lpbnnclassifier__method": ["mcp", "batchensemble"]}
    options = {"lpbnnclassifier__method_options": [None]}
    search = GridSearchCV(pipeline, {**grid, **options}, cv=2, scoring="neg_log_loss").fit(*IRIS)
    assert set(search.best_params_) == {*grid, *options}
    assert search.best_score_ > -0.6
    assert cross_val_score(regressor(), *load_diabetes(return_X_y=True), cv=2).min() > 0.2


def test_calibrated_classifier_cv() -> None:
    calibrated = CalibratedClassifierCV(classifier(), method="sigmoid", cv=2).fit(*IRIS)
    assert calibrated.score(*IRIS) > 0.85


def test_a_copy_of_a_fitted_estimator_predicts_the_same() -> None:
    model = classifier().fit(*IRIS)
    again = copy.deepcopy(model).predict_proba(IRIS[0])
    assert np.array_equal(again, model.predict_proba(IRIS[0]))


def test_data_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is no dependency")
    frame, y = pandas.DataFrame(IRIS[0], columns=["a", "b", "c", "d"]), IRIS[1]
    model = classifier().fit(frame, y)
    assert list(model.feature_names_in_) == ["a", "b", "c", "d"]
    assert np.array_equal(model.predict(frame), classifier().fit(*IRIS).predict(IRIS[0]))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["b", "a", "c", "d"]])


def test_mapies_conformal_sets_and_intervals_of_a_fitted_estimator() -> None:
    reason = "MAPIE is no dependency; run this test in an environment with it"
    classes = pytest.importorskip("mapie.classification", reason=reason)
    intervals = pytest.importorskip("mapie.regression", reason=reason)
    train, rest, y_train, y_rest = train_test_split(*IRIS, test_size=0.5, random_state=0)
    sets = classes.SplitConformalClassifier(classifier().fit(train, y_train), prefit=True)
    _, found = sets.conformalize(rest, y_rest).predict_set(rest)
    assert found[np.arange(len(rest)), y_rest, 0].mean() >= 0.9
    train, rest, y_train, y_rest = train_test_split(
        *load_diabetes(return_X_y=True), test_size=0.5, random_state=0
    )
    split = intervals.SplitConformalRegressor(regressor().fit(train, y_train), prefit=True)
    _, found = split.conformalize(rest, y_rest).predict_interval(rest)
    inside = (found[:, 0, 0] <= y_rest) & (y_rest <= found[:, 1, 0])
    assert inside.mean() >= 0.9


def test_importing_the_package_imports_no_scikit_learn_estimator() -> None:
    assert "LPBNNClassifier" in lpbnn.__all__
    assert lpbnn._HOMES["LPBNNRegressor"] == "estimators"
