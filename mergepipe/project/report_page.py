"""What a report tells of a built output: plain values with a stable JSON form. The page shows these and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mergepipe.project.contributions import Contribution
from mergepipe.project.explain import ParameterGroup
from mergepipe.project.explain_values import LastBuildFacts, ModuleContribution
from mergepipe.project.reports import Bound, Json
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSource:
    """A source: what it is for (``base``, ``expert``, ``adapted``), where it is, and what it holds.

    Attributes
    ----------
    location
        As declared, by key (``path``, ``hub``, ``revision``, ``on``); ``output`` for another output of the Mergefile.
    digest
        As in the lock.
    tensors, bytes
        How many tensors it has, and the bytes of their data.
    """

    source: str
    roles: tuple[str, ...]
    location: Mapping[str, str]
    digest: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoss:
    """What one tensor loses by the budget: as `mergepipe.project.explain_values.ErrorShare`."""

    tensor: str
    omitted_bytes: int
    bound: float | None
    expected: float | None
    omitted_mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedBudget:
    """What is read of the experts, and what is known of the distance to the full read.

    Attributes
    ----------
    budget
        As in the lock.
    expert_bytes
        ``full`` and ``planned``, as in the lock.
    expert_blocks
        ``total``, ``omitted``, ``zero``, ``shared``, as in the manifest.
    levels
        By level (``omitted``, planes, ``exact``) the expert blocks that carry content of their own, as in the manifest;
        None where the budget buys whole blocks.
    by_expert
        By source the bytes that a build from nothing reads.
    bound, expected_error, omitted_mass
        As for `plan`.
    losses
        The tensors that lose most, those that lose more first.
    """

    budget: str
    expert_bytes: Mapping[str, int]
    expert_blocks: Mapping[str, int]
    by_expert: Mapping[str, int]
    bound: Bound
    expected_error: float | None
    omitted_mass: float
    losses: tuple[ReportedLoss, ...]
    levels: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCost:
    """What a build from nothing costs: bytes read and written, blocks, shards."""

    expert_bytes: int
    base_bytes: int
    output_bytes: int
    blocks: int
    shards: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCell:
    """The tensors of one module in one layer.

    Attributes
    ----------
    layer
        None outside the layers.
    read, total
        Expert blocks that are read, and all, as in the lock.
    update_relative, sign_agreement
        As in `Contribution`; None where it is not known.
    shares
        By expert its share by norm.
    levels
        As of the budget, of these tensors.
    """

    layer: int | None
    module: str
    tensors: int
    read: int
    total: int
    update_relative: float | None
    sign_agreement: float | None
    shares: Mapping[str, float | None]
    levels: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTensor:
    """One tensor of the output.

    Attributes
    ----------
    digest, read, total
        As in the lock.
    state, why
        ``rebuilt`` or ``reused`` by the last build that changed the output, and why; None where that is not recorded.
    levels, bytes_read
        As in the lock: how many expert blocks have each level, and what is read of the experts; None where the budget
        buys whole blocks.
    update_norm, update_relative, sign_agreement, shares, cosines
        As in `Contribution`, the last two by expert; None and empty where it is not known.
    """

    name: str
    layer: int | None
    module: str
    operator: str
    decision: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    read: int
    total: int
    state: str | None
    why: str | None
    update_norm: float | None
    update_relative: float | None
    sign_agreement: float | None
    shares: Mapping[str, float | None]
    cosines: Mapping[str, float | None]
    levels: Mapping[str, int] | None = None
    bytes_read: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReported:
    """The report of one output.

    Attributes
    ----------
    path
        Its directory as the Mergefile says; None for an output that is not published.
    operator, operator_version
        The output's own; slices may have others.
    experts
        Their names, in expert order.
    groups
        The parameters, as `explain` groups them.
    last
        Of the build that made it; None where nothing is recorded.
    contribution, modules, not_measured
        As for `explain`.
    measured_bytes_read
        What was read just now to measure contributions; 0 where the cache knew them.
    cells
        By module and layer, in plan order.
    """

    output: str
    path: str | None
    operator: str
    operator_version: int
    digest: str
    base: str | None
    experts: tuple[str, ...]
    mergepipe: str
    sources: tuple[ReportedSource, ...]
    groups: tuple[ParameterGroup, ...]
    budget: ReportedBudget
    cost: ReportedCost
    last: LastBuildFacts | None
    contribution: Contribution | None
    modules: tuple[ModuleContribution, ...]
    not_measured: str | None
    measured_bytes_read: int
    cells: tuple[ReportedCell, ...]
    tensors: tuple[ReportedTensor, ...]
    decisions: tuple[str, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReports:
    """The reports of some outputs."""

    outputs: Mapping[str, OutputReported]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"outputs": {name: output.as_json() for name, output in self.outputs.items()}}
