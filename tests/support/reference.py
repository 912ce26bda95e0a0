"""What the tensors of an output should be: a slow evaluation of a recipe that shares no code with mergepipe.

Whole tensors at a time, plain numpy float32 (or float64) arrays; multiply and add are separate steps, in expert order;
one rounding at the end, by scaling to integers. A recipe is an output's table as it stands in a Mergefile.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from support.checkpoints import as_dtype, header_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Array = NDArray[Any]
Recipe = dict[str, Any]

MERGED = ("F64", "F32", "F16", "BF16")
# Bits of precision, smallest exponent, largest finite value.
_PRECISION = {
    "F16": (11, -14, 65504.0),
    "BF16": (8, -126, float.fromhex("0x1.fep127")),
    "F32": (24, -126, float.fromhex("0x1.fffffep127")),
}


def assert_same_tensors(got: Mapping[str, Array], want: Mapping[str, Array], *, zero_signs: bool = True) -> None:
    """Assert equal names, dtypes, shapes and bits; NaN equals NaN, and zeros of either sign only where asked for."""
    assert sorted(got) == sorted(want)
    for name, expected in want.items():
        array = got[name]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        if not same_bits(array, expected, zero_signs=zero_signs):
            differ = np.flatnonzero(array.reshape(-1) != expected.reshape(-1))
            raise AssertionError(f"{name}: differs at {differ[:8]}: {array.reshape(-1)[differ[:8]]} instead of "
                                 f"{expected.reshape(-1)[differ[:8]]}")  # fmt: skip


def same_bits(first: Array, second: Array, *, zero_signs: bool = True) -> bool:
    """Return whether two arrays of one dtype hold the same bits, whatever the payload of a NaN."""
    if header_name(first.dtype) not in MERGED:
        return first.tobytes() == second.tobytes()
    with np.errstate(invalid="ignore"):  # signalling NaN
        a, b = (np.array(array, dtype=np.float64).reshape(-1) for array in (first, second))
    both_nan = np.isnan(a) & np.isnan(b)
    signs = (np.signbit(a) == np.signbit(b)) if zero_signs else np.ones(a.shape, bool)
    return bool((both_nan | ((a == b) & signs)).all())


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 or float64 values once, to nearest even, to a dtype (header name)."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = np.array(values, dtype=np.float64)
    if dtype == "F64":
        return wide
    bits, smallest, largest = _PRECISION[dtype]
    exponent = np.maximum(np.frexp(wide)[1] - 1, smallest) - (bits - 1)
    with np.errstate(all="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(wide, -exponent)), exponent)  # rint rounds half to even
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
        rounded = np.where(np.isfinite(wide), rounded, wide)
        return np.asarray(rounded.astype(as_dtype(dtype)))  # exact: every value is one of the dtype's


def linear(arrays: Sequence[Array], weights: Sequence[float], *, normalize: bool = True) -> Array:
    """Return ``sum(w_i x_i) / sum(w_i)`` in the work dtype; an expert of weight 0 is no input."""
    work = work_dtype([array for array, weight in zip(arrays, weights, strict=True) if np.float32(weight) != 0])
    factors = [work.type(weight) for weight in weights]
    divisor = _sum(factors, work) if normalize else work.type(1)
    with np.errstate(all="ignore"):
        terms = [
            np.multiply(array.astype(work), factor)
            for array, factor in zip(arrays, factors, strict=True)
            if factor != 0
        ]
        total = _sum(terms, work) if terms else np.zeros(arrays[0].shape, work)
        return total if divisor == 1 else np.divide(total, divisor)


def task_arithmetic(
    base: Array,
    experts: Sequence[Array | None],
    weights: Sequence[float],
    *,
    normalize: bool = False,
    scale: float = 1.0,
) -> Array:
    """Return ``base + scale * (sum(w_i (x_i - base)) / (1 or sum(w_i)))``; None is a delta of zero.

    What equals the base has a delta of zero, infinity as well.
    """
    live = [(x, w) for x, w in zip(experts, weights, strict=True) if x is not None and np.float32(w) != 0]
    live = live if np.float32(scale) != 0 else []
    work = work_dtype([base, *(array for array, _ in live)])
    divisor = _sum([work.type(weight) for weight in weights], work) if normalize and weights else work.type(1)
    wide = base.astype(work)
    with np.errstate(all="ignore"):
        deltas = [np.where(array.astype(work) == wide, 0, np.subtract(array.astype(work), wide)) for array, _ in live]
        terms = [np.multiply(delta, work.type(weight)) for delta, (_, weight) in zip(deltas, live, strict=True)]
        total = _sum(terms, work) if terms else np.zeros(base.shape, work)
        total = total if divisor == 1 else np.divide(total, divisor)
        return np.add(wide, total if work.type(scale) == 1 else np.multiply(total, work.type(scale)))


def work_dtype(arrays: Iterable[Array]) -> np.dtype[Any]:
    """Return float64 where an input is float64, else float32."""
    return np.dtype(np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32)


def _sum(values: Sequence[Any], work: np.dtype[Any]) -> Any:
    """Return the sum of scalars or of arrays from left to right."""
    total = values[0]
    for value in values[1:]:
        total = np.add(total, value, dtype=work)
    return total


def evaluate(recipe: Recipe, checkpoints: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return every tensor of an output, evaluated from its recipe and whole checkpoints."""
    if "slices" in recipe:
        return _evaluate_slices(recipe, checkpoints)
    experts = [{"source": e} if isinstance(e, str) else e for e in recipe["experts"]]
    definer = base_of(recipe) or experts[0]["source"]
    layers = 1 + max((layer for name in checkpoints[definer] if (layer := layer_of(name)) is not None), default=-1)
    return {
        name: _evaluate_tensor(recipe, checkpoints, definer, experts, name, layers) for name in checkpoints[definer]
    }


def _evaluate_slices(recipe: Recipe, checkpoints: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Evaluate slice by slice, each as an output of its own over checkpoints that hold the renumbered layers alone."""
    merged: dict[str, Array] = {}
    first = 0
    for number, part in enumerate(recipe["slices"]):
        own = [{"source": e} if isinstance(e, str) else e for e in part.get("experts", [part.get("source")])]
        base, base_layers = part.get("base", recipe.get("base")), part.get("base_layers", part["layers"])
        start, stop = _range(part["layers"])
        for inside in (True, False):
            views: dict[str, Mapping[str, Array]] = {}
            experts = []
            for expert in own:
                taken = expert.get("layers", part["layers"])
                key = f"{expert['source']} {taken}" if inside else expert["source"]
                views[key] = _view(checkpoints[expert["source"]], taken, first, inside=inside)
                experts.append({k: v for k, v in expert.items() if k != "layers"} | {"view": key})
            inner = {key: value for key, value in recipe.items() if key not in ("slices", "base")} | {
                "operator": part.get("operator", recipe["operator"]),
                "params": recipe.get("params", {}) | part.get("params", {}),
                "rules": [*recipe.get("rules", []), *part.get("rules", [])],
            }
            if base is not None:
                inner["base"] = f"{base} {base_layers}" if inside else base
                views[inner["base"]] = _view(checkpoints[base], base_layers, first, inside=inside)
            definer = base_of(inner) or experts[0]["view"]
            ends = {True: number == 0, False: number == len(recipe["slices"]) - 1}
            for name in views[definer]:
                if inside or ends["embed" in name]:
                    merged[name] = _evaluate_tensor(inner, views, definer, experts, name, stop - start, first)
        first += stop - start
    return merged


def _range(layers: str) -> tuple[int, int]:
    start, _, stop = layers.partition("..")
    return int(start), int(stop)


def _view(checkpoint: Mapping[str, Array], layers: str, first: int, *, inside: bool) -> dict[str, Array]:
    """Return the tensors of some layers, numbered from ``first`` on; or those outside the layers."""
    if not inside:
        return {name: array for name, array in checkpoint.items() if layer_of(name) is None}
    start, stop = _range(layers)
    return {
        name.replace(f"layers.{layer}.", f"layers.{first + layer - start}."): array
        for name, array in checkpoint.items()
        if (layer := layer_of(name)) is not None and start <= layer < stop
    }


def base_of(recipe: Recipe) -> str | None:
    """Return the base of a recipe; passthrough makes nothing of one."""
    return recipe.get("base") if recipe["operator"] != "passthrough" else None


def _evaluate_tensor(
    recipe: Recipe,
    checkpoints: Mapping[str, Mapping[str, Array]],
    definer: str,
    experts: Sequence[Recipe],
    name: str,
    layers: int,
    first: int = 0,
) -> Array:
    own = checkpoints[definer][name]
    if header_name(own.dtype) not in MERGED:
        return own
    outer, columns = parameters(recipe, experts, name, layers, first)
    dtype = _header_dtype(recipe.get("write", {}).get("dtype")) or header_name(own.dtype)
    views = [expert.get("view", expert["source"]) for expert in experts]
    found = [checkpoints[view].get(name) for view in views]
    rows = min(len(array) if array.ndim else 1 for array in (own, *(f for f in found if f is not None)))
    cut = [array if array is None or not array.ndim else array[:rows] for array in found]
    mine = own if not own.ndim else own[:rows]
    match recipe["operator"]:
        case "linear":
            filled = [mine if array is None else array for array in cut]
            merged = linear(filled, [c["weight"] for c in columns], normalize=outer["normalize"])
        case "task_arithmetic":  # the base among the experts has no part in a sum of deltas
            deltas = [
                (array, column["weight"])
                for view, array, column in zip(views, cut, columns, strict=True)
                if view != base_of(recipe)
            ]
            arrays, weights = [array for array, _ in deltas], [weight for _, weight in deltas]
            merged = task_arithmetic(mine, arrays, weights, normalize=outer["normalize"], scale=outer["lambda"])
        case "passthrough":
            merged = linear([mine], [columns[0]["scale"]], normalize=False)
    rounded = round_to(merged, dtype)
    return rounded if not own.ndim else np.concatenate([rounded, round_to(own[rows:], dtype)])


_DEFAULTS: Mapping[str, tuple[Recipe, Recipe]] = {
    "linear": ({"normalize": True}, {"weight": 1.0}),
    "task_arithmetic": ({"normalize": False, "lambda": 1.0}, {"weight": 1.0}),
    "passthrough": ({}, {"scale": 1.0}),
}


def parameters(
    recipe: Recipe, experts: Sequence[Recipe], name: str, layers: int, first_layer: int = 0
) -> tuple[Recipe, list[Recipe]]:
    """Return the parameters of a tensor: those of the output, and those of each expert.

    Gradients run over ``layers`` layers from ``first_layer`` on.
    """
    outer, column = _DEFAULTS[recipe["operator"]]
    given = recipe.get("params", {})
    outer = outer | given
    columns = [column | given | expert for expert in experts]
    layer = layer_of(name)
    for rule in recipe.get("rules", ()):
        globs = rule.get("match", ["*"])
        first, _, stop = rule.get("layers", "").partition("..")
        if not any(fnmatch.fnmatchcase(name, glob) for glob in ([globs] if isinstance(globs, str) else globs)):
            continue
        if stop and (layer is None or not int(first) <= layer < int(stop)):
            continue
        general = rule.get("params", {})
        outer = outer | general
        special = rule.get("experts", {})
        columns = [c | general | special.get(c["source"], {}) for c in columns]
    place = None if layer is None else layer - first_layer
    outer = {key: _at(value, place, layers) for key, value in outer.items()}
    return outer, [{key: _at(value, place, layers) for key, value in c.items()} for c in columns]


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor of a small test model: ``layers.N`` somewhere in its name."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _at(value: Any, layer: int | None, layers: int) -> Any:
    if not isinstance(value, list):
        return value
    if layer is None:
        return value[0]
    position = (layer / (layers - 1) if layers > 1 else 1.0) * (len(value) - 1)
    below = min(int(position), max(len(value) - 2, 0))
    fraction = position - below
    return float(value[below] * (1 - fraction) + value[min(below + 1, len(value) - 1)] * fraction)


def _header_dtype(name: str | None) -> str | None:
    return None if name is None else header_name(name)
