"""The page: what it holds, what it leaves out, and that nothing in a run's names gets to act."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from report.conftest import METHODS, Make, arrays, examples, info

from lpbnn.cli.options import read_config
from lpbnn.report import PaperTable, write_report
from lpbnn.report.colours import MARKERS, colour_of
from lpbnn.training.rundir import RunDir

EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = {"meta", "link", "img", "br", "hr"}


class Reader(HTMLParser):
    """Tags and attributes, text by section; open tags must be closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {"": ""}
        self.section = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.text[self.section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self.section] += data

    @property
    def sections(self) -> list[str]:
        return [name for name in self.text if name]


def read(path: Path) -> Reader:
    return Reader(path.read_text("utf-8"))


def own_script(page: str) -> bool:
    """True if the page has one script, the package's, and its policy lets no other one run."""
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", page, re.S)
    tags = [attrs for tag, attrs in Reader(page).tags if tag == "script"]
    packaged = resources.files("lpbnn.report").joinpath("templates/page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(packaged.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    allowed = [part.strip() for part in policy.split(";") if "script" in part]
    return script == packaged and tags == [{}] and allowed == [f"script-src 'sha256-{digest}'"]


def test_everything_a_run_has_is_on_the_page(make: Make, tmp_path: Path) -> None:
    runs = [make("lpbnn", 0), make("lpbnn", 1), make("mcp"), make("ensemble")]
    reference = PaperTable("A paper, Table 1", {"lpbnn": {"accuracy": 0.9502}})
    path = write_report(runs, tmp_path / "new" / "report.html", "My title", reference)
    page = read(path)
    assert page.sections == [
        *("comparison", "tradeoffs", "calibration", "corruption", "detection", "members"),
        *("diversity", "cost", "posterior", "settings"),
    ]
    assert "3 methods, 4 runs of small-cnn" in page.text[""]
    comparison = page.text["comparison"]
    for said in ("n = 2", "±", "paper 95.02", "A paper, Table 1", "OOD is the positive class"):
        assert said in comparison, said
    assert "generated, procedural frost" in comparison
    assert "×4.00" in page.text["cost"]
    settings = page.text["settings"]
    for said in ("0, 1", "2.13.0", "0123456789ab with changes", "lpbnn train --method 'a b'"):
        assert said in settings, said
    assert "embedded" in settings
    tips = [attrs["title"] for tag, attrs in page.tags if tag == "th" and "title" in attrs]
    assert any(
        "15 equal-width bins" in (tip or "") and "lower is better" in (tip or "") for tip in tips
    )
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert links == {f"#{name}" for name in page.sections}


def test_the_page_needs_nothing_but_itself(make: Make, tmp_path: Path) -> None:
    path = write_report([make("lpbnn"), make("mcp")], tmp_path / "report.html")
    text = path.read_text("utf-8")
    for tag, attrs in read(path).tags:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href"):
            if (value := attrs.get(name)) is not None:
                assert value.startswith(("#", "data:")), value
    assert own_script(text)
    assert "://" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', text)) <= set(ids)


def test_names_are_text(make: Make, tmp_path: Path) -> None:
    data = info(
        name=EVIL, description=EVIL, classes=(EVIL, *"123456789"), sizes={EVIL: 3}, source=EVIL
    )
    random = np.random.default_rng(0)
    found = arrays(random, 4, latent=True)
    found["posterior/layer"] = np.array(EVIL)
    found["examples/corrupted/corruption"] = np.array([EVIL] * 4)
    found |= examples(random, f"examples/ood/{EVIL}", 4, [-1])
    found[f"histogram/ood/{EVIL}"] = np.ones(50, int)
    ood = {EVIL: {"auroc": 0.9, "aupr": 0.9, "fpr95": 0.1}}
    options = {"note": EVIL}
    runs = [
        make(EVIL, folder="<b>run", data=data, with_arrays=found, ood=ood, options=options),
        make("mcp", folder="plain", data=data, with_arrays=found, ood=ood),
    ]
    reference = PaperTable(EVIL, {"mcp": {"ece": 0.1}})
    path = write_report(runs, tmp_path / "report.html", EVIL, reference)
    page = read(path)
    assert own_script(path.read_text("utf-8"))
    assert all(not any(n.startswith("on") for n in attrs) for _, attrs in page.tags)
    assert all((a.get("src") or "").startswith("data:") for t, a in page.tags if t == "img")
    for section in ("", "comparison", "settings", "posterior"):
        assert "<script>alert(1)</script>" in page.text[section], section


def test_what_was_not_measured_is_left_out(make: Make, tmp_path: Path) -> None:
    run = make(
        "mcp",
        corrupted=False,
        ood={},
        uncertainty={},
        with_arrays={},
        cost=None,
    )
    (run / "predictions.npz").unlink()
    (run / "environment.json").unlink()
    page = read(write_report([run], tmp_path / "report.html"))
    assert page.sections == ["comparison", "cost", "settings"]  # training has a cost
    assert "cA" not in page.text["comparison"]
    assert "Environment" not in page.text["settings"]


def test_a_diverged_run_is_on_the_page(make: Make, tmp_path: Path) -> None:
    gone = make(
        "meanfield", diverged=3, test=None, ood=None, uncertainty=None, diversity=None,
        corruption=None, cost=None, with_arrays={}, error="NaN",
    )  # fmt: skip
    page = read(write_report([make("lpbnn"), gone], tmp_path / "report.html"))
    assert "1 run diverged." in page.text[""]
    assert "diverged in epoch 3" in page.text["comparison"]
    assert "Not shown: Mean-field BNN (diverged)" in page.text["calibration"]
    alone = read(write_report([gone], tmp_path / "alone.html"))
    assert "diverged in epoch 3" in alone.text["comparison"]


def test_regression(regression: Make, tmp_path: Path) -> None:
    page = read(write_report([regression("lpbnn"), regression("mcp")], tmp_path / "r.html"))
    assert page.sections == ["comparison", "tradeoffs", "curves", "intervals", "cost", "settings"]
    for said in ("NLL", "RMSE", "Coverage", "→ 0.95", "OOD: outside"):
        assert said in page.text["comparison"]
    table = [regression("mcp", inputs=3, folder="three"), regression("lpbnn", inputs=3, folder="x")]
    assert "curves" in read(write_report(table, tmp_path / "t.html")).sections


def test_segmentation(make: Make, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    found = arrays(random, 1, latent=False)
    found = {key: array for key, array in found.items() if not key.startswith("examples")}
    labels = random.integers(0, 6, (2, 24, 32))
    found |= {
        "examples/test/images": random.integers(0, 256, (2, 3, 24, 32)).astype(np.uint8),
        "examples/test/labels": labels,
        "examples/test/predicted": labels % 5,
        "examples/test/confidence": random.random((2, 24, 32)).astype(np.float32),
        "examples/test/epistemic": 0.1 * random.random((2, 24, 32)).astype(np.float32),
        "examples/test/index": np.array([0, 9]),
    }
    data = info("segmentation", "streets", num_classes=5, classes=(), ood_index=5, ignore_index=255)
    numbers = {"miou": 0.5, "accuracy": 0.9, "nll": 0.3, "brier": 0.2, "ece": 0.1}
    detected = {"auroc": 0.9, "aupr": 0.1, "fpr95": 0.3}
    alone = {**found, "examples/test/epistemic": np.zeros((2, 24, 32), np.float32)}
    measured = {"test": numbers, "ood": {"pixels": detected, "pixels_pooled": detected}}
    runs = [
        make(m, data=data, corrupted=False, with_arrays=kept, uncertainty={"test": {}}, **measured)
        for m, kept in (("mcp", alone), ("lpbnn", found))
    ]
    page = read(write_report(runs, tmp_path / "s.html"))
    assert "maps" in page.sections
    assert "members" not in page.sections
    assert "mIoU" in page.text["comparison"]
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 2 + 2 * (2 + 2 + 3)  # scales; input, truth, two and three maps
    for said in ("anomaly", "void", "0.1 nats", "none: it is one network", "% anomalous"):
        assert said in page.text["maps"], said
    for said in ("anomalies: per image", "anomalies: pooled", "the paper's protocol"):
        assert said in page.text["comparison"], said
    assert "AUROC ↑ (anomalies pooled)" in page.text["tradeoffs"]
    assert "detection" not in page.sections


def test_data_sets_have_a_part_each_and_methods_one_colour(
    make: Make, regression: Make, tmp_path: Path
) -> None:
    runs = [make("mcp"), make("lpbnn"), regression("lpbnn"), regression("tradi")]
    path = write_report(runs, tmp_path / "report.html")
    page = read(path)
    assert {"d0-comparison", "d0-members", "d1-comparison", "d1-curves"} <= set(page.sections)
    colours = re.findall(r"--c:var\((--m\d+)\)\"></i><span>([^<]+)<", path.read_text("utf-8"))
    assert {name: c for c, name in colours} == {"MCP": "--m1", "LP-BNN": "--m0", "TRADI": "--m8"}
    assert len(set(colours)) == 3


@pytest.mark.slow
def test_a_method_has_its_colour_whatever_else_is_on_the_page(make: Make, tmp_path: Path) -> None:
    def chips(*runs: Path) -> dict[str, str]:
        text = write_report(runs, tmp_path / "report.html").read_text("utf-8")
        found = re.findall(
            r'class="(chip[^"]*)" style="--c:var\((--m\d+)\)"></i><span>([^<]+)<', text
        )
        return {name: f"{kind} {colour}" for kind, colour, name in found}

    assert len({colour_of(method) for method in METHODS}) == len(METHODS)
    made = {name: make(name, with_arrays={}) for name in ("mcp", "lpbnn", "tradi")}
    all_of_them = chips(*made.values())
    assert all_of_them["LP-BNN"] == "chip v0 --m0"
    for method, path in made.items():
        ((name, colour),) = chips(path).items()
        assert all_of_them[name] == colour, method
    eight = make("lpbnn", folder="eight", options={"members": 8}, with_arrays={})
    assert list(chips(made["lpbnn"], eight).values()) == ["chip v0 --m0", "chip v1 --m0"]
    another = make("my-own", with_arrays={})
    own = chips(another)
    assert chips(made["mcp"], another)["my-own"] == own["my-own"]
    assert own["my-own"] not in all_of_them.values()


def test_only_options_that_are_no_defaults_are_listed(make: Make, tmp_path: Path) -> None:
    runs = [make("mcp"), make("lpbnn", options={"log_variance": -1.0, "members": 4})]
    settings = read(write_report(runs, tmp_path / "report.html")).text["settings"]
    assert "Options other than the defaults" in settings
    assert "log_variance=-1" in settings
    assert "members=4" not in settings


def test_the_command_to_repeat_a_run_names_the_folder_of_the_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run from the folder in which the page was written, it finds the run."""
    run = make("mcp")
    monkeypatch.chdir(tmp_path.parent)
    page = read(write_report([run], tmp_path / "report.html"))
    shown = run.relative_to(tmp_path.parent).as_posix()
    command = f"lpbnn train --config {shown}/config.json --out {shown}-again"
    assert command in page.text["settings"]
    assert read_config(Path(shown, "config.json")).method == "mcp"
    monkeypatch.chdir(run)
    page = read(write_report(["."], tmp_path / "report.html"))
    assert f"--out {run}-again" in page.text["settings"]


def test_the_matrix_of_the_posterior_has_axes_and_a_scale(make: Make, tmp_path: Path) -> None:
    found = arrays(np.random.default_rng(0), 4, latent=True)
    found["posterior/correlation"] = np.full((24, 24), 0.15) + 0.85 * np.eye(24)
    text = read(write_report([make("lpbnn", with_arrays=found)], tmp_path / "r.html")).text
    assert text["posterior"].count("124inputs, ordered") == 2
    assert "−0.20+0.2" in text["posterior"]


def test_training_points_are_in_the_panel_of_a_curve(regression: Make, tmp_path: Path) -> None:
    path = regression("lpbnn")
    found = RunDir(path).arrays()
    x = np.linspace(-4, 4, 20, dtype=np.float32)[:, None]
    with_points = regression("mcp", with_arrays={**found, "train/inputs": x, "train/targets": x**3})
    text = write_report([path, with_points], tmp_path / "r.html").read_text("utf-8")
    assert text.count("<title>20 training points</title>") == 1
    assert "Large dots are the training points" in text
    alone = write_report([path], tmp_path / "r.html").read_text("utf-8")
    assert "training points" not in alone


def test_marks_tell_their_numbers_where_the_pointer_rests(make: Make, tmp_path: Path) -> None:
    runs = [
        make("mcp"),
        make("lpbnn", test={"accuracy": 0.91, "nll": 0.2, "brier": 0.1, "ece": 0.02}),
    ]
    text = write_report(runs, tmp_path / "r.html").read_text("utf-8")
    titles = re.findall(r"<title>([^<]*)</title>", text)
    assert "LP-BNN: accuracy 91.00 %, ECE ↓ 0.0200" in titles
    for start in ("member 4 of 4: ", "LP-BNN, Accuracy % ↑: clean: 91, ", "MCP, test: quartiles"):
        assert any(title.startswith(start) for title in titles), start
    assert any(re.match(r"MCP: confidence 0\.\d+ to .* examples", title) for title in titles)


def test_cells_carry_the_numbers_they_are_sorted_by(regression: Make, tmp_path: Path) -> None:
    page = read(write_report([regression("lpbnn"), regression("mcp")], tmp_path / "r.html"))
    heads = {a["data-first"] for t, a in page.tags if t == "th" and "data-first" in a}
    assert heads == {"up", "down"}
    values = [float(a["data-v"]) for t, a in page.tags if t == "td" and a.get("data-v")]
    assert pytest.approx(0.02) in values  # coverage .93: its distance from .95


def test_every_figure_can_be_saved(make: Make, tmp_path: Path) -> None:
    text = write_report([make("lpbnn"), make("mcp")], tmp_path / "r.html").read_text("utf-8")
    figures = re.findall(r"<figure.*?</figure>", text, re.S)
    assert len(figures) == text.count("<svg")
    assert all(figure.count('class="save"') == 1 for figure in figures)


def test_the_same_runs_give_the_same_page(make: Make, tmp_path: Path) -> None:
    runs = [make("lpbnn")]
    one = write_report(runs, tmp_path / "one.html").read_bytes()
    assert write_report(runs, tmp_path / "two.html").read_bytes() == one


@pytest.mark.slow
def test_eleven_methods_with_three_seeds_stay_small(make: Make, tmp_path: Path) -> None:
    runs = [make(method, seed) for method in METHODS for seed in range(3)]
    path = write_report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    read(path)


def test_a_hundred_classes_show_the_likely_ones(make: Make, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    names = tuple(f"class number {i}" for i in range(100))
    found = examples(random, "examples/test", 4, [57])
    found["examples/test/members"] = np.eye(100, dtype=np.float32)[[[3], [5], [5], [8]]]
    run = make("lpbnn", data=info(num_classes=100, classes=names), with_arrays=found)
    text = write_report([run], tmp_path / "report.html").read_text("utf-8")
    assert "class .: 0.50" in text
    assert text.count(">class .</text>") == 10


def test_the_head_counts_methods_and_lists_the_data(make: Make, tmp_path: Path) -> None:
    runs = [
        *(make("lpbnn", lr=lr) for lr in (0.1, 0.2)),
        make("mcp"),
        *(make("mcp", data=info(name=name)) for name in ("one", "two")),
    ]
    text = write_report(runs, tmp_path / "page.html").read_text()
    assert "2 methods in 3 settings, 3 runs of small-cnn" in text
    assert "Uncertainty on digits, one and two" in text


def test_a_row_has_the_shape_of_its_marker(make: Make, tmp_path: Path) -> None:
    """All but the square have a rule of their own: a chip without one is square."""
    rows = [make("lpbnn", lr=0.01 * (i + 1)) for i in range(len(MARKERS))]
    text = write_report(rows, tmp_path / "page.html").read_text()
    table = text[text.index('id="comparison"') :]
    table = table[: table.index("</table>")]
    chips = re.findall(r'class="chip (v\d)"', table)
    assert chips == [f"v{i}" for i in range(len(MARKERS))]
    for chip, shape in zip(chips, MARKERS, strict=True):
        assert bool(re.search(rf"\.chip\.{chip}[ ,]", text)) == (shape != "s")
