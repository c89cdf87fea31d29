"""The tables in results/ hold the numbers of the archived records, docs/results those of the tables."""

import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools import make_results, make_tables, pack_records

from benchmarks.archive import members
from benchmarks.rows import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
ARCHIVE = RESULTS / "records.tar.xz"
# Parts of a record's results that are no measurements: they repeat the config.
SETTINGS = {"format", "method", "backbone", "data", "seed", "source", "evaluate", "measured_again"}


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    """The records of runs in the archive, by folder and name."""
    found = {n: json.loads(b) for n, b in members(ARCHIVE).items() if n.endswith(".json")}
    return {n.removesuffix(".json"): r for n, r in found.items() if "ledger" in r}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    """The rows of all CSVs, by folder and name."""
    found = [row for name in make_tables.TABLES for row in read(RESULTS / f"{name}.csv")]
    named = {f"{row['folder']}/{row['run']}": row for row in found}
    assert len(named) == len(found)
    return named


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every measured value of nested results; written apart from the tool's own function."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif value is not None:
        yield "/".join(path), value


def test_every_record_has_one_row(records: Any, rows: Any) -> None:
    assert len(records) == 246
    assert rows.keys() == records.keys()


def test_every_number_is_that_of_the_record(records: Any, rows: Any) -> None:
    compared = 0
    for name, record in records.items():
        measured = {k: v for k, v in record["results"].items() if k not in SETTINGS}
        for key, value in leaves(measured):
            text = rows[name][key]
            found = text if isinstance(value, str) else json.loads(text)
            assert (found, type(found)) == (value, type(value)), (name, key)
            compared += isinstance(value, int | float)
    assert compared > 50_000


def test_no_row_has_a_number_that_its_record_lacks(records: Any, rows: Any) -> None:
    for name, record in records.items():
        known = {key for key, _ in leaves(record["results"])}
        filled = {key for key, text in rows[name].items() if text and ("/" in key)}
        assert filled <= known, name


def test_a_row_says_how_its_run_was_made(records: Any, rows: Any) -> None:
    for name, record in records.items():
        row, config, session = rows[name], record["config"], record["sessions"][-1]
        assert row["commit"] == session["commit"]
        assert row["device"] == session["device"]
        assert int(row["seed"]) == config["seed"] == record["results"]["seed"]
        assert float(row["seconds"]) == record["results"]["train"]["seconds"]
        assert json.loads(row["options"]) == config["method_options"]
        for key in ("method", "backbone", "data"):
            assert row[key] == config[key] == record["results"][key]
        assert (float(row["lr"]), int(row["epochs"])) == (config["optim"]["lr"], config["epochs"])


def test_seeds_share_the_hash_of_their_config(records: Any, rows: Any) -> None:
    by_hash: dict[str, Any] = {}
    for name, record in records.items():
        config = {**record["config"], "seed": None}
        assert by_hash.setdefault(rows[name]["config_hash"], config) == config
    assert len(by_hash) < len(records)


def test_benchmarks_and_searches_are_those_of_the_archive() -> None:
    content = members(ARCHIVE)
    found: dict[str, Any] = {}
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found |= {json.loads(line)["file"]: json.loads(line)["content"]}
    expected = {name for name in content if name.startswith(("bench/", "search/"))}
    assert found.keys() == expected
    for name, held in found.items():
        text = content[name].decode()
        assert held == (json.loads(text) if name.endswith(".json") else text), name


def test_the_tables_are_what_the_tool_makes() -> None:
    made = dict(make_tables.outputs(members(ARCHIVE)))
    for name, text in made.items():
        assert (RESULTS / name).read_text() == text, f"{name}. Fix: python -m tools.make_tables"
    written = {path.name for path in RESULTS.iterdir()}
    figures = {f"{table}.npz" for table in make_tables.FIGURES}
    # Written by the scripts of the same names in benchmarks/.
    benchmarks = {"tabular.csv", "posthoc.csv", "architectures.json", "lora.json", "peers.json"}
    assert written == {*made, *figures, *benchmarks, "records.tar.xz", "README.md"}


@pytest.mark.parametrize("table", make_tables.FIGURES)
def test_every_array_is_that_of_the_record(table: str) -> None:
    packed = {n: b for n, b in members(ARCHIVE).items() if n.endswith(".npz")}
    with np.load(RESULTS / f"{table}.npz") as stored:
        held = {name: stored[name] for name in stored.files}
    used: set[str] = set()
    for name, content in packed.items():
        if not name.startswith(make_tables.TABLES[table]):
            continue
        with np.load(io.BytesIO(content)) as record:
            for key in record.files:
                own = f"{Path(name).stem}/{key}"
                used.add(own if own in held else key)
                found = held[own if own in held else key]
                assert found.dtype == record[key].dtype
                np.testing.assert_array_equal(found, record[key], strict=True)
    assert used == held.keys()


def test_the_archive_has_no_dates_and_no_owners() -> None:
    plain = lzma.decompress(ARCHIVE.read_bytes())
    assert plain == pack_records.tar_bytes(members(ARCHIVE))


def test_a_record_is_never_changed(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.json").write_bytes(b"1")
    assert pack_records.added({}, tmp_path) == {"some/a.json": b"1"}
    assert pack_records.added({"some/a.json": b"1"}, tmp_path) == {"some/a.json": b"1"}
    with pytest.raises(ValueError, match=r"some/a.json differ .* immutable. Fix"):
        pack_records.added({"some/a.json": b"2"}, tmp_path)


def test_a_folder_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the folders new, which belong to no table. Fix"):
        list(make_tables.outputs({"new/a.json": b"{}"}))


def test_a_commit_older_than_its_options_is_marked(rows: Any) -> None:
    row = rows["cifar100-fast/cifar100-fast-wrn-16-4-duq-0"]
    assert row["note"].startswith("the commit is older than the options")
    assert json.loads(row["options"])["bce"] == "mean"
    assert row["run"] in (RESULTS / "README.md").read_text()
    assert "| DUQ† | 1 | 2.08 |" in make_results.PAGE.read_text()


def test_the_page_of_results_is_what_the_tool_makes() -> None:
    text = make_results.PAGE.read_text()
    assert text == make_results.page(), "Fix: python -m tools.make_results"
    assert len(text.splitlines()) <= 200


def test_the_fair_page_is_what_the_tool_makes() -> None:
    assert make_results.FAIR_PAGE.read_text() == make_results.fair_page()


def test_the_page_of_results_shows_means_of_the_records(records: Any) -> None:
    """The same numbers, computed from the archive without the CSVs."""
    text = make_results.PAGE.read_text()
    runs = [
        record["results"]["test"]["accuracy"]
        for name, record in records.items()
        if name.startswith("cifar10-fast/cifar10-fast-wrn-16-4-lpbnn-")
    ]
    mean = sum(runs) / len(runs)
    spread = (sum((x - mean) ** 2 for x in runs) / (len(runs) - 1)) ** 0.5
    shown = f"| `wrn-16-4` | LP-BNN | {len(runs)} | {100 * mean:.2f} ±{100 * spread:.2f} | 95.02 (94.76) |"
    assert shown in text


def test_every_file_is_explained() -> None:
    text = (RESULTS / "README.md").read_text()
    for path in RESULTS.iterdir():
        assert f"`{path.name}`" in text or path.name == "README.md", path.name
    for folder in {name.partition("/")[0] for name in members(ARCHIVE)}:
        assert f"`{folder}/" in text, folder
