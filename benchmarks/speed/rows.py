"""The rows of the benchmark: which merges are measured, who takes part, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.speed.merges import Merge, merge

COLD, WARM = "cold", "warm"
MODES = (COLD, WARM)

FLOOR, OURS, BUDGET, L1 = "I/O floor", "mergepipe", "mergepipe, 10%", "mergepipe, rescale l1"
BEST, DEFAULT = "mergekit", "mergekit, default flags"
ONE, TWO = "one output", "two outputs"
FULL, NOTHING, TENSOR, TENSOR_FLOOR = "full build", "nothing changed", "one tensor changed", "I/O floor of that change"
BEFORE = "first build"

# Whose bytes in results are a merge's; of the others only the floors have no counts.
FLOORS = (FLOOR, TENSOR_FLOOR)

# A shape, and one about twice as large that its peak memory is compared with.
LARGER = {"tiny": "small", "qwen2.5-0.5b": "llama3.2-1b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, whose steps run in turn.

    Attributes
    ----------
    kind
        ``full``: a merge by everybody; ``second``: one output and two; ``changes``: a build, and what follows small
        changes; ``parameter``: a build, and one with another parameter; ``memory``: merges of a larger shape.
    slow
        Whether mergekit takes minutes for it, so that it runs less often.
    """

    name: str
    title: str
    kind: str
    merge: Merge
    modes: tuple[str, ...] = MODES
    slow: bool = False

    @property
    def experts(self) -> int:
        """Return how many experts it needs of the family."""
        return len(self.merge.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How often things run: mergepipe; mergekit and the floor in slow rows; mergekit with its default flags."""

    ours: int = 5
    slow: int = 2
    default: int = 1
    slow_default: int = 0
    few: int = 2

    def of(self, row: Row, who: str) -> int:
        """Return in how many rounds of a row somebody runs."""
        if row.kind == "memory":
            return 1
        if row.kind == "parameter":
            return min(self.few, self.ours)
        if who == DEFAULT:
            return min(self.slow_default if row.slow else self.default, self.ours)
        return min(self.slow, self.ours) if row.slow and who in (BEST, FLOOR) else self.ours


def _full(operator: str, experts: int, *, slow: bool = False) -> Row:
    name = operator if experts == 4 or operator == "slerp" else f"{operator}-{experts}"
    title = f"`{operator}`, 2 models" if operator == "slerp" else f"`{operator}`, {experts} experts"
    return Row(name=name, title=title, kind="full", merge=merge(operator, experts), slow=slow)


ROWS = {
    row.name: row
    for row in (
        _full("linear", 4),
        _full("task_arithmetic", 4),
        _full("slerp", 1),
        _full("ties", 4, slow=True),
        _full("dare_linear", 4, slow=True),
        _full("dare_ties", 4, slow=True),
        _full("linear", 8),
        _full("task_arithmetic", 8),
        Row(
            name="second-output",
            title="a second output over the same sources, `task_arithmetic`, 4 experts",
            kind="second",
            merge=merge("task_arithmetic", 4),
        ),
        Row(
            name="changes",
            title="small changes, `task_arithmetic`, 4 experts, one shard",
            kind="changes",
            merge=merge("task_arithmetic", 4),
            modes=(WARM,),
        ),
        Row(
            name="parameter-slerp",
            title="one parameter of `slerp` changed, 2 models",
            kind="parameter",
            merge=merge("slerp", 1),
            modes=(WARM,),
        ),
        Row(
            name="parameter-ties",
            title="one parameter of `ties` changed, 4 experts",
            kind="parameter",
            merge=merge("ties", 4),
            modes=(WARM,),
        ),
        Row(
            name="memory",
            title="peak memory with a larger shape",
            kind="memory",
            merge=merge("task_arithmetic", 4),
            modes=(WARM,),
        ),
    )
}


def participants(row: Row) -> tuple[str, ...]:
    """Return who takes part in a row, in the order in which they run."""
    if row.kind == "full":
        extra = {"task_arithmetic-8": (BUDGET,), "dare_linear": (L1,), "dare_ties": (L1,)}.get(row.name, ())
        return (FLOOR, OURS, *extra, BEST, DEFAULT)
    if row.kind == "second":
        return (ONE, TWO)
    if row.kind == "changes":
        return (FULL, NOTHING, TENSOR, TENSOR_FLOOR)
    if row.kind == "parameter":
        return (BEFORE, *(f"{name} changed" for name in parameters(row)))
    return tuple(name for name, other in ROWS.items() if other.kind == "full" and other.experts <= 4)


def parameters(row: Row) -> tuple[str, ...]:
    """Return the parameters that a row changes one after another."""
    return ("t",) if row.merge.operator == "slerp" else ("lambda", "density")


def choose(names: str | None) -> Sequence[Row]:
    """Return the rows of a list of names; all of them by default.

    Raises
    ------
    ValueError
        If there is no such row; names those that there are.
    """
    if names is None:
        return tuple(ROWS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in ROWS]:
        raise ValueError(f"no row {', '.join(f'`{name}`' for name in unknown)}; there are: {', '.join(ROWS)}")
    return tuple(ROWS[name] for name in dict.fromkeys(wanted))
