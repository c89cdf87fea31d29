"""The ledger keeps every number of a run and refuses what would count twice."""

import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.conftest import SESSION, Make, arrays, info
from tools.pack_records import added, pack

from lpbnn.cli import main
from lpbnn.cli.options import read_config
from lpbnn.experiments import published
from lpbnn.report import archive, comparison, write_report
from lpbnn.report.formats import markdown
from lpbnn.report.ledger import found_in, keep, kept, kept_in, read_ledger
from lpbnn.report.runs import Run, by_setting, chosen, grouped
from lpbnn.report.tables import severity
from lpbnn.training import OptimConfig, RunConfig
from lpbnn.training.build import resolved
from lpbnn.training.files import RunError
from lpbnn.training.rundir import RunDir

RECORDS = Path(__file__).parents[2] / "results" / "records.tar.xz"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "results" / "digits"


def test_a_kept_run_is_the_run(make: Make, ledger: Path) -> None:
    folder = make("lpbnn", 3)
    path = keep(folder, ledger)
    assert path == ledger / f"{folder.name}.json"
    before, after = Run.read(folder), Run.read(path)
    assert (after.method, after.seed, after.name) == ("lpbnn", 3, before.name)
    assert after.settings == before.settings
    assert after.results == before.results
    assert after.sessions == before.sessions
    assert after.data == before.data
    assert comparison([path]) == comparison([folder])
    entry = json.loads(path.read_text())
    assert entry["sessions"][0]["commit"] == "0123456789abcdef"
    assert entry["conventions"]["score"].startswith("1 - ")
    assert "OOD is the positive class" in entry["conventions"]["aupr"]


def test_a_folder_of_kept_runs_can_be_named(
    make: Make, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [keep(make("mcp", seed), ledger) for seed in (0, 1)]
    assert kept_in(ledger) == files
    assert kept_in(make("lpbnn")) == []
    assert len(kept_in(RECORDS / "digits-demo")) == 33
    main(["compare", str(ledger)])
    assert "MCP n=2" in capsys.readouterr().out


def test_keeping_twice_changes_nothing(make: Make, ledger: Path) -> None:
    folder = make()
    path = keep(folder, ledger)
    stamp = path.stat().st_mtime_ns
    assert keep(folder, ledger) == path
    assert path.stat().st_mtime_ns == stamp
    results = RunDir(folder).results()
    RunDir(folder).write_results({**results, "evaluate_seconds": 1.0})  # measured again
    keep(folder, ledger)
    assert Run.read(path).results["evaluate_seconds"] == 1.0


def test_a_run_that_was_measured_again_says_by_which_command(make: Make, tmp_path: Path) -> None:
    """What it was trained by does not give its numbers."""
    folder, other = make("lpbnn", 0), make("mcp", 0)
    again = {**SESSION, "command": ["lpbnn", "eval", "RUN", "--samples", "4"], "dirty": False}
    RunDir(folder).write_results({**RunDir(folder).results(), "measured_again": again})
    files = [keep(run, tmp_path / "results" / "some") for run in (folder, other)]
    page = write_report(files, tmp_path / "report.html").read_text()
    assert "Measured again since:</p><pre>lpbnn eval RUN --samples 4</pre>" in page


def test_training_and_risk_curves_are_kept_without_the_predictions(
    make: Make, ledger: Path
) -> None:
    random = np.random.default_rng(0)
    probs, labels = random.dirichlet(np.ones(10), 50), random.integers(0, 10, 50)
    run = make("mcp", with_arrays={"test/probs": probs, "test/labels": labels})
    RunDir(run).write_log(
        [{"epoch": 1, "loss": 2.0, "nll": 2.0}, {"epoch": 2, "loss": 1.0, "nll": 1.0}]
    )
    kept = Run.read(keep(run, ledger)).arrays
    assert kept["log/nll"].tolist() == [2.0, 1.0]
    assert kept["risk/risk"][-1] == pytest.approx((probs.argmax(1) != labels).mean())
    assert "test/probs" not in kept


def test_figures_are_kept_of_the_first_seed(make: Make, ledger: Path, tmp_path: Path) -> None:
    large = {"test/probs": np.zeros((100, 10)), "posterior/correlation": np.zeros((999, 999))}
    first = make("lpbnn", 0, with_arrays={**arrays(np.random.default_rng(0), 4, False), **large})
    second = make("lpbnn", 1)
    files = [keep(folder, ledger) for folder in (first, second)]
    assert [path.name for path in ledger.glob("*.npz")] == [f"{first.name}.npz"]
    kept_arrays, before = Run.read(files[0]).arrays, Run.read(first).arrays
    assert set(before) - set(kept_arrays) == set(large)
    for name, array in kept_arrays.items():
        np.testing.assert_array_equal(array, before[name])
    assert Run.read(files[1]).arrays == {}
    page = write_report(files, tmp_path / "report.html").read_text()
    assert "Members should agree" in page
    assert "the drawings show those with predictions" in page
    here = ledger.resolve() / first.name
    assert f"lpbnn train --config {here}.json --out {here}-again" in page
    assert read_config(files[0]).method == "lpbnn"
    (ledger / f"{first.name}.npz").write_bytes(b"PK")
    with pytest.raises(RunError, match=r"is damaged.*Fix: keep the run again"):
        _ = Run.read(files[0]).arrays


def test_a_folder_of_runs_or_of_the_ledger(make: Make, ledger: Path, tmp_path: Path) -> None:
    runs = [make("mcp", seed) for seed in (0, 1)]
    keep(runs[0], ledger)
    assert [run.seed for run in found_in(tmp_path)] == [0, 1]
    assert [run.seed for run in found_in(ledger)] == [0]
    assert [run.seed for run in found_in(runs[0])] == [0]
    for run in runs:
        (run / "results.json").unlink()
    with pytest.raises(RunError, match="none of the 2 runs"):
        found_in(tmp_path)
    with pytest.raises(RunError, match="is no folder"):
        found_in(tmp_path / "nothing")


def test_seeds_are_in_the_order_of_numbers(make: Make, ledger: Path, tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        keep(make("mcp", seed, folder=f"own/mcp-lr0.05-{seed}"), ledger)
    keep(make("lpbnn", 3, folder="own/lpbnn-wide1"), ledger)
    expected = [("lpbnn", 3), ("mcp", 1), ("mcp", 2), ("mcp", 10)]
    for folder in (ledger, tmp_path / "own"):
        assert [(run.method, run.seed) for run in found_in(folder)] == expected


def test_the_papers_cE_stands_beside_the_mean_over_severities_only(make: Make) -> None:
    groups = grouped([Run.read(make("lpbnn", data=info(name="cifar10")))])
    table = severity(groups, ("ece",), published("cifar10", "wrn-28-10"))
    found = {key: cell.reference for key, cell in table.rows[0].cells.items()}
    assert found == {"1/ece": None, "3/ece": None, "5/ece": None, "ce": 0.1197}


def test_what_is_no_finished_run_is_refused(make: Make, ledger: Path, tmp_path: Path) -> None:
    folder = make()
    (folder / "results.json").unlink()
    with pytest.raises(RunError, match=r"not finished.*Fix: resume it"):
        keep(folder, ledger)
    with pytest.raises(RunError, match=r"does not exist.*Fix"):
        keep(tmp_path / "nothing", ledger)
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match=r"has no results.json.*Fix: give the folder of a run"):
        keep(tmp_path / "other", ledger)
    assert not ledger.exists()


def test_files_that_are_no_entries(make: Make, ledger: Path) -> None:
    path = keep(make(), ledger)
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "ledger": 9}))
    with pytest.raises(RunError, match="ledger format 9"):
        read_ledger(ledger)
    path.write_text(json.dumps({**entry, "results": {"format": 7}}))
    with pytest.raises(RunError, match="format 7"):
        read_ledger(ledger)
    path.write_text('{"layers": 3}')
    with pytest.raises(RunError, match=r"no file of a ledger: it lacks ledger, run.*lpbnn keep"):
        read_ledger(ledger)
    path.write_text("{")
    with pytest.raises(RunError, match="is no JSON"):
        read_ledger(ledger)
    path.unlink()
    with pytest.raises(RunError, match=r"holds no JSON.*Fix: lpbnn keep"):
        read_ledger(ledger)
    with pytest.raises(RunError, match="is no folder"):
        read_ledger(path)


def test_one_run_is_counted_once(make: Make, ledger: Path) -> None:
    first = make("mcp", 0)
    keep(first, ledger)
    again = first.rename(first.with_name("again"))
    with pytest.raises(RunError, match=r"are the same: method mcp, seed 0.*Fix: remove one"):
        keep(again, ledger)
    (ledger / "copy.json").write_text(next(ledger.glob("*.json")).read_text())
    with pytest.raises(RunError, match="are the same"):
        read_ledger(ledger)


def test_another_run_of_the_same_name_is_not_overwritten(make: Make, ledger: Path) -> None:
    path = keep(make("mcp", folder="a"), ledger)
    text = path.read_text()
    other = make("mcp", folder="a", lr=0.05)
    with pytest.raises(RunError, match=r"another run of this name \(optim.lr|lr 0.1 there, 0.05"):
        keep(other, ledger)
    assert path.read_text() == text


def test_what_is_kept_need_not_be_made(make: Make, ledger: Path) -> None:
    config = resolved(RunConfig("mcp"))
    assert kept(ledger, "a", config) is None
    folder = make("mcp", folder="a", corrupted=False, options=dict(config.method_options))
    path = keep(folder, ledger)
    elsewhere = RunConfig("mcp", data_root="elsewhere", compile=True, memory_budget=0.5)
    assert kept(ledger, "a", elsewhere) == path
    assert kept(ledger, "b", RunConfig("mcp")) == path
    assert kept(ledger, "b", RunConfig("mcp", seed=1)) is None
    measured = replace(config, evaluate=replace(config.evaluate, samples=8))
    assert kept(ledger, "a", measured) is None  # to be measured again
    with pytest.raises(RunError, match="another run of this name"):
        kept(ledger, "a", RunConfig("mcp", optim=OptimConfig(lr=0.3)))


def test_an_option_younger_than_the_run_had_its_default(make: Make, ledger: Path) -> None:
    options = dict(resolved(RunConfig("lpbnn")).method_options)
    younger = options.pop("fast_lr")
    path = keep(make("lpbnn", folder="a", corrupted=False, options=options), ledger)
    assert Run.read(path).settings["method_options.fast_lr"] == younger
    assert kept(ledger, "a", RunConfig("lpbnn")) == path
    with pytest.raises(RunError, match=r"fast_lr 1 there, 0.5 now"):
        kept(ledger, "a", RunConfig("lpbnn", {"fast_lr": 0.5}))


def test_a_number_is_the_same_number_however_it_is_written(make: Make, ledger: Path) -> None:
    """-2 and -2.0 were two settings with one name, and one took the other's numbers in the table."""
    whole = make("lpbnn", 0, options={"log_variance": -2}, test={"accuracy": 0.9})
    point = make("lpbnn", 1, options={"log_variance": -2.0}, test={"accuracy": 0.8})
    (group,) = grouped([Run.read(whole), Run.read(point)])
    assert [run.seed for run in group.runs] == [0, 1]
    keep(whole, ledger)
    with pytest.raises(RunError, match="are the same"):
        keep(make("lpbnn", 0, options={"log_variance": -2.0}, folder="again"), ledger)


def test_rows_that_look_alike_keep_their_own_numbers(make: Make) -> None:
    runs = [
        make("lpbnn", options={"log_variance": value}, folder=f"r{i}", test={"accuracy": share})
        for i, (value, share) in enumerate([(-2.0000001, 0.9), (-2.0000002, 0.8)])
    ]
    table = comparison(runs)
    assert [row.cells["accuracy"].values for row in table.rows] == [(0.9,), (0.8,)]
    assert len({row.label for row in table.rows}) == 2


@pytest.fixture
def record(make: Make, ledger: Path) -> Callable[..., Path]:
    """``record(by_width=True)`` keeps a run of LP-BNN with options that no method has any more."""

    def write(**removed: Any) -> Path:
        path = keep(make("lpbnn", folder="old", corrupted=False), ledger)
        entry = json.loads(path.read_text())
        entry["config"]["method_options"] |= removed
        path.write_text(json.dumps(entry))
        return path

    return write


def test_an_option_that_was_removed_is_shown_as_a_fact(
    make: Make, ledger: Path, record: Callable[..., Path]
) -> None:
    old = Run.read(record(train_decoder=True, by_width=False))
    assert chosen(old.settings, "lpbnn") == ["method_options.train_decoder"]
    labels = {group.label for group in grouped([old, Run.read(make("lpbnn", corrupted=False))])}
    assert labels == {"LP-BNN (train_decoder=yes)", "LP-BNN (train_decoder=no)"}
    assert kept(ledger, "other", RunConfig("lpbnn")) is None  # it was another run
    with pytest.raises(RunError, match="train_decoder yes there, not set now"):
        kept(ledger, "old", RunConfig("lpbnn"))


def test_a_removed_option_that_was_off_makes_no_other_run(
    make: Make, ledger: Path, record: Callable[..., Path]
) -> None:
    old = Run.read(record(train_decoder=False, by_width=False, anneal=0.0, reconstruct="mean"))
    assert chosen(old.settings, "lpbnn") == []
    (group,) = grouped([old, Run.read(make("lpbnn", 1, corrupted=False))])
    assert [run.seed for run in group.runs] == [0, 1]
    assert kept(ledger, "other", RunConfig("lpbnn")) == old.path


def test_committed_records_have_the_names_of_today() -> None:
    for path in archive.files(RECORDS, ".json", deep=True):
        record = archive.read_json(path)
        if "ledger" in record:
            assert not {"spread", "spread_at"} & record["config"]["method_options"].keys(), path


def test_every_committed_record_is_in_a_table() -> None:
    paths = archive.files(RECORDS, ".json", deep=True)
    folders = {path.parent for path in paths if "ledger" in archive.read_json(path)}
    assert len(folders) == 12
    parts = [part for folder in folders for part in by_setting(read_ledger(folder)).values()]
    assert len(parts) == 19
    for part in parts:
        table = comparison(part)
        assert sum(row.n for row in table.rows) == len(part)
        assert markdown(table).count("\n| ") == len(table.rows) + 2


@pytest.fixture
def packed(make: Make, tmp_path: Path) -> Path:
    """The ledger of two seeds in an archive, with the folder that was packed beside it."""
    for seed in (0, 1):
        keep(make("lpbnn", seed), tmp_path / "kept" / "digits")
    (tmp_path / "kept.tar.xz").write_bytes(pack(added({}, tmp_path / "kept")))
    return tmp_path / "kept.tar.xz"


def test_a_packed_ledger_is_read_like_its_folder(packed: Path, tmp_path: Path) -> None:
    before, after = (read_ledger(top / "digits") for top in (tmp_path / "kept", packed))
    assert [run.name for run in after] == [run.name for run in before]
    for one, other in zip(before, after, strict=True):
        assert (one.settings, one.results, one.data) == (other.settings, other.results, other.data)
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
    assert before[0].arrays
    assert [run.seed for run in found_in(packed / "digits")] == [0, 1]
    assert comparison([run.path for run in after]) == comparison([run.path for run in before])


def test_what_a_packed_ledger_lacks_is_told(make: Make, packed: Path) -> None:
    with pytest.raises(RunError, match="is no folder"):
        read_ledger(packed / "cifar10")
    with pytest.raises(RunError, match=r"kept.tar.xz has no digits/a.json; it holds digits. Fix"):
        Run.read(packed / "digits" / "a.json")
    with pytest.raises(RunError, match=r"in an archive, which is only read. Fix"):
        keep(make("mcp"), packed / "digits")
    packed.write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"kept.tar.xz is damaged .* Fix"):
        Run.read(packed / "digits" / "a.json")


def test_a_users_own_arrays_are_not_replaced(make: Make, ledger: Path) -> None:
    ledger.mkdir(parents=True)
    (ledger / "mine.npz").write_bytes(b"untouched")
    run = make("mcp", folder="mine")
    with pytest.raises(RunError, match="mine.npz is no file of a kept run"):
        keep(run, ledger)
    assert (ledger / "mine.npz").read_bytes() == b"untouched"
    assert not (ledger / "mine.json").exists()


def test_a_pipe_among_records_is_not_waited_for(make: Make, ledger: Path) -> None:
    """A folder of records from somebody else: a pipe as a record, or as the arrays beside one."""
    run = make("mcp", folder="a")
    kept = keep(run, ledger)
    os.mkfifo(ledger / "b.json")
    assert [one.name for one in read_ledger(ledger)] == ["a"]
    with pytest.raises(RunError, match="b.json is a pipe, a device or a folder"):
        Run.read(ledger / "b.json")
    arrays = kept.with_suffix(".npz")
    arrays.unlink()
    os.mkfifo(arrays)
    for read in (lambda: Run.read(kept).arrays, lambda: keep(run, ledger)):
        with pytest.raises(RunError, match="a.npz is a pipe, a device or a folder"):
            read()


def packed_by_others(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("target", ["a.json", "../../etc/passwd", "/etc/passwd", "b.json"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_an_archive_are_left_out(tmp_path: Path, kind: bytes, target: str) -> None:
    members = []
    for name in ("k/a.json", "k/b.json"):  # in a circle, to themselves, elsewhere, nowhere
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        members.append((member, b""))
    path = packed_by_others(tmp_path / "k.tar.xz", *members)
    assert archive.files(path, deep=True) == []
    with pytest.raises(RunError, match="k.tar.xz has no k/a.json"):
        Run.read(path / "k" / "a.json")


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_archive_is_unpacked_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    monkeypatch.setattr(archive, "MOST", 2**20)
    member = tarfile.TarInfo("k/a.json")
    member.size, member.type = 2**24, kind
    head = member.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "k.tar.xz").write_bytes(lzma.compress(head + bytes(2**24), preset=0))
    with pytest.raises(RunError, match="it unpacks to more than 1,048,576 bytes"):
        Run.read(tmp_path / "k.tar.xz" / "k" / "a.json")
