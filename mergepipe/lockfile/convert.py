"""The way of a manifest from its records to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from mergepipe.digest import format_digest, parse_digest
from mergepipe.errors import InternalError
from mergepipe.lockfile import manifest_records as records
from mergepipe.lockfile import wire
from mergepipe.lockfile.checksum import with_checksum
from mergepipe.lockfile.convert_output import (
    bound_to_wire,
    check_finite,
    declared_from_wire,
    expert_blocks_to_wire,
    output_to_wire,
    side_file_from_wire,
    side_file_to_wire,
    source_from_wire,
    source_to_wire,
)
from mergepipe.lockfile.records import LockedOutput, LockedShard, LockedTensor
from mergepipe.signatures import Scalar

WireTensor = wire.Tensor | wire.StageTensor
# Only in strings: what JSON itself needs is ASCII.
_HIDDEN = re.compile(r"[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]")


def encode(manifest: records.Manifest) -> bytes:
    """Return the JSON text of a manifest: the small parts indented, one line per tensor, the checksum at the end."""
    body = _object(to_wire(manifest), "  ", {"stages": lambda stages: _list(stages, "    ")})
    if not body.isascii() or b"\x7f" in body:
        body = _HIDDEN.sub(_escaped, body.decode()).encode()
    return with_checksum(body + b",\n")


def _escaped(match: re.Match[str]) -> str:
    """Return a character that would not be seen, or steers a terminal, as JSON writes it by its number."""
    return json.dumps(match[0])[1:-1]


def _object(wired: msgspec.Struct, indent: str, special: Mapping[str, Callable[[Any], bytes]]) -> bytes:
    """Return the fields of an object, each on lines of its own; those of a tensor stay on one line."""
    start = indent.encode()
    parts = []
    for field in wired.__struct_fields__:
        value = getattr(wired, field)
        if field == "tensors" and value:
            lines = b",\n  ".join(start + msgspec.json.encode(tensor) for tensor in value)
            body = b"[\n  " + lines + b"\n" + start + b"]"
        elif field in special and value:
            body = special[field](value)
        else:
            body = msgspec.json.format(msgspec.json.encode(value), indent=2).replace(b"\n", b"\n" + start)
        parts.append(start + b'"' + field.encode() + b'": ' + body)
    return b"{\n" + b",\n".join(parts)


def _list(stages: Sequence[wire.Stage], indent: str) -> bytes:
    start = indent.encode()
    objects = (start + _object(stage, indent + "  ", {}) + b"\n" + start + b"}" for stage in stages)
    return b"[\n" + b",\n".join(objects) + b"\n" + start[2:] + b"]"


def to_wire(manifest: records.Manifest) -> wire.Manifest:
    """Return the JSON shape of a manifest.

    Raises
    ------
    InternalError
        If a number is not finite: JSON has no such numbers. If the output is not published.
    """
    output = manifest.output
    if output.path is None:
        raise InternalError(f"output `{output.name}` is not published, so it has no manifest")
    parameters = _ParameterTable()
    stated: set[bytes] = set()
    locked = zip(manifest.tensors, output.tensors, strict=True)
    tensors = [_tensor_to_wire(tensor, result, parameters, stated) for tensor, result in locked]
    stages = [_stage_to_wire(stage, parameters, stated) for stage in manifest.stages]
    shards = zip(output.shards, manifest.shard_tensors, strict=True)
    return wire.Manifest(
        version=records.MANIFEST_VERSION,
        mergepipe=manifest.mergepipe,
        geometry=manifest.geometry,
        output=output_to_wire(output),
        digest=format_digest(output.digest),
        expert_bytes=wire.ExpertBytes(full=output.expert_bytes_full, planned=output.expert_bytes_planned),
        bound=bound_to_wire(output.bound),
        sources=list(map(source_to_wire, manifest.sources)),
        places=[wire.Place(name=place.name, location=_sorted(place.location)) for place in manifest.places],
        operators=_sorted(manifest.operators),
        shards=[
            wire.Shard(name=shard.name, digest=format_digest(shard.digest), bytes=shard.bytes, tensors=list(names))
            for shard, names in shards
        ],
        side_files=list(map(side_file_to_wire, output.side_files)),
        generated=list(map(side_file_to_wire, manifest.generated)),
        files=list(manifest.files),
        decisions=list(manifest.decisions),
        run=_run_to_wire(manifest.run),
        parameters=parameters.sets,
        stages=stages,
        tensors=tensors,
    )


def _sorted(texts: Mapping[str, str]) -> dict[str, str]:
    return {key: texts[key] for key in sorted(texts)}


def _stage_to_wire(stage: records.ManifestStage, parameters: _ParameterTable, stated: set[bytes]) -> wire.Stage:
    output = stage.output
    tensors = []
    for tensor, locked in zip(stage.tensors, output.tensors, strict=True):
        facts = _tensor_facts(tensor, locked, parameters)
        tensors.append(wire.StageTensor(**facts, inputs=_inputs_to_wire(tensor.inputs, stated, again=False)))
    return wire.Stage(
        output=output_to_wire(output),
        digest=format_digest(output.digest) if output.digest else None,
        expert_bytes=wire.ExpertBytes(full=output.expert_bytes_full, planned=output.expert_bytes_planned),
        bound=bound_to_wire(output.bound),
        sources=list(map(source_to_wire, stage.sources)),
        tensors=tensors,
    )


def _run_to_wire(run: records.RunFacts) -> wire.Run:
    return wire.Run(
        expert_bytes_read=run.expert_bytes_read,
        base_bytes_read=run.base_bytes_read,
        index_bytes_read=run.index_bytes_read,
        bytes_written=run.bytes_written,
        blocks=dict(run.blocks),
        expert_blocks=dict(run.expert_blocks),
    )


class _ParameterTable:
    """Collects parameter sets; equal ones share an index."""

    __slots__ = ("_indices", "sets")

    def __init__(self) -> None:
        self.sets: list[wire.Parameters] = []
        self._indices: dict[bytes, int] = {}

    def index(self, parameters: records.ParameterSet | None) -> int | None:
        """Return the index of a set, adding it if it is new; None for None."""
        if parameters is None:
            return None
        wired = wire.Parameters(
            params=_scalars_to_wire(parameters.params),
            experts=[_scalars_to_wire(expert) for expert in parameters.experts],
        )
        # Encoded, because to Python `1`, `1.0` and `true` are equal.
        key = msgspec.json.encode(wired)
        if key not in self._indices:
            self._indices[key] = len(self.sets)
            self.sets.append(wired)
        return self._indices[key]


def _scalars_to_wire(params: Mapping[str, Scalar]) -> dict[str, Scalar]:
    for value in params.values():
        check_finite(value)
    return {key: params[key] for key in sorted(params)}


def _tensor_facts(tensor: records.ManifestTensor, locked: LockedTensor, parameters: _ParameterTable) -> dict[str, Any]:
    """Return what is said of a tensor of an output and of a stage alike."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "digest": format_digest(locked.digest),
        "expert_blocks": expert_blocks_to_wire(locked),
        "decision": tensor.decision,
        "parameters": parameters.index(tensor.parameters),
        "access": "full" if tensor.levels is None else wire.Levels(levels=tensor.levels),
    }


def _tensor_to_wire(
    tensor: records.ManifestTensor, locked: LockedTensor, parameters: _ParameterTable, stated: set[bytes]
) -> wire.Tensor:
    facts = _tensor_facts(tensor, locked, parameters)
    inputs = _inputs_to_wire(tensor.inputs, stated, again=True)
    return wire.Tensor(**facts, blocks=tensor.blocks, inputs=inputs)


def _inputs_to_wire(inputs: Iterable[records.ManifestInput], stated: set[bytes], *, again: bool) -> list[wire.Input]:
    """Return the inputs of a tensor.

    Parameters
    ----------
    stated
        The digests of the tensors whose blocks stand before; it grows.
    again
        Whether these are written where they stand before.
    """
    wired = []
    for given in inputs:
        known = not again and (given.digest in stated or not given.blocks)
        wired.append(
            wire.Input(
                source=given.source,
                tensor=msgspec.UNSET if given.tensor is None else given.tensor,
                digest=format_digest(given.digest),
                blocks=msgspec.UNSET if known else given.blocks,
            )
        )
        if not known:
            stated.add(given.digest)
    return wired


def from_wire(wired: wire.Manifest) -> records.Manifest:
    """Return the manifest of a JSON shape.

    Raises
    ------
    ValueError
        If a tensor names a parameter set that is not there, or an input of the output lacks its blocks.
    """
    sets = [
        records.ParameterSet(params=parameters.params, experts=tuple(parameters.experts))
        for parameters in wired.parameters
    ]
    stated: dict[str, bytes] = {}
    tensors = tuple(_tensor_from_wire(tensor, sets, stated) for tensor in wired.tensors)
    return records.Manifest(
        mergepipe=wired.mergepipe,
        geometry=wired.geometry,
        output=_output_from_wire(wired),
        sources=tuple(map(source_from_wire, wired.sources)),
        places=tuple(records.ManifestPlace(name=place.name, location=place.location) for place in wired.places),
        operators=wired.operators,
        stages=tuple(_stage_from_wire(stage, sets, stated) for stage in wired.stages),
        tensors=tensors,
        shard_tensors=tuple(tuple(shard.tensors) for shard in wired.shards),
        generated=tuple(map(side_file_from_wire, wired.generated)),
        files=tuple(wired.files),
        decisions=tuple(wired.decisions),
        run=records.RunFacts(**msgspec.structs.asdict(wired.run)),
    )


def _output_from_wire(wired: wire.Manifest) -> LockedOutput:
    return dataclasses.replace(
        declared_from_wire(wired),
        shards=tuple(LockedShard(name=s.name, digest=parse_digest(s.digest), bytes=s.bytes) for s in wired.shards),
        side_files=tuple(map(side_file_from_wire, wired.side_files)),
    )


def _stage_from_wire(
    stage: wire.Stage, sets: list[records.ParameterSet], stated: dict[str, bytes]
) -> records.ManifestStage:
    return records.ManifestStage(
        output=declared_from_wire(stage),
        sources=tuple(map(source_from_wire, stage.sources)),
        tensors=tuple(_tensor_from_wire(tensor, sets, stated) for tensor in stage.tensors),
    )


def _tensor_from_wire(
    tensor: WireTensor, sets: list[records.ParameterSet], stated: dict[str, bytes]
) -> records.ManifestTensor:
    if tensor.parameters is not None and tensor.parameters >= len(sets):
        raise ValueError(f"tensor `{tensor.name}` names parameter set {tensor.parameters} of {len(sets)}")
    own = tensor.blocks if isinstance(tensor, wire.Tensor) else None
    return records.ManifestTensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        decision=tensor.decision,
        parameters=None if tensor.parameters is None else sets[tensor.parameters],
        inputs=tuple(_input_from_wire(given, tensor.name, stated, stage=own is None) for given in tensor.inputs),
        blocks=b"" if own is None else own,
        levels=None if tensor.access == "full" else tensor.access.levels,
    )


def _input_from_wire(given: wire.Input, tensor: str, stated: dict[str, bytes], *, stage: bool) -> records.ManifestInput:
    blocks = given.blocks
    if blocks is msgspec.UNSET:
        if not stage:
            raise ValueError(f"tensor `{tensor}`: the block digests of `{given.source}` are missing")
        blocks = stated.get(given.digest, b"")
    else:
        stated.setdefault(given.digest, blocks)
    return records.ManifestInput(
        source=given.source,
        digest=parse_digest(given.digest),
        blocks=blocks,
        tensor=None if given.tensor is msgspec.UNSET else given.tensor,
    )
