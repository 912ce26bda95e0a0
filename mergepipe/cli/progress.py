"""Progress of long work: a bar on a terminal, plain lines now and then elsewhere, and nothing for short work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from mergepipe.cli.console import Console, is_terminal
from mergepipe.cli.options import GlobalOptions
from mergepipe.cli.tables import duration, plain
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds of work before a bar appears: what is done sooner needs none.
_BAR_DELAY = 0.5
# Seconds between two lines; and as a share of the time passed, so that a log of hours stays short.
_LINE_INTERVAL = 5.0
_LINE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where a phase stands: bytes done of how many, after how many seconds."""

    phase: str
    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.done / self.seconds if self.seconds > 0 else 0.0


class Display(Protocol):
    """Shows a phase while it lasts."""

    def update(self, step: Step) -> None:
        """Show where the phase stands now, if it is time for that."""

    def finish(self, step: Step) -> None:
        """Show that the phase is over, if anything was shown of it."""


class LineDisplay:
    """Prints a line every few seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown_at = 0.0

    def update(self, step: Step) -> None:
        """Print a line if the last one is long ago."""
        if step.seconds - self._shown_at >= max(_LINE_INTERVAL, step.seconds * _LINE_SHARE):
            self._shown_at = step.seconds
            self._write(progress_line(step))

    def finish(self, step: Step) -> None:
        """Print the end of a phase of which lines were printed."""
        if self._shown_at:
            took = f"{format_bytes(step.done)} in {duration(step.seconds)} ({format_bytes(step.rate)}/s)"
            self._write(f"{plain(step.phase)}: {took}")
        self._shown_at = 0.0


def progress_line(step: Step) -> str:
    """Return ``merging: 1.20 GB of 4.80 GB (25%), 480 MB/s, 7.5 s left``."""
    part = f" ({min(1.0, step.done / step.total):.0%})" if step.total else ""
    left = f", {duration((step.total - step.done) / step.rate)} left" if 0 < step.done < step.total else ""
    amount = f"{format_bytes(step.done)} of {format_bytes(step.total)}{part}"
    return f"{plain(step.phase)}: {amount}, {format_bytes(step.rate)}/s{left}"


class BarDisplay:
    """Draws a progress bar on the terminal of stderr; it is gone when the phase is over.

    Parameters
    ----------
    colour
        Whether it has colours.
    """

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._bar: Progress | None = None

    def update(self, step: Step) -> None:
        """Move the bar; draw it once the phase is not short any more."""
        if self._bar is None and step.seconds >= _BAR_DELAY:
            self._bar = _new_bar(colour=self._colour)
            self._bar.start()
            self._bar.add_task(plain(step.phase), total=step.total, completed=step.done)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step.done)

    def finish(self, step: Step) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _new_bar(*, colour: bool) -> Progress:
    # rich takes longer to import than most commands take.
    from rich.console import Console as Terminal
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Terminal(stderr=True, no_color=not colour, highlight=False, markup=False),
        transient=True,
    )


class ProgressReporter:
    """Shows what work reports: the `Reporter` of the command line. Use as a context, which ends what is shown.

    Parameters
    ----------
    display
        None shows no progress.
    clock
        Seconds from any start.
    """

    def __init__(
        self, console: Console, display: Display | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._display = display
        self._clock = clock
        self._phase = ""
        self._total = self._done = 0
        self._started = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, phase: str, total_bytes: int) -> None:
        """Start a phase."""
        self.end()
        self._phase, self._total, self._done, self._started = phase, total_bytes, 0, self._clock()

    def advance(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        if self._display is not None:
            self._display.update(self._step())

    def end(self) -> None:
        """End the phase, if one is on."""
        if self._display is not None and self._phase:
            self._display.finish(self._step())
        self._phase = ""

    def note(self, message: str) -> None:
        """Say something worth knowing."""
        self._console.note(message)

    def warn(self, message: str) -> None:
        """Say something that the user should look at."""
        self._console.warn(message)

    def _step(self) -> Step:
        return Step(phase=self._phase, done=self._done, total=self._total, seconds=self._clock() - self._started)


def make_reporter(console: Console, options: GlobalOptions) -> ProgressReporter:
    """Return the reporter for how stderr and the options are."""
    display: Display | None = None
    if not options.quiet and sys.stderr is not None:
        if is_terminal(sys.stderr):
            display = BarDisplay(colour=console.has_colour(sys.stderr))
        elif not options.json_output:
            display = LineDisplay(console.progress)
    return ProgressReporter(console, display)
