"""scikit-learn estimators: a multilayer perceptron on tables, by any method of this package.

The defaults are in the spirit of TabM (Gorishniy, Kotelnikov, Babenko: TabM: Advancing tabular deep
learning with parameter-efficient ensembling, ICLR 2025): rank-one members that share one network except for
its last layer, each trained on every example by a loss of its own; standardised inputs and targets; AdamW;
early stopping.

Example:
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = LPBNNClassifier(epochs=3, random_state=0).fit(X, y)
    >>> classifier.predict_proba(X[:5]).shape, classifier.epistemic(X[:5]).shape
    ((5, 3), (5,))
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from lpbnn import methods
from lpbnn.backbones.mlp import MLP
from lpbnn.build import build
from lpbnn.extras import missing
from lpbnn.likelihoods import Task
from lpbnn.model import NotFittedWarning, UncertainModel, at_least_one
from lpbnn.predict import Prediction, predict
from lpbnn.rank_one.ensemble import RankOneConfig

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    raise missing(error) from error

# Options of the rank-one methods, whose own defaults are for pictures: members that see the data through
# signs of their own, have a head of their own, and are equal in all other layers before training.
RANK_ONE: dict[str, Any] = {
    "members": 16,
    "batch_mode": "repeat",
    "init_std": 0.0,
    "first_init": "signs",
    "unshared": "head",
}
STEPS = 16  # of an epoch, which batch_size="auto" aims at
SMALLEST, LARGEST = 16, 256  # batch of "auto"
CHUNK = 2**16  # rows (member, example) that a prediction computes at once


class _Estimator(BaseEstimator):
    """Parameters, training and prediction of both estimators."""

    _task: Task

    def __init__(
        self,
        method: str = "lpbnn",
        *,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.1,
        epochs: int = 200,
        batch_size: int | Literal["auto"] = "auto",
        lr: float = 2e-3,
        weight_decay: float = 3e-4,
        early_stopping: bool = True,
        validation_fraction: float = 0.15,
        patience: int = 16,
        samples: int = 1,
        method_options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.samples = samples
        self.method_options = method_options
        self.device = device
        self.random_state = random_state

    def uncertainty(self, X: Any) -> Prediction:
        """Predict with every member.

        Args:
            X: (n, features), an array or a data frame.

        Returns:
            The prediction, in the units of the targets: ``probs`` or ``mean``, ``total`` =
            ``aleatoric`` + ``epistemic``, ``members``, ``ood_score``.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        return self._in_units_of_targets(self._predict(self._inputs(X).double()))

    def _fit(self, X: np.ndarray, y: Tensor, outputs: int, strata: np.ndarray | None) -> Self:
        """Train on checked inputs; ``y`` are labels, or standardised targets."""
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = _scaler().fit(X)
        train, held_out = self._split(len(X), strata)
        x, y = self._inputs(X), y.to(self.device)
        with _seeded(self.seed_, self.device):
            self.model_ = self._build(X.shape[1], outputs, len(train))
            self._train(x[train], y[train], x[held_out], y[held_out])
        # In float32 an answer would depend on the size of its batch, by rounding.
        self.model_.double().eval()
        return self

    def _inputs(self, X: np.ndarray) -> Tensor:
        scaled = self.scaler_.transform(X)
        return torch.as_tensor(scaled, dtype=torch.float32, device=self.device)

    def _split(self, n: int, strata: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows to train on and those held out; none of these if there are too few."""
        share = self.validation_fraction if self.early_stopping else 0.0
        if self.early_stopping and not 0 < share < 1:
            raise ValueError(f"validation_fraction={share!r}: expected a share between 0 and 1.")
        rows, size = np.arange(n), round(n * share)
        if not 0 < size < n:
            return rows, rows[:0]
        if strata is not None:
            counts = np.bincount(strata)
            if counts.min() < 2 or min(size, n - size) < len(counts):
                strata = None
        train, held_out = train_test_split(
            rows, test_size=size, random_state=self.seed_, stratify=strata
        )
        return np.asarray(train), np.asarray(held_out)

    def _build(self, inputs: int, outputs: int, n: int) -> UncertainModel:
        options: dict[str, Any] = {"num_data": n}
        if issubclass(methods.load(self.method).Config, RankOneConfig):
            options |= RANK_ONE
        options |= self.method_options or {}
        if isinstance(self.hidden, int | str):
            raise ValueError(
                f"hidden={self.hidden!r}: expected a width per layer, ({self.hidden},) for one."
            )
        net = MLP(outputs, inputs, self.hidden, self.dropout).to(self.device)
        return build(net, self.method, task=self._task, **options)

    def _train(self, x: Tensor, y: Tensor, held_out_x: Tensor, held_out_y: Tensor) -> None:
        """Train until the held-out NLL has not improved for ``patience`` epochs; keep the best."""
        model, epochs, size = self.model_, at_least_one("epochs", self.epochs), self.batch_size
        if size == "auto":
            size = min(max(len(x) // STEPS, SMALLEST), LARGEST)
        size, patience = at_least_one("batch_size", size), at_least_one("patience", self.patience)
        if not self.lr > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"lr={self.lr!r}, weight_decay={self.weight_decay!r}: expected a rate above 0 and a decay of "
                "at least 0."
            )
        optimizer = torch.optim.AdamW(
            model.parameter_groups(self.weight_decay, self.lr), lr=self.lr
        )
        best, state, waited, loss = math.inf, None, 0, torch.zeros(())
        self.validation_nll_: list[float] = []
        for epoch in range(epochs):
            model.train()
            model.before_epoch(epoch, epochs)
            for rows in torch.randperm(len(x), device=x.device).split(size):
                optimizer.zero_grad()
                loss = model.loss(x[rows], y[rows])["loss"]
                loss.backward()
                optimizer.step()
                model.after_step(self.lr)
            self.n_iter_ = epoch + 1
            if not loss.isfinite():
                raise ValueError(
                    f"training diverged in epoch {epoch + 1}: the loss is {loss.item()}. Fix: a smaller "
                    f"learning rate than lr={self.lr!r}."
                )
            if len(held_out_x) == 0:
                continue
            nll = self._nll(held_out_x, held_out_y)
            self.validation_nll_.append(nll)
            waited += 1
            if nll < best:
                best, state, waited = nll, copy.deepcopy(model.state_dict()), 0
            if waited == patience:
                break
        if state is not None:
            model.load_state_dict(state)
        model.after_fit([(x, y)])

    def _nll(self, x: Tensor, y: Tensor) -> float:
        """Return the NLL of the average prediction."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFittedWarning)  # after_fit follows
            p = self._predict(x)
        if self._task == "classification":
            return -float(p.probs.gather(1, y.unsqueeze(1)).clamp_min(1e-12).log().mean())
        return 0.5 * float(((y - p.mean).square() / p.total + (2 * math.pi * p.total).log()).mean())

    def _predict(self, x: Tensor) -> Prediction:
        samples = at_least_one("samples", self.samples)
        return predict(self.model_, x, samples=samples, chunk=CHUNK, seed=self.seed_)

    def _in_units_of_targets(self, prediction: Prediction) -> Prediction:
        return prediction


class LPBNNClassifier(ClassifierMixin, _Estimator):
    """A classifier by any method of this package, whose probabilities are averages over members.

    Args:
        method: any of ``lpbnn.methods.names()``.
        hidden: widths of the hidden layers.
        dropout: rate after each hidden layer.
        epochs: at most so many passes over the data.
        batch_size: examples per step; "auto": a sixteenth of the data, 16 to 256.
        lr: learning rate of AdamW.
        weight_decay: of the shared weights; rank-one factors have none.
        early_stopping: hold out a part of the data, stop when its NLL has not improved for ``patience``
            epochs, and keep the best epoch. All data is trained on if there is too little to divide.
        validation_fraction: the share that is held out.
        patience: epochs without improvement.
        samples: draws of each member in a prediction.
        method_options: the method's own (``lpbnn ls METHOD``). Rank-one methods have 16 members here, each
            of which sees every example; their factors start as random signs in the first layer, and at 1
            in the others, and each has a last layer of its own (``unshared="head"``).
        device: "cpu", "cuda", ...
        random_state: of the split, the initial weights, the order of the examples and the draws.

    Attributes:
        classes_: the labels.
        model_: the trained ``lpbnn.UncertainModel``, in float64; its inputs are ``scaler_``'s.
        scaler_: the ``StandardScaler`` of the inputs.
        n_iter_: epochs trained.
        validation_nll_: NLL of the held-out data after each epoch; empty if nothing was held out.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> classifier = LPBNNClassifier(epochs=5, random_state=0).fit(X, X[:, 0] > 0)
        >>> classifier.predict_proba(X).shape
        (60, 2)
    """

    _task = "classification"

    def fit(self, X: Any, y: Any) -> Self:
        """Train on (n, features) and n labels of any kind; return the estimator."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class only, {self.classes_.tolist()[0]!r}: there is nothing to tell apart. "
                "Fix: examples of two classes or more."
            )
        return self._fit(X, torch.as_tensor(labels), len(self.classes_), labels)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each example, (n,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each of ``classes_``, (n, classes)."""
        return self.uncertainty(X).probs.cpu().numpy()

    def epistemic(self, X: Any) -> np.ndarray:
        """Return how much the members disagree, (n,): the mutual information in nats."""
        return self.uncertainty(X).epistemic.cpu().numpy()


class LPBNNRegressor(RegressorMixin, _Estimator):
    """A regressor by any method of this package, for one target or several, with a variance for each.

    The parameters are those of ``LPBNNClassifier``, and the attributes too, without ``classes_`` and with
    ``target_scaler_``.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> mean, std = (
        ...     LPBNNRegressor(epochs=5, random_state=0).fit(X, X[:, 0]).predict(X, return_std=True)
        ... )
        >>> mean.shape, std.shape
        ((60,), (60,))
    """

    _task = "regression"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Train on (n, features) and targets, (n,) or (n, targets); return the estimator."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True)
        self._one_target = y.ndim == 1
        columns = y.reshape(len(y), -1)
        self.target_scaler_ = _scaler().fit(columns)
        scaled = torch.as_tensor(self.target_scaler_.transform(columns), dtype=torch.float32)
        return self._fit(X, scaled, 2 * columns.shape[1], None)

    def predict(
        self, X: Any, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return the mean of each target, (n,) or (n, targets).

        Args:
            X: (n, features).
            return_std: also return the standard deviation, of noise and of the members' disagreement.
        """
        p = self.uncertainty(X)
        mean = self._shaped(p.mean)
        return (mean, self._shaped(p.std)) if return_std else mean

    def epistemic(self, X: Any) -> np.ndarray:
        """Return how much the members disagree: the standard deviation of their means, as ``predict``."""
        return self._shaped(self.uncertainty(X).epistemic.sqrt())

    def _shaped(self, values: Tensor) -> np.ndarray:
        array = values.cpu().numpy()
        return array[:, 0] if self._one_target else array

    def _in_units_of_targets(self, prediction: Prediction) -> Prediction:
        p = prediction
        scale = torch.as_tensor(self.target_scaler_.scale_).to(p.mean)
        shift = torch.as_tensor(self.target_scaler_.mean_).to(p.mean)
        aleatoric, epistemic = p.aleatoric * scale**2, p.epistemic * scale**2
        return replace(
            p,
            average=p.mean * scale + shift,
            aleatoric=aleatoric,
            epistemic=epistemic,
            ood_score=(aleatoric + epistemic).sum(1),
            members=None if p.members is None else p.members * scale + shift,
            member_variances=None if p.member_variances is None else p.member_variances * scale**2,
        )


def _scaler() -> StandardScaler:
    """Return a scaler of arrays, whatever sklearn.set_config(transform_output=...) makes of others."""
    return StandardScaler().set_output(transform="default")


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch inside the block, and leave its generators as they were after it."""
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=None if cuda else []):
        torch.manual_seed(seed)
        yield
