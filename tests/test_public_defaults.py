"""Defaults of the functions that users call: whoever changes one changes what their programs compute."""

import importlib
import inspect
from typing import Any

import pytest

import lpbnn
from lpbnn import backbones, calibration, cli, likelihoods, metrics, plots, training
from lpbnn.data import augment

TRUSTING = [
    f"lpbnn.training.{name}" for name in ("calibrate", "ensemble_from_runs", "export", "run")
]
ESTIMATOR = {
    "method": "lpbnn",
    "hidden": (128, 128),
    "dropout": 0.1,
    "epochs": 200,
    "batch_size": "auto",
    "lr": 0.002,
    "weight_decay": 0.0003,
    "early_stopping": True,
    "validation_fraction": 0.15,
    "patience": 16,
    "samples": 1,
    "device": "cpu",
}
DEFAULTS: dict[Any, dict[str, Any]] = {
    lpbnn.build: {"method": "lpbnn", "task": "classification", "ignore_index": -100, "check": True},
    lpbnn.predict: {"samples": 1, "allow_not_finite": False, "progress": False},
    lpbnn.freeze: {"samples": 1, "seed": 0},
    lpbnn.Prediction: {"quantity": "probs", "class_dim": 1},
    lpbnn.Prediction.sets: {"level": 0.9},
    lpbnn.Prediction.interval: {"level": 0.9},
    calibration.calibrate: {
        "kind": "temperature",
        "samples": 1,
        "seed": 0,
        "cells_per_example": 2000,
    },
    calibration.fit_scaling: {"kind": "temperature"},
    calibration.fit_noise_scale: {"samples": 1, "seed": 0, "cells_per_example": 2000},
    calibration.fit_conformal: {
        "by_class": False,
        "randomised": False,
        "penalty": 0.01,
        "free_classes": 5,
        "ignore_index": -100,
    },
    calibration.ood_threshold: {"tpr": 0.95},
    likelihoods.Categorical: {"ignore_index": -100, "dim": 1, "score": "entropy"},
    likelihoods.Segmentation: {"ignore_index": -100, "dim": 1, "score": "confidence"},
    likelihoods.Gaussian: {"variance": "softplus", "dim": 1},
    likelihoods.MultiLabel: {"dim": 1},
    likelihoods.Scaling: {"dim": 1},
    likelihoods.entropy: {"dim": 1},
    metrics.ClassificationMetrics: {"num_bins": 15},
    metrics.RegressionMetrics: {"level": 0.95},
    metrics.MeanIoU: {"ignore_index": 255},
    metrics.ece: {"num_bins": 15},
    metrics.adaptive_ece: {"num_bins": 15},
    metrics.classwise_ece: {"num_bins": 15},
    metrics.reliability: {"num_bins": 15},
    metrics.coverage: {"level": 0.95},
    metrics.miou: {"ignore_index": 255},
    metrics.pixel_detection: {"pooled": False},
    metrics.quantile_calibration: {"num_levels": 99},
    metrics.quantile_error: {"num_levels": 99},
    lpbnn.LPBNNClassifier: ESTIMATOR,
    lpbnn.LPBNNRegressor: ESTIMATOR,
    lpbnn.export_onnx: {
        "samples": 1,
        "seed": 0,
        "level": 0.9,
        "target_mean": 0.0,
        "target_std": 1.0,
        "force": False,
    },
    calibration.Conformal: {"penalty": 0.0, "free_classes": 0, "randomised": False},
    backbones.build: {"in_channels": 3},
    plots.decision_map: {
        "show": "epistemic",
        "margin": 1.0,
        "points": 100,
        "samples": 4,
        "seed": 0,
    },
    plots.member_bars: {"names": (), "left": 0.0, "most": 8},
    plots.ood_scores: {"label": "model", "log": False},
    plots.parity: {"label": "model", "most": 60},
    plots.trade_off: {"x_std": 0.0, "y_std": 0.0, "marker": "o", "label": "model"},
    plots.value_map: {"top": 1.0, "scale": "magma", "title": "", "unit": ""},
    augment.Normalise: {"dims": 3, "channels_last": False},
    augment.Transform: {
        "augment": augment.Augment(
            pad=0, flip=False, cutout=0, scale=(1.0, 1.0), crop=(0, 0), colour=0.0
        ),
        "padding": "zero",
        "void": 255,
        "channels_last": False,
    },
    augment.batch_indices: {"drop_last": False, "alone": True},
    augment.epoch_generator: {"device": "cpu", "stream": 0},
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_the_defaults_are_those_that_programs_rely_on(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    given = {name: parameter.default for name, parameter in parameters.items()}
    left = (inspect.Parameter.empty, None)
    assert {name: value for name, value in given.items() if value not in left} == DEFAULTS[function]


def test_nothing_is_trusted_and_nothing_overwritten_unless_asked() -> None:
    found = []
    for module in (cli, training, *map(importlib.import_module, TRUSTING)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            for option in ("trust", "overwrite", "force", "allow_not_finite"):
                parameter = inspect.signature(function).parameters.get(option)
                if parameter is not None and parameter.default is not inspect.Parameter.empty:
                    found.append((name, option, parameter.default))
    assert len(found) >= 15
    assert all(default is False for _, _, default in found), found
