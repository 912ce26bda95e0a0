"""The inner products of a tensor's base and deltas, block by block: what a budget is planned and bounded from.

One statistic gives the norms of all deltas, the norm of the base, and the norm of any combination of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mergepipe.operators.contract import Array, BlockInputs, Statistic
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GramOfInputs(Statistic):
    """The inner products of the base and of the deltas of all experts in `slots`, which begin with the base.

    Packed float64, as `mergepipe.operators.gram.GramOfDeltas`; the base is the first vector.
    """

    name: ClassVar = "gram_of_inputs"
    version: ClassVar = 1
    widens: ClassVar = True
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: the numbers follow from the inputs."""
        return ()

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the inner products of a block; see `Statistic.measure`."""
        from mergepipe.operators.gram import packed_products
        from mergepipe.operators.vectors import fill_deltas

        deltas = fill_deltas([slot - 1 for slot in self.slots[1:]])

        def fill(inputs: BlockInputs, rows: Array) -> bool:
            rows[0] = inputs.base
            if not deltas(inputs, rows[1:]):
                rows[1:] = 0.0
            return True

        return packed_products(tiles, len(self.slots), fill)


def gram_blocks(blocks: Iterable[bytes], count: int) -> Array:
    """Return what `GramOfInputs` of ``count`` slots measured, float64 ``(blocks, count * (count + 1) / 2)``."""
    import numpy as np

    return np.frombuffer(b"".join(blocks), "<f8").reshape(-1, count * (count + 1) // 2)


def squares(packed: Array, count: int) -> Array:
    """Return the squares of the norms of all vectors, float64 ``(count, blocks)``."""
    import numpy as np

    at = np.cumsum([0, *range(count, 1, -1)])
    return np.ascontiguousarray(packed[:, at].T)


def total_gram(packed: Array, count: int) -> Array:
    """Return the Gram matrix of the whole tensor, added in block order, float64 ``(count, count)``."""
    import numpy as np

    from mergepipe.operators.vectors import symmetric

    with np.errstate(all="ignore"):
        # cumsum adds from the first block to the last, one after the other; sum() may add in pairs
        total = np.cumsum(packed, axis=0)[-1] if len(packed) else np.zeros(packed.shape[1])
    return symmetric(total, count)


def scattered(gram: Array, vectors: Sequence[int], count: int) -> Array:
    """Return a Gram matrix with rows and columns of zeros for the vectors that it lacks, float64 ``(count, count)``."""
    import numpy as np

    matrix = np.zeros((count, count))
    matrix[np.ix_(vectors, vectors)] = gram
    return matrix
