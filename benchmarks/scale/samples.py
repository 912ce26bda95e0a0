"""What fewer and shorter runs of a sample cost in quality, where rows are long: deviations by simulation.

Deltas are drawn by row: normal elements, lengths of rows as a kind says, and a factor for each tensor. The sum of the
squares of a run is drawn from the distribution that its elements' would have, at the places that
`mergepipe.checkpoints.samples` would take; estimates go through `mergepipe.graph.samples.shrunk`, as those of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mergepipe.graph.samples import shrunk

ROW, ROWS = 8192, 32
ELEMENTS = ROW * ROWS
EXPERTS, TENSORS, BLOCKS = 8, 24, 256
FORMS = ((8, 1024), (4, 512), (2, 1024))
"""Runs in a block and elements in a run; the first is that of short rows, the second that of long ones."""
SHARES = (0.05, 0.10, 0.25, 0.50)
_GOLDEN = 0x9E3779B97F4A7C15  # as in mergepipe.checkpoints.samples

Kind = Callable[[np.random.Generator], np.ndarray]


def _lengths(sigma: float, count: int) -> Kind:
    """Return log-normal lengths for as many parts of each block, each of equal rows."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        return np.repeat(np.exp(2 * sigma * rng.normal(size=(EXPERTS, TENSORS, BLOCKS, count))), ROWS // count, axis=3)

    return draw


KINDS: dict[str, Kind] = {
    "all rows alike": lambda _: np.ones((EXPERTS, TENSORS, BLOCKS, ROWS)),
    "a tenth of the rows five times as long": lambda rng: np.where(
        rng.random((EXPERTS, TENSORS, BLOCKS, ROWS)) < 0.1, 25.0, 1.0
    ),
    "rows log-normal, sigma 0.5": _lengths(0.5, ROWS),
    "rows log-normal, sigma 1": _lengths(1.0, ROWS),
    "blocks log-normal, sigma 1": _lengths(1.0, 1),
    "half blocks log-normal, sigma 1": _lengths(1.0, 2),
}


def table() -> str:
    """Return by how much the deviation grows over that of exact norms, in percent; markdown."""
    header = [f"{runs} runs of {length}: {' / '.join(f'{share:.0%}' for share in SHARES)}" for runs, length in FORMS]
    lines = [f"| deltas | {' | '.join(header)} |", "| --- |" + " --- |" * len(FORMS)]
    for name, kind in KINDS.items():
        cells = [" / ".join(f"{100 * excess:+.1f}" for excess in found) for found in _excesses(kind)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _excesses(kind: Kind) -> Iterator[list[float]]:
    rng = np.random.default_rng(1)
    tensors = np.exp(rng.normal(0, 0.5, (EXPERTS, TENSORS, 1, 1)))
    rows = kind(rng) * tensors * tensors
    exact = rows.sum(-1) * ROW
    for runs, length in FORMS:
        guessed = _estimates(rows, runs, length, rng)
        yield [_deviation(exact, guessed, share) / _deviation(exact, exact, share) - 1 for share in SHARES]


def _estimates(rows: np.ndarray, runs: int, length: int, rng: np.random.Generator) -> np.ndarray:
    squares, errors = np.empty((2, EXPERTS, TENSORS, BLOCKS))
    sampled = runs * length
    for block in range(BLOCKS):
        starts = np.array(list(_starts(runs, length, block)))
        first = np.minimum(ROW - starts % ROW, length)  # a run may go on in the next row
        row, rest = starts // ROW, np.maximum(length - first, 0)
        sums = rows[:, :, block, row] * rng.chisquare(np.broadcast_to(first, (EXPERTS, TENSORS, runs)))
        following = rows[:, :, block, np.minimum(row + 1, ROWS - 1)]
        sums += np.where(rest > 0, following * rng.chisquare(np.maximum(rest, 1), (EXPERTS, TENSORS, runs)), 0.0)
        squares[:, :, block] = sums.sum(-1) * ELEMENTS / sampled
        spread = np.sqrt(runs * sums.var(-1, ddof=1) * (1 - sampled / ELEMENTS))
        errors[:, :, block] = spread * ELEMENTS / sampled
    elements = np.full(BLOCKS, float(ELEMENTS))
    return np.stack([shrunk(squares[:, t], errors[:, t], elements)[0] for t in range(TENSORS)], axis=1)


def _starts(runs: int, length: int, block: int) -> Iterator[int]:
    for number in range(runs):
        first, stop = number * ELEMENTS // runs, (number + 1) * ELEMENTS // runs
        yield first + ((block * runs + number + 1) * _GOLDEN % (1 << 64) * (stop - first - length + 1) >> 64)


def _deviation(exact: np.ndarray, guessed: np.ndarray, share: float) -> float:
    order = np.argsort(-guessed.ravel(), kind="stable")
    left_out = exact.ravel()[order[int(share * exact.size) :]]
    return float(np.sqrt(left_out.sum() / exact.sum()))
