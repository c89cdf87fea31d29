"""Weights that no conversion reaches cause one warning, unless the user left them out."""

import warnings

import pytest
import torch
from networks import ConvNet, Mlp, ResNet, UsersOwn, Vit
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lpbnn
from lpbnn import backbones


class Reader(nn.Module):
    """What a user brings for text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x))[0][:, -1])


class Own(nn.Module):
    """A matrix that is no layer."""

    def __init__(self, shape: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.matrix = nn.Parameter(torch.randn(shape))
        self.norm = nn.LayerNorm((8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) @ self.matrix)


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1"])
def test_a_module_that_cannot_be_converted_causes_one_warning_at_build(method: str) -> None:
    message = r"^rnn \(LSTM\) cannot be converted and keeps 96 % .* of Reader .*exclude=\['rnn'\]"
    with pytest.warns(UserWarning, match=message) as caught:
        model = lpbnn.build(Reader(), method, num_data=9)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line that the user wrote
    x, y = torch.randint(50, (4, 7)), torch.zeros(4, dtype=torch.int64)
    assert model.loss(x, y)["loss"].isfinite()  # and no second time: warnings are errors here


def test_a_matrix_that_is_no_layer_causes_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"matrix \(Own\) cannot be .* 50 % .*exclude=\['matrix'\]"
    ):
        lpbnn.build(Own(), "batchensemble")


def test_the_largest_are_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), *(nn.GRU(2, width) for width in (3, 6, 4, 5)))
    with pytest.warns(UserWarning, match=r"^2 \(GRU\), 4 \(GRU\), 3 \(GRU\) and 1 more cannot"):
        lpbnn.build(net, "batchensemble")


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "rnn"},
        {"exclude": nn.LSTM},
        {"exclude": ["rnn.*"]},
        {"include": "head"},
        {"include": nn.Linear},
    ],
)
def test_a_module_that_the_user_left_out_causes_no_warning(options: dict[str, object]) -> None:
    assert lpbnn.build(Reader(), "batchensemble", **options).expand_at == ["head"]


def test_a_part_that_the_user_included_causes_a_warning() -> None:
    net = nn.ModuleDict({"reader": Reader(), "other": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match=r"reader.rnn \(LSTM\)"):
        lpbnn.build(net, "batchensemble", include="reader")


def test_a_pattern_that_matches_nothing_is_still_refused() -> None:
    with pytest.raises(ValueError, match="exclude='rmm' matches no layer"):
        lpbnn.build(Reader(), "batchensemble", exclude="rmm")
    with pytest.raises(ValueError, match="include='rnn' matches no layer"):
        lpbnn.build(Reader(), "batchensemble", include="rnn")


@pytest.mark.parametrize("name", backbones.names())
def test_the_backbones_convert_whole(name: str) -> None:
    with torch.device("meta"):
        net = backbones.build(name, 3)
    lpbnn.build(net, "batchensemble")


@pytest.mark.parametrize("make", [Mlp, ConvNet, ResNet, UsersOwn, Vit])
def test_ordinary_networks_convert_whole(make: type[nn.Module]) -> None:
    lpbnn.build(make(), "batchensemble")


def test_tables_norms_and_parametrisations_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpbnn.build(Own(shape=(1, 64, 8)), "batchensemble")  # one position for all examples
        lpbnn.build(nn.Sequential(nn.Embedding(99, 8), nn.Linear(8, 3)), "batchensemble")
        layer = parametrizations.weight_norm(nn.Linear(8, 8))
        lpbnn.build(nn.Sequential(layer, nn.Linear(8, 2)), "batchensemble", exclude="0")


def test_a_network_that_holds_matrices_itself_is_named_by_all_of_them() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 4))
            self.head = nn.Linear(4, 2)

    with pytest.warns(UserWarning, match="cannot be converted") as caught:
        lpbnn.build(LowRank(), "batchensemble")
    message = str(caught[0].message)
    assert "u (LowRank), v (LowRank) cannot be converted and keep 89 %" in message
    assert "tables of positions or queries" in message
    assert "exclude=['u', 'v']" in message


@pytest.mark.parametrize(("width", "told"), [(2, False), (200, True)])
def test_matrices_are_told_from_a_tenth_of_the_weights_on(width: int, told: bool) -> None:
    net = nn.Sequential(nn.Linear(10, 50), nn.Linear(50, 10))
    net.register_parameter("matrix", nn.Parameter(torch.randn(width, 10)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lpbnn.build(net, "batchensemble")
    assert bool(caught) == told


def test_several_matrices_are_named_in_the_order_of_their_size() -> None:
    net = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 10))
    for name, rows in (("small", 20), ("large", 80), ("middle", 40)):
        net.register_module(name, nn.Bilinear(2, 5, rows))
    with pytest.warns(UserWarning, match="large.*middle.*small"):
        lpbnn.build(net, "batchensemble")
