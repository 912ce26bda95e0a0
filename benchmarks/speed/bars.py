"""The bars that mergepipe is held to, and what was measured. Each is in the table, also where nothing was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.speed import rows
from benchmarks.speed.compare import WITHIN
from benchmarks.speed.ratios import Ratio, median, ratio, runs_of
from benchmarks.speed.results import Json
from benchmarks.speed.rows import COLD, MODES, ROWS, WARM
from mergepipe.units import format_bytes

MEMORY = 400_000_000
FLAT = 1.15
ROUNDS = 5  # with fewer than these the table says how many there were
FULL_ROWS = tuple(row.name for row in ROWS.values() if row.kind == "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes
    ----------
    what, target, measured
        In words.
    met
        None where it was not measured.
    """

    what: str
    target: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """Return whether it is met, in words."""
        return {None: "not measured", True: "yes", False: "**no**"}[self.met]


def bars(found: Json) -> list[Bar]:
    """Return all bars."""
    parts: Sequence[Callable[[Json], Iterator[Bar]]] = (
        _speed, _memory, _floor, _budget, _second, _nothing, _tensor, _parameters, _again,
    )  # fmt: skip
    return [bar for part in parts for bar in part(found)]


def _at_least(what: str, found: Ratio | None, target: float) -> Bar:
    return _bar(what, f"at least {target:g}x", found, lambda value: value >= target)


def _at_most(what: str, found: Ratio | None, target: float) -> Bar:
    return _bar(what, f"at most {target:g}x", found, lambda value: value <= target)


def _bar(what: str, target: str, found: Ratio | None, met: Callable[[float], bool]) -> Bar:
    if found is None:
        return Bar(what=what, target=target, measured="", met=None)
    spread = f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"
    if min(found.rounds) < ROUNDS:
        counts = " and ".join(str(count) for count in dict.fromkeys(found.rounds))
        spread += f", {counts} round{'' if counts == '1' else 's'}"
    return Bar(what=what, target=target, measured=spread, met=met(found.value))


def _speed(found: Json) -> Iterator[Bar]:
    targets: dict[str, tuple[float, float]] = dict.fromkeys(("linear", "task_arithmetic", "slerp"), (5.0, 4.0))
    targets |= dict.fromkeys(("linear-8", "task_arithmetic-8"), (4.0, 3.5))
    targets |= {"ties": (12.0, 12.0), "dare_linear": (8.0, 8.0), "dare_ties": (8.0, 8.0)}
    for name, (warm, cold) in targets.items():
        for mode, target in ((WARM, warm), (COLD, cold)):
            for who in (rows.OURS, rows.L1):
                if who in rows.participants(ROWS[name]):
                    text = f"{ROWS[name].title}, {mode}: mergekit's best flags / {who}"
                    yield _at_least(text, ratio(found, name, mode, rows.BEST, who), target)


def _memory(found: Json) -> Iterator[Bar]:
    peaks = {name: _peak(found, name) for name in FULL_ROWS}
    known = {name: peak for name, peak in peaks.items() if peak is not None}
    worst = max(known, key=lambda name: known[name], default=None)
    yield Bar(
        what="peak memory of every full merge",
        target=f"under {format_bytes(MEMORY)}",
        measured=f"{format_bytes(known[worst])} (`{worst}`), {len(known)} of {len(peaks)} merges" if worst else "",
        met=known[worst] < MEMORY if worst and len(known) == len(peaks) else None,
    )
    for name in rows.participants(ROWS["memory"]):
        larger = max((run["rss"] for run in runs_of(found, "memory", WARM, name)), default=None)
        ours = known.get(name)
        shape = rows.LARGER.get(found.get("rows", {}).get("memory", {}).get("shape"), "")
        yield Bar(
            what=f"peak memory of `{name}` with a shape twice as large",
            target=f"at most {FLAT:g}x, under {format_bytes(MEMORY)}",
            measured=f"{format_bytes(larger)} ({shape}), {larger / ours:.2f}x" if larger and ours else "",
            met=larger <= FLAT * ours and larger < MEMORY if larger and ours else None,
        )


def _peak(found: Json, name: str) -> int | None:
    """Return the largest peak memory of mergepipe in a row."""
    who = [one for one in rows.participants(ROWS[name]) if one.startswith(rows.OURS)]
    runs = [run for mode in MODES for one in who for run in runs_of(found, name, mode, one)]
    return max((run["rss"] for run in runs), default=None)


def _floor(found: Json) -> Iterator[Bar]:
    for name in FULL_ROWS:
        for mode, target in ((COLD, 1.3), (WARM, 2.5)):
            text = f"{ROWS[name].title}, {mode}: mergepipe / I/O floor"
            yield _at_most(text, ratio(found, name, mode, rows.OURS, rows.FLOOR), target)


def _budget(found: Json) -> Iterator[Bar]:
    name = "task_arithmetic-8"
    for mode in (WARM, COLD):
        what = f"`task_arithmetic`, 8 experts at 10%, deltas measured, {mode}"
        of_full = _inverse(ratio(found, name, mode, rows.OURS, rows.BUDGET))
        yield _at_most(f"{what}: / mergepipe's full read", of_full, 0.4)
        yield _at_least(
            f"{what}: mergekit's best flags / mergepipe", ratio(found, name, mode, rows.BEST, rows.BUDGET), 11
        )


def _inverse(found: Ratio | None) -> Ratio | None:
    if found is None:
        return None
    return dataclasses.replace(
        found, of=found.by, by=found.of, value=1 / found.value, low=1 / found.high, high=1 / found.low
    )


def _second(found: Json) -> Iterator[Bar]:
    for mode in (WARM, COLD):
        text = f"a second output over the same sources, {mode}: both / one"
        yield _at_most(text, ratio(found, "second-output", mode, rows.TWO, rows.ONE), 1.4)


def _nothing(found: Json) -> Iterator[Bar]:
    runs = runs_of(found, "changes", WARM, rows.NOTHING)
    read = max((_weight_bytes(run) for run in runs), default=None)
    yield Bar(
        what="nothing changed: bytes of weights read",
        target="none",
        measured="" if read is None else format_bytes(read),
        met=None if read is None else read == 0,
    )
    wall = median(runs, "wall") if runs else None
    yield Bar(
        what="nothing changed: wall time",
        target="under 0.3 s",
        measured="" if wall is None else f"{wall:.2f} s",
        met=None if wall is None else wall < 0.3,
    )


def _weight_bytes(run: Json) -> int:
    return int(run["expert_bytes"] + run["base_bytes"] + run["index_bytes"])


def _tensor(found: Json) -> Iterator[Bar]:
    runs = runs_of(found, "changes", WARM, rows.TENSOR)
    yield Bar(
        what="one tensor of one expert changed: expert bytes read to merge",
        target="that tensor's bytes times the experts",
        measured=f"{runs[0]['expert_bytes']} of {runs[0]['expected_bytes']}" if runs else "",
        met=all(run["expert_bytes"] == run["expected_bytes"] for run in runs) if runs else None,
    )
    third = _inverse(ratio(found, "changes", WARM, rows.FULL, rows.TENSOR))
    yield _bar("one tensor of one expert changed: / full build", "at most 1/3", third, lambda value: value <= 1 / 3)


def _parameters(found: Json) -> Iterator[Bar]:
    for name in ("parameter-slerp", "parameter-ties"):
        for parameter in rows.parameters(ROWS[name]):
            runs = runs_of(found, name, WARM, f"{parameter} changed")
            taken = sum(run["statistics"] for run in runs)
            seen = all(run["statistics"] for run in runs_of(found, name, WARM, rows.BEFORE))  # else it shows nothing
            yield Bar(
                what=f"`{parameter}` of `{ROWS[name].merge.operator}` changed",
                target="no statistics pass",
                measured=("none" if not taken else f"in {taken} of {len(runs)} builds") if runs else "",
                met=not taken if runs and seen else None,
            )


def _again(found: Json) -> Iterator[Bar]:
    compared = found.get("compared")
    what = "every ratio of this table and the next in two runs of the benchmark"
    if not compared or compared["worst"] is None:
        yield Bar(what=what, target=f"within {WITHIN:.0%}", measured="", met=None)
        return
    far = "; ".join(f"{label}: {before:.2f}, {after:.2f}" for label, before, after in compared["apart"])
    measured = f"{compared['ratios']} ratios of {compared['before']} and {compared['after']}"
    yield Bar(
        what=what,
        target=f"within {WITHIN:.0%}",
        measured=f"{measured}, {compared['worst']:.0%} apart at most" + (f"; {far}" if far else ""),
        met=compared["worst"] <= WITHIN,
    )
