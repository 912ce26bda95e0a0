"""Worker processes make what threads make, and whatever happens to them costs nothing but time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.adapters import factors, write_adapter
from support.checkpoints import random_tensors
from support.every_operator import RECIPES
from support.projects import SmallProject

FORK = "import mergepipe.engine.crew as crew, mergepipe.engine.limits as limits, mergepipe.engine.worker as worker\n"
FORK += "limits.FORK_BYTES = 0\n"
# Which process did each job, and something that is done before each.
LOGGED = FORK + """
import os, pathlib, signal, time
from mergepipe.errors import InternalError

done = 0

def run_job(*arguments):
    global done
    {action}
    done += 1
    with open("jobs", "a") as file:
        file.write("build\\n" if os.getpid() == main else f"{{os.getpid()}}\\n")
    return original(*arguments)

main, original = os.getpid(), crew.run_job
crew.run_job = worker.run_job = run_job
"""

THREADS_LOGGED = "import mergepipe.engine.schedule as schedule; schedule.run_job = run_job\n"


def logged(action="pass"):
    return LOGGED.format(action=action)


def jobs(site):
    """Return how many jobs each process did, those of the build itself under ``build``."""
    path = site.root / "jobs"
    found = Counter(path.read_text().split())
    path.unlink()
    return found


def timeless(report):
    """Return what a build reports without what differs from run to run."""
    report = json.loads(report)
    for output in report["outputs"].values():
        output.pop("seconds")
    return report


def processes_in(folder):
    """Return the processes that work in a folder."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{entry}/cwd").resolve() == folder.resolve():
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry)] if state != "Z" else []
        except OSError:
            continue
    return found


def wait_until_alone(folder):
    deadline = time.monotonic() + 30
    while left := processes_in(folder):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


# --- what they make -----------------------------------------------------------------------------------------------


def test_processes_do_the_jobs_and_make_what_threads_make(site, clean):
    threads = site.run("build", "-j", "1", "--json")
    for name in ("build", ".mergecache"):
        (site.root / name).rename(site.root.with_name(name))
    site.lock.unlink()
    forked = site.run("build", "-j", "3", "--json", prelude=logged())
    assert (forked.code, forked.stderr) == (0, "")
    by = jobs(site)
    assert len(by) in (2, 3)
    assert "build" not in by
    assert timeless(forked.stdout) == timeless(threads.stdout)
    site.check_done(clean[1])
    assert site.run("build", "-j", "3", "--json", prelude=FORK).code == 0
    site.check_done(clean[1])


@pytest.mark.parametrize(("workers", "least"), [("1", 0), ("3", 1 << 28)])
def test_one_worker_is_a_thread_and_so_are_those_of_a_small_build(site, workers, least):
    prelude = logged() + f"limits.FORK_BYTES = {least}\n" + THREADS_LOGGED
    assert site.run("build", "--json", "-j", workers, prelude=prelude).code == 0
    assert set(jobs(site)) == {"build"}


SHAPES = {"model.embed_tokens.weight": (600, 1024), "model.layers.0.mlp.weight": (260, 1100), "model.norm": (70,)}
SOME = ("ties", "slerp", "breadcrumbs", "della", "model_stock", "dare_ties")


@pytest.fixture
def project(tmp_path):
    """Return a project with blocks of the usual size; e2 has a tenth of its blocks in common with the base."""
    project = SmallProject(tmp_path / "project")
    base = random_tensors(0, SHAPES, "bfloat16")
    family = {"base": base}
    for number in (1, 2, 3):
        noise = random_tensors(number, SHAPES, "float32", scale=0.01)
        family[f"e{number}"] = {name: (array.astype(np.float32) + noise[name]).astype(array.dtype)
                                for name, array in base.items()}  # fmt: skip
    family["e2"]["model.embed_tokens.weight"][:256] = base["model.embed_tokens.weight"][:256]
    project.add_sources(family)
    return project


def built_twice(project, server, *arguments, prelude=FORK):
    """Build with a thread and with processes, from nothing each time; return both reports and locks."""
    found = []
    for number, (workers, first) in enumerate((("1", ""), ("2", prelude))):
        project.lock.unlink(missing_ok=True)
        cache = f"cache-{number}"
        result = server.run(
            ["--cache-dir", cache, "build", "--json", "-j", workers, *arguments], project.root, prelude=first
        )
        assert result.code == 0, result.text
        found.append((timeless(result.stdout), project.lock.read_bytes(), result.stderr))
        (project.root / "build").rename(project.root / f"build-{number}")
    return found


@pytest.mark.parametrize("name", SOME)
def test_methods_with_passes_come_out_the_same(project, server, name):
    project.set_output("m", RECIPES[name])
    first, second = built_twice(project, server)
    assert first == second


def test_what_is_not_kept_between_passes_is_read_again(project, server):
    project.set_output("m", RECIPES["ties"])
    first, second = built_twice(project, server, prelude=FORK + "limits.HOLD_BYTES = 1 << 20\n")
    assert first[1:] == second[1:]


def test_where_memory_is_scarce_threads_do_the_work(site):
    prelude = logged() + THREADS_LOGGED
    assert site.run("build", "--json", "-j", "2", "--memory", "256 MiB", prelude=prelude).code == 0
    assert set(jobs(site)) == {"build"}


def test_adapters_levels_and_several_outputs_come_out_the_same(project, server):
    modules = {"model.layers.0.mlp": (260, 1100)}
    write_adapter(project.root / "models/lora", factors(5, "model.layers.0.mlp", *modules["model.layers.0.mlp"]))
    project.sources["lora"] = "models/lora"
    project.adapters["lora"] = "base"
    recipe = RECIPES["task_arithmetic"]
    project.set_output("full", recipe)
    project.set_output("levels", recipe | {"budget": {"expert_reads": "15%", "precision": "levels"}})
    project.set_output("blocks", RECIPES["ties"] | {"budget": {"expert_reads": "50%", "precision": "blocks"}})
    project.set_output("with-lora", {"operator": "linear", "base": "base", "experts": ["lora", "e1"]})
    first, second = built_twice(project, server)
    assert first == second


# --- what may happen to them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
def test_processes_that_are_killed_cost_nothing(site, clean, after):
    action = f"if os.getpid() != main and done == {after}: os.kill(os.getpid(), signal.SIGKILL)"
    result = site.run("build", "-j", "2", "--json", prelude=logged(action))
    assert result.code == 0, result.text
    by = jobs(site)
    assert by["build"] > 0
    assert sum(count for name, count in by.items() if name != "build") == 2 * after
    site.check_done(clean[1])
    wait_until_alone(site.root)


def test_a_job_that_fails_in_a_process_alone_is_done_by_the_build(site, clean):
    action = "if os.getpid() != main: raise MemoryError"
    assert site.run("build", "-j", "2", "--json", prelude=logged(action)).code == 0
    assert set(jobs(site)) == {"build"}
    site.check_done(clean[1])


def test_where_no_process_can_be_had_threads_do_the_work(site, clean):
    prelude = logged() + THREADS_LOGGED + """
def refused():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = refused
"""
    assert site.run("build", "-j", "2", "--json", prelude=prelude).code == 0
    assert set(jobs(site)) == {"build"}
    site.check_done(clean[1])


def test_beside_another_thread_nothing_is_forked(site, clean):
    prelude = logged() + """
import threading

def refused():
    raise AssertionError("a process was forked beside a thread")

os.fork = refused
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
    assert site.run("build", "-j", "2", "--json", prelude=prelude).code == 0
    site.check_done(clean[1])


def test_an_error_is_the_same_as_in_a_thread(site):
    with site.weights("b").open("r+b") as file:
        file.seek(-400_000, os.SEEK_END)
        file.write(b"\xc0\x7f" * 8)
    found = [site.run("build", "-j", workers, prelude=prelude) for workers, prelude in (("1", ""), ("2", FORK))]
    assert found[0].code == found[1].code == 1
    assert "error: " in found[0].stderr
    assert found[0].stderr == found[1].stderr
    wait_until_alone(site.root)


def test_a_limit_to_the_size_of_files_is_told_as_in_a_thread(site):
    limited = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))\n"
    limited += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    found = [
        site.run("build", "-j", workers, prelude=limited + first) for workers, first in (("1", ""), ("2", FORK))
    ]
    assert found[0].code == found[1].code == 1
    assert found[0].stderr == found[1].stderr


# --- what may happen to the build ---------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(6))
def test_killed_with_its_processes_at_work_the_next_build_ends_clean(site, clean, moment):
    running = site.start("build", "-j", "2", "--json", prelude=logged("time.sleep(0.02)"))
    deadline = time.monotonic() + 60
    while not (site.root / "jobs").exists() or len((site.root / "jobs").read_bytes().split()) < moment:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.kill()
    running.wait()
    wait_until_alone(site.root)  # nobody is left to write to what the next build makes
    (site.root / "jobs").unlink()
    site.check_between(None, clean[1])
    assert site.run("build", "-j", "2", "--json", prelude=FORK).code == 0
    site.check_done(clean[1])
    assert site.litter() == []
    assert site.staged() == []


def test_killed_at_a_point_in_every_process_the_next_build_ends_clean(site, clean):
    result = site.run(prelude=FORK, env={"MERGEPIPE_CRASH_POINT": "engine.first-block:2"})
    assert result.code == -9
    wait_until_alone(site.root)
    site.check_between(None)
    assert site.run(prelude=FORK).code == 0
    site.check_done(clean[1])


def test_interrupted_it_ends_its_processes(site, clean):
    running = site.start("build", "-j", "2", prelude=logged("time.sleep(0.05)"))
    deadline = time.monotonic() + 60
    while not (site.root / "jobs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for pid in processes_in(site.root):  # as a terminal does
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    result = running.wait()
    assert result.code == 130, result.text
    assert "Traceback" not in result.stderr
    wait_until_alone(site.root)
    (site.root / "jobs").unlink()
    assert site.run(prelude=FORK).code == 0
    site.check_done(clean[1])


def test_a_second_build_waits_for_processes_of_a_killed_one(site, clean):
    running = site.start("build", "-j", "2", "--json", prelude=logged("time.sleep(0.1)"))
    deadline = time.monotonic() + 60
    while not (site.root / "jobs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.kill()
    second = site.run("build", "-j", "2", "--json", prelude=FORK)  # while those of the first are in a job still
    running.wait()
    assert second.code == 0, second.text
    (site.root / "jobs").unlink()
    site.check_done(clean[1])
    wait_until_alone(site.root)


@pytest.mark.parametrize("point", ["planes.written:1", "planes.renamed:4", "engine.tensor-recorded:1"])
def test_killed_while_processes_code_deltas_the_next_build_makes_the_same(project, server, point):
    recipe = RECIPES["task_arithmetic"] | {"budget": {"expert_reads": "15%", "precision": "levels"}}
    project.set_output("levels", recipe)
    first, _ = built_twice(project, server)
    project.lock.unlink()
    arguments = ["--cache-dir", "killed", "build", "--json", "-j", "2"]
    killed = server.run(arguments, project.root, {"MERGEPIPE_CRASH_POINT": point}, prelude=FORK)
    assert killed.code == -9, killed.text
    wait_until_alone(project.root)
    again = server.run(arguments, project.root, prelude=FORK)
    assert again.code == 0, again.text
    assert project.lock.read_bytes() == first[1]
