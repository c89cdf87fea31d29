"""UncertainModel: what every method has in common."""

import copy
import pickle

import pytest
import torch
from networks import Mlp, small
from torch import nn

import lpbnn
from lpbnn import methods
from lpbnn.likelihoods import Categorical, Gaussian
from lpbnn.members.call import batch_size
from lpbnn.model import UncertainModel, stack_members, with_loss


def test_the_default_likelihood_is_for_classes() -> None:
    model = UncertainModel(small())
    assert type(model.likelihood) is Categorical
    assert model.task == "classification"


def test_copies_have_their_own_likelihood() -> None:
    model = lpbnn.build(small(), "mcp", class_weights=[1.0, 2.0, 3.0])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.likelihood is not model.likelihood
        assert twin.readout.__self__ is twin.likelihood
        assert torch.equal(twin.likelihood.class_weights, model.likelihood.class_weights)


def test_the_loss_is_the_sum_of_its_terms_and_not_of_their_parts() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    terms = with_loss(**{"nll": two, "nll/a": one, "nll/b": one, "kl": one})
    assert terms["loss"] == 3
    assert list(terms) == ["loss", "nll", "nll/a", "nll/b", "kl"]


def test_a_state_of_a_model_built_in_another_way_says_so() -> None:
    state = lpbnn.build(small(), "lpbnn", num_data=8).state_dict()
    with pytest.raises(RuntimeError) as caught:
        lpbnn.build(small(), "batchensemble").load_state_dict(state)
    assert any("with the options of the saved model" in note for note in caught.value.__notes__)


def test_outputs_of_members_are_stacked_head_by_head() -> None:
    one = {"a": torch.zeros(5, 2), "b": torch.zeros(5, 3, 4)}
    found = stack_members([one, one, one])
    assert {name: tuple(part.shape) for name, part in found.items()} == {
        "a": (3, 5, 2),
        "b": (3, 5, 3, 4),
    }


def test_a_readout_is_applied_to_what_the_network_returns() -> None:
    model = lpbnn.build(small(6), "mcp", likelihood=Gaussian(), readout=lambda out: out[:, :4])
    assert model(torch.randn(4, 5)).shape == (1, 4, 4)


@pytest.mark.parametrize(("batch", "chunk", "examples"), [(10, None, 10), (10, 4, 4), (3, 4, 3)])
def test_a_chunk_bounds_the_examples_of_a_pass(
    batch: int, chunk: int | None, examples: int
) -> None:
    assert lpbnn.build(Mlp(), "ensemble", members=3).chunk_sizes(batch, 2, chunk) == (3, examples)


def test_a_loss_step_is_the_loss() -> None:
    model, x, y = lpbnn.build(small(), "mcp"), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    weight = torch.rand(4)
    assert torch.equal(
        lpbnn.LossStep(model)(x, y, weight)["loss"], model.loss(x, y, weight)["loss"]
    )


def test_a_rate_of_fast_weights_needs_the_learning_rate() -> None:
    class TwoRates(UncertainModel):
        fast_lr = 0.5

        def fast_parameters(self) -> list[nn.Parameter]:
            return [self.net.bias]  # type: ignore[list-item]

    model = TwoRates(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="fast weights learn at 0.5 times the rate.*lr=..."):
        model.parameter_groups(1e-4)
    slow, fast = model.parameter_groups(1e-4, 0.1)
    assert (slow["params"], fast["params"]) == ([model.net.weight], [model.net.bias])
    assert (slow["weight_decay"], slow["lr"]) == (1e-4, 0.1)
    assert (fast["weight_decay"], fast["lr"]) == (0.0, 0.05)


CALLS = {
    "not a tensor": ([1.0], TypeError, "expected a tensor of inputs, got float"),
    "no batch": (torch.tensor(1.0), ValueError, "without dimensions"),
    "empty": (torch.zeros(0, 3), ValueError, r"batch is empty: inputs of shape \(0, 3\)"),
    "bytes": (torch.zeros(2, 3, dtype=torch.uint8), TypeError, r"got torch.uint8.*/ 255"),
    "integers": (torch.zeros(2, 3, 8, 8, dtype=torch.int64), TypeError, "got torch.int64"),
}


@pytest.mark.parametrize("case", CALLS)
def test_inputs_that_no_network_takes_are_refused(case: str) -> None:
    x, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        batch_size((x,) if isinstance(x, torch.Tensor) else tuple(x), {})


@pytest.mark.parametrize(
    "method", [name for name in methods.names() if name not in ("duq", "edl", "mimo")]
)
def test_the_loss_of_an_evaluation_scores_every_member_against_the_examples_own_label(
    method: str,
) -> None:
    """The mean over members of the cross-entropy that each has; the losses of DUQ, EDL and MIMO are others."""
    model = lpbnn.build(Mlp(), method, num_data=10)
    x, y = torch.randn(7, 5), torch.randint(3, (7,))
    if method == "tradi":
        model.loss(x, y)["loss"].backward()
        model.after_step(lr=1.0)
        model.after_fit([])
    model.eval()
    torch.manual_seed(1)
    nll = model.loss(x, y)["nll"]
    torch.manual_seed(1)
    each = [nn.functional.cross_entropy(member, y) for member in model(x)]
    torch.testing.assert_close(nll, torch.stack(each).mean())
