"""Reads one document against mergekit's schema: a `Recipe`, or every problem of it.

mergekit drops keys that it does not know without a word. Here each of them is a problem, and so is each key that has no
counterpart in a Mergefile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mergepipe.dtypes import WRITE_DTYPES
from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.mergekit.methods import METHODS, UNKNOWN, Method
from mergepipe.mergefile.mergekit.references import Reference, read_reference
from mergepipe.mergefile.mergekit.settings import Notes, Settings, SettingsReader
from mergepipe.mergefile.mergekit.tokenizer import Tokenizer, read_tokenizer
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import code, did_you_mean, respelled
from mergepipe.signatures import OperatorSignature
from mergepipe.values import dataclass

_TOP = ("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype", "name")
_TOKENIZER = ("tokenizer_source", "tokenizer")
_MODEL = ("model", "parameters")
_SOURCE = ("model", "layer_range", "parameters")
_SLICE = ("sources", "base_model", "parameters")

_OPTION = "an option of mergekit's command line, not of its configuration, where it has no effect; remove it"
_MOE = (
    "this is a configuration of mergekit-moe, which builds a mixture of experts; `mergepipe import` takes merges only"
)
_REFUSED: Mapping[str, str] = {
    "modules": "recipes for parts of a model (vision and text) of their own have no counterpart: an output has one, "
    "with rules for tensors by name",
    "chat_template": "a chat template is copied with the tokenizer of a source, never written anew; "
    "change `tokenizer_config.json` of the result",
    "allow_crimes": "an option of mergekit's command line, which merges across architectures; here names and shapes of "
    "tensors must fit, whatever the architecture is called; remove it",
    "random_seed": "an option of mergekit's command line; `seed` in the output's `params` is ours; remove it",
    **dict.fromkeys(
        ("lazy_unpickle", "copy_tokenizer", "trust_remote_code", "low_cpu_memory", "cuda", "device", "clone_tensors",
         "out_shard_size", "safe_serialization", "transformers_cache", "lora_merge_cache", "lora_merge_dtype",
         "write_model_card", "multi_gpu", "read_to_gpu", "num_threads", "gpu_rich", "verbosity"),
        _OPTION,
    ),
    **dict.fromkeys(("experts", "gate_mode", "experts_per_token", "shared_experts"), _MOE),
    "genome": "this is a configuration of mergekit-evolve, which searches for a merge",
}  # fmt: skip
_IN_SLICE: Mapping[str, str] = {
    "merge_method": "mergekit ignores it here: a merge has one method. Make a document of its own for these layers, "
    "or give the slice its `operator` in the Mergefile",
    "residual_weight": "it has no effect in mergekit; remove it",
    "models": "a slice has `sources`, each with `model` and `layer_range`",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A model of a merge, or of a slice (then with its half-open range of layers), and the parameters beside it."""

    model: Reference
    settings: Settings
    layers: tuple[int, int] | None
    path: KeyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A slice; a merge of whole models is a single part without ranges."""

    inputs: tuple[Input, ...]
    base: Reference | None
    settings: Settings
    path: KeyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One document: a merge.

    Attributes
    ----------
    name
        As given, None if it has none.
    method, base, settings
        `merge_method`, `base_model`, `parameters`.
    parts, sliced
        What is merged, and whether the document has slices.
    dtype
        The dtype that is written, None for that of the inputs.
    tokenizer
        Whose it is, None where the document does not say.
    path
        The key path of the document.
    """

    name: str | None
    method: Method
    base: Reference | None
    settings: Settings
    parts: tuple[Part, ...]
    sliced: bool
    dtype: str | None
    tokenizer: Tokenizer | None
    path: KeyPath


def read_recipe(
    data: Any, path: KeyPath, signatures: Mapping[str, OperatorSignature], problems: Problems, notes: Notes
) -> Recipe | None:
    """Return the merge that a document describes, None where it is too wrong to go on."""
    if not isinstance(data, Mapping):
        hint = "a merge has `merge_method` and `models` or `slices`"
        problems.add(path, "a document is a mapping", hint=hint)
        return None
    _check_keys(data, path, (*_TOP, *_TOKENIZER), _REFUSED, problems)
    given = {key: value for key, value in data.items() if value is not None}
    dtype = _dtype(given, path, problems, notes)
    tokenizer = read_tokenizer(given, path, problems, notes)
    base = _model(given, "base_model", path, problems)
    method = _method(given, path, problems)
    reader = SettingsReader(method=method, signature=signatures.get(method.name), problems=problems, notes=notes)
    return Recipe(
        name=_name(given, path, problems),
        method=method,
        base=base,
        settings=reader.read(given.get("parameters"), (*path, "parameters")),
        parts=_parts(given, path, reader),
        sliced=bool(given.get("slices")),
        dtype=dtype,
        tokenizer=tokenizer,
        path=path,
    )


def _check_keys(
    data: Mapping[str, Any], path: KeyPath, known: Collection[str], refused: Mapping[str, str], problems: Problems
) -> None:
    """Record the keys that mergekit ignores, and those that a Mergefile has no counterpart for."""
    for key, value in data.items():
        if key in known or (value is None and key in refused):
            continue
        if key in refused:
            problems.add((*path, key), f"cannot be imported: {refused[key]}")
        else:
            hint = did_you_mean(key, known) or "remove it"
            problems.add((*path, key), "unknown key: mergekit ignores it, and what was meant with it", hint=hint)


def _method(data: Mapping[str, Any], path: KeyPath, problems: Problems) -> Method:
    """Return the method; where it is none, after recording that, one that the rest can be checked with."""
    name = data.get("merge_method")
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    if "merge_method" not in data:
        problems.add(path, "missing: `merge_method`", hint="a merge has `merge_method` and `models` or `slices`")
    elif isinstance(name, str):
        what = f"mergepipe has no counterpart of the method {code(name)}"
        problems.add((*path, "merge_method"), what, hint=did_you_mean(name, METHODS))
        return METHODS.get(respelled(name, METHODS) or "", UNKNOWN)
    else:
        problems.add((*path, "merge_method"), "invalid value", expected="the name of a method", got=name)
    return UNKNOWN


def _name(data: Mapping[str, Any], path: KeyPath, problems: Problems) -> str | None:
    name = data.get("name")
    if name is None or (isinstance(name, str) and name.strip() and name.isprintable()):
        return name
    hint = None if isinstance(name, str) else "put it in quotes"
    problems.add((*path, "name"), "invalid name", expected="a string", got=name, hint=hint)
    return None


def _dtype(data: Mapping[str, Any], path: KeyPath, problems: Problems, notes: Notes) -> str | None:
    """Return the dtype that is written, by its name in headers."""
    found = {}
    for key in ("out_dtype", "dtype"):
        name = data.get(key)
        if name is None:
            continue
        short = name.removeprefix("torch.") if isinstance(name, str) else ""
        if short in WRITE_DTYPES:
            found[key] = WRITE_DTYPES[short]
        else:
            expected = "`bfloat16`, `float16`, `float32` or `float64`"
            problems.add((*path, key), "invalid dtype", expected=expected, got=name)
    if found.get("dtype", "F32") not in ("F32", "F64"):
        notes.add(
            f"`dtype: {data['dtype']}`: mergekit computes in it and rounds after every step; mergepipe computes in "
            "float32 and rounds once, to the dtype that is written"
        )
    return found.get("out_dtype") or found.get("dtype")


def _parts(data: Mapping[str, Any], path: KeyPath, reader: SettingsReader) -> tuple[Part, ...]:
    """Return the slices, or the models as one part; none where they are wrong."""
    problems = reader.problems
    models, slices = data.get("models"), data.get("slices")
    if models and slices:
        problems.add((*path, "slices"), "a merge has `models` or `slices`, not both")
    elif not models and not slices and not data.get("modules"):
        problems.add(path, "missing: what to merge, `models` or `slices`")
    if slices:
        return _slices(slices, (*path, "slices"), reader)
    inputs = _inputs(models, (*path, "models"), _MODEL, reader) if models else ()
    return (Part(inputs=inputs, base=None, settings={}, path=(*path, "models")),) if inputs else ()


def _slices(value: Any, path: KeyPath, reader: SettingsReader) -> tuple[Part, ...]:
    parts = []
    for entry, place in _tables(value, path, "slices with `sources`", reader.problems):
        _check_keys(entry, place, _SLICE, _IN_SLICE, reader.problems)
        given = {key: inner for key, inner in entry.items() if inner is not None}
        sources = given.get("sources")
        if not sources:
            reader.problems.add((*place, "sources"), "missing: what the slice is made of")
        inputs = _inputs(sources, (*place, "sources"), _SOURCE, reader) if sources else ()
        base = _model(given, "base_model", place, reader.problems)
        settings = reader.read(given.get("parameters"), (*place, "parameters"))
        parts.append(Part(inputs=inputs, base=base, settings=settings, path=place))
    return tuple(parts)


def _tables(value: Any, path: KeyPath, what: str, problems: Problems) -> list[tuple[Mapping[str, Any], KeyPath]]:
    if not isinstance(value, list):
        problems.add(path, "invalid value", expected=f"a list of {what}", got=value)
        return []
    found = []
    for index, entry in enumerate(value):
        if isinstance(entry, Mapping):
            found.append((entry, (*path, index)))
        else:
            hint = "write `- model: ...`" if isinstance(entry, str) else None
            problems.add((*path, index), "invalid value", expected=f"one of the {what}, a mapping", hint=hint)
    return found


def _inputs(value: Any, path: KeyPath, known: tuple[str, ...], reader: SettingsReader) -> tuple[Input, ...]:
    """Return the models of a merge, or the sources of a slice (``known`` has `layer_range` then)."""
    problems = reader.problems
    found: list[Input] = []
    for entry, place in _tables(value, path, "models", problems):
        refused = {} if known is _SOURCE else {"layer_range": "ranges of layers stand in `slices`, below `sources`"}
        _check_keys(entry, place, known, refused, problems)
        if entry.get("model") is None:
            problems.add((*place, "model"), "missing: which model")
            continue
        model = read_reference(entry["model"], (*place, "model"), problems)
        layers = _layers(entry, place, problems) if known is _SOURCE else None
        settings = reader.read(entry.get("parameters"), (*place, "parameters"), str(model))
        if model is None:
            continue
        if any(other.model == model for other in found):
            what = f"{code(str(model))} is listed twice: mergekit takes one of them, or stops"
            problems.add((*place, "model"), what, hint="list it once, with one weight")
        found.append(Input(model=model, settings=settings, layers=layers, path=place))
    return tuple(found)


def _layers(entry: Mapping[str, Any], path: KeyPath, problems: Problems) -> tuple[int, int] | None:
    value, where = entry.get("layer_range"), (*path, "layer_range")
    if value is None:
        problems.add(where, "missing: which layers", hint="write `layer_range: [0, 16]` for layers 0 to 15")
        return None
    ends = value if isinstance(value, list) else []
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        problems.add(where, "invalid range of layers", expected="two integers: `[0, 16]` is layers 0 to 15")
        return None
    first, end = ends
    if first < 0 or end > 10**9:
        problems.add(where, f"a range from {first} to {end}", expected="layers of the model, counted from 0")
    elif first >= end:
        what = "a slice without layers: in mergekit it only decides where head and embeddings come from"
        problems.add(where, what if first == end else f"a range from {first} down to {end}")
    else:
        return first, end
    return None


def _model(data: Mapping[str, Any], key: str, path: KeyPath, problems: Problems) -> Reference | None:
    value = data.get(key)
    return None if value is None else read_reference(value, (*path, key), problems)
