"""Type checkers and editors know the options of every method."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools import make_stub

from lpbnn import backbones, data, methods, source

HEAD = """\
from typing import Any
import lpbnn
from torch import nn
net = nn.Linear(2, 2)
options: dict[str, Any] = {"own": 1}
"""
# Calls, and if they are right.
CALLS = {
    'lpbnn.build(net, "lpbnn", num_data=9, latent=8, variant="paper").layers': True,
    "lpbnn.build(net, num_data=9, latent=8)": True,
    'lpbnn.build(net, "ensemble", reinit=["head"])': True,
    "lpbnn.build(net, str(net), members=3, **options)": True,
    'lpbnn.build(net, "lpbnn", num_data=9, lattent=8)': False,
    'lpbnn.build(net, "mcp", latent=8)': False,
    'lpbnn.build(net, "lpbnn", num_data=9, variant="papr")': False,
}


def test_the_stub_has_the_options_of_the_methods() -> None:
    """If this fails, run ``python tools/make_stub.py``."""
    assert make_stub.PATH.read_text() == make_stub.stub()
    assert source.TABLE.read_text() == make_stub.table()


def test_options_of_the_table_are_those_of_an_import() -> None:
    for name in methods.names():
        assert methods.options(name) == source.config_options(methods.load(name).Config)
    for name, net in backbones.entries().items():
        assert source.stored("backbone", name) == source.call_options(net.build, 2)
    for name, entry in data.entries().items():
        assert source.stored("data", name) == source.call_options(entry.load, 1)


@pytest.mark.slow
def test_a_wrong_option_is_a_type_error_and_a_right_one_is_not(tmp_path: Path) -> None:
    package = str(make_stub.PATH.parents[1])
    (tmp_path / "calls.py").write_text(HEAD + "\n".join(CALLS))
    settings = {"extraPaths": [package], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [Path(sys.executable).with_name("basedpyright"), "--outputjson"]
    command += ["-p", tmp_path, "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    wrong = {
        list(CALLS)[error["range"]["start"]["line"] - HEAD.count("\n")]
        for error in json.loads(done.stdout)["generalDiagnostics"]
        if error["rule"] in ("reportCallIssue", "reportArgumentType")
    }
    assert wrong == {call for call, right in CALLS.items() if not right}, done.stdout
