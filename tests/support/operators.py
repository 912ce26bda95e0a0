"""Runs one operator over whole arrays the way the engine does: blocks, tiles, statistics, reduction, apply.

It shares the contract with the engine and nothing else, so that operators can be tested alone, and with any cutting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import array_api_compat.numpy as xp
import numpy as np

from mergepipe.operators.contract import BlockInputs, TensorFacts, TensorParams
from mergepipe.signatures import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mergepipe.operators.contract import Operator, Prepared, Reduction, Statistic

Array = Any
DEFAULT_TILE = 1 << 16


def facts_of(shape: tuple[int, ...], block_elements: int = 1 << 18) -> TensorFacts:
    """Return the facts of a tensor of this shape, cut by this geometry."""
    elements = int(np.prod(shape, dtype=np.int64))
    row = shape[-1] if len(shape) > 1 else elements
    block_row = row if len(shape) > 1 else 1
    rows = elements // block_row if block_row else 0
    per_block = max(1, block_elements // max(1, block_row))
    return TensorFacts(
        elements=elements,
        rows=elements // row if row else 0,
        row_elements=row,
        columns=elements // shape[0] if len(shape) > 1 and elements else 1,
        blocks=-(-rows // per_block),
    )


def tensor_params(
    operator: Operator,
    experts: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    *,
    base_expert: int | None = None,
    tensor: str = "layers.0.w",
) -> TensorParams:
    """Return resolved parameters: defaults of the signature, then those given."""
    specs = operator.signature.all_params()
    values = {n: s.default for n, s in specs.items() if s.scope is Scope.OUTPUT and s.default is not None}
    own = {n: params.get(n, s.default) for n, s in specs.items() if s.scope is Scope.EXPERT}
    outer = {n: v for n, v in params.items() if specs[n].scope is Scope.OUTPUT}
    return TensorParams(
        values={**values, **outer},
        experts=tuple({**own, **expert} for expert in experts),
        base_expert=base_expert,
        tensor=tensor if operator.names else "",
        sources=tuple(f"expert{i}" for i in range(len(experts))) if operator.names else (),
    )


class Run:
    """One tensor and one operator.

    Parameters
    ----------
    base
        Any float array, or None.
    experts
        Arrays of the base's shape, or None for a delta of zero.
    deltas
        Per expert a stored delta (an adapter) that takes the place of its array, or None.
    """

    def __init__(
        self,
        operator: Operator,
        base: Array | None,
        experts: Sequence[Array | None],
        params: TensorParams,
        *,
        deltas: Sequence[Array | None] | None = None,
        block_elements: int = 1 << 18,
        tile: int = DEFAULT_TILE,
        find_zeros: bool = True,
    ) -> None:
        arrays = [array for array in (base, *experts, *(deltas or ())) if array is not None]
        self.operator, self.params = operator, params
        self.shape = arrays[0].shape
        self.work = "float64" if any(array.dtype == np.float64 for array in arrays) else "float32"
        self.prepared: Prepared = operator.prepare(params, self.work)
        self.facts = facts_of(self.shape, block_elements)
        self.tile = tile
        live = self.prepared.live
        self.base = self._flat(base) if operator.uses_base else None
        self.experts = [self._flat(array) if on else None for array, on in zip(experts, live, strict=True)]
        stored = deltas or [None] * len(experts)
        self.deltas = [self._flat(array) if on else None for array, on in zip(stored, live, strict=True)]
        self.find_zeros = find_zeros
        block_row = self.shape[-1] if len(self.shape) > 1 else 1
        self.block_size = max(1, block_elements // max(1, block_row)) * block_row
        self.measured: list[tuple[Statistic, int]] = []
        self._omitted: Array | None = None
        self._anchor: Array | None = None

    def _flat(self, array: Array | None) -> Array | None:
        return None if array is None else np.asarray(array).reshape(-1).astype(self.work)

    def result(
        self, reduction: Reduction | None = None, *, omitted: Array | None = None, anchor: Array | None = None
    ) -> Array:
        """Return the merged tensor in the work dtype.

        Parameters
        ----------
        reduction
            That of the full read; made here where it is needed and not given.
        omitted, anchor
            Which blocks of the experts are left out, ``(experts, blocks)``: they are not there for an operator that
            uses the base, and the anchor's for another.
        """
        operator, prepared, facts = self.operator, self.prepared, self.facts
        operator.check(prepared, facts)
        if reduction is None:
            reduction = self.full_reduction()
        self._omitted, self._anchor = omitted, None if anchor is None else self._flat(anchor)
        out = np.zeros(facts.elements, self.work)
        rowwise = operator.rowwise(prepared, facts)
        with np.errstate(all="ignore"):
            for block in range(facts.blocks):
                for inputs in self._tiles(block, range(len(self.experts) + 1), rowwise=rowwise):
                    copied = operator.copied_input(prepared, tuple(map(inputs.has, range(len(self.experts)))))
                    values = operator.apply(inputs, prepared, reduction)
                    stop = inputs.start + inputs.shape[0]
                    out[inputs.start : stop] = values
                    if copied is not None and (copied < 0 or inputs.experts[copied] is not None):
                        want = inputs.base if copied < 0 else inputs.experts[copied]
                        assert want is None or np.array_equal(values, want, equal_nan=True)
        return out.reshape(self.shape)

    def full_reduction(self) -> Reduction | None:
        """Return the reduction of all inputs, None where the operator needs none."""
        self._omitted = None
        return self.reduction() if self.operator.reduces(self.prepared, self.facts) else None

    def reduction(self) -> Reduction:
        """Drive the operator's reduction."""
        present = [
            self.base is not None,
            *(a is not None or d is not None for a, d in zip(self.experts, self.deltas, strict=True)),
        ]
        steps = self.operator.reduce(self.prepared, self.facts, present)
        wanted = next(steps)
        try:
            while True:
                wanted = steps.send({statistic: self.values(statistic) for statistic in wanted})
        except StopIteration as stop:
            return stop.value

    def values(self, statistic: Statistic) -> list[bytes]:
        """Return a statistic's numbers for every block."""
        found = []
        with np.errstate(all="ignore"):
            for block in range(self.facts.blocks):
                self.measured.append((statistic, block))
                found.append(statistic.measure(self._tiles(block, statistic.slots, rowwise=statistic.rowwise)))
        return found

    def _tiles(self, block: int, slots: Sequence[int], *, rowwise: bool) -> Iterator[BlockInputs]:
        first = block * self.block_size
        last = min(first + self.block_size, self.facts.elements)
        row = self.facts.row_elements
        size = max(1, self.tile // row) * row if rowwise and not self.facts.splits_row else self.tile
        memo: dict[Any, Any] = {}
        scratch: dict[tuple[int, int], Array] = {}
        out = [self._omitted is not None and bool(self._omitted[i, block]) for i in range(len(self.experts))]
        gone = [out[i] or self._is_zero(i, first, last) for i in range(len(self.experts))]

        for start in range(first, last, size):
            stop = min(start + size, last)

            def number(n: int, count: int = stop - start) -> Array:
                return scratch.setdefault((n, count), np.full(count, np.nan, self.work))

            def cut(array: Array | None, slot: int, start: int = start, stop: int = stop) -> Array | None:
                if array is None or slot not in slots or (slot and gone[slot - 1] and self._anchor is None):
                    return None
                if slot and out[slot - 1]:
                    array = self._anchor
                piece = array[start:stop].copy()
                piece.flags.writeable = False
                return piece

            yield BlockInputs(
                xp=xp,
                base=cut(self.base, 0),
                experts=tuple(cut(array, i + 1) for i, array in enumerate(self.experts)),
                deltas=tuple(cut(array, i + 1) for i, array in enumerate(self.deltas)),
                shape=(stop - start,),
                dtype=np.dtype(self.work),
                non_finite=self.params.values["non_finite"] == "allow",
                scratch=number,
                start=start,
                block=block,
                row_elements=row,
                memo=memo,
            )

    def _is_zero(self, index: int, first: int, last: int) -> bool:
        array = self.experts[index]
        if not self.find_zeros or self.base is None or array is None:
            return False
        return array[first:last].tobytes() == self.base[first:last].tobytes()


def merge(
    operator: Operator,
    base: Array | None,
    experts: Sequence[Array | None],
    given: Sequence[Mapping[str, Any]] | None = None,
    *,
    base_expert: int | None = None,
    deltas: Sequence[Array | None] | None = None,
    block_elements: int = 1 << 18,
    tile: int = DEFAULT_TILE,
    find_zeros: bool = True,
    **params: Any,
) -> Array:
    """Return the merge of whole arrays; ``given`` are the experts' own parameters, ``params`` those for all."""
    resolved = tensor_params(operator, given or [{} for _ in experts], params, base_expert=base_expert)
    return Run(
        operator,
        base,
        experts,
        resolved,
        deltas=deltas,
        block_elements=block_elements,
        tile=tile,
        find_zeros=find_zeros,
    ).result()
