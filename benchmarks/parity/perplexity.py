"""Perplexities of a real family merged by both sides: does a method's output also work as well?"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parity.cases import Case
from benchmarks.parity.report import record_perplexity
from benchmarks.parity.runner import RANDOM, Runner
from benchmarks.parity.sides import build

_ALL = ("e1", "e2", "e3", "e4")  # every full expert of the family
_SEEDS = (0, 1, 2)


def _case(method: str, params: Mapping[str, Any] | None = None, *, experts: tuple[str, ...] = _ALL, base: bool = True,
          **own: Any) -> Case:  # fmt: skip
    listed = tuple((source, own) for source in experts)
    return Case(method=method, family="family", experts=listed, params=params or {}, base=base)


RECIPES = {
    case.method: case
    for case in (
        _case("linear", base=False, weight=1.0),
        _case("slerp", {"t": 0.5}, experts=("e1",)),
        _case("nuslerp", experts=("e1", "e2"), weight=1.0),
        _case("multislerp", weight=1.0),
        _case("karcher", base=False),
        _case("passthrough", experts=("e1",), base=False),
        _case("task_arithmetic", weight=0.4),
        _case("ties", weight=1.0, density=0.5),
        _case("dare_linear", weight=0.4, density=0.5),
        _case("dare_ties", weight=0.4, density=0.5),
        _case("breadcrumbs", weight=0.4, density=0.9, gamma=0.01),
        _case("breadcrumbs_ties", weight=0.4, density=0.9, gamma=0.01),
        _case("della", weight=1.0, density=0.5, epsilon=0.1),
        _case("della_linear", weight=0.4, density=0.5, epsilon=0.1),
        _case("sce", {"select_topk": 0.5}),
        _case("model_stock"),
        _case("nearswap", {"t": 0.001}, experts=("e1",)),
        _case("arcee_fusion", experts=("e1",)),
        _case("ram"),
        _case("ramplus_tl"),
    )
}


def measure(runner: Runner, methods: list[str]) -> None:
    """Merge the family with each method on both sides, score both, and record the means over its domains."""
    assert runner.real is not None
    score = _scorer(runner.real / "perplexity.py")
    for method in methods:
        seeds = _SEEDS if method in RANDOM else (0,)
        case = RECIPES[method]
        found: dict[str, list[float]] = {"mergepipe": [], "mergekit": []}
        for seed in seeds:
            own = replace(case, seed=seed)
            folder = _ours(runner, own)
            if isinstance(folder, str):
                print(f"{method}: {folder}")
                break
            found["mergepipe"].append(score(folder))
            found["mergekit"].append(score(_theirs(runner, own)))
        else:
            means = {side: statistics.fmean(values) for side, values in found.items()}
            print(f"{method}: {means} nats per token", flush=True)
            record_perplexity(method, case.recipe(), found)
    runner.mergekit.close()


def _ours(runner: Runner, case: Case) -> Path | str:
    built = build({"merged": case.recipe()}, runner.folders("family"), runner.work / "perplexity")
    return built["merged"] if isinstance(built["merged"], str) else runner.work / "perplexity" / "build" / "merged"


def _theirs(runner: Runner, case: Case) -> Path:
    assert runner.real is not None
    runner.mergekit.merge(case.mergekit(runner.folders("family")), seed=case.seed)
    folder = runner.work / "mergekit-out"
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(runner.real / "base" / name, folder / name)
    return folder


def _scorer(path: Path) -> Any:
    """Return the family's own scoring, as a mean over its domains."""
    spec = importlib.util.spec_from_file_location("family_perplexity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score(folder: Path) -> float:
        with contextlib.redirect_stderr(io.StringIO()):
            rows = module.evaluate(folder)
        return statistics.fmean(row["nats_per_token"] for row in rows.values())

    return score
