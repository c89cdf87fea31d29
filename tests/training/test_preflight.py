"""A network whose outputs do not fit the task is told before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lpbnn import backbones, data, methods
from lpbnn.data import Dataset, Splits
from lpbnn.training import RunConfig, RunError
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.preflight import check_network
from lpbnn.training.run import run

Make = Callable[..., RunConfig]
NETS: dict[str, backbones.Entry] = {}  # as a file outside the package declares its own
DENSE: dict[str, Any] = {
    "backbone": "deeplab-resnet18",
    "backbone_options": {"width": 4, "channels": 8, "output_stride": 8},
}
TASKS = ("classification", "regression", "segmentation")


class Outputs(nn.Module):
    """One number of each example, as outputs of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.head(x.flatten(1)[:, :1])
        return one.view(-1, *(1,) * len(self.shape)).expand(-1, *self.shape)


@pytest.fixture(scope="module")
def sets(splits: Splits) -> dict[str, Splits]:
    """A little set of pictures for each task."""
    torch.manual_seed(0)
    targets = torch.randn(len(splits.train), 2)
    numbers = Dataset(splits.train.inputs, targets)
    scenes = data.load("street-scenes", train=4, val=2, test=2, size=(32, 48))
    regression = replace(
        splits,
        name="angles",
        task="regression",
        num_classes=None,
        classes=(),
        train=numbers,
        val=numbers.take(slice(20)),
        test=numbers.take(slice(20, 40)),
        ood={},
    )
    return {"classification": splits, "regression": regression, "segmentation": scenes}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_network_for_segmentation_is_refused_elsewhere(
    make: Make, sets: dict[str, Splits], tmp_path: Path, task: str
) -> None:
    outputs = {"classification": 10, "regression": 4}[task]
    what = {"classification": "every class", "regression": "every target"}[task]
    config = make(data=sets[task].name, **DENSE)
    with pytest.raises(RunError) as caught:
        run(config, tmp_path / "run", splits=sets[task])
    said = str(caught.value)
    assert f"outputs of shape (2, {outputs}, 8, 8) for 2 examples of shape (1, 8, 8)" in said
    assert f"{what}, (2, {outputs})." in said
    assert said.endswith(f"Fix: choose a backbone for {task}, such as small-cnn.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "given", "wanted"),
    [
        ("classification", (11,), "(2, 10)"),
        ("classification", (), "(2, 10)"),
        ("regression", (2,), "(2, 4)"),  # the means alone
        ("segmentation", (9, 16, 24), "(2, 9, 32, 48)"),  # half the size
        ("segmentation", (8, 32, 48), "(2, 9, 32, 48)"),
    ],
)
def test_ones_own_network_must_give_what_it_was_asked_for(
    make: Make,
    sets: dict[str, Splits],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    given: tuple[int, ...],
    wanted: str,
) -> None:
    monkeypatch.setitem(NETS, "own", backbones.Entry("", lambda classes, channels: Outputs(given)))
    config = make(backbone=f"{__name__}:own", backbone_options={}, data=sets[task].name)
    with pytest.raises(RunError) as caught:
        run(config, tmp_path / "run", splits=sets[task])
    said = str(caught.value)
    assert f"gives outputs of shape {(2, *given)} for 2 examples" in said
    assert wanted in said
    assert f"let it give the num_classes={DataInfo.of(sets[task]).outputs} outputs" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", methods.names())
def test_what_fits_passes_with_every_method(
    make: Make, sets: dict[str, Splits], method: str, task: str
) -> None:
    """Whatever the members are: the rows of the outputs are those of the task."""
    backbone = DENSE if task == "segmentation" else {}
    config, info = make(method, data=sets[task].name, **backbone), DataInfo.of(sets[task])
    try:
        model = build_model(config, info)
    except ValueError as error:
        assert f"{method} has no task={task!r}" in str(error)  # noqa: PT017
        return
    check_network(model, config, sets[task], info)
    assert model.training  # given back as it was
