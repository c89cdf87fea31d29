"""What is true of one network: published sizes, initialisation, the order of its layers."""

import math
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from lpbnn import backbones
from lpbnn.backbones.lenet import LeNet
from lpbnn.backbones.resnet import Bottleneck
from lpbnn.backbones.wideresnet import Block


def count(name: str, *args: int, **options: object) -> int:
    with torch.device("meta"):
        net = backbones.build(name, *args, **options)
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("lenet", 10, 62_006),
        ("resnet18", 10, 11_173_962),
        ("resnet34", 10, 21_282_122),
        ("resnet50", 10, 23_520_842),
        ("wrn-16-4", 10, 2_748_890),
        ("wrn-16-8", 10, 10_961_370),
        ("wrn-40-2", 10, 2_243_546),
        ("wrn-28-10", 10, 36_479_194),
        ("wrn-28-10", 100, 36_536_884),
    ],
)
def test_published_parameter_counts(name: str, classes: int, expected: int) -> None:
    assert count(name, classes) == expected


def test_imagenet_resnets_have_torchvisions_size() -> None:
    assert count("resnet18", 1000, stem="imagenet") == 11_689_512
    assert count("resnet34", 1000, stem="imagenet") == 21_797_672
    assert count("resnet50", 1000, stem="imagenet") == 25_557_032
    assert count("resnet50", 1000, stem="imagenet", stride_in="1x1") == 25_557_032


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2), (22, 3), (28, 10)])
def test_wide_resnet_size_by_formula(depth: int, width: int) -> None:
    """Table 1 of the paper, written as a sum over the blocks."""
    blocks, classes = (depth - 4) // 6, 7
    total, inputs = 3 * 16 * 9, 16
    for outputs in (16 * width, 32 * width, 64 * width):
        for block in range(blocks):
            before = inputs if block == 0 else outputs
            total += 2 * before + 9 * before * outputs + 2 * outputs + 9 * outputs * outputs
            changes = block == 0 and (before != outputs or outputs > 16 * width)
            total += before * outputs if changes else 0
        inputs = outputs
    total += 2 * inputs + (inputs + 1) * classes
    assert count(f"wrn-{depth}-{width}", classes) == total


@pytest.mark.parametrize("name", ["wrn-27-10", "wrn-4-2", "wrn-28-0"])
def test_an_impossible_wide_resnet_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: (depth|width)"):
        backbones.build(name, 10)


def test_wide_resnet_dropout_sits_between_the_two_convolutions() -> None:
    net = backbones.build("wrn-16-2", 10, dropout=0.1)
    blocks = [m for m in net.modules() if isinstance(m, Block)]
    assert sum(isinstance(m, nn.Dropout) for m in net.modules()) == len(blocks) == 6
    order: list[str] = []
    for name, layer in blocks[0].named_children():
        layer.register_forward_hook(lambda *_, name=name: order.append(name))
    blocks[0](torch.randn(2, 16, 8, 8))
    assert order == ["bn1", "conv1", "bn2", "dropout", "conv2", "shortcut"]


def test_wide_resnet_block_is_the_equation() -> None:
    block = Block(8, 8).eval()
    x = torch.randn(2, 8, 5, 5)
    y = F.conv2d(F.relu(block.bn1(x)), block.conv1.weight, padding=1)
    y = F.conv2d(F.relu(block.bn2(y)), block.conv2.weight, padding=1)
    assert torch.allclose(block(x), x + y, atol=1e-6)


@pytest.mark.parametrize("name", ["wrn-16-4", "resnet18"])
def test_convolutions_start_by_fan_out(name: str) -> None:
    for module in backbones.build(name, 10).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5_000:
            expected = math.sqrt(2 / (module.out_channels * math.prod(module.kernel_size)))
            assert float(module.weight.detach().std()) == pytest.approx(expected, rel=0.05)
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
        elif isinstance(module, nn.Linear):
            assert not module.bias.any()


def test_activations_neither_vanish_nor_explode() -> None:
    net = backbones.build("wrn-16-4", 10)
    assert 0.05 < float(net(torch.randn(16, 3, 32, 32)).detach().std()) < 5.0


def test_resnet_stride_switch_moves_only_the_stride() -> None:
    nets = [backbones.build("resnet50", 2, stride_in=where) for where in ("3x3", "1x1")]
    for net, expected in zip(nets, [((1, 1), (2, 2)), ((2, 2), (1, 1))], strict=True):
        block = net.get_submodule("layer2.0")
        assert isinstance(block, Bottleneck)
        assert (block.conv1.stride, block.conv2.stride) == expected
    nets[1].load_state_dict(nets[0].state_dict())


def test_resnet_keys_are_torchvisions() -> None:
    with torch.device("meta"):
        keys = backbones.build("resnet50", 10, stem="imagenet").state_dict().keys()
    expected = ("conv1.weight", "layer1.0.downsample.1.running_var", "layer4.2.conv3.weight")
    assert set(expected) <= keys
    assert len(keys) == 320


@pytest.mark.parametrize("option", [{"stem": "tiny"}, {"stride_in": "2x2"}])
def test_resnet_refuses_other_switches(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected '"):
        backbones.build("resnet18", 10, **option)


def test_lenet_on_mnist_is_lecuns_padding() -> None:
    net, x = LeNet(10, 1).eval(), torch.randn(2, 1, 28, 28)
    assert torch.equal(net(x), net(F.pad(x, (2, 2, 2, 2))))


def test_lenet_enlarges_small_pictures() -> None:
    net, x = LeNet(10, 1).eval(), torch.randn(2, 1, 8, 8)
    assert torch.equal(net(x), net(F.interpolate(x, scale_factor=4, mode="nearest")))


def test_lenet_on_32x32_is_the_textbook_network() -> None:
    net, x = LeNet(10).eval(), torch.randn(2, 3, 32, 32)
    y = F.max_pool2d(F.relu(net.conv1(x)), 2)
    y = F.max_pool2d(F.relu(net.conv2(y)), 2)
    assert y.shape == (2, 16, 5, 5)
    y = F.relu(net.fc2(F.relu(net.fc1(y.flatten(1)))))
    assert torch.equal(net(x), net.head(y))


def test_mlp_says_what_shape_it_takes() -> None:
    net = backbones.build("mlp", 10, 1)
    with pytest.raises(ValueError, match=r"shape \(4, 1, 8, 8\) has 64 numbers .* takes 1\. For"):
        net(torch.zeros(4, 1, 8, 8))


@pytest.mark.parametrize("hidden", [(), (8, 0)])
def test_mlp_refuses_empty_layers(hidden: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected one or more widths"):
        backbones.build("mlp", 1, 4, hidden=hidden)


def test_mlp_regression_learns_a_line() -> None:
    x = torch.randn(256, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
    net = backbones.build("mlp", 1, in_channels=4, hidden=(32, 32))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    assert F.mse_loss(net(x), y).item() < 0.02


def test_small_cnn_learns_the_digits() -> None:
    """1,400 digits, five epochs, a few seconds on one core: at least 98 % of the other 397."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    x = (x - x[train].mean()) / x[train].std()
    assert count("small-cnn", 10, 1) < 100_000
    net = backbones.build("small-cnn", 10, in_channels=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5 * 22)
    for _ in range(5):
        for rows in train[torch.randperm(1400)].split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(x[test]).argmax(1) == y[test]).float().mean().item()
    assert accuracy >= 0.98
