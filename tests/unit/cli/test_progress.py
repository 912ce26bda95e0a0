import contextlib
import io
import sys

import pytest
from unit.cli.fakes import clean_variables

from mergepipe.cli.console import Console
from mergepipe.cli.options import GlobalOptions
from mergepipe.cli.progress import BarDisplay, LineDisplay, ProgressReporter, make_reporter

GB = 10**9


class Clock:
    """A clock that stands still between two settings."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """What a program writes to a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def lines():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reporter(lines, clock):
    return ProgressReporter(Console(GlobalOptions()), LineDisplay(lines.append), clock=clock)


def work(reporter, clock, seconds, *, step=0.1, rate=0.1 * GB, phase="merging"):
    """Report work of some seconds at a steady rate."""
    reporter.begin(phase, int(seconds * rate))
    for _ in range(round(seconds / step)):
        clock.now += step
        reporter.advance(int(rate * step))
    reporter.end()


def test_short_work_prints_nothing(reporter, clock, lines):
    work(reporter, clock, 4.8)
    assert lines == []


def test_long_work_prints_a_line_every_few_seconds(reporter, clock, lines):
    work(reporter, clock, 12)
    assert lines == [
        "merging: 500 MB of 1.20 GB (42%), 100 MB/s, 7.00 s left",
        "merging: 1.00 GB of 1.20 GB (83%), 100 MB/s, 2.00 s left",
        "merging: 1.20 GB in 12.0 s (100 MB/s)",
    ]


def test_hours_of_work_do_not_flood_a_log(reporter, clock, lines):
    work(reporter, clock, 10 * 3600, step=1)
    assert 20 < len(lines) < 150


def test_phases_are_timed_one_by_one(reporter, clock, lines):
    work(reporter, clock, 4)
    work(reporter, clock, 4, phase="copying")
    assert lines == []
    work(reporter, clock, 6, phase="hashing")
    assert [line.partition(":")[0] for line in lines] == ["hashing", "hashing"]


def test_an_unknown_total_is_no_error(reporter, clock, lines):
    reporter.begin("hashing", 0)
    clock.now += 6
    reporter.advance(GB)
    reporter.end()
    assert lines[0] == "hashing: 1.00 GB of 0 B, 167 MB/s"


def test_leaving_the_context_ends_the_phase(reporter, clock, lines):
    with reporter:
        reporter.begin("merging", GB)
        clock.now += 6
        reporter.advance(GB // 2)
    assert lines[-1] == "merging: 500 MB in 6.00 s (83.3 MB/s)"


@pytest.fixture
def terminal(monkeypatch):
    clean_variables(monkeypatch, {"COLUMNS": "80", "LINES": "24"})
    return Terminal()


@contextlib.contextmanager
def bar_reporter(terminal, clock, *, colour=False):
    """Give a reporter that draws on a terminal, which is stderr meanwhile."""
    with contextlib.redirect_stderr(terminal):
        display = BarDisplay(colour=colour)
        with ProgressReporter(Console(GlobalOptions(color="never")), display, clock=clock) as reporter:
            yield reporter
        assert sys.stderr is terminal


def test_a_terminal_gets_a_bar_with_bytes_rate_and_time(terminal, clock):
    with bar_reporter(terminal, clock) as reporter:
        reporter.begin("merging", 4 * GB)
        clock.now += 1
        reporter.advance(GB)
        reporter.end()
    assert "merging" in terminal.getvalue()
    assert "1.0/4.0 GB" in terminal.getvalue()


def test_short_work_draws_no_bar(terminal, clock):
    with bar_reporter(terminal, clock) as reporter:
        work(reporter, clock, 0.4)
    assert terminal.getvalue() == ""


def test_a_bar_does_not_read_markup(terminal, clock):
    with bar_reporter(terminal, clock) as reporter:
        reporter.begin("merging [bold]a[/bold]", GB)
        clock.now += 1
        reporter.advance(GB // 2)
        reporter.note("tensor `[red]x[/red]` dropped")
        reporter.end()
    assert "merging [bold]a[/bold]" in terminal.getvalue()
    assert "note: tensor `[red]x[/red]` dropped" in terminal.getvalue()


@pytest.mark.parametrize("colour", [True, False])
def test_a_bar_has_colours_only_where_they_are_wanted(terminal, clock, colour):
    with bar_reporter(terminal, clock, colour=colour) as reporter:
        reporter.begin("merging", GB)
        clock.now += 1
        reporter.advance(GB // 2)
    assert ("\x1b[32m" in terminal.getvalue()) is colour


def test_the_cursor_is_back_after_a_failure(terminal, clock):
    def fail():
        with bar_reporter(terminal, clock) as reporter:
            reporter.begin("merging", GB)
            clock.now += 1
            reporter.advance(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def display_of(stderr, **options):
    """Return how progress is shown on a stream."""
    with contextlib.redirect_stderr(stderr):
        return make_reporter(Console(GlobalOptions(**options)), GlobalOptions(**options))._display


def test_a_terminal_is_drawn_on(terminal):
    assert isinstance(display_of(terminal), BarDisplay)
    assert isinstance(display_of(terminal, json_output=True), BarDisplay)
    assert display_of(terminal, quiet=True) is None


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_of(terminal), LineDisplay)


def test_a_pipe_gets_lines_unless_it_gets_json():
    assert isinstance(display_of(io.StringIO()), LineDisplay)
    assert display_of(io.StringIO(), json_output=True) is None
    assert display_of(io.StringIO(), quiet=True) is None
