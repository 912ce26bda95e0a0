"""A case's recipe, which knows no Mergefile syntax, as the text of a Mergefile."""

from __future__ import annotations

import copy
import glob
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from support.cases.errors import CaseError, known_keys

Recipe = Mapping[str, Any]
RECIPE_KEYS = ("method", "base", "experts", "params", "dtype", "output")
OUTPUT_KEYS = ("dir", "max_shard_size_bytes")
EXPERT_KINDS = {"full": False, "lora": True}
OUTPUT = "out"
_METHODS = {"dare": "dare_linear"}
_MASKING = ("dare", "della")
_BY_TENSOR = "_by_tensor"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SPELLED_FLOAT = re.compile(r"([+-]?(?:nan|inf))\b.*")


class Raw(str):
    """A TOML value spelled by the case itself, such as ``3e-1``."""

    __slots__ = ()


def check_recipe(recipe: Any, where: str) -> None:
    """Check the keys of a recipe; those of experts and parameters go to the tool as they are.

    Raises
    ------
    CaseError
        If a key is not known.
    """
    known_keys(recipe, RECIPE_KEYS, where, required=("method", "experts"))
    known_keys(recipe.get("output") or {}, OUTPUT_KEYS, f"{where}.output")
    for number, expert in enumerate(recipe["experts"]):
        known_keys(expert, expert, f"{where}.experts[{number}]", required=("path",))
        if expert.get("kind", "full") not in EXPERT_KINDS:
            raise CaseError(f"{where}.experts[{number}]: the harness does not know the kind {expert['kind']!r}")
    for name, value in (recipe.get("params") or {}).items():
        if name == "slices" and not _is_slices(value):
            raise CaseError(f"{where}.params.slices: expected [source, first, end] entries, got {value!r}")
        if name.endswith(_BY_TENSOR) and not isinstance(value, Mapping):
            raise CaseError(f"{where}.params.{name}: expected a mapping, got {value!r}")


def _is_slices(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, list) and len(part) == 3 for part in value)


def output_dir(recipe: Recipe) -> str:
    """Return where the recipe's output goes, relative to the project."""
    return (recipe.get("output") or {}).get("dir") or OUTPUT


def with_output_dir(recipe: Recipe, path: str) -> dict[str, Any]:
    """Return the recipe with another output folder."""
    return with_settings(recipe, {"output.dir": path})


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the recipe with some values replaced.

    Keys are paths with dots (``output.max_shard_size_bytes``, ``experts.0.weight``); ``weights`` gives the
    weights of all experts in order.

    Raises
    ------
    CaseError
        If a path leads nowhere, or the result is not a recipe.
    """
    result = copy.deepcopy(dict(recipe))
    for key, value in settings.items():
        if key == "weights":
            _set_weights(result, value)
        else:
            _set_path(result, key.split("."), copy.deepcopy(value), key)
    check_recipe(result, "set")
    return result


def _set_weights(recipe: dict[str, Any], weights: Sequence[Any]) -> None:
    if len(weights) != len(recipe["experts"]):
        raise CaseError(f"set.weights: {len(weights)} weights for {len(recipe['experts'])} experts")
    for expert, weight in zip(recipe["experts"], weights, strict=True):
        expert["weight"] = weight


def _set_path(target: Any, path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        if isinstance(target, list):
            target = target[int(part)]
        else:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
    if not isinstance(target, dict):
        raise CaseError(f"set.{key}: there is nothing to set")
    target[path[-1]] = value


def source_names(recipe: Recipe) -> dict[str, str]:
    """Return a name for each path that the recipe reads: made of the path, unique, in order of first use.

    Random masks are drawn for an expert's name. A case names none, so its experts are numbered there: the same expert
    in another folder keeps its masks.
    """
    if recipe["method"].startswith(_MASKING):
        paths = [recipe.get("base"), *(expert["path"] for expert in recipe["experts"])]
        numbered = {path: f"expert-{number}" if number else "base" for number, path in enumerate(paths)}
        return {path: name for path, name in numbered.items() if path is not None}
    slices = (recipe.get("params") or {}).get("slices") or []
    paths = [recipe.get("base"), *(e["path"] for e in recipe["experts"]), *(part[0] for part in slices)]
    names: dict[str, str] = {}
    for path in paths:
        if path is not None and path not in names:
            names[path] = _unused(re.sub(r"[^A-Za-z0-9_-]+", "_", path).strip("_") or "source", names)
    return names


def _unused(name: str, names: Mapping[str, str]) -> str:
    taken = set(names.values())
    candidates = (name, *(f"{name}_{n}" for n in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


def spell_weight(recipe: Recipe, text: str) -> dict[str, Any]:
    """Return the recipe with the weight that equals ``text`` written in exactly these characters.

    Raises
    ------
    CaseError
        If no expert has that weight.
    """
    result = copy.deepcopy(dict(recipe))
    found = [e for e in result["experts"] if isinstance(e.get("weight"), int | float) and e["weight"] == float(text)]
    if not found:
        raise CaseError(f"no expert has a weight that could be spelled {text}")
    for expert in found:
        expert["weight"] = Raw(text)
    return result


def mergefile_text(recipe: Recipe, comment: str | None = None) -> str:
    """Return the Mergefile that asks for the recipe's merge as its output `OUTPUT`."""
    lines = [f"# {comment}"] if comment else []
    lines += ["version = 1", *_source_lines(recipe), *_output_lines(recipe, comment), *_param_lines(recipe)]
    lines += [*_rule_lines(recipe), *_slice_lines(recipe), *_write_lines(recipe)]
    return "\n".join(lines) + "\n"


def _source_lines(recipe: Recipe) -> Iterator[str]:
    names = source_names(recipe)
    adapters = {e["path"] for e in recipe["experts"] if EXPERT_KINDS[e.get("kind", "full")]}
    for path, name in names.items():
        yield from ("", f"[sources.{_key(name)}]", f"path = {toml_value(path)}")
        if path in adapters and recipe.get("base") is not None:
            yield f"on = {toml_value(names[recipe['base']])}"


def _output_lines(recipe: Recipe, comment: str | None) -> Iterator[str]:
    names = source_names(recipe)
    yield from ("", f"[outputs.{OUTPUT}]" + (f"  # {comment}" if comment else ""))
    yield f"operator = {toml_value(_METHODS.get(recipe['method'], recipe['method']))}"
    if recipe.get("base") is not None:
        yield f"base = {toml_value(names[recipe['base']])}"
    if not (recipe.get("params") or {}).get("slices"):
        yield f"experts = {toml_value([_expert(expert, names) for expert in recipe['experts']])}"
    yield f"path = {toml_value(output_dir(recipe))}"


def _expert(expert: Mapping[str, Any], names: Mapping[str, str]) -> str | dict[str, Any]:
    params = {key: _param(key, value) for key, value in expert.items() if key not in ("path", "kind")}
    name = names[expert["path"]]
    return {"source": name, **params} if params else name


def _param(name: str, value: Any) -> Any:
    return "density" if name == "rescale" and value is True else value


def _param_lines(recipe: Recipe) -> Iterator[str]:
    plain = {
        name: _param(name, value)
        for name, value in (recipe.get("params") or {}).items()
        if name != "slices" and not name.endswith(_BY_TENSOR) and value is not None
    }
    if plain:
        yield from ("", f"[outputs.{OUTPUT}.params]", *(f"{_key(k)} = {toml_value(v)}" for k, v in plain.items()))


def _rule_lines(recipe: Recipe) -> Iterator[str]:
    for key, values in (recipe.get("params") or {}).items():
        if not key.endswith(_BY_TENSOR):
            continue
        for tensor, value in values.items():
            yield from ("", f"[[outputs.{OUTPUT}.rules]]", f"match = {toml_value(glob.escape(tensor))}")
            yield _rule_values(recipe, key.removesuffix(_BY_TENSOR), value)


def _rule_values(recipe: Recipe, param: str, value: Any) -> str:
    # A value that stands beside an expert is overridden beside that expert too.
    names = source_names(recipe)
    owners = {names[e["path"]]: {param: value} for e in recipe["experts"] if param in e}
    return f"experts = {toml_value(owners)}" if owners else f"params = {toml_value({param: value})}"


def _slice_lines(recipe: Recipe) -> Iterator[str]:
    names = source_names(recipe)
    for path, first, end in (recipe.get("params") or {}).get("slices") or []:
        yield from ("", f"[[outputs.{OUTPUT}.slices]]", f"source = {toml_value(names[path])}")
        yield f"layers = {toml_value(f'{first}..{end}')}"


def _write_lines(recipe: Recipe) -> Iterator[str]:
    shard_size = (recipe.get("output") or {}).get("max_shard_size_bytes")
    settings = {"dtype": recipe.get("dtype"), "shard_size": None if shard_size is None else f"{shard_size} B"}
    lines = [f"{key} = {toml_value(value)}" for key, value in settings.items() if value is not None]
    if lines:
        yield from ("", f"[outputs.{OUTPUT}.write]", *lines)


def toml_value(value: Any) -> str:
    """Return a value as TOML; ``"nan (a float)"``, JSON's way round its lack of nan, becomes ``nan``.

    Raises
    ------
    CaseError
        If TOML has no such value.
    """
    if isinstance(value, Raw):
        return str.__str__(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        spelled = _SPELLED_FLOAT.fullmatch(value) if value.endswith("(a float)") else None
        return spelled[1] if spelled else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise CaseError(f"a Mergefile cannot hold {value!r}")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
