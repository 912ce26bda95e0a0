"""Prints the divergences (float64 bits) of fixed inputs, to compare machines and settings: see `test_arcee`."""

from __future__ import annotations

import sys

import numpy as np

from mergepipe.operators.arcee import ArceeFusion
from mergepipe.operators.divergence import Divergences
from support.operators import Run, tensor_params


def divergence_bits() -> bytes:
    """Return the divergences of 300 rows of 96 elements whose changes range from 1e-9 to 2000."""
    random = np.random.Generator(np.random.PCG64(7)).integers(-(2**40), 2**40, (2, 300, 96))
    base, change = random * 2.0**-41
    scale = np.repeat(2.0 ** np.array([-30, -13, 0, 5, 11]), 60)[:, np.newaxis]
    base *= np.maximum(scale, 0.125)
    operator = ArceeFusion()
    run = Run(operator, base, [base + change * scale], tensor_params(operator, [{}], {}))
    return b"".join(run.values(Divergences(slots=(0, 1))))


if __name__ == "__main__":
    sys.stdout.buffer.write(divergence_bits())
