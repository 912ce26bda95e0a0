"""The page of a sweep in a real browser: no complaint, nothing wider than the screen, keyboard, hostile names."""

import pytest
from unit.cli.sweeps import fake_sweep

from mergepipe.cli.pages.page import page

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def opened(screen, tmp_path):
    """Return what opens the page of a sweep."""
    path = tmp_path / "sweep.html"

    def open_page(**options):
        path.write_text(page(fake_sweep(figures=True, **options)), encoding="utf-8")
        screen.open(path)
        return screen

    yield open_page
    assert screen.complaints == []
    assert screen.requests == [path.as_uri()]


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen(opened, tmp_path, width, dark):
    shown = opened(layers=12)
    shown.resize(width, dark=dark)
    assert shown.overflow() <= 0
    assert len(shown.screenshot(tmp_path / "sweep.png")) > 10_000


@pytest.mark.parametrize("width", [400, 1400])
def test_long_names_and_many_layers_fit(opened, width):
    experts = ("a-rather-long-name-of-an-expert-that-goes-on-and-on", "code")
    shown = opened(layers=80, experts=experts, name="x" * 60)
    shown.resize(width)
    assert shown.overflow() <= 0


def test_hostile_names_are_shown_and_do_nothing(opened):
    shown = opened(name=EVIL, experts=(EVIL, "b"), modules=(EVIL,))
    assert shown.run("document.querySelectorAll('img').length") == 0
    assert shown.run("document.querySelector('h1').textContent") == EVIL


def test_the_slider_is_moved_by_keyboard_and_says_what_it_reads(opened):
    shown = opened()
    shown.run("document.getElementById('step').focus()")
    before = shown.run("document.getElementById('readout').textContent")
    shown.press("ArrowRight")
    assert shown.run("document.getElementById('readout').textContent") != before


def test_the_figures_are_those_of_the_sweep(opened):
    shown = opened()
    report = fake_sweep(figures=True)
    rows = shown.run(
        "[...document.querySelectorAll('section:last-of-type tbody tr')].map((row) => row.cells[0].textContent)"
    )
    assert [row.removesuffix(" *") for row in rows] == [point.budget for point in report.points]


@pytest.mark.parametrize("measured", [True, False])
def test_the_curves_say_that_what_is_measured_may_exceed_a_bound(opened, measured):
    shown = opened(measured=measured)
    note = shown.run("document.getElementById('curves-note').textContent")
    assert note.endswith("their rounding is in no bound.") == measured


@pytest.mark.parametrize("width", [400, 1400])
def test_levels_are_drawn_beside_whole_blocks_and_said(opened, width):
    shown = opened(levels=True)
    shown.resize(width)
    assert shown.overflow() <= 0
    titles = shown.run("[...document.querySelectorAll('#legend li')].map((one) => one.textContent)")
    kinds = ["bound", "expected", "measured"]
    assert titles == [*kinds, *(f"{kind} in levels" for kind in kinds)]
    assert shown.run("document.querySelectorAll('#chart .levels .line').length") == 3
    assert "in levels: reads" in shown.run("document.getElementById('chart-status').textContent")
