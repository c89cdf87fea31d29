"""Training: one config, one training loop, one run folder.

    from lpbnn.training import RunConfig
    from lpbnn.training.run import run

    results = run(RunConfig(method="lpbnn", backbone="small-cnn", data="digits"), "runs/first")

==============  ====================================================================================
config          ``RunConfig``: everything that decides a run, typed, to and from JSON without loss
run             ``run``: train, evaluate, write; ``load_run``, ``reevaluate``
join            ``join``: a Deep Ensemble of finished runs
train           ``fit``: the only training loop
evaluate        ``evaluate``: every number and every array that the report shows
rundir          ``RunDir``: the folder in which the stages meet
==============  ====================================================================================

Only what is quick to import is here: the command line shows its help without loading Lightning.
"""

from lpbnn.training.config import (
    AugmentConfig,
    EvalConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)
from lpbnn.training.files import Interrupted, RunError

__all__ = [
    "AugmentConfig",
    "EvalConfig",
    "Interrupted",
    "OptimConfig",
    "RunConfig",
    "RunError",
    "ScheduleConfig",
]
