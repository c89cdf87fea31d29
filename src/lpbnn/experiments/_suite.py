"""Many runs as one piece of work: side by side on the cores, skipped where finished, resumed where not."""

import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lpbnn.engine import RunConfig
from lpbnn.engine.run import run


def run_all(
    configs: Mapping[str, RunConfig], out: Path, console: Console, jobs: int | None = None
) -> list[Path]:
    """Train and evaluate every config into ``out/name``; returns the folders, in the given order.

    On a CPU ``jobs`` runs go side by side, one thread each (None: as many as there are cores); a GPU
    takes them one after the other.
    """
    if jobs is None:
        jobs = 1 if torch.cuda.is_available() else min(len(configs), os.cpu_count() or 1)
    folders = {name: out / name for name in configs}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=len(configs))
        if jobs == 1:
            for name, config in configs.items():
                bar.update(task, description=name)
                _one(config, folders[name])
                bar.advance(task)
        else:
            _in_processes(configs, folders, jobs, bar, task)
    return list(folders.values())


def _in_processes(
    configs: Mapping[str, RunConfig],
    folders: Mapping[str, Path],
    jobs: int,
    bar: Progress,
    task: Any,
) -> None:
    # Spawned, because a forked torch hangs in its thread pool.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures: dict[Future[None], str] = {
            pool.submit(_one, config, folders[name]): name for name, config in configs.items()
        }
        for future in as_completed(futures):
            future.result()
            bar.update(task, description=futures[future])
            bar.advance(task)
    finally:
        pool.shutdown(cancel_futures=True)


def _one(config: RunConfig, folder: Path) -> None:
    """A finished run is kept (measured again if other measures are asked for), a stopped one resumed."""
    run(replace(config, progress=False), folder, resume=folder.exists())
