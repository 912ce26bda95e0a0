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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.digest import record_digest
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.prices import block_costs, compared_slots, whole_tensor
from mergepipe.plan.values import InputRef

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.plan.budget import BudgetTensor

    Array = np.ndarray[Any, Any]

# Bumped when samples lie elsewhere, or give other numbers.
SAMPLES_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the samples of one tensor's blocks came to.

    Attributes
    ----------
    products
        Packed inner products of base and deltas, as `mergepipe.operators.norms.GramOfInputs`; estimates of those of
        whole blocks, float64 ``(blocks, count * (count + 1) / 2)``.
    errors
        Standard errors of the squares of the norms of the deltas, float64 ``(blocks, count - 1)``.
    """

    products: Array
    errors: Array

    def encode(self) -> bytes:
        """Return both as bytes."""
        return self.products.astype("<f8").tobytes() + self.errors.astype("<f8").tobytes()

    @classmethod
    def decode(cls, data: bytes, count: int, blocks: int) -> Estimates:
        """Return what `encode` wrote, of so many inputs and blocks."""
        import numpy as np

        values, width = np.frombuffer(data, "<f8"), count * (count + 1) // 2
        return cls(
            products=values[: blocks * width].reshape(blocks, width),
            errors=values[blocks * width :].reshape(blocks, count - 1),
        )


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

    from mergepipe.operators.norms import scattered, squares, total_gram

    tensor = recipe.tensor
    live = compared_slots(tensor)
    count = len(live) + 1
    found, errors = np.zeros((2, len(tensor.experts), recipe.facts.blocks))
    at = [slot - 1 for slot in live]
    found[at], errors[at] = shrunk(squares(estimates.products, count)[1:], estimates.errors.T, _elements(recipe))
    return whole_tensor(
        recipe,
        found,
        scattered(total_gram(estimates.products, count), (0, *live), len(tensor.slots)),
        tensor.operator.influence(tensor.prepared, recipe.facts, None),
        costs=block_costs(recipe),
        errors=errors,
    )


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
