"""Defaults that results were measured with: whoever changes one changes what a name stands for."""

import dataclasses
import inspect
from typing import Any

import pytest

from lpbnn import methods
from lpbnn.methods.edl import bayes_risk
from lpbnn.methods.lpbnn import LatentFactors
from lpbnn.methods.meanfield import GaussianLayer
from lpbnn.methods.rank1 import GaussianFactors
from lpbnn.rank_one.factors import PointFactors

RANK_ONE = {"members": 4, "batch_mode": "split", "batch_norm": "shared", "init": "normal"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "abnn": {"members": 4, "std": 0.1, "class_weight": 2.0, "batch_mode": "split"},
    "batchensemble": RANK_ONE | {"init_std": 0.5, "fast_lr": 0.5},
    "duq": {
        "members": 1,
        "sigma": 0.1,
        "gamma": 0.999,
        "gradient_penalty": 0.5,
        "count": 13.0,
        "score": "kernel",
    },
    "edl": {
        "members": 1,
        "risk": "squared",
        "anneal": 10.0,
        "score": "vacuity",
    },
    "ensemble": {"members": 4, "reinit": "all"},
    "lpbnn": RANK_ONE
    | {
        "variant": "default",
        "init_std": 0.1,
        "latent": 32,
        "log_variance": -2.0,
        "fast_lr": 1.0,
        "weighting": "balanced",
    },
    "mcdropout": {"members": 4},
    "mcp": {"members": 1},
    "meanfield": {
        "members": 4,
        "std": 1e-3,
        "prior_std": 1.0,
        "anneal": 2 / 3,
        "flipout": False,
    },
    "mimo": {"members": 3, "batch_repetitions": 4, "input_repetition": 0.0},
    "rank1": RANK_ONE
    | {"init_std": 0.5, "fast_lr": 1.0, "std": 0.1, "prior_std": 0.1, "anneal": 2 / 3},
    "tradi": {
        "members": 4,
        "features": 10,
        "frequency": 1.0,
        "mean_noise": 1e-4,
        "variance_noise": 5e-5,
        "measurement_noise": 10.0,
    },
}


@pytest.mark.parametrize("method", DEFAULTS)
def test_the_defaults_are_those_that_were_measured(method: str) -> None:
    found = dataclasses.asdict(methods.load(method).Config())
    assert {name: value for name, value in found.items() if value is not None} == DEFAULTS[method]


def test_the_variant_of_the_paper_has_the_papers_start() -> None:
    config = methods.load("lpbnn").Config(variant="paper")
    assert (config.init_std, config.weighting) == (0.5, "equation")


PARTS: list[tuple[str, Any]] = [
    ("batchensemble", PointFactors),
    ("rank1", GaussianFactors),
    ("lpbnn", LatentFactors),
    ("meanfield", GaussianLayer),
    ("edl", bayes_risk),
]


@pytest.mark.parametrize(
    ("method", "part"), PARTS, ids=lambda part: getattr(part, "__name__", part)
)
def test_the_layers_of_a_method_have_the_defaults_of_its_options(method: str, part: Any) -> None:
    parameters = inspect.signature(part).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty}
    shared = given.keys() & DEFAULTS[method].keys()
    assert shared
    assert {name: given[name] for name in shared} == {n: DEFAULTS[method][n] for n in shared}
