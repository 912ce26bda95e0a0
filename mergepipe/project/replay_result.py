"""Whether what was made again is what the manifest says: tensors and blocks, shards to the last byte, other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergepipe.cache.packs import PackStore, hash_shard
from mergepipe.digest import DIGEST_SIZE, format_digest
from mergepipe.engine.results import FinishedOutput, FinishedTensor
from mergepipe.errors import LockError, MergepipeError, ReplayError
from mergepipe.lockfile.manifest_records import Manifest, ManifestTensor
from mergepipe.lockfile.records import LockedOutput, LockedTensor
from mergepipe.lockfile.writer import levels_text
from mergepipe.project.replay_compare import NAMED
from mergepipe.project.replay_index import blocks_text, differing_blocks
from mergepipe.publish.sidefiles import SideFile
from mergepipe.reporting import Reporter

_HINT = "nothing was published; sources and recipe are what they were, so this machine or version computes otherwise"


def result_errors(
    finished: FinishedOutput, record: LockedOutput, tensors: Sequence[ManifestTensor]
) -> list[MergepipeError]:
    """Return an error for each tensor of an output or a stage that is not what the manifest says."""
    blocks = {tensor.name: tensor.blocks for tensor in tensors}
    stated = {tensor.name: tensor.digest for tensor in record.tensors}
    errors = [
        _tensor_error(tensor, record, stated[tensor.name], blocks[tensor.name])
        for tensor in finished.tensors
        if tensor.digest != stated[tensor.name]
    ]
    more = len(errors) - NAMED
    return errors[:NAMED] + ([_error(record, f"{more:,} more tensors differ")] if more > 0 else [])


def _tensor_error(tensor: FinishedTensor, record: LockedOutput, stated: bytes, blocks: bytes) -> MergepipeError:
    differing = differing_blocks(blocks, tensor.block_digests, DIGEST_SIZE) if blocks else []
    where = blocks_text(differing, len(blocks) // DIGEST_SIZE)
    return _error(
        record,
        f"tensor `{tensor.name}`: {where}",
        tensor=tensor.name,
        blocks=differing,
        expected=format_digest(stated),
        got=format_digest(tensor.digest),
    )


def shard_errors(
    finished: FinishedOutput, record: LockedOutput, packs: PackStore, reporter: Reporter
) -> Iterator[MergepipeError]:
    """Yield an error for each shard whose bytes, read again from the disk, are not those of the manifest."""
    reporter.begin("checking", sum(shard.bytes for shard in record.shards))
    for shard, locked in zip(finished.shards, record.shards, strict=True):
        found = hash_shard(packs.path(shard.pack), finished.plan.geometry)
        if found != locked.digest:
            yield _error(
                record,
                f"shard `{locked.name}` differs",
                shard=locked.name,
                expected=format_digest(locked.digest),
                got=format_digest(found) if found else None,
            )
        reporter.advance(locked.bytes)
    reporter.end()


def record_errors(made: LockedOutput, record: LockedOutput) -> Iterator[MergepipeError]:
    """Yield an error for what the manifest counts and an equal result does not bear out."""
    wrong = [
        f"tensor `{was.name}`: {was.read:,} of {was.total:,} expert blocks, and it is {now.read:,} of {now.total:,}"
        for was, now in zip(record.tensors, made.tensors, strict=True)
        if (was.read, was.total) != (now.read, now.total)
    ]
    wrong += [
        f"tensor `{was.name}`: {_levels(was)}, and it is {_levels(now)}"
        for was, now in zip(record.tensors, made.tensors, strict=True)
        if was.levels != now.levels
    ]
    takes, said = made.expert_bytes_planned, record.expert_bytes_planned
    wrong += [f"{said:,} bytes of experts are read, and it is {takes:,}"] if takes != said else []
    for what in wrong[:NAMED]:
        yield LockError(
            f"the manifest says of output `{record.name}`: {what}",
            hint="the manifest contradicts itself; get it as it was written",
            output=record.name,
        )


def _levels(tensor: LockedTensor) -> str:
    return "no levels" if tensor.levels is None else levels_text(tensor.levels)


def side_file_errors(files: Sequence[SideFile], record: LockedOutput) -> Iterator[MergepipeError]:
    """Yield an error for each side file that differs; those that the sources lack are none."""
    stated = {file.name: file.digest for file in record.side_files}
    for file in files:
        if file.name in stated and stated[file.name] != file.digest:
            yield ReplayError(
                f"output `{record.name}` was made again with another `{file.name}`",
                hint="nothing was published; the file in the source that it comes from has changed, the weights have"
                " not",
                output=record.name,
                file=file.name,
                expected=format_digest(stated[file.name]),
                got=format_digest(file.digest),
            )


def generated_differences(files: Mapping[str, bytes], manifest: Manifest) -> list[str]:
    """Return the names of files that mergepipe wrote and would write otherwise now; ``files`` are digests by name."""
    return [file.name for file in manifest.generated if files.get(file.name, file.digest) != file.digest]


def _error(record: LockedOutput, what: str, **facts: object) -> ReplayError:
    return ReplayError(
        f"output `{record.name}` was made again with another result: {what}", hint=_HINT, output=record.name, **facts
    )
