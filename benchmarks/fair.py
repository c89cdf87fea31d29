"""The fair comparison: settings chosen by one rule on held-out images, then five seeds.

The plan is in docs/results/protocol.md.
``python -m benchmarks.fair --data-root DIR --out runs/fair`` trains in several processes on one device, in
a fixed order, until everything is done or ``--seconds`` are over; the same command goes on where it stopped.
``--out`` then holds a JSON and an NPZ for every run.

``--schedule paper --trials runs/fair --backbone wrn-28-10`` trains with the paper's schedule and the settings
that the trials in another folder chose: trials of 250 epochs would cost more than the runs that they serve.
"""

import gc
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.archive import read_json, write_json
from lpbnn import data
from lpbnn.calibration import fit_noise_scale, fit_scaling
from lpbnn.data import Splits
from lpbnn.data._download import unpickle
from lpbnn.data.corruptions import CORRUPTIONS, corrupt
from lpbnn.metrics import ClassificationMetrics, DetectionMetrics, corruption_means
from lpbnn.model import UncertainModel
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.checkpoint import channels_last
from lpbnn.training.config import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.training.distributed import launch
from lpbnn.training.environment import BESIDE, environment
from lpbnn.training.evaluator import Predictor
from lpbnn.training.loop import fit

Options = dict[str, Any]
Probs = dict[str, Tensor]

# Two settings of every method: what most decides its accuracy and its noise. "weight_decay" is the
# optimizer's, the others are the method's options.
CANDIDATES: dict[str, tuple[Options, Options]] = {
    "lpbnn": ({"log_variance": -2.0}, {"log_variance": -1.0}),
    "lpbnn-paper": ({"variant": "paper"}, {"variant": "paper", "init_std": 0.1}),
    "rank1": ({"init_std": 0.1}, {"init": "signs"}),
    "batchensemble": ({"init_std": 0.1}, {"init_std": 0.25}),
    "mcdropout": ({"rate": 0.1}, {"rate": 0.05}),
    "mcp": ({"weight_decay": 5e-4}, {"weight_decay": 1e-3}),
    "meanfield": ({"prior_std": 0.1, "std": 1e-3}, {"prior_std": 0.1, "std": 1e-2}),
    "edl": ({"risk": "digamma"}, {"risk": "log_marginal"}),
}
# The part of the other CIFAR that is out of distribution: its name and its file.
OTHER = {
    "cifar10": ("cifar100", "cifar-100-python/test"),
    "cifar100": ("cifar10", "cifar-10-batches-py/test_batch"),
}
LATE = ("edl", "rank1", "lpbnn-paper", "meanfield")  # the last to get more than two seeds
SAMPLES = 4  # draws of each member of a stochastic method
TIE = 1e-3  # held-out NLL closer than this: the more accurate setting
TINY = 1e-30  # a probability's floor under its logarithm


@dataclass(frozen=True)
class Plan:
    """Everything that decides the numbers, and how long to work on them."""

    data_root: Path
    out: Path
    seconds: float = math.inf
    """Runs that have not ended in this time are lost; the others are kept."""
    workers: int = 1
    """Processes that share the device."""
    methods: tuple[str, ...] = tuple(CANDIDATES)
    seeds: int = 5
    data: Literal["cifar10", "cifar100"] = "cifar10"
    backbone: str = "wrn-16-4"
    schedule: Literal["short", "paper"] = "short"
    """short: 30 epochs, cosine, weight decay 5e-4. paper: 250 epochs, three steps, weight decay 1e-4."""
    trials: Path | None = None
    """A folder whose trials choose the settings; None runs the trials of this plan."""
    epochs: int | None = None
    """None is the number of the schedule."""
    batch_size: int = 128
    train: int | None = None
    """Only so many training images: to try the command."""
    images: int | None = None
    """At most so many images of every set that is measured."""
    corruption_images: int = 1000
    severities: tuple[int, ...] = (1, 3, 5)
    graph: bool = True

    @property
    def length(self) -> int:
        """The number of epochs."""
        return self.epochs or {"short": 30, "paper": 250}[self.schedule]

    @property
    def outside(self) -> tuple[str, str]:
        """The names of the two sets that are out of distribution."""
        return ("svhn", OTHER[self.data][0])


@dataclass(frozen=True)
class Job:
    """A training with one setting: a trial, or a final run that is measured on the test set."""

    method: str
    candidate: int
    seed: int
    final: bool

    @property
    def name(self) -> str:
        return f"{'final' if self.final else 'trial'}-{self.method}-{self.candidate}-{self.seed}"

    @property
    def options(self) -> Options:
        return CANDIDATES[self.method][self.candidate]

    @property
    def library_method(self) -> str:
        """The name that the library knows: a variant has a row of its own."""
        return self.method.partition("-")[0]


def run_config(plan: Plan, job: Job) -> RunConfig:
    """Return the config of a run; only the method, its setting and the seed differ between runs."""
    options = dict(job.options)
    decay = options.pop("weight_decay", 5e-4)
    schedule = ScheduleConfig("cosine", warmup=min(2.0, plan.length / 4))
    if plan.schedule == "paper":
        decay = 1e-4  # for all methods: what MCP's trials chose belongs to the short schedule
        steps = {round(share * plan.length) for share in (0.32, 0.64, 0.8)}
        schedule = ScheduleConfig("step", milestones=tuple(sorted(steps)))
    cuda = torch.cuda.is_available()
    return RunConfig(
        method=job.library_method,
        method_options=options,
        backbone=plan.backbone,
        data=plan.data,
        seed=job.seed,
        epochs=plan.length,
        batch_size=plan.batch_size,
        drop_last=True,
        optim=OptimConfig(lr=0.1, weight_decay=decay),
        schedule=schedule,
        augment=AugmentConfig(cutout={"cifar10": 16, "cifar100": 8}[plan.data]),
        evaluate=EvalConfig(samples=SAMPLES, batch_size=1000, chunk=8000),
        precision="bf16" if cuda else "32",
        channels_last=cuda,
        graph=plan.graph,
        validate_every=0,
        progress=False,
    )


# ---------------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Images:
    """The splits, and every set that is measured: name to images."""

    splits: Splits
    measured: dict[str, Tensor]
    labels: dict[str, Tensor]


def load_images(plan: Plan) -> Images:
    """Load a CIFAR with 5,000 held-out images, SVHN, and the test part of the other CIFAR."""
    splits = data.load(plan.data, str(plan.data_root), val=5000, checksum="any")
    if plan.train is not None:
        splits = replace(splits, train=splits.train.take(slice(plan.train)))
    name, file = OTHER[plan.data]
    other = np.array(unpickle(plan.data_root / file)["data"])
    measured = {
        "svhn": splits.ood["svhn"].take(slice(plan.images))[:][0],
        name: torch.from_numpy(other).view(-1, 3, 32, 32)[: plan.images],
    }
    labels = {}
    for name, part in (("held_out", splits.val), ("test", splits.test)):
        measured[name], labels[name] = part.take(slice(plan.images))[:]
    return Images(splits, measured, labels)


def corrupted_names(plan: Plan) -> list[tuple[str, int]]:
    return [(name, level) for name in CORRUPTIONS for level in plan.severities]


def write_corrupted(plan: Plan, test: Tensor) -> None:
    """Write the corrupted test images, (sets, N, 3, 32, 32); all runs meet the same ones."""
    path = plan.out / "corrupted.npy"
    if path.is_file():
        return
    images = test[: plan.corruption_images]
    sets = [corrupt(images, name, level, seed=0).numpy() for name, level in corrupted_names(plan)]
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, np.stack(sets))
    part.rename(path)


# --------------------------------------------------------------------------------------- noise and scores


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def average(members: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean over members (S, N, C) of their probabilities after a temperature, (N, C)."""
    if temperature == 1:
        return members.mean(0)
    return torch.softmax(members.clamp_min(TINY).log() / temperature, -1).mean(0)


def classification(probs: Tensor, labels: Tensor) -> dict[str, float]:
    metrics = ClassificationMetrics()
    metrics.update(probs, labels)
    return metrics.compute()


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    metrics = DetectionMetrics()
    metrics.update(inside, torch.zeros_like(inside, dtype=torch.bool))
    metrics.update(outside, torch.ones_like(outside, dtype=torch.bool))
    return metrics.compute()


def scores(probs: Probs, labels: dict[str, Tensor], plan: Plan) -> dict[str, Any]:
    """Return every metric of a model's mean probabilities; without a test set, those of a trial."""
    found: dict[str, Any] = {"held_out": classification(probs["held_out"], labels["held_out"])}
    if "test" not in probs:
        return found
    found["test"] = classification(probs["test"], labels["test"])
    found["ood"] = {
        name: {
            "max": detection(1 - probs["test"].amax(-1), 1 - probs[name].amax(-1)),
            "entropy": detection(entropy(probs["test"]), entropy(probs[name])),
        }
        for name in plan.outside
    }
    few = labels["test"][: plan.corruption_images]
    sets = [classification(each, few) for each in probs["corrupted"].split(len(few))]
    mean = {key: math.fsum(one[key] for one in sets) / len(sets) for key in ("nll", "brier")}
    names = [f"{name}/{level}" for name, level in corrupted_names(plan)]
    by_set = dict(zip(names, sets, strict=True))
    found["corruption"] = {**corruption_means(sets), **mean, "sets": by_set}
    return found


def with_temperature(members: Probs, labels: dict[str, Tensor], plan: Plan) -> dict[str, Any]:
    """Return the scores as they are and after a temperature that is fitted on the held-out images."""
    logs = members["held_out"].clamp_min(TINY).log()
    try:
        temperature = fit_scaling(logs, labels["held_out"]).temperature
    except ValueError as error:  # a network that learned nothing
        print(error, flush=True)
        temperature = 1.0
    raw = {name: average(p) for name, p in members.items()}
    cooled = {name: average(p, temperature) for name, p in members.items()}
    return {
        "temperature": temperature,
        "raw": scores(raw, labels, plan),
        "tempered": scores(cooled, labels, plan),
    }


# ----------------------------------------------------------------------------------------- one run


class Runner:
    """What a process needs for its runs: the images on the device."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        self.plan, self.images = plan, load_images(plan)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.labels = {name: y.to(self.device) for name, y in self.images.labels.items()}
        self.measured = {name: x.to(self.device) for name, x in self.images.measured.items()}

    def run(self, job: Job) -> None:
        """Train and measure; the JSON is written last."""
        config = run_config(self.plan, job)
        info = DataInfo.of(self.images.splits)
        fabric = launch(config)
        model = build_model(config, info)
        weights = self.plan.out / f"trial-{job.method}-{job.candidate}-{job.seed}.pt"
        record: dict[str, Any] = {"job": job.name, "final": job.final, "candidate": job.candidate}
        if job.final and weights.is_file():
            state = torch.load(weights, map_location=self.device)
            model.to(self.device).load_state_dict(state["model"])
            training = state["training"]
        else:
            trained = fit(model, self.images.splits, config, fabric)
            training = {
                "epochs": trained.epochs,
                "diverged": trained.diverged,
                "seconds": trained.seconds,
                "peak_memory": trained.peak_memory,
                "last": trained.rows[-1],
            }
            if not job.final:
                torch.save({"model": model.state_dict(), "training": training}, weights)
        if config.channels_last:
            channels_last(model)
        self.predictor = Predictor(model, info, config, fabric)
        record |= {"config": config.to_data(), "training": training}
        record |= {"data": self.images.splits.description, "environment": environment(self.device)}
        started = time.perf_counter()
        record["noise"] = {}
        for name, scale in self.noise_scales(model, fabric.autocast, job.final):
            if name == "fitted":
                model.set_noise_scale(scale)
            members = self.predict(job.final)
            measured = with_temperature(members, self.labels, self.plan)
            record["noise"][name] = {"scale": scale, **measured}
            if job.final:
                arrays = {key: average(p).cpu().numpy() for key, p in members.items()}
                np.savez(self.plan.out / f"{job.name}-{name}.npz", **arrays)  # type: ignore[arg-type]
        record["evaluation_seconds"] = time.perf_counter() - started
        write_json(self.plan.out / f"{job.name}.json", record)

    def noise_scales(
        self, model: UncertainModel, autocast: Any, final: bool
    ) -> list[tuple[str, float]]:
        """Return the noise of training, and for a final run the one that calibrates, if there is one."""
        trained = [("trained", 1.0)]
        if not final or not model.stochastic:
            return trained
        inputs = self.predictor.prepare(self.measured["held_out"])
        batches = list(zip(inputs.split(500), self.labels["held_out"].split(500), strict=True))
        try:
            with autocast():
                fitted = fit_noise_scale(model, batches, samples=SAMPLES, seed=self.predictor.seed)
        except ValueError as error:
            print(f"{type(model).__name__}: {error}", flush=True)
            return trained
        model.set_noise_scale(1.0)
        return [*trained, ("fitted", fitted)]

    def members(self, images: Tensor) -> Tensor:
        """Return the probabilities of all members for raw images (N, 3, 32, 32), (S, N, classes)."""
        parts = images.split(self.predictor.batch_size)
        found = [self.predictor(x).members for x in parts]
        return torch.cat([p.float() for p in found if p is not None], 1)

    def predict(self, final: bool) -> Probs:
        """Predict every set; a trial sees the held-out images alone."""
        if not final:
            return {"held_out": self.members(self.measured["held_out"])}
        found = {name: self.members(x) for name, x in self.measured.items()}
        path = self.plan.out / "corrupted.npy"
        while not path.is_file():  # another process is writing it
            time.sleep(0.5)
        sets = torch.from_numpy(np.load(path)).to(self.device)
        found["corrupted"] = self.members(sets.flatten(0, 1))
        return found


_runner: Runner | None = None


def _start(plan: Plan) -> None:
    global _runner
    _runner = Runner(plan)


def _work(job: Job) -> str:
    assert _runner is not None
    try:
        _runner.run(job)
    except Exception:  # one run that fails does not end the others
        return traceback.format_exc()
    finally:
        gc.collect()  # of a recorded training step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ""


# ------------------------------------------------------------------------------------ the order of runs


def chosen(plan: Plan, method: str) -> int | None:
    """Return the candidate with the lowest held-out NLL after a temperature; None if a trial is missing."""
    found = []
    for candidate in range(len(CANDIDATES[method])):
        path = (plan.trials or plan.out) / f"{Job(method, candidate, 0, final=False).name}.json"
        if not path.is_file():
            return None
        held_out = read_json(path)["noise"]["trained"]["tempered"]["held_out"]
        found.append((held_out["nll"], -held_out["accuracy"], candidate))
    best = min(found)[0]
    return min((a, nll, candidate) for nll, a, candidate in found if nll < best + TIE)[2]


def pending(plan: Plan, started: set[Job]) -> Iterator[Job]:
    """Yield the runs that can be started now, in the order in which they are wanted."""
    trials = [
        Job(method, candidate, 0, final=False)
        for candidate in range(max(map(len, CANDIDATES.values())))
        for method in plan.methods
        if plan.trials is None
    ]
    order = sorted(
        ((seed, method) for seed in range(plan.seeds) for method in plan.methods),
        key=lambda one: (one[1] in LATE and one[0] > 1, one[0]),
    )
    for job in trials:
        if job not in started and not (plan.out / f"{job.name}.json").is_file():
            yield job
    for seed, method in order:
        candidate = chosen(plan, method)
        if candidate is None:
            continue
        job = Job(method, candidate, seed, final=True)
        if job not in started and not (plan.out / f"{job.name}.json").is_file():
            yield job


def ensembles(plan: Plan, labels: dict[str, Tensor]) -> None:
    """Measure the Deep Ensembles of every four of MCP's final runs; they overlap."""
    candidate = chosen(plan, "mcp") if "mcp" in plan.methods else None
    names = [Job("mcp", candidate or 0, seed, final=True).name for seed in range(plan.seeds)]
    done = [name for name in names if (plan.out / f"{name}.json").is_file()]
    done = [name for name in done if (plan.out / f"{name}-trained.npz").is_file()]
    for number, group in enumerate(combinations(done, 4)):
        networks = [np.load(plan.out / f"{name}-trained.npz") for name in group]
        members = {
            name: torch.from_numpy(np.stack([one[name] for one in networks]))
            for name in networks[0].files
        }
        record = {
            "job": f"ensemble-{number}",
            "members": group,
            "noise": {"trained": {"scale": 1.0, **with_temperature(members, labels, plan)}},
            "environment": environment("cpu"),
        }
        write_json(plan.out / f"ensemble-{number}.json", record)


def main(plan: Plan) -> None:
    """Start runs in their order, as many at a time as there are workers."""
    begun = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    os.environ[BESIDE] = str(plan.workers)
    running: dict[Job, Any] = {}
    started: set[Job] = set()
    failed = 0
    with multiprocessing.get_context("spawn").Pool(plan.workers, _start, (plan,)) as pool:
        images = load_images(plan)
        waiting_for_sets = True
        while True:
            elapsed = time.monotonic() - begun
            for job, result in list(running.items()):
                if not result.ready():
                    continue
                del running[job]
                failed += bool(problem := result.get())
                print(f"{elapsed:6.0f} s  {job.name}: {problem or _line(plan, job)}", flush=True)
            for job in list(pending(plan, started)):
                if len(running) == plan.workers:
                    break
                running[job] = pool.apply_async(_work, (job,))
                started.add(job)
            if not running or elapsed > plan.seconds or failed > plan.workers:
                break
            if waiting_for_sets:
                write_corrupted(plan, images.measured["test"])
                waiting_for_sets = False
            time.sleep(0.5)
    print(f"{elapsed:6.0f} s  ended; {len(running)} runs were stopped, {failed} failed", flush=True)
    ensembles(plan, images.labels)


def _line(plan: Plan, job: Job) -> str:
    """Return a run in one line."""
    record = read_json(plan.out / f"{job.name}.json")
    seconds = f"{record['training']['seconds']:.0f} + {record['evaluation_seconds']:.0f} s"
    shown = []
    for name, found in record["noise"].items():
        part = found["raw"].get("test") or found["raw"]["held_out"]
        values = " ".join(f"{key} {part[key]:.4f}" for key in ("accuracy", "nll", "ece"))
        shown.append(f"{name} x{found['scale']:.2f} T {found['temperature']:.2f} {values}")
    return f"{seconds}; {'; '.join(shown)}"


if __name__ == "__main__":
    main(tyro.cli(Plan, prog="python -m benchmarks.fair"))
