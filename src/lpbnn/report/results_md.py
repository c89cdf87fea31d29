"""RESULTS.md from the ledger: every number of it can be made again, and traced to its run."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpbnn.report import tables
from lpbnn.report.formats import markdown, markdown_text
from lpbnn.report.ledger import ledger_folders, read_ledger
from lpbnn.report.runs import Group, Run, by_setting, chosen, counted, described, grouped
from lpbnn.report.tables import RULE, PaperTable
from lpbnn.training.files import RunError

HEAD = """\
# Results

Made by `lpbnn results` from the JSON files in `{ledger}/`, one per run (command, commit, device, versions,
seed, config, every number): not to be edited by hand, and a test makes it again. A number is the mean over
the n runs of its row, ± their standard deviation (n - 1 in its denominator; none for a single run). The
best of a column is **bold**, the second best _slanted_: {rule} Rows that diverged or have
not learned (less than half of the best accuracy) are not ranked. "paper" is the
number that the paper prints for that method, in the setting told below the table: ours are often of a
shorter schedule, a smaller network or generated corruptions, and then the two do not compare directly.

<details><summary>What the columns mean</summary>

{conventions}

</details>
"""

References = Callable[[str, str], PaperTable | None]
"""The published numbers of a data set and a backbone."""


def results_markdown(ledger: str | Path, references: References) -> str:
    """The whole page; the same files give the same text."""
    ledger = Path(ledger)
    folders = ledger_folders(ledger)
    if not folders:
        raise RunError(
            f"{ledger} holds no kept run. Fix: lpbnn keep RUN... --into {ledger}/NAME, or --ledger "
            f"{ledger}/NAME with an experiment."
        )
    parts: list[str] = []
    meanings: dict[str, str] = {}
    for folder in folders:
        where = Path(ledger.name, folder.relative_to(ledger)).as_posix()
        runs = read_ledger(folder)
        parts.append(f"## {folder.name}\n\n{len(runs)} runs, in [`{where}`]({where}).\n")
        for setting, part in by_setting(runs).items():
            reference = references(part[0].data.name, part[0].settings["backbone"])
            parts.append(f"### {setting} (`{where}`)\n")
            groups = _ordered(grouped(part), reference)
            found = (
                tables.compare(groups, reference),
                tables.severity(groups),
                tables.diversity(groups, reference),
                tables.cost(groups),
            )
            shown = [table for table in found if table.columns]
            meanings |= {info.title: info.convention for table in shown for info in table.legend}
            parts += map(markdown, shown)
            parts.append(_sources(groups, where))
    said = "\n".join(
        f"- {markdown_text(title)}: {markdown_text(text)}." for title, text in meanings.items()
    )
    return "\n".join([HEAD.format(ledger=ledger.name, conventions=said, rule=RULE), *parts])


def _ordered(groups: Sequence[Group], reference: PaperTable | None) -> list[Group]:
    """As the paper has them, then the others."""
    if reference is None:
        return list(groups)
    return sorted(groups, key=lambda group: reference.place(group.label, group.method))


def _sources(groups: Sequence[Group], where: str) -> str:
    """The files of every row, and how they were made."""
    lines = []
    for group in groups:
        files = ", ".join(f"[{run.seed}]({where}/{run.path.name})" for run in group.runs)
        given = described(group.settings, chosen(group.settings, group.method))
        said = f"; not the method's defaults: {markdown_text(given)}" if given else ""
        lines.append(f"- {markdown_text(group.label)}: seed {files}{said}")
    runs = [run for group in groups for run in group.runs]
    facts = [("Command", _command), ("Measured again", _again), ("Commit", _commit)]
    for words, find in [*facts, ("Machine", _machine)]:
        for text, n in counted(text for run in runs if (text := find(run))):
            lines.append(f"- {words} ({n} runs): {text}" if len(runs) > 1 else f"- {words}: {text}")
    body = "\n".join(lines)
    return f"<details><summary>The runs behind these numbers</summary>\n\n{body}\n\n</details>\n"


def _command(run: Run) -> str:
    typed = shlex.join(_last(run).get("command") or ())
    return f"`{typed}`" if typed else "not known"


def _again(run: Run) -> str:
    """By which command a trained run was measured since, and at which commit."""
    session = run.at("measured_again")
    return f"`{shlex.join(session['command'])}`, {_commit_of(session)}" if session else ""


def _commit(run: Run) -> str:
    return _commit_of(_last(run))


def _commit_of(session: Mapping[str, Any]) -> str:
    changed = ", with changes that were not committed" * bool(session.get("dirty"))
    return f"{session['commit']}{changed}" if session.get("commit") else "not known"


def _machine(run: Run) -> str:
    session = _last(run)
    versions = session.get("versions", {})
    said = [session.get("device"), f"torch {versions.get('torch')}", f"CUDA {session.get('cuda')}"]
    return markdown_text(", ".join(text for text in said if text and not text.endswith("None")))


def _last(run: Run) -> Mapping[str, Any]:
    """The start that finished it."""
    return run.sessions[-1] if run.sessions else {}
