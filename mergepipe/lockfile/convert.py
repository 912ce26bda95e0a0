"""The way of a manifest from its records to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from mergepipe.digest import format_digest, parse_digest
from mergepipe.errors import InternalError
from mergepipe.lockfile import manifest_records as records
from mergepipe.lockfile import wire
from mergepipe.lockfile.records import (
    BOUND_KEYS,
    LockedExpert,
    LockedFile,
    LockedOutput,
    LockedRule,
    LockedShard,
    LockedSideFile,
    LockedSlice,
    LockedSource,
    LockedTensor,
)
from mergepipe.signatures import ParamValue, Scalar


def encode(manifest: records.Manifest) -> bytes:
    """Return the JSON text of a manifest: the small parts indented, one line per tensor."""
    wired = to_wire(manifest)
    parts = []
    for field in wired.__struct_fields__:
        value = getattr(wired, field)
        if field == "tensors" and value:
            body = b"[\n    " + b",\n    ".join(map(msgspec.json.encode, value)) + b"\n  ]"
        else:
            body = msgspec.json.format(msgspec.json.encode(value), indent=2).replace(b"\n", b"\n  ")
        parts.append(b'  "' + field.encode() + b'": ' + body)
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def to_wire(manifest: records.Manifest) -> wire.Manifest:
    """Return the JSON shape of a manifest.

    Raises
    ------
    InternalError
        If a number is not finite: JSON has no such numbers. If the output is not published.
    """
    output = manifest.output
    parameters = _ParameterTable()
    locked = zip(manifest.tensors, output.tensors, strict=True)
    tensors = [_tensor_to_wire(tensor, result, parameters) for tensor, result in locked]
    shards = zip(output.shards, manifest.shard_tensors, strict=True)
    return wire.Manifest(
        version=records.MANIFEST_VERSION,
        mergepipe=manifest.mergepipe,
        geometry=manifest.geometry,
        output=_output_to_wire(output),
        digest=format_digest(output.digest),
        expert_bytes=wire.ExpertBytes(full=output.expert_bytes_full, planned=output.expert_bytes_planned),
        bound=_bound_to_wire(output.bound),
        sources=[_source_to_wire(source) for source in manifest.sources],
        shards=[
            wire.Shard(name=shard.name, digest=format_digest(shard.digest), bytes=shard.bytes, tensors=list(names))
            for shard, names in shards
        ],
        side_files=[wire.SideFile(name=file.name, digest=format_digest(file.digest)) for file in output.side_files],
        files=list(manifest.files),
        decisions=list(manifest.decisions),
        run=_run_to_wire(manifest.run),
        parameters=parameters.sets,
        tensors=tensors,
    )


def _output_to_wire(output: LockedOutput) -> wire.Output:
    if output.path is None:
        raise InternalError(f"output `{output.name}` is not published, so it has no manifest")
    return wire.Output(
        name=output.name,
        path=output.path,
        operator=output.operator,
        operator_version=output.operator_version,
        numerics=output.numerics,
        base=output.base,
        experts=list(map(_expert_to_wire, output.experts)),
        params=_params_to_wire(output.params),
        slices=list(map(_slice_to_wire, output.slices)),
        rules=list(map(_rule_to_wire, output.rules)),
        budget=output.budget,
        write={key: output.write[key] for key in sorted(output.write)},
        sources={name: format_digest(output.sources[name]) for name in sorted(output.sources)},
        code={name: format_digest(output.code[name]) for name in sorted(output.code)},
    )


def _expert_to_wire(expert: LockedExpert) -> wire.Expert:
    layers = msgspec.UNSET if expert.layers is None else expert.layers
    return wire.Expert(source=expert.source, layers=layers, params=_params_to_wire(expert.params))


def _slice_to_wire(part: LockedSlice) -> wire.Slice:
    return wire.Slice(
        layers=part.layers,
        operator=part.operator,
        operator_version=part.operator_version,
        base=part.base,
        base_layers=part.base_layers,
        experts=list(map(_expert_to_wire, part.experts)),
        params=_params_to_wire(part.params),
        rules=list(map(_rule_to_wire, part.rules)),
    )


def _rule_to_wire(rule: LockedRule) -> wire.Rule:
    return wire.Rule(
        match=list(rule.match),
        layers=rule.layers,
        params=_params_to_wire(rule.params),
        experts={name: _params_to_wire(rule.experts[name]) for name in sorted(rule.experts)},
    )


def _params_to_wire(params: Mapping[str, ParamValue]) -> dict[str, wire.WireParam]:
    return {key: _param_to_wire(params[key]) for key in sorted(params)}


def _param_to_wire(value: ParamValue) -> wire.WireParam:
    for number in value if isinstance(value, tuple) else (value,):
        _check_finite(number)
    return list(value) if isinstance(value, tuple) else value


def _check_finite(value: Scalar) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InternalError(f"{value} cannot be written into a manifest")


def _bound_to_wire(bound: Mapping[str, str | float]) -> wire.Bound:
    unknown = sorted(set(bound) - set(BOUND_KEYS))
    if unknown:
        raise InternalError(f"a bound has unknown keys: {', '.join(unknown)}")
    wired = wire.Bound()
    for key, value in bound.items():
        _check_finite(value)
        setattr(wired, key, value if key == "kind" else float(value))
    return wired


def _source_to_wire(source: LockedSource) -> wire.Source:
    return wire.Source(
        name=source.name,
        location={key: source.location[key] for key in sorted(source.location)},
        digest=format_digest(source.digest),
        tensors=source.tensors,
        bytes=source.bytes,
        files=[wire.File(name=file.name, bytes=file.bytes) for file in source.files],
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
        _check_finite(value)
    return {key: params[key] for key in sorted(params)}


def _tensor_to_wire(tensor: records.ManifestTensor, locked: LockedTensor, parameters: _ParameterTable) -> wire.Tensor:
    return wire.Tensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        digest=format_digest(locked.digest),
        expert_blocks=wire.ExpertBlocks(read=locked.read, total=locked.total),
        decision=tensor.decision,
        parameters=parameters.index(tensor.parameters),
        access="full" if tensor.levels is None else wire.Levels(levels=tensor.levels),
        blocks=tensor.blocks,
        inputs=[
            wire.Input(
                source=source.source,
                tensor=msgspec.UNSET if source.tensor is None else source.tensor,
                digest=format_digest(source.digest),
                blocks=source.blocks,
            )
            for source in tensor.inputs
        ],
    )


def from_wire(wired: wire.Manifest) -> records.Manifest:
    """Return the manifest of a JSON shape.

    Raises
    ------
    ValueError
        If a tensor names a parameter set that is not there.
    """
    sets = [
        records.ParameterSet(params=parameters.params, experts=tuple(parameters.experts))
        for parameters in wired.parameters
    ]
    return records.Manifest(
        mergepipe=wired.mergepipe,
        geometry=wired.geometry,
        output=_output_from_wire(wired),
        sources=tuple(map(_source_from_wire, wired.sources)),
        tensors=tuple(_tensor_from_wire(tensor, sets) for tensor in wired.tensors),
        shard_tensors=tuple(tuple(shard.tensors) for shard in wired.shards),
        files=tuple(wired.files),
        decisions=tuple(wired.decisions),
        run=records.RunFacts(**msgspec.structs.asdict(wired.run)),
    )


def _output_from_wire(wired: wire.Manifest) -> LockedOutput:
    output = wired.output
    return LockedOutput(
        name=output.name,
        path=output.path,
        operator=output.operator,
        operator_version=output.operator_version,
        numerics=output.numerics,
        base=output.base,
        experts=tuple(map(_expert_from_wire, output.experts)),
        params=_params_from_wire(output.params),
        slices=tuple(map(_slice_from_wire, output.slices)),
        rules=tuple(map(_rule_from_wire, output.rules)),
        budget=output.budget,
        write=output.write,
        sources={name: parse_digest(digest) for name, digest in output.sources.items()},
        code={name: parse_digest(digest) for name, digest in output.code.items()},
        expert_bytes_full=wired.expert_bytes.full,
        expert_bytes_planned=wired.expert_bytes.planned,
        bound={k: v for k, v in msgspec.structs.asdict(wired.bound).items() if v is not msgspec.UNSET},
        digest=parse_digest(wired.digest),
        shards=tuple(LockedShard(name=s.name, digest=parse_digest(s.digest), bytes=s.bytes) for s in wired.shards),
        side_files=tuple(LockedSideFile(name=f.name, digest=parse_digest(f.digest)) for f in wired.side_files),
        tensors=tuple(
            LockedTensor(
                name=tensor.name,
                digest=parse_digest(tensor.digest),
                read=tensor.expert_blocks.read,
                total=tensor.expert_blocks.total,
            )
            for tensor in wired.tensors
        ),
    )


def _expert_from_wire(expert: wire.Expert) -> LockedExpert:
    layers = None if expert.layers is msgspec.UNSET else expert.layers
    return LockedExpert(source=expert.source, params=_params_from_wire(expert.params), layers=layers)


def _slice_from_wire(part: wire.Slice) -> LockedSlice:
    return LockedSlice(
        layers=part.layers,
        operator=part.operator,
        operator_version=part.operator_version,
        base=part.base,
        base_layers=part.base_layers,
        experts=tuple(map(_expert_from_wire, part.experts)),
        params=_params_from_wire(part.params),
        rules=tuple(map(_rule_from_wire, part.rules)),
    )


def _params_from_wire(params: Mapping[str, wire.WireParam]) -> dict[str, ParamValue]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}


def _rule_from_wire(rule: wire.Rule) -> LockedRule:
    return LockedRule(
        match=tuple(rule.match),
        layers=rule.layers,
        params=_params_from_wire(rule.params),
        experts={name: _params_from_wire(params) for name, params in rule.experts.items()},
    )


def _source_from_wire(source: wire.Source) -> LockedSource:
    return LockedSource(
        name=source.name,
        location=source.location,
        digest=parse_digest(source.digest),
        tensors=source.tensors,
        bytes=source.bytes,
        files=tuple(LockedFile(name=file.name, bytes=file.bytes) for file in source.files),
    )


def _tensor_from_wire(tensor: wire.Tensor, sets: list[records.ParameterSet]) -> records.ManifestTensor:
    if tensor.parameters is not None and tensor.parameters >= len(sets):
        raise ValueError(f"tensor `{tensor.name}` names parameter set {tensor.parameters} of {len(sets)}")
    return records.ManifestTensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        decision=tensor.decision,
        parameters=None if tensor.parameters is None else sets[tensor.parameters],
        inputs=tuple(
            records.ManifestInput(
                source=i.source,
                digest=parse_digest(i.digest),
                blocks=i.blocks,
                tensor=None if i.tensor is msgspec.UNSET else i.tensor,
            )
            for i in tensor.inputs
        ),
        blocks=tensor.blocks,
        levels=None if tensor.access == "full" else tensor.access.levels,
    )
