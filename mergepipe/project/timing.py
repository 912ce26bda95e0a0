"""How long builds take: what a run of the engine took is kept by kind of work, and estimates are made of that.

Kinds are merging and measuring with an operator, reading, copying from packs, bringing shards to the disk, and what a
run and a build take whatever they move. Outputs that are made in one run share its time by what workers spent on each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.speeds import record_seconds
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import MergepipeError
from mergepipe.plan.values import OutputPlan
from mergepipe.project.forecast import Forecast
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.run import Engine

# Moving less says nothing about the machine's speed, and takes no time that counts.
MEASURED_BYTES = 1_000_000
# From so many bytes on, the time that a run takes beside its work is that of the disk; below, it is the run's own.
_FLUSHED_BYTES = 64_000_000

READ, COPY, FLUSH, RUN, BUILD = "read", "copy", "flush", "run", "build"


def family(plan: OutputPlan) -> str:
    """Return under what name the speed of merging an output is kept: that of its operator, or of all of its slices'."""
    return "+".join(sorted({operator.signature.name for operator in plan.operators}))


# --- measuring ----------------------------------------------------------------------------------------------------


class PhaseClock:
    """A reporter that passes everything on, and keeps how long each phase took.

    Attributes
    ----------
    seconds
        By phase.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._phase = ""
        self._began = 0.0
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str, total_bytes: int) -> None:
        """Begin a phase."""
        self._phase, self._began = phase, time.perf_counter()
        self._reporter.begin(phase, total_bytes)

    def advance(self, count: int) -> None:
        """Pass it on."""
        self._reporter.advance(count)

    def end(self) -> None:
        """End the phase."""
        self._reporter.end()
        took = time.perf_counter() - self._began
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + took

    def note(self, message: str) -> None:
        """Pass it on."""
        self._reporter.note(message)

    def warn(self, message: str) -> None:
        """Pass it on."""
        self._reporter.warn(message)


class BuildClock:
    """Measures the runs of one build, and lets the catalog remember them.
    """

    def __init__(self, catalog: Catalog, reporter: Reporter) -> None:
        self._catalog = catalog
        self._reporter = reporter
        self._began = time.perf_counter()
        self._in_runs: float | None = None
        self._learned: list[Mapping[str, float]] = []

    def run(self, engine: Callable[[Reporter], Engine], plans: Sequence[OutputPlan]) -> Mapping[str, FinishedOutput]:
        """Run an engine, made to report to the reporter that it is given, and remember how long each work took."""
        clock, began = PhaseClock(self._reporter), time.perf_counter()
        finished = engine(clock).run(plans)
        seconds = time.perf_counter() - began
        self._in_runs = (self._in_runs or 0.0) + seconds
        runs = [Run(plan, finished[plan.output.name].meter) for plan in plans]
        self._learned.append(learned(runs, clock.seconds, seconds))
        return finished

    def finish(self) -> None:
        """Remember what the runs took, and the build beside them; nothing if there was none."""
        if self._in_runs is None:
            return
        self._learned.append({BUILD: time.perf_counter() - self._began - self._in_runs})
        # A disk that is full now loses an estimate, not a build.
        with contextlib.suppress(MergepipeError), self._catalog.transaction():
            for measured in self._learned:
                record_seconds(self._catalog, measured)


@dataclass(frozen=True, slots=True)
class Run:
    """One output of a run, and what was counted."""

    plan: OutputPlan
    meter: Meter


def learned(runs: Sequence[Run], phases: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return what one run tells: by kind of work the seconds for a byte, or for the whole run.

    Parameters
    ----------
    phases
        Seconds of each phase (`PhaseClock`).
    seconds
        Of the whole run.
    """
    meters = [run.meter for run in runs]
    busy = sum(m.reading_seconds + m.measuring_seconds + m.merging_seconds for m in meters)
    # What the threads took together, as the time that went by.
    share = phases.get("merging", 0.0) / busy if busy else 0.0
    taken: dict[str, tuple[float, float]] = {}

    def add(kind: str, took: float, moved: float) -> None:
        before = taken.get(kind, (0.0, 0.0))
        taken[kind] = (before[0] + took * share, before[1] + moved)

    for run in runs:
        meter = run.meter
        add(READ, meter.reading_seconds, meter.expert_bytes + meter.base_bytes + meter.index_bytes)
        add(merging(run.plan), meter.merging_seconds, meter.merged_bytes)
        add(measuring(run.plan), meter.measuring_seconds, meter.measured_bytes)
    found = {kind: took / moved for kind, (took, moved) in taken.items() if moved >= MEASURED_BYTES}
    moved = sum(meter.moved_bytes for meter in meters)
    if moved >= MEASURED_BYTES and "copying" in phases:
        found[COPY] = phases["copying"] / moved
    rest, written = seconds - sum(phases.values()), sum(meter.written for meter in meters)
    found |= {FLUSH: rest / written} if written >= _FLUSHED_BYTES else {RUN: rest}
    return found


def merging(plan: OutputPlan) -> str:
    """Return the kind of work that merging an output is."""
    return f"merge {family(plan)}"


def measuring(plan: OutputPlan) -> str:
    """Return the kind of work that taking the statistics of an output's reductions is."""
    return f"measure {family(plan)}"


# --- estimating ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """How long the next build takes for one output, from what earlier ones took.

    Attributes
    ----------
    seconds
        None where something that it takes was never measured here.
    unknown
        What was not: kinds of work in words.
    """

    seconds: float | None
    unknown: tuple[str, ...] = ()


def estimate_times(
    plans: Sequence[OutputPlan], forecasts: Mapping[str, Forecast], known: Mapping[str, float]
) -> dict[str, TimeEstimate]:
    """Return the estimate of each output; together they are that of the build.

    Parameters
    ----------
    known
        By kind of work what it takes (`mergepipe.cache.speeds`).
    """
    if READ in known:  # a copy is a byte that is read, hashed and written; the first ones are not timed yet
        known = {COPY: known[READ], **known}
    made = [plan for plan in plans if not forecasts[plan.output.name].unchanged]
    found = {plan.output.name: TimeEstimate(seconds=0.0) for plan in plans}
    written = sum(forecasts[plan.output.name].moves.written for plan in made)
    flushed = FLUSH in known and (written >= _FLUSHED_BYTES or RUN not in known)
    for plan in made:
        moves = forecasts[plan.output.name].moves
        parts = {
            READ: moves.expert_bytes + moves.base_bytes + moves.index_bytes - moves.doubtful_bytes,
            merging(plan): moves.merged_bytes,
            measuring(plan): moves.measured_bytes,
            COPY: moves.moved_bytes,
        }
        missing = [kind for kind, count in parts.items() if count >= MEASURED_BYTES and kind not in known]
        if missing or not known.keys() & {RUN, FLUSH}:
            found[plan.output.name] = TimeEstimate(seconds=None, unknown=_words(missing, plan) if known else ())
            continue
        seconds = sum(count * known.get(kind, 0.0) for kind, count in parts.items())
        seconds += moves.written * known[FLUSH] if flushed else known[RUN] / len(made)
        found[plan.output.name] = TimeEstimate(seconds=seconds + known.get(BUILD, 0.0) / len(made))
    return found


def _words(kinds: Iterable[str], plan: OutputPlan) -> tuple[str, ...]:
    names = {merging(plan): family(plan), measuring(plan): f"statistics of {family(plan)}"}
    return tuple(names.get(kind, {READ: "reading", COPY: "copying"}.get(kind, kind)) for kind in kinds)
