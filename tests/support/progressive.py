"""Deltas as tests need them, and what must hold of every code."""

from __future__ import annotations

import numpy as np

from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import EncodedBlock, encode_block
from mergepipe.progressive.levels import LEVELS


def normal(seed: int, rows: int, row_elements: int, spread: float = 0.3) -> np.ndarray:
    """Return a delta like those of fine-tunes: normal in each row, rows of different sizes."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.standard_normal((rows, 1)) * spread) * 1e-3
    return (draw.standard_normal((rows, row_elements)) * sizes).astype(np.float32).reshape(-1)


def norm(values: np.ndarray) -> float:
    """Return the Frobenius norm, whatever the range of the values."""
    wide = np.asarray(values, np.longdouble)
    return float(np.sqrt((wide * wide).sum()))


def decoded(code: EncodedBlock, level: int, elements: int, row_elements: int) -> np.ndarray:
    out = np.full(elements, np.nan, np.float32)
    BlockDecoder(code.chunks[:level], elements, row_elements).fill(0, out)
    return out


def check_code(delta: np.ndarray, row_elements: int, tight: float | None = None) -> EncodedBlock:
    """Code a finite delta; check that its residuals are bounds (and tight ones), and that levels only get better."""
    code = encode_block(delta, row_elements)
    before = np.inf
    for level in range(1, LEVELS + 1):
        values = decoded(code, level, delta.size, row_elements)
        lost, bound = norm(np.asarray(delta, np.longdouble) - values), float(code.residuals[level - 1])
        assert lost <= bound <= before
        if tight is not None:
            assert bound <= lost * (1 + tight)
        assert norm(values) <= norm(delta) * (1 + 1e-6)
        before = bound
    return code
