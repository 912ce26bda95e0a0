"""The cases: for every method the settings that its two implementations are compared at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One merge, in terms that both sides understand.

    Attributes
    ----------
    experts
        Sources and their settings, in order; the base may be among them.
    params
        Settings of the whole merge, as mergekit spells them.
    seed
        Of the random masks; no part of mergekit's settings.
    appended
        mergekit takes a base that is not listed for one more input: it stands last in our list and not in its own.
    """

    method: str
    family: str
    experts: tuple[tuple[str, Settings], ...]
    params: Settings = field(default_factory=dict)
    base: bool = True
    dtype: str = "float32"
    seed: int = 0
    appended: bool = False
    number: int = 0

    @property
    def id(self) -> str:
        """Return a name that is also good for an output."""
        return f"{self.method}-{self.family}-{self.number}"

    def recipe(self) -> dict[str, Any]:
        """Return the output's table for a Mergefile."""
        experts = [source if not own else {"source": source, **own} for source, own in self.experts]
        recipe: dict[str, Any] = {"operator": self.method, "experts": experts}
        if self.base and not self.appended:
            recipe["base"] = "base"
        params = dict(self.params)
        if params.get("rescale"):
            params["rescale"] = "l1"  # mergekit's only one
        if self.method.startswith(("dare", "della")):
            params["seed"] = self.seed
            params.setdefault("rescale", "l1")
        if params:
            recipe["params"] = params
        recipe["write"] = {"dtype": self.dtype}
        return recipe

    def mergekit(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Return mergekit's configuration; ``folders`` has the path of every source."""
        listed = self.experts[:-1] if self.appended else self.experts
        models = [{"model": folders[source], "parameters": dict(own)} for source, own in listed]
        config: dict[str, Any] = {"merge_method": self.method, "models": models, "parameters": dict(self.params),
                                  "dtype": "float32", "out_dtype": self.dtype}  # fmt: skip
        if self.base:
            config["base_model"] = folders["base"]
        return config


def _experts(count: int, **settings: Sequence[Any]) -> tuple[tuple[str, Settings], ...]:
    """Return e1 to eN; each setting is a cycle of values."""
    return tuple(
        (f"e{number + 1}", {name: values[number % len(values)] for name, values in settings.items()})
        for number in range(count)
    )


DELTA_FAMILIES = ("f32", "bf16", "mixed", "grid", "small", "odd", "family")
ROW_FAMILIES = ("f32", "bf16", "mixed", "grid", "small", "family")  # without rows of one element
SPHERE_FAMILIES = ("f32", "bf16", "mixed", "small", "directions", "odd", "family")
WEIGHTS = ([1.0], [0.6, 0.3, 0.8], [1.0, -0.4, 0.5], [[0.2, 0.9], 0.5])
COUNTS = (1, 2, 3, 4, 5, 8)


def _linear() -> Iterator[Case]:
    for family, (count, weights) in itertools.product(DELTA_FAMILIES, zip(COUNTS, itertools.cycle(WEIGHTS))):
        for normalize in (True, False):
            yield Case(method="linear", family=family, experts=_experts(count, weight=weights), base=False,
                       params={"normalize": normalize})  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        yield Case(method="linear", family="mixed", experts=_experts(3, weight=[0.5, 0.2]), base=False, dtype=dtype)
    listed = (("base", {"weight": 0.4}), *_experts(3, weight=[0.5, 0.2]))
    yield Case(method="linear", family="f32", experts=listed)
    yield Case(method="linear", family="f32", experts=(*_experts(2, weight=[0.5]), ("base", {"weight": 0.25})),
               params={"weight": 0.25}, appended=True)  # fmt: skip


def _passthrough() -> Iterator[Case]:
    scales = ({}, {"scale": 0.3}, {"scale": [-1.5, 0.7]}, {"scale": 0.0})
    for family, scale in itertools.product(DELTA_FAMILIES, scales):
        yield Case(method="passthrough", family=family, experts=(("e1", scale),), base=False)
    yield Case(method="passthrough", family="mixed", experts=(("e2", {"scale": 0.7}),), base=False, dtype="bfloat16")


def _spherical(method: str) -> Iterator[Case]:
    for family in SPHERE_FAMILIES:
        experts = [f"e{n}" for n in range(1, 9)] if family == "directions" else ["e1", "e3", "e5"]
        values = (0.0, 0.25, [0.1, 0.9], 1.0) if family != "directions" else (0.3,)
        for expert, t in itertools.product(experts[: None if family != "family" else 2], values):
            yield Case(method=method, family=family, experts=((expert, {}),), params={"t": t})
    yield Case(method=method, family="f32", experts=(("e1", {}),), params={"t": 1.25})
    yield Case(method=method, family="f32", experts=(("base", {}), ("e1", {})), params={"t": 0.25})
    yield Case(method=method, family="f32", experts=(("e1", {}), ("base", {})), params={"t": 0.25})
    yield Case(method=method, family="bf16", experts=(("e1", {}),), params={"t": 0.25}, dtype="bfloat16")


def _nuslerp() -> Iterator[Case]:
    modes = ({}, {"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True})
    for family, mode, base in itertools.product(SPHERE_FAMILIES, modes, (False, True)):
        for weights in ([1.0, 1.0], [0.3, [0.9, 0.1]], [0.9, -0.2]):
            yield Case(method="nuslerp", family=family, base=base, params=mode,
                       experts=_experts(2, weight=weights))  # fmt: skip
    pairs = [("e1", "e3"), ("e1", "e4"), ("e2", "e3"), ("e3", "e5"), ("e6", "e7"), ("e3", "e8"), ("e8", "e8")]
    for (one, two), mode in itertools.product(pairs[:-1], modes):
        experts = ((one, {"weight": 0.4}), (two, {"weight": 0.7}))
        yield Case(method="nuslerp", family="directions", base=False, params=mode, experts=experts)


_MULTI = ([1.0], [0.3, [0.9, 0.1]], [1.0, -0.4, 0.5], [0.5, 0.2], [1.0])


def _multislerp() -> Iterator[Case]:
    for family, base, normalize in itertools.product(SPHERE_FAMILIES, (False, True), (True, False)):
        for count, weights in zip((1, 2, 3, 5, 8), _MULTI, strict=True):
            if family == "directions":  # what cancels is an edge case, see EDGES
                chosen = tuple(
                    (f"e{n}", {"weight": w}) for n, w in zip((1, 3, 6, 7), (0.5, 0.4, 0.3, 0.9), strict=True)
                )[: min(count, 4)]
            else:
                chosen = _experts(count, weight=weights)
            yield Case(method="multislerp", family=family, base=base, experts=chosen,
                       params={"normalize_weights": normalize})  # fmt: skip


def _karcher() -> Iterator[Case]:
    for family, count in itertools.product(SPHERE_FAMILIES, (1, 2, 3, 5, 8)):
        chosen = (1, 3, 6, 7) if family == "directions" else range(1, count + 1)
        experts = tuple((f"e{n}", {}) for n in list(chosen)[:count])
        yield Case(method="karcher", family=family, base=False, experts=experts)
    for params in ({"max_iter": 1}, {"max_iter": 50, "tol": 1e-9}, {"tol": 0.5}):
        yield Case(method="karcher", family="f32", base=False, experts=_experts(4), params=params)
    yield Case(method="karcher", family="f32", experts=(*_experts(3), ("base", {})), appended=True)
    yield Case(method="karcher", family="f32", experts=_experts(6)[4:], base=False)


def _combined(method: str, families: Sequence[str], own: Sequence[Settings], **fixed: Any) -> Iterator[Case]:
    """Yield the cases of a method on deltas: counts, weights, normalisation, lambda, and its own settings in turn."""
    turns = itertools.cycle(own)
    switches = itertools.cycle(({}, {"normalize": True}, {"normalize": False}, {"lambda": 0.7, "normalize": True}))
    for family in families:
        for count, weights in zip((1, 1, 1, 2, 3, 4, 5, 8), itertools.cycle(WEIGHTS)):
            settings = next(turns)
            experts = _experts(count, weight=weights if count > 1 else [1.0])
            experts = tuple((source, {**one, **settings}) for source, one in experts)
            yield Case(method=method, family=family, experts=experts, params=next(switches), **fixed)
    experts = tuple((source, {**one, **own[0]}) for source, one in _experts(3, weight=[0.5, 0.8]))
    yield Case(method=method, family="f32", experts=(experts[0], ("base", dict(own[0])), *experts[1:]), **fixed)
    yield Case(method=method, family="bf16", experts=experts, dtype="bfloat16", **fixed)


def _task_arithmetic() -> Iterator[Case]:
    yield from _combined("task_arithmetic", DELTA_FAMILIES, [{}])


DENSITIES = (0.5, 0.05, 0.9, 1.0, 0.333, [0.2, 0.8])


def _with_rescale(cases: Iterator[Case], values: Sequence[Settings]) -> Iterator[Case]:
    turns = itertools.cycle(values)
    for case in cases:
        yield replace(case, params={**case.params, **next(turns)})


def _ties() -> Iterator[Case]:
    own = [{"density": density} for density in DENSITIES]
    yield from _with_rescale(_combined("ties", DELTA_FAMILIES, own), ({}, {}, {"rescale": True}))


def _breadcrumbs(method: str) -> Iterator[Case]:
    gammas = (0.01, 0.1, 0.0, 0.3)
    own = [{"density": d, "gamma": g} for d, g in zip(DENSITIES * 2, gammas * 3, strict=True)]
    yield from _with_rescale(_combined(method, DELTA_FAMILIES, own), ({}, {}, {"rescale": True}))


def _dare(method: str) -> Iterator[Case]:
    own = [{"density": density} for density in DENSITIES]
    yield from _with_rescale(_combined(method, DELTA_FAMILIES, own), ({}, {"rescale": False}, {}))


def _della(method: str) -> Iterator[Case]:
    pairs = ((0.5, 0.15), (0.2, 0.19), (0.7, 0.0), (1.0, 0.15), (0.333, 0.1), ([0.3, 0.6], 0.2))
    own = [{"density": density, "epsilon": epsilon} for density, epsilon in pairs]
    yield from _with_rescale(_combined(method, ROW_FAMILIES, own), ({}, {"rescale": False}, {}))


def _sce() -> Iterator[Case]:
    for family, count in itertools.product(DELTA_FAMILIES, (1, 2, 3, 5, 8)):
        for topk in (1.0, 0.5, 0.07, [0.9, 0.2])[: 4 if count == 3 else 2]:
            experts = tuple((f"e{n}", {}) for n in range(1, count + 1))
            yield Case(method="sce", family=family, experts=experts, params={"select_topk": topk})
    yield Case(method="sce", family="f32", experts=(("base", {}), ("e1", {}), ("e2", {})), params={"select_topk": 0.4})
    yield Case(method="sce", family="bf16", experts=_experts(3), dtype="bfloat16")


def _model_stock() -> Iterator[Case]:
    for family, count, rows in itertools.product((*DELTA_FAMILIES, "directions"), (2, 3, 5, 8), (False, True)):
        yield Case(method="model_stock", family=family, experts=_experts(count), params={"filter_wise": rows})
    yield Case(method="model_stock", family="f32", experts=(("e1", {}), ("base", {}), ("e2", {})))


def _nearswap() -> Iterator[Case]:
    for family, t in itertools.product(DELTA_FAMILIES, (0.0, 1e-6, 1e-4, 0.003, [0.001, 0.02], 2.0**-9, 3.0)):
        yield Case(method="nearswap", family=family, experts=(("e1", {}),), params={"t": t})


def _arcee_fusion() -> Iterator[Case]:
    for family, expert in itertools.product((*DELTA_FAMILIES, "large"), ("e1", "e2", "e3", "e5")):
        yield Case(method="arcee_fusion", family=family, experts=((expert, {}),))
    yield Case(method="arcee_fusion", family="bf16", experts=(("e1", {}),), dtype="bfloat16")


def _ram(method: str, own: Sequence[Settings]) -> Iterator[Case]:
    for family, count, settings in itertools.product(DELTA_FAMILIES, (1, 2, 3, 5, 8), own):
        yield Case(method=method, family=family, experts=_experts(count), params=settings)
    yield Case(method=method, family="f32", experts=(("e1", {}), ("base", {}), ("e2", {})))
    yield Case(method=method, family="bf16", experts=_experts(3), dtype="bfloat16")


_RAM = ({}, {"epsilon": 0.002}, {"epsilon": 2.0**-9})
_RAMPLUS = (*_RAM[:2], {"r": 0.5, "alpha": 0.7, "epsilon": 0.003}, {"r": 0.3, "alpha": 1e9, "epsilon": 2.0**-8})
METHODS: Mapping[str, Any] = {
    "linear": _linear,
    "slerp": lambda: _spherical("slerp"),
    "nuslerp": _nuslerp,
    "multislerp": _multislerp,
    "karcher": _karcher,
    "passthrough": _passthrough,
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "dare_linear": lambda: _dare("dare_linear"),
    "dare_ties": lambda: _dare("dare_ties"),
    "breadcrumbs": lambda: _breadcrumbs("breadcrumbs"),
    "breadcrumbs_ties": lambda: _breadcrumbs("breadcrumbs_ties"),
    "della": lambda: _della("della"),
    "della_linear": lambda: _della("della_linear"),
    "sce": _sce,
    "model_stock": _model_stock,
    "nearswap": _nearswap,
    "arcee_fusion": _arcee_fusion,
    "ram": lambda: _ram("ram", _RAM),
    "ramplus_tl": lambda: _ram("ramplus_tl", _RAMPLUS),
}
_REAL = ("expert-python", "expert-c", "expert-legal", "expert-js")  # e1 to e4 of the real family


def cases(method: str, *, real: bool, quick: bool = False) -> list[Case]:
    """Return the cases of a method; those on the real family only if there is one."""
    found = []
    for number, case in enumerate(METHODS[method]()):
        if case.family == "family" and (not real or len(case.experts) > len(_REAL)):
            continue
        if any(source == "e5" for source, _ in case.experts) and case.family == "family":
            continue
        if quick and number % 4:
            continue
        # Every case draws masks of its own, so that their counts are independent.
        found.append(replace(case, number=number, seed=number))
    return found


def folders(family: str, root: str, real: str | None) -> dict[str, str]:
    """Return the folder of every source of a family."""
    if family == "family":
        return {"base": f"{real}/base"} | {f"e{n}": f"{real}/{name}" for n, name in enumerate(_REAL, 1)}
    return {source: f"{root}/{family}/{source}" for source in ("base", *(f"e{n}" for n in range(1, 9)))}
