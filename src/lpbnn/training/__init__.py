"""Training: one config, one training loop, one run folder.

    from lpbnn.training import RunConfig
    from lpbnn.training.run import run

    results = run(RunConfig(method="lpbnn", backbone="small-cnn", data="digits"), "runs/first")

- config: ``RunConfig``: everything that decides a run, typed, to and from JSON without loss
- run: ``run``: train, evaluate, write; ``load_run``, ``reevaluate``
- ensemble_from_runs: a Deep Ensemble of finished runs
- preflight: every check before a run
- dataloading: the batches of each epoch, from (seed, epoch) alone
- step, cuda_graph: one training step; the same recorded on a GPU
- loop: ``fit``: the only training loop, and what is shown of it
- evaluation: ``evaluate``: every number and every array that the report shows
- evaluator: ``Predictor``, and what is counted of its predictions
- rundir, files: the run folder: atomic writes, digests, a lock
- distributed: processes: how they start, what they share, how they end

Only what is quick to import is here: the command line shows its help without loading Lightning.
"""

from lpbnn.extras import missing

try:
    from lpbnn.training.config import (
        AugmentConfig,
        EvalConfig,
        OptimConfig,
        RunConfig,
        ScheduleConfig,
    )
    from lpbnn.training.files import Interrupted, RunError
except ModuleNotFoundError as error:
    raise missing(error) from error

__all__ = [
    "AugmentConfig",
    "EvalConfig",
    "Interrupted",
    "OptimConfig",
    "RunConfig",
    "RunError",
    "ScheduleConfig",
]
