"""Running rows round by round: in every round all who take part run once, in turn, in every mode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import machine
from benchmarks.speed import mergekit, rows
from benchmarks.speed.ground import Ground
from benchmarks.speed.process import CommandError
from benchmarks.speed.results import Results
from benchmarks.speed.rows import ROWS, Rounds, Row
from benchmarks.speed.steps import Step, steps

CHECKED = (rows.OURS, rows.TWO, rows.FULL, rows.BEFORE)


def run(
    chosen: Sequence[Row], ground: Ground, rounds: Rounds, modes: Sequence[str], results: Results, *, resume: bool
) -> None:
    """Measure rows and keep the figures; with ``resume`` complete rounds that are there are not run again."""
    for row in chosen:
        began = time.perf_counter()
        ground.prepare(row.experts)
        ground.clear()
        facts: dict[str, Any] = {"shape": ground.shape}
        if row.kind == "full" and ground.python is not None:
            facts["mergekit_flags"] = ground.flags
        results.begin(row.name, facts, modes, resume=resume)
        try:
            _rounds(row, ground, rounds, modes, results)
        finally:
            ground.clear()
        print(f"{row.name}: {time.perf_counter() - began:.0f} s in all", flush=True)
    results.save()


def _rounds(row: Row, ground: Ground, rounds: Rounds, modes: Sequence[str], results: Results) -> None:
    everybody = steps(row, ground)
    for number in range(max(rounds.of(row, who) for who in everybody)):
        for mode in modes:
            taking_part = {who: step for who, step in everybody.items() if rounds.of(row, who) > number}
            if mode not in row.modes or results.is_complete(row.name, number, mode, taking_part):
                continue
            results.drop(row.name, number, mode)
            _round(row, ground, number, mode, taking_part, results)


def _round(row: Row, ground: Ground, number: int, mode: str, taking_part: dict[str, Step], results: Results) -> None:
    for who, step in taking_part.items():
        figures = step(mode)
        if who in CHECKED and (number, mode) == (0, row.modes[-1]):
            ground.check_hashed()
        _check_digest(row.name, who, figures, results)
        if ground.emptied is not None:
            results.note(row.name, emptied=ground.emptied)
        results.add(row.name, number, mode, who, figures)
        print(f"{row.name}, round {number + 1}, {mode}: {who}: {figures['wall']:.2f} s", flush=True)


def _check_digest(row: str, who: str, figures: dict[str, Any], results: Results) -> None:
    """Check that every run of the same build gave the same output."""
    if "digest" not in figures:
        return
    for other in results.rows[row]["runs"]:
        if other["who"] == who and other["digest"] != figures["digest"]:
            raise CommandError(f"{row}, {who}: {figures['digest']}, but {other['digest']} in an earlier run")


def try_flags(ground: Ground, names: Sequence[str], count: int, results: Results) -> None:
    """Measure mergekit with every set of flags, and with float32 arithmetic, in turn; the page cache is warm.

    Parameters
    ----------
    names
        Full rows whose merges are tried.
    """
    ground.prepare(max(ROWS[name].experts for name in names))
    ground.clear()
    tried: list[dict[str, Any]] = []
    results.found["flags"] = {"shape": ground.shape, "machine": machine(), "runs": tried}
    for _ in range(count):
        for name in names:
            for flags in mergekit.TRIED:
                for dtype in (mergekit.DTYPE, "float32") if not flags else (mergekit.DTYPE,):
                    figures = ground.mergekit(ROWS[name].merge, rows.WARM, flags, dtype)
                    tried.append({"row": name, "flags": flags, "dtype": dtype} | figures)
                    results.save()
                    print(f"{name}, {dtype} {flags}: {figures['wall']:.2f} s, CPU {figures['cpu']:.2f} s", flush=True)
