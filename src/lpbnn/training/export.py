"""A trained run as an ONNX file: the network with the run's preparation, calibration and conformal scores."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpbnn.data.augment import Normalise
from lpbnn.export import Exported, export_onnx, require_free, require_packages
from lpbnn.training.build import DataInfo
from lpbnn.training.files import RunError
from lpbnn.training.run import load_run
from lpbnn.training.rundir import RunDir

EXAMPLES = 4  # that the file is compared with
PIXELS = 2**22  # fewer examples if they are large


def export_run(
    folder: str | Path,
    path: str | Path,
    samples: int | None = None,
    force: bool = False,
    trust: bool = False,
) -> Exported:
    """Write the model of a finished run as an ONNX file; its data is not needed.

    The file takes inputs as the run's data has them: pixels from 0 to 255 (uint8) or numbers (float). Numbers
    that it predicts are in the targets' unit. Its properties say what it is (docs/howto/export.md).

    Args:
        folder: of the run.
        path: the file.
        samples: draws of each member; None for as many as the run was evaluated with.
        force: replace an existing file.
        trust: import the modules that the run's config names.
    """
    try:
        require_packages()
    except ImportError as error:
        raise RunError(str(error)) from error
    require_free(Path(path), force)  # before anything is loaded
    source = RunDir(folder)
    source.require_trust(trust)
    results = source.results()
    config = source.config_as_measured()
    conformal, level = source.conformal() or (None, 0.9)
    model, _, info = load_run(folder, trust=trust)
    calibration = results.get("calibration") or {}
    metadata: dict[str, Any] = {
        "method": config.method,
        "backbone": config.backbone,
        "data": info.name,
        "classes": list(info.classes),
        "normalisation": {"mean": info.mean, "std": info.std, "inside": True},
        "config_sha256": source.config_digest(),
    }
    if info.task == "regression":
        metadata["target"] = {"mean": info.target_mean, "std": info.target_std, "inside": True}
    if calibration.get("noise_scale") is not None:
        metadata["noise_scale"] = calibration["noise_scale"]
    return export_onnx(
        model,
        made_up_inputs(info),
        path,
        samples=config.evaluate.samples if samples is None else samples,
        seed=config.seed,
        prepare=Normalise(info.mean, info.std, len(info.shape)),
        conformal=conformal,
        level=level,
        target_mean=info.target_mean,
        target_std=info.target_std,
        metadata=metadata,
        force=force,
    )


def made_up_inputs(info: DataInfo) -> Tensor:
    """Return a few inputs of the shape, the type and the size of a run's data."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, min(EXAMPLES, PIXELS // math.prod(info.shape)))
    if len(info.shape) == 3:
        size = (count, *info.shape)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    mean, std = torch.tensor(info.mean), torch.tensor(info.std)
    return mean + std * torch.randn(count, *info.shape, generator=generator)
