"""The data contract, and the sets that need no download: fixed, disjoint, without leaks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

import lpbnn.data as data
from lpbnn.data import Dataset, Splits, regression
from lpbnn.data.digits import FLAT_BELOW, stratified


def digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return sha.hexdigest()[:16]


def rows(tensor: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in tensor}


def small(**changes: object) -> Splits:
    part = Dataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    settings: dict[str, object] = {
        "name": "small",
        "task": "classification",
        "train": part,
        "val": part,
        "test": part,
        "num_classes": 2,
        "mean": (0.0,) * 3,
        "std": (1.0,) * 3,
        "description": "",
        "source": "generated",
    }
    return Splits(**(settings | changes))  # pyright: ignore[reportArgumentType]


# --- the contract -------------------------------------------------------------------------------


EMBEDDED = ("cubic", "diabetes", "digits")


@pytest.mark.parametrize("name", EMBEDDED)
def test_contract(name: str) -> None:
    splits = data.load(name)
    assert splits.name == name
    assert splits.description == data.entries()[name].description
    assert "\n" not in splits.description
    assert splits.source in ("embedded", "generated")
    for part in (splits.train, splits.val, splits.test, *splits.ood.values()):
        x = splits.normalise(part.inputs)
        assert x.dtype == torch.float32
        assert x.isfinite().all()
        assert splits.normalise_targets(part.targets).shape == part.targets.shape
    again = data.load(name)
    assert digest(*again.train[:], *again.test[:]) == digest(*splits.train[:], *splits.test[:])


def test_standardisation_comes_from_train_alone() -> None:
    for name in EMBEDDED:
        splits = data.load(name)
        x = splits.normalise(splits.train.inputs).double()
        channels = x.transpose(0, 1).flatten(1)
        assert channels.mean(1).abs().max() < 1e-5
        assert (channels.std(1, correction=0) - 1).abs().max() < 1e-5
        # Nobody else is centred: the statistics have not seen them.
        other = splits.normalise(splits.test.inputs).transpose(0, 1).flatten(1).mean(1)
        assert other.abs().max() > 1e-4


def test_every_part_moves_to_another_device() -> None:
    splits = data.load("digits").to("meta")
    parts = (splits.train, splits.val, splits.test, splits.ood["photos"])
    assert {tensor.device.type for part in parts for tensor in part[:]} == {"meta"}


def test_unknown_name_and_option_say_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"'diabetis'\. Did you mean 'diabetes'\? Known: .*digits"):
        data.load("diabetis")
    with pytest.raises(ValueError, match=r"option 'point'; its options are points"):
        data.load("cubic", point=3)
    with pytest.raises(ValueError, match=r"points=1; .* at least 2"):
        data.load("cubic", points=1)


def test_a_set_declared_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "SETS", {"digits": regression.SETS["cubic"]})
    with pytest.raises(ValueError, match=r"regression\.py declares \['digits'\]"):
        data.entries()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": None}, "give num_classes for classification"),
        ({"task": "regression"}, "None for regression"),
        ({"classes": ("a",)}, "names 1 classes but has num_classes=2"),
        ({"mean": (0.0,)}, "give 3 of each"),
        ({"train": Dataset(torch.zeros(4, 3, 2, 2), torch.zeros(4))}, "pictures are uint8"),
        ({"val": Dataset(torch.zeros(4, 2), torch.zeros(4))}, r"val holds .* \(2,\), train"),
    ],
)
def test_bad_splits_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_a_dataset_needs_a_target_per_input() -> None:
    with pytest.raises(ValueError, match="4 inputs and 3 targets"):
        Dataset(torch.zeros(4), torch.zeros(3))


def test_a_dataset_of_arrays_is_refused() -> None:
    with pytest.raises(TypeError, match=r"targets are ndarray. Fix: torch.as_tensor"):
        Dataset(torch.zeros(4), torch.zeros(4).numpy())  # pyright: ignore[reportArgumentType]


def test_a_dataset_serves_a_data_loader() -> None:
    train = data.load("digits").train
    x, y = next(iter(torch.utils.data.DataLoader(train, batch_size=6)))
    assert torch.equal(x, train.inputs[:6])
    assert torch.equal(y, train.targets[:6])


# --- digits -------------------------------------------------------------------------------------


def test_digits_split_is_fixed_stratified_and_disjoint() -> None:
    splits = data.load("digits")
    assert splits.test.targets.bincount().tolist() == [36] * 10
    assert splits.val.targets.bincount().tolist() == [18] * 10
    parts = [rows(part.inputs) for part in (splits.train, splits.val, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1797
    assert digest(*splits.train[:]) == "405db0ed8c17427a"
    assert digest(*splits.test[:]) == "2990c32aeb64c36f"
    assert splits.train.inputs.dtype == torch.uint8
    assert splits.train.inputs.max() == 255


def test_digits_ood_is_photos_and_no_digit() -> None:
    splits = data.load("digits")
    patches, targets = splits.ood["photos"][:]
    assert digest(patches) == "28ca0eb4d76a4b57"
    assert (targets == data.NOT_A_CLASS).all()
    assert len(rows(patches)) == len(patches)
    assert not rows(patches) & rows(torch.cat([splits.train.inputs, splits.test.inputs]))
    # None is flat, and none gives itself away by its range: digits also span 0..255.
    assert patches.double().flatten(1).std(1, correction=0).min() >= FLAT_BELOW
    assert patches.flatten(1).amin(1).max() == 0
    assert patches.flatten(1).amax(1).min() == 255


def test_digits_ood_is_neither_trivial_nor_impossible() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    splits = data.load("digits")
    flat = {
        "train": splits.normalise(splits.train.inputs).flatten(1).numpy(),
        "test": splits.normalise(splits.test.inputs).flatten(1).numpy(),
        "ood": splits.normalise(splits.ood["photos"].inputs).flatten(1).numpy(),
    }
    model = LogisticRegression(max_iter=200, C=0.01).fit(flat["train"], splits.train.targets)
    scores = [1 - model.predict_proba(flat[part]).max(1) for part in ("test", "ood")]
    labels = np.repeat([0, 1], [len(part) for part in scores])
    assert 0.7 < roc_auc_score(labels, np.concatenate(scores)) < 0.97


def test_stratified_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="class 1 has 2 examples, the split asks 3"):
        stratified(torch.tensor([0, 0, 0, 1, 1]), (1, 2))


# --- regression ---------------------------------------------------------------------------------


def test_diabetes_is_raw_fixed_and_disjoint() -> None:
    splits = data.load("diabetes")
    parts = [rows(part.inputs) for part in (splits.train, splits.val, splits.test)]
    assert [len(part) for part in parts] == [266, 88, 88]
    assert len(set.union(*parts)) == 442
    assert digest(*splits.train[:]) == "500323a61e405d2c"
    # In years, not in scikit-learn's units that were computed over the test patients too.
    assert 19 <= splits.train.inputs[:, 0].min() <= splits.train.inputs[:, 0].max() <= 79
    assert splits.train.targets.shape == (266, 1)


def test_cubic_follows_its_curve_inside_and_outside() -> None:
    splits = data.load("cubic", points=500)
    outside = splits.ood["outside"]
    assert splits.train.inputs.abs().max() <= 4 < outside.inputs.abs().min()
    assert outside.inputs.abs().max() == 6
    for part in (splits.train, splits.test, outside):
        noise = part.targets - part.inputs**3
        assert noise.std() == pytest.approx(3, rel=0.15)
        assert noise.mean().abs() < 0.7
    assert len(data.load("cubic").train) == 20
