"""python -m benchmarks: cases of a plan, written after every one, stopped in time."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks import networks, peers, records, tables
from benchmarks.__main__ import main
from benchmarks.networks import DEEPLAB, METHODS, Budget, Case, Plan, measure
from lpbnn.training import step
from lpbnn.training.bench import ratio

QUICK = ("--backbones", "small-cnn", "--modes", "eager", "--repeats", "2", "--image", "8", "8")
QUICK = (*QUICK, "--batch", "4", "--test-batch", "4", "--device", "cpu")


def quick(*methods: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "backbones": ("small-cnn",),
        "methods": methods or ("lpbnn",),
        "members": (2,),
        "modes": ("eager",),
        "device": "cpu",
        "repeats": 2,
        "image": (8, 8),
        "batch": 4,
        "test_batch": 4,
    }
    return Plan(**(settings | changes))


def names(record: records.Record) -> list[str]:
    return [Case(**row["case"]).name for row in record["rows"]]


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, *methods: str) -> None:
    """Let the models of these methods fail to be built."""
    build = networks.build

    def model(setup: Any, method: str, members: int) -> Any:
        if method in methods:
            raise error
        return build(setup, method, members)

    monkeypatch.setattr(networks, "build", model)


def test_the_plan_puts_the_reference_first_and_keeps_the_order() -> None:
    plan = quick("mcp", "lpbnn", "edl", members=(4, 2), modes=("eager", "compiled"))
    groups = list(plan.groups())
    assert [group[0].method for group in groups] == ["mcp", "mcp"]
    found = [(case.method, case.members) for case in groups[0][1:]]
    assert found == [("lpbnn", 4), ("edl", 1), ("lpbnn", 2)]  # edl has no members


def test_a_filter_leaves_the_reference() -> None:
    plan = quick(*METHODS, members=(1, 4), only=("*/lpbnn/4", "*/eager/rank1/1"))
    (group,) = plan.groups()
    assert [case.name.split("/", 2)[2] for case in group] == ["mcp/1", "rank1/1", "lpbnn/4"]
    assert not list(quick(only=("*/nothing/*",)).groups())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 1}, "repeats is 1; expected at least 2"),
        ({"seconds": 0.0}, "expected a number above 0"),
        ({"image": (8,)}, "expected height and width"),
        ({"members": (0,)}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"memory_budget": 1.5}, "memory_budget is 1.5; expected a share from 0 to 1"),
        ({"memory_budget": 0.9}, "memory_budget is 0.9, .*'eager'.* add --modes compiled"),
        ({"backbones": ("wrn-28-11-1",)}, "unknown backbone"),
        ({"methods": ("lpbn",)}, "Did you mean 'lpbnn'"),
    ],
)
def test_a_wrong_plan_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**changes)


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        measure(quick(modes=("graph",)))


def test_a_record_has_all_rows_and_how_they_were_made(tmp_path: Path) -> None:
    record = measure(quick(*METHODS, "tradi", options=("latent=8",)))
    assert names(record)[0] == "small-cnn/eager/mcp/1"
    assert len(record["rows"]) == 7
    assert not record["failed"]
    for row in record["rows"]:
        assert ratio(row, "train") is not None
        assert ratio(row, "predict") is not None
        weights = 4 * row["size"]["parameters"]
        assert row["size"]["train_bytes"] > 2 * weights  # and gradients
        assert row["size"]["predict_bytes"] > weights
    path = tmp_path / "folder" / "bench.json"
    records.write(record, path)
    kept = records.read(path)
    assert kept["rows"] == record["rows"]
    assert kept["settings"]["seed"] == 0
    assert {"command", "commit", "device", "versions"} <= set(kept["environment"])
    assert "1 threads" in kept["environment"]["device"]


def test_what_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("out of memory\nand pages more"), "lpbnn")
    record = measure(quick("lpbnn", "batchensemble"))
    assert record["failed"] == {"small-cnn/eager/lpbnn/2": "RuntimeError: out of memory"}
    assert names(record) == ["small-cnn/eager/mcp/1", "small-cnn/eager/batchensemble/2"]


def test_without_the_plain_network_a_case_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("nothing works"), "mcp")
    record = measure(quick("lpbnn"))
    assert list(record["failed"]) == ["small-cnn/eager/mcp/1", "small-cnn/eager/lpbnn/2"]
    assert not record["rows"]


def test_the_budget_judges_by_what_the_mode_took_before() -> None:
    ticks: Iterator[float] = iter([0.0, 10.0, 30.0, 70.0, 85.0])
    budget = Budget(100.0, clock=lambda: next(ticks))
    first, other = Case("a", "compiled", "lpbnn", 4), Case("a", "eager", "lpbnn", 4)
    assert budget.allows(first)  # at 10
    budget.spent(first, 20.0)
    assert budget.allows(first)  # 30 + 20
    assert budget.allows(other)  # 70: nothing is known of its mode
    assert not budget.allows(first)  # 85 + 20
    assert Budget(None).allows(first)


def test_the_budget_leaves_room_for_the_compiler() -> None:
    """Plain, eager, then compiled: the first compiled network takes a minute, whatever eager took."""
    plain, compiled = Case("a", "eager", "mcp", 1), Case("a", "compiled", "mcp", 1)
    ticks: Iterator[float] = iter([0.0, 0.0, 39.0, 41.0, 41.0])
    budget = Budget(100.0, clock=lambda: next(ticks))
    assert budget.allows(compiled)  # nothing was measured yet: something should be
    budget.spent(plain, 5.0)
    assert budget.allows(compiled)  # 39 + 60
    assert not budget.allows(compiled)  # 41 + 60
    budget.spent(compiled, 59.5)
    assert not budget.allows(Case("a", "compiled", "lpbnn", 4))  # as long as the plain one, for now


def test_no_time_no_rows_but_a_record() -> None:
    seen: list[records.Record] = []
    record = measure(quick("lpbnn", seconds=1e-9), lambda record, _: seen.append(record))
    assert record["skipped"] == ["small-cnn/eager/mcp/1", "small-cnn/eager/lpbnn/2"]
    assert len(seen) == 2


def test_a_killed_command_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, KeyboardInterrupt(), "rank1")
    path, choice = tmp_path / "bench.json", ("--members", "2", "--methods", "lpbnn", "rank1")
    with pytest.raises(KeyboardInterrupt):
        main([*QUICK, *choice, "--json", str(path)])
    assert names(records.read(path)) == ["small-cnn/eager/mcp/1", "small-cnn/eager/lpbnn/2"]


def test_the_command_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "bench.json", tmp_path / "cost.svg"
    choice = ("--members", "2", "1", "--methods", "lpbnn", "--set", "latent=8")
    main([*QUICK, *choice, "--json", str(path)])
    out = capsys.readouterr().out
    assert "LP-BNN" in out
    assert "each in turn with the plain network" in out
    assert records.read(path)["settings"]["options"] == ["latent=8"]
    main(["show", str(path), "--plot", str(picture)])
    assert "LP-BNN" in capsys.readouterr().out
    drawn = picture.read_text()
    assert "peak memory of training" in drawn
    assert "LP-BNN" in drawn
    assert "_child" not in drawn


def test_a_memory_budget_is_for_every_compiled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets: list[float] = []

    def compiled(function: Any, memory_budget: float, *_: Any) -> Any:
        budgets.append(memory_budget)
        return function

    monkeypatch.setattr(step, "compiled", compiled)
    path, choice = tmp_path / "bench.json", ("--members", "2", "--methods", "lpbnn", "--no-predict")
    modes = ("--modes", "eager", "compiled", "--memory-budget", "0.95")
    main([*QUICK, *choice, *modes, "--json", str(path)])
    assert budgets == [0.95, 0.95]  # the plain network and the method; not those that are eager
    record = records.read(path)
    assert len(record["rows"]) == 4
    assert record["settings"]["memory_budget"] == 0.95
    assert "compiled with a memory budget of 0.95" in capsys.readouterr().out


def test_a_strange_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(SystemExit, match="is not a record of"):
        main(["show", str(tmp_path / "x.json")])


def test_the_papers_runtime_table(capsys: pytest.CaptureFixture[str]) -> None:
    choice = ("--methods", "lpbnn", "tradi", "--modes", "eager", "--repeats", "2")
    main(["deeplab", *choice, "--device", "cpu", "--image", "32", "48"])
    out = capsys.readouterr().out
    assert "Table 3" in out
    assert "2.71" in out  # LP-BNN's test time in the paper
    assert set(tables.TABLE_3) == {"mcp", *DEEPLAB.methods}


def test_many_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "draws.json"
    choice = ("--backbone", "small-cnn", "--samples", "4", "--images", "2", "--device", "cpu")
    main(["draws", *choice, "--chunks", "2", "16", "--repeats", "2", "--json", str(path)])
    assert "of plain" in capsys.readouterr().out
    plain, small, large = json.loads(path.read_text())["rows"]
    assert (plain["networks"], small["networks"]) == (1, 16)
    assert plain["relative"] == 1
    assert small["peak_bytes"] < large["peak_bytes"]
    assert all(math.isfinite(row["rows_per_second"]) for row in (plain, small, large))


def test_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    main(["layers", "--repeats", "2", "--size", "4", "--json", str(path)])
    assert "LP-BNN" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["plain", "BatchEnsemble", "LP-BNN"]
    assert rows[0]["ratio"] == 1


def test_without_a_name_it_measures_networks() -> None:
    with pytest.raises(SystemExit, match="repeats is 1"):
        main(["--repeats", "1"])


def test_the_records_of_the_repository_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path(__file__).parents[2] / "results" / "bench" / "wrn-28-10-members-h200.json"
    if not kept.exists():
        pytest.skip("results/ is not part of the source distribution")
    main(["show", str(kept)])
    assert "NVIDIA H200" in capsys.readouterr().out


class _Conv(nn.Module):
    """As the peer's layers are called, with what they leave behind."""

    def __init__(
        self, i: int, o: int, num_estimators: int, kernel_size: Any, **geometry: Any
    ) -> None:
        super().__init__()
        self.estimators = num_estimators
        self.conv = nn.Conv2d(i, o, kernel_size, **geometry)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.log_variational_posterior = self.conv.weight.square().sum()
        return self.conv(x)


class _Linear(nn.Linear):
    def __init__(self, i: int, o: int, num_estimators: int, bias: bool = True) -> None:
        super().__init__(i, o, bias)


def test_a_peer_has_rows_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch_uncertainty" not in sys.modules
    package, layers, bayesian = "torch_uncertainty", "layers", "bayesian"
    for name in (package, f"{package}.{layers}", f"{package}.{layers}.{bayesian}"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for path, conv, linear in peers._MODULES.values():
        module = ModuleType(path)
        setattr(module, conv, _Conv)
        setattr(module, linear, _Linear)
        monkeypatch.setitem(sys.modules, path, module)
    assert peers.available() == list(peers.NAMES)
    record = measure(quick("lpbnn"))
    assert not record["failed"]
    assert {row["case"]["method"] for row in record["rows"]} == {"mcp", "lpbnn", *peers.NAMES}


def test_a_peer_that_is_not_there_is_told() -> None:
    if peers.available():
        pytest.skip("torch_uncertainty is installed")
    with pytest.raises(ValueError, match="pip install torch-uncertainty"):
        networks.build(networks.setup_of("small-cnn"), peers.LPBNN, 2)
