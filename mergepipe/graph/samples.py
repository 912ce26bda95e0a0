"""What a budget is planned from where blocks are measured by samples: estimates, and how far they may be off.

A sample's sum of squares times what share it is of the block estimates the block's. How far it is off is estimated from
how much the runs of a sample (`mergepipe.checkpoints.samples`) differ among themselves: with ``k`` runs of ``n`` of the
``N`` elements, whose sums have the variance ``s^2``, the standard error is ``N / n * sqrt(k * s^2 * (1 - n / N))``
(Cochran 1977, Sampling Techniques, chapter 2).

Whoever picks the largest of many estimates picks those that happen to be too large. So the estimates of the blocks of a
tensor are drawn towards their mean, by the share of their spread that is the samples' (Efron and Morris 1973, Stein's
estimation rule and its competitors: an empirical Bayes approach).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.digest import record_digest
from mergepipe.errors import CacheError
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.prices import block_costs, compared_slots, whole_tensor
from mergepipe.plan.values import InputRef
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.plan.budget import BudgetTensor

    Array = np.ndarray[Any, Any]

# Bumped when samples lie elsewhere, give other numbers, or these are written in another way. What the catalog holds of
# samples themselves goes by its schema: where they lie elsewhere, that must change, too.
SAMPLES_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the samples of one tensor's blocks came to.

    Attributes
    ----------
    products
        Packed inner products of base and deltas in the first run of each sample, as
        `mergepipe.operators.norms.GramOfInputs`; float64 ``(blocks, count * (count + 1) / 2)``. They say how far
        vectors point in one direction, not how long they are.
    squares, errors
        Estimates of the squares of the norms of whole blocks, those of base and deltas, and their standard errors;
        float64 ``(blocks, count)``.
    """

    products: Array
    squares: Array
    errors: Array

    def encode(self) -> bytes:
        """Return all as bytes."""
        return b"".join(part.astype("<f8").tobytes() for part in (self.products, self.squares, self.errors))

    @classmethod
    def decode(cls, data: bytes, count: int, blocks: int) -> Estimates:
        """Return what `encode` wrote, of so many inputs and blocks.

        Raises
        ------
        CacheError
            If it has another length.
        """
        import numpy as np

        values, width = np.frombuffer(data, "<f8"), count * (count + 1) // 2
        if values.size != blocks * (width + 2 * count):
            raise CacheError(
                "estimates in the catalog have another length than their tensor",
                hint="run `mergepipe cache verify`, then the command again; they are taken anew where they are missing",
            )
        squares, errors = values[blocks * width :].reshape(2, blocks, count)
        return cls(products=values[: blocks * width].reshape(blocks, width), squares=squares, errors=errors)


def sampled_refs(recipe: TensorRecipe) -> tuple[InputRef, ...]:
    """Return the inputs that are compared: the base, then the experts that are inputs, by name."""
    slots = recipe.tensor.slots
    return tuple(ref for slot in (0, *compared_slots(recipe.tensor)) if (ref := slots[slot]) is not None)


def open_estimates(store: StatisticStore, recipe: TensorRecipe) -> StatisticTable:
    """Return the table that has the estimates of a tensor, all blocks in one entry."""
    refs = sampled_refs(recipe)
    kind = record_digest("samples", SAMPLES_VERSION, recipe.geometry.block_elements, [ref.info.dtype for ref in refs])
    place = record_digest("place", [ref.info.name for ref in refs])
    owner = record_digest("owner", [ref.source for ref in refs])
    return store.table(kind, place, owner, 1)


def estimates_key(recipe: TensorRecipe, samples: Sequence[bytes]) -> bytes:
    """Return the key of a tensor's estimates, from the packed digests of the samples of its inputs."""
    return record_digest("samples", recipe.tensor.shape, list(samples))


def known_estimates(recipe: TensorRecipe, index: SourceIndex, store: StatisticStore) -> Estimates | None:
    """Return the estimates of a tensor from what the cache knows alone; None if anything is missing."""
    refs = sampled_refs(recipe)
    samples = [index.samples(ref.source, ref.info) for ref in refs]
    known = [packed for packed in samples if packed is not None]
    table = open_estimates(store, recipe)
    if len(known) < len(refs) or not table.holds(estimates_key(recipe, known)):
        return None
    table.enter(0, estimates_key(recipe, known), None)
    return Estimates.decode(next(iter(table)), len(refs), recipe.facts.blocks)


def estimated_tensor(recipe: TensorRecipe, estimates: Estimates) -> BudgetTensor:
    """Return what a budget is planned from for one tensor, from estimates.

    Whether a block is the same as another is not known before it is read, so each costs what it takes to read.
    """
    import numpy as np

    from mergepipe.operators.norms import scattered

    tensor = recipe.tensor
    live = compared_slots(tensor)
    found, errors = np.zeros((2, len(tensor.experts), recipe.facts.blocks))
    squares, doubts = shrunk(estimates.squares.T, estimates.errors.T, _elements(recipe))
    at = [slot - 1 for slot in live]
    found[at], errors[at] = squares[1:], doubts[1:]
    return whole_tensor(
        recipe,
        found,
        scattered(estimated_gram(estimates.products, squares), (0, *live), len(tensor.slots)),
        tensor.operator.influence(tensor.prepared, recipe.facts, None),
        costs=block_costs(recipe),
        errors=errors,
    )


def estimated_gram(products: Array, squares: Array) -> Array:
    """Return an estimate of the Gram matrix of a whole tensor, float64 ``(count, count)``.

    Two vectors of a block have the cosine of their samples and the lengths of their estimates: so no sum of vectors is
    longer than the sum of their lengths, as with exact products.

    Parameters
    ----------
    products
        Of the samples, packed, ``(blocks, count * (count + 1) / 2)``.
    squares
        Of the lengths of whole blocks, ``(count, blocks)``.
    """
    import numpy as np

    from mergepipe.operators.vectors import symmetric

    gram = symmetric(products.T, len(squares))
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("iib->ib", gram))
        factors = np.where(lengths > 0, np.sqrt(squares) / np.where(lengths > 0, lengths, 1.0), 0.0)
        gram = gram * factors[:, None] * factors
        places = np.arange(len(squares))
        gram[places, places] = squares  # also where the sample's first run has nothing of it
        # cumsum adds from the first block to the last, one after the other; sum() may add in pairs
        return np.asarray(np.cumsum(gram, axis=-1)[..., -1])


def _elements(recipe: TensorRecipe) -> Array:
    """Return how many elements each block has that is merged, float64 ``(blocks,)``."""
    import numpy as np

    return np.array([recipe.merged_elements(block) for block in range(recipe.facts.blocks)], np.float64)


def shrunk(squares: Array, errors: Array, elements: Array) -> tuple[Array, Array]:
    """Draw the estimates of blocks towards the mean of their tensor, and return them with their standard errors.

    Parameters
    ----------
    squares, errors
        Estimates and standard errors, float64 ``(experts, blocks)``.
    elements
        Of each block, ``(blocks,)``: what is compared is the mean square of an element.
    """
    import numpy as np

    if squares.shape[1] < 2 or not np.isfinite(squares).all() or not np.isfinite(errors).all():
        return squares, errors
    density, noise = squares / elements, (errors / elements) ** 2
    middle = (np.add.reduce(squares, axis=1) / np.add.reduce(elements))[:, None]
    spread = np.add.reduce((density - middle) ** 2, axis=1, keepdims=True) / (squares.shape[1] - 1)
    doubt = np.add.reduce(noise, axis=1, keepdims=True) / squares.shape[1]
    kept = np.where(spread > doubt, 1.0 - doubt / np.where(spread > 0, spread, 1.0), 0.0)
    return (middle + kept * (density - middle)) * elements, errors * np.sqrt(kept)
