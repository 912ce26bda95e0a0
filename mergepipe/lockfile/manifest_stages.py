"""What contradicts itself in the stages of a manifest: references that lead nowhere or in circles, digests, names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergepipe.digest import is_sampled_pin, source_digest
from mergepipe.dtypes import DTYPES
from mergepipe.lockfile.manifest_records import INPUT_DIGEST_SIZE, OUTPUT_KEY, Manifest, ManifestStage, ManifestTensor
from mergepipe.lockfile.records import LOCATION_KEYS, LockedSource


def stage_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the stages, the places and the sources of a manifest."""
    known: dict[str, LockedSource] = {}
    earlier: dict[str, ManifestStage] = {}
    for stage in manifest.stages:
        name = stage.output.name
        if name in earlier or name == manifest.output.name:
            yield f"there are two outputs called `{name}`"
        yield from (f"stage `{name}`: {problem}" for problem in _stage(stage))
        yield from _sources(stage.sources, known, earlier)
        earlier[name] = stage
    yield from _sources(manifest.sources, known, earlier)
    for place in manifest.places:
        yield from _location(place.name, place.location)
        if OUTPUT_KEY in place.location or place.name in known or place.name in earlier:
            yield f"`{place.name}` is among the places, and is not a source without weights"
    for name in earlier:
        if name in known and OUTPUT_KEY not in known[name].location:
            yield f"`{name}` is a source and a stage"


def _stage(stage: ManifestStage) -> Iterator[str]:
    output = stage.output
    if not output.digest and (stage.tensors or stage.sources):
        yield "it has no digest, and yet tensors or sources"
    if [tensor.name for tensor in stage.tensors] != [tensor.name for tensor in output.tensors]:
        yield "the tensors are not those of the output"
    elif output.digest and source_digest((t.name, t.digest) for t in output.tensors) != output.digest:
        yield "its digest is not that of its tensors"
    if {source.name: source.digest for source in stage.sources} != dict(output.sources):
        yield "the digests of its sources are not those of the output"
    for tensor in stage.tensors:
        yield from (f"tensor `{tensor.name}`: {problem}" for problem in input_problems(tensor))


def input_problems(tensor: ManifestTensor) -> Iterator[str]:
    """Yield what is wrong with a tensor's dtype and its inputs."""
    if tensor.dtype not in DTYPES:
        yield f"unknown dtype `{tensor.dtype}`"
    for given in tensor.inputs:
        if len(given.blocks) % INPUT_DIGEST_SIZE:
            yield f"the block digests of `{given.source}` have {len(given.blocks)} bytes"


def _sources(
    sources: tuple[LockedSource, ...], known: dict[str, LockedSource], stages: Mapping[str, ManifestStage]
) -> Iterator[str]:
    """Yield what is wrong with the sources of an output; ``stages`` are those before it, ``known`` grows."""
    if len({source.name for source in sources}) != len(sources):
        yield "a source is listed twice"
    for source in sources:
        yield from _location(source.name, source.location)
        other = known.setdefault(source.name, source)
        # One output may read it whole and another by samples, which are two pins of the same content.
        alike = other if is_sampled_pin(other.digest) == is_sampled_pin(source.digest) else source
        if replace(other, digest=alike.digest) != source:
            yield f"source `{source.name}` is described in two ways"
        if OUTPUT_KEY in source.location:
            stage = stages.get(source.location[OUTPUT_KEY])
            if stage is None or source.location[OUTPUT_KEY] != source.name:
                yield f"source `{source.name}` is an output that is not among the stages before it"
            elif stage.output.digest != source.digest:
                yield f"the digest of source `{source.name}` is not that of the stage"


def _location(name: str, location: Mapping[str, str]) -> Iterator[str]:
    if not set(location) <= {*LOCATION_KEYS, OUTPUT_KEY}:
        yield f"the location of source `{name}` has unknown keys"
