"""What is known of the sources during a replay: every tensor is compared with the manifest as soon as it was read."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.digest import content_digest, format_digest
from mergepipe.errors import MergepipeError, SourceError
from mergepipe.fsio.reading import pread_into
from mergepipe.graph.inputs import slot_blocks, slot_digest, source_pin
from mergepipe.lockfile.manifest import INPUT_DIGEST_SIZE, truncate_digests
from mergepipe.lockfile.manifest_records import ManifestInput
from mergepipe.plan.values import InputRef, OutputPlan
from mergepipe.project.replay_plan import Remade

_NAMED = 5  # blocks of one tensor that an error names


class CheckedIndex(SourceIndex):
    """A source index that refuses a tensor of other content than the manifest states.

    Parameters
    ----------
    remade
        The plans and what the manifest says of their inputs.
    """

    def __init__(self, catalog: Catalog, remade: Remade, geometry: Geometry) -> None:
        super().__init__(catalog, remade.plans.checkpoints, geometry)
        for name, stage in remade.plans.stages.items():
            self.add_known(name, stage.checkpoint, {}, {})
        self._remade = remade
        self._whole = {
            (ref.source, ref.info.name): given
            for plan in remade.plans.plans
            for ref, given in self._inputs(plan)
            if ref.levels is None
        }

    def add(self, source: str, info: TensorInfo, blocks: bytes) -> bytes:
        """Take the block digests of a tensor that was read whole; return the tensor's digest.

        Raises
        ------
        SourceError
            If they are not those of the manifest.
        """
        digest = super().add(source, info, blocks)
        given = self._whole.get((source, info.name))
        if given is not None and given.digest != digest:
            raise _error(source, info.name, given, digest, truncate_digests(blocks))
        return digest

    def errors(self, plan: OutputPlan) -> Iterator[MergepipeError]:
        """Yield an error for each input of an output, and each of its sources, that is not what the manifest says.

        All that it is made from must have been read.
        """
        found: set[tuple[str, str]] = set()
        for ref, given in self._inputs(plan):
            digest = slot_digest(ref, self)
            if digest != given.digest and (ref.source, ref.info.name) not in found:
                found.add((ref.source, ref.info.name))
                yield _error(ref.source, ref.info.name, given, digest, truncate_digests(slot_blocks(ref, self) or b""))
        for source in plan.sources:
            if source not in self._remade.plans.stages and source not in {name for name, _ in found}:
                yield from self._source_errors(source, plan)

    def _source_errors(self, source: str, plan: OutputPlan) -> Iterator[MergepipeError]:
        stated, pin = self._remade.records[plan.output.name].sources[source], source_pin(plan, source, self)
        if pin != stated:
            adapter = ", or in its `adapter_config.json`" if plan.sources[source].adapter else ""
            yield SourceError(
                f"source `{source}` is not what the output was made from: its digest differs, in a tensor that the"
                f" output does not use{adapter}",
                hint=_hint(source),
                source=source,
                expected=format_digest(stated),
                got=format_digest(pin) if pin else None,
            )

    def input_errors(self, plan: OutputPlan, named: str | None) -> Iterator[MergepipeError]:
        """Yield the errors of inputs, as far as they are read: those of one tensor, or all where it is unknown.

        For a merge that failed: a source of other content is the better explanation. Reads the weights again.
        """
        pairs = list(self._inputs(plan, named)) or list(self._inputs(plan))
        for (source, name), (ref, given) in {(ref.source, ref.info.name): (ref, given) for ref, given in pairs}.items():
            blocks = _hashed(self.file(source, ref.info), ref, given.blocks, self.geometry)
            if blocks != given.blocks:
                yield _error(source, name, given, None, blocks)

    def _inputs(self, plan: OutputPlan, named: str | None = None) -> Iterator[tuple[InputRef, ManifestInput]]:
        """Yield the tensors of sources that an output is made from, each with what the manifest says of it.

        Those of one tensor alone, the output's or a source's, where one is ``named``.
        """
        stated = {tensor.name: tensor.inputs for tensor in self._remade.tensors[plan.output.name]}
        for tensor in plan.tensors:
            refs = [ref for slot in tensor.slots if slot is not None for ref in slot.stored]
            if named is None or named in {tensor.name, *(ref.info.name for ref in refs)}:
                for ref, given in zip(refs, stated[tensor.name], strict=True):
                    if ref.source not in self._remade.plans.stages:
                        yield ref, given


def _error(source: str, name: str, given: ManifestInput, digest: bytes | None, blocks: bytes) -> SourceError:
    differing = differing_blocks(given.blocks, blocks, INPUT_DIGEST_SIZE)
    return SourceError(
        f"tensor `{name}` of source `{source}` is not what the output was made from:"
        f" {blocks_text(differing, len(given.blocks) // INPUT_DIGEST_SIZE)}",
        hint=_hint(source),
        source=source,
        tensor=name,
        blocks=differing,
        expected=format_digest(given.digest),
        got=format_digest(digest) if digest else None,
    )


def _hint(source: str) -> str:
    return f"nothing was published; give the source as it was with `--source {source}=PATH`"


def differing_blocks(stated: bytes, found: bytes, size: int) -> list[int]:
    """Return the blocks whose digests, of so many bytes each, differ; all that one of them lacks among them."""
    count = max(len(stated), len(found)) // size
    return [n for n in range(count) if stated[n * size : (n + 1) * size] != found[n * size : (n + 1) * size]]


def blocks_text(blocks: list[int], count: int) -> str:
    """Return in words which of ``count`` blocks (counted from 0) differ; none are named where they are not known."""
    if not blocks or not count:
        return "its digest differs"
    named = ", ".join(f"{block:,}" for block in blocks[:_NAMED])
    more = f" and {len(blocks) - _NAMED:,} more" if len(blocks) > _NAMED else ""
    return f"block{'s' if len(blocks) > 1 else ''} {named}{more} of {count:,} differ{'' if len(blocks) > 1 else 's'}"


def _hashed(file: CheckpointFile, ref: InputRef, stated: bytes, geometry: Geometry) -> bytes:
    """Return the cut block digests of a stored tensor, read from its file; of blocks that are not read the stated."""
    layout = ref.grid(geometry)
    digests = []
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for block in range(layout.count):
            if ref.levels is not None and not ref.levels[block]:
                digests.append(stated[block * INPUT_DIGEST_SIZE : (block + 1) * INPUT_DIGEST_SIZE])
                continue
            start, stop = layout.byte_range(block)
            buffer = bytearray(stop - start)
            pread_into(fd, memoryview(buffer), ref.info.offset + start, path=file.path)
            digests.append(content_digest(buffer)[:INPUT_DIGEST_SIZE])
    finally:
        os.close(fd)
    return b"".join(digests)
