"""The setting of a benchmark: a network, the shape of its batches, and how they are run and timed."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from lpbnn.training.config import OptimConfig, Precision, RunConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Mode = Literal["eager", "graph", "compiled"]
PLAIN = "mcp"


@dataclass(frozen=True)
class Setup:
    """A network, the shape of its batches, and how they are run and timed."""

    backbone: str = "resnet18"
    """A network of lpbnn ls, or MODULE:NAME for one of your own (docs/howto/own-data.md)."""
    input: tuple[int, ...] = (3, 32, 32)
    """Shape of one example: channels, height and width; or the length of a vector."""
    classes: int = 10
    batch: int = 128
    test_batch: int | None = None
    """Examples of one prediction; left out: as many as in training."""
    mode: Mode | None = None
    """graph: the training step replayed as a CUDA graph. compiled: by torch.compile, and replayed on a GPU.
    Left out: what lpbnn train does, graph on a GPU and eager on a CPU."""
    predict: bool = True
    """Measure prediction too."""
    samples: int = 1
    """Draws of each member in a prediction; the plain network has one."""
    chunk: int | None = None
    """Rows (draw, member, example) that go through the network at once in a prediction; left out: all."""
    repeats: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | None = None
    """Left out: bf16 on a GPU, 32 on a CPU."""
    memory_budget: float = 1.0
    """compiled: share of the activations that a training step may keep for the backward pass."""
    threads: int = 1
    """On a CPU; more than there are free cores make the times useless."""
    seed: int = 0
    options: Annotated[tuple[str, ...], arg(name="set", metavar="NAME=VALUE")] = ()
    """Options of the methods that have them (latent=64) and of the network (backbone.dropout=0.1)."""

    def __post_init__(self) -> None:
        for name, least in {"repeats": 2, "threads": 1, "samples": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        if self.device == "cuda" and not _has_cuda():
            raise ValueError("device is 'cuda', but torch finds no CUDA device. Fix: device='cpu'.")
        if not self.input or min(*self.input, self.batch) < 1:
            given = f"input is {self.input} and batch {self.batch}"
            raise ValueError(f"{given}; expected a shape such as 3 32 32 and at least one example.")
        from lpbnn import backbones

        backbones.load(self.backbone)  # an unknown name is an error here
        self.config()  # which checks the rest
        if self.mode == "graph" and not self.cuda:
            raise ValueError(
                "mode 'graph' is a CUDA graph and needs a GPU. Fix: eager or compiled."
            )

    @property
    def cuda(self) -> bool:
        return self.device != "cpu" and _has_cuda()

    def config(self) -> RunConfig:
        """Return the settings with which ``lpbnn train`` would run such a step."""
        config = RunConfig(
            method=PLAIN,  # the model is built elsewhere
            optim=OptimConfig(lr=1e-3),  # labels are random: the loss must only stay finite
            precision=self.precision or ("bf16" if self.cuda else "32"),
            compile=self.mode == "compiled",
            memory_budget=self.memory_budget,
            graph=self.mode != "eager",
            channels_last=self.cuda and len(self.input) == 3,
            device="cuda" if self.cuda else "cpu",
            progress=False,
        )
        return with_settings(config, self.options)

    def examples(self, count: int, device: "torch.device") -> "tuple[Tensor, Tensor]":
        """Return random inputs (count, *input) and labels, one per example or pixel."""
        import torch

        from lpbnn import backbones

        x = torch.randn(count, *self.input, device=device)
        if self.config().channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        dense = backbones.load(self.backbone).dense
        shape = (count, *self.input[1:]) if dense else (count,)
        return x, torch.randint(0, self.classes, shape, device=device)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def with_settings(config: RunConfig, settings: tuple[str, ...]) -> RunConfig:
    """Return the config with NAME=VALUE pairs as options of whatever method has them, or of the backbone.

    >>> with_settings(RunConfig(), ("members=8", "backbone.dropout=0.1")).method_options
    {'members': 8}
    """
    import yaml

    chosen: dict[str, dict[str, Any]] = {"": {}, "backbone": {}}
    for setting in settings:
        name, equals, text = setting.partition("=")
        prefix, _, key = name.rpartition(".")
        if not equals or prefix not in chosen or not key:
            raise ValueError(
                f"--set {setting!r}: expected NAME=VALUE, such as latent=64 or backbone.dropout=0.1."
            )
        chosen[prefix][key] = yaml.safe_load(text)  # a number, true, [8, 4]; a word is itself
    return replace(config, method_options=chosen[""], backbone_options=chosen["backbone"])
