"""A project that does nothing and says what it is told to, reports to print, and a runner of command lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli import Result
from unit.cli.reported import fake_report
from unit.cli.sweeps import fake_sweep
from unit.cli.verified import VERIFIED

from mergepipe.cli.main import run
from mergepipe.project.caches_report import CacheCheck, CheckedPacks
from mergepipe.project.explain import OutputExplanation, ParameterGroup, TensorExplanation
from mergepipe.project.plan_report import DiskReport, Loss, NextBuild, PlannedExpert, PlannedOutput, PlanReport
from mergepipe.project.report_page import OutputReports
from mergepipe.project.reports import (
    EXACT,
    Bound,
    BuildReport,
    CacheInfo,
    OutputReport,
    OutputStatus,
    PruneReport,
    StatusReport,
)
from mergepipe.project.sweep_report import SweepReport
from mergepipe.project.verify import VerifyOptions
from mergepipe.project.verify_report import VerifyReport
from mergepipe.reporting import Reporter

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
DIGEST = "b3:" + "0123456789abcdef" * 4
GB = 10**9

BUILT = OutputReport(
    name="assistant",
    state="built",
    path="build/assistant",
    digest=DIGEST,
    operator="ties",
    expert_bytes={"full": 48 * GB // 10, "planned": 48 * GB // 10, "read": 36 * GB // 10},
    base_bytes_read=12 * GB // 10,
    index_bytes_read=911_000,
    bytes_written=12 * GB // 10,
    blocks={"total": 9204, "computed": 4602, "cached": 4500, "copied": 102},
    expert_blocks={"total": 36816, "read": 27000, "omitted": 0, "zero": 9000, "shared": 816},
    bound=EXACT,
    seconds=2.409,
    decisions=("math: 3 extra tensors that `base` lacks, dropped (`vision.weight`, `a` and 1 more)",),
)
UNCHANGED = replace(
    BUILT,
    name="average",
    state="unchanged",
    path="build/average",
    operator="linear",
    expert_bytes={"full": 48 * GB // 10, "planned": 48 * GB // 10, "read": 0},
    base_bytes_read=0,
    index_bytes_read=0,
    bytes_written=0,
    blocks={"total": 9204, "computed": 0, "cached": 9204, "copied": 0},
    expert_blocks={"total": 36816, "read": 0, "omitted": 0, "zero": 9000, "shared": 0},
    seconds=0.01,
    decisions=("code: 1 extra tensor that `base` lacks, dropped (`b`)",),
)
BUDGETED = replace(
    BUILT,
    name="cheap",
    path="build/cheap",
    operator="task_arithmetic",
    expert_bytes={"full": 48 * GB // 10, "planned": 12 * GB // 10, "read": 12 * GB // 10},
    index_bytes_read=0,
    expert_blocks={"total": 36816, "read": 9204, "omitted": 27612, "zero": 0, "shared": 0},
    bound=Bound(kind="certified", absolute=0.01234, relative_to_update=0.0321),
    seconds=75.2,
    decisions=(),
)


def _loss(tensor: str, omitted: int, mass: float, share: float | None) -> Loss:
    return Loss(
        tensor=tensor, omitted_bytes=omitted, bound=0.02, expected=0.01, omitted_mass=mass, error_share=share
    )


MATH = PlannedExpert(
    full=24 * GB // 10,
    planned=24 * GB // 10,
    cached=12 * GB // 10,
    to_read=12 * GB // 10,
    index=0,
    blocks=18408,
    omitted=0,
    indexed=True,
)
NEXT = NextBuild(
    unchanged=False,
    exact=True,
    expert_bytes=36 * GB // 10,
    base_bytes=9 * GB // 10,
    index_bytes=0,
    written=12 * GB // 10,
    unindexed={},
)
PLANNED = PlannedOutput(
    name="assistant",
    path="build/assistant",
    operator="ties",
    digest=DIGEST,
    tensors=290,
    experts={"math": MATH, "code": replace(MATH, cached=0, to_read=24 * GB // 10)},
    expert_bytes={
        "full": 48 * GB // 10, "planned": 48 * GB // 10, "cached": 12 * GB // 10, "to_read": 36 * GB // 10
    },
    base_bytes=12 * GB // 10,
    blocks={"total": 9204, "computed": 6903, "cached": 2301, "copied": 0},
    expert_blocks={"total": 36816, "omitted": 0},
    bound=EXACT,
    next_build=NEXT,
    seconds=12.3,
    peak_memory_bytes=512_000_000,
    output_bytes=12 * GB // 10,
    shards=1,
    decisions=BUILT.decisions,
    notes=("code: ignored `consolidated.safetensors` (another copy of the weights)",),
)  # fmt: skip
LONG = "model.layers.11.a_module_with_a_name_that_is_longer_than_any_line.experts.127.down_proj.weight"
PLANNED_BUDGET = replace(
    PLANNED,
    name="cheap",
    path="build/cheap",
    operator="task_arithmetic",
    experts={
        name: replace(MATH, planned=6 * GB // 10, cached=0, to_read=6 * GB // 10, omitted=13806, indexed=indexed)
        for name, indexed in (("math", True), ("an-expert-with-a-name-that-is-longer-than-its-column", False))
    },
    expert_bytes={"full": 48 * GB // 10, "planned": 12 * GB // 10, "cached": 0, "to_read": 12 * GB // 10},
    expert_blocks={"total": 36816, "omitted": 27612},
    bound=Bound(kind="estimated", absolute=None, relative_to_update=0.1),
    next_build=replace(NEXT, exact=False, index_bytes=14 * GB // 10, unindexed={"code": 24 * GB // 10}),
    seconds=None,
    not_timed=("task_arithmetic",),
    shards=3,
    decisions=(),
    notes=(),
    index_bytes_read=4_823_808,
    expected_error=0.0125,
    omitted_mass=0.321,
    losses=(
        _loss(LONG, 1_310_720, 0.43, 0.612),
        _loss("model.norm.weight", 512, 0.5, 0.2),
        _loss("model.layers.0.mlp.up_proj.weight", 81_920, 0.05, None),
        _loss("model.layers.1.mlp.up_proj.weight", 81_920, 0.041, 0.0204),
        _loss("lm_head.weight", 0, 0.0, 0.0),
    ),
)
UNCHANGED_PLAN = replace(
    PLANNED,
    name="average",
    path=None,
    operator="linear",
    experts={"math": replace(MATH, cached=24 * GB // 10, to_read=0)},
    expert_bytes={"full": 24 * GB // 10, "planned": 24 * GB // 10, "cached": 24 * GB // 10, "to_read": 0},
    next_build=NextBuild(
        unchanged=True, exact=True, expert_bytes=0, base_bytes=0, index_bytes=0, written=0, unindexed={}
    ),
    seconds=0.0,
    decisions=(),
    notes=(),
)
DISKS = (
    DiskReport(path=".mergecache", cache=True, outputs=("cheap",), needed=24 * GB // 10, free=90 * GB, fits=True),
    DiskReport(
        path="build/assistant",
        cache=False,
        outputs=("assistant",),
        needed=12 * GB // 10,
        free=7 * GB // 10,
        fits=False,
    ),
)
PLANS = PlanReport(
    outputs={"assistant": PLANNED, "cheap": PLANNED_BUDGET, "average": UNCHANGED_PLAN},
    reads={"expert_bytes": 45 * GB // 10, "base_bytes": 9 * GB // 10, "index_bytes": 14 * GB // 10},
    exact=False,
    peak_memory_bytes=600_000_000,
    disks=DISKS,
)
STATUS = StatusReport(
    lock_path="Mergefile.lock",
    lock_state="outdated",
    outputs={
        "average": OutputStatus(name="average", state="up-to-date", path="build/average", reasons=()),
        "assistant": OutputStatus(
            name="assistant",
            state="stale",
            path="build/assistant",
            reasons=("source `math` has other content", "weights, parameters or rules changed"),
        ),
        "cheap": OutputStatus(
            name="cheap", state="unbuilt", path="build/cheap", reasons=("it was not built here before",)
        ),
    },
)
EXPLAINED = OutputExplanation(
    output="assistant",
    groups=(
        ParameterGroup(
            operator="linear",
            decision="merge",
            base=None,
            tensors=("model.norm.weight",),
            layers=(None,),
            params={"normalize": True},
            experts={"code": {"weight": 0.5}},
        ),
    ),
)
CACHE = CacheInfo(
    path="/models/.mergecache",
    packs=3,
    pack_bytes=36 * GB // 10,
    staged_bytes=0,
    quarantined_bytes=512,
    catalog_bytes=143_000,
    files=8,
    results=1170,
    statistic_bytes=41_000,
)

PRUNED = PruneReport(
    path="/models/.mergecache",
    removed=2,
    removed_bytes=3 * GB,
    kept_bytes=512,
    kept={"packs": 512, "codes": 0, "statistics": 0},
    leftover_bytes=500,
    statistic_bytes=41_000,
    linked_bytes=GB,
    packs=(("ab" * 32 + ".safetensors", 2 * GB, "age"), ("cd" * 32 + ".safetensors", GB - 41_500, "unreferenced")),
    locks=("/models/Mergefile.lock",),
    missing_locks=("/other/Mergefile.lock",),
)

SOUND = CacheCheck(
    path="/models/.mergecache",
    packs=CheckedPacks(),
    catalog="missing",
    rows={},
    problems=(),
    seconds=0.0,
    dry_run=False,
)


def build_report(*outputs: OutputReport, changed: bool = True) -> BuildReport:
    """Return a build's report over outputs."""
    return BuildReport(
        lock_path="Mergefile.lock", lock_changed=changed, outputs={output.name: output for output in outputs}
    )


@dataclass
class FakeProject:
    """Stands for a project: keeps what it is called with, and returns or raises what it is told to."""

    root: Path
    result: Any = None
    during: Callable[[Reporter], None] = lambda reporter: None
    opened: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def mergefile(self) -> SimpleNamespace:
        return SimpleNamespace(root=self.root, outputs={})

    @property
    def lock_path(self) -> Path:
        return self.root / "Mergefile.lock"

    def open(self, path: Path, **options: Any) -> FakeProject:
        self.opened = {"path": Path(path), "cwd": Path.cwd(), **options}
        return self

    def _called(self, name: str, arguments: Any, default: Any) -> Any:
        self.calls.append((name, arguments))
        self.during(self.opened["reporter"])
        if isinstance(self.result, BaseException):
            raise self.result
        return default if self.result is None else self.result

    def build(self, outputs: tuple[str, ...] = (), *, locked: bool = False, force: bool = False) -> BuildReport:
        arguments = {"outputs": outputs, "locked": locked, "force": force}
        return self._called("build", arguments, build_report(BUILT, UNCHANGED))

    def plan(self, outputs: tuple[str, ...] = ()) -> PlanReport:
        return self._called("plan", {"outputs": outputs}, PLANS)

    def sweep(self, output: str, budgets: list[str], **options: Any) -> SweepReport:
        return self._called("sweep", {"output": output, "budgets": budgets, **options}, fake_sweep())

    def status(self, outputs: tuple[str, ...] = ()) -> StatusReport:
        return self._called("status", {"outputs": outputs}, STATUS)

    def explain(
        self, output: str, tensor: str | None = None, *, measure: bool = True
    ) -> OutputExplanation | TensorExplanation:
        return self._called("explain", {"output": output, "tensor": tensor, "measure": measure}, EXPLAINED)

    def report(self, outputs: tuple[str, ...] = ()) -> OutputReports:
        return self._called("report", {"outputs": outputs}, OutputReports(outputs={"assistant": fake_report()}))

    def verify(
        self, targets: tuple[str, ...] = (), options: VerifyOptions | None = None, **others: Any
    ) -> VerifyReport:
        """Stand for verifying outputs, and a cache, whose option comes under ``others``."""
        default: Any = SOUND if others else VERIFIED
        return self._called("verify", {"targets": targets, "options": options, **others}, default)

    def info(self) -> CacheInfo:
        return self._called("info", {}, CACHE)

    def prune(self, max_bytes: int | None = None, max_age_days: float | None = None, **options: Any) -> PruneReport:
        arguments = {"max_bytes": max_bytes, "max_age_days": max_age_days, **options}
        return self._called("prune", arguments, PRUNED)


@dataclass
class Runner:
    """Runs command lines in this process, in a folder with a Mergefile, on a fake project."""

    project: FakeProject
    capture: pytest.CaptureFixture[str]

    def __call__(self, *argv: str) -> Result:
        self.capture.readouterr()
        code = run(argv)
        captured = self.capture.readouterr()
        return Result(stdout=captured.out, stderr=captured.err, code=code)


def clean_variables(monkeypatch: pytest.MonkeyPatch, extra: Mapping[str, str] | None = None) -> None:
    """Remove from the environment what changes the looks of the output."""
    for name in ("NO_COLOR", "FORCE_COLOR", "MERGEPIPE_CACHE_DIR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in (extra or {}).items():
        monkeypatch.setenv(name, value)


def assert_golden(name: str, text: str) -> None:
    """Compare a text with the file of this name; with ``UPDATE_GOLDEN=1`` write it anew."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
