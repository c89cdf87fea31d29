"""Convert the records in a folder from the option names of 0.1 to those of 0.2.

    python tools/convert_records.py FOLDER

Renames ``spread`` to ``init_std`` and ``spread_at`` to ``expand_at`` in the stored configs, and writes out
the options that 0.1 supplied for older records when it read them. A converted record says so in
``converted``. Everything else, every number above all, stays as it is; options that 0.2 no longer has stay
too, because they describe what was run. A second run changes nothing. It was run on 2026-11-18
(results/README.md).
"""

import sys
from pathlib import Path
from typing import Any

from lpbnn.report.entries import to_text
from lpbnn.training.files import read_json, write_atomic

RENAMED = {"spread": "init_std", "spread_at": "expand_at"}
# Options that came later than some runs, with what these runs did: the "then" metadata of 0.1.
SUPPLIED: dict[str, dict[str, Any]] = {
    "lpbnn": {"train_decoder": True, "reconstruct": "draws"},
    "edl": {"full_kl": 1.0},
}
# As 0.1's Config of LP-BNN lists them: tables name what differs in the order of the first record.
ORDER = (
    *(
        "members",
        "batch_mode",
        "batch_norm",
        "init_std",
        "init",
        "fast_lr",
        "repeat_last",
        "include",
    ),
    *("exclude", "expand_at", "weighting", "latent", "train_r", "train_decoder", "log_variance"),
    *("by_width", "reconstruct", "noise", "anneal", "free_bits"),
)
NOTE = "option names of 0.2, by tools/convert_records.py on 2026-11-18"


def converted_options(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a record under the names of 0.2.

    >>> converted_options("batchensemble", {"members": 4, "spread": 0.5})
    {'members': 4, 'init_std': 0.5}
    >>> converted_options("lpbnn", {"spread": 0.1, "reconstruct": "mean"})
    {'init_std': 0.1, 'train_decoder': True, 'reconstruct': 'mean'}
    >>> converted_options("lpbnn", {"init_std": 0.1, "variant": "default"})  # a record of 0.2
    {'init_std': 0.1, 'variant': 'default'}
    """
    renamed = {RENAMED.get(name, name): value for name, value in options.items()}
    if "init_std" in options:
        return renamed
    lacking = {k: v for k, v in SUPPLIED.get(method, {}).items() if k not in options}
    found = renamed | lacking
    if method != "lpbnn":
        return found
    return {name: found[name] for name in sorted(found, key=ORDER.index)}


def convert(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a ledger with converted options, or the record itself if nothing changes."""
    config = record["config"]
    options = converted_options(config["method"], config["method_options"])
    if options == config["method_options"]:
        return record
    return {**record, "config": {**config, "method_options": options}, "converted": NOTE}


def main(folder: Path) -> None:
    changed = 0
    for path in sorted(folder.rglob("*.json")):
        found = read_json(path)
        if isinstance(found, dict) and "ledger" in found and (new := convert(found)) is not found:
            write_atomic(path, to_text(new).encode())
            changed += 1
    print(f"converted {changed} records in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
