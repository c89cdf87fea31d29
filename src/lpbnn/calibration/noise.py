r"""The noise scale: how much of the posterior's noise a prediction uses, fitted on held-out data.

Every draw of the posterior has its standard deviation multiplied by $\tau$. More noise makes the
averaged probabilities less sure. The rule is **the** $\tau$ **at which the fitted temperature is
one**: the noise alone then accounts for the overconfidence. It has one answer, while the NLL of held-out data
hardly changes with $\tau$.

With T as in ``lpbnn.calibration.scaling``, the temperature is one where
$g(\tau) = \partial NLL / \partial \log T$ at T = 1 is zero; g is negative for an overconfident model
and grows with the noise.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lpbnn.calibration.held_out import CELLS_PER_EXAMPLE, Cells, batch_pairs, collect
from lpbnn.calibration.scaling import backward_nll, require_finite
from lpbnn.extras import missing
from lpbnn.predict import unwrap

LARGEST = 10.0
PRECISION = 0.005  # of tau; its standard error is far larger


def fit_noise_scale(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int = 1,
    seed: int | None = 0,
    cells_per_example: int | None = CELLS_PER_EXAMPLE,
) -> float:
    """Fit the scale of the posterior's noise on held-out batches, store it with the model and return it.

    It works for the methods that draw from a posterior: 'lpbnn', 'rank1', 'meanfield', and 'mcdropout',
    whose knob is the rate. A scaling that the model has is removed, since it belongs to the old noise; to
    combine the two, call ``calibrate`` afterwards. The held-out data are predicted about ten times.

    Args:
        model: what ``lpbnn.build`` returned.
        batches: held-out pairs (inputs, labels), held in memory while the scale is fitted.
        samples: draws of each member; take those that predictions will take.
        seed: of the draws, the same for every scale that is tried.
        cells_per_example: at most this many pixels (tokens) of an example, drawn at random; None takes all.

    Raises:
        ValueError: no noise at all is too much already, or none is enough. After an error of any kind the model
            has the noise and the scaling that it had.

    Example:
        >>> import lpbnn
        >>> net = nn.Linear(4, 3)
        >>> _ = net.weight.data.mul_(4)
        >>> model = lpbnn.build(net, "meanfield", num_data=100, std=1.0)
        >>> x = torch.randn(2000, 4)
        >>> y = lpbnn.predict(model, x, samples=100).probs.multinomial(1).squeeze(1)
        >>> model.set_noise_scale(0.5)  # too little
        >>> fit_noise_scale(model, [(x, y)], samples=25) > 0.5
        True
    """
    try:
        from scipy.optimize import brentq
    except ModuleNotFoundError as error:
        raise missing(error) from error

    own = unwrap(model)
    noise, scaling = float(getattr(own, "noise_scale", 1.0)), own.likelihood.scaling
    own.set_noise_scale(noise)  # refuses a model without noise, before anything is computed
    pairs = list(batch_pairs(batches))
    own.likelihood.scaling = None

    def slope(scale: float) -> float:
        own.set_noise_scale(scale)
        return log_temperature_slope(collect(own, pairs, samples, seed, cells_per_example))

    try:
        if slope(0.0) >= 0:
            raise ValueError(
                "without any noise the model is not overconfident on these data, so no noise makes its "
                "temperature one. Fix: calibrate(model, batches), a temperature below one."
            )
        # The smallest of several: with few draws, very noisy members are sure again, each of its own.
        low, high = 0.0, 0.5
        while slope(high) < 0:
            low, high = high, 1.5 * high
            if high > LARGEST:
                raise ValueError(
                    f"noise of {LARGEST:g} times the posterior's does not make the temperature one. Fix: "
                    "calibrate(model, batches), a temperature, alone or after set_noise_scale(1.5)."
                )
        found: float = brentq(slope, low, high, xtol=PRECISION)  # type: ignore[assignment]
    except BaseException:
        own.set_noise_scale(noise)
        own.likelihood.scaling = scaling
        raise
    own.set_noise_scale(found)
    return found


def log_temperature_slope(cells: Cells) -> float:
    """Return the derivative of the NLL by log T at T = 1; negative if a temperature above 1 is better."""
    require_finite(cells)
    scale = torch.ones((), dtype=torch.float64, device=cells.outputs.device, requires_grad=True)
    with torch.enable_grad():
        backward_nll(cells, scale, torch.zeros_like(scale))
    assert scale.grad is not None
    return -scale.grad.item()
