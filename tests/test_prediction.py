"""What the members come to: running sums of probabilities, in any portions, in little memory."""

import pytest
import torch
from memory import PeakMemory
from torch import nn

import lpbnn
from lpbnn import prediction
from lpbnn.predict import predict


@pytest.mark.parametrize("members", [1, 3, 4, 7])
def test_equal_members_do_not_disagree(members: int) -> None:
    model = lpbnn.build(nn.Linear(4, 6), "batchensemble", members=members, spread=0.0)
    x = torch.randn(50, 4)
    p = lpbnn.predict(model, x, keep_members=False)
    assert (p.epistemic >= 0).all()
    assert p.epistemic.max() < 1e-6
    torch.testing.assert_close(p.probs, model(x)[0].softmax(1), atol=2e-7, rtol=0)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(50), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(9, 7), (8,), (4, 3, 5)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_pictures_are_summed_in_strips_to_the_same_answer(
    shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)]
    model = lpbnn.build(kind(3, 4, 1), "lpbnn", members=3, num_data=9, task="segmentation")
    x = torch.randn(2, 3, *shape)
    whole = predict(model, x, samples=2, seed=0)
    row = 2 * 4 * torch.Size(shape[1:]).numel()
    monkeypatch.setattr(prediction, "AT_ONCE", rows * row)
    for chunk in (None, 4):
        strips = predict(model, x, samples=2, seed=0, keep_members=False, chunk=chunk)
        assert strips.members is None
        for name in ("probs", "aleatoric", "epistemic", "labels"):
            torch.testing.assert_close(getattr(strips, name), getattr(whole, name))


def test_memory_for_probabilities_does_not_grow_with_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the answer, which is joined from its strips, there is one member's strip at a time."""
    monkeypatch.setattr(prediction, "AT_ONCE", 2**11)
    model = lpbnn.build(nn.Conv2d(3, 8, 1), "mcp", task="segmentation")
    with PeakMemory() as meter:
        outputs = torch.randn(4, 1, 8, 128, 128)
        sums = prediction.Strips("segmentation", False)
        sums.add(model, outputs)
        sums.finish()
    answer = (8 + 2) * 128 * 128 * 4  # probabilities and two uncertainties
    assert meter.peak - outputs.nbytes < 2.1 * answer


def test_members_are_summed_a_few_at_a_time_to_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is made probabilities at once is a matter of memory alone."""
    model = lpbnn.build(nn.Linear(4, 3), "lpbnn", members=5, num_data=10)
    x = torch.randn(6, 4)
    whole = predict(model, x, samples=2, seed=0)
    monkeypatch.setattr(prediction, "AT_ONCE", 2 * 6 * 3)  # two members
    few = predict(model, x, samples=2, seed=0)
    assert torch.equal(few.members, whole.members)
    assert torch.equal(few.probs, whole.probs)
    assert torch.equal(few.epistemic, whole.epistemic)
