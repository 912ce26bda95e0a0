import csv
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from unit.cli.fakes import assert_golden
from unit.cli.sweeps import fake_sweep

from mergepipe.cli.pages.columns import csv_text, sweep_lines
from mergepipe.cli.pages.curves import curves
from mergepipe.cli.pages.page import page
from mergepipe.cli.pages.picture import picture
from mergepipe.errors import MergefileError

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


# --- the command ------------------------------------------------------------------------------------------------------


def test_prints_a_line_for_each_budget(cli):
    result = cli("sweep", "assistant")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("sweep.txt", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    expected = {"output": "assistant", "measure": False, "mapped": False, "command": None, "precision": None}
    budgets = ["0", "5", "10", "25", "50", "75", "100"]
    assert cli.project.calls == [("sweep", {**expected, "budgets": budgets})]


def test_levels_stand_beside_whole_blocks(cli):
    cli.project.result = fake_sweep(levels=True)
    result = cli("sweep", "assistant", "--precision", "levels")
    assert_golden("sweep-levels.txt", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert cli.project.calls[0][1]["precision"] == "levels"


def test_both_curves_are_in_csv_picture_and_page():
    report = fake_sweep(levels=True)
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert [line["precision"] for line in lines] == ["blocks"] * 5 + ["levels"] * 5
    titles = [curve.title for curve in curves(report)]
    kinds = ["bound", "expected", "measured"]
    assert titles == [*kinds, *(f"{kind} in levels" for kind in kinds)]
    assert page(report).count("in levels</td>") == 4


def test_verbose_names_the_tensors_that_lose_most(cli):
    assert_golden("sweep-verbose.txt", cli("sweep", "assistant", "-v").stdout)


def test_figures_without_measurement_and_without_a_known_bound(cli):
    cli.project.result = fake_sweep(measured=False, figures=True, kind="none", relative=False)
    assert_golden("sweep-unknown.txt", cli("sweep", "assistant").stdout)


def test_options_reach_the_project(cli, tmp_path):
    options = ["--budgets", "1,2 GB", "--measure", "--eval", "run '{}' now", "--html", "x.html", "-j", "3"]
    assert cli("sweep", "a", *options).code == 0
    ((_, called),) = cli.project.calls
    assert (called["budgets"], called["measure"], called["mapped"]) == (["1", "2 GB"], True, True)
    assert called["command"].words == ("run", "{}", "now")
    assert called["command"].directory == tmp_path
    assert called["command"].on(tmp_path / "m") == ["run", str(tmp_path / "m"), "now"]
    assert cli.project.opened["workers"] == 3


def test_json_is_the_report_alone(cli):
    assert json.loads(cli("sweep", "assistant", "--json").stdout) == fake_sweep().as_json()


def test_quiet_prints_nothing_and_writes_files_all_the_same(cli, tmp_path):
    result = cli("sweep", "assistant", "-q", "--csv", "out.csv", "--html", "out.html")
    assert (result.code, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "out.csv").read_text() == csv_text(fake_sweep())
    assert (tmp_path / "out.html").read_text() == page(fake_sweep())


def test_files_that_were_written_are_named(cli, tmp_path):
    result = cli("sweep", "assistant", "--csv", "a.csv", "--plot", "b.svg")
    assert result.stdout.splitlines()[-2:] == ["wrote a.csv", "wrote b.svg"]
    assert (tmp_path / "b.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--csv", "gone/x.csv"], "`gone/x.csv` cannot be written: `gone` is no directory"),
        (["--html", "."], "`.` cannot be written: it is a directory"),
        (["--plot", "x.pdf"], "`x.pdf` is neither a PNG nor an SVG"),
        (["--eval", ""], "the command is empty"),
        (["--eval", "'x"], "the command `'x` cannot be split: No closing quotation"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(cli, args, message):
    result = cli("sweep", "assistant", *args)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}\n")
    assert cli.project.calls == []


def test_without_matplotlib_a_picture_is_refused_with_the_way_to_get_it(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = cli("sweep", "assistant", "--plot", "x.png")
    assert result.code == 2
    assert "`--plot` needs matplotlib" in result.stderr
    assert "pip install 'mergepipe[plot]'" in result.stderr
    assert cli.project.calls == []


def test_only_a_picture_imports_matplotlib(cli, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert cli("sweep", "assistant", "--html", "x.html", "--csv", "x.csv").code == 0
    assert "matplotlib" not in sys.modules


def test_errors_and_interrupts_end_it_like_other_commands(cli):
    cli.project.result = MergefileError("output `x` cannot be swept: it has no base", hint="give it a `base`")
    result = cli("sweep", "x")
    assert result.code == 2
    assert result.stderr == "error: output `x` cannot be swept: it has no base\nhint: give it a `base`\n"
    cli.project.result = KeyboardInterrupt()
    assert cli("sweep", "x").code == 130


# --- CSV --------------------------------------------------------------------------------------------------------------


def test_csv_has_every_number_with_all_its_digits():
    report = fake_sweep(figures=True)
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert len(lines) == len(report.points)
    for line, point in zip(lines, report.points, strict=True):
        assert int(line["expert_bytes"]) == point.expert_bytes
        assert float(line["bound"]) == point.bound.absolute
        assert float(line["deviation_relative_to_output"]) == point.deviation.length.relative_to_output
        assert float(line["perplexity"]) == point.figures["perplexity"]
    assert_golden("sweep.csv", csv_text(report))


def test_csv_leaves_empty_what_is_not_known():
    report = fake_sweep([0.5], measured=False, kind="none", relative=False)
    (line,) = csv.DictReader(io.StringIO(csv_text(report)))
    unknown = ("bound", "bound_relative_to_update", "deviation", "deviation_largest")
    assert [line[name] for name in ("bound_kind", *unknown)] == ["none", "", "", "", ""]


def test_a_name_cannot_steer_the_terminal():
    report = replace(fake_sweep(figures=True), output="a\x1b[31mb")
    report = replace(report, points=tuple(replace(point, figures={"x\x1b[2J": 1.0}) for point in report.points))
    shown = re.sub(r"\x1b\[[01]m", "", "\n".join(sweep_lines(report, verbose=True)))
    assert "\x1b" not in shown


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_has_the_curves_and_the_mergefiles_budget():
    text = picture(fake_sweep(), "svg").decode()
    for shown in (">bound<", ">expected<", ">measured<", ">Mergefile: 25%<", ">assistant (task_arithmetic)<", ">100%<"):
        assert shown in text
    assert picture(fake_sweep(), "svg").decode() == text, "the same report is the same file"


def test_the_picture_of_unusual_reports():
    assert picture(fake_sweep(), "png").startswith(b"\x89PNG")
    strange = fake_sweep([1.0], measured=False, kind="none", relative=False, name="$a_{1}$ \\frac")
    assert "$a_{1}$ \\frac" in picture(replace(strange, own=None), "svg").decode()


# --- the page ---------------------------------------------------------------------------------------------------------


class Parsed(HTMLParser):
    """What is in a page: tags with attributes, and the text of scripts and of everything else."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.words, self._inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if self._inside and self._inside[-1] == "script":
            self.scripts[-1] += data
        elif not self._inside or self._inside[-1] != "style":
            self.words.append(data)


def data_of(text):
    return json.loads(Parsed(text).scripts[0])


def test_the_page_needs_nothing_else():
    text = page(fake_sweep())
    parsed = Parsed(text)
    assert {"src", "href", "srcset", "action"} & {name for _, attributes in parsed.tags for name in attributes} == set()
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?i)https?:|//\w+\.|url\(|@import|\bimport\(|fetch\(|XMLHttp", outside) == []
    policy = next(a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert "prefers-color-scheme: dark" in text
    assert "@" not in re.sub(r"@media[^{]*", "", text), "every place of the template was filled"


def test_the_page_has_what_it_draws():
    report = fake_sweep(figures=True)
    data = data_of(page(report))
    assert [point["bytes"] for point in data["points"]] == [point.expert_bytes for point in report.points]
    assert [point["deviation"] for point in data["points"]] == pytest.approx(
        [point.deviation.length.relative_to_update for point in report.points], rel=1e-7
    )
    assert data["own"] == {"budget": "25%", "bytes": report.own.expert_bytes}
    assert len(data["steps"]) == 101
    assert {(data["layers"][cell[0]], data["modules"][cell[1]], data["experts"][cell[2]]) for cell in data["cells"]
            if cell[0] >= 0} == {(cell.layer, cell.module, report.experts[cell.expert]) for cell in report.map.cells
                                 if cell.layer is not None}  # fmt: skip
    assert data["points"][0]["figures"] == [["perplexity", 9.25], ["loss", pytest.approx(2.2246, abs=1e-4)]]
    assert data["steps"][-1]["losses"] == []
    tensor, omitted, bound, expected, mass = data["steps"][0]["losses"][0]
    assert (data["tensors"][tensor], omitted, mass) == ("model.layers.0.self_attn.q_proj.weight", 5_000_000, 1.0)
    assert (bound, expected) == pytest.approx((3.1 / 2 / report.update, 1.7 / 2 / report.update))


def test_names_do_no_harm():
    report = fake_sweep(name=EVIL, experts=(EVIL, "code"), modules=(EVIL, "a & b"), figures=True)
    losses = tuple(replace(loss, tensor=EVIL) for loss in report.points[0].losses)
    points = tuple(replace(point, losses=losses, figures={EVIL: 1.0}) for point in report.points)
    steps = tuple(replace(step, losses=losses) for step in report.map.steps)
    report = replace(report, points=points, operator=EVIL, base=EVIL, map=replace(report.map, steps=steps))
    text = page(report)
    harmless = Parsed(page(fake_sweep(figures=True)))
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.tags if tag in ("script", "img")] == ["script", "script"]
    assert {tag for tag, _ in parsed.tags} == {tag for tag, _ in harmless.tags}
    assert parsed.scripts[1] == harmless.scripts[1]
    assert data_of(text)["experts"][0] == EVIL, "and they are shown as they are"
    assert EVIL in "".join(parsed.words)


def test_the_script_puts_in_text_as_text():
    script = Parsed(page(fake_sweep())).scripts[1]
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script) == []


def test_what_is_not_finite_is_no_number_in_the_page():
    report = fake_sweep([0.0, 1.0], kind="none", relative=False, measured=False)
    data = data_of(page(report))
    assert (data["relative"], data["points"][0]["bound"], data["points"][0]["kind"]) == (False, None, "none")
    broken = replace(report.points[0], omitted_mass=float("nan"), figures={"loss": float("nan"), "x": 1.0})
    assert data_of(page(replace(report, points=(broken, *report.points[1:]))))["points"][0]["figures"] == [["x", 1.0]]


def test_the_page_can_be_used_by_keyboard_and_on_a_phone():
    parsed = Parsed(page(fake_sweep()))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags
    (slider,) = [attributes for tag, attributes in parsed.tags if tag == "input"]
    assert slider["type"] == "range"
    assert slider["id"] in [attributes.get("for") for tag, attributes in parsed.tags if tag == "label"]
    wide = [attributes for _, attributes in parsed.tags if attributes.get("class") == "wide"]
    assert [attributes["tabindex"] for attributes in wide] == ["0", "0"], "what scrolls can be scrolled by keys"


def test_the_table_of_the_page_needs_no_script():
    words = "".join(Parsed(page(fake_sweep(figures=True))).words)
    for shown in ("perplexity", "8.25", "480 MB (100.0%)", "25% *", "*: the budget of the Mergefile"):
        assert shown in words
