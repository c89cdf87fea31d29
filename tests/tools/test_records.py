"""Records hold the numbers and figures of runs, and become run folders again."""

import json
from pathlib import Path

import numpy as np
import pytest
from report.conftest import Make, arrays
from tools import records
from tools.pack_records import added, pack

from benchmarks.archive import members, read_json
from lpbnn.report import comparison
from lpbnn.report.formats import markdown
from lpbnn.report.runs import Run, by_setting, read_runs
from lpbnn.training.files import RunError
from lpbnn.training.rundir import RunDir

pytest_plugins = ["report.conftest"]


@pytest.fixture
def packed(make: Make, tmp_path: Path) -> Path:
    for seed in (0, 1):
        found = arrays(np.random.default_rng(0), 4, False)
        found["test/scores"] = np.arange(40.0)
        run = make("lpbnn", seed, with_arrays=found)
        RunDir(run).write_log(
            [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0, "val_nll": 1.0}]
        )
        records.keep(run, tmp_path / "kept" / "digits")
    (tmp_path / "kept.tar.xz").write_bytes(pack(added({}, tmp_path / "kept")))
    return tmp_path / "kept.tar.xz"


def test_unpacked_runs_are_the_runs(packed: Path, tmp_path: Path) -> None:
    folders = list(records.unpack(members(packed), tmp_path / "again"))
    for folder in folders:
        before, after = Run.read(tmp_path / folder.name), Run.read(folder)
        assert (after.method, after.seed, after.name) == (before.method, before.seed, before.name)
        assert after.settings == before.settings
        assert after.data == before.data
        assert after.sessions == before.sessions
        assert after.results["test"] == before.results["test"]
    assert comparison(folders) == comparison([tmp_path / folder.name for folder in folders])
    first, second = map(Run.read, folders)
    assert second.arrays == {}  # figures are of the first seed
    own = Run.read(tmp_path / folders[0].name).arrays
    assert first.arrays.keys() == own.keys()
    for name, array in own.items():
        if name != "test/scores":
            np.testing.assert_array_equal(first.arrays[name], array)
    assert np.quantile(first.arrays["test/scores"], 0.5) == pytest.approx(19.5)


def test_a_record_says_what_its_numbers_mean(make: Make, tmp_path: Path) -> None:
    entry = json.loads(records.keep(make(), tmp_path / "kept").read_bytes())
    assert entry["sessions"][0]["commit"] == "0123456789abcdef"
    assert entry["conventions"]["score"].startswith("1 - ")
    assert "OOD is the positive class" in entry["conventions"]["aupr"]


def test_another_run_of_the_same_name_is_not_overwritten(make: Make, tmp_path: Path) -> None:
    path = records.keep(make("mcp", folder="a"), tmp_path / "kept")
    text = path.read_text()
    other = make("mcp", folder="a", lr=0.05)
    with pytest.raises(RunError, match="another run of this name"):
        records.keep(other, tmp_path / "kept")
    assert path.read_text() == text


def test_maps_are_kept_small() -> None:
    maps = np.random.default_rng(0).random((4, 360, 480)).astype(np.float32)
    found = records.figures({"examples/test/confidence": maps, "test/probs": maps})
    small = found.pop("examples/test/confidence")
    assert not found
    assert (small.shape, small.dtype) == ((4, 120, 160), np.float16)
    assert np.abs(small - maps[:, ::3, ::3]).max() < 0.003


@pytest.mark.slow
def test_every_committed_record_is_in_a_table(tmp_path: Path) -> None:
    runs = read_runs(records.unpack(members(records.ARCHIVE), tmp_path))
    assert len(runs) == 246
    folders: dict[Path, list[Run]] = {}
    for run in runs:
        folders.setdefault(run.path.parent, []).append(run)
    parts = [part for found in folders.values() for part in by_setting(found).values()]
    assert len(parts) == 19
    for part in parts:
        table = comparison(part)
        assert sum(row.n for row in table.rows) == len(part)
        assert markdown(table).count("\n| ") == len(table.rows) + 2


def test_a_file_of_an_archive_is_read_by_its_path(packed: Path) -> None:
    name = next(iter(members(packed)))
    assert read_json(packed / "digits" / Path(name).name)["ledger"] == 1
    with pytest.raises(RunError, match=r"kept.tar.xz has no digits/b.json"):
        read_json(packed / "digits" / "b.json")


def test_an_old_record_has_the_score_of_its_time(packed: Path, tmp_path: Path) -> None:
    """``evaluate.score`` came later, with another default."""
    content = {name: data for name, data in members(packed).items() if name.endswith("-0.json")}
    ((name, data),) = content.items()
    entry = json.loads(data)
    for part in (entry["config"]["evaluate"], entry["results"]["evaluate"]):
        del part["score"]
    (folder,) = records.unpack({name: json.dumps(entry).encode()}, tmp_path / "again")
    assert Run.read(folder).settings["evaluate.score"] == "confidence"
