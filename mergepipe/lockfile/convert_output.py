"""The declared part of an output, its sources and its bound: from records to the JSON shape of a manifest and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from mergepipe.digest import format_digest, parse_digest, parse_pin
from mergepipe.errors import InternalError
from mergepipe.lockfile import wire
from mergepipe.lockfile.records import (
    BOUND_KEYS,
    UNKNOWN_DIGEST,
    LockedExpert,
    LockedFile,
    LockedLevels,
    LockedOutput,
    LockedRule,
    LockedSideFile,
    LockedSlice,
    LockedSource,
    LockedTensor,
)
from mergepipe.signatures import ParamValue, Scalar

_LEVEL_NAMES = {0: "omitted", 255: "exact"}


def output_to_wire(output: LockedOutput) -> wire.Output:
    """Return the declared part of an output."""
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
        levels_version=msgspec.UNSET if output.levels_version is None else output.levels_version,
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
        check_finite(number)
    return list(value) if isinstance(value, tuple) else value


def check_finite(value: Scalar) -> None:
    """Refuse a number that JSON does not have.

    Raises
    ------
    InternalError
        For NaN and infinity.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise InternalError(f"{value} cannot be written into a manifest")


def bound_to_wire(bound: Mapping[str, str | float]) -> wire.Bound:
    """Return a bound; what is not known stays out."""
    unknown = sorted(set(bound) - set(BOUND_KEYS))
    if unknown:
        raise InternalError(f"a bound has unknown keys: {', '.join(unknown)}")
    wired = wire.Bound()
    for key, value in bound.items():
        check_finite(value)
        setattr(wired, key, value if key == "kind" else float(value))
    return wired


def source_to_wire(source: LockedSource) -> wire.Source:
    """Return a source."""
    return wire.Source(
        name=source.name,
        location={key: source.location[key] for key in sorted(source.location)},
        digest=format_digest(source.digest),
        tensors=source.tensors,
        bytes=source.bytes,
        files=[wire.File(name=file.name, bytes=file.bytes) for file in source.files],
    )


def side_file_to_wire(file: LockedSideFile) -> wire.SideFile:
    """Return a side file."""
    return wire.SideFile(name=file.name, digest=format_digest(file.digest))


def declared_from_wire(wired: wire.Manifest | wire.Stage) -> LockedOutput:
    """Return the output of a manifest or a stage, with its tensors, and without shards and side files."""
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
        sources={name: parse_pin(digest) for name, digest in output.sources.items()},
        code={name: parse_digest(digest) for name, digest in output.code.items()},
        expert_bytes_full=wired.expert_bytes.full,
        expert_bytes_planned=wired.expert_bytes.planned,
        bound={k: v for k, v in msgspec.structs.asdict(wired.bound).items() if v is not msgspec.UNSET},
        digest=UNKNOWN_DIGEST if wired.digest is None else parse_digest(wired.digest),
        shards=(),
        side_files=(),
        tensors=tuple(
            LockedTensor(
                name=tensor.name,
                digest=parse_digest(tensor.digest),
                read=tensor.expert_blocks.read,
                total=tensor.expert_blocks.total,
                levels=_levels_from_wire(tensor.expert_blocks),
            )
            for tensor in wired.tensors
        ),
        levels_version=None if output.levels_version is msgspec.UNSET else output.levels_version,
    )


def expert_blocks_to_wire(tensor: LockedTensor) -> wire.ExpertBlocks:
    """Return how many expert blocks of a tensor are read, and where a budget buys levels how precisely."""
    wired = wire.ExpertBlocks(read=tensor.read, total=tensor.total)
    if tensor.levels is not None:
        wired.bytes = tensor.levels.bytes
        wired.levels = {_LEVEL_NAMES.get(level, str(level)): count for level, count in tensor.levels.blocks.items()}
    return wired


def _levels_from_wire(wired: wire.ExpertBlocks) -> LockedLevels | None:
    if wired.levels is msgspec.UNSET or wired.bytes is msgspec.UNSET:
        return None
    levels = {name: level for level, name in _LEVEL_NAMES.items()}
    blocks = {levels[name] if name in levels else int(name): count for name, count in wired.levels.items()}
    return LockedLevels(bytes=wired.bytes, blocks=blocks)


def side_file_from_wire(file: wire.SideFile) -> LockedSideFile:
    """Return the record of a side file."""
    return LockedSideFile(name=file.name, digest=parse_digest(file.digest))


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


def source_from_wire(source: wire.Source) -> LockedSource:
    """Return the record of a source."""
    return LockedSource(
        name=source.name,
        location=source.location,
        digest=parse_pin(source.digest),
        tensors=source.tensors,
        bytes=source.bytes,
        files=tuple(LockedFile(name=file.name, bytes=file.bytes) for file in source.files),
    )
