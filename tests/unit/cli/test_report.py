"""`report`: where pages go, what must not be overwritten, and what stands in them."""

import functools
import html
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from unit.cli.reported import fake_report

import mergepipe.cli.pages.maps as maps
from mergepipe.cli.pages.maps import STEPS, HeatMap, Scale, percent, scale_of, svg_of
from mergepipe.cli.pages.report import GENERATOR, page
from mergepipe.cli.pages.report_maps import heat_maps

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TURNED = "abc\u202etxt.exe\u200f"


@functools.cache
def usual_page():
    return page(fake_report())


@pytest.fixture
def reported(cli, tmp_path, monkeypatch):
    """Return the runner of command lines, on a project with two outputs."""
    outputs = {"assistant": None, "average": None}
    monkeypatch.setattr(
        type(cli.project), "mergefile", property(lambda self: SimpleNamespace(root=tmp_path, outputs=outputs))
    )
    return cli


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_page_is_written_beside_the_mergefile(reported, tmp_path):
    result = reported("report", "assistant")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout == "wrote assistant.report.html\n"
    assert (tmp_path / "assistant.report.html").read_text(encoding="utf-8") == usual_page()
    assert reported.project.calls == [("report", {"outputs": ("assistant",)})]


def test_a_page_of_an_earlier_report_is_replaced_and_nothing_else(reported, tmp_path):
    assert reported("report", "assistant").code == 0
    assert reported("report", "assistant").code == 0
    mine = tmp_path / "assistant.report.html"
    mine.write_text("<html>my notes</html>")
    result = reported("report", "assistant")
    assert result.code == 2
    assert f"error: `{mine}` is there, and is no page of a report" in result.stderr
    assert mine.read_text() == "<html>my notes</html>"
    assert reported("report", "assistant", "--force").code == 0
    assert GENERATOR in mine.read_text()[:1024]


def test_a_broken_link_is_not_written_through(reported, tmp_path):
    (tmp_path / "assistant.report.html").symlink_to(tmp_path / "elsewhere.html")
    assert reported("report", "assistant").code == 2
    assert not (tmp_path / "elsewhere.html").exists()


def test_foreign_files_are_refused_before_anything_is_measured(reported, tmp_path):
    (tmp_path / "out.html").write_text("mine")
    assert reported("report", "assistant", "-o", "out.html").code == 2
    assert reported.project.calls == []


def test_a_file_holds_one_page(reported, tmp_path):
    result = reported("report", "-o", "out.html")
    assert result.code == 2
    assert "`out.html` cannot hold the pages of 2 outputs" in result.stderr
    assert reported("report", "assistant", "-o", "out.html").stdout == "wrote out.html\n"
    assert (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("target", "why"),
    [("gone/x.html", "`gone` is no directory"), (".", "it is a directory"), ("sub/", "it is a directory")],
)
def test_a_place_that_cannot_be_written_is_named(reported, target, why):
    result = reported("report", "assistant", "-o", target)
    assert (result.code, result.stdout) == (2, "")
    assert f"`{target.rstrip('/')}` cannot be written: {why}" in result.stderr


def test_json_is_the_report_alone_and_writes_no_page(reported, tmp_path):
    result = reported("report", "assistant", "--json")
    assert json.loads(result.stdout) == {"outputs": {"assistant": json.loads(json.dumps(fake_report().as_json()))}}
    assert not list(tmp_path.glob("*.html"))


def test_json_needs_no_library(reported, monkeypatch):
    monkeypatch.setattr(maps.importlib.util, "find_spec", lambda name: None)
    assert reported("report", "assistant", "--json").code == 0


def test_a_missing_library_is_named_before_anything_is_read(reported, monkeypatch):
    monkeypatch.setattr(maps.importlib.util, "find_spec", lambda name: None)
    result = reported("report", "assistant")
    assert result.code == 2
    assert "`report` draws its maps with matplotlib, which is not installed" in result.stderr
    assert "hint: run `pip install 'mergepipe[report]'`" in result.stderr
    assert reported.project.calls == []


# --- the page ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Collects figures, identifiers, and elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.figures, self.ids, self.names, self.described = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        facts = dict(attributes)
        self.names.append(tag)
        if "id" in facts:
            self.ids.append(facts["id"])
        if "data-figure" in facts:
            self.figures[facts["data-figure"]] = facts["data-value"]
        for name in ("aria-labelledby", "aria-describedby", "for"):
            self.described += facts.get(name, "").split()
        assert not any(name.startswith("on") for name in facts)
        if tag == "a":
            self.described.append(facts["href"].removeprefix("#"))


def test_figures_are_those_of_the_report():
    report = fake_report()
    figures = Reader(usual_page()).figures
    assert figures["digest"] == report.digest
    assert int(figures["expert_bytes.planned"]) == report.budget.expert_bytes["planned"]
    assert float(figures["bound.absolute"]) == report.budget.bound.absolute
    assert float(figures["update_relative"]) == report.contribution.update_relative
    assert {name: int(figures[f"run.{name}"]) for name in report.last.run} == dict(report.last.run)
    assert {name: int(figures[f"expert_blocks.{name}"]) for name in report.budget.expert_blocks} == dict(
        report.budget.expert_blocks
    )


def test_identifiers_are_unique_and_whatever_is_referred_to_is_there():
    found = Reader(usual_page())
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.described) <= set(found.ids)


def test_hostile_names_are_text():
    names = (EVIL, TURNED, 'a"b', "$\\frac{1}{2}$", "日本語", "\x1b[31m", "a\nb", "\ud800")
    report = fake_report(name=EVIL + TURNED, experts=names[:2], layers=1, modules=names, outside=names)
    text = page(report)
    text.encode("utf-8")
    found = Reader(text)
    assert found.names.count("script") == 1
    assert "img" not in found.names
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x1b]", text)


def test_the_page_asks_for_nothing():
    text = usual_page()
    assert "default-src 'none'" in text
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text)
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"] * len(heat_maps(fake_report()))


def test_the_same_report_makes_the_same_page():
    assert page(fake_report()) == usual_page()


def test_without_contributions_the_page_says_why_and_shows_what_is_read():
    text = page(fake_report(measured=False))
    assert "its files are gone" in text
    assert [one.title for one in heat_maps(fake_report(measured=False))] == ["Read"]


def test_one_expert_has_no_agreement_with_others():
    titles = [one.title for one in heat_maps(fake_report(experts=("math",)))]
    assert titles == ["Update", "Read", "Share of math"]


# --- maps -------------------------------------------------------------------------------------------------------------


def test_each_cell_says_its_value_and_has_the_colour_of_it():
    report = fake_report()
    update = heat_maps(report)[0]
    text = svg_of(update)
    for cell in report.cells:
        where = f"layer {cell.layer}, " if cell.layer is not None else ""
        title = html.escape(f"{where}{cell.module}: {percent(cell.update_relative)}", quote=False)
        (colour,) = re.findall(rf'class="cell h(\d+)"><title>{re.escape(title)}</title>', text)
        assert int(colour) == update.scale.step(cell.update_relative)


def test_a_cell_without_a_value_is_outlined():
    one = HeatMap(
        name="x", title="x", note="", layers=(0,), modules=("a", "b"), values=((0.5, None),), outside=(),
        scale=Scale(low=0, high=1),
    )  # fmt: skip
    text = svg_of(one)
    assert text.count('class="cell h-none"') == 1
    assert "layer 0, b: –" in text


@pytest.mark.parametrize(("values", "low", "high"), [([0.013, 0.084], 0.01, 0.085), ([], 0.0, 1.0), ([0.0], 0.0, 0.5)])
def test_a_scale_holds_all_values_between_round_numbers(values, low, high):
    found = scale_of([values])
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert all(0 <= found.step(value) <= STEPS for value in values)


def test_a_model_without_layers_has_a_map_of_its_tensors():
    one = heat_maps(fake_report(layers=0))[0]
    assert (one.layers, len(one.outside)) == ((), 3)
    assert svg_of(one).count("<title>") == 3
