"""Predictions of many batches, and what a prediction can be turned into and made of."""

import gc
from collections import UserDict
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from networks import small
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import lpbnn
from lpbnn.likelihoods import Categorical, Gaussian, MultiHead
from lpbnn.predict import Prediction, predict, to_device

NAMES = ("average", "aleatoric", "epistemic", "total", "ood_score")


@pytest.fixture
def small_model() -> lpbnn.UncertainModel:
    return lpbnn.build(small(), "lpbnn", members=3, num_data=10)


def check_equal(found: Prediction, expected: Prediction) -> None:
    for name in NAMES:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def batches(x: Tensor, y: Tensor, kind: str) -> Any:
    """The data in three batches, as somebody may have them."""
    if kind == "loader of pairs":
        return DataLoader(TensorDataset(x, y), batch_size=4)
    if kind == "loader of inputs":
        return DataLoader(TensorDataset(x), batch_size=4)
    if kind == "generator of inputs":
        return (part for part in x.split(4))
    return iter(list(zip(x.split(4), y.split(4), strict=True)))


@pytest.mark.parametrize(
    "kind", ["loader of pairs", "loader of inputs", "generator of inputs", "iterator of pairs"]
)
def test_batches_are_predicted_like_one(small_model: lpbnn.UncertainModel, kind: str) -> None:
    x, y = torch.randn(10, 5), torch.zeros(10)
    found = predict(small_model, batches(x, y, kind), seed=1, samples=2)
    check_equal(found, predict(small_model, x, seed=1, samples=2))


def test_a_generator_seeds_all_batches_alike(small_model: lpbnn.UncertainModel) -> None:
    x = torch.randn(10, 5)
    found = predict(small_model, iter(x.split(4)), generator=torch.Generator().manual_seed(3))
    expected = predict(small_model, x, generator=torch.Generator().manual_seed(3))
    check_equal(found, expected)


def test_members_of_many_batches_are_kept_on_request(small_model: lpbnn.UncertainModel) -> None:
    x = torch.randn(10, 5)
    assert predict(small_model, iter(x.split(4))).members is None
    found = predict(small_model, iter(x.split(4)), keep_members=True, seed=0).members
    assert found is not None
    torch.testing.assert_close(found, predict(small_model, x, seed=0).members)


def test_heads_are_joined_each_for_itself() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"kind": self.kind(x), "size": self.size(x)}

    model = lpbnn.build(TwoHeads(), "mcp", likelihood={"kind": Categorical(), "size": Gaussian()})
    x = torch.randn(10, 5)
    found: Any = predict(model, iter(x.split(4)))
    expected: Any = predict(model, x)
    for name in ("kind", "size"):
        check_equal(found[name], expected[name])


def test_a_progress_bar_shows_the_batches(
    small_model: lpbnn.UncertainModel, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(small_model, iter(torch.randn(10, 5).split(4)), progress=True)
    assert "predict" in capsys.readouterr().out


def test_only_one_batch_of_inputs_is_alive_at_a_time(small_model: lpbnn.UncertainModel) -> None:
    import weakref

    alive: list[Any] = []

    def stream() -> Any:
        for _ in range(5):
            assert sum(reference() is not None for reference in alive) <= 1
            x = torch.randn(4, 5)
            alive.append(weakref.ref(x))
            yield x

    predict(small_model, stream())
    assert len(alive) == 5


def test_few_parts_are_alive_at_a_time(small_model: lpbnn.UncertainModel) -> None:
    """Thousands of small tensors among the large ones of the passes break the memory into pieces."""
    largest = 0

    def stream() -> Any:
        nonlocal largest
        for _ in range(60):
            alive = sum(type(each) is Prediction for each in gc.get_objects())
            largest = max(largest, alive)
            yield torch.randn(2, 5)

    assert len(predict(small_model, stream()).probs) == 120
    assert largest <= 8  # 1 + log2(60), and what is being joined


def test_batches_of_growing_and_falling_size_keep_their_order() -> None:
    model, sizes = lpbnn.build(small(), "mcp"), [1, 1, 5, 2, 2, 9, 1, 3, 1]
    x = torch.randn(sum(sizes), 5)
    check_equal(predict(model, iter(x.split(sizes))), predict(model, x))


class Batches:
    """An iterable that is no iterator and no DataLoader, as the loaders of other libraries are."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Any:
        return iter(self.x.split(4))


def test_any_iterable_of_batches_is_predicted(small_model: lpbnn.UncertainModel) -> None:
    x = torch.randn(10, 5)
    check_equal(predict(small_model, Batches(x), seed=1), predict(small_model, x, seed=1))


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_the_tensors_of_any_mapping_go_to_the_models_device(kind: Any) -> None:
    """A tokenizer of transformers returns a UserDict, into which torch's tree functions do not look."""
    batch = kind({"ids": torch.zeros(4, 5), "more": [torch.zeros(4)], "flag": True})
    moved = to_device(batch, lpbnn.build(small(), "mcp").to("meta"))
    assert moved["ids"].is_meta
    assert moved["more"][0].is_meta
    assert moved["flag"] is True


def test_batches_for_a_network_without_weights_stay_where_they_are() -> None:
    model, x = lpbnn.build(nn.Softmax(1), "mcp"), torch.randn(10, 5)
    check_equal(predict(model, iter(x.split(4))), predict(model, x))


# What a prediction can be turned into


def test_to_dict_has_everything_by_its_name(small_model: lpbnn.UncertainModel) -> None:
    p = predict(small_model, torch.randn(4, 5))
    found = p.to_dict()
    for name, value in found.items():
        assert value is getattr(p, name) or torch.equal(value, getattr(p, name))
    number = predict(lpbnn.build(nn.Linear(5, 2), "mcp", task="regression"), torch.randn(4, 5))
    assert set(number.to_dict()) >= {"mean", "total", "members", "member_variances"}


def test_numpy_holds_the_same_values(small_model: lpbnn.UncertainModel) -> None:
    p = predict(small_model, torch.randn(4, 5))
    for name, array in p.numpy().items():
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, p.to_dict()[name].numpy())


def test_cpu_keeps_every_field(small_model: lpbnn.UncertainModel) -> None:
    p = predict(small_model, torch.randn(4, 5))
    check_equal(p.cpu(), p)
    assert p.cpu().class_dim == p.class_dim


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_cpu_moves_every_tensor(task: Any) -> None:
    p = predict(lpbnn.build(small(4), "mcp", task=task), torch.randn(4, 5))
    with FakeTensorMode():  # a device that need not be there
        tensors = {
            field.name: torch.empty(value.shape, device="cuda")
            for field in fields(p)
            if isinstance(value := getattr(p, field.name), Tensor)
        }
        moved = replace(p, **tensors).cpu()
    assert {getattr(moved, name).device.type for name in tensors} == {"cpu"}


def test_outputs_give_the_prediction_of_the_model(small_model: lpbnn.UncertainModel) -> None:
    frozen, x = lpbnn.freeze(small_model, samples=2), torch.randn(4, 5)
    found = Prediction.from_outputs(frozen(x).numpy(), frozen.likelihood)
    check_equal(found, predict(frozen, x))
    assert found.members is not None
    assert Prediction.from_outputs(frozen(x), keep_members=False).members is None


def test_outputs_of_heads_give_a_prediction_each() -> None:
    likelihood = MultiHead({"kind": Categorical(), "size": Gaussian()})
    outputs = {"kind": torch.randn(3, 4, 5), "size": torch.randn(3, 4, 2)}
    found: Any = Prediction.from_outputs(outputs, likelihood)
    for name, head in likelihood.heads.items():
        check_equal(found[name], Prediction.from_outputs(outputs[name], head))
    with pytest.raises(ValueError, match="outputs of each head: kind, size"):
        Prediction.from_outputs(outputs["kind"], likelihood)


# Bad input


def test_predictions_of_different_kinds_are_not_joined(small_model: lpbnn.UncertainModel) -> None:
    p = predict(small_model, torch.randn(4, 5))
    fewer = predict(lpbnn.build(small(), "mcp"), torch.randn(4, 5))
    with pytest.raises(ValueError, match="same number of members"):
        Prediction.cat([p, fewer])
    with pytest.raises(ValueError, match="no predictions to join"):
        Prediction.cat([])
    with pytest.raises(TypeError, match="expected predictions, got Tensor"):
        Prediction.cat([p.probs])  # type: ignore[list-item]


def test_batches_of_wrong_structure_are_refused(small_model: lpbnn.UncertainModel) -> None:
    x = torch.randn(4, 5)
    with pytest.raises(TypeError, match="tuple of 3"):
        predict(small_model, iter([(x, x, x)]))
    with pytest.raises(ValueError, match="there are no batches"):
        predict(small_model, iter([]))
    with pytest.raises(TypeError, match=r"got a data set, TensorDataset. Fix: DataLoader"):
        predict(small_model, TensorDataset(x))
    with pytest.raises(TypeError, match=r"got a list of 2. Fix: batch\[0\] of a pair"):
        predict(small_model, [x, torch.zeros(4)])
    with pytest.raises(TypeError, match=r"(?s)arguments.*Fix: iter\(...\) for several batches"):
        predict(small_model, x.split(1))
    for wrong in (range(3), iter(["a"]), iter([None]), np.zeros((4, 5))):
        with pytest.raises(TypeError, match="expected a tensor of inputs"):
            predict(small_model, wrong)


def test_an_error_names_the_batch_and_the_keys_of_a_mapping() -> None:
    model, x = lpbnn.build(small(), "mcp"), torch.randn(4, 5)
    with pytest.raises(RuntimeError, match=r"This is batch 1, .* torch.float32 of shape \(4, 3\)"):
        predict(model, iter([x, x[:, :3]]))
    batch = {"input": x, "labels": torch.zeros(4)}
    with pytest.raises(TypeError, match="keys 'input', 'labels' are the network's keywords. Fix:"):
        predict(model, DataLoader([batch], batch_size=None))


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (torch.zeros(3), ValueError, "outputs of members"),
        (torch.zeros(3, 4, 5).long(), TypeError, "got torch.int64"),
        ("logits.npy", TypeError, "got str"),
        ({"kind": torch.zeros(3, 4, 5)}, TypeError, "got dict"),
        (torch.full((3, 4, 5), torch.nan), ValueError, "4 of 4 examples are NaN"),
    ],
)
def test_outputs_that_are_none_are_refused(outputs: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Prediction.from_outputs(outputs)


def test_outputs_that_are_not_finite_are_marked_on_request() -> None:
    outputs = torch.zeros(3, 4, 5)
    outputs[0, 1] = torch.nan
    p = Prediction.from_outputs(outputs, allow_not_finite=True)
    assert p.ood_score.isinf().tolist() == [False, True, False, False]


class WithTable(nn.Module):
    """A network that takes a table beside the examples: as many rows as the last portion would have."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.rows = rows
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        assert table.shape == (self.rows, 5)
        return self.head(self.first(x + table.mean(0)).relu())


@pytest.mark.parametrize("table", [2, 3])
@pytest.mark.parametrize("method", ["mimo", "ensemble", "mcp"])
def test_no_portion_has_as_many_rows_as_an_input_that_is_no_batch(method: str, table: int) -> None:
    model = lpbnn.build(WithTable(table), method, check=False)
    x = torch.randn(7, 5), torch.randn(table, 5)
    for rows in (2, 3, 4, 8, 12, 16):
        found = predict(model, x, chunk=rows, seed=0)
        torch.testing.assert_close(found.probs, predict(model, x, seed=0).probs)


def test_a_portion_that_avoids_the_rows_of_another_input_is_smaller_not_larger() -> None:
    model = lpbnn.build(WithTable(), "mcp", check=False)
    x = torch.randn(9, 5), torch.randn(3, 5)
    rows: list[int] = []
    model.net.first.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    for chunk in (3, 4, 6, 8):
        rows.clear()
        predict(model, x, chunk=chunk)
        assert max(rows) <= chunk
        assert sum(rows) == 9


@pytest.mark.parametrize("method", ["lpbnn", "rank1", "mcdropout"])
@pytest.mark.parametrize("chunk", [2, 6, 7, 13, 100])
def test_at_most_chunk_rows_are_in_the_network_at_once(method: str, chunk: int) -> None:
    model, x = lpbnn.build(small(), method, members=2, num_data=9), torch.randn(3, 5)
    predict(model, x, seed=0)  # makes the check
    rows: list[int] = []
    *_, last = model.net.children()
    last.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    predict(model, x, samples=4, chunk=chunk, seed=0)
    assert max(rows) <= chunk
    assert sum(rows) == 2 * 4 * 3
