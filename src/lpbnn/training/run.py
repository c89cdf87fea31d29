"""From a config to a finished run folder, and from the folder back to the model."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import checkpoint
from lpbnn.training.build import DataInfo, build_model, load_data, require_size, resolved
from lpbnn.training.config import EvalConfig, RunConfig, changes
from lpbnn.training.distributed import Ranks, ending_well, launch
from lpbnn.training.environment import environment
from lpbnn.training.evaluation import Evaluation, evaluate
from lpbnn.training.evaluator import NotFinite
from lpbnn.training.files import RunError
from lpbnn.training.loop import Training, fit
from lpbnn.training.preflight import check_corruptions, preflight
from lpbnn.training.rundir import WEIGHTS, RunDir

if TYPE_CHECKING:
    from lightning.fabric import Fabric

Plan = Literal["fresh", "resume", "finished"]
FORMAT = 1  # of results.json; raised when a key changes its meaning


class LoadedRun(NamedTuple):
    """A run, read back: the trained model, its config, and what of its data it depends on."""

    model: UncertainModel
    config: RunConfig
    data: DataInfo


def run(
    config: RunConfig | None,
    folder: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    splits: Splits | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Train, evaluate and write everything to ``folder``; the results are returned.

    Args:
        config: None reads the folder's own, to resume it.
        resume: go on where a stopped run was; a finished one just gives its results.
        overwrite: begin anew in the folder of another run, whose files are removed.
        splits: the data, where it is at hand; otherwise the config says what to load.
        trust: import the modules that the folder's own config names (MODULE:NAME).

    With several processes, all train; rank 0 measures and writes, the others return an empty dictionary.

    >>> import tempfile
    >>> config = RunConfig("mcp", backbone="mlp", epochs=1, device="cpu", progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = run(config, folder)
    ...     model, _, data = load_run(folder)
    >>> results["train"]["epochs"], model.members, data.num_classes
    (1, 1, 10)
    """
    target = RunDir(folder)
    if config is None:
        target.require_trust(trust)
    config = target.config_as_measured() if config is None else resolved(config)
    fabric = launch(config)
    early = "stopped before anything was trained or measured. Start it again the same way."
    with ending_well(fabric, lambda: early), ExitStack() as lock:
        return _run(config, target, fabric, lock, resume, overwrite, splits)


def _run(
    config: RunConfig,
    target: RunDir,
    fabric: "Fabric",
    lock: ExitStack,
    resume: bool,
    overwrite: bool,
    splits: Splits | None,
) -> dict[str, Any]:
    """Run in one process; rank 0 holds the lock of the folder until ``lock`` is closed."""
    ranks = Ranks(fabric)

    def plan() -> Plan:
        lock.enter_context(target.locked())
        return _plan(config, target, resume, overwrite)

    def begin() -> None:
        if planned == "fresh":
            target.clear()
        target.prepare(config, info)
        target.add_session(environment(fabric.device, fabric.world_size))

    planned = ranks.rank_zero(plan)
    if planned == "finished" and config.to_data()["evaluate"] == target.results()["evaluate"]:
        return target.results()
    with fabric.rank_zero_first(local=True):  # one process of a node fetches files, the others read
        splits = splits if splits is not None else load_data(config)
    info = DataInfo.of(splits)
    if planned != "fresh":
        target.require_data(info)
    if planned == "finished":  # trained already, but measured otherwise
        return _measure_again(target, config, splits, fabric) if fabric.is_global_zero else {}
    model = build_model(config, info)
    preflight(model, config, splits, info, fabric.world_size)
    ranks.rank_zero(begin)
    training = fit(model, splits, config, fabric, target, resume=planned == "resume")
    if not fabric.is_global_zero:
        return {}
    over = "training is over, the evaluation was stopped. Resume with: lpbnn train --resume"
    with ending_well(fabric, lambda: f"{over} {target.path}"):
        target.save_weights(model)
        return measure(target, model, splits, config, fabric, _train_results(training, config))


def load_run(
    folder: str | Path, device: torch.device | str = "cpu", trust: bool = False
) -> LoadedRun:
    """Return the model of a trained run; its data is not needed.

    ``lpbnn.predict(loaded.model, loaded.data.normalise(images))`` predicts for raw inputs.

    Args:
        trust: import the module of the run's own backbone (MODULE:NAME), which runs that module's code.
    """
    source = RunDir(folder)
    source.require_trust(trust)
    config, info = source.config(), source.data()
    # The folder has its own weights: the file that some of them began with need not be there.
    options = {k: v for k, v in config.backbone_options.items() if k != "pretrained"}
    measured = source.config_as_measured().evaluate  # its score is the one of the results
    config_here = replace(config, backbone_options=options, evaluate=measured)
    weights = source.state_dict()
    try:
        require_size(config_here, info, sum(tensor.numel() for tensor in weights.values()))
        model = build_model(config_here, info)
    except Exception as error:  # a stored config can have options of any kind and size
        raise RunError(f"{source.path}: its config cannot be built: {error}") from error
    checkpoint.restore(model, weights, str(source / WEIGHTS))
    return LoadedRun(model.to(device).eval(), config, info)


def reevaluate(
    folder: str | Path,
    settings: EvalConfig | None = None,
    splits: Splits | None = None,
    data_root: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Measure a trained run again, with other settings if given; the folder keeps the new results."""
    with finished(folder, splits, data_root, trust) as (target, config, splits, fabric):
        config = replace(config, evaluate=settings or config.evaluate)
        return _measure_again(target, config, splits, fabric)


@contextmanager
def finished(
    folder: str | Path,
    splits: Splits | None,
    data_root: str | None,
    trust: bool,
    calibrating: bool = False,
) -> "Iterator[tuple[RunDir, RunConfig, Splits, Fabric]]":
    """Yield the locked folder of a finished run, its config, its data and a fabric of one process."""
    target = RunDir(folder)
    target.results(calibrating)  # an unfinished run is refused before its folder is locked
    with target.locked():  # before the config is read, which another process could replace
        target.require_trust(trust)
        config = target.config_as_measured()
        config = replace(config, data_root=config.data_root if data_root is None else data_root)
        target.results(calibrating)
        splits = splits if splits is not None else load_data(config)
        target.require_data(DataInfo.of(splits))
        yield target, config, splits, launch(config, alone=True)


def _measure_again(
    target: RunDir, config: RunConfig, splits: Splits, fabric: "Fabric"
) -> dict[str, Any]:
    check_corruptions(config.evaluate, DataInfo.of(splits))
    model = load_run(target.path, trust=True).model
    results, again = target.results(), environment(fabric.device, fabric.world_size)
    # A calibration is part of the weights.
    known = {key: results[key] for key in ("calibration",) if key in results}
    train = results["train"]
    return measure(target, model, splits, config, fabric, train, measured_again=again, **known)


def _plan(config: RunConfig, target: RunDir, resume: bool, overwrite: bool) -> Plan:
    """Return what is to be done; a ``RunError`` if the folder forbids what is asked."""
    if resume and overwrite:
        raise RunError("resume and overwrite exclude each other. Fix: give one of them.")
    state = target.state()
    if state == "empty" or overwrite:
        return "fresh"
    if not resume:
        what = "a finished run" if state == "finished" else "an unfinished run"
        resume_it = f"resume it (lpbnn train --resume {target.path}), "
        fix = ("" if state == "finished" else resume_it) + "overwrite it (--overwrite)"
        raise RunError(f"{target.path} holds {what}. Fix: {fix}, or give another folder.")
    if changed := changes(target.config(), config, "resume"):
        raise RunError(
            f"the run in {target.path} was started with another config: {'; '.join(changed)}. "
            "Fix: resume it with its own (config=None), or give another folder."
        )
    return "finished" if state == "finished" else "resume"


def _train_results(training: Training, config: RunConfig) -> dict[str, Any]:
    last = training.rows[-1] if training.rows else {}
    seconds = sum(row["seconds"] for row in training.rows)
    images = sum(row["images_per_second"] * row["seconds"] for row in training.rows)
    # Without the first, in which a step is compiled, and one that was broken off.
    epochs = [row["seconds"] for row in training.rows[1 : training.epochs]]
    return {
        "epochs": training.epochs,
        "of": config.epochs,
        "diverged": training.diverged,
        "seconds": training.seconds,
        "images_per_second": images / seconds if seconds else None,
        "epoch_seconds": median(epochs) if epochs else None,
        "peak_bytes": training.peak_memory,
        "last": {k: v for k, v in last.items() if k not in ("images_per_second", "seconds")},
    }


def measure(
    target: RunDir,
    model: UncertainModel,
    splits: Splits,
    config: RunConfig,
    fabric: "Fabric",
    train: dict[str, Any],
    **known: Any,
) -> dict[str, Any]:
    """Evaluate and write; the results last, because they say that the run is finished.

    Args:
        train: results of the training.
        **known: further entries of ``results.json``.
    """
    found = measured(model, splits, config, fabric, train)
    target.write_arrays(found.arrays)
    target.write_results({**found.results, **known})
    return target.results()


def measured(
    model: UncertainModel,
    splits: Splits,
    config: RunConfig,
    fabric: "Fabric",
    train: dict[str, Any],
) -> Evaluation:
    """Return all that ``results.json`` holds, the results of the training included, and the arrays."""
    started = time.perf_counter()
    try:
        found = evaluate(model, splits, config, fabric)
    except NotFinite as error:  # a result as well: the row of the table says that it diverged
        nothing = dict.fromkeys(("test", "uncertainty", "corruption", "cost"))
        parts = {"diversity": {"test": None, "corrupted": None}, "ood": {}}
        found = Evaluation({**nothing, **parts, "error": str(error)}, {})
        train = {**train, "diverged": train["diverged"] or train["epochs"]}
    results = {
        "format": FORMAT,
        "method": config.method,
        "backbone": config.backbone,
        "data": splits.name,
        "task": splits.task,
        "source": splits.source,
        "seed": config.seed,
        "train": train,
        **found.results,
        "evaluate": config.to_data()["evaluate"],
        "evaluate_seconds": time.perf_counter() - started,
    }
    return Evaluation(results, found.arrays)
