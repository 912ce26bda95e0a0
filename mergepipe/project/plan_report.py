"""What `plan` returns and the command line prints: plain values with a stable JSON form."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.graph.histogram import Histogram
from mergepipe.plan.access import level_name
from mergepipe.project.reports import Bound, Json
from mergepipe.values import dataclass


def levels_json(levels: Histogram | None) -> Json | None:
    """Return the JSON form of how precisely blocks are read."""
    if levels is None:
        return None
    return {level_name(level): {"blocks": count.blocks, "bytes": count.bytes} for level, count in levels.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a tensor loses by a budget: expert bytes that are not read, and what is known of the error.

    ``bound`` is None where no bound is known, ``expected`` an estimate, ``omitted_mass`` the share of the length of
    its deltas that is left out. ``error_share`` is its share of the square of the output's expected error, None where
    that is not known.
    """

    tensor: str
    omitted_bytes: int
    bound: float | None
    expected: float | None
    omitted_mass: float
    error_share: float | None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExpert:
    """What is read of one expert, in bytes.

    Attributes
    ----------
    full, planned
        Of a full read, and of the access set.
    cached
        The part of ``planned`` whose results are in the cache: the next build does not read it.
    to_read
        What the next build reads of it to merge. The rest of ``planned`` equals something that is read already.
    index
        What the next build reads of it for digests and statistics alone.
    blocks, omitted
        Blocks of a full read, and those outside the budget.
    indexed
        Whether its content is known; what is not is read once, whole, whatever is merged of it.
    levels
        By level how many of its blocks have it, of those that carry content of their own, and the bytes that are read
        of these; None where the budget buys whole blocks, or is not resolved.
    """

    full: int
    planned: int
    cached: int
    to_read: int
    index: int
    blocks: int
    omitted: int
    indexed: bool
    levels: Histogram | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "levels": levels_json(self.levels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBuild:
    """What the next build does for one output.

    Attributes
    ----------
    unchanged
        Whether the output is what it should be: nothing is read or written.
    exact
        Whether the figures are those that the build will report; otherwise what is read to merge, what is read in all,
        and what is written are upper limits, because the content of a source, or what statistics come to, is known only
        when it is read: what is counted as merged and turns out not to be is index then. ``written`` is an upper limit
        as long as anything is computed: what comes out as before is there already.
    bounded
        False where it is not known how often a custom operator goes through its inputs to measure them: then there is
        no limit of what is read in all.
    expert_bytes, base_bytes, index_bytes, written
        As a build reports them.
    unindexed
        By source the bytes whose content is not known yet: each is read once, whole.
    """

    unchanged: bool
    exact: bool
    bounded: bool = True
    expert_bytes: int
    base_bytes: int
    index_bytes: int
    written: int
    unindexed: Mapping[str, int]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "unchanged": self.unchanged,
            "exact": self.exact,
            "bounded": self.bounded,
            "expert_bytes_read": self.expert_bytes,
            "base_bytes_read": self.base_bytes,
            "index_bytes_read": self.index_bytes,
            "bytes_written": self.written,
            "unindexed_bytes": dict(self.unindexed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutput:
    """What a build of one output reads and makes: from shapes and settings, and with a budget the deltas' lengths.

    ``next_build``, and what is called cached or to be read, depends on the cache; nothing else does.

    Attributes
    ----------
    path
        The output directory; None for an output that is not published.
    tensors
        How many tensors the output has.
    experts
        By name.
    expert_bytes
        ``full``, ``planned``, ``cached``, ``to_read``, of all experts.
    blocks, expert_blocks
        Of output blocks the ``total``, and how many the next build has ``computed``, ``cached``, ``copied``; of
        (expert, block) pairs the ``total`` and the ``omitted``.
    seconds, not_timed
        An estimate of the next build from the speed of earlier ones; None where there is none, and then what was never
        timed, in words. Outputs that are built together share the time.
    index_bytes_read
        Source bytes that were read just now to plan a budget.
    levels
        As of each expert, of all of them.
    codes
        ``bytes`` of the progressive codes that its levels are taken from, all planes of all deltas, and how many of
        these are ``missing`` from the cache, where a build that reads them makes them again; None without levels.
    expected_error, expected_error_uncertainty, omitted_mass, losses
        With a budget: the error if what is left out were orthogonal (an estimate), the share of the length of all
        deltas that is left out, and the tensors that lose most.
    """

    name: str
    path: str | None
    operator: str
    digest: str
    tensors: int
    experts: Mapping[str, PlannedExpert]
    expert_bytes: Mapping[str, int]
    base_bytes: int
    blocks: Mapping[str, int]
    expert_blocks: Mapping[str, int]
    bound: Bound
    next_build: NextBuild
    seconds: float | None
    peak_memory_bytes: int
    output_bytes: int
    shards: int
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    not_timed: tuple[str, ...] = ()
    index_bytes_read: int = 0
    expected_error: float | None = None
    expected_error_uncertainty: float | None = None
    omitted_mass: float = 0.0
    losses: tuple[Loss, ...] = ()
    levels: Histogram | None = None
    codes: Mapping[str, int] | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        by_expert = {name: expert.planned for name, expert in self.experts.items()}
        return {
            "path": self.path,
            "operator": self.operator,
            "plan_digest": self.digest,
            "tensors": self.tensors,
            "expert_bytes": {**self.expert_bytes, "by_expert": by_expert},
            "experts": {name: expert.as_json() for name, expert in self.experts.items()},
            "base_bytes": self.base_bytes,
            "blocks": dict(self.blocks),
            "expert_blocks": dict(self.expert_blocks),
            "levels": levels_json(self.levels),
            "codes": None if self.codes is None else dict(self.codes),
            "bound": self.bound.as_json(),
            "expected_error": self.expected_error,
            "expected_error_uncertainty": self.expected_error_uncertainty,
            "omitted_mass": self.omitted_mass,
            "losses": [loss.as_json() for loss in self.losses],
            "index_bytes_read": self.index_bytes_read,
            "next_build": self.next_build.as_json(),
            "shards": self.shards,
            "estimate": {
                "seconds": self.seconds,
                "not_timed": list(self.not_timed),
                "peak_memory_bytes": self.peak_memory_bytes,
                "output_bytes": self.output_bytes,
            },
            "decisions": list(self.decisions),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """Room on a file system that the next build writes to.

    ``path`` is the cache where that lies there, else the first of the ``outputs``; ``needed`` is an upper limit;
    ``free`` is None where the system does not say.
    """

    path: str
    cache: bool
    outputs: tuple[str, ...]
    needed: int
    free: int | None
    fits: bool

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "outputs": list(self.outputs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plans of some outputs, and what building all of them takes.

    Attributes
    ----------
    reads, exact, bounded
        ``expert_bytes``, ``base_bytes`` and ``index_bytes`` that one build of all of them reads; if not exact, limits
        as in `NextBuild`.
    seconds
        An estimate for one build of all of them; None where that of one is not known.
    peak_memory_bytes
        An upper estimate of the process that builds them; 0 where nothing is to be built.
    """

    outputs: Mapping[str, PlannedOutput]
    reads: Mapping[str, int]
    exact: bool = True
    bounded: bool = True
    seconds: float | None = None
    peak_memory_bytes: int = 0
    disks: tuple[DiskReport, ...] = ()

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "outputs": {name: output.as_json() for name, output in self.outputs.items()},
            "next_build": {
                "exact": self.exact,
                "bounded": self.bounded,
                **{f"{name}_read": count for name, count in self.reads.items()},
            },
            "estimate": {"seconds": self.seconds, "peak_memory_bytes": self.peak_memory_bytes},
            "disks": [disk.as_json() for disk in self.disks],
        }
