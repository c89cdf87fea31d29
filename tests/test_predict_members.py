"""Prediction with members that are rows of one batch (lpbnn, batchensemble): portions change nothing."""

import pytest
import torch
from networks import ResNet, settle
from torch import Tensor, nn

import lpbnn

Model = lpbnn.UncertainModel


def count_rows(model: Model) -> list[int]:
    """Return a list that gets the rows of every call of the network, without those of its check."""
    model.check_first_batch = False
    seen: list[int] = []
    model.net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 15, 16, 30, 31, 10_000])
def test_the_result_does_not_depend_on_the_chunk(model: Model, x: Tensor, chunk: int) -> None:
    whole = lpbnn.predict(model, x, samples=2, seed=3)
    parts = lpbnn.predict(model, x, samples=2, seed=3, chunk=chunk)
    torch.testing.assert_close(parts.members, whole.members)
    torch.testing.assert_close(parts.probs, whole.probs)
    torch.testing.assert_close(parts.epistemic, whole.epistemic)


def test_no_more_rows_than_the_chunk_are_in_the_network(model: Model, x: Tensor) -> None:
    seen = count_rows(model)
    for chunk in (1, 2, 4, 7, 30):
        seen.clear()
        lpbnn.predict(model, x, samples=2, chunk=chunk)
        assert max(seen) <= chunk
        assert sum(seen) == 2 * 3 * 5


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 9, 10, 14])
def test_few_members_get_all_examples_if_nothing_is_shared(
    model: Model, x: Tensor, chunk: int
) -> None:
    seen = count_rows(model)
    lpbnn.predict(model, x, chunk=chunk)
    if chunk < 5:
        assert seen == ([chunk] * (5 // chunk) + [5 % chunk] * (5 % chunk > 0)) * 3
    else:
        assert seen == ([10, 5] if chunk >= 10 else [5] * 3)


def test_a_shared_part_runs_once_for_every_example(x: Tensor) -> None:
    model = lpbnn.build(settle(ResNet()), "batchensemble", members=3, include="head")
    seen = count_rows(model)
    lpbnn.predict(model, x.float(), chunk=9)
    assert seen == [3, 2]


@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 8, 15, 30])
def test_a_network_that_changes_its_input_predicts_the_same(chunk: int | None) -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    net.register_forward_pre_hook(lambda module, args: (args[0].add_(1),))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10).double()
    x = torch.randn(5, 4).double()
    given = x.clone()
    whole = lpbnn.predict(model, x, samples=2, seed=1, chunk=15)
    parts = lpbnn.predict(model, x, samples=2, seed=1, chunk=chunk)
    assert torch.equal(x, given)
    torch.testing.assert_close(parts.members, whole.members)


@pytest.mark.parametrize("members", [1, 3, 4, 7])
def test_equal_members_do_not_disagree(members: int) -> None:
    model = lpbnn.build(nn.Linear(4, 6), "batchensemble", members=members, init_std=0.0)
    x = torch.randn(50, 4)
    p = lpbnn.predict(model, x, keep_members=False)
    assert (p.epistemic >= 0).all()
    assert p.epistemic.max() < 1e-6
    torch.testing.assert_close(p.probs, model(x)[0].softmax(1), atol=2e-7, rtol=0)


def test_frozen_draws_of_a_regression() -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10, task="regression").double()
    x = torch.randn(6, 2, dtype=torch.float64)
    frozen = lpbnn.freeze(model, samples=4)
    p = lpbnn.predict(frozen, x, chunk=5)
    assert p.members.shape == p.member_variances.shape == (12, 6, 2)
    torch.testing.assert_close(p.mean, frozen(x)[..., :2].mean(0))
    torch.testing.assert_close(p.epistemic, frozen(x)[..., :2].var(0, unbiased=False))


def test_void_pixels_do_not_count_in_a_split_batch() -> None:
    options = {"members": 2, "init_std": 0.0, "ignore_index": 255, "task": "segmentation"}
    model = lpbnn.build(nn.Sequential(nn.Conv2d(3, 5, 1)), "batchensemble", **options)
    x, y = torch.randn(3, 3, 6, 7), torch.randint(5, (3, 6, 7))
    y[0, :3] = 255
    plain = nn.functional.cross_entropy(model.eval()(x)[0], y, ignore_index=255)
    torch.testing.assert_close(model.train().loss(x, y)["nll"], plain)


def test_a_split_batch_without_a_label_has_no_loss() -> None:
    for batch in (4, 5):
        model = lpbnn.build(nn.Linear(5, 3), "batchensemble", members=4, ignore_index=2).train()
        assert model.loss(torch.randn(batch, 5), torch.full((batch,), 2))["loss"].item() == 0.0
