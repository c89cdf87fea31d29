"""Defaults that results were measured with: whoever changes one changes what a name stands for."""

from typing import Any

import pytest

from lpbnn import methods

DEFAULTS: dict[str, dict[str, Any]] = {
    "abnn": {"members": 4, "std": 0.1},
    "batchensemble": {"members": 4, "init_std": 0.5, "fast_lr": 0.5, "batch_mode": "split"},
    "duq": {"sigma": 0.1, "gamma": 0.999, "gradient_penalty": 0.5, "count": 13.0},
    "edl": {"risk": "squared", "anneal": 10.0, "full_kl": None},
    "ensemble": {"members": 4, "reinit": "all"},
    "lpbnn": {"members": 4, "init_std": 0.1, "latent": 32, "log_variance": -2.0, "fast_lr": 1.0},
    "mcdropout": {"members": 4, "rate": None},
    "meanfield": {"members": 4, "std": 1e-3, "prior_std": 1.0, "anneal": 2 / 3},
    "mimo": {"members": 3, "batch_repetitions": 4, "input_repetition": 0.0},
    "rank1": {"members": 4, "init_std": 0.5, "std": 0.1, "prior_std": 0.1, "fast_lr": 1.0},
    "tradi": {"members": 4, "features": 10, "frequency": 1.0, "measurement_noise": 10.0},
}


@pytest.mark.parametrize("method", DEFAULTS)
def test_the_defaults_are_those_that_were_measured(method: str) -> None:
    config = methods.load(method).Config()
    found = {name: getattr(config, name) for name in DEFAULTS[method]}
    assert found == DEFAULTS[method]


def test_the_variant_of_the_paper_has_the_papers_start() -> None:
    config = methods.load("lpbnn").Config(variant="paper")
    assert (config.init_std, config.weighting) == (0.5, "equation")
