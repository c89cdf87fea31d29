"""The command ``lpbnn`` and its subcommands.

``--help`` and ``ls`` answer at once because they do not import torch: ``lpbnn.source`` has the options of
methods, networks and data sets in a table.
"""

import gc
import inspect
import io
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional, Suppress, arg

from lpbnn import experiments, methods, registry, source
from lpbnn.cli.options import (
    Start,
    all_options,
    resumed,
    with_options,
    write_config,
)
from lpbnn.metric_info import METRICS
from lpbnn.training import EvalConfig, Interrupted, RunConfig
from lpbnn.training.files import CONFIG, printable

console = Console()
Runs = Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
name_column = partial(Column, no_wrap=True, style="cyan")  # the first of a list
Out = Annotated[Path, arg(aliases=["-o"])]


def ls(method: Annotated[Positional[str | None], arg(metavar="METHOD")] = None) -> None:
    """List methods, backbones, data sets and experiments; or the options of a METHOD.

    Args:
        method: show the options of this method, with their defaults.
    """
    if method is not None:
        _show_options(method)
        return
    families: dict[str, dict[str, str]] = {
        "methods": {name: _description(name) for name in methods.names()},
        "backbones": _descriptions("backbone"),
        "data": _descriptions("data"),
        "experiments": {name: experiments.describe(name) for name in experiments.names()},
    }
    for family, entries in families.items():
        title: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
        table = Table(name_column(), "", title=family, **title, show_header=False, box=None)
        for name, description in entries.items():
            table.add_row(_shown(name), _shown(description))
        console.print(table, "")
    _say("The options of a method: lpbnn ls METHOD")
    _say("Those of data and a backbone: lpbnn train --data NAME --backbone NAME --help")


def _shown(text: str) -> str:
    """Return text of a file for a table: no markup, and nothing that a terminal would obey."""
    return escape(printable(text))


def _description(method: str) -> str:
    """Return one line about a method; about a broken one of another package, why it cannot be used."""
    try:
        return methods.describe(method)
    except ValueError as error:
        return str(error)


def _descriptions(kind: str) -> dict[str, str]:
    return {name: entry["about"] for name, entry in source.table()[kind].items()}


def _show_options(method: str) -> None:
    console.print(_shown(methods.describe(method)))
    table = Table(name_column("option"), Column("default", no_wrap=True), "meaning", box=None)
    for option in methods.options(method):
        table.add_row(option.name, escape(repr(option.default)), _shown(option.description))
    console.print("", table, "")
    _say(f"Choose them with: lpbnn train --method {method} --method.NAME VALUE ...")
    _say("lpbnn train fills in num_data, the number of training examples.")


def train(
    config: Annotated[RunConfig, arg(name="")],
    method: Any,
    backbone: Any,
    data: Any,
    out: Annotated[Path | None, arg(aliases=["-o"])] = None,
    config_file: Annotated[Path | None, arg(name="config", metavar="FILE")] = None,
    print_config: bool = False,
    resume: Annotated[Path | None, arg(metavar="RUN")] = None,
    overwrite: bool = False,
    trust: bool = False,
    *,
    start: Suppress[Any] = None,
) -> None:
    """Train a network, evaluate it and store everything in a run folder.

    --help lists the options of the method, backbone and data set that are named before it:
    lpbnn train --method duq --help

    Args:
        out: the run folder; left out: runs/DATA-BACKBONE-METHOD-SEED.
        config_file: YAML or JSON file with settings, such as --print-config prints or config.json of a
            run folder; options on the command line take precedence.
        print_config: print all settings as YAML and exit.
        resume: continue the stopped run in this folder with its own settings.
        overwrite: replace another run in the folder.
        trust: import the modules that the config of --resume or --config names (MODULE:NAME).
    """
    options = {"method": method, "backbone": backbone, "data": data}
    config = with_options(config, options)
    if resume is not None:
        others = {"out": out not in (None, resume), "config": config_file, "overwrite": overwrite}
        own = with_options(start.config, start.options)
        config = resumed(own, config, resume, [name for name, typed in others.items() if typed])
    if print_config:
        print(write_config(all_options(config, options)), end="")
        return
    from lpbnn.training.build import resolved
    from lpbnn.training.distributed import is_first
    from lpbnn.training.run import run

    config = resolved(config)  # a wrong option is told before the folder is
    parts = (config.data, config.backbone, config.method, str(config.seed))
    out = resume or out or Path("runs") / "-".join(parts).replace(":", ".")  # of MODULE:NAME
    if is_first():
        _say(f"run folder: {out}")
    results = run(config, out, resume=resume is not None, overwrite=overwrite)
    if results:  # of several processes, only the first has them
        _tell(results)
        _say(f"finished; run folder: {out}")


def _train(args: list[str]) -> Callable[..., None]:
    """Return ``train`` with the options of the method, backbone and data set that the arguments name."""
    if args and not args[0].startswith("-"):
        raise ValueError(f"{args[0]!r} is no option. Fix: lpbnn train --method {args[0]}")
    start = Start.of(args)
    types = {kind: type(options) for kind, options in start.options.items()}
    train.__annotations__.update(types)
    return partial(train, config=start.config, start=start, **start.options)


def evaluate(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    settings: Annotated[EvalConfig, arg(name="")],
    data_root: str | None = None,
    trust: bool = False,
) -> None:
    """Evaluate a trained run again with other settings and store the new results in its folder.

    Args:
        run: folder of a finished run.
        data_root: folder of the data, if it has moved since the training.
        trust: import the modules that the run's config names (MODULE:NAME).
    """
    from lpbnn.training.run import reevaluate

    _tell(reevaluate(run, settings, data_root=data_root, trust=trust))


def _evaluate(args: list[str]) -> Callable[..., None]:
    """Return ``evaluate``, whose settings are those of the run that the arguments name."""
    folder = next((Path(given) for given in args if Path(given, CONFIG).is_file()), None)
    if folder is None:
        return evaluate
    from lpbnn.training.rundir import RunDir

    return partial(evaluate, settings=RunDir(folder).config_as_measured().evaluate)


def _tell(results: dict[str, Any]) -> None:
    """Print the numbers of one run; ``compare`` has them beside those of others."""
    parts = {"test set": results["test"], "corrupted": results["corruption"]}
    parts |= {f"out of distribution, {name}": found for name, found in results["ood"].items()}
    for name, numbers in parts.items():
        shown = [
            f"{METRICS[key].title} {METRICS[key].format(value)}{METRICS[key].unit}"
            for key, value in (numbers or {}).items()
            if key in METRICS and value is not None
        ]
        if shown:
            _say(f"{name}: {', '.join(shown)}")
    if epoch := results["train"]["diverged"]:
        _say(f"diverged in epoch {epoch}", style="red")


def calibrate(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    kind: Literal["temperature", "vector", "none"] = "temperature",
    noise: bool = True,
    sets: Literal["lac", "aps", "raps"] | None = None,
    intervals: Literal["normalised", "absolute"] = "normalised",
    level: float = 0.9,
    by_class: bool = False,
    data_root: str | None = None,
    trust: bool = False,
) -> None:
    """Calibrate a trained run on its validation part, store it with the weights and evaluate again.

    Args:
        run: folder of a finished run.
        kind: one temperature, or a scale and a bias for every class; or neither.
        noise: fit the scale of the posterior's noise too, if the method has one.
        sets: conformal prediction sets by this score, from a half of the validation part that the
            temperature does not see.
        intervals: score of the conformal intervals that a regression run gets.
        level: share of examples that sets and intervals shall cover.
        by_class: sets cover every class that often.
        data_root: folder of the data, if it has moved since the training.
        trust: import the modules that the run's config names (MODULE:NAME).
    """
    from lpbnn.training.calibrate import calibrate_run

    results = calibrate_run(
        run,
        kind,
        noise,
        data_root=data_root,
        trust=trust,
        sets=sets,
        intervals=intervals,
        level=level,
        by_class=by_class,
    )
    found = results["calibration"]
    if found["examples"]:
        _show_scaling(run, found, results["test"])
    if conformal := found.get("conformal"):
        what = "intervals" if results["task"] == "regression" else "prediction sets"
        each = " of every class" * conformal["by_class"]
        _say(
            f"{what} ({conformal['score']}) for {conformal['level']:g} of the examples{each}; from "
            f"{conformal['examples']} validation examples, stored in {run}"
        )
        size = "mean width" if what == "intervals" else "classes in a set"
        _say(f"test set: coverage {conformal['coverage']:.3f}, {size} {conformal['size']:.4g}")


def _show_scaling(run: Path, found: dict[str, Any], after: dict[str, float]) -> None:
    numbers = (Column(header, justify="right") for header in ("before", "calibrated"))
    table = Table(name_column("test set"), *numbers, box=None)
    for name, value in found["before"].items():
        info = METRICS[name]
        shown = [f"{info.format(number)}{info.unit}" for number in (value, after[name])]
        table.add_row(info.title, *shown)
    console.print(table)
    fitted = []
    if found["noise_scale"] is not None:
        fitted.append(f"noise scale {found['noise_scale']:.3f}")
    if found["kind"] == "temperature":
        fitted.append(f"temperature {1 / found['scale']:.3f}")
    elif found["kind"] == "vector":
        fitted.append("vector scaling")
    text = ", ".join(fitted) or "nothing"
    _say(f"{text}; fitted to {found['examples']} validation examples, stored in {run}")
    if found["note"]:
        _say(f"noise as trained: {found['note']}", style="yellow")


def export(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    out: Out = Path("model.onnx"),
    samples: int | None = None,
    force: bool = False,
    trust: bool = False,
) -> None:
    """Write a trained run as an ONNX file that takes raw inputs and answers like lpbnn predict.

    Args:
        run: folder of a finished run.
        out: the file.
        samples: draws of each member, stored in the file; as the run was evaluated if left out.
        force: replace an existing file.
        trust: import the modules that the run's config names (MODULE:NAME).

    Its outputs are label, probs, total, epistemic and ood_score, and prediction_set after lpbnn calibrate
    --sets; of a regression run mean, std, total, epistemic and ood_score, and lower and upper.
    """
    from lpbnn.training.export import export_run

    found = export_run(run, out, samples=samples, force=force, trust=trust)
    table = Table(name_column(), "", box=None, show_header=False)
    for what, part in (("input", found.inputs), ("output", found.outputs)):
        for name, kind in part.items():
            table.add_row(f"{what} {name}", kind)
    console.print(table)
    batches = ", ".join(map(str, found.batches))
    _say(f"largest difference to predict, for batches of {batches}: {found.difference:.2g}")
    _say(f"written to {found.path} ({found.size / 1e6:.2f} MB)")


def join(runs: Runs, out: Out, trust: bool = False) -> None:
    """Build a Deep Ensemble from finished runs of the plain network and evaluate it.

    Args:
        runs: two or more run folders of method mcp that differ only in the seed.
        out: the new run folder; it does not depend on the others.
        trust: import the modules that the runs' config names (MODULE:NAME).
    """
    from lpbnn.training.ensemble_from_runs import ensemble_from_runs

    _tell(ensemble_from_runs(runs, out, trust=trust))


def compare(
    runs: Runs,
    format: Literal["table", "markdown", "latex", "csv"] = "table",
    legend: bool = False,
) -> None:
    """Compare runs in a table: mean and standard deviation over the seeds of a method and setting.

    Args:
        runs: run folders, or folders of them (runs/demo).
        format: for the terminal, a README, a paper (booktabs) or a program.
        legend: print the definitions of the metrics below the table.
    """
    from lpbnn.report.formats import FORMATS, print_table
    from lpbnn.report.runs import by_data, read_runs
    from lpbnn.report.tables import comparison

    read = read_runs(_finished(_given(runs, "compare")))
    # Numbers compare within one data set only; a CSV file is one table, so several are an error there.
    tables = map(comparison, [read] if format == "csv" else by_data(read).values())
    if format == "table":
        for table in tables:
            print_table(table, console, legend)
    else:
        print("\n".join(map(FORMATS[format], tables)), end="")


def report(runs: Runs, out: Out = Path("report.html"), title: str | None = None) -> None:
    """Write a self-contained HTML page about runs.

    Args:
        runs: run folders, or folders of them (runs/demo).
        out: the page; an older one of that name is replaced.
    """
    from lpbnn.report import tell_report

    tell_report(_finished(_given(runs, "report")), out, console, title=title)


def predict(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")],
    samples: int = 4,
    seed: int = 0,
    out: Annotated[Path | None, arg(aliases=["-o"])] = None,
    trust: bool = False,
) -> None:
    """Predict image files with a trained run, with uncertainties and an OOD score.

    Args:
        run: folder of a finished run.
        images: files of any format and size; EXIF orientation is applied, and the image is converted to
            grey or RGB and to the network's size. A street scene keeps its shape and gets the height that
            the network was trained on.
        samples: draws of each member.
        seed: of the draws.
        out: file for the predictions, .csv or .json, with the probability of every class. Segmentation:
            folder for NAME.png (input, classes, confidence, uncertainty) and NAME.npz (the maps) of each
            image.
        trust: import the modules that the run's config names (MODULE:NAME).

    Uncertainties are in nats, those of a regression run standard deviations in the target's unit. The
    score is the method's own. After lpbnn calibrate --sets the classes of the prediction set are named; a
    calibrated regression run has an interval.
    """
    from lpbnn.report import predict_files
    from lpbnn.report.formats import print_whole
    from lpbnn.training.run import load_run
    from lpbnn.training.rundir import RunDir

    if not images:
        raise ValueError("no image was given. Fix: lpbnn predict RUN IMAGE...")
    predict_files.require_answerable(RunDir(run).data())
    loaded = load_run(run, trust=trust)
    conformal = RunDir(run).conformal()
    ask = predict_files.Question(loaded.model, loaded.data, samples, seed, conformal)
    print_whole(predict_files.answered(ask, images, out), console)
    if loaded.data.task == "segmentation" and out is None:
        console.print("For the maps give a folder: lpbnn predict RUN IMAGE... -o maps")


def data(
    action: Positional[Literal["download"]],
    name: Annotated[Positional[str], arg(metavar="NAME")],
    data_root: Path = Path("data"),
) -> None:
    """Download the published files of a data set and check their md5 sums.

    Args:
        name: cifar10 or cifar100; both include SVHN, their out-of-distribution set.
        data_root: folder for the files; pass the same to train and experiment.
    """
    from lpbnn.data import download

    splits = download(name, data_root)
    _say(f"{splits.source}: {splits.description}")


def bench(
    backbone: str = "resnet18",
    input: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    batch: int = 128,
    methods: tuple[str, ...] = ("lpbnn", "batchensemble", "rank1", "mcdropout", "ensemble"),
    members: int = 4,
    repeats: int = 10,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int = 1,
) -> None:
    """Measure time and memory of each method on a network, relative to the plain network.

    Args:
        backbone: a network of lpbnn ls, or MODULE:NAME for one of your own.
        input: shape of one example: channels, height and width; or the length of a vector.
        classes: number of classes.
        batch: examples of a training step and of a prediction.
        methods: names that lpbnn ls lists.
        members: number of members of the methods that have them.
        repeats: times that each method and the plain network are timed, in turn.
        device: auto is the GPU if there is one.
        threads: on a CPU; more than there are free cores make the times useless.
    """
    from lpbnn.bench import Setup, measurements, table

    own = {"repeats": repeats, "device": device, "threads": threads}
    setup = Setup(backbone, input, classes, batch, mode="eager", precision="32", **own)
    cases = list(measurements(setup, methods, (members,)))
    console.print(table(row for _, row, _ in cases if row is not None))
    _say(f"{backbone}, batch {batch}; in brackets: times the plain network")
    for name, _, why in cases:
        if why:
            _say(f"not measured: {name}: {why}")


EXPERIMENT = "Reproduce a table or figure of the paper: lpbnn experiment NAME."


def main(args: list[str] | None = None) -> None:
    """Run the command. Errors print one message and exit with code 2, Ctrl-C with 130."""
    args = sys.argv[1:] if args is None else args
    for stream in (sys.stdout, sys.stderr):  # whatever the locale, a sign it lacks is no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    gc.set_threshold(50_000)  # a fifth of the time of --help was garbage collection
    try:
        if args[:1] == ["experiment"]:
            named = {name: _experiment(name, args[1:]) for name in experiments.names()}
            _run_command(named, args[1:], "lpbnn experiment", EXPERIMENT)
        else:
            _run_command(
                _commands(args), args, "lpbnn", "Networks that know what they do not know."
            )
    except Interrupted as error:
        from lpbnn.training.distributed import is_first

        _stop(str(error) if is_first() else "", 130)
    except KeyboardInterrupt:
        _stop("stopped.", 130)
    except BrokenPipeError:  # the reader has closed the pipe, as in `lpbnn ls | head`
        sys.stderr.close()
    except (ValueError, TypeError, OSError) as error:
        _stop(f"error: {error}", 2)
    except (MemoryError, RecursionError, OverflowError) as error:
        _stop(f"error: too large for this machine ({error!r}).", 2)
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        _stop(f"error: not enough memory ({str(error).splitlines()[0]}). Fix: smaller batches.", 2)


def _commands(args: list[str]) -> dict[str, Callable[..., Any]]:
    return {
        "ls": ls,
        "train": _train(args[1:]) if args[:1] == ["train"] else _listed(train.__doc__ or ""),
        "eval": _evaluate(args[1:]) if args[:1] == ["eval"] else evaluate,
        "calibrate": calibrate,
        "export": export,
        "join": join,
        "compare": compare,
        "report": report,
        "predict": predict,
        "data": data,
        "demo": _experiment("demo", args),
        "experiment": _listed(EXPERIMENT),
        "bench": bench,
    }


def _experiment(name: str, args: list[str]) -> Callable[..., Any]:
    """Return an experiment as a command; only the one that is called has its options."""
    if args[:1] == [name]:
        return experiments.command(name, console)
    return _listed(experiments.describe(name))


def _listed(doc: str) -> Callable[[], None]:
    """Return a command that is listed with the first paragraph of ``doc`` and never called."""

    def listed() -> None: ...

    listed.__doc__ = doc.partition("\n\n")[0]
    return listed


def _run_command(
    commands: dict[str, Callable[..., Any]], args: list[str], prog: str, description: str | None
) -> None:
    if args and args[0] not in commands and not args[0].startswith("-"):
        raise registry.unknown(prog.removeprefix("lpbnn").strip() or "command", args[0], commands)
    for command in commands.values():
        function = command.func if isinstance(command, partial) else command
        # tyro keeps the line breaks of an argument's description.
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = re.sub(r"\n {8,}", " ", text)  # type: ignore[attr-defined]
    if args and args[0] in commands:  # alone, so that tyro's errors name this command
        tyro.cli(commands[args[0]], prog=f"{prog} {args[0]}", args=args[1:])
        return
    tyro.extras.subcommand_cli_from_dict(commands, prog=prog, description=description, args=args)


def _given(runs: tuple[Path, ...], command: str) -> list[Path]:
    """Return the runs that were named and those in folders of runs, such as runs/demo."""
    from lpbnn.training.files import runs_under

    if not runs:
        raise ValueError(f"no run folder was given. Fix: lpbnn {command} runs/*")
    return [found for run in runs for found in (runs_under(run) or [run])]


def _finished(runs: list[Path]) -> list[Path]:
    """Return the finished runs, with a note for each stopped one; all if none is finished."""
    from lpbnn.training.rundir import RunDir

    stopped = [run for run in runs if RunDir(run).is_stopped()]
    for run in stopped if len(stopped) < len(runs) else []:
        note = f"left out: {run} is not finished. Go on with it: lpbnn train --resume {run}"
        _say(note, style="yellow")
    return [run for run in runs if run not in stopped] or runs


def _say(text: str, style: str = "") -> None:
    """Print a line that may be longer than the terminal is wide: paths stay whole, to be copied."""
    console.print(escape(printable(text)), style=style, soft_wrap=True, highlight=False)


def _stop(message: str, code: int) -> None:
    if message:
        style = "red" if code == 2 else ""
        Console(stderr=True).print(escape(printable(message)), style=style, soft_wrap=True)
    sys.exit(code)
