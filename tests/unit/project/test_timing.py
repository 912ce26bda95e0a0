"""Estimates of time: what runs teach, and what is made of it."""

from __future__ import annotations

import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject, edit_tensor

from mergepipe.engine.meter import Meter
from mergepipe.project import planning, timing
from mergepipe.project.forecast import Forecast
from mergepipe.project.moves import Moves
from mergepipe.project.timing import PhaseClock, Run, estimate_times, learned
from mergepipe.reporting import SilentReporter

MB = 10**6


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Return the plans of a linear output and of one of ties."""
    project = SmallProject(tmp_path_factory.mktemp("project"))
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (8, 16)}))
    for operator in ("linear", "ties"):
        project.set_output(operator, {"operator": operator, "base": "base", "experts": ["e1", "e2"]})
    opened = project.open()
    return {plan.output.name: plan for plan in opened._plans(tuple(opened.mergefile.outputs.values())).plans}


def forecast(**moves):
    return Forecast(unchanged=False, moves=Moves(**moves))


def run(plan, reading, merging, measuring=0.0, *, size=100 * MB, written=0, computed=10):
    """Return a run that read, merged and measured so many bytes each, in so many seconds of workers."""
    meter = Meter(
        expert_bytes=size,
        computed=computed,
        written=written,
        reading_seconds=reading,
        merging_seconds=merging,
        measuring_seconds=measuring,
        merged_bytes=size * computed // 10,
        measured_bytes=size if measuring else 0,
    )
    return Run(plan, meter)


def estimates(plans, runs, known):
    """Return what is made of what is known for builds that do again what these runs did."""
    same = ("expert_bytes", "written", "computed", "merged_bytes", "measured_bytes")
    moves = {name: {count: getattr(run.meter, count) for count in same} for name, run in runs.items()}
    forecasts = {name: forecast(**counts) for name, counts in moves.items()}
    found = estimate_times([plans[name] for name in runs], forecasts, known)
    return {name: estimate.seconds for name, estimate in found.items()}


def test_the_time_of_a_run_is_shared_by_its_outputs_and_not_counted_for_each(plans):
    runs = {"linear": run(plans["linear"], 2.0, 1.0), "ties": run(plans["ties"], 0.0, 9.0, 8.0)}
    known = learned(list(runs.values()), {"merging": 10.0}, 11.0)
    found = estimates(plans, runs, known)
    assert sum(found.values()) == pytest.approx(11.0)
    assert found["ties"] > 4 * found["linear"]


def test_an_operator_alone_takes_what_it_took_beside_others(plans):
    runs = {"linear": run(plans["linear"], 0.0, 2.0), "ties": run(plans["ties"], 0.0, 18.0)}
    known = learned(list(runs.values()), {"merging": 10.0}, 10.5)
    assert estimates(plans, {"linear": runs["linear"]}, known)["linear"] == pytest.approx(1.5)
    assert estimates(plans, {"ties": runs["ties"]}, known)["ties"] == pytest.approx(9.5)


def test_the_same_build_again_is_estimated_as_it_was(plans):
    runs = {"ties": run(plans["ties"], 3.0, 5.0, 4.0, written=200 * MB)}
    known = learned(list(runs.values()), {"merging": 7.0, "copying": 0.0}, 9.0)
    assert estimates(plans, runs, known)["ties"] == pytest.approx(9.0)


def test_blocks_that_were_not_computed_after_all_do_not_make_merging_look_quick(plans):
    all_of_them = learned([run(plans["ties"], 0.0, 4.0, computed=10)], {"merging": 4.0}, 4.0)
    half = learned([run(plans["ties"], 0.0, 2.0, computed=5)], {"merging": 2.0}, 2.0)
    assert half["merge ties"] == pytest.approx(all_of_them["merge ties"])


def test_a_run_that_moved_little_says_nothing_about_speed_but_what_a_run_takes(plans):
    known = learned([run(plans["ties"], 0.5, 0.5, size=1000)], {"merging": 0.5}, 0.75)
    assert known == {"run": pytest.approx(0.25)}


def test_what_was_never_timed_is_named_and_no_figure_is_made_up(plans):
    known = learned([run(plans["linear"], 1.0, 1.0)], {"merging": 1.0}, 1.2)
    ties = forecast(expert_bytes=100 * MB, merged_bytes=100 * MB, computed=10)
    (found,) = estimate_times([plans["ties"]], {"ties": ties}, known).values()
    assert found.seconds is None
    assert found.unknown == ("ties",)
    (nothing,) = estimate_times([plans["ties"]], {"ties": ties}, {}).values()
    assert (nothing.seconds, nothing.unknown) == (None, ())


def test_what_is_up_to_date_takes_no_time(plans):
    (found,) = estimate_times([plans["ties"]], {"ties": Forecast(unchanged=True)}, {}).values()
    assert found.seconds == 0


def test_what_a_build_takes_beside_its_runs_is_in_the_estimate_once(plans):
    runs = {name: run(plan, 0.0, 1.0) for name, plan in plans.items()}
    known = learned(list(runs.values()), {"merging": 1.0}, 1.5) | {timing.BUILD: 0.5}
    assert sum(estimates(plans, runs, known).values()) == pytest.approx(2.0)


def test_a_clock_of_phases_adds_up_each_of_them_and_passes_everything_on(monkeypatch):
    now = iter([1.0, 3.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    heard = []

    class Hearing(SilentReporter):
        def begin(self, phase, total_bytes):
            heard.append((phase, total_bytes))

        def warn(self, message):
            heard.append(message)

    clock = PhaseClock(Hearing())
    for phase in ("merging", "copying", "merging"):
        clock.begin(phase, 5)
        clock.advance(1)
        clock.end()
    clock.warn("look")
    assert clock.seconds == {"merging": 6.0, "copying": 1.0}
    assert heard == [("merging", 5), ("copying", 5), ("merging", 5), "look"]


@pytest.mark.parametrize("operator", ["linear", "ties"])
def test_a_build_is_followed_by_estimates(tmp_path, operator):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (8, 16)}))
    for output in ("m", "n"):
        project.set_output(output, {"operator": operator, "base": "base", "experts": ["e1", "e2"]})
    assert project.open().plan().seconds is None
    project.build()
    project.set_output("m", project.outputs["m"] | {"experts": ["e1", {"source": "e2", "weight": 0.5}]})
    report = project.open().plan()
    assert report.seconds > 0
    assert report.outputs["n"].seconds == 0
    assert report.outputs["m"].seconds == report.seconds


@pytest.fixture
def both(monkeypatch):
    """Return a function that plans and builds, and returns what was foreseen of an output and what was counted."""
    seen = {}
    foresee, learn = planning.forecast, timing.learned

    def forecast(*arguments):
        seen["foreseen"] = foresee(*arguments)
        return seen["foreseen"]

    def learned(runs, phases, seconds):
        seen["runs"] = runs
        return learn(runs, phases, seconds)

    monkeypatch.setattr(planning, "forecast", forecast)
    monkeypatch.setattr(timing, "learned", learned)

    def step(project):
        project.open().plan()
        project.build()
        (run,) = seen["runs"]
        counts = ("merged_bytes", "measured_bytes", "moved_bytes")
        moves = seen["foreseen"].outputs["m"].moves
        return tuple(tuple(getattr(of, count) for count in counts) for of in (moves, run.meter))

    return step


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "slerp", "ties", "dare_ties", "model_stock"])
def test_what_time_is_estimated_from_is_counted_as_it_is_foreseen(tmp_path, both, operator):
    project = SmallProject(tmp_path)
    names = ("base", "e1") if operator == "slerp" else ("base", "e1", "e2")
    for seed, name in enumerate(names):
        project.add_source(name, random_tensors(seed, {"w": (20, 16), "v": (70,)}))
    recipe = {"operator": operator, "base": "base", "experts": list(names[1:])}
    project.set_output("m", recipe | {"params": {"ties": {"density": 0.5}, "slerp": {"t": 0.4}}.get(operator, {})})
    foreseen, counted = both(project)
    assert foreseen == counted
    assert counted[0] > 0
    assert (counted[1] > 0) == (operator in {"slerp", "ties", "model_stock"})
    # One tensor is another: its blocks are made, what the other's are is copied from the pack.
    edit_tensor(project.source_file("e1"), "v", 0, 9.5)
    project.set_output("other", {"operator": "passthrough", "experts": ["e1"], "publish": False})
    project.build("other")
    foreseen, counted = both(project)
    assert foreseen == counted
    of_other_tensor, of_other_block = 4 * 20 * 16, 4 * 6
    assert counted[2] == of_other_tensor + (0 if operator in {"slerp", "ties", "model_stock"} else of_other_block)
