"""What an explanation says of reads, errors and builds: plain values with a stable JSON form."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.project.contributions import Contribution
from mergepipe.project.key_parts import Change
from mergepipe.project.reports import Bound, Json
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReads:
    """What a merge reads of one input of a tensor.

    Attributes
    ----------
    blocks
        The blocks that it has where the tensor is merged.
    read, omitted, zero, shared
        Of these: those that are read; that the budget leaves out; that equal the base's; that equal an earlier input's.
    bytes_read, bytes_omitted
        Bytes of those that are read, and that the budget leaves out. The factors of an adapter count whole.
    is_known
        Whether the content of the inputs is known; else ``zero`` and ``shared`` are 0, for nothing is known of them.
    levels
        Where the budget buys levels, by level (``omitted``, planes, ``exact``) the ``blocks`` and ``bytes`` that are
        read; those that are read at fewer than all planes are approximate.
    residual
        An upper limit of the norm of what is missing of the deltas that are approximate; None where none is.
    """

    blocks: int
    read: int
    omitted: int
    zero: int
    shared: int
    bytes_read: int
    bytes_omitted: int
    is_known: bool
    levels: Mapping[str, Mapping[str, int]] | None = None
    residual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShare:
    """What a tensor loses by the budget of its output.

    Attributes
    ----------
    kind
        ``exact`` where nothing of it is left out; else that of the output's bound.
    omitted_bytes
        What the blocks that are left out would cost.
    bound, bound_share
        Of its distance to the full read, and the share that its square has in the square of the output's bound, 0 to
        1; None where no bound is known.
    expected, expected_share
        The same for the error that is expected: an estimate.
    omitted_mass
        The share of the length of its deltas that is left out, 0 to 1.
    """

    kind: str
    omitted_bytes: int
    bound: float | None
    bound_share: float | None
    expected: float | None
    expected_share: float | None
    omitted_mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildState:
    """Why a tensor was rebuilt or reused by the last build, or would be by the next one.

    Attributes
    ----------
    state
        ``unbuilt``: no build made it yet. ``rebuilt``, ``reused``: what the last build that changed the output did.
        ``stale``, ``unchanged``: what the next build would do, because the output is not what it should be.
    change
        The first part of its action key that differs from the build before. A tensor that was ``reused`` may have one:
        then its blocks came from the cache all the same.
    """

    state: str
    change: Change

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"state": self.state, "change": self.change.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleContribution:
    """What the experts contributed to the tensors of one module in all layers.

    ``update_share`` is the share that the square of its update has in that of the whole output, 0 to 1.
    """

    module: str
    tensors: int
    update_share: float | None
    contribution: Contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """A source of an output: ``base`` or ``expert`` (or both, or what an adapter applies to), and its digest."""

    source: str
    roles: tuple[str, ...]
    digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBuildFacts:
    """The build that made an output.

    Attributes
    ----------
    reasons
        Why it made it, in words.
    run
        Bytes: ``expert_bytes_read``, ``base_bytes_read``, ``index_bytes_read``, ``bytes_written``.
    blocks
        Output blocks: ``total``, ``computed``, ``cached``, ``copied``.
    tensors
        How many tensors were ``rebuilt``, and how many ``reused``: their action keys were those of the build before, or
        all of their blocks came from the cache.
    """

    reasons: tuple[str, ...]
    run: Mapping[str, int]
    blocks: Mapping[str, int]
    tensors: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSummary:
    """How an output stands.

    Attributes
    ----------
    state, reasons
        As for `status`.
    operator
        The output's own; slices may have others.
    digest
        Of the output as it was built, ``b3:<hex>``; None before the first build.
    budget
        As in a lock: ``full``, ``25%``.
    expert_bytes
        ``full`` and ``planned``.
    expert_blocks
        ``total`` and ``omitted``.
    levels
        As for `plan`: by level ``blocks`` and ``bytes``; None where the budget buys whole blocks, or is not resolved.
    bound, expected_error, omitted_mass
        As for `plan`.
    is_resolved
        Whether it is known which blocks the budget reads.
    last
        Of the build that made the output; None where nothing is recorded.
    """

    state: str
    reasons: tuple[str, ...]
    is_resolved: bool
    operator: str
    path: str | None
    digest: str | None
    sources: tuple[SourceFacts, ...]
    budget: str
    expert_bytes: Mapping[str, int]
    expert_blocks: Mapping[str, int]
    bound: Bound
    expected_error: float | None
    omitted_mass: float
    last: LastBuildFacts | None
    levels: Mapping[str, Mapping[str, int]] | None = None
