"""What both sides do where a formula has no good answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.parity.cases import Case
from benchmarks.parity.checkpoints import Arrays
from benchmarks.parity.runner import Runner
from benchmarks.parity.sides import SideError, build


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A case, and what each side made of it, in words."""

    what: str
    mergekit: str
    ours: str


def _case(method: str, family: str, experts: Any, params: dict[str, Any] | None = None, *, base: bool = True) -> Case:
    return Case(method=method, family=family, experts=experts, params=params or {}, base=base)


def _two(first: dict[str, Any], second: dict[str, Any]) -> Any:
    return (("e1", first), ("e2", second))


EDGES = (
    ("linear, weights 1 and -1, normalised",
     _case("linear", "f32", _two({"weight": 1.0}, {"weight": -1.0}), base=False)),
    ("task_arithmetic, weights 1 and -1, `normalize`",
     _case("task_arithmetic", "f32", _two({"weight": 1.0}, {"weight": -1.0}), {"normalize": True})),
    ("ties, weights 1 and -1 (normalised by what agrees)",
     _case("ties", "f32", _two({"weight": 1.0, "density": 0.5}, {"weight": -1.0, "density": 0.5}))),
    ("ties, weights 0.4, 0.3 and -0.7 (their float32 sum is 6e-8)",
     _case("ties", "f32", (("e1", {"weight": 0.4}), ("e2", {"weight": 0.3}), ("e3", {"weight": -0.7})))),
    ("multislerp, weights 1 and -1, normalised",
     _case("multislerp", "f32", _two({"weight": 1.0}, {"weight": -1.0}))),
    ("multislerp, 2 opposite directions, equal weights",
     _case("multislerp", "directions", (("e2", {"weight": 1.0}), ("e8", {"weight": 1.0})), base=False)),
    ("multislerp, 3 directions that cancel",
     _case("multislerp", "directions", (("e2", {"weight": 1.0}), ("e8", {"weight": 0.5}), ("e1", {"weight": 0.5})),
           base=False)),
    ("karcher, 2 opposite directions", _case("karcher", "directions", (("e2", {}), ("e8", {})), base=False)),
    ("nuslerp, weights 1 and -1", _case("nuslerp", "f32", _two({"weight": 1.0}, {"weight": -1.0}), base=False)),
    ("slerp, one vector of length zero, t = 0.3", _case("slerp", "directions", (("e4", {}),), {"t": 0.3})),
    ("slerp, t = 1.25", _case("slerp", "f32", (("e1", {}),), {"t": 1.25})),
    ("ties, density 0", _case("ties", "f32", (("e1", {"weight": 1.0, "density": 0.0}),))),
    ("ties, density 1.5", _case("ties", "f32", (("e1", {"weight": 1.0, "density": 1.5}),))),
    ("dare_linear, density 0", _case("dare_linear", "f32", (("e1", {"weight": 1.0, "density": 0.0}),))),
    ("breadcrumbs, density and gamma that keep no element of a small tensor",
     _case("breadcrumbs", "odd", (("e1", {"weight": 1.0, "density": 0.01, "gamma": 0.01}),))),
    ("della, density 0.9, epsilon 0.15",
     _case("della", "f32", (("e1", {"weight": 1.0, "density": 0.9, "epsilon": 0.15}),))),
    ("della, rows of one element", _case("della", "odd", (("e1", {"weight": 1.0, "density": 0.5, "epsilon": 0.1}),))),
    ("sce, select_topk 0", _case("sce", "f32", (("e1", {}), ("e2", {})), {"select_topk": 0.0})),
    ("sce, one expert, select_topk 0.5 (no variance)", _case("sce", "f32", (("e1", {}),), {"select_topk": 0.5})),
    ("model_stock, 2 experts of opposite deltas", _case("model_stock", "opposite", (("e1", {}), ("e2", {})))),
    ("karcher, max_iter 0", _case("karcher", "f32", (("e1", {}), ("e2", {})), {"max_iter": 0}, base=False)),
    ("nearswap, t = -1", _case("nearswap", "f32", (("e1", {}),), {"t": -1.0})),
    ("ties, the base as only expert", _case("ties", "f32", (("base", {"weight": 1.0, "density": 0.5}),))),
    ("task_arithmetic, a weight of 0", _case("task_arithmetic", "f32", _two({"weight": 0.0}, {"weight": 1.0}))),
    ("an infinity and a NaN in an input (linear)",
     _case("linear", "special", (("e1", {"weight": 0.5}), ("e2", {"weight": 0.5})), base=False)),
)  # fmt: skip


def run_edges(runner: Runner) -> list[Edge]:
    """Return what both sides do."""
    found = []
    for what, case in EDGES:
        folders, base = runner.folders(case.family), runner.tensors(case.family)["base"]
        ours = build({"edge": case.recipe()}, folders, runner.work / "edges")["edge"]
        theirs: Arrays | str
        try:
            theirs = runner.mergekit.merge(case.mergekit(folders), seed=0)
        except SideError as error:
            theirs = f"error ({str(error).partition(':')[0]})"
        found.append(Edge(what=what, mergekit=_words(theirs, base), ours=_own_words(ours, theirs, base)))
        print(found[-1], flush=True)
    return found


def _own_words(ours: Arrays | str, theirs: Arrays | str, base: Arrays) -> str:
    if isinstance(ours, str):
        text = (
            ours.splitlines()[0]
            .partition(": ")[2]
            .replace("|", "/")
            .partition("; for ")[0]
            .replace("Mergefile.toml:", "line ")
        )
        return f"error: {text if len(text) < 160 else text[:157] + '...'}"
    if isinstance(theirs, str):
        return _words(ours, base)
    apart = max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
    return "the same" if apart < 1e-6 else f"another result, up to {apart:.2g} away"


def _words(result: Arrays | str, base: Arrays) -> str:
    if isinstance(result, str):
        return result
    values = np.concatenate([array.astype(np.float64).reshape(-1) for array in result.values()])
    wide = np.concatenate([base[name].astype(np.float64).reshape(-1) for name in result])
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum()):,} of {values.size:,} elements not finite"
    return "the base" if np.array_equal(values, wide) else "a result"
