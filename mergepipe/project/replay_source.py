"""What a manifest declares, as a Mergefile again: checked like one, because a manifest may come from anyone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergepipe.errors import MergefileError, MergepipeError, PlanError, raise_collected
from mergepipe.lockfile.manifest_records import OUTPUT_KEY, Manifest
from mergepipe.lockfile.records import LockedExpert, LockedOutput, LockedRule, LockedSlice
from mergepipe.mergefile.parse import check_declarations
from mergepipe.mergefile.schema import CustomOperator, Mergefile, Output, Source
from mergepipe.operators.contract import Operator
from mergepipe.operators.registry import operators, signatures
from mergepipe.project.plugins import is_allowed, load_operators
from mergepipe.signatures import OperatorSignature

FULL = "full"
_ABSOLUTE_ERROR, _BY_SAMPLES, _IN_LEVELS = "max_error ", " by samples", " in levels"
_UNUSED = "unused"  # the path of what no weights and no files are taken from


def records_of(manifest: Manifest) -> dict[str, LockedOutput]:
    """Return the records of the stages and, last, of the output of a manifest, by name."""
    return {output.name: output for output in (*(stage.output for stage in manifest.stages), manifest.output)}


def locations_of(manifest: Manifest) -> dict[str, Mapping[str, str]]:
    """Return where the sources of a manifest are, by name: all that are opened, none of the stages."""
    listed = [source for stage in manifest.stages for source in stage.sources]
    found = {one.name: one.location for one in (*listed, *manifest.sources) if OUTPUT_KEY not in one.location}
    return found | {place.name: place.location for place in manifest.places}


def declared_mergefile(
    manifest: Manifest, path: Path, base_dir: Path, *, code: Path | None, allow_custom: bool
) -> tuple[Mergefile, Mapping[str, Operator]]:
    """Return what a manifest declares as a Mergefile in ``base_dir``, and the operators that it uses.

    Parameters
    ----------
    path
        Of the manifest, for messages.
    code
        The folder of custom operators' files; ``base_dir`` by default.
    allow_custom
        Whether their code may run.

    Raises
    ------
    MergefileError
        If what it declares is nothing that a Mergefile could, or code would run and is not allowed to.
    PlanError
        If an operator is of another version here, or its code is another one.
    """
    found = dict(operators())

    def load(declared: Sequence[CustomOperator], unknown: Sequence[str]) -> Mapping[str, OperatorSignature]:
        if not declared and not unknown:
            return {}
        allowed = is_allowed(allow_custom)
        files = [_located(entry, code) for entry in declared]
        raise_collected(_missing_code(files, code or base_dir) if allowed else ())
        loaded = load_operators(files, unknown, code or base_dir, path.name, allowed=allowed)
        found.update(loaded)
        return {name: operator.signature for name, operator in loaded.items()}

    parsed = check_declarations(_data(manifest), path, signatures(), load)
    raise_collected(_operator_errors(manifest, found))
    return _as_declared(parsed, manifest, base_dir), found


def _located(entry: CustomOperator, code: Path | None) -> CustomOperator:
    """Return where an operator's file is looked for: never outside of the folder.

    A path that leaves the folder, or starts elsewhere, is cut down to its last part where a folder of code was given.

    Raises
    ------
    MergefileError
        For such a path without one.
    """
    normal = Path(os.path.normpath(entry.file))
    if not normal.is_absolute() and normal.parts[0] != "..":
        return replace(entry, file=str(normal))
    if code is None:
        raise MergefileError(
            f"the code of operator `{entry.name}` is in `{entry.file}`, outside of the folder of the Mergefile",
            hint="give the folder that its file is in with `--operators DIR`",
            operator=entry.name,
        )
    return replace(entry, file=normal.name)


def _missing_code(files: Iterable[CustomOperator], folder: Path) -> Iterator[MergepipeError]:
    for entry in files:
        if not (folder / entry.file).is_file():
            yield MergefileError(
                f"the code of operator `{entry.name}` is not at `{folder / entry.file}`",
                hint="give the folder that its file is in with `--operators DIR`",
                operator=entry.name,
            )


def _operator_errors(manifest: Manifest, found: Mapping[str, Operator]) -> list[MergepipeError]:
    errors: dict[str, MergepipeError] = {}
    for record in records_of(manifest).values():
        versions: list[tuple[str, int | None]] = [(record.operator, record.operator_version)]
        versions += [(part.operator, part.operator_version) for part in record.slices if part.operator]
        for name, version in versions:
            operator = found[name]
            if operator.version != version:
                errors[operator.signature.name] = PlanError(
                    f"operator `{name}` is of version {operator.version} here, and output `{record.name}` was made"
                    f" with version {version}: the same numbers cannot be expected",
                    hint=f"replay it with mergepipe {manifest.mergepipe}, which made it",
                    operator=name,
                    expected=version,
                    got=operator.version,
                )
        for name, digest in record.code.items():
            if name in found and found[name].code != digest:
                errors[name] = PlanError(
                    f"the code of the custom operator `{name}` is not what output `{record.name}` was made with",
                    hint="get the file as it was then (and what it imports), and give its folder with"
                    " `--operators DIR`",
                    operator=name,
                )
    return list(errors.values())


# --- to the shape of a Mergefile ----------------------------------------------------------------------------------


def _data(manifest: Manifest) -> dict[str, Any]:
    """Return the data of a Mergefile; the places in it are made up: only names and values are checked."""
    records = records_of(manifest)
    locations = locations_of(manifest)
    sources: dict[str, Any] = {
        name: {"progressive" if "progressive" in locations.get(name, {}) else "path": f"sources/{i}"}
        for i, name in enumerate(_source_names(manifest))
    }
    for name, location in locations.items():
        if "on" in location:
            sources[name]["on"] = location["on"]
    data: dict[str, Any] = {
        "version": 1,
        "sources": sources,
        "outputs": {name: _output(one) | {"path": f"outputs/{i}"} for i, (name, one) in enumerate(records.items())},
    }
    if manifest.operators:
        data["operators"] = {name: {"python": text} for name, text in manifest.operators.items()}
    return data


def _source_names(manifest: Manifest) -> list[str]:
    """Return every name that must be a source: those with a location, and bases that an operator ignores."""
    records, found = records_of(manifest), dict.fromkeys(locations_of(manifest))
    for record in records.values():
        named = [record.base, record.write.get("tokenizer"), *(expert.source for expert in record.experts)]
        for part in record.slices:
            named += [part.base, *(expert.source for expert in part.experts)]
        found |= dict.fromkeys(str(name) for name in named if name is not None and name not in records)
    return list(found)


def _output(record: LockedOutput) -> dict[str, Any]:
    data: dict[str, Any] = {"operator": record.operator, "write": dict(record.write)}
    if record.base is not None:
        data["base"] = record.base
    if record.slices:
        data["slices"] = [_slice(part) for part in record.slices]
    else:
        data["experts"] = list(map(_expert, record.experts))
    data |= {key: value for key, value in _inner(record).items() if value}
    if record.budget != FULL:
        data["budget"] = _budget(record.budget)
    return data


def _inner(part: LockedOutput | LockedSlice) -> dict[str, Any]:
    return {"params": _params(part.params), "rules": list(map(_rule, part.rules))}


def _params(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}


def _expert(expert: LockedExpert) -> dict[str, Any]:
    layers = {} if expert.layers is None else {"layers": expert.layers}
    return {**_params(expert.params), "source": expert.source, **layers}


def _rule(rule: LockedRule) -> dict[str, Any]:
    data: dict[str, Any] = {
        "match": list(rule.match),
        "layers": rule.layers,
        "params": _params(rule.params),
        "experts": {name: _params(params) for name, params in rule.experts.items()},
    }
    return {key: value for key, value in data.items() if value}


def _slice(part: LockedSlice) -> dict[str, Any]:
    given = {"operator": part.operator, "base": part.base, "base_layers": part.base_layers, **_inner(part)}
    data = {key: value for key, value in given.items() if value}
    return data | {"layers": part.layers, "experts": list(map(_expert, part.experts))}


def _budget(text: str) -> dict[str, Any]:
    """Return the table of a budget as `Budget.text` writes it; what it does not write is refused by the parser."""
    whole = text.removesuffix(_BY_SAMPLES)
    limit = whole.removesuffix(_IN_LEVELS)
    facts = {} if whole == text else {"stats": "sample"}
    facts["precision"] = "blocks" if limit == whole else "levels"
    if not limit.startswith(_ABSOLUTE_ERROR):
        return {"expert_reads": limit, **facts}
    number = limit.removeprefix(_ABSOLUTE_ERROR)
    try:
        return {"max_error": float(number), **facts}
    except ValueError:
        return {"max_error": number}


# --- and back to what was declared --------------------------------------------------------------------------------


def _as_declared(parsed: Mergefile, manifest: Manifest, base_dir: Path) -> Mergefile:
    """Return the Mergefile with the places that the manifest states."""
    records, locations = records_of(manifest), locations_of(manifest)
    return replace(
        parsed,
        path=base_dir / parsed.path.name,
        sources={name: _source(source, locations.get(name)) for name, source in parsed.sources.items()},
        outputs={name: _placed(output, records[name]) for name, output in parsed.outputs.items()},
    )


def _source(source: Source, location: Mapping[str, str] | None) -> Source:
    if location is None:
        return replace(source, path=_UNUSED)
    return replace(
        source,
        path=location.get("path"),
        progressive=location.get("progressive"),
        hub=location.get("hub"),
        revision=location.get("revision"),
    )


def _placed(output: Output, record: LockedOutput) -> Output:
    return replace(output, path=record.path or output.path, publish=record.path is not None)


def needed_sources(mergefile: Mergefile, manifest: Manifest, operators: Mapping[str, Operator]) -> tuple[str, ...]:
    """Return the sources that are opened, each behind the one that it applies to; the others are names alone.

    Raises
    ------
    PlanError
        If the manifest does not say where one is.
    """
    locations = locations_of(manifest)
    named = dict.fromkeys(name for output in mergefile.outputs.values() for name in _used(output, operators))
    found: dict[str, None] = {}
    for name in (*named, *locations):
        if name in mergefile.outputs and name not in locations:
            continue
        on = locations[name].get("on") if name in locations else None
        for needed in [on, name] if on is not None else [name]:
            if needed not in locations:
                what = f"output `{needed}` is made" if needed in mergefile.outputs else f"source `{needed}` is"
                raise PlanError(
                    f"the manifest uses `{name}` and does not say where {what}",
                    hint="the manifest contradicts itself; get it as it was written",
                    source=needed,
                )
            found[needed] = None
    return tuple(found)


def _used(output: Output, operators: Mapping[str, Operator]) -> Iterator[str]:
    """Yield what an output is made from; a base that its operator ignores is not among that."""
    parts = [(output.operator, output.base)] if output.slices is None else []
    parts += [(part.operator or output.operator, part.base or output.base) for part in output.slices or ()]
    yield from (base for name, base in parts if base is not None and not operators[name].ignores_base)
    yield from output.expert_sources
