"""What `verify` found: plain values with a stable JSON form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from mergepipe.project.reports import Json
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not what it should be.

    Attributes
    ----------
    kind
        What it is about: ``manifest``, ``file``, ``header``, ``block``, ``extra``, ``pack``, ``lock``, ``source``,
        ``rebuild``, ``signature`` or ``output``.
    where
        The file, with the line where there is one.
    what
        What is wrong with it, in words.
    facts
        Names and numbers: ``tensor``, ``blocks``, ``rows``, ``elements``, ``line``, ``expected``, ``got`` and others.
    """

    kind: str
    where: str
    what: str
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The place and what is wrong there."""
        return f"{self.where}: {self.what}"

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"kind": self.kind, "where": self.where, "message": self.what, "hint": self.hint, **self.facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCounts:
    """The packs in the cache that hold an output's shards.

    Attributes
    ----------
    checked
        Those that were hashed.
    linked
        Those that share their bytes with a published shard, which was hashed.
    absent
        Those that are not in the cache; nothing is wrong with that.
    """

    checked: int = 0
    linked: int = 0
    absent: int = 0

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"checked": self.checked, "linked": self.linked, "absent": self.absent}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """A sample of an output's blocks that was made again from the sources: of how many, and by which seed."""

    percent: float
    seed: int
    blocks: int
    total: int
    bytes: int

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "percent": self.percent,
            "seed": self.seed,
            "blocks": self.blocks,
            "total": self.total,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedOutput:
    """One output, or the copy of one, as it was found.

    Attributes
    ----------
    name
        The output's name; of a directory the one in its manifest, None where that cannot be read.
    path
        The directory as it was named; None for an output that is not published.
    digest
        The digest of its tensors that its manifest states, ``b3:...``; None where there is none to go by.
    shards, tensors, blocks, files
        What was hashed: shards of the directory with their tensors and blocks, and files beside them.
    bytes
        Bytes that were hashed, packs among them.
    others
        How many files in the directory are not mergepipe's.
    signature
        ``valid``, ``invalid``, ``absent``; ``unchecked`` where there is one that nobody asked about.
    """

    name: str | None
    path: str | None
    digest: str | None
    problems: tuple[Problem, ...]
    shards: int = 0
    tensors: int = 0
    blocks: int = 0
    files: int = 0
    bytes: int = 0
    others: int = 0
    packs: PackCounts | None = None
    sample: SampleReport | None = None
    signature: str = "absent"

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "name": self.name,
            "path": self.path,
            "digest": self.digest,
            "ok": not self.problems,
            "checked": {
                "shards": self.shards,
                "tensors": self.tensors,
                "blocks": self.blocks,
                "files": self.files,
                "bytes": self.bytes,
            },
            "other_files": self.others,
            "packs": self.packs.as_json() if self.packs else None,
            "sample": self.sample.as_json() if self.sample else None,
            "signature": self.signature,
            "problems": [problem.as_json() for problem in self.problems],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLock:
    """The lock, as it was found; ``path`` is its file name."""

    path: str
    problems: tuple[Problem, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "path": self.path,
            "ok": not self.problems,
            "problems": [problem.as_json() for problem in self.problems],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSource:
    """A source that was hashed whole.

    Attributes
    ----------
    digest
        That of all its content now, ``b3:...``; None where it cannot be read.
    pinned_by
        What the lock has of it: the digest of its ``content``, or of a ``sample`` of each block; None for nothing.
    """

    name: str
    digest: str | None
    bytes: int
    problems: tuple[Problem, ...]
    pinned_by: str | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "digest": self.digest,
            "pinned_by": self.pinned_by,
            "bytes": self.bytes,
            "ok": not self.problems,
            "problems": [problem.as_json() for problem in self.problems],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All that was looked at; ``lock`` and ``sources`` (by ``--full``) where a project was verified."""

    outputs: tuple[VerifiedOutput, ...]
    lock: VerifiedLock | None
    sources: tuple[VerifiedSource, ...]
    seconds: float

    @property
    def parts(self) -> tuple[tuple[Problem, ...], ...]:
        """The problems of each output, of the lock, and of each source."""
        outputs = [output.problems for output in self.outputs]
        sources = [source.problems for source in self.sources]
        return (*outputs, *([self.lock.problems] if self.lock else []), *sources)

    @property
    def problems(self) -> Iterator[Problem]:
        """Everything that is not what it should be."""
        for problems in self.parts:
            yield from problems

    @property
    def ok(self) -> bool:
        """Whether all is what it should be."""
        return next(self.problems, None) is None

    @property
    def bytes(self) -> int:
        """Bytes that were hashed."""
        return sum(output.bytes for output in self.outputs) + sum(source.bytes for source in self.sources)

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "ok": self.ok,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "outputs": [output.as_json() for output in self.outputs],
            "lock": self.lock.as_json() if self.lock else None,
            "sources": {source.name: source.as_json() for source in self.sources},
        }
