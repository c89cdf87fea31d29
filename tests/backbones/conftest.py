"""Some virtual machines announce AMX and cannot run it: there, oneDNN's first bfloat16 product dies
with an illegal instruction. Without AMX the same kernels run on every machine. oneDNN reads this
variable once, at its first operation, so it is set while the tests are collected."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
