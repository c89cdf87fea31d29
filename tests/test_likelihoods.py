"""Likelihoods: negative log-likelihoods, their weighted means, summaries, and errors that name the fix."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from networks import Mlp, small
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal
from torch.distributions import Categorical as TorchCategorical

import lpbnn
from lpbnn.likelihoods import (
    MIN_VARIANCE,
    Categorical,
    Custom,
    Gaussian,
    Likelihood,
    MultiHead,
    MultiLabel,
    Segmentation,
    Summary,
    as_likelihood,
    class_weights,
    entropy,
)
from lpbnn.members.rows import member_rows
from lpbnn.predict import Prediction

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


class Poisson:
    """The simplest likelihood of a user: its summary is a tensor of values."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets, reduction="none")

    def summary(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0].exp()


def labels(*shape: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, shape)


def soft_labels(*shape: int) -> Tensor:
    """Probabilities over the classes, which come second."""
    return torch.randn(shape).softmax(1)


# Every likelihood with outputs and targets for 4 rows.
CASES: dict[str, Callable[[], tuple[Likelihood, Any, Any]]] = {
    "labels": lambda: (Categorical(), torch.randn(4, 3), labels(4)),
    "ignored labels": lambda: (Categorical(0), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    "soft labels": lambda: (Categorical(), torch.randn(4, 3), soft_labels(4, 3)),
    "class weights": lambda: (
        Categorical(class_weights=[1.0, 2.0, 0.5]),
        torch.randn(4, 3),
        labels(4),
    ),
    "pixels": lambda: (Segmentation(), torch.randn(4, 3, 5, 6), labels(4, 5, 6)),
    "soft pixels": lambda: (Segmentation(), torch.randn(4, 3, 5, 6), soft_labels(4, 3, 5, 6)),
    "tokens": lambda: (Categorical(dim=-1), torch.randn(4, 7, 3), labels(4, 7)),
    "numbers": lambda: (Gaussian(), torch.randn(4, 6), torch.randn(4, 3)),
    "log variance": lambda: (Gaussian("log"), torch.randn(4, 6), torch.randn(4, 3)),
    "fixed variance": lambda: (Gaussian(0.3), torch.randn(4, 3), torch.randn(4, 3)),
    "dense numbers": lambda: (Gaussian(), torch.randn(4, 4, 5, 6), torch.randn(4, 2, 5, 6)),
    "number sequences": lambda: (Gaussian(dim=-1), torch.randn(4, 7, 4), torch.randn(4, 7, 2)),
    "several labels": lambda: (MultiLabel(), torch.randn(4, 3), labels(4, 3, classes=2)),
    "several labels per pixel": lambda: (
        MultiLabel(),
        torch.randn(4, 3, 5, 6),
        labels(4, 3, 5, 6, classes=2),
    ),
    "custom": lambda: (Custom(Poisson()), torch.randn(4, 1), torch.rand(4)),
    "heads": lambda: (
        MultiHead({"kind": Categorical(), "size": Gaussian()}),
        {"kind": torch.randn(4, 3), "size": torch.randn(4, 2)},
        {"kind": labels(4), "size": torch.randn(4, 1)},
    ),
}
every = pytest.mark.parametrize("case", CASES)


def over(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``data`` changed, every head of it."""
    if isinstance(data, dict):
        return {name: change(part) for name, part in data.items()}
    return change(data)


# Negative log-likelihoods


@pytest.mark.parametrize("shape", [(), (7,), (5, 6)])
def test_the_nll_of_labels_is_that_of_a_categorical_distribution(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(4, 3, *shape), labels(4, *shape)
    expected = -TorchCategorical(logits=outputs.movedim(1, -1)).log_prob(targets)
    torch.testing.assert_close(Categorical().nll(outputs, targets), expected)
    torch.testing.assert_close(Segmentation().nll(outputs, targets), expected)


@pytest.mark.parametrize(
    ("variance", "to_variance"),
    [("softplus", nn.functional.softplus), ("log", torch.exp)],
)
def test_the_nll_of_numbers_is_that_of_normal_distributions(
    variance: str, to_variance: Callable[[Tensor], Tensor]
) -> None:
    outputs, targets = torch.randn(4, 6), torch.randn(4, 3)
    std = (to_variance(outputs[:, 3:]) + MIN_VARIANCE).sqrt()
    expected = -Normal(outputs[:, :3], std).log_prob(targets).sum(1)
    torch.testing.assert_close(Gaussian(variance).nll(outputs, targets), expected)


def test_a_fixed_variance_takes_one_output_per_target() -> None:
    outputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    expected = -Normal(outputs, 0.5).log_prob(targets).sum(1)
    torch.testing.assert_close(Gaussian(0.25).nll(outputs, targets), expected)


@pytest.mark.parametrize("variance", ["softplus", "log"])
def test_no_variance_is_zero(variance: Any) -> None:
    """Where the exponential underflows, the loss and its gradient stay finite."""
    likelihood = Gaussian(variance)
    outputs = torch.tensor([[0.0, -200.0]], requires_grad=True)
    assert likelihood.split(outputs.detach())[1].item() == pytest.approx(1e-6)
    nll = likelihood.mean_nll(outputs, torch.ones(1, 1))
    nll.backward()
    assert nll.isfinite()
    assert outputs.grad.isfinite().all()


def test_a_unit_variance_is_half_the_squared_error() -> None:
    outputs, targets = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    Gaussian(1.0).mean_nll(outputs, targets).backward()
    torch.testing.assert_close(outputs.grad, (outputs - targets).detach() / 4)


def test_the_nll_of_several_labels_is_that_of_bernoulli_distributions() -> None:
    outputs, targets = torch.randn(4, 3), labels(4, 3, classes=2).float()
    expected = -Bernoulli(logits=outputs).log_prob(targets).sum(1)
    torch.testing.assert_close(MultiLabel().nll(outputs, targets), expected)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_a_soft_label_costs_its_expectation_over_labels(weights: list[float] | None) -> None:
    likelihood, outputs = Categorical(class_weights=weights), torch.randn(4, 3)
    soft = soft_labels(4, 3)
    each = torch.stack([likelihood.nll(outputs, torch.full((4,), c)) for c in range(3)], 1)
    torch.testing.assert_close(likelihood.nll(outputs, soft), (soft * each).sum(1))
    weight = torch.tensor(weights or [1.0] * 3)
    torch.testing.assert_close(likelihood.weights(soft), soft @ weight)


@pytest.mark.parametrize("kind", [Categorical, Segmentation])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
@pytest.mark.parametrize("row_weights", [None, torch.tensor([0.5, 1.0, 2.0, 0.0])])
def test_one_hot_soft_labels_equal_labels(
    kind: type[Categorical], weights: list[float] | None, row_weights: Tensor | None
) -> None:
    likelihood, outputs, y = kind(class_weights=weights), torch.randn(4, 3, 2), labels(4, 2)
    one_hot = nn.functional.one_hot(y, 3).movedim(-1, 1).float()
    torch.testing.assert_close(likelihood.nll(outputs, one_hot), likelihood.nll(outputs, y))
    torch.testing.assert_close(
        likelihood.mean_nll(outputs, one_hot, row_weights),
        likelihood.mean_nll(outputs, y, row_weights),
    )


def test_a_soft_label_of_zeros_does_not_count() -> None:
    outputs, soft = torch.randn(4, 3), soft_labels(4, 3)
    soft[1] = 0
    rest = [0, 2, 3]
    expected = Categorical().mean_nll(outputs[rest], soft[rest])
    torch.testing.assert_close(Categorical().mean_nll(outputs, soft), expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_every_integer_type_are_accepted(dtype: torch.dtype) -> None:
    likelihood, outputs, y = Categorical(), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    given = y.to(dtype)
    assert torch.equal(likelihood.mean_nll(outputs, given), likelihood.mean_nll(outputs, y))
    assert torch.equal(likelihood.nll(outputs, given), likelihood.nll(outputs, y))
    weighted = Categorical(class_weights=[1.0, 2.0, 3.0])
    assert torch.equal(weighted.weights(given), weighted.weights(y))


def test_a_byte_is_not_taken_for_the_ignored_label() -> None:
    y = torch.tensor([156, 0], dtype=torch.uint8)  # -100 modulo 256
    assert Categorical().weights(y).tolist() == [1, 1]
    outputs = torch.randn(2, 157)
    expected = nn.functional.cross_entropy(outputs, y.long())
    torch.testing.assert_close(Categorical().mean_nll(outputs, y), expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_several_labels_of_every_type_are_accepted(dtype: torch.dtype) -> None:
    outputs, y = torch.randn(4, 3), labels(4, 3, classes=2)
    expected = MultiLabel().nll(outputs, y.float())
    assert torch.equal(MultiLabel().nll(outputs, y.to(dtype)), expected)


def test_a_single_target_may_leave_its_axis_out() -> None:
    outputs, y = torch.randn(4, 2, 5), torch.randn(4, 5)
    likelihood = Gaussian()
    assert torch.equal(likelihood.nll(outputs, y), likelihood.nll(outputs, y.unsqueeze(1)))
    last, rows = Gaussian(dim=-1), outputs.movedim(1, -1)
    assert torch.equal(last.nll(rows, y), last.nll(rows, y.unsqueeze(-1)))


# Layouts


@pytest.mark.parametrize(
    ("case", "outputs_of", "targets_of"),
    [
        ("pixels", 3, None),
        ("soft pixels", 3, 3),
        ("dense numbers", 4, 2),
        ("several labels per pixel", 3, 3),
    ],
)
def test_a_map_is_scored_pixel_by_pixel(case: str, outputs_of: int, targets_of: int | None) -> None:
    likelihood, outputs, targets = CASES[case]()
    rows = outputs.movedim(1, -1).reshape(-1, outputs_of)
    flat = targets.flatten()
    row_targets = flat if targets_of is None else targets.movedim(1, -1).reshape(-1, targets_of)
    found = likelihood.nll(outputs, targets)
    assert found.shape == (4, 5, 6)
    torch.testing.assert_close(found.flatten(), likelihood.nll(rows, row_targets))
    torch.testing.assert_close(likelihood.mean_nll(outputs, targets), found.mean())


@pytest.mark.parametrize(
    ("kind", "width", "targets"),
    [
        (Categorical, 3, labels(4, 7)),
        (Gaussian, 4, torch.randn(4, 7, 2)),
        (MultiLabel, 3, labels(4, 7, 3, classes=2)),
    ],
)
def test_a_sequence_is_scored_token_by_token(
    kind: Callable[..., Likelihood], width: int, targets: Tensor
) -> None:
    outputs = torch.randn(4, 7, width)
    found = kind(dim=-1).nll(outputs, targets)
    expected = kind().nll(outputs.flatten(0, 1), targets.flatten(0, 1))
    assert found.shape == (4, 7)
    torch.testing.assert_close(found.flatten(), expected)


def test_soft_labels_of_sequences_have_their_classes_last() -> None:
    outputs, soft = torch.randn(4, 7, 3), torch.randn(4, 7, 3).softmax(-1)
    found = Categorical(dim=-1).nll(outputs, soft)
    expected = Categorical().nll(outputs.flatten(0, 1), soft.flatten(0, 1))
    torch.testing.assert_close(found.flatten(), expected)


def test_padded_tokens_do_not_count() -> None:
    outputs, y = torch.randn(4, 7, 3), labels(4, 7)
    y[:, 5:] = -100
    expected = nn.functional.cross_entropy(outputs[:, :5].flatten(0, 1), y[:, :5].flatten())
    torch.testing.assert_close(Categorical(dim=-1).mean_nll(outputs, y), expected)


# Weighted means


@every
def test_a_weight_counts_as_repetition(case: str) -> None:
    likelihood, outputs, targets = CASES[case]()
    times = torch.tensor([2, 0, 1, 3])

    def repeat(data: Tensor) -> Tensor:
        return data.repeat_interleave(times, 0)

    found = likelihood.mean_nll(outputs, targets, times)
    expected = likelihood.mean_nll(over(outputs, repeat), over(targets, repeat))
    torch.testing.assert_close(found, expected)


@every
def test_equal_weights_change_nothing(case: str) -> None:
    likelihood, outputs, targets = CASES[case]()
    found = likelihood.mean_nll(outputs, targets, torch.full((4,), 0.7))
    torch.testing.assert_close(found, likelihood.mean_nll(outputs, targets))


@every
def test_members_are_scored_against_the_same_targets(case: str) -> None:
    likelihood, outputs, targets = CASES[case]()
    weight = torch.tensor([1.0, 0.5, 2.0, 1.5])
    members = over(outputs, lambda part: torch.stack([part, 2 * part, -part]))
    each = [
        likelihood.mean_nll(over(members, lambda part, i=i: part[i]), targets, weight)
        for i in range(3)
    ]
    found = likelihood.mean_nll(*member_rows(members, targets, weight))
    torch.testing.assert_close(found, torch.stack(each).mean())


@pytest.mark.parametrize("kind", [Categorical, Segmentation])
def test_class_weights_are_those_of_cross_entropy(kind: type[Categorical]) -> None:
    weights, outputs, y = torch.tensor([1.0, 2.0, 0.5]), torch.randn(4, 3, 5), labels(4, 5)
    expected = nn.functional.cross_entropy(outputs, y, weights)
    torch.testing.assert_close(kind(class_weights=weights).mean_nll(outputs, y), expected)


@pytest.mark.parametrize("kind", [Categorical, Segmentation])
def test_ignored_labels_change_nothing_for_the_others(kind: type[Categorical]) -> None:
    outputs, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 7, 0, 7])
    expected = nn.functional.cross_entropy(outputs[y < 3], y[y < 3])
    torch.testing.assert_close(kind(ignore_index=7).mean_nll(outputs, y), expected)


@pytest.mark.parametrize("row_weights", [None, torch.tensor([0.5, 1.0, 1.0, 0.5])])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("kind", [Categorical, Segmentation])
def test_a_batch_of_ignored_labels_has_no_loss_and_no_gradient(
    kind: type[Categorical], weights: list[float] | None, row_weights: Tensor | None
) -> None:
    outputs = torch.randn(4, 3, 2, requires_grad=True)
    loss = kind(7, weights).mean_nll(outputs, torch.full((4, 2), 7), row_weights)
    loss.backward()
    assert loss.item() == 0.0
    assert outputs.grad.count_nonzero() == 0


@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_labels_without_weight_have_no_loss(method: str) -> None:
    model = lpbnn.build(small(), method, class_weights=[1.0, 0.0, 1.0])
    terms = model.loss(torch.randn(8, 5), torch.ones(8, dtype=torch.int64))
    terms["loss"].backward()
    assert terms["nll"] == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every
def test_weights_of_zero_have_no_loss(case: str) -> None:
    likelihood, outputs, targets = CASES[case]()
    assert likelihood.mean_nll(outputs, targets, torch.zeros(4)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row_weights", [None, torch.tensor([1.0, 0.5])])
def test_a_sum_over_pixels_is_taken_in_float32(
    dtype: torch.dtype, row_weights: Tensor | None
) -> None:
    outputs = torch.randn(2, 3, 256, 256).to(dtype)  # 131072 pixels; float16 ends at 65504
    y = labels(2, 256, 256)
    found = Segmentation().mean_nll(outputs, y, row_weights)
    expected = Segmentation().mean_nll(outputs.double(), y, row_weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_scored_in_float32(case: str, dtype: torch.dtype) -> None:
    likelihood, outputs, targets = CASES[case]()
    outputs = over(outputs, lambda part: part.to(dtype))
    found = likelihood.mean_nll(outputs, targets)
    assert found.dtype == torch.float32
    expected = likelihood.mean_nll(over(outputs, Tensor.float), targets)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_rare_classes_weigh_more() -> None:
    for kind in ("median", "log"):
        weights = class_weights([800, 400, 200, 200], kind)
        assert weights[0] < weights[1] < weights[2] == weights[3]
    assert class_weights([6, 0, 2], "median") == pytest.approx([0.5 / 0.75, 0, 0.5 / 0.25])
    shares = (0.5, 0.25, 0.25, 0.0)
    expected = [1 / math.log(1.02 + share) for share in shares]
    assert class_weights([4, 2, 2, 0], "log") == pytest.approx(expected)


# Summaries


def test_probabilities_and_entropies_of_members() -> None:
    outputs = torch.randn(2, 4, 3, 5)
    found = Categorical().summary(outputs)
    torch.testing.assert_close(found.values, outputs.softmax(2))
    expected = TorchCategorical(logits=outputs.movedim(2, -1)).entropy()
    torch.testing.assert_close(found.aleatoric, expected)
    sequences = Categorical(dim=-1).summary(outputs.movedim(2, -1))
    torch.testing.assert_close(sequences.values, found.values.movedim(2, -1))
    torch.testing.assert_close(sequences.aleatoric, expected)


def test_the_entropy_of_a_certain_label_is_zero() -> None:
    assert entropy(torch.tensor([[1.0, 0.0]])).item() == 0
    assert MultiLabel().total(torch.tensor([[1.0, 0.0]])).tolist() == [[0, 0]]


def test_means_and_variances_of_members() -> None:
    outputs = torch.randn(2, 4, 6, 5)
    found = Gaussian().summary(outputs)
    torch.testing.assert_close(found.values, outputs[:, :, :3])
    torch.testing.assert_close(
        found.variances, nn.functional.softplus(outputs[:, :, 3:]) + MIN_VARIANCE
    )
    assert found.aleatoric is found.variances


def test_a_fixed_variance_is_every_members_uncertainty() -> None:
    found = Gaussian(0.3).summary(torch.randn(2, 4, 3))
    torch.testing.assert_close(found.aleatoric, torch.full((2, 4, 3), 0.3))


def test_binary_entropies_of_members() -> None:
    outputs = torch.randn(2, 4, 3)
    found = MultiLabel().summary(outputs)
    torch.testing.assert_close(found.values, outputs.sigmoid())
    torch.testing.assert_close(found.aleatoric, Bernoulli(logits=outputs).entropy())


# The user's own


def test_the_simplest_object_of_a_user_works() -> None:
    likelihood = as_likelihood(Poisson())
    found = likelihood.summary(torch.randn(2, 4, 1))
    assert found.values.shape == found.aleatoric.shape == (2, 4)
    assert found.aleatoric.count_nonzero() == 0


def test_a_summary_may_have_a_variance() -> None:
    class WithVariance(Poisson):
        def summary(self, outputs: Tensor) -> Any:
            rate = outputs[:, 0].exp()
            return rate, rate

    found = as_likelihood(WithVariance()).summary(torch.randn(2, 4, 1))
    assert torch.equal(found.values, found.aleatoric)
    assert torch.equal(found.values, found.variances)


def test_parameters_of_a_users_likelihood_are_trained_and_saved() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_std = nn.Parameter(torch.zeros(()))

        def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -Normal(outputs, self.log_std.exp()).log_prob(targets).sum(1)

        def summary(self, outputs: Tensor) -> Any:
            return outputs, (2 * self.log_std).exp().expand_as(outputs)

    model = lpbnn.build(small(), "mcp", likelihood=Noise())
    model.loss(torch.randn(4, 5), torch.randn(4, 3))["loss"].backward()
    assert model.likelihood.user.log_std.grad != 0
    assert "likelihood.user.log_std" in model.state_dict()
    assert any(p is model.likelihood.user.log_std for p in model.parameters())


def test_a_mean_for_an_nll_is_refused() -> None:
    class Mean(Poisson):
        def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().nll(outputs, targets).mean()

    with pytest.raises(ValueError, match=r"Mean.nll returned .* shape \(\) for 4 rows.*'none'"):
        as_likelihood(Mean()).mean_nll(torch.randn(4, 1), torch.rand(4))


def test_a_summary_of_another_shape_is_refused() -> None:
    class Wrong(Poisson):
        def summary(self, outputs: Tensor) -> Any:
            return outputs, outputs[:, 0]

    with pytest.raises(
        ValueError, match=r"shapes \[\(8, 1\), \(8,\)\] for 8 rows; expected values"
    ):
        as_likelihood(Wrong()).summary(torch.randn(2, 4, 1))


# Several heads


def test_the_nll_of_heads_is_the_sum_of_its_parts() -> None:
    likelihood, outputs, targets = CASES["heads"]()
    terms = likelihood.nll_terms(outputs, targets)
    torch.testing.assert_close(terms["nll"], terms["nll/kind"] + terms["nll/size"])
    expected = Categorical().mean_nll(outputs["kind"], targets["kind"])
    assert torch.equal(terms["nll/kind"], expected)


def test_a_loss_returns_the_parts_of_its_heads_and_counts_them_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"kind": self.kind(x), "size": self.size(x), "features": x}

    heads = {"kind": Categorical(), "size": Gaussian()}
    for method in ("mcp", "ensemble"):
        model = lpbnn.build(Heads(), method, likelihood=heads)
        _, _, y = CASES["heads"]()
        terms = model.loss(torch.randn(4, 5), y)
        assert list(terms) == ["loss", "nll", "nll/kind", "nll/size"]
        torch.testing.assert_close(terms["loss"], terms["nll/kind"] + terms["nll/size"])


def test_heads_may_have_any_name() -> None:
    heads = MultiHead({"type": Categorical(), "a.b": Poisson()})
    assert [type(head) for head in heads.heads.values()] == [Categorical, Custom]


def test_a_network_without_the_heads_is_told_their_names() -> None:
    heads = MultiHead({"kind": Categorical(), "size": Gaussian()})
    with pytest.raises(TypeError, match=r"the keys \['kind'\]; expected .*\['kind', 'size'\]"):
        heads.read_output({"kind": torch.randn(4, 3)})
    message = r"returned tuple.*lambda output: {'kind': output\[0\], 'size': output\[1\]}"
    with pytest.raises(TypeError, match=message):
        heads.read_output((torch.randn(4, 3), torch.randn(4, 2)))


def test_targets_without_the_heads_are_refused() -> None:
    heads = MultiHead({"kind": Categorical(), "size": Gaussian()})
    for y, given in ((labels(4), "Tensor"), ({"kind": labels(4)}, r"the keys \['kind'\]")):
        with pytest.raises(
            TypeError, match=rf"\['kind', 'size'\], one for each head; got .*{given}"
        ):
            heads.check_batch(torch.randn(4, 5), y)


# What build is given


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("classification", Categorical),
        ("segmentation", Segmentation),
        ("regression", Gaussian),
        ("multilabel", MultiLabel),
    ],
)
def test_a_task_is_a_shorthand(task: str, kind: type[Likelihood]) -> None:
    model = lpbnn.build(small(), "mcp", task=task)
    assert type(model.likelihood) is kind
    assert model.task == task


def test_a_likelihood_is_taken_as_it_is() -> None:
    likelihood = Gaussian("log")
    assert as_likelihood(likelihood) is likelihood
    assert as_likelihood({"a": likelihood}).heads["a"] is likelihood


@pytest.mark.parametrize("wrong", [Gaussian, "regression", lambda outputs: outputs, 3])
def test_what_is_no_likelihood_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected an object such as likelihoods.Gaussian\(\)"):
        as_likelihood(wrong)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task='detection' is not known.*classification"):
        as_likelihood(task="detection")


def test_a_task_that_contradicts_the_likelihood_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out the one that is wrong"):
        as_likelihood(Categorical(), task="regression")
    same = lpbnn.likelihoods.Gaussian()
    assert as_likelihood(same, task="regression") is same
    assert as_likelihood(same) is same


def test_options_of_labels_are_refused_elsewhere() -> None:
    for given in ({"task": "regression"}, {"likelihood": Categorical()}):
        with pytest.raises(ValueError, match="ignore_index and class_weights are for task="):
            as_likelihood(**given, class_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="ignore_index and class_weights are for task="):
        as_likelihood(Categorical(), ignore_index=255)


def test_a_likelihood_without_parameters_is_not_saved() -> None:
    model = lpbnn.build(small(), "mcp", class_weights=[1.0, 2.0, 3.0])
    assert not any(name.startswith("likelihood") for name in model.state_dict())


def test_class_weights_move_with_the_model() -> None:
    model = lpbnn.build(small(), "mcp", class_weights=[1.0, 2.0, 3.0]).to("meta")
    assert model.likelihood.class_weights.device.type == "meta"
    model = lpbnn.build(small().to("meta"), "mcp", class_weights=[1.0, 2.0, 3.0])
    assert model.likelihood.class_weights.device.type == "meta"


# Compilers


@every
@pytest.mark.parametrize("weighted", [False, True])
def test_the_nll_compiles_into_one_graph(case: str, weighted: bool) -> None:
    likelihood, outputs, targets = CASES[case]()
    weight = torch.rand(4) if weighted else None
    members = over(outputs, lambda part: torch.stack([part, -part]))

    def nll(*given: Any) -> torch.Tensor:
        return likelihood.mean_nll(*member_rows(*given))

    torch.compiler.reset()
    compiled = torch.compile(nll, backend="aot_eager", fullgraph=True)
    expected = nll(members, targets, weight)
    torch.testing.assert_close(compiled(members, targets, weight), expected)


# Errors


BAD_TARGETS = {
    "too few": (Categorical(), (4, 3), labels(3), r"labels of shape \(4,\).*int64 of shape \(3,\)"),
    "float labels": (
        Categorical(),
        (4, 3),
        torch.zeros(4),
        r"integer labels of shape \(4,\), or floating-point probabilities of shape \(4, 3\); got "
        r"torch.float32 of shape \(4,\)",
    ),
    "integer one-hot": (Categorical(), (4, 3), labels(4, 3), r"got torch.int64 of shape \(4, 3\)"),
    "classes last": (
        Categorical(),
        (2, 4, 3),
        labels(2, 4),
        r"Classes come second.*movedim\(-1, 1\).*Categorical\(dim=-1\)",
    ),
    "one class": (
        Categorical(),
        (4, 1),
        labels(4),
        r"gave \(4, 1\). A yes-or-no question has two classes.*MultiLabel\(\)",
    ),
    "no axis of classes": (Categorical(), (4,), labels(4), r"outputs \(batch, classes, ...\)"),
    "transposed numbers": (
        Gaussian(),
        (6, 4),
        torch.randn(2, 6),
        r"targets of shape \(2, 6\); expected \(6, 2\)",
    ),
    "integer numbers": (Gaussian(), (4, 2), labels(4), r"torch.int64.*Fix: y.float\(\)"),
    "odd outputs": (
        Gaussian(),
        (4, 3),
        torch.randn(4, 1),
        r"two outputs per target \(mean, variance\); got 3.*Gaussian\(variance=1.0\)",
    ),
    "no axis of numbers": (
        Gaussian(1.0),
        (4,),
        torch.randn(4),
        r"\(batch, 1 per target, ...\); the network gave \(4,\).*unsqueeze\(1\)",
    ),
    "too few labels": (
        MultiLabel(),
        (4, 3),
        labels(4),
        r"outputs of shape \(4, 3\) and targets of shape \(4,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_targets_that_do_not_fit_are_refused(case: str) -> None:
    likelihood, shape, targets, message = BAD_TARGETS[case]
    with pytest.raises(ValueError, match=message):
        likelihood.mean_nll(torch.randn(shape), targets)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), MultiLabel()])
def test_targets_that_are_no_tensor_are_refused(likelihood: Likelihood) -> None:
    for call in (likelihood.check_batch, likelihood.mean_nll):
        with pytest.raises(TypeError, match="targets are a tensor; got list. Fix: torch.as_tensor"):
            call(torch.randn(4, 2), [0, 1, 1, 0])


def test_numbers_of_things_may_have_soft_labels() -> None:
    model = lpbnn.build(nn.Embedding(10, 3), "mcp")
    loss = model.loss(torch.tensor([3, 1, 4, 1]), torch.rand(4, 3).softmax(1))["loss"]
    assert loss.isfinite()


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_an_ignored_label_needs_classes(task: Any) -> None:
    with pytest.raises(ValueError, match="ignore_index and class_weights are for task='class"):
        lpbnn.build(small(), "mcp", task=task, ignore_index=255)


class Cellwise(Likelihood):
    """Values by pixel, with the base class's score."""

    cellwise = True

    def nll(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(1)

    def summary(self, outputs: torch.Tensor) -> Summary:
        return Summary(outputs, outputs.square())


def test_maps_with_one_score_are_predicted_the_same_in_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1))
    model = lpbnn.build(net, "ensemble", members=3, likelihood=Cellwise())
    x = torch.randn(2, 1, 6, 5)
    whole = lpbnn.predict(model, x, keep_members=False)
    monkeypatch.setattr(importlib.import_module("lpbnn.predict"), "AT_ONCE", 20)
    strips = lpbnn.predict(model, x, keep_members=False)
    assert whole.ood_score.shape == (2,)
    torch.testing.assert_close(strips.ood_score, whole.ood_score)
    torch.testing.assert_close(strips.values, whole.values)


def test_a_swapped_batch_is_told() -> None:
    model, x, y = lpbnn.build(Mlp(), "mcp"), torch.randn(4, 5), labels(4)
    with pytest.raises(ValueError, match=r"of shape \(4,\) and .*swapped. Fix: loss\(inputs"):
        model.loss(y, x)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 1.0]])
@pytest.mark.parametrize("kind", [Categorical, Segmentation])
def test_a_label_that_is_no_class_is_told(
    kind: type[Categorical], weights: list[float] | None
) -> None:
    y = torch.tensor([[0, 1], [2, 255]])
    message = r"labels are 0 to 2, .*3 outputs, or ignore_index=-100; got \[255\].*ignore_index="
    with pytest.raises(IndexError, match=message):
        kind(class_weights=weights).mean_nll(torch.randn(2, 3, 2), y)


def test_a_wrong_number_of_class_weights_is_told_in_loss_and_prediction() -> None:
    model, x = lpbnn.build(small(), "mcp", class_weights=[1.0, 2.0]), torch.randn(4, 5)
    message = "class_weights has 2 numbers, but the network has 3 outputs"
    with pytest.raises(ValueError, match=message):
        model.loss(x, labels(4))
    with pytest.raises(ValueError, match=message):
        lpbnn.predict(model, x)


@pytest.mark.parametrize(
    "wrong", [[1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [[1.0, 2.0]], 3.0]
)
def test_class_weights_that_are_no_weights_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected one finite number of at least 0 per class"):
        Categorical(class_weights=wrong)


@pytest.mark.parametrize(
    ("weight", "given"),
    [(torch.ones(3), r"\(3,\)"), (torch.ones(4, 1), r"\(4, 1\)"), ([1.0] * 4, "list")],
)
@pytest.mark.parametrize("method", ["mcp", "ensemble"])
def test_weights_of_examples_that_do_not_fit_are_refused(
    method: str, weight: Any, given: str
) -> None:
    model = lpbnn.build(small(), method)
    with pytest.raises(ValueError, match=rf"a tensor of shape \(4,\), one number .*got {given}"):
        model.loss(torch.randn(4, 5), labels(4), weight)


@pytest.mark.parametrize("variance", ["exp", 0, -1.0, float("nan"), None])
def test_an_unknown_variance_is_refused(variance: Any) -> None:
    with pytest.raises(ValueError, match="expected 'softplus', 'log', or a positive number"):
        Gaussian(variance)


@pytest.mark.parametrize("kind", [Categorical, Gaussian, MultiLabel])
def test_another_axis_is_refused(kind: Callable[..., Likelihood]) -> None:
    with pytest.raises(ValueError, match="dim=2: expected 1, right after the batch, or -1"):
        kind(dim=2)


@dataclass
class Output:
    scores: Tensor


@pytest.mark.parametrize(
    ("wrap", "given", "fix"),
    [
        (lambda y: (y, y), "tuple", r"output\[0\]"),
        (
            lambda y: {"info": 1, "scores": y},
            r"the keys \['info', 'scores'\]",
            r"output\['scores'\]",
        ),
        (lambda y: Output(y), "Output", "output.scores"),
    ],
)
def test_an_output_that_cannot_be_read_gets_advice_that_works(
    wrap: Callable[[Tensor], Any], given: str, fix: str
) -> None:
    y = torch.randn(4, 3)
    message = rf"returned .*{given}; expected a tensor.*readout=lambda output: {fix}\)"
    with pytest.raises(TypeError, match=message) as caught:
        Categorical().read_output(wrap(y))
    advice = str(caught.value).split("readout=")[1].removesuffix(").")
    assert eval(advice)(wrap(y)) is y


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: {"out": y, "aux": y + 1},
        lambda y: {"logits": y},
        lambda y: type("ModelOutput", (), {"logits": y})(),
    ],
)
def test_usual_outputs_are_read(wrap: Callable[[Tensor], Any]) -> None:
    y = torch.randn(4, 3)
    assert Categorical().read_output(wrap(y)) is y


def test_member_rows_are_member_major() -> None:
    rows, targets, weights = member_rows(
        torch.arange(6.0).view(2, 3, 1), {"a": torch.tensor([7, 8, 9])}, torch.tensor([1, 2, 3])
    )
    assert rows.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert targets["a"].tolist() == [7, 8, 9, 7, 8, 9]
    assert weights.tolist() == [1, 2, 3, 1, 2, 3]


def test_an_nll_of_a_subclass_is_used_with_and_without_weights() -> None:
    class Doubled(Categorical):
        def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 2 * super().nll(outputs, targets)

    outputs, targets = torch.randn(6, 3), torch.randint(0, 3, (6,))
    expected = 2 * Categorical().mean_nll(outputs, targets)
    torch.testing.assert_close(Doubled().mean_nll(outputs, targets), expected)
    torch.testing.assert_close(Doubled().mean_nll(outputs, targets, torch.ones(6)), expected)


@pytest.mark.parametrize("dim", [1, -1])
def test_the_ood_score_of_several_numbers_is_their_total_variance(dim: int) -> None:
    shape = (2, 4, 6, 5) if dim == 1 else (2, 4, 5, 6)
    p = Prediction.from_outputs(torch.randn(shape), Gaussian(dim=dim))
    torch.testing.assert_close(p.ood_score, p.total.sum(dim))


def test_an_ignored_label_beyond_the_classes_is_a_class_without_weight() -> None:
    y = torch.tensor([[0, 255], [2, 255]])
    likelihood = Categorical(ignore_index=255)
    labels, weights = likelihood.labels_and_weights(torch.randn(2, 3, 2), y)
    assert labels.tolist() == [[[0, 0]], [[2, 0]]]
    assert weights.tolist() == [[1, 0], [1, 0]]


def test_members_of_a_regression_without_an_axis_of_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="regression needs outputs"):
        Gaussian().split(torch.randn(3, 5), members=True)
    mean, variance = Gaussian().split(torch.randn(3, 5, 4), members=True)
    assert mean.shape == variance.shape == (3, 5, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
def test_soft_labels_of_half_precision_are_counted_in_float32(
    weights: list[float] | None, dtype: torch.dtype
) -> None:
    likelihood, soft = Categorical(class_weights=weights), torch.rand(50, 3).to(dtype)
    assert likelihood.weights(soft).dtype == torch.float32
    torch.testing.assert_close(likelihood.weights(soft), likelihood.weights(soft.float()))
