"""What every network must do. A new file in the folder inherits these tests by its name."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lpbnn import backbones

ALL = [*backbones.names(), "wrn-16-2"]
NAMES = [name for name in ALL if not backbones.load(name).dense]  # these: test_deeplab.py
# The tests that run a network use the smallest of each kind; the rest is counted on "meta".
SMALL = ["lenet", "mlp", "small-cnn", "resnet18", "wrn-16-2"]


def make(name: str, channels: int = 1, side: int = 8, **options: object) -> backbones.Backbone:
    extra: dict = {"image_size": side} if name == "mlp" else {}
    net = backbones.build(name, 5, channels, **extra, **options)
    assert isinstance(net, backbones.Backbone)
    return net


def pictures(channels: int = 1, side: int = 8, batch: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side)


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_head_of_the_features(name: str) -> None:
    net, x = make(name).eval(), pictures()
    features = net.features(x)
    assert isinstance(net.head, nn.Linear)
    assert features.shape == (3, net.head.in_features)
    assert net(x).shape == (3, 5)
    assert torch.equal(net(x), net.head(features))


@pytest.mark.parametrize("name", ALL)
def test_every_name_has_one_line_about_it(name: str) -> None:
    description = backbones.load(name).description
    assert description
    assert "\n" not in description
    assert len(description) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_no_bias_before_batch_norm(name: str) -> None:
    with torch.device("meta"):
        net = make(name)
    if any(isinstance(m, nn.BatchNorm2d) for m in net.modules()):
        assert all(m.bias is None for m in net.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("side", [8, 17, 28, 32, 40])
def test_any_size_and_colour(name: str, side: int) -> None:
    net = make(name, channels=3, side=side).eval()
    assert net(pictures(3, side, 2)).isfinite().all()


@pytest.mark.parametrize("name", ["lenet", "small-cnn", "wrn-16-2"])
def test_pictures_need_not_be_square(name: str) -> None:
    assert make(name).eval()(torch.randn(2, 1, 7, 36)).shape == (2, 5)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    net = make(name)
    net(pictures(batch=8)).square().sum().backward()
    silent = [key for key, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    net, x = make(name).eval(), pictures()
    expected = net(x).detach()
    actual = net.to(dtype)(x.to(dtype))
    assert actual.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float64 else 0.1 * float(expected.abs().max())
    assert torch.allclose(actual.float(), expected, atol=tolerance)


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_gives_the_same_answer(name: str) -> None:
    net, x = make(name, 3, 32).eval(), pictures(3, 32)
    expected = net(x)
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    actual = net(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    net, x = make(name).eval(), pictures()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), net(x))


@pytest.mark.parametrize("name", SMALL)
def test_exports_with_a_free_batch_size(name: str) -> None:
    net = make(name).eval()
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(net, (pictures(),), dynamic_shapes=shapes)
    x = pictures(batch=7)
    assert torch.allclose(program.module()(x), net(x), atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_copies_and_states_are_the_same_network(name: str) -> None:
    net, x = make(name).eval(), pictures()
    other = make(name).eval()
    other.load_state_dict(net.state_dict())
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides_the_weights(name: str) -> None:
    torch.manual_seed(3)
    one = make(name).state_dict()
    torch.manual_seed(3)
    two = make(name).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", SMALL)
def test_dropout_is_placed_only_where_it_drops(name: str) -> None:
    def drops(net: nn.Module) -> list[float]:
        return [m.p for m in net.modules() if isinstance(m, nn.Dropout)]

    assert drops(make(name)) == []
    net, x = make(name, dropout=0.3), pictures()
    assert set(drops(net)) == {0.3}
    # The slot is no parameter: a network with dropout reads a checkpoint without it.
    assert net.state_dict().keys() == make(name).state_dict().keys()
    assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_dropout_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"dropout is .*; expected a rate with 0 <= rate < 1"):
        make("small-cnn", dropout=rate)


@pytest.mark.parametrize("name", ["resnet-18", "RESNET18"])
def test_an_unknown_name_gets_the_nearest_one(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'\. Did you mean 'resnet18'\?") as error:
        backbones.build(name, 10)
    assert all(known in str(error.value) for known in backbones.names())


def test_a_name_like_nothing_gets_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown backbone 'xyzzy'\. Known: deeplab, "):
        backbones.load("xyzzy")


@pytest.mark.parametrize(("classes", "channels"), [(0, 3), (10, 0), (2.5, 3), (True, 3)])
def test_a_bad_width_is_refused(classes: int, channels: int) -> None:
    with pytest.raises(ValueError, match="expected an integer >= 1"):
        backbones.build("lenet", classes, channels)


def test_an_unknown_option_gets_the_list_of_options() -> None:
    with pytest.raises(ValueError, match=r"option 'depth'; its options are dropout=0\.0"):
        backbones.build("wrn-16-2", 10, depth=28)
