"""Weights from files: every tensor is accounted for, and no file can do more than be read."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lpbnn import backbones
from lpbnn.backbones.deeplab import DeepLab, Encoder
from lpbnn.backbones.pretrained import load_weights

State = dict[str, Tensor]
SHAPE: dict[str, Any] = {"depth": 18, "width": 4}


def encoder(**options: Any) -> Encoder:
    net = Encoder(**{**SHAPE, **options})
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)  # type: ignore[arg-type]
    return net


def weights(net: nn.Module) -> State:
    """As torchvision publishes them: with a last layer, and in older files without counters."""
    state = {k: v.clone() for k, v in net.state_dict().items() if "num_batches" not in k}
    return state | {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}


def same(one: nn.Module, state: State) -> bool:
    own = one.state_dict()
    return all(torch.equal(own[k], state[k]) for k in own if k in state)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "old torch", "nested", "any name"])
def test_both_formats_are_told_apart_by_their_content(kind: str, tmp_path: Path) -> None:
    state, path = weights(encoder()), tmp_path / "weights.bin"
    if kind in ("safetensors", "any name"):
        path = tmp_path / ("weights.pth" if kind == "any name" else "weights.safetensors")
        save_file(state, path)
    else:
        content = {"state_dict": state, "epoch": 3} if kind == "nested" else state
        torch.save(content, path, _use_new_zipfile_serialization=kind != "old torch")
    net = encoder()
    report = load_weights(net, path)
    assert same(net, state)
    assert report.complete
    assert set(report.left_over) == {"fc.weight", "fc.bias"}
    assert set(report.matched) == {key for key in state if not key.startswith("fc.")}


@pytest.mark.parametrize("prefix", ["module.", "backbone.", "model.encoder.", "layer1."])
def test_a_common_prefix_is_found(prefix: str, tmp_path: Path) -> None:
    state, net = weights(encoder()), encoder()
    others = {"decoder.head.weight": torch.zeros(3)}
    save_file({prefix + key: value for key, value in state.items()} | others, tmp_path / "w")
    report = load_weights(net, tmp_path / "w")
    assert same(net, state)
    assert report.complete
    assert set(report.left_over) == {f"{prefix}fc.weight", f"{prefix}fc.bias", *others}


def test_half_precision_becomes_the_networks_own(tmp_path: Path) -> None:
    state = {key: value.half() for key, value in weights(encoder()).items()}
    save_file(state, tmp_path / "w")
    net = encoder()
    load_weights(net, tmp_path / "w")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert torch.equal(net.conv1.weight, state["conv1.weight"].float())


def test_the_report_reads_well(tmp_path: Path) -> None:
    save_file(weights(encoder()), tmp_path / "resnet.safetensors", {"source": "a test"})
    assert str(load_weights(encoder(), tmp_path / "resnet.safetensors")) == (
        "resnet.safetensors: all 100 tensors matched\n"
        "  left over in the file, so not used (2): fc.bias, fc.weight\n"
        "  source: a test"
    )


def test_what_did_not_match_is_a_warning_with_the_report(tmp_path: Path) -> None:
    state = weights(encoder())
    gone = [key for key in state if key.startswith("layer4.1.")]
    save_file({key: value for key, value in state.items() if key not in gone}, tmp_path / "w")
    net = encoder(in_channels=1)
    first, last = net.conv1.weight.detach().clone(), net.state_dict()["layer4.1.conv1.weight"]
    kept = last.clone()
    with pytest.warns(UserWarning, match="of another shape") as caught:
        report = load_weights(net, tmp_path / "w")
    assert str(report) == str(caught[0].message)
    assert report.missing == tuple(gone)
    assert report.mismatched == {"conv1.weight": ((4, 3, 7, 7), (4, 1, 7, 7))}
    assert not report.complete
    assert f"w: {100 - 1 - len(gone)} of 100 tensors matched" in str(report)
    assert "conv1.weight is (4, 3, 7, 7) in the file and (4, 1, 7, 7) here" in str(report)
    assert "and 2 more" in str(report)  # ten are missing, eight are named
    assert torch.equal(net.conv1.weight, first)
    assert torch.equal(last, kept)
    assert torch.equal(net.bn1.running_mean, state["bn1.running_mean"])  # type: ignore[arg-type]


def test_a_file_of_which_nothing_matches_is_refused(tmp_path: Path) -> None:
    save_file({"blocks.0.weight": torch.zeros(3)}, tmp_path / "vit")
    with pytest.raises(ValueError, match="vit: none of its 1 tensors matches Encoder. It holds bl"):
        load_weights(encoder(), tmp_path / "vit")


def test_weights_that_are_not_finite_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    state, net = weights(encoder()), encoder()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state["layer4.1.bn2.bias"][0] = float("nan")
    save_file(state, tmp_path / "w")
    with pytest.raises(ValueError, match="layer4.1.bn2.bias holds NaN or infinity"):
        load_weights(net, tmp_path / "w")
    assert same(net, before)


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


@pytest.mark.parametrize("content", ["bomb", "cut", "empty", "list", "text", "cut safetensors"])
def test_a_file_that_is_no_weights_is_refused_and_nothing_runs(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.pth"
    if content == "bomb":
        path.write_bytes(pickle.dumps({"conv1.weight": Bomb()}, protocol=2))
    elif content == "list":
        torch.save([torch.zeros(3)], path)
    elif content == "cut safetensors":
        save_file(weights(encoder()), path)
        path.write_bytes(path.read_bytes()[:2000])
    else:
        torch.save(weights(encoder()), path)
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:2000], "empty": b"", "text": b"404: not found"}[content])
    with pytest.raises(
        ValueError, match=r"weights.pth (cannot be read|holds a list).*\. Fix: give"
    ):
        load_weights(encoder(), path)
    assert "it ran" not in capsys.readouterr().out


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file of weights at .*nowhere. Fix: give"):
        load_weights(encoder(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="pretrained is True; expected the path of a file"):
        backbones.build("deeplab-resnet18", 5, width=4, channels=16, pretrained=True)


@pytest.mark.parametrize("about", [{}, {"arch": "ResNet-50 v1 (stride 2 in the first 1x1 conv)"}])
def test_the_option_alone_decides_where_the_stride_is(
    about: dict[str, str], tmp_path: Path
) -> None:
    save_file(weights(encoder(depth=50)), tmp_path / "w", about)

    def strides(**options: Any) -> list[tuple[int, ...]]:
        options = {"width": 4, "channels": 8, "pretrained": str(tmp_path / "w"), **options}
        net = backbones.build("deeplab-resnet50", 5, **options)
        assert isinstance(net, DeepLab)
        assert net.loaded is not None
        assert net.loaded.about == about  # shown in the report, not interpreted
        block = net.encoder.layer2[0]
        return [block.conv1.stride, block.conv2.stride]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strides() == strides(stride_in="3x3") == [(1, 1), (2, 2)]
        assert strides(stride_in="1x1") == [(2, 2), (1, 1)]


def test_deeplab_takes_a_file_for_its_encoder(tmp_path: Path) -> None:
    state = weights(encoder())
    save_file(state, tmp_path / "w")
    small: dict[str, Any] = {"width": 4, "channels": 16}
    torch.manual_seed(1)
    net = backbones.build("deeplab-resnet18", 5, pretrained=str(tmp_path / "w"), **small)
    torch.manual_seed(1)
    plain = backbones.build("deeplab-resnet18", 5, **small)
    assert isinstance(net, DeepLab)
    assert isinstance(plain, DeepLab)
    assert net.loaded is not None
    assert net.loaded.complete
    assert plain.loaded is None
    assert same(net.encoder, state)
    assert same(net.decoder, plain.decoder.state_dict())  # a file changes nothing else
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resnet = backbones.build("resnet18", 5, stem="imagenet")
        save_file({k: v for k, v in resnet.state_dict().items() if "head" not in k}, tmp_path / "r")
        backbones.build("deeplab-resnet18", 5, channels=16, pretrained=str(tmp_path / "r"))
