"""Calibration after training: on held-out data, without a gradient step of the network.

- ``calibrate`` and ``fit_scaling``: temperature and vector scaling.
- ``fit_noise_scale``: the size of the posterior's noise.
- ``fit_conformal``: prediction sets and intervals with a guaranteed coverage.
- ``risk_threshold`` and ``ood_threshold``: from which uncertainty on an example is refused.

Docs: docs/howto/calibration.md.
"""

from lpbnn.calibration.conformal import Conformal, fit_conformal
from lpbnn.calibration.noise import fit_noise_scale
from lpbnn.calibration.scaling import calibrate, fit_scaling
from lpbnn.calibration.selective import ood_threshold, risk_threshold

__all__ = [
    "Conformal",
    "calibrate",
    "fit_conformal",
    "fit_noise_scale",
    "fit_scaling",
    "ood_threshold",
    "risk_threshold",
]
