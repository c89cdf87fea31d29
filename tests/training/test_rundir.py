"""A run folder is never damaged in silence, never shared by two writers, and never leads elsewhere."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lpbnn.atomic import write_atomic
from lpbnn.data import Splits
from lpbnn.training import RunConfig, RunError, rundir
from lpbnn.training.build import DataInfo
from lpbnn.training.calibrate import calibrate_run
from lpbnn.training.run import load_run, reevaluate, run
from lpbnn.training.rundir import CONFORMAL, FILES, MANIFEST, RunDir

Make = Callable[..., RunConfig]
KILLED = 9
READERS: dict[str, Callable[[RunDir], Any]] = {
    "config.json": RunDir.config,
    "data.json": RunDir.data,
    "environment.json": RunDir.sessions,
    "log.csv": RunDir.log,
    "checkpoint.pt": RunDir.checkpoint,
    "weights.safetensors": RunDir.state_dict,
    "results.json": RunDir.results,
    "predictions.npz": RunDir.arrays,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, splits: Splits) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = RunConfig(
        "mcp", backbone="mlp", backbone_options={"hidden": (16,)}, epochs=1, progress=False
    )
    run(config, folder, splits=splits)
    return folder


def copy(finished: Path, to: Path) -> RunDir:
    return RunDir(shutil.copytree(finished, to))


@pytest.mark.parametrize("name", READERS)
def test_a_changed_byte_is_told_by_the_name_of_the_file(
    finished: Path, tmp_path: Path, name: str
) -> None:
    folder = copy(finished, tmp_path / "run")
    whole = (folder / name).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(RunError, match=f"{name} .* is damaged or was changed"):
            READERS[name](folder)
    (folder / name).write_bytes(whole)
    READERS[name](folder)


def test_every_file_is_in_the_manifest(finished: Path) -> None:
    assert {MANIFEST, *RunDir(finished).digests()} == {*FILES} - {CONFORMAL}
    assert all(len(digests) == 1 for digests in RunDir(finished).digests().values())


@pytest.mark.parametrize("content", [b"[]", b'{"files": 3}', b'{"files": {"log.csv": 3}}', b"{"])
def test_a_damaged_manifest_is_told(finished: Path, tmp_path: Path, content: bytes) -> None:
    folder = copy(finished, tmp_path / "run")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(RunError, match="manifest.json is damaged"):
        folder.config()


@pytest.mark.parametrize("name", [*READERS, MANIFEST])
def test_a_symlink_in_a_run_folder_is_not_followed(
    finished: Path, tmp_path: Path, name: str
) -> None:
    folder = copy(finished, tmp_path / "run")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{name} is a link, a pipe or a folder"):
        READERS.get(name, RunDir.config)(folder)


def test_a_pipe_in_a_run_folder_is_not_waited_for(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path / "run")
    (folder / "results.json").unlink()
    os.mkfifo(folder / "results.json")
    with pytest.raises(RunError, match="results.json is a link, a pipe or a folder"):
        folder.results()


def test_nothing_is_written_through_a_symlink(
    finished: Path, tmp_path: Path, splits: Splits
) -> None:
    """A folder from somebody else: links in place of every file and of every temporary file of 0.1."""
    mine = tmp_path / "mine"
    mine.write_text("untouched")
    folder = copy(finished, tmp_path / "run")
    for name in FILES:
        (folder / f".{name}.tmp").symlink_to(mine)
    reevaluate(folder.path, splits=splits)
    for name in ("results.json", "predictions.npz"):
        (folder / name).unlink()
        (folder / name).symlink_to(mine)
        folder.write(name, b"{}")
        assert not (folder / name).is_symlink()
    assert mine.read_text() == "untouched"


def test_a_link_for_tensorboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(RunError, match="tensorboard is a link"):
        RunDir(tmp_path).tensorboard()


def test_results_of_another_run_are_told(finished: Path, tmp_path: Path) -> None:
    folder = copy(finished, tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    folder.write_results({**results, "method": "lpbnn"})
    with pytest.raises(RunError, match="of method 'lpbnn', config.json beside it of 'mcp'"):
        folder.results()
    folder.write_results(results)
    config = json.loads((folder / "config.json").read_text())
    folder.write("config.json", json.dumps({**config, "device": "cpu"}).encode())
    assert folder.results() == results  # where it ran may differ
    reordered = dict(reversed(config.items()))
    folder.write("config.json", json.dumps(reordered).encode())
    assert folder.results() == results
    folder.write("config.json", json.dumps({**config, "batch_size": 7}).encode())
    with pytest.raises(RunError, match="is of config_digest .*: two runs were mixed"):
        folder.results()


HOLDER = """
import sys
from lpbnn.training.rundir import RunDir
with RunDir(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_process_writes_to_a_folder(finished: Path, tmp_path: Path, splits: Splits) -> None:
    folder = copy(finished, tmp_path / "run")
    config, before = folder.config(), (folder / "results.json").read_bytes()
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        for attempt in (
            lambda: run(config, folder.path, overwrite=True, splits=splits),
            lambda: run(config, folder.path, resume=True, splits=splits),
            lambda: reevaluate(folder.path, splits=splits),
        ):
            with pytest.raises(RunError, match="another process is writing to"):
                attempt()
        other.kill()  # the lock goes with the process
    assert (folder / "results.json").read_bytes() == before
    reevaluate(folder.path, splits=splits)


def before_the_lock(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Let another process lock a folder, do its work and end, just before this one locks it."""
    locked = RunDir.locked

    def late(folder: RunDir) -> Any:
        monkeypatch.setattr(RunDir, "locked", locked)
        work()
        return locked(folder)

    monkeypatch.setattr(RunDir, "locked", late)


def test_a_run_that_ended_before_the_lock_is_not_overwritten(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_lock(monkeypatch, lambda: run(make(seed=1), tmp_path / "run", splits=splits))
    with pytest.raises(RunError, match="holds a finished run"):
        run(make(seed=2), tmp_path / "run", splits=splits)
    assert load_run(tmp_path / "run").config.seed == 1


def test_a_run_replaced_before_the_lock_is_measured_under_its_own_name(
    finished: Path, make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = copy(finished, tmp_path / "run"), make("edl", seed=3)
    before_the_lock(monkeypatch, lambda: run(other, folder.path, overwrite=True, splits=splits))
    assert reevaluate(folder.path, splits=splits)["method"] == "edl"
    assert folder.results()["seed"] == 3


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("lpbnn.training.rundir.fcntl.flock", flock)
    with (
        pytest.warns(UserWarning, match="cannot be locked .*No locks"),
        RunDir(tmp_path / "a").locked(),
    ):
        assert (tmp_path / "a").is_dir()


def test_a_folder_is_locked_before_the_checks_and_leaves_nothing_if_they_fail(
    make: Make, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: Any) -> None:
        with RunDir(tmp_path / "new" / "run").locked():
            pass

    monkeypatch.setattr("lpbnn.training.run.preflight", begin)
    with pytest.raises(RunError, match="another process is writing to"):
        run(make(), tmp_path / "new" / "run", splits=splits)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_written_to_says_so_whatever_is_asked(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    """And not that its run could be resumed."""
    config = make()
    RunDir(tmp_path).prepare(config, DataInfo.of(splits))
    for resume in (False, True):
        with (
            RunDir(tmp_path).locked(),
            pytest.raises(RunError, match="another process is writing to"),
        ):
            run(config, tmp_path, resume=resume, splits=splits)


def killed_at(operation: int, work: Callable[[], object]) -> bool:
    """Do work in a child that is killed at the n-th operation on files; False if it was not."""
    child = os.fork()
    if child == 0:
        count, fsync, rename = 0, os.fsync, Path.replace

        def counted(function: Callable[..., Any], before: bool) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal count
                count += 1
                found = None if before and count == operation else function(*args)
                if count == operation:
                    os._exit(KILLED)
                return found

            return call

        os.fsync, Path.replace = counted(fsync, True), counted(rename, False)  # type: ignore[method-assign]
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.mark.slow
def test_a_run_killed_at_any_write_goes_on_to_the_same_end(
    make: Make, splits: Splits, tmp_path: Path
) -> None:
    config = make(epochs=1)
    through = RunDir(tmp_path / "through")
    run(config, through.path, splits=splits)
    expected, kills, restarted = through.state_dict(), 0, 0
    while True:
        folder = RunDir(tmp_path / str(kills))
        if not killed_at(kills + 1, lambda: run(config, folder.path, splits=splits)):  # noqa: B023
            break
        kills += 1
        begun = folder.state() != "empty"
        restarted += not begun
        results = run(config, folder.path, resume=begun, splits=splits)
        assert results["test"] == through.results()["test"]
        assert all(torch.equal(expected[key], value) for key, value in folder.state_dict().items())
        assert sorted(p.name for p in folder.path.iterdir()) == sorted(
            {*FILES} - {CONFORMAL}
        )  # nothing left over
    assert kills > 30
    assert 3 <= restarted < 12  # before the config is there


def calibrated(folder: RunDir, splits: Splits) -> dict[str, Any]:
    return calibrate_run(folder.path, splits=splits, sets="lac")


def test_results_of_other_weights_are_told_until_it_is_calibrated_again(
    finished: Path, tmp_path: Path, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = (copy(finished, tmp_path / name) for name in ("whole", "run"))
    expected = calibrated(whole, splits)
    with monkeypatch.context() as patch:
        patch.setattr("lpbnn.training.calibrate.measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrated(folder, splits)
    for read in (folder.results, lambda: reevaluate(folder.path, splits=splits)):
        with pytest.raises(
            RunError, match=r"not of the weights.safetensors .* Fix: lpbnn calibrate"
        ):
            read()
    assert calibrated(folder, splits)["test"] == expected["test"] == folder.results()["test"]


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_calibration_killed_at_any_write_is_told_or_whole(
    finished: Path, tmp_path: Path, splits: Splits
) -> None:
    whole = copy(finished, tmp_path / "whole")
    before, after = whole.results()["test"], calibrated(whole, splits)["test"]
    kills = told = 0
    while True:
        folder = copy(finished, tmp_path / str(kills))
        if not killed_at(kills + 1, lambda: calibrated(folder, splits)):  # noqa: B023
            break
        kills += 1
        try:
            same = load_run(folder.path).model.likelihood.scaling is None
            assert folder.results()["test"] == (before if same else after)
        except RunError:
            told += 1
        assert calibrated(folder, splits)["test"] == after
    assert kills > 20
    assert told > 10


def test_overwriting_killed_at_any_write_can_be_overwritten_again(
    finished: Path, tmp_path: Path, splits: Splits
) -> None:
    config = RunDir(finished).config()
    for operation in (1, 2, 3, 5, 8, 13):
        folder = copy(finished, tmp_path / str(operation))
        again = lambda: run(config, folder.path, overwrite=True, splits=splits)  # noqa: B023, E731
        assert killed_at(operation, again)
        assert again()["test"] == RunDir(finished).results()["test"]


def test_a_killed_clear_leaves_what_can_be_overwritten(
    finished: Path, tmp_path: Path, splits: Splits
) -> None:
    config = RunDir(finished).config()
    for left in range(len(FILES)):
        folder = copy(finished, tmp_path / str(left))
        for name in FILES[left:]:
            (folder / name).unlink(missing_ok=True)
        run(config, folder.path, overwrite=True, splits=splits)
        assert load_run(folder.path).config == config


def test_a_folder_with_a_users_own_files_is_no_run(tmp_path: Path) -> None:
    for name, content in (("data.json", "{}"), ("manifest.json", '{"name": "app"}')):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(RunError):
            RunDir(folder).state()


def test_temporary_names_cannot_be_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    rename = Path.replace
    monkeypatch.setattr(Path, "replace", lambda a, b: (seen.append(a.name), rename(a, b))[1])
    for _ in range(3):
        write_atomic(tmp_path / "a", b"x")
    assert len(set(seen)) == 3


def test_a_pipe_in_the_place_of_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tensorboard")
    RunDir(tmp_path).clear()
    assert (tmp_path / "tensorboard").exists()


def test_a_clear_stopped_at_any_file_leaves_what_is_still_known_as_a_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a config, what is left must be in the manifest, or it would count as somebody else's."""
    unlink = Path.unlink
    for most in range(len(FILES)):
        folder, done = copy(finished, tmp_path / str(most)), []

        def stopped(path: Path, missing_ok: bool = False) -> None:
            if len(done) == most:  # noqa: B023
                raise KeyboardInterrupt
            done.append(path)  # noqa: B023
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", stopped)
        with pytest.raises(KeyboardInterrupt):
            folder.clear()
        monkeypatch.setattr(Path, "unlink", unlink)
        assert folder.state() in ("empty", "unfinished", "finished")


def test_a_process_that_is_refused_leaves_the_folder_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no folder; the other one made and locked it first, and has written nothing yet."""
    path, mkdir = tmp_path / "run", Path.mkdir
    with ExitStack() as other:

        def overtaken(self: Path, *args: Any, **options: Any) -> None:
            monkeypatch.undo()
            other.enter_context(RunDir(path).locked())
            mkdir(self, *args, **options)

        monkeypatch.setattr(Path, "mkdir", overtaken)
        for _ in range(2):
            with pytest.raises(RunError, match="another process is writing"), RunDir(path).locked():
                pass
            assert path.is_dir()


def test_a_folder_that_was_removed_before_it_was_locked_is_made_and_locked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process made it, was stopped, and removed the empty folder."""
    path, flock = tmp_path / "run", rundir.fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.undo()
        path.rmdir()
        flock(handle, operation)

    monkeypatch.setattr(rundir.fcntl, "flock", late)
    with RunDir(path).locked():
        assert path.is_dir()
        with pytest.raises(RunError, match="another process is writing"), RunDir(path).locked():
            pass


def test_a_folder_that_is_removed_while_it_is_looked_at_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was refused its data, and removes the folder that it made."""
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert RunDir(tmp_path / "run").state() == "empty"
