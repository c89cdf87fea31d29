r"""A Deep Ensemble from finished runs of the plain network: it is measured, and never trained.

$$p(y|x) = \tfrac1J \sum_j p(y|x, W_j), \quad W_j \text{ the final weights of run } j$$

The folder is an ordinary finished run of the method "ensemble": the first run's config and seed, all the
weights, measured by the code that measures every run. Its training is that of its members, one after the
other: their seconds together, their largest memory. ``results["train"]["joined"]`` names each member's
folder, seed and commit.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lpbnn.data import Splits
from lpbnn.methods.ensemble import from_members
from lpbnn.training.build import DataInfo, load_data, resolved
from lpbnn.training.config import RunConfig, changes
from lpbnn.training.distributed import ending_well, launch
from lpbnn.training.environment import environment
from lpbnn.training.files import RunError
from lpbnn.training.run import load_run, measured
from lpbnn.training.rundir import RunDir

PLAIN = "mcp"  # one deterministic network with nothing around it: what ``from_members`` takes


class Member(NamedTuple):
    """A finished run, as far as it was read; ``session`` is the start that finished it."""

    folder: RunDir
    config: RunConfig
    data: DataInfo
    train: dict[str, Any]
    session: dict[str, Any]


def ensemble_from_runs(
    runs: Sequence[str | Path],
    folder: str | Path,
    splits: Splits | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Make a Deep Ensemble of finished runs, measure it and write it to ``folder``; returns its results.

    Args:
        runs: folders of runs of the plain network that differ in their seeds only.
        splits: the data, where it is at hand; otherwise the runs' config says what to load.
        trust: import the modules that the runs' config names (MODULE:NAME).

    >>> import tempfile
    >>> from lpbnn.training.run import run
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for seed in (0, 1):
    ...         config = RunConfig("mcp", seed=seed, epochs=1, device="cpu", progress=False)
    ...         _ = run(config, f"{place}/mcp-{seed}")
    ...     results = ensemble_from_runs(
    ...         [f"{place}/mcp-0", f"{place}/mcp-1"], f"{place}/ensemble-0"
    ...     )
    >>> results["method"], results["cost"]["members"], results["train"]["joined"][1]["seed"]
    ('ensemble', 2, 1)
    """
    members = [_read(RunDir(run)) for run in runs]  # first: a folder of runs is told apart
    if len(runs) < 2:
        given = f"got {runs[0]} alone" if runs else "got none"
        raise RunError(
            f"an ensemble is joined from two runs or more; {given}. Fix: lpbnn join RUN RUN ... -o DIR"
        )
    _require_alike(members)
    for member in members:
        member.folder.require_trust(trust)
    target = RunDir(folder)
    _require_empty(target)
    config = ensemble_config([member.config for member in members])
    splits = splits if splits is not None else load_data(config)
    info = DataInfo.of(splits)
    _require_data(members, info)
    model = from_members([load_run(member.folder.path, trust=True).model for member in members])
    fabric = launch(config, alone=True)
    early = "stopped before anything was written. Start it again the same way."
    with ending_well(fabric, lambda: early):
        found = measured(model, splits, config, fabric, _training(members))
    here = environment(fabric.device, fabric.world_size)
    beside = max(here["beside"], *(member.session.get("beside", 1) for member in members))
    with target.locked():
        _require_empty(target)  # still
        target.save_weights(model)
        target.write_arrays(found.arrays)
        target.add_session({**here, "beside": beside})
        target.write_results(found.results)
        # The config goes last: with it and no results, the folder would look like a run to be resumed.
        target.prepare(config, info)
    return target.results()


def ensemble_config(members: Sequence[RunConfig]) -> RunConfig:
    """Return what ``lpbnn train --method ensemble`` with the members' settings would have written."""
    options = {"members": len(members)}
    return resolved(replace(members[0], method="ensemble", method_options=options))


def _require_empty(target: RunDir) -> None:
    if target.state() != "empty":
        raise RunError(f"{target.path} holds a run already. Fix: give a new or empty folder.")


def _read(folder: RunDir) -> Member:
    results = folder.results()  # first: it says what a folder lacks that is no finished run
    config, train = folder.config_as_measured(), results["train"]
    if config.method != PLAIN:
        raise RunError(
            f"{folder.path} is a run of {config.method!r}; expected {PLAIN!r}, one plain network. Fix: "
            f"train the members with --method {PLAIN}, a seed each."
        )
    if train["diverged"] is not None:
        raise RunError(
            f"the run in {folder.path} diverged in epoch {train['diverged']}; expected networks that were "
            "trained to their end. Fix: leave it out, or train another seed."
        )
    return Member(folder, config, folder.data(), train, (folder.sessions() or [{}])[-1])


def _require_alike(members: Sequence[Member]) -> None:
    """Refuse runs that differ in more than their seeds, as far as that needs neither weights nor data."""
    first, seeds = members[0], {members[0].config.seed: members[0].folder.path}
    for member in members[1:]:
        path, seed = member.folder.path, member.config.seed
        if changed := changes(first.config, member.config, "seeds"):
            raise RunError(
                f"{first.folder.path} and {path} differ in more than their seeds: {'; '.join(changed)}. "
                "Fix: join runs of the same settings (lpbnn eval RUN ... measures one like the others)."
            )
        if seed in seeds:
            raise RunError(
                f"{seeds[seed]} and {path} are the same run: all settings and the seed, {seed}. Fix: give "
                "runs of different seeds, each once."
            )
        seeds[seed] = path
    _require_data(members[1:], first.data)


def _require_data(members: Sequence[Member], expected: DataInfo) -> None:
    """Refuse members that learned from other data than is at hand, or than the first one did."""
    for member in members:
        if changed := changes(member.data, expected, "data"):
            raise RunError(
                f"{member.folder.path} was trained on other data (there -> here): {'; '.join(changed)}. "
                "Fix: join runs of the same data, with the same files in its folder."
            )


def _training(members: Sequence[Member]) -> dict[str, Any]:
    """Return the cost of training the members, one after the other."""
    parts = [member.train for member in members]
    speeds = [part["images_per_second"] for part in parts]
    epochs = [part["epoch_seconds"] for part in parts if part["epoch_seconds"] is not None]
    return {
        **{key: parts[0][key] for key in ("epochs", "of", "diverged")},
        "seconds": sum(part["seconds"] for part in parts),
        "images_per_second": 1 / sum(1 / v for v in speeds) if all(speeds) else None,
        "epoch_seconds": sum(epochs) if len(epochs) == len(parts) else None,
        "peak_bytes": max(part["peak_bytes"] for part in parts),
        "last": {},  # it has no log
        "joined": [
            {
                "run": member.folder.path.resolve().name,
                "seed": member.config.seed,
                **{key: member.session.get(key) for key in ("commit", "dirty")},
            }
            for member in members
        ],
    }
