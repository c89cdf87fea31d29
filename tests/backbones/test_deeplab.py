"""DeepLabv3+: any size in and out, an exact dilated encoder, and a decoder that follows its options."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from networks import settle
from torch import Tensor, nn
from torch.nn import functional as F

import lpbnn
from lpbnn import backbones
from lpbnn.backbones._decoder import ASPP, StandardisedConv2d, Style
from lpbnn.backbones.deeplab import DeepLab, Encoder
from lpbnn.backbones.resnet import Trunk
from lpbnn.cli.options import Start, with_options
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.training.config import RunConfig

GROUPS: dict[str, Any] = {"norm": "group", "standardise": True}
VARIANTS = [{}, {"separable": True}, GROUPS, {**GROUPS, "separable": True}]


def make(**options: Any) -> DeepLab:
    small: dict[str, Any] = {"width": 4, "channels": 16, **options}
    net = backbones.build("deeplab-resnet18", 5, **small)
    assert isinstance(net, DeepLab)
    return net


def pictures(height: int = 40, width: int = 56, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, height, width)


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return backbones.build(name, 13, **options)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def convolutions(net: nn.Module) -> dict[str, nn.Conv2d]:
    return {path: m for path, m in net.named_modules() if isinstance(m, nn.Conv2d)}


def test_the_sizes_are_those_of_the_literature() -> None:
    net = on_meta("deeplab")
    assert count(net.get_submodule("encoder")) == 25_557_032 - 2048 * 1000 - 1000  # torchvision's
    assert count(net) == 40_349_869
    assert count(on_meta("deeplab", separable=True)) == 26_680_413
    assert count(on_meta("deeplab-resnet50")) == count(net)
    assert count(on_meta("deeplab-resnet18")) == 16_605_869
    assert count(on_meta("deeplab-resnet34")) == 26_714_029
    assert count(on_meta("deeplab", **GROUPS)) == count(net)  # a variant, not another network


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_the_encoders_names_and_shapes_are_torchvisions(depth: int) -> None:
    net = on_meta(f"deeplab-resnet{depth}", output_stride=8)
    classifier = on_meta(f"resnet{depth}", stem="imagenet").state_dict()
    encoder = net.get_submodule("encoder").state_dict()
    assert [key for key in classifier if not key.startswith("head.")] == list(encoder)
    assert all(classifier[key].shape == value.shape for key, value in encoder.items())


@pytest.mark.parametrize("size", [(16, 16), (17, 33), (45, 31), (64, 100)])
@pytest.mark.parametrize("output_stride", [8, 16])
def test_every_size_goes_in_and_comes_out(size: tuple[int, int], output_stride: int) -> None:
    net = make(output_stride=output_stride).eval()
    x = pictures(*size)
    assert net(x).shape == (2, 5, *size)
    fine, deep = net.encoder(x)
    assert fine.shape[2:] == tuple(math.ceil(side / 4) for side in size)
    assert deep.shape[2:] == tuple(math.ceil(side / output_stride) for side in size)


@pytest.mark.parametrize(("size", "stride"), [((15, 40), 16), ((40, 8), 16), ((7, 7), 8)])
def test_a_picture_smaller_than_the_output_stride_is_refused(
    size: tuple[int, int], stride: int
) -> None:
    given = rf"shape \(2, 3, {size[0]}, {size[1]}\).* at least {stride}, the output stride\. Fix: "
    with pytest.raises(ValueError, match=given) as caught:
        make(output_stride=stride)(pictures(*size))
    assert ("output_stride=8" in str(caught.value)) == (min(size) >= 8)  # where that would do


def test_a_picture_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 64, 64\); expected \(batch, channels, "):
        make()(torch.zeros(3, 64, 64))


@pytest.mark.parametrize("size", [(64, 64), (53, 71)])
@pytest.mark.parametrize("output_stride", [8, 16])
@pytest.mark.parametrize(("depth", "stride_in"), [(18, "3x3"), (50, "3x3"), (50, "1x1")])
def test_the_dilated_encoder_is_the_strided_one_on_a_finer_grid(
    depth: int, stride_in: Any, output_stride: int, size: tuple[int, int]
) -> None:
    """What the stride leaves of the dense map is the strided map: published weights mean the same."""
    strided = settle(Trunk(stem="imagenet", stride_in=stride_in, depth=depth, width=2).double())
    dense = Encoder(3, output_stride, stride_in, depth=depth, width=2).double().eval()
    dense.load_state_dict(strided.state_dict())
    x, step = pictures(*size).double(), 32 // output_stride
    fine, deep = dense(x)
    assert isinstance(strided, Trunk)
    first, *_, last = strided.maps(x)
    torch.testing.assert_close(fine, first)
    torch.testing.assert_close(deep[:, :, ::step, ::step], last)


def test_the_stride_switch_moves_only_the_stride() -> None:
    nets = [on_meta("deeplab", stride_in=where) for where in ("3x3", "1x1")]
    for net, expected in zip(nets, [((1, 1), (2, 2)), ((2, 2), (1, 1))], strict=True):
        layers = convolutions(net.get_submodule("encoder.layer2.0"))
        assert (layers["conv1"].stride, layers["conv2"].stride) == expected
    assert nets[0].state_dict().keys() == nets[1].state_dict().keys()


@pytest.mark.parametrize(("output_stride", "rates"), [(16, (6, 12, 18)), (8, (12, 24, 36))])
@pytest.mark.parametrize("separable", [False, True])
def test_aspp_looks_as_far_as_published(
    output_stride: int, rates: tuple[int, ...], separable: bool
) -> None:
    net = make(output_stride=output_stride, separable=separable)
    wide = [c for c in convolutions(net.decoder.aspp).values() if c.kernel_size == (3, 3)]
    assert [c.dilation for c in wide] == [(rate, rate) for rate in rates]
    assert [c.padding for c in wide] == [(rate, rate) for rate in rates]


def test_aspp_is_the_formula() -> None:
    aspp = ASPP(6, 8, (2, 3), Style())
    settle(aspp.double())
    x = pictures(7, 5, channels=6).double()

    def unit(part: nn.Module, y: Tensor, padding: int = 0, dilation: int = 1) -> Tensor:
        conv, norm = part.get_submodule("conv"), part.get_submodule("norm")
        return F.relu(norm(F.conv2d(y, conv.weight, padding=padding, dilation=dilation)))  # type: ignore[arg-type]

    views = [unit(aspp.views[0], x), unit(aspp.views[1], x, 2, 2), unit(aspp.views[2], x, 3, 3)]
    mean = F.adaptive_avg_pool2d(x, 1)
    pooled = F.relu(F.conv2d(mean, aspp.pooled.weight, aspp.pooled.bias))
    views.append(F.interpolate(pooled, size=(7, 5), mode="bilinear", align_corners=False))
    torch.testing.assert_close(aspp(x), unit(aspp.project, torch.cat(views, 1)))


def test_the_decoder_joins_48_channels_and_the_output_is_bilinear() -> None:
    net, x = settle(make().double()), pictures(50, 37).double()
    assert isinstance(net, DeepLab)
    aspp, refine = net.decoder.aspp, net.decoder.refine
    fine, deep = net.encoder(x)
    skip = refine.skip(fine)
    assert skip.shape == (2, 48, 13, 10)
    up = F.interpolate(aspp(deep), size=(13, 10), mode="bilinear", align_corners=False)
    logits = refine.head(refine.fuse2(refine.fuse1(torch.cat([up, skip], 1))))
    expected = F.interpolate(logits, size=(50, 37), mode="bilinear", align_corners=False)
    torch.testing.assert_close(net(x), expected)


def test_separable_convolutions_filter_channels_one_by_one() -> None:
    net = make(separable=True)
    wide = [c for c in convolutions(net.decoder).values() if c.kernel_size == (3, 3)]
    assert len(wide) == 5  # three of ASPP, two of the decoder
    assert all(c.groups == c.in_channels == c.out_channels for c in wide)
    assert count(net.decoder) < count(make().decoder) / 2


def test_group_norm_and_standardised_weights_are_the_decoders_alone() -> None:
    plain, net = make(), make(**GROUPS)
    batch = {p for p, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    group = {p: m for p, m in net.named_modules() if isinstance(m, nn.GroupNorm)}
    both = {p for p, m in plain.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert batch == {path for path in both if path.startswith("encoder.")}
    assert set(group) == {path for path in both if path.startswith("decoder.")}
    assert {norm.num_channels // norm.num_groups for norm in group.values()} == {8}
    standardised = {p for p, m in net.named_modules() if isinstance(m, StandardisedConv2d)}
    assert standardised == {path.replace(".norm", ".conv") for path in group}
    others = {p for p in convolutions(net.decoder) if f"decoder.{p}" not in standardised}
    assert others == {"refine.head", "aspp.pooled"}  # no norm behind them: they keep a scale


def test_weight_standardisation_is_the_formula() -> None:
    layer = StandardisedConv2d(3, 4, 3, padding=1, bias=False).double()
    weight = layer.weight.detach().numpy()
    expected = np.stack([(w - w.mean()) / w.std() for w in weight])
    np.testing.assert_allclose(layer.standardised().detach().numpy(), expected, rtol=1e-6)
    x = pictures(6, 5).double()
    torch.testing.assert_close(layer(x), F.conv2d(x, torch.from_numpy(expected), padding=1))
    before = layer(x)
    with torch.no_grad():  # scale and mean of a channel's weights are of no account
        layer.weight.mul_(torch.rand(4, 1, 1, 1) + 0.5).add_(torch.randn(4, 1, 1, 1))
    torch.testing.assert_close(layer(x), before)
    half = layer.to(torch.bfloat16).standardised().float()
    assert half.var((1, 2, 3), correction=0).sub(1).abs().max() < 0.02


@pytest.mark.parametrize("options", VARIANTS)
def test_every_parameter_gets_a_gradient_even_from_one_picture(options: dict[str, Any]) -> None:
    net = make(**options).train()
    net(pictures(batch=1)).square().sum().backward()
    silent = [key for key, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("options", VARIANTS)
def test_activations_neither_vanish_nor_explode(options: dict[str, Any]) -> None:
    assert 0.05 < float(make(**options).train()(pictures(64, 64, 4)).detach().std()) < 5.0


@pytest.mark.parametrize("options", [{}, GROUPS])
def test_other_precisions_layouts_and_copies(options: dict[str, Any]) -> None:
    net, x = make(**options).eval(), pictures()
    expected = net(x).detach()
    assert torch.equal(copy.deepcopy(net)(x), expected)
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(
        last(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-4, rtol=1e-4
    )
    assert torch.allclose(net.double()(x.double()).float(), expected, atol=1e-4)
    half = net.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected, atol=0.1 * float(expected.abs().max()))


@pytest.mark.parametrize("options", [{}, pytest.param(GROUPS, marks=pytest.mark.slow)])
def test_compiles_whole_and_exports_with_a_free_batch_size(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    net, x = make(**options).eval(), pictures()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), net(x))
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(net, (x,), dynamic_shapes=shapes)
    more = pictures(batch=5)
    assert torch.allclose(program.module()(more), net(more), atol=1e-5)


def test_the_seed_decides_the_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(make(**GROUPS).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_dropout_is_the_decoders_and_only_where_it_drops() -> None:
    assert not [m for m in make().modules() if isinstance(m, nn.Dropout)]
    net = make(dropout=0.3)
    drops = [(p, m.p) for p, m in net.named_modules() if isinstance(m, nn.Dropout)]
    assert drops == [("decoder.drop1", 0.3), ("decoder.refine.drop2", 0.3)]
    assert net.state_dict().keys() == make().state_dict().keys()


def test_the_command_lines_options_reach_the_network() -> None:
    given = "--output-stride 8 --stride-in 1x1 --separable --norm group --standardise --width 4"
    options = Start.of(["--backbone", "deeplab"]).options
    args = f"{given} --channels 16 --dropout 0.1".split()
    options["backbone"] = tyro.cli(type(options["backbone"]), args=args)
    options["method"] = tyro.cli(type(options["method"]), args=["--include", "decoder.*"])
    config = with_options(RunConfig(backbone="deeplab"), options)
    config = RunConfig.from_json(config.to_json())
    net = backbones.build(config.backbone, 5, **config.backbone_options)
    assert str(net) == str(DeepLab(5, 3, 8, "1x1", True, "group", True, 0.1, 16, 4, depth=50))
    model = lpbnn.build(net, "lpbnn", task="segmentation", num_data=9, **config.method_options)
    assert isinstance(model, MemberEnsemble)
    assert model.expand_at == ["decoder.aspp", "decoder.refine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_stride": 32}, "output_stride is 32; expected 8 or 16"),
        ({"stride_in": "2x2"}, "stride_in is '2x2'; expected '3x3' or '1x1'"),
        ({"norm": "layer"}, "norm is 'layer'; expected 'batch' or 'group'"),
        ({"separable": "no"}, "separable is 'no'; expected True or False"),
        ({"standardise": 1}, "standardise is 1; expected True or False"),
        ({"channels": 12}, "channels is 12; expected a multiple of 8"),
        ({"channels": 0}, "channels is 0; expected a multiple of 8"),
        ({"width": 0}, "width is 0; expected an integer >= 1"),
        ({"depth": 50}, "was given option 'depth'; its options are output_stride=16, stride_in="),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
