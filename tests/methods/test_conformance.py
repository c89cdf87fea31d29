"""Properties of every method; a new method file is tested without being named here."""

import pytest
import torch
from torch import nn

import lpbnn
from lpbnn import methods, testing

HAVE_SIGNS = [
    name for name in methods.names() if "init" in methods.load(name).Config.__dataclass_fields__
]


class TestEveryMethod(testing.MethodConformance):
    @pytest.fixture(params=methods.names())
    def method(self, request: pytest.FixtureRequest) -> str:
        return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", HAVE_SIGNS)
def test_signs_built_where_another_precision_is_the_default(
    method: str, dtype: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        model = lpbnn.build(net, method, num_data=100, init="signs")
        model.loss(torch.randn(6, 4), torch.arange(6) % 3)["loss"].backward()
        assert lpbnn.predict(model, torch.randn(2, 4)).probs.isfinite().all()
    finally:
        torch.set_default_dtype(before)


def test_methods_have_signs() -> None:
    assert len(HAVE_SIGNS) == 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", methods.names())
def test_weights_of_examples_count_by_their_ratios_and_zero_counts_nothing(
    method: str, training: bool
) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    model = lpbnn.build(net, method, num_data=100).double().train(training)
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    changed = torch.tensor([0, 2, 2, 0, 1])
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0])
    model.loss(x, y)  # the comparison of the first batch is over

    def loss(labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return model.loss(x, labels, weight)["loss"]

    assert not torch.isclose(loss(y, weight), loss(changed, weight), rtol=1e-6)
    torch.testing.assert_close(loss(y, 3 * weight), loss(y, weight))
    weight[1] = 0.0
    torch.testing.assert_close(loss(y, weight), loss(changed, weight))


@pytest.mark.parametrize("method", methods.names())
def test_undo_leaves_no_memory_of_the_members_behind_the_weights(method: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3))
    plain = lpbnn.undo(lpbnn.build(net, method, num_data=100))
    for parameter in plain.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
