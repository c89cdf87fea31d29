"""LP-BNN and BatchEnsemble of this library beside the layers of torch-uncertainty, in one network.

    python -m benchmarks.peers run results/peers.json
    python -m benchmarks.peers show results/peers.json  # the table of docs/results/cost.md

Every way trains on the same rows, split among four members, and predicts the mean probabilities of four
members. Steps are timed in turn; a GPU runs them in bf16, channels last. The files of torch-uncertainty's
layers are loaded alone, because the package itself imports torchvision: it needs torch-uncertainty and einops.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpbnn
from benchmarks.archive import read_json, write_json
from benchmarks.rows import command, markdown, record
from lpbnn import backbones
from lpbnn.bench import interleaved
from lpbnn.convert.convert import replace_modules

BACKBONE, MEMBERS, BATCH, REPEATS = "wrn-16-4", 4, 32, 9
PLAIN = "plain network"
METHODS = {"lpbnn": "LP-BNN", "batchensemble": "BatchEnsemble"}
PACKAGE = "torch-uncertainty"


def layers_file(name: str) -> ModuleType:
    """Return a file of torch-uncertainty's layers, without the package around it."""
    package = importlib.util.find_spec("torch_uncertainty")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed. Fix: pip install {PACKAGE} einops")
    path = Path(package.submodule_search_locations[0]) / "layers" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_their_layers(net: nn.Module, method: str) -> nn.Module:
    """Replace the linear layers and convolutions of a network by torch-uncertainty's of a method."""
    if method == "lpbnn":
        file = layers_file("bayesian/lpbnn.py")
        linear, convolution = file.LPBNNLinear, file.LPBNNConv2d
    else:
        file = layers_file("batch_ensemble.py")
        linear, convolution = file.BatchLinear, file.BatchConv2d
    found: dict[int, nn.Module] = {}
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            found[id(layer)] = linear(layer.in_features, layer.out_features, MEMBERS)
        elif isinstance(layer, nn.Conv2d):
            found[id(layer)] = convolution(
                layer.in_channels,
                layer.out_channels,
                kernel_size=layer.kernel_size,
                num_estimators=MEMBERS,
                stride=layer.stride,
                padding=layer.padding,
                bias=layer.bias is not None,
            )
    replace_modules(net, found)
    return net


def their_loss(net: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Tensor:
    """Return the cross-entropy and the penalties that LP-BNN's layers leave after a pass."""
    loss = F.cross_entropy(net(x), y)
    kept = (getattr(layer, "log_variational_posterior", None) for layer in net.modules())
    return loss + sum(penalty for penalty in kept if penalty is not None) / num_data


def make(way: str, method: str, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    """Return a network and its loss."""
    torch.manual_seed(0)
    net = backbones.build(BACKBONE, 10)
    if way == PACKAGE:
        net = with_their_layers(net, method)
        loss = their_loss
    else:
        options: dict[str, Any] = (
            {"members": MEMBERS, "num_data": 50_000} if method != "mcp" else {}
        )
        net = lpbnn.build(net, method, check=False, **options)

        def loss(net: Any, x: Tensor, y: Tensor, num_data: int) -> Tensor:
            return net.loss(x, y)["loss"]  # divided by the model's own num_data

    return net.to(device).to(memory_format=torch.channels_last), loss  # type: ignore[call-overload]


def works(way: str, method: str, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a training step and a prediction, to be timed."""
    net, loss = make(way, method, device)
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), 1e-3, 0.9)
    x = torch.randn(BATCH, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (BATCH,), device=device)
    cuda = device.type == "cuda"

    def step() -> None:
        net.train()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            value = loss(net, x, y, 50_000)
        value.backward()
        optimizer.step()

    def predict() -> Tensor:
        net.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            if way == PACKAGE:
                outputs = net(x.repeat(MEMBERS, 1, 1, 1)).float().softmax(1)
                return outputs.unflatten(0, (MEMBERS, -1)).mean(0)
            return lpbnn.predict(net, x, keep_members=False).probs

    return {"train": step, "predict": predict}


def run(path: Path) -> None:
    """Measure, and write the record."""
    start, device = (
        time.perf_counter(),
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    found = record(device, [PACKAGE], backbone=BACKBONE, members=MEMBERS, batch=BATCH, seed=0)
    found |= {"repeats": REPEATS, "threads": torch.get_num_threads()}
    ways = {PLAIN: works("lpbnn", "mcp", device)}
    for method, name in METHODS.items():
        ways |= {f"{name}, {way}": works(way, method, device) for way in ("lpbnn", PACKAGE)}
    for part in ("train", "predict"):
        found[part] = interleaved({name: both[part] for name, both in ways.items()}, REPEATS)
    found["seconds"] = time.perf_counter() - start
    write_json(path, found)


def show(path: Path) -> str:
    """Return the table of a record as Markdown."""
    times = read_json(path)
    lines = []
    for name in times["train"]:
        ratios = (
            median(times[part][name]) / median(times[part][PLAIN]) for part in ("train", "predict")
        )
        lines.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown(("network", "training step", "prediction, 4 members"), lines)


if __name__ == "__main__":
    command("benchmarks.peers", __doc__, run, show)
