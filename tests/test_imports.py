"""Imports point one way: what stands later may use what stands before, never the reverse."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lpbnn
from lpbnn import experiments, methods
from lpbnn.extras import EXTRAS, missing

SOURCE = Path(lpbnn.__file__).parent
LEVELS = [
    {"registry", "source", "draws", "atomic", "extras", "metric_info", "options", "precision"},
    {"likelihoods", "metrics", "backbones", "data"},
    {"members", "kernels", "convert", "model", "rank_one", "prediction", "predict", "check"},
    {"methods", "build"},
    {"calibration", "estimators", "export", "plots"},
    {"training"},
    {"bench", "experiments", "report", "testing"},
    {"cli", "__main__"},
]


def level(part: str) -> int:
    found = [number for number, parts in enumerate(LEVELS) if part in parts]
    assert found, f"{part} is not in the order of imports; give it a place in LEVELS"
    return found[0]


def imported(path: Path) -> set[str]:
    """Parts of lpbnn that a file imports when it runs (imports for types only do not count)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            if node.module == "lpbnn":
                names |= {f"lpbnn.{alias.name}" for alias in node.names}
            else:
                names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("lpbnn.")}


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part == "__init__":  # the public surface stands above methods
            continue
        wrong += [
            f"{path.relative_to(SOURCE)} imports lpbnn.{other}"
            for other in imported(path)
            if level(other) > level(part)
        ]
    assert not wrong, wrong


def test_importing_lpbnn_is_light_and_silent() -> None:
    """No import has an effect, and the library does not drag in what only the command needs."""
    code = (
        "import sys, torch; state = torch.get_rng_state(); import lpbnn; "
        "assert torch.equal(state, torch.get_rng_state()); "
        "heavy = {'lightning', 'matplotlib', 'sklearn', 'tyro', 'onnx', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr


COMMANDS = (
    "train",
    "eval",
    "calibrate",
    "join",
    "compare",
    "report",
    "predict",
    "demo",
    "bench",
)
HELP = [["--help"], *([name, "--help"] for name in (*COMMANDS, "ls", "experiment"))]
HELP += [["experiment", name, "--help"] for name in experiments.names()]


def test_help_and_lists_import_nothing_heavy() -> None:
    """Importing torch takes longer than half a second of CPU time, in which the command should answer."""
    calls = [*HELP, ["ls"], *(["ls", name] for name in methods.names())]
    code = (
        "import contextlib, io, sys\n"
        "from lpbnn import cli\n"
        "heavy = {'torch', 'lightning', 'torchmetrics', 'matplotlib', 'sklearn', 'scipy', 'numpy'}\n"
        f"for args in {calls}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        cli.main(args)\n"
        "    assert not heavy & set(sys.modules), (args, heavy & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_of_the_module_imports_nothing_heavy() -> None:
    """As users start it: ``python -m lpbnn --help``."""
    command = [sys.executable, "-X", "importtime", "-m", "lpbnn", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lpbnn.cli" in imported
    assert not {"torch", "lightning", "matplotlib", "sklearn"} & imported


@pytest.mark.parametrize("name", ["check", "predict"])
def test_a_function_stands_in_for_the_module_of_its_name(name: str) -> None:
    """Whichever comes first: the import of the module, or the use of the function."""
    code = (
        f"import importlib, sys, lpbnn; module = importlib.import_module('lpbnn.{name}'); "
        f"assert lpbnn.{name} is module.{name}; from lpbnn import {name}; "
        f"assert {name} is module.{name} and sys.modules['lpbnn.{name}'] is module"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_found() -> None:
    for name in lpbnn.__all__:
        assert getattr(lpbnn, name) is not None
    assert set(lpbnn.__all__) <= set(dir(lpbnn))
    code = "import lpbnn; assert 'lpbnn' in lpbnn.methods.names()"  # a module, not imported before
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_metrics_are_there_when_they_are_asked_for() -> None:
    code = (
        "import sys, lpbnn; assert 'torchmetrics' not in sys.modules; "
        "assert lpbnn.metrics.ece and 'torchmetrics' in sys.modules; "
        "assert 'metrics' in dir(lpbnn); from lpbnn import *; assert metrics is lpbnn.metrics"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'lpbnn' has no attribute 'metric'"):
        lpbnn.metric  # noqa: B018


def test_the_extras_are_those_of_the_package() -> None:
    """The extra that an error names installs the package, by itself or by the extras that it contains."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"]
    distributions = {"sklearn": "scikit-learn", "annotated_types": "annotated-types"}
    for package, extra in EXTRAS.items():
        if package == "markupsafe":  # jinja2 depends on it
            continue
        names = {re.split(r"[>=<\[]", line)[0] for line in listed[extra]}
        assert distributions.get(package, package) in names
    assert {re.split(r"[>=<]", line)[0] for line in project["dependencies"]} == {"torch", "numpy"}


# Torch, NumPy and pytest alone.
WITHOUT = (
    "import sys\n"
    f"for name in {sorted(EXTRAS)} + ['lightning', 'PIL', 'yaml', 'pooch']: sys.modules[name] = None\n"
)


@pytest.mark.parametrize(
    ("used", "extra"),
    [
        ("lpbnn.metrics.ece", "metrics"),
        ("lpbnn.plots", "metrics"),
        ("lpbnn.LPBNNClassifier", "sklearn"),
        ("lpbnn.report", "train"),
        ("lpbnn.training", "train"),
        ("lpbnn.predict(model, iter([x]), progress=True)", "train"),
        ("lpbnn.calibration.fit_noise_scale(model, [(x, y)])", "metrics"),
        ("lpbnn.calibration.risk_threshold(x[:, 0], x[:, 0] > 0, 0.5)", "metrics"),
    ],
)
def test_torch_and_numpy_are_enough_and_an_error_names_the_extra(used: str, extra: str) -> None:
    code = (
        f"{WITHOUT}"
        "import torch, lpbnn\n"
        "import lpbnn.calibration, lpbnn.likelihoods, lpbnn.check\n"
        "model = lpbnn.build(torch.nn.Linear(4, 3), num_data=8)\n"
        "x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))\n"
        "model.loss(x, y)['loss'].backward()\n"
        "assert lpbnn.predict(model.eval(), x).probs.shape == (8, 3)\n"
        "assert lpbnn.backbones.build('mlp', 3, image_size=8)\n"
        "import lpbnn.testing\n"
        f"try:\n    {used}\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'lpbnn[{extra}]'" in done.stdout, done.stderr


@pytest.mark.parametrize("name", [None, "scipyx", "lpbnn.training"])
def test_an_error_about_another_module_stays_as_it_is(name: str | None) -> None:
    error = ModuleNotFoundError("what it says", name=name)
    assert missing(error) is error
