"""python -m benchmarks: records that are whole after every case, tables and figures of them."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import networks, tables
from benchmarks.__main__ import main
from benchmarks.networks import Record, measure
from lpbnn.bench import Bench, Row, Setup, ratio

SMALL = ("--device", "cpu", "--mode", "eager", "--repeats", "2", "--batch", "4")
QUICK = ("networks", "--backbone", "small-cnn", "--input", "3", "8", "8", *SMALL)


def quick(*methods: str, **changes: Any) -> Record:
    shape: dict[str, Any] = {"input": (3, 8, 8), "batch": 4, "repeats": 2}
    setup = Setup("small-cnn", **(shape | {"device": "cpu", "mode": "eager"} | changes))
    return measure(setup, methods, (2,))


def cases(record: Record) -> list[tuple[str, int]]:
    return [(row["case"]["method"], row["case"]["members"]) for row in record["rows"]]


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """Measure nothing, and raise the error of a method that is given one."""
    errors: dict[str, BaseException] = {}

    def measure(self: Bench, method: str, members: int = 1) -> Row:
        if method in errors:
            raise errors[method]
        case = {"mode": "eager", "backbone": self.setup.backbone}
        size = {"parameters": 1e6 * members, "train_bytes": 2**20, "predict_bytes": 2**20}
        times = {"own": {"times": [members]}, "reference": {"times": [1.0]}}
        row = {"train": times, "predict": times if self.setup.predict else None}
        case |= {"method": method, "members": members}
        return {"case": case, "size": size, "reference": size} | row

    monkeypatch.setattr(Bench, "measure", measure)
    return errors


@pytest.mark.usefixtures("stubbed")
def test_the_plain_network_is_first_and_methods_without_members_have_one_row() -> None:
    setup = Setup("small-cnn", (3, 8, 8), batch=4, repeats=2, device="cpu", predict=False)
    record = measure(setup, ("mcp", "lpbnn", "edl"), (4, 2))
    assert cases(record) == [("mcp", 1), ("lpbnn", 4), ("edl", 1), ("lpbnn", 2)]


def test_a_record_has_all_rows_and_how_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "bench.json"
    setup = Setup("small-cnn", (3, 8, 8), batch=4, repeats=2, device="cpu", options=("latent=8",))
    record = measure(setup, ("lpbnn", "tradi"), (2,), path)
    assert len(record["rows"]) == 3
    assert not record["failed"]
    for row in record["rows"]:
        assert ratio(row, "train") is not None
        assert ratio(row, "predict") is not None
        weights = 4 * row["size"]["parameters"]
        assert row["size"]["train_bytes"] > 2 * weights  # and gradients
        assert row["size"]["predict_bytes"] > weights
    kept = networks.read(path)
    assert kept["rows"] == record["rows"]
    assert kept["settings"]["options"] == ["latent=8"]
    assert {"command", "commit", "device", "versions"} <= set(kept["environment"])
    assert "1 threads" in kept["environment"]["device"]


def test_a_method_that_fails_has_its_reason_and_the_others_go_on(
    stubbed: dict[str, BaseException],
) -> None:
    stubbed["lpbnn"] = RuntimeError("out of memory\nand pages more")
    record = quick("lpbnn", "batchensemble", predict=False)
    assert record["failed"] == {"lpbnn/2": "RuntimeError: out of memory"}
    assert cases(record) == [("mcp", 1), ("batchensemble", 2)]


def test_a_plain_network_that_fails_is_an_error(stubbed: dict[str, BaseException]) -> None:
    stubbed["mcp"] = RuntimeError("nothing works")
    with pytest.raises(RuntimeError, match="nothing works"):
        quick("lpbnn")


def test_a_killed_command_keeps_what_it_has(
    tmp_path: Path, stubbed: dict[str, BaseException]
) -> None:
    stubbed["rank1"] = KeyboardInterrupt()
    path = tmp_path / "bench.json"
    choice = ("--members", "2", "--methods", "lpbnn", "rank1", "--no-predict")
    with pytest.raises(KeyboardInterrupt):
        main([*QUICK, *choice, "--json", str(path)])
    assert cases(networks.read(path)) == [("mcp", 1), ("lpbnn", 2)]


@pytest.mark.usefixtures("stubbed")
def test_the_command_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "bench.json", tmp_path / "cost.svg"
    main([*QUICK, "--members", "2", "1", "--methods", "lpbnn", "--json", str(path)])
    out = capsys.readouterr().out
    assert "each in turn with the plain network" in out
    main(["show", str(path), "--plot", str(picture)])
    assert "small-cnn, eager" in capsys.readouterr().out
    drawn = picture.read_text()
    assert "peak memory of training" in drawn
    assert "LP-BNN" in drawn
    assert "_child" not in drawn


def test_many_draws_are_those_of_the_method_alone() -> None:
    """The plain network predicts once; a small chunk bounds the memory of the draws."""
    whole, parts = (quick("lpbnn", samples=8, chunk=chunk)["rows"] for chunk in (None, 4))
    assert whole[1]["size"]["predict_bytes"] > parts[1]["size"]["predict_bytes"]
    plain = quick()["rows"][0]
    assert whole[0]["size"]["predict_bytes"] == plain["size"]["predict_bytes"]


def test_a_file_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(SystemExit, match="is not a record of"):
        main(["show", str(tmp_path / "x.json")])


@pytest.mark.usefixtures("stubbed")
def test_the_papers_runtime_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("include=decoder.*", "backbone.width=8", "backbone.channels=16")
    network = ("--backbone", "deeplab-resnet18", "--input", "3", "32", "48", "--set", *options)
    main(["deeplab", "--methods", "lpbnn", "tradi", *network, *SMALL, "--no-predict"])
    out = capsys.readouterr().out
    assert "Table 3" in out
    assert "2.71" in out  # LP-BNN's test time in the paper


def test_the_published_records_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    archive = Path(__file__).parents[2] / "results" / "records.tar.xz"
    main(["show", str(archive / "bench" / "wrn-28-10-members-h200.json")])
    out = capsys.readouterr().out
    assert "NVIDIA H200" in out
    assert "lpbnn" in out


def test_the_note_names_the_memory_budget() -> None:
    record: Record = {"environment": {"device": "a GPU", "versions": {"torch": "2"}}, "failed": {}}
    record["settings"] = {"repeats": 3, "memory_budget": 0.95}
    assert "compiled with a memory budget of 0.95" in tables.notes(record)[0]
