"""From a config to a finished run folder, and from the folder back to the model."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import logs
from lpbnn.training.build import DataInfo, build_model, load_data, resolved
from lpbnn.training.config import FREE, EvalConfig, RunConfig, differences
from lpbnn.training.corruption import check_corruptions
from lpbnn.training.environment import environment
from lpbnn.training.evaluate import Evaluation, evaluate
from lpbnn.training.files import RunError
from lpbnn.training.launch import ending_well, launch
from lpbnn.training.optim import matching
from lpbnn.training.rundir import RunDir
from lpbnn.training.tally import NotFinite
from lpbnn.training.train import Training, fit
from lpbnn.training.tryout import try_out

if TYPE_CHECKING:
    from lightning.fabric import Fabric

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

    With several processes, all train and measure, rank 0 alone writes; the others return an empty
    dictionary.

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
    with ending_well(fabric, lambda: early):
        return _run(config, target, fabric, resume, overwrite, splits)


def _run(
    config: RunConfig,
    target: RunDir,
    fabric: "Fabric",
    resume: bool,
    overwrite: bool,
    splits: Splits | None,
) -> dict[str, Any]:
    """The run of one process."""
    plan = _together(fabric, lambda: _plan(config, target, resume, overwrite))
    if plan == "finished":
        if config.to_data()["evaluate"] == target.results()["evaluate"]:
            return target.results()
        # Trained already, but measured otherwise.
        root = config.data_root
        return reevaluate(target.path, config.evaluate, splits, fabric, root, trust=True)
    with fabric.rank_zero_first(local=True):  # one process of a node fetches files, the others read
        splits = splits if splits is not None else load_data(config)
    info = DataInfo.of(splits)
    if plan == "resume":
        target.require_data(info)
    check_corruptions(config.evaluate, info)
    logs.check_tensorboard(config.tensorboard)
    model = build_model(config, info)
    for pattern in config.optim.parts:
        matching(model, pattern)  # told before anything is written
    try_out(model, config, splits, info)
    if fabric.is_global_zero:
        if overwrite and plan == "fresh":
            target.clear()
        target.prepare(config, info)
        target.add_session(environment(fabric.device, fabric.world_size))
    training = fit(model, splits, config, fabric, target, resume=plan == "resume")
    over = "training is over, the evaluation was stopped. Resume with: lpbnn train --resume"
    with ending_well(fabric, lambda: f"{over} {target.path}"):
        if fabric.is_global_zero:
            target.save_weights(model)
        return _measure(target, model, splits, config, fabric, _train_results(training, config))


def load_run(
    folder: str | Path, device: torch.device | str = "cpu", trust: bool = False
) -> LoadedRun:
    """The model of a trained run; its data is not needed.

    With ``trust`` the module of its own backbone (MODULE:NAME) is imported, which runs that module's code.

    ``loaded.data.normalise(images)`` prepares raw inputs, ``lpbnn.predict(loaded.model, x)`` answers.
    """
    source = RunDir(folder)
    source.require_trust(trust)
    config, info = source.config(), source.data()
    # The folder has its own weights: the file that some of them began with need not be there.
    options = {k: v for k, v in config.backbone_options.items() if k != "pretrained"}
    try:
        model = build_model(replace(config, backbone_options=options), info)
    except (ValueError, TypeError) as error:
        raise RunError(f"{source.path}: its config cannot be built: {error}") from error
    source.load_weights(model)
    return LoadedRun(model.to(device).eval(), config, info)


def reevaluate(
    folder: str | Path,
    settings: EvalConfig | None = None,
    splits: Splits | None = None,
    fabric: "Fabric | None" = None,
    data_root: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Measure a trained run again, with other settings where given; the folder keeps the new results."""
    target = RunDir(folder)
    model = load_run(folder, trust=trust).model
    then = target.config_as_measured()
    root = then.data_root if data_root is None else data_root
    config = replace(then, evaluate=settings or then.evaluate, data_root=root)
    train = target.results()["train"]
    splits = splits if splits is not None else load_data(config)
    target.require_data(DataInfo.of(splits))
    fabric = fabric or launch(replace(config, devices=1, nodes=1, strategy="auto"))
    again = environment(fabric.device, fabric.world_size)
    return _measure(target, model, splits, config, fabric, train, measured_again=again)


def _plan(config: RunConfig, target: RunDir, resume: bool, overwrite: bool) -> str:
    """ "fresh", "resume" or "finished"; a ``RunError`` where the folder forbids what is asked."""
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
    before, now = target.config().to_data(), config.to_data()
    changed = [c for c in differences(before, now) if c.split(".")[0].split(":")[0] not in FREE]
    if changed:
        raise RunError(
            f"the run in {target.path} was started with another config: {'; '.join(changed)}. "
            "Fix: resume it with its own (config=None), or give another folder."
        )
    return "finished" if state == "finished" else "resume"


def _together(fabric: "Fabric", decide: Callable[[], str]) -> str:
    """What rank 0 decides, in every process; its error as well, so that none is left waiting."""
    answer: tuple[str, str] = ("", "")
    if fabric.is_global_zero:
        try:
            answer = (decide(), "")
        except RunError as error:
            answer = ("", str(error))
    plan, problem = fabric.broadcast(answer)
    if problem:
        raise RunError(problem)
    return plan


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


def _measure(
    target: RunDir,
    model: UncertainModel,
    splits: Splits,
    config: RunConfig,
    fabric: "Fabric",
    train: dict[str, Any],
    **known: Any,
) -> dict[str, Any]:
    """Evaluate and write; the results go last, because they say that the run is finished."""
    found = measured(model, splits, config, fabric, train)
    if not fabric.is_global_zero:
        return {}
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
    """All that ``results.json`` holds, what is known of the training included, and the arrays."""
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
