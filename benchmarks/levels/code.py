"""The code itself, on one core: how quickly deltas are coded and decoded, and what they then take."""

from __future__ import annotations

import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from benchmarks.levels.results import Json
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.levels import LEVEL_BITS, LEVELS

ROW, ROWS, TILE = 896, 292, 1 << 16
"""The blocks of a matrix with rows of 896, and the tiles of the engine."""


def measure(rounds: int) -> Json:
    """Return rates in elements per second of one thread, the best of several rounds."""
    draw = np.random.default_rng(0)
    sizes = np.exp(draw.normal(0, 0.3, (ROWS, 1))) * 2e-3
    base = draw.normal(0, 0.02, (ROWS, ROW)).astype(ml_dtypes.bfloat16).astype(np.float32)
    moved = (base + draw.normal(0, 1, (ROWS, ROW)) * sizes).astype(ml_dtypes.bfloat16).astype(np.float32)
    delta = (moved - base).ravel()
    code, out = encode_block(delta, ROW), np.empty(TILE, np.float32)
    norm = float(np.sqrt(np.square(delta, dtype=np.float64).sum()))

    def decode(level: int) -> None:
        decoder = BlockDecoder(code.chunks[:level], delta.size, ROW)
        for start in range(0, delta.size, TILE):
            decoder.fill(start, out[: min(TILE, delta.size - start)])

    levels = [
        {
            "bits": LEVEL_BITS[level - 1],
            "bytes": sum(map(len, code.chunks[:level])) / delta.size,
            "residual": float(code.residuals[level - 1]) / norm,
            "decode": delta.size / _best(lambda level=level: decode(level), rounds),
        }
        for level in range(1, LEVELS + 1)
    ]
    return {
        "elements": delta.size,
        "encode": delta.size / _best(lambda: encode_block(delta, ROW), rounds),
        "levels": levels,
        "share_of_bf16": sum(map(len, code.chunks)) / (2 * delta.size),
    }


def _best(work: Callable[[], object], rounds: int) -> float:
    """Return the CPU seconds of the quickest of several runs."""
    found = []
    for _ in range(max(rounds, 3) * 4):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)
