"""lpbnn bench: methods in turn with the plain network, in one table of 80 columns."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from lpbnn import bench
from lpbnn.bench import Network, interleaved, measure
from lpbnn.cli import main

SMALL = ("--input", "3", "8", "8", "--batch", "4", "--repeats", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def _one_call_per_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEAT_SECONDS", 1e-9)


def test_every_repeat_times_everything_in_turn() -> None:
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = interleaved(works, repeats=4)
    assert [name for name, _ in groupby(calls)] == list("abc") * (1 + 4)
    assert all(len(found) == 4 for found in times.values())


def test_an_ensemble_has_the_parameters_of_its_networks() -> None:
    network = Network("small-cnn", (3, 8, 8), 10, 4, torch.device("cpu"))
    own, plain = measure(network, "ensemble", members=3, repeats=2)
    assert own.parameters == 3 * plain.parameters
    assert min(own.train, own.predict, plain.train, plain.predict) > 0


@pytest.mark.parametrize("method", ["duq", "tradi", "mimo", "abnn"])
def test_methods_with_hooks_are_measured(method: str) -> None:
    network = Network("small-cnn", (3, 8, 8), 10, 8, torch.device("cpu"))
    own, _ = measure(network, method, members=2, repeats=1)
    assert own.train > 0


def test_a_network_for_segmentation_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--input", "3", "32", "32", *SMALL[4:])
    main(["bench", "--backbone", "deeplab-resnet18", "--methods", "mcdropout", *small])
    assert "not measured" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--backbone", "small-cnn", *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    for method in ("mcp", "lpbnn", "batchensemble", "rank1", "mcdropout", "ensemble"):
        assert sum(line.split()[:1] == [method] for line in lines) == 1
    assert "not measured" not in "".join(lines)


def test_a_network_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench_nets.py").write_text(
        "from torch import nn\nfrom lpbnn.backbones import Entry\n"
        "NETS = {'two': Entry('two layers', lambda classes, inputs: nn.Sequential(\n"
        "    nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes)))}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    vectors = ("--input", "5", *SMALL[4:])
    main(["bench", "--backbone", "bench_nets:two", "--methods", "lpbnn", *vectors])
    assert "lpbnn" in capsys.readouterr().out


def test_a_method_that_fails_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Network.model

    def model(self: Network, method: str, members: int) -> Any:
        if method == "lpbnn":
            raise RuntimeError("out of memory\nand pages more")
        return build(self, method, members)

    monkeypatch.setattr(Network, "model", model)
    main(["bench", "--backbone", "small-cnn", "--methods", "lpbnn", "batchensemble", *SMALL])
    out = capsys.readouterr().out
    assert "not measured: lpbnn: RuntimeError: out of memory\n" in out
    assert "batchensemble" in out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--classes", "0"), "expected at least 1"),
        (("--backbone", "nope"), "unknown backbone 'nope'"),
        (("--methods", "lpbn"), "did you mean 'lpbnn'"),
    ],
)
def test_wrong_settings_are_errors(
    wrong: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *SMALL, *wrong])
    assert message.lower() in " ".join(capsys.readouterr().err.split()).lower()
