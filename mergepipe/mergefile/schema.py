"""The Mergefile as frozen values: what `parse` returns and every later step reads.

The values are complete and consistent: names exist, numbers are in range, integers given for real parameters are
floats already. The ``line`` of a value is where it is declared (0 for values made in code); it is for messages and
takes no part in comparisons.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from mergepipe.signatures import ParamValue
from mergepipe.values import dataclass

Params = Mapping[str, ParamValue]
DEFAULT_SHARD_SIZE = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A named checkpoint: a ``path`` (as written), a ``hub`` repository with an optional revision, or ``progressive``.

    The last is the path (as written) of a progressive checkpoint, which `mergepipe pack` makes. ``on`` names the
    checkpoint that an adapter applies to.
    """

    name: str
    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    on: str | None = None
    progressive: str | None = None
    line: int = field(default=0, compare=False)

    @property
    def place(self) -> str | None:
        """Its path as written, whichever of the two it is; None for a hub source."""
        return self.progressive if self.path is None else self.path

    @property
    def location(self) -> dict[str, str]:
        """Where it is, as declared: its keys and their values."""
        keys = ("path", "progressive", "hub", "revision", "on")
        found = {key: getattr(self, key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRef:
    """An expert of an output: a source's (or another output's) name and the parameters given beside it.

    ``layers`` is its own range of layers (half open) in a slice, None for the slice's.
    """

    source: str
    params: Params = field(default_factory=dict)
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Parameters for some tensors: those that match any glob of ``match`` and lie in ``layers`` (half open).

    An empty ``match`` and ``layers`` None mean "any". ``experts`` maps an expert's name to its parameters.
    """

    match: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    params: Params = field(default_factory=dict)
    experts: Mapping[str, Params] = field(default_factory=dict)
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Layers of an output that are taken from one expert, or merged from several.

    Attributes
    ----------
    layers
        The layers (half open) that it takes of every source; as written, so the range may be a wrong one.
    operator, base
        Those of the slice, None for the output's.
    base_layers
        The layers that it takes of the base, None for ``layers``.
    params, rules
        On top of the output's.
    """

    layers: tuple[int, int]
    experts: tuple[ExpertRef, ...]
    operator: str | None = None
    base: str | None = None
    base_layers: tuple[int, int] | None = None
    params: Params = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limit on expert reads: bytes, a share (0 to 1) of the full read, or the largest relative error.

    ``coarse`` says that an expert is a progressive checkpoint: however much is read, it is no full read.
    """

    expert_reads: int | None = None
    share: float | None = None
    max_error: float | None = None
    stats: str = "full"
    precision: str | None = None
    coarse: bool = False

    @property
    def is_full_read(self) -> bool:
        """Whether it limits nothing, so that the merge is the full-read merge."""
        return not self.coarse and self.expert_reads is None and self.max_error is None and self.share in (None, 1.0)

    @property
    def uses_levels(self) -> bool:
        """Whether blocks may be read as approximations (progressive codes), and not only exactly or not at all.

        By default they may where deltas are read whole once: codes are made in the same pass.
        """
        precision = self.precision or ("levels" if self.stats == "full" else "blocks")
        return precision == "levels" and not self.is_full_read

    def text(self) -> str:
        """Return it in words, as the lock has it: ``full``, ``25%``, ``1048576 B``, ``max_error 0.001``.

        Where norms are estimated it says so: ``25% by samples``; where approximations are read, ``25% in levels``.
        """
        if self.is_full_read:
            return "full"
        share = 1.0 if self.share is None else self.share
        limit = f"{100 * share:.15g}%" if self.expert_reads is None else f"{self.expert_reads} B"
        if self.max_error is not None:
            limit = f"max_error {self.max_error!r}"
        limit = f"{limit} in levels" if self.uses_levels else limit
        return limit if self.stats == "full" else f"{limit} by samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """How an output is written: dtype (header name; None keeps each tensor's), bytes per shard, whose tokenizer."""

    dtype: str | None = None
    shard_size: int = DEFAULT_SHARD_SIZE
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A merged checkpoint to build; ``path`` is as written, or ``build/<name>``."""

    name: str
    operator: str
    base: str | None = None
    experts: tuple[ExpertRef, ...] = ()
    path: str
    params: Params = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    budget: Budget | None = None
    write: Write = field(default_factory=Write)
    slices: tuple[Slice, ...] | None = None
    publish: bool = True
    line: int = field(default=0, compare=False)

    @property
    def is_budgeted(self) -> bool:
        """Whether a budget limits what is read of the experts."""
        return self.budget is not None and not self.budget.is_full_read

    @property
    def expert_sources(self) -> tuple[str, ...]:
        """The names of its experts, those of its slices too: each once, in order of first use."""
        experts = (*self.experts, *(expert for part in self.slices or () for expert in part.experts))
        return tuple(dict.fromkeys(expert.source for expert in experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOperator:
    """An operator of the user's own: ``function`` in the Python file ``file`` (relative to the Mergefile)."""

    name: str
    file: str
    function: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mergefile:
    """A whole Mergefile, in the order of the file; ``path`` is absolute."""

    path: Path
    sources: Mapping[str, Source]
    outputs: Mapping[str, Output]
    operators: Mapping[str, CustomOperator] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of the Mergefile, which relative paths start from."""
        return self.path.parent

    def absolute(self, text: str) -> Path:
        """Return a path as written in this Mergefile as an absolute one (``~`` expanded, variables not)."""
        return self.root / os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser raises for unknown users

    def source_path(self, name: str) -> Path | None:
        """Return the absolute path of a source, None for a hub source."""
        path = self.sources[name].place
        return None if path is None else self.absolute(path)

    def output_path(self, name: str) -> Path:
        """Return the absolute path of an output's directory."""
        return self.absolute(self.outputs[name].path)
