"""The facts that an output follows from, each under its own digest, so that a change of one can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.records import Published
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import record_digest
from mergepipe.fsio.identity import FileIdentity
from mergepipe.graph.inputs import source_pins
from mergepipe.graph.state import tensor_keys
from mergepipe.lockfile.assemble import FULL_BUDGET
from mergepipe.lockfile.records import UNKNOWN_DIGEST, LockedExpert, LockedOutput, LockedRule, LockedSlice
from mergepipe.plan.values import OutputPlan
from mergepipe.project.budgets import KnownBudget
from mergepipe.project.cards import CardFacts
from mergepipe.project.key_parts import BuildParts
from mergepipe.publish.directory import PublishedFile, PublishedFiles
from mergepipe.publish.sidefiles import SideFile
from mergepipe.values import dataclass

# Bumped when what is written beside the weights changes form, so that older outputs are published again.
RECORD_VERSION = 3


class Facts(msgspec.Struct, frozen=True):
    """Digests of what an output is made of; ``sources`` by name, ``budget`` empty for a full read.

    ``card`` is of what its model card says beside what follows from the plan.
    """

    operator: bytes
    code: bytes
    parameters: bytes
    layout: bytes
    side_files: bytes
    tensors: bytes
    decisions: bytes
    sources: dict[str, bytes]
    budget: bytes = b""
    card: bytes = b""

    def key(self) -> bytes:
        """Return the output's action key."""
        return record_digest(
            "output",
            RECORD_VERSION,
            self.operator,
            self.code,
            self.parameters,
            self.layout,
            self.side_files,
            self.tensors,
            self.decisions,
            self.sources,
            self.card,
            *([self.budget] if self.budget else []),
        )

    def same_content(self, other: Facts) -> bool:
        """Return whether the tensors and the shards that hold them are the same, whatever lies beside them."""
        return (self.tensors, self.layout) == (other.tensors, other.layout)


class LastBuild(msgspec.Struct, frozen=True):
    """What is told of the build that made an output.

    ``reasons`` is why it was made, in words; ``run`` are the bytes that were moved, ``block_counts`` the output blocks
    by what became of them; ``before`` are the parts of its tensors' keys in the build before, where there was one.
    ``cached`` are the tensors all of whose blocks came from earlier builds, whatever became of their keys.
    ``locations`` is where its sources were, as declared (`lockfile.assemble.location`).
    """

    reasons: list[str]
    run: dict[str, int]
    block_counts: dict[str, int]
    before: BuildParts | None = None
    cached: list[str] = []  # msgspec copies it
    locations: dict[str, dict[str, str]] = {}


class PublishedRecord(msgspec.Struct, frozen=True):
    """What the catalog keeps of an output that was built: its facts, its lock entry, and its content counts.

    ``blocks`` are the packed block digests of its tensors, kept where other outputs are made from it: they are needed
    also when its packs are gone. ``budget`` is what its budget came to, where it has one that had to be measured.
    ``parts`` are the parts of its tensors' keys; ``last`` is about the build that made it. Records of earlier versions
    have neither.
    """

    facts: Facts
    lock: str
    expert_blocks: dict[str, int]
    blocks: dict[str, bytes] = {}  # msgspec copies it
    budget: KnownBudget | None = None
    parts: BuildParts | None = None
    last: LastBuild | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOutput:
    """What was published into an output's directory before, or built before of one that is not published."""

    key: bytes
    files: PublishedFiles
    record: PublishedRecord

    def record_with(self, blocks: Mapping[str, bytes]) -> bytes:
        """Return the catalog's form of its record with the block digests of its tensors."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self.record, blocks=dict(blocks)))


def current_facts(
    plan: OutputPlan,
    declared: LockedOutput,
    side_files: Sequence[SideFile],
    index: SourceIndex,
    card: CardFacts,
) -> Facts | None:
    """Return an output's facts, or None while the content of a source, or what its budget buys, is not known."""
    if plan.is_pending:
        return None
    keys = tensor_keys(plan, index)
    sources = {source: pin or UNKNOWN_DIGEST for source, pin in source_pins(plan, index).items()}
    if any(key is None for _, key in keys) or UNKNOWN_DIGEST in sources.values():
        return None
    return Facts(
        operator=record_digest("fact", declared.operator, declared.operator_version, declared.numerics),
        code=record_digest("fact", declared.code),
        parameters=record_digest(
            "fact",
            declared.name,
            declared.base,
            _experts(declared.experts),
            declared.params,
            [_slice(part) for part in declared.slices],
            _rules(declared.rules),
            FULL_BUDGET,
        ),
        layout=record_digest("fact", declared.write, [(s.name, s.header) for s in plan.layout.shards]),
        side_files=record_digest("fact", [(file.name, file.digest) for file in side_files]),
        tensors=record_digest("fact", keys),
        decisions=record_digest("fact", plan.decisions),
        sources=sources,
        budget=b"" if declared.budget == FULL_BUDGET else record_digest("fact", declared.budget),
        card=card.digest(),
    )


def _experts(experts: Sequence[LockedExpert]) -> list[tuple[object, ...]]:
    return [(expert.source, expert.layers, expert.params) for expert in experts]


def _rules(rules: Sequence[LockedRule]) -> list[tuple[object, ...]]:
    return [(rule.match, rule.layers, rule.params, rule.experts) for rule in rules]


def _slice(part: LockedSlice) -> tuple[object, ...]:
    operator = (part.operator, part.operator_version)
    bases = (part.base, part.base_layers)
    return (part.layers, operator, bases, _experts(part.experts), part.params, _rules(part.rules))


FACT_WORDS: Mapping[str, str] = {
    "operator": "the operator or its version changed",
    "code": "the code of a custom operator changed",
    "parameters": "weights, parameters or rules changed",
    "budget": "the budget changed",
    "layout": "the way it is written (dtype, shard size, tokenizer) changed",
    "side_files": "config or tokenizer files changed",
    "decisions": "the tensor sets of the sources changed",
    "tensors": "the inputs of its tensors changed",
    "card": "what its model card says of its sources changed",
}
"""What it means that a fact is another one than before."""


def encode_published(
    facts: Facts,
    files: PublishedFiles,
    lock: str,
    expert_blocks: Mapping[str, int],
    blocks: Mapping[str, bytes],
    budget: KnownBudget | None,
    parts: BuildParts | None,
    last: LastBuild,
) -> Published:
    """Return the catalog's form of an output that was built; ``files`` are those in its directory, if it has one."""
    record = PublishedRecord(
        facts=facts,
        lock=lock,
        expert_blocks=dict(expert_blocks),
        blocks=dict(blocks),
        budget=budget,
        parts=parts,
        last=last,
    )
    return Published(key=facts.key(), files=encode_files(files), record=msgspec.msgpack.encode(record))


def encode_files(files: PublishedFiles) -> bytes:
    """Return the catalog's form of the files of a published output."""
    rows = [
        (f.name, f.digest, f.is_shard, f.identity.size, f.identity.mtime_ns, f.identity.ctime_ns, f.identity.inode)
        for f in files
    ]
    return msgspec.msgpack.encode(rows)


def known_output(catalog: Catalog, directory: Path) -> KnownOutput | None:
    """Return what was published into a directory before, or None if that is not known or of another version.

    An output that is not published has a place of its own (`mergepipe.project.stages.record_place`) and no files.
    """
    published = catalog.published(directory)
    if published is None:
        return None
    try:
        rows = msgspec.msgpack.decode(published.files, type=list[tuple[str, bytes, bool, int, int, int, int]])
        record = msgspec.msgpack.decode(published.record, type=PublishedRecord)
    except msgspec.DecodeError:
        return None
    files = tuple(
        PublishedFile(name=name, digest=digest, is_shard=is_shard, identity=FileIdentity(*identity))
        for name, digest, is_shard, *identity in rows
    )
    return KnownOutput(key=published.key, files=files, record=record)
