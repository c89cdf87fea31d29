"""Run folders of others: a damaged or hostile file is a message, never a traceback, code or another result."""

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damaged
from PIL import Image

from lpbnn.report import write_report
from lpbnn.training.files import RunError
from lpbnn.training.run import load_run
from lpbnn.training.rundir import MANIFEST, RunDir

READERS: dict[str, Callable[[RunDir], Any]] = {
    "config.json": RunDir.config,
    "data.json": RunDir.data,
    "environment.json": RunDir.sessions,
    "log.csv": RunDir.log,
    "checkpoint.pt": RunDir.checkpoint,
    "weights.safetensors": lambda folder: load_run(folder.path),
    "results.json": RunDir.results,
    "predictions.npz": RunDir.arrays,
}
BYTES_TRIES = 120  # of each file
JSON_TRIES = 400
COMMAND_TRIES = 60
ARRAYS_TRIES = 100
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**30, -(10**30), 1e308, float("nan"), float("inf"), 0.5),
    *("", "x", "../../x", "/etc/passwd", "\x1b[2J\x1b]0;owned\x07", "=1+1", "ü\udcff", "a" * 10**5),
    *([], {}, [[]], {"": {}}, [None] * 3, {"lr": None}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def changed(value: Any, draw: random.Random) -> Any:
    """Put another value somewhere, or drop a key."""
    value = json.loads(json.dumps(value))
    *outer, last = draw.choice([path for path in places(value) if path]) if value else [None]
    at = value
    for key in outer:
        at = at[key]
    if draw.random() < 0.15:
        del at[last]
    else:
        at[last] = draw.choice(VALUES)
    return value


def foreign(folder: Path) -> RunDir:
    """Without digests, as somebody makes it who wants to be read."""
    (folder / MANIFEST).unlink(missing_ok=True)
    return RunDir(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_with_digests_every_change_is_told(folder: Path, name: str) -> None:
    draw, whole, run = random.Random(name), (folder / name).read_bytes(), RunDir(folder)
    for _ in range(BYTES_TRIES):
        content = damaged(whole, draw)
        if content == whole:
            continue
        (folder / name).write_bytes(content)
        with pytest.raises(RunError):
            READERS[name](run)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_without_digests_damaged_bytes_are_read_or_told(folder: Path, name: str) -> None:
    draw, whole, run = random.Random(name), (folder / name).read_bytes(), foreign(folder)
    for _ in range(BYTES_TRIES):
        (folder / name).write_bytes(damaged(whole, draw))
        with suppress(RunError):
            READERS[name](run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "data.json", "environment.json", "results.json"])
def test_any_json_is_read_or_told(folder: Path, name: str) -> None:
    draw, whole, run = (
        random.Random(name),
        json.loads((folder / name).read_bytes()),
        foreign(folder),
    )
    readers = [READERS[name]]
    if name in ("config.json", "data.json"):
        readers.append(lambda run: load_run(run.path))
    for i in range(JSON_TRIES):
        value = VALUES[i] if i < len(VALUES) else changed(whole, draw)
        (folder / name).write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
        for read in readers:
            with suppress(RunError):
                read(run)


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"a":' * 10**5, "null", "", "\ufeff{}", "1" * 10**5]
)
@pytest.mark.parametrize("name", ["config.json", "data.json", "results.json", MANIFEST])
def test_json_of_an_odd_kind_is_told(
    folder: Path, name: str, text: str, command: Callable[..., int]
) -> None:
    foreign(folder)
    (folder / name).write_text(text)
    assert command("compare", folder) == 2
    picture = folder.parent / "a.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture)
    assert command("predict", folder, picture) in ((0, 2) if name == "results.json" else (2,))


@pytest.mark.slow
def test_the_command_answers_or_exits_with_2(
    folder: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a foreign file says; and no escape sequence of it reaches the terminal."""
    draw, out = random.Random(0), folder.parent / "out"
    out.mkdir()
    picture = folder.parent / "a.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture)
    names = ("config.json", "data.json", "environment.json", "results.json")
    wholes = {name: json.loads((folder / name).read_bytes()) for name in names}
    foreign(folder)
    calls: list[tuple[object, ...]] = [
        ("compare", folder),
        ("compare", folder, "--format", "csv"),
        ("report", folder, "-o", out / "report.html"),
        ("predict", folder, picture, "-o", out / "a.csv"),
    ]
    before = sorted(folder.parent.iterdir())
    for i in range(COMMAND_TRIES):
        for name in names:
            value = changed(wholes[name], draw) if draw.random() < 0.4 else wholes[name]
            (folder / name).write_text(json.dumps(value), errors="surrogatepass")
        assert command(*calls[i % len(calls)]) in (0, 2)
        found = capsys.readouterr()
        assert "\x1b]" not in found.out + found.err
        assert "\x1b[2J" not in found.out + found.err
        assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize("part", ["ood", "diversity", "test", "corruption", "train", "calibration"])
@pytest.mark.parametrize("value", [[], [[]], 3, "x", {"": []}])
def test_results_of_another_form_are_told(
    folder: Path, part: str, value: Any, command: Callable[..., int]
) -> None:
    foreign(folder)
    results = json.loads((folder / "results.json").read_bytes())
    (folder / "results.json").write_text(json.dumps({**results, part: value}))
    assert command("compare", folder) in (0, 2)


def odd(array: np.ndarray, draw: random.Random) -> np.ndarray:
    """Another shape, type or size."""
    ways: tuple[Callable[[], np.ndarray], ...] = (
        lambda: array.ravel(),
        lambda: array[None],
        lambda: array[:0] if array.ndim else array,
        lambda: array[: len(array) // 2] if array.ndim else array,
        lambda: np.swapaxes(array, 0, -1) if array.ndim else array,
        lambda: np.array(3),
        lambda: np.full(array.shape, np.nan),
        lambda: np.full(array.shape, -1e300),
        lambda: np.zeros(array.shape, np.complex64),
        lambda: np.zeros(array.shape, "datetime64[s]"),
        lambda: np.zeros(array.shape, [("x", "f4")]),
        lambda: np.zeros(array.shape, bool),
        lambda: np.array(["\x1b[2J\x1b]0;owned\x07", "<script>alert(1)</script>"]),
    )
    return draw.choice(ways)()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_arrays_of_any_shape_are_shown_or_told(folder: Path, command: Callable[..., int]) -> None:
    draw, run, out = random.Random(0), foreign(folder), folder.parent / "out"
    whole = run.arrays()
    for _ in range(ARRAYS_TRIES):
        arrays = dict(whole)
        for name in draw.sample(sorted(whole), draw.choice((1, 1, 3))):
            arrays[name] = odd(arrays[name], draw)
            if draw.random() < 0.2:
                del arrays[name]
        np.savez(folder / "predictions.npz", **arrays)  # type: ignore[arg-type]
        shutil.rmtree(out, ignore_errors=True)
        if command("report", folder, "-o", out / "a.html") == 0:
            assert "<script>alert" not in (out / "a.html").read_text()


@pytest.mark.parametrize("name", ["examples/test/images", "examples/test/labels", "test/probs"])
def test_arrays_that_do_not_fit_are_told_by_the_name_of_the_run(folder: Path, name: str) -> None:
    run = foreign(folder)
    run.write_arrays({**run.arrays(), name: np.zeros(0)})
    with pytest.raises(RunError, match=r"arrays of .*run do not fit this version of lpbnn"):
        write_report([folder], folder.parent / "a.html")
    assert not (folder.parent / "a.html").exists()


@pytest.mark.slow
def test_arrays_that_unpack_to_gigabytes_are_told(folder: Path) -> None:
    run = foreign(folder)
    path, head = folder / "predictions.npz", {"descr": "<f8", "fortran_order": False}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("a.npy", "w", force_zip64=True) as part,
    ):
        np.lib.format.write_array_header_1_0(part, {**head, "shape": (2**28,)})
        for _ in range(2**31 // 2**24 + 1):
            part.write(bytes(2**24))
    assert (folder / "predictions.npz").stat().st_size < 2**22
    with pytest.raises(RunError, match="bytes when unpacked, expected at most"):
        run.arrays()


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [{"hidden": [10**9]}, {"hidden": [10**30]}, {"hidden": [8] * 10**4}]
)
def test_a_model_of_absurd_size_is_not_made(folder: Path, option: dict[str, Any]) -> None:
    run = foreign(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "backbone_options": option}))
    with pytest.raises(RunError):
        load_run(run.path)
    members = {**config["method_options"], "members": 10**10}
    (folder / "config.json").write_text(json.dumps({**config, "method_options": members}))
    with pytest.raises(RunError, match="model of at least 10,000,000,000 numbers"):
        load_run(run.path)


def test_names_of_more_or_fewer_classes_than_there_are_are_told(
    folder: Path, command: Callable[..., int]
) -> None:
    foreign(folder)
    stored = json.loads((folder / "data.json").read_text())
    picture = folder.parent / "a.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture)
    for classes in (["a"], ["a"] * 11):
        (folder / "data.json").write_text(json.dumps({**stored, "classes": classes}))
        assert command("predict", folder, picture) == 2


def test_names_that_are_not_utf8_are_shown_and_written(
    folder: Path, command: Callable[..., int], tmp_path: Path
) -> None:
    odd_folder = folder.rename(Path(os.fsdecode(bytes(tmp_path) + b"/run\xff")))
    picture = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.png"))
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture)
    assert command("compare", odd_folder) == 0
    assert command("report", odd_folder, "-o", tmp_path / "a.html") == 0
    for name in ("a.csv", "a.json"):
        assert command("predict", odd_folder, picture, "-o", tmp_path / name) == 0
    (answer,) = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert Path(answer["file"]) == picture


@pytest.mark.slow
def test_a_terminal_without_a_sign_shows_its_number(folder: Path) -> None:
    """In the C locale: what was trained is not lost to a table that cannot be printed."""
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "lpbnn", "compare", str(folder), "--format", "markdown"],
        env={**os.environ, **plain},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2191" in done.stdout
