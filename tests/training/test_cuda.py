"""On a GPU: every precision trains, resumes and measures, and no step waits for the device."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lpbnn
from lpbnn import data, methods
from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.cuda_graph import WARM_UP
from lpbnn.training.loop import fit
from lpbnn.training.run import load_run, run
from lpbnn.training.rundir import RunDir
from lpbnn.training.step import Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
Make = Callable[..., RunConfig]


@pytest.fixture
def on_gpu(make: Make) -> Make:
    def on_gpu(method: str = "lpbnn", **changes: Any) -> RunConfig:
        crops = AugmentConfig(pad=1, flip=True, cutout=2)
        small = {"backbone": "small-cnn", "backbone_options": {}, "augment": crops}
        return make(method, **(small | {"device": "cuda"} | changes))

    return on_gpu


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_every_precision(
    on_gpu: Make, splits: Splits, tmp_path: Path, precision: str, clip: float | None
) -> None:
    optim = OptimConfig(lr=0.05, clip=clip)  # a plain network: its loss falls on so little data
    corrupted = EvalConfig(corruptions=True, severities=(3,), examples=1)
    config = on_gpu(
        "mcp", precision=precision, optim=optim, channels_last=True, epochs=4, evaluate=corrupted
    )
    results = run(config, tmp_path, splits=splits)
    losses = [row["loss"] for row in RunDir(tmp_path).log()]
    assert losses[-1] < losses[0]
    assert results["cost"]["memory"] == "CUDA memory allocated"
    assert 0 < results["train"]["peak_bytes"] < 2**30
    assert all(math.isfinite(value) for value in results["test"].values())
    assert all(not p.is_cuda for p in load_run(tmp_path).model.parameters())


def goes_on_as_if_never_stopped(config: RunConfig, splits: Splits, folder: Path) -> None:
    """The run stopped in ``a`` ends with the weights of one that was not."""
    run(None, folder / "a", resume=True, splits=splits)
    run(config, folder / "b", splits=splits)
    through = RunDir(folder / "b").state_dict()
    for name, tensor in RunDir(folder / "a").state_dict().items():
        torch.testing.assert_close(tensor, through[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("precision", ["32", "fp16"])
def test_a_stopped_run_goes_on(
    on_gpu: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    gentle = OptimConfig(lr=1e-3)  # the GPU rounds differently each time: it must not be blown up
    config, steps = on_gpu(precision=precision, epochs=3, optim=gentle, graph=False), 0

    def stop(self: UncertainModel, lr: float) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UncertainModel, "after_step", stop)
        with pytest.raises(KeyboardInterrupt, match="Resume with"):
            run(config, tmp_path / "a", splits=splits)
    goes_on_as_if_never_stopped(config, splits, tmp_path)


@pytest.mark.parametrize("method", ["mcp", "lpbnn", "batchensemble", "rank1", "ensemble", "tradi"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device(
    on_gpu: Make,
    splits: Splits,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    clip: float | None,
    graph: bool,
) -> None:
    """Once steps are recorded, from one step of an epoch until its losses are read a wait is an error."""
    read, step, begin = Step.means, Step.__call__, Step.begin
    seen = 0

    def beginning(self: Step) -> Any:
        nonlocal seen
        seen = 0
        return begin(self)

    def watch(self: Step, *args: Any) -> None:
        nonlocal seen
        step(self, *args)
        seen += 1
        if seen > WARM_UP:  # by now this epoch's recording is made
            torch.cuda.set_sync_debug_mode("error")

    def reading(self: Step) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return read(self)

    monkeypatch.setattr(Step, "begin", beginning)
    monkeypatch.setattr(Step, "__call__", watch)
    monkeypatch.setattr(Step, "means", reading)
    config = on_gpu(method, batch_size=16, optim=OptimConfig(lr=0.05, clip=clip), graph=graph)
    try:
        assert fit(build_model(config, DataInfo.of(splits)), splits, config).epochs == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")
def test_compiled_sums_by_rows_are_the_uncompiled_ones() -> None:
    """Losses, gradients and statistics of a network whose batch norms a compiler sums by rows."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )
    own = lpbnn.build(net, "batchensemble", members=2).to("cuda").double()
    other = copy.deepcopy(own)
    x = torch.randn(8, 3, 8, 8, device="cuda", dtype=torch.float64)
    y = torch.randint(3, (8,), device="cuda")
    compiled = torch.compile(other.loss)
    for _ in range(2):
        own.loss(x, y)["loss"].backward()
        compiled(x, y)["loss"].backward()
    for (name, mine), theirs in zip(other.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(buffer, own.get_buffer(name), msg=name)


def test_compiled_for_the_gpu(on_gpu: Make, splits: Splits) -> None:
    optim = OptimConfig(lr=0.02)  # at the default rate so little data hardly moves the loss
    config = on_gpu("rank1", compile=True, precision="bf16", epochs=4, optim=optim)
    training = fit(build_model(config, DataInfo.of(splits)), splits, config)
    assert training.epochs == 4
    assert training.rows[-1]["nll"] < training.rows[0]["nll"]


@pytest.mark.parametrize("network", [{}, {"norm": "group", "standardise": True}])
@pytest.mark.parametrize("method", ["mcp", "lpbnn", "batchensemble", "ensemble", "tradi", "mimo"])
def test_street_scenes_are_learned_from_replayed_steps(
    on_gpu: Make, tmp_path: Path, method: str, network: dict[str, Any]
) -> None:
    """As table 2 trains: the decoder converted, a slower encoder, bf16, channels last."""
    streets = data.load("street-scenes", train=32, val=1, test=4, size=(64, 96))
    config = on_gpu(
        method,
        backbone="deeplab-resnet18",
        backbone_options={"width": 8, "channels": 16, **network},
        method_options={"include": "decoder.*"} if method in ("lpbnn", "batchensemble") else {},
        data="street-scenes",
        batch_size=4,
        drop_last=True,
        epochs=4,
        optim=OptimConfig(lr=0.05, parts={"encoder.*": 0.1}),
        augment=AugmentConfig(cutout=8, scale=(0.75, 2.0), colour=0.25),
        precision="bf16",
        channels_last=True,
    )
    results = run(config, tmp_path, splits=streets)
    losses = [row["nll"] for row in RunDir(tmp_path).log()]
    assert losses[-1] < losses[0]
    assert {"miou", "ece"} <= set(results["test"])
    assert {"auroc", "aupr", "fpr95"} == set(results["ood"]["pixels"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("method", methods.names())
def test_replayed_steps_train_as_ordinary_ones(
    on_gpu: Make, splits: Splits, method: str, optimizer: str
) -> None:
    """Same order, same noise, same rates: the logs of three epochs agree, KL annealing included.

    DUQ's penalty squares gradients by the inputs: rounding alone moved it by 3 % between two replayed runs.
    """
    optim = OptimConfig(optimizer, lr=1e-3 if optimizer == "adamw" else 0.01, clip=1.0)
    schedule = ScheduleConfig("cosine", warmup=1)
    logs = []
    for graph in (True, False):
        config = on_gpu(
            method, graph=graph, optim=optim, schedule=schedule, epochs=3, batch_size=32
        )
        torch.manual_seed(0)
        model = build_model(config, DataInfo.of(splits))
        logs.append(fit(model, splits, config).rows)
    for replayed, ordinary in zip(*logs, strict=True):
        for name in set(ordinary) - {"seconds", "images_per_second"}:
            if not name.startswith("val_"):  # of fifty images: one that tips over is two per cent
                rel = 0.1 if name == "gradient_penalty" else 0.02
                assert replayed[name] == pytest.approx(ordinary[name], rel=rel, abs=2e-3), name


def test_a_replayed_run_is_stopped_and_goes_on(
    on_gpu: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpu("lpbnn", epochs=4, optim=OptimConfig(lr=1e-3))
    step, seen = Step.__call__, 0

    def stop(self: Step, *args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 9:
            raise KeyboardInterrupt
        step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", stop)
        with pytest.raises(KeyboardInterrupt, match="Resume with"):
            run(config, tmp_path / "a", splits=splits)
    goes_on_as_if_never_stopped(config, splits, tmp_path)
