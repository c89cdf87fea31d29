"""The likelihoods where they are hardest: half precision, and batches that say nothing."""

import pytest
import torch
from networks import small
from torch import nn

import lpbnn
from lpbnn.likelihoods import nll


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_sum_over_pixels_is_taken_in_float32(dtype: torch.dtype, weighted: bool) -> None:
    outputs = torch.randn(2, 3, 256, 256).to(dtype)  # 131072 pixels; float16 ends at 65504
    targets = torch.randint(3, (2, 256, 256))
    weights = torch.tensor([1.0, 0.5]) if weighted else None
    found = nll(outputs, targets, "segmentation", weights)
    expected = nll(outputs.double(), targets, "segmentation", weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("class_weights", [None, torch.tensor([1.0, 2.0, 3.0])])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 1.0, 0.5])])
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_a_batch_without_one_label_says_nothing(
    task: str, weights: torch.Tensor | None, class_weights: torch.Tensor | None
) -> None:
    shape = (2, 2) if task == "segmentation" else ()
    outputs = torch.randn(4, 3, *shape, requires_grad=True)
    targets = torch.full((4, *shape), 7)
    loss = nll(outputs, targets, task, weights, class_weights, ignore_index=7)
    loss.backward()
    assert loss.item() == 0.0
    assert outputs.grad.count_nonzero() == 0


@pytest.mark.parametrize("batch", [4, 5])
def test_whether_members_divide_the_batch_is_no_matter(batch: int) -> None:
    model = lpbnn.build(small(), "batchensemble", members=4, ignore_index=2).train()
    loss = model.loss(torch.randn(batch, 5), torch.full((batch,), 2))["loss"]
    assert loss.item() == 0.0


def test_some_labels_that_do_not_count_change_nothing_for_the_others() -> None:
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, -100, 0, -100])
    expected = torch.nn.functional.cross_entropy(outputs[targets >= 0], targets[targets >= 0])
    torch.testing.assert_close(nll(outputs, targets), expected)


@pytest.mark.parametrize("method", ["mcp", "lpbnn", "mcdropout"])
def test_labels_of_no_weight_say_nothing(method: str) -> None:
    model = lpbnn.build(nn.Linear(4, 3), method, num_data=10, class_weights=[1.0, 0.0, 1.0])
    terms = model.loss(torch.randn(8, 4), torch.ones(8, dtype=torch.int64))
    assert terms["nll"] == 0
    terms["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
