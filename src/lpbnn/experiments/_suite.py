"""Runs of an experiment: in parallel, skipped if finished, resumed if stopped; and the output."""

import functools
import gc
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lpbnn import data
from lpbnn.data import Splits
from lpbnn.experiments import published
from lpbnn.experiments._suite_options import SuiteOptions
from lpbnn.training import RunConfig
from lpbnn.training.build import load_data
from lpbnn.training.environment import BESIDE
from lpbnn.training.files import RunError, runs_under
from lpbnn.training.run import run
from lpbnn.training.rundir import RunDir

T = TypeVar("T")

if TYPE_CHECKING:
    from lpbnn.report import PaperTable, Table
    from lpbnn.report.runs import Run

    MakeTable = Callable[[Sequence[Run], PaperTable | None], Table]


def work(
    given: SuiteOptions,
    configs: Callable[[], Mapping[str, RunConfig]],
    console: Console,
    methods: Collection[str] = (),
    backbones: Collection[str | None] = (),
) -> list["Run"]:
    """Return the runs of an experiment: trained where they are missing, or read from ``--from``.

    Args:
        given: the options of the experiment.
        configs: makes the settings of the runs by name.
        methods: of the runs that are read, only those of these methods; none given: all.
        backbones: likewise.
    """
    from lpbnn.report.runs import read_runs

    if given.source is None:
        return read_runs(run_all(configs(), given.out, console, given.jobs))
    found = runs_under(given.source) or [given.source]
    fitting = read_runs([run for run in found if not RunDir(run).is_stopped()] or found)
    for option, names in (("method", methods), ("backbone", backbones)):
        wanted = [name for name in names if name is not None]
        there = sorted({run.at(option) for run in fitting})
        fitting = [run for run in fitting if not wanted or run.at(option) in wanted]
        if not fitting:
            raise RunError(
                f"{given.source} has runs of {', '.join(there)}; expected {', '.join(wanted)}. "
                f"Fix: give another folder, or another {option}."
            )
    return fitting


def show(
    runs: Sequence["Run"],
    report: Path,
    console: Console,
    title: str,
    table: "MakeTable",
    paper: "PaperTable | None" = None,
    more: "Callable[[Sequence[Run]], list[str]]" = lambda runs: [],
) -> Path:
    """Print a table and write a page per data set, network and schedule, with the paper's numbers.

    Args:
        paper: numbers to stand beside ours; None for those of the paper on the same data and network.
        more: lines to print below the table.
    """
    from lpbnn.report import print_table, tell_report
    from lpbnn.report.runs import by_setting

    tables = by_setting(runs)
    written = report
    for setting, part in tables.items():
        reference = paper or published(part[0].data.name, part[0].settings["backbone"])
        if reference is not None:
            part.sort(key=lambda run, order=reference: order.place(run.title, run.method))
        console.print(f"{title}: {setting}", style="bold")
        print_table(table(part, reference), console)
        for line in more(part):
            console.print(line, highlight=False)
        if len(tables) > 1:
            own = "-".join(setting.replace(",", "").split())
            written = report.with_name(f"{report.stem}-{own}.html")
        tell_report(
            part,
            written,
            console,
            title=f"{title}: {setting}",
            reference=reference,
            lead="the whole report, with its figures:",
        )
    return written


def run_all(
    configs: Mapping[str, RunConfig],
    out: Path,
    console: Console,
    jobs: int | None = None,
) -> list[Path]:
    """Train and evaluate every config in ``out/name``.

    A run that fails (out of memory, say) does not stop the others; bad input does.

    Args:
        jobs: number of parallel runs; None: one per core, or one on a GPU.

    Returns:
        The folder of each run, in the given order.
    """
    places = {name: out / name for name in configs}
    _require_data(config for name, config in configs.items() if not _is_finished(places[name]))
    if jobs is None:
        jobs = 1 if torch.cuda.is_available() else min(len(configs), os.cpu_count() or 1)
    broken: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("runs", total=len(configs))

        def done(name: str, problem: str) -> None:
            if problem:
                broken[name] = problem
                console.print(f"[red]{escape(name)} broke:[/] {escape(problem)}")
            elif not console.is_terminal:  # there is no bar: a line each
                line = f"{escape(name)}: {_took(places[name])}"
                console.print(line, highlight=False, soft_wrap=True)
            bar.update(task, advance=1, description=name)

        try:
            if jobs <= 1:
                for name, config in configs.items():
                    bar.update(task, description=name)
                    done(name, _one(config, places[name]))
            else:
                _train_in_processes(configs, places, jobs, done)
        finally:
            _loaded.cache_clear()  # frees the memory
    if broken:
        lines = "".join(f"\n  {name}: {problem}" for name, problem in broken.items())
        raise RunError(
            f"{len(broken)} of {len(configs)} runs broke:{lines}\nFix their cause and give the same "
            "command again: the finished ones are not made again."
        )
    return list(places.values())


def _is_finished(folder: Path) -> bool:
    return RunDir(folder).state() == "finished"


def _require_data(configs: Iterable[RunConfig]) -> None:
    """Raise if files are missing, before processes start that would take seconds to find out."""
    for name, root in dict.fromkeys((config.data, config.data_root) for config in configs):
        data.require_files(name, root)


def _train_in_processes(
    configs: Mapping[str, RunConfig],
    places: Mapping[str, Path],
    jobs: int,
    done: Callable[[str, str], None],
) -> None:
    threads = max(1, (os.cpu_count() or 1) // jobs) if torch.cuda.is_available() else 1
    pool = _pool(jobs, threads, min(jobs, len(configs)))
    try:
        futures: dict[Future[str], str] = {
            pool.submit(_one, config, places[name]): name for name, config in configs.items()
        }
        for future in as_completed(futures):
            done(futures[future], future.result())
    except BrokenExecutor as error:
        raise RunError(
            f"a process of the {jobs} side by side was killed: out of memory? Fix: give the same "
            "command with fewer --jobs; what is finished is not made again."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def in_processes(works: Sequence["Callable[[], T]"], jobs: int | None = None) -> "list[T]":
    """Return what the functions return, each called in a process with one thread.

    Args:
        works: functions of a module, without arguments; the longest first.
        jobs: number of processes; None: one per core.
    """
    jobs = jobs or min(len(works), os.cpu_count() or 1)
    with _pool(jobs, 1, jobs) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def _pool(jobs: int, threads: int, beside: int) -> ProcessPoolExecutor:
    """Return processes, spawned because a forked torch hangs in its thread pool; see ``_start``."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, _start, (threads, beside))


def _data(config: RunConfig) -> Splits:
    """Return the data of a run, read once for consecutive runs on the same files."""
    return _loaded(config.data, config.data_root, json.dumps(config.data_options, sort_keys=True))


@functools.lru_cache(maxsize=1)
def _loaded(name: str, root: str | None, options: str) -> Splits:
    return load_data(RunConfig(data=name, data_root=root, data_options=json.loads(options)))


def _took(folder: Path) -> str:
    """Return the duration of a run in words."""
    results = RunDir(folder).results()
    spent = f"trained {results['train']['seconds']:.0f} s"
    diverged = f" (diverged in epoch {at})" if (at := results["train"]["diverged"]) else ""
    return f"{spent}{diverged}, measured {results['evaluate_seconds']:.0f} s"


def end_with_the_command() -> None:
    """End this process when the command that started it has ended.

    Ctrl-C reaches every process, but a kill only the command: its runs would continue unnoticed.
    """
    command = multiprocessing.parent_process()

    def watch() -> None:
        if command is not None:
            command.join()
            os._exit(1)  # run folders are whole at any moment

    threading.Thread(target=watch, daemon=True).start()


def _start(threads: int, jobs: int) -> None:
    end_with_the_command()
    torch.set_num_threads(threads)
    # The user may have set a larger number because of other commands.
    os.environ[BESIDE] = str(max(jobs, int(os.environ.get(BESIDE, 1))))


def _one(config: RunConfig, folder: Path) -> str:
    """Train a run, resume a stopped one, or evaluate a finished one again if its settings changed.

    Returns:
        The error message, or "" for a run that ended, also by diverging.
    """
    try:
        splits = None if _is_finished(folder) else _data(config)
        run(replace(config, progress=False), folder, resume=folder.exists(), splits=splits)
    except RuntimeError as error:
        return (str(error).strip() or repr(error)).splitlines()[0]
    finally:
        # Models have reference cycles: without a collection the next run's peak memory would include this one.
        if config.compile:
            torch.compiler.reset()
        gc.collect()
    return ""
