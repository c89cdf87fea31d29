"""Corruptions: fifteen ways in which an image goes bad, five severities each (CIFAR-10-C).

Hendrycks & Dietterich, *Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations*, 2019. The published parameters for 32x32 colour images, written anew in torch and
vectorised over the batch: uint8 (N, C, H, W) in, uint8 out. Grey images (C = 1) and other sizes
work too; each family's file says how its parameters adapt.

    noise.py    gaussian_noise shot_noise impulse_noise
    blur.py     defocus_blur glass_blur motion_blur zoom_blur
    weather.py  snow frost fog
    digital.py  brightness contrast elastic_transform pixelate jpeg_compression

    generate.py corrupt one batch    published.py read the published files
    ops.py      draws, borders, filters as matrices

Severity is the published order, not always more changed pixels: elastic_transform trades a falling
affine part for a rising local one, frost dims the image as it adds ice, and glass_blur 5 blurs what
glass_blur 4 scattered.
"""

from lpbnn.data.corruptions.generate import CORRUPTIONS, SEVERITIES, VERSION, corrupt
from lpbnn.data.corruptions.published import Published, require_files

__all__ = ["CORRUPTIONS", "SEVERITIES", "VERSION", "Published", "corrupt", "require_files"]
