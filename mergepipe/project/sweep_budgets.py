"""The budgets of a sweep, as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from mergepipe.errors import MergefileError
from mergepipe.mergefile.schema import Budget
from mergepipe.units import exact_size, parse_percent, parse_size

_MOST = 1000  # budgets that an ellipsis may stand for
_ELLIPSES = ("...", "…")


def as_budgets(values: Iterable[Budget | str]) -> tuple[Budget, ...]:
    """Return budgets, each once.

    Parameters
    ----------
    values
        Budgets, or texts: ``25%`` and ``25`` are percent of the expert bytes, ``"1 GB"`` is a size; ``...`` between
        two percentages goes on in the steps before it: ``0, 5, ..., 100``.

    Raises
    ------
    MergefileError
        For what is no budget, or limits the error and no reads.
    """
    found: dict[str, Budget] = {}
    values = [values] if isinstance(values, str | Budget) else list(values)
    for at, value in enumerate(values):
        if value in _ELLIPSES:
            between = _between(values, at)
        else:
            between = [value if isinstance(value, Budget) else _parsed(value)]
        for budget in between:
            if budget.max_error is not None:
                raise MergefileError("a sweep takes budgets of bytes or percent, no `max_error`", got=budget.text())
            found.setdefault(budget.text(), budget)
    if not found:
        raise MergefileError("a sweep takes at least one budget", hint="name some, such as `0,10,25,50,100`")
    return tuple(found.values())


def budget_label(budget: Budget) -> str:
    """Return what a sweep calls a budget: as the lock does, but a size as people write it, ``500 KB``."""
    size = budget.expert_reads if budget.max_error is None and budget.share is None else None
    return budget.text() if size is None else budget.text().replace(f"{size} B", exact_size(size))


def _parsed(text: str) -> Budget:
    share = _share(text)
    if share is not None:
        if share > 1:
            raise MergefileError(f"a budget is at most 100%: `{text.strip()}`", got=text)
        return Budget(share=float(share))
    try:
        return Budget(expert_reads=parse_size(text))
    except ValueError as error:
        raise MergefileError(
            f"`{text.strip()}` is no budget",
            hint="write a percentage such as `25`, or a size with its unit such as `2 GB`",
            got=text,
        ) from error


def _share(text: str) -> Fraction | None:
    """Return a share exactly as it is written in percent, with the sign or without; None for anything else."""
    bare = text.strip().removesuffix("%").strip()
    return None if parse_percent(f"{bare}%") is None else Fraction(bare) / 100


def _between(values: Sequence[Budget | str], at: int) -> list[Budget]:
    """Return the budgets that an ellipsis stands for."""
    named = [values[i] if 0 <= i < len(values) else "" for i in (at - 2, at - 1, at + 1)]
    shares = [_share(value) if isinstance(value, str) else None for value in named]
    first, last, end = shares
    if first is None or last is None or end is None or not first < last < end:
        raise MergefileError(
            "`...` stands between rising percentages, behind two of them", hint="write it like `0,5,...,100`"
        )
    step = last - first
    if (end - last) / step > _MOST:
        raise MergefileError(
            f"`...` stands for more than {_MOST:,} budgets here",
            hint="write larger steps: `0,5,...,100` has 21 budgets",
        )
    shares_between = (last + step * number for number in range(1, int((end - last) / step) + 1))
    return [Budget(share=float(share)) for share in shares_between if share < end]
