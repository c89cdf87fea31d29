"""A config says what it was given, compares by value and survives JSON."""

import json
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpbnn.data import Augment
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig

CHANGED = RunConfig(
    "rank1",
    {"members": 3, "include": ("conv*", "head"), "anneal": 0.5},
    "mlp",
    {"hidden": [8, 4]},
    "cifar10",
    "/data",
    {"val": 5000},
    seed=7,
    epochs=250,
    batch_size=256,
    drop_last=True,
    optim=OptimConfig("adamw", 1e-3, 0.8, False, 0.05, 1.0, {"encoder.*": 0.1}),
    schedule=ScheduleConfig("step", 2.5, (80, 160, 200), 0.2, 0.8),
    augment=AugmentConfig(2, False, 8, "reflect", (0.5, 2.0), (32, 48), 0.25),
    class_weights="median",
    evaluate=EvalConfig(3, 64, 512, False, True, (1, 5), "/c", 100, "/frost", 2, "confidence"),
    precision="bf16",
    compile=True,
    memory_budget=0.5,
    graph=False,
    channels_last=True,
    device="cpu",
    devices=2,
    validate_every=0,
    checkpoint_every=5,
    progress=False,
    tensorboard=True,
)


@pytest.mark.parametrize("config", [RunConfig(), CHANGED])
def test_json_and_back(config: RunConfig) -> None:
    again = RunConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()


def test_the_changed_config_changes_every_field() -> None:
    """So that the round trip above has seen them all."""
    default = RunConfig()
    for one, other in (
        (CHANGED, default),
        (CHANGED.optim, default.optim),
        (CHANGED.schedule, default.schedule),
        (CHANGED.augment, default.augment),
        (CHANGED.evaluate, default.evaluate),
    ):
        same = [f.name for f in fields(one) if getattr(one, f.name) == getattr(other, f.name)]
        assert not same, f"{type(one).__name__}: {same}"


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), plain), st.floats(1e-6, 1e3), st.integers(0, 2**40))
def test_any_options_survive(options: dict[str, Any], lr: float, seed: int) -> None:
    config = RunConfig(method_options=options, optim=OptimConfig(lr=lr), seed=seed)
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"epoch": 3}, "RunConfig has no field 'epoch'. Did you mean 'epochs'?"),
        ({"optim": {"momentun": 0.9}}, "optim has no field 'momentun'. Did you mean 'momentum'?"),
        ({"evaluate": {"sample": 2}}, "evaluate has no field 'sample'. Did you mean 'samples'?"),
        ({"optim": {"name": "adam"}}, "optim.name is 'adam'; expected 'sgd' or 'adamw'"),
        ({"optim": 3}, "optim is 3; expected a mapping"),
        ({"epochs": "many"}, "epochs is 'many'; expected a valid integer"),
        ({"epochs": 2.0}, "epochs is 2.0; expected a valid integer"),
        ({"epochs": True}, "epochs is True; expected a valid integer"),
        ({"compile": 1}, "compile is 1; expected a valid boolean"),
        (
            {"evaluate": {"severities": [1, 6]}},
            r"severities\[1\] is 6; expected 1, 2, 3, 4 or 5",
        ),
        ({"method_options": [1]}, "method_options is .*; expected a valid dictionary"),
        ([], r"RunConfig is \[\]; expected a mapping"),
    ],
)
def test_what_is_wrong_is_named(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.from_data(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunConfig(epochs=0), "epochs is 0; expected a number greater than 0"),
        (lambda: RunConfig(seed=-1), "seed is -1"),
        (
            lambda: RunConfig(compile=True, memory_budget=1.5),
            "memory_budget is 1.5; expected a number less than or equal to 1",
        ),
        (lambda: RunConfig(compile=True, memory_budget=-0.1), "memory_budget is -0.1"),
        (lambda: RunConfig(memory_budget=0.5), "budget is 0.5 without compile; .* add --compile"),
        (lambda: RunConfig(schedule=ScheduleConfig(warmup=15)), "warmup is 15.0 of 15 epochs"),
        (lambda: OptimConfig(lr=0), "optim.lr is 0; expected a number greater than 0"),
        (lambda: OptimConfig(lr=float("nan")), "lr is nan; expected a finite number"),
        (lambda: OptimConfig(momentum=0.0), "nesterov is on with momentum 0"),
        (lambda: OptimConfig(clip=-1), "optim.clip is -1; expected a number greater than 0"),
        (
            lambda: OptimConfig(parts={"a": 0}),
            r"optim.parts\['a'\] is 0; expected a number greater",
        ),
        (lambda: ScheduleConfig("step"), "for 'step' at least one epoch"),
        (lambda: ScheduleConfig(milestones=(160, 80)), "in rising order"),
        (lambda: AugmentConfig(pad=-1), "augment.pad is -1"),
        (
            lambda: AugmentConfig(scale=(2.0, 0.5)),
            r"augment.scale is \(2.0, 0.5\); .* such as 0.5 2",
        ),
        (lambda: AugmentConfig(crop=(32,)), r"augment.crop is \(32,\); expected height and width"),
        (lambda: AugmentConfig().over(Augment(pad=-1)), "augment.pad is -1"),  # of a data set
        (lambda: AugmentConfig(colour=1.0), "augment.colour is 1.0; expected a number less than 1"),
        (lambda: EvalConfig(samples=0), "evaluate.samples is 0"),
        (lambda: EvalConfig(severities=(1, 1)), "each once"),
        (lambda: RunConfig(method_options={"include": int}), "which a run folder cannot keep"),
        (lambda: RunConfig(method_options={"x": float("inf")}), r"method_options\['x'\] is inf"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_it_is_plain_json() -> None:
    text = CHANGED.to_json()
    assert json.loads(text)["schedule"]["milestones"] == [80, 160, 200]
    assert "NaN" not in text


def test_hints_of_the_data_hold_where_nothing_is_said() -> None:
    hints = Augment(pad=4, flip=True, cutout=16)
    assert AugmentConfig().over(hints) == hints
    assert AugmentConfig(0, False, 0).over(hints) == Augment()


def test_the_command_line_can_show_it() -> None:
    tyro = pytest.importorskip("tyro")
    command = (
        "--method mcp --optim.lr 0.05 --schedule.name step --schedule.milestones 3 5 "
        "--evaluate.corruptions --precision bf16 --no-progress"
    )
    config = tyro.cli(RunConfig, args=command.split())
    assert config.optim.lr == 0.05
    assert config.schedule.milestones == (3, 5)
    assert config.evaluate.corruptions
    assert not config.progress


def test_the_defaults_are_those_of_the_results() -> None:
    optim = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    assert asdict(RunConfig()) == {
        "method": "lpbnn",
        "method_options": {},
        "backbone": "small-cnn",
        "backbone_options": {},
        "data": "digits",
        "data_root": None,
        "data_options": {},
        "seed": 0,
        "epochs": 15,
        "batch_size": 128,
        "drop_last": False,
        "optim": {**optim, "clip": None, "parts": {}},
        "schedule": {
            "name": "cosine",
            "warmup": 0.0,
            "milestones": (),
            "gamma": 0.1,
            "power": 0.9,
        },
        "augment": {
            **dict.fromkeys(("pad", "flip", "cutout", "scale", "crop", "colour")),
            "padding": "zero",
        },
        "class_weights": "none",
        "evaluate": {
            "samples": 1,
            "batch_size": 256,
            "chunk": None,
            "ood": True,
            "corruptions": False,
            "severities": (1, 2, 3, 4, 5),
            "corruption_root": None,
            "corruption_images": None,
            "frost": None,
            "examples": 4,
            "score": "entropy",
        },
        "precision": "32",
        "compile": False,
        "memory_budget": 1.0,
        "graph": True,
        "channels_last": False,
        "device": "auto",
        "devices": 1,
        "validate_every": 1,
        "checkpoint_every": 1,
        "progress": True,
        "tensorboard": False,
    }
