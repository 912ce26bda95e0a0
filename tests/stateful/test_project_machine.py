"""A project that is edited, built, broken and mended at random always ends with what a clean build makes.

Model: an uncached build of a copy of the project. After every build the output's tensors, digest and lock entry are
those of the model, the tensors are those of the reference, and the user's files are there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.checkpoints import as_dtype, raw_tensor, read_checkpoint, write_checkpoint
from support.forked import ForkServer
from support.projects import SmallProject

from mergepipe.fsio import crash
from mergepipe.lockfile.reader import read_lock
from mergepipe.lockfile.records import LockedOutput

SHAPES = {
    "model.layers.0.mlp.weight": (10, 16),
    "model.layers.1.mlp.weight": (10, 16),
    "model.layers.0.norm": (70,),
    "model.layers.1.norm": (70,),
    "model.scale": (),
}
DTYPES = {"base": "BF16", "e1": "F32", "e2": "BF16"}
OUTPUTS = ("sum", "mean")

sources = st.sampled_from(sorted(DTYPES))
experts = st.sampled_from(["e1", "e2"])
names = st.sampled_from(sorted(SHAPES))
outputs = st.sampled_from(OUTPUTS)
seeds = st.integers(0, 5)
weights = st.sampled_from([0.0, 0.25, 1.0, -0.5])
workers = st.integers(1, 3)
user_names = st.sampled_from(["notes.txt", "sub/deep/notes.txt", "extra.bin"])
points = st.sampled_from(crash.CRASH_POINTS)
passes = st.integers(1, 4)
BUDGETS: list[dict[str, Any]] = [
    {"expert_reads": "0%", "precision": "blocks"},
    {"expert_reads": "30%", "precision": "blocks"},
    {"expert_reads": 700, "precision": "blocks"},
    {"max_error": 0.3, "precision": "blocks"},
    {"expert_reads": "40%", "precision": "levels"},
]


class KilledError(BaseException):
    """Stands for the end of the process: no handler of an ordinary error sees it."""


def kill_inside(project: SmallProject, point: str, count: int, workers: int) -> None:
    """Build, and end the build at a crash point by an exception."""

    def kill(*_: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        crash._seen.clear()
        patch.setenv("MERGEPIPE_CRASH_POINT", f"{point}:{count}")
        patch.setattr(os, "kill", kill)
        try:
            project.build(workers=workers)
        except KilledError:
            return


class ProjectMachine(RuleBasedStateMachine):
    """The rules; `kill` ends a build at a crash point."""

    kill: ClassVar[Any] = staticmethod(kill_inside)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine"))
        self.project = SmallProject(self.folder / "project")
        self.shards = dict.fromkeys(DTYPES, 1)
        self.user_files: dict[Path, str] = {}
        self.models: dict[object, tuple[dict[str, Any], dict[str, LockedOutput], str]] = {}
        self.written: dict[str, dict[str, Any]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # --- sources --------------------------------------------------------------------------------------------------

    @initialize()
    def declare(self) -> None:
        for seed, source in enumerate(DTYPES):
            self.written[source] = {name: self.values(source, name, seed) for name in SHAPES}
            self.write(source)
        self.recipes: dict[str, dict[str, Any]] = {
            "sum": {"operator": "task_arithmetic", "params": {"lambda": 1.0}, "rules": [], "write": {}},
            "mean": {"operator": "linear", "params": {"normalize": False}, "rules": [], "write": {"shard_size": 500}},
        }
        self.weights = {output: {"e1": 0.5, "e2": 1.0} for output in OUTPUTS}
        self.declare_outputs()

    def values(self, source: str, name: str, seed: int) -> Any:
        generator = np.random.default_rng([seed, sorted(SHAPES).index(name)])
        return np.asarray(generator.standard_normal(SHAPES[name])).astype(as_dtype(DTYPES[source]))

    def write(self, source: str) -> None:
        self.project.add_source(source, self.written[source], shards=self.shards[source], config={"layers": 2})

    def declare_outputs(self) -> None:
        for output in OUTPUTS:
            given = [{"source": name, "weight": weight} for name, weight in self.weights[output].items()]
            self.project.set_output(output, self.recipes[output] | {"base": "base", "experts": given})

    def files(self, source: str) -> list[Path]:
        return sorted((self.project.root / "models" / source).glob("*.safetensors"))

    @rule(source=sources, name=names, at=st.integers(0, 159), value=st.sampled_from([0.0, 1.5, -3.0]))
    def edit_a_block(self, source: str, name: str, at: int, value: float) -> None:
        self.written[source][name].reshape(-1)[at % self.written[source][name].size] = value
        self.write(source)

    @rule(source=sources, name=names, seed=seeds)
    def edit_a_tensor(self, source: str, name: str, seed: int) -> None:
        self.written[source][name] = self.values(source, name, seed)
        self.write(source)

    @rule(source=experts, name=names)
    def take_a_tensor_from_the_base(self, source: str, name: str) -> None:
        self.written[source][name] = self.written["base"][name].astype(as_dtype(DTYPES[source]))
        self.write(source)

    @rule(source=sources, shards=st.integers(1, 4))
    def change_the_shard_layout(self, source: str, shards: int) -> None:
        self.shards[source] = shards
        self.write(source)

    @rule(source=sources, seed=seeds, in_place=st.booleans())
    def replace_a_file_keeping_size_and_mtime(self, source: str, seed: int, in_place: bool) -> None:
        self.written[source] = {name: self.values(source, name, seed) for name in SHAPES}
        scratch = write_checkpoint(self.folder / "scratch", self.written[source], shards=self.shards[source])
        for path in self.files(source):
            before, data = path.stat(), (scratch / path.name).read_bytes()
            assert len(data) == before.st_size
            if in_place:
                path.write_bytes(data)
            else:
                (scratch / path.name).replace(path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        shutil.rmtree(scratch)

    @rule(source=sources)
    def touch(self, source: str) -> None:
        for path in self.files(source):
            os.utime(path)

    # --- the Mergefile --------------------------------------------------------------------------------------------

    @rule(output=outputs, source=experts, weight=weights)
    def edit_a_weight(self, output: str, source: str, weight: float) -> None:
        self.weights[output][source] = weight
        self.declare_outputs()

    @rule(output=outputs, match=st.sampled_from(["*.norm", "*.1.*", "*.scale"]), source=experts, weight=weights)
    def add_a_rule(self, output: str, match: str, source: str, weight: float) -> None:
        rules = [*self.recipes[output]["rules"], {"match": match, "experts": {source: {"weight": weight}}}]
        self.recipes[output] = self.recipes[output] | {"rules": rules[-3:]}
        self.declare_outputs()

    @rule(output=outputs)
    def remove_the_rules(self, output: str) -> None:
        self.recipes[output] = self.recipes[output] | {"rules": []}
        self.declare_outputs()

    @rule(output=outputs, size=st.sampled_from([300, 500, 10**9]), dtype=st.sampled_from([None, "float16", "float32"]))
    def change_how_it_is_written(self, output: str, size: int, dtype: str | None) -> None:
        write = {"shard_size": size} | ({"dtype": dtype} if dtype else {})
        self.recipes[output] = self.recipes[output] | {"write": write}
        self.declare_outputs()

    @rule(output=outputs, budget=st.sampled_from([None, *BUDGETS]))
    def change_the_budget(self, output: str, budget: dict[str, Any] | None) -> None:
        recipe = {key: value for key, value in self.recipes[output].items() if key != "budget"}
        self.recipes[output] = recipe | ({} if budget is None else {"budget": budget})
        self.declare_outputs()

    # --- the cache and the outputs --------------------------------------------------------------------------------

    @rule(keep=st.sampled_from([0, 1500, None]))
    def prune(self, keep: int | None) -> None:
        self.project.open().cache_prune(max_bytes=keep)

    @rule(part=st.sampled_from([".", "packs", "staging", "catalog.db"]))
    def lose_a_part_of_the_cache(self, part: str) -> None:
        path = self.project.cache / part
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @rule(output=outputs)
    def delete_an_output(self, output: str) -> None:
        folder = self.project.folder(output)
        shutil.rmtree(folder, ignore_errors=True)
        self.user_files = {path: text for path, text in self.user_files.items() if not path.is_relative_to(folder)}

    @rule(output=outputs, at=st.floats(0, 1, exclude_max=True), which=st.integers(0, 20))
    def edit_a_file_of_an_output(self, output: str, at: float, which: int) -> None:
        files = [path for path in sorted(self.project.folder(output).glob("*")) if path.is_file()]
        files = [path for path in files if path not in self.user_files and path.name != "mergepipe.json"]
        if not files:
            return
        path = files[which % len(files)]
        time.sleep(0.02)  # nobody edits a file in the clock tick in which it was published
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[int(at * len(data))] ^= 1
        with path.open("r+b") as file:  # in place: a pack may be the same file
            file.write(data)

    @rule(
        output=outputs, name=st.sampled_from(["notes.txt", "sub/deep/notes.txt", "extra.bin"]), text=st.text(max_size=3)
    )
    def add_a_user_file(self, output: str, name: str, text: str) -> None:
        folder = self.project.folder(output)
        if folder.is_dir():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            self.user_files[path] = path.read_text(encoding="utf-8")

    # --- builds ---------------------------------------------------------------------------------------------------

    @rule(count=workers)
    def build(self, count: int) -> None:
        self.project.build(workers=count)
        self.check(OUTPUTS)

    @rule(output=outputs, count=workers)
    def build_one_output(self, output: str, count: int) -> None:
        self.project.build(output, workers=count)
        self.check((output,))

    @rule(count=workers)
    def build_twice(self, count: int) -> None:
        self.project.build(workers=count)
        report = self.project.build(workers=count)
        assert {output.state for output in report.outputs.values()} == {"unchanged"}
        assert not report.lock_changed
        self.check(OUTPUTS)

    @rule(point=points, times=passes, count=workers)
    def kill_a_build(self, point: str, times: int, count: int) -> None:
        before = {output: self.intact(output) for output in OUTPUTS}
        type(self).kill(self.project, point, times, count)
        for output, was_intact in before.items():
            assert self.intact(output) or not was_intact, "a reader saw a broken output"
        self.check_user_files()

    @precondition(lambda self: self.project.lock.exists())
    @rule()
    def status(self) -> None:
        status = self.project.open().status()
        for output, state in status.outputs.items():
            if state.state == "up-to-date":
                self.check_tensors(output)

    # --- what must hold -------------------------------------------------------------------------------------------

    def intact(self, output: str) -> bool:
        """Return whether an output is one whole, readable checkpoint with all of its tensors."""
        try:
            return sorted(self.project.tensors(output)) == sorted(SHAPES)
        except (OSError, ValueError, KeyError, TypeError):  # the last for a dtype that a flipped bit made
            return False

    def is_budgeted(self, output: str) -> bool:
        """Return whether an output, or what it is made from, leaves anything out."""
        return "budget" in self.recipes[output]

    def model(self) -> tuple[dict[str, Any], dict[str, LockedOutput], str]:
        """Return tensors, lock entries and lock text of an uncached build of a copy; remembered by content."""
        key = (
            self.project.mergefile.read_text(encoding="utf-8"),
            tuple((str(path), path.read_bytes()) for source in DTYPES for path in self.files(source)),
        )
        if key not in self.models:
            copy = self.project.clone(self.folder / "copy")
            copy.build(workers=1)
            lock = read_lock(copy.lock)
            assert lock is not None
            entries = {output.name: output for output in lock.outputs}
            self.models[key] = ({o: copy.raw(o) for o in OUTPUTS}, entries, copy.lock.read_text(encoding="utf-8"))
            shutil.rmtree(copy.root)
        return self.models[key]

    def check(self, built: tuple[str, ...]) -> None:
        tensors, entries, text = self.model()
        lock = read_lock(self.project.lock)
        assert lock is not None
        for output in built:
            self.check_tensors(output)
            assert self.project.raw(output) == tensors[output]
            assert lock.output(output) == entries[output]
            assert self.project.manifest(output).output == entries[output]
        if built == OUTPUTS:
            assert self.project.lock.read_text(encoding="utf-8") == text
            left = sorted(path.name for path in (self.project.root / "build").iterdir())
            assert left == sorted(OUTPUTS)
        self.check_user_files()

    def check_tensors(self, output: str) -> None:
        """Compare with the reference; a zero may have the other sign where a delta of zero was left out.

        What a budget leaves out is compared with a clean build.
        """
        if self.is_budgeted(output):
            assert self.project.raw(output) == self.model()[0][output]
        else:
            self.project.check(output, zero_signs=False)

    def check_user_files(self) -> None:
        for path, text in self.user_files.items():
            assert path.read_text(encoding="utf-8") == text


def run(machine: type[ProjectMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            settings.default,
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_a_project_always_ends_with_what_a_clean_build_makes():
    run(ProjectMachine, examples=14, steps=18)


@pytest.mark.slow
def test_a_project_always_ends_with_what_a_clean_build_makes_at_length():
    run(ProjectMachine, examples=150, steps=40)


_GEOMETRY = """
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.project import session
session.open_project.__kwdefaults__["geometry"] = Geometry(block_elements=64)
"""


@pytest.mark.slow
def test_a_project_whose_builds_are_really_killed_ends_with_what_a_clean_build_makes():
    with ForkServer() as server:

        def kill_process(project: SmallProject, point: str, count: int, workers: int) -> None:
            env = {"MERGEPIPE_CRASH_POINT": f"{point}:{count}"}
            result = server.run(["build"], project.root, env, prelude=_GEOMETRY)
            assert result.code in (0, -9), result.text

        run(type("Killed", (ProjectMachine,), {"kill": staticmethod(kill_process)}), examples=80, steps=40)


def test_the_raw_tensors_of_the_model_are_those_on_the_disk(tmp_path):
    """Guard of the machine itself: what it compares is what loaders read."""
    project = SmallProject(tmp_path)
    project.add_source("e1", {"x": np.float32([1, 2])})
    project.set_output("m", {"operator": "passthrough", "experts": ["e1"]})
    project.build()
    assert project.raw("m") == {n: raw_tensor(a) for n, a in read_checkpoint(tmp_path / "models/e1").items()}
