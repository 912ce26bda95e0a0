"""Computing one block on the CPU: cache-sized tiles, reused buffers, one rounding at the end.

A tile is widened to the work dtype, the operator is applied, and the result is rounded to nearest even into the
output buffer. Tiles are cut without regard to what they hold, so no result may depend on where they begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mergepipe.dtypes import numpy_dtype
from mergepipe.engine.files import Files
from mergepipe.engine.limits import TILE_ELEMENTS
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.operators.contract import BlockInputs, Reduction, Statistic
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.joint import JointDecoder
from mergepipe.values import dataclass

# As many decoded deltas or more are quicker to decode and sum up together.
_JOINED = 2

# The bits of infinity in the 16-bit floats: those of NaN, but for the sign, are larger, and all others smaller.
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
_SIGN = 1 << 15
# For how many sizes of tiles views of buffers are kept.
_SIZES = 8

Array = np.ndarray[Any, Any]


class Scratch:
    """What one worker has from job to job: buffers, for fresh memory costs more than the arithmetic, and open files.

    Attributes
    ----------
    files
        The sources that it reads; whoever made this closes it.
    tile_elements
        How many elements are worked on at a time (`tile_elements`).
    """

    def __init__(self, tile_elements: int = TILE_ELEMENTS) -> None:
        self.tile_elements = tile_elements
        self.files = Files()
        self._bytes: dict[object, Array] = {}
        self._wide: dict[tuple[object, str], Array] = {}
        self._rooms: dict[tuple[str, int], _Rooms] = {}

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def buffer(self, name: object, nbytes: int) -> memoryview:
        """Return ``nbytes`` writable bytes under a name; what was there before is lost."""
        have = self._bytes.get(name)
        if have is None or have.nbytes < nbytes:
            have = self._bytes[name] = np.empty(nbytes, np.uint8)
        return memoryview(have[:nbytes].data)

    def rooms(self, work: str, size: int) -> Callable[[int], Array]:
        """Return what gives the operators' buffers by their number, in the work dtype, ``(size,)``."""
        found = self._rooms.get((work, size))
        if found is None:
            if len(self._rooms) == _SIZES:
                self._rooms.clear()
            found = self._rooms[work, size] = _Rooms(self, work, size)
        return found.__getitem__

    def tile(self, name: object, work: str, size: int) -> Array:
        """Return a buffer of this name in the work dtype, ``(size,)``; numbers from 0 on are slots."""
        key = (name, work)
        have = self._wide.get(key)
        if have is None or have.size < size:  # a row may be longer than a tile
            have = self._wide[key] = np.empty(max(size, self.tile_elements), np.dtype(work))
            self._rooms.clear()  # they may be of the one that was too small
        return have[:size]


class _Rooms(dict[int, Array]):
    """An operator's buffers for tiles of one size by their number. They are asked for between any two operations."""

    def __init__(self, scratch: Scratch, work: str, size: int) -> None:
        super().__init__()
        self._scratch = scratch
        self._work = work
        self._size = size

    def __missing__(self, number: int) -> Array:
        found = self[number] = self._scratch.tile(-1 - number, self._work, self._size)
        return found


def typed(data: memoryview, dtype: str) -> Array:
    """Return bytes as a 1-D array of a mergeable dtype, without a copy."""
    return np.frombuffer(data, dtype=numpy_dtype(dtype))


def compute_block(
    recipe: TensorRecipe,
    block: int,
    inputs: Sequence[Array | BlockDecoder | None],
    aliases: Sequence[int | None],
    reduction: Reduction | None,
    out: Array,
    scratch: Scratch,
) -> None:
    """Compute the merged elements of a block into ``out``.

    Parameters
    ----------
    inputs
        Per slot its values in its stored dtype, ``(n,)`` or more; what decodes its delta, where an approximation is
        read; None where the slot is not read.
    aliases
        Per slot the slot whose values stand for it, or None where it is no input.
    out
        The output values in the output dtype, ``(n,)``.
    """
    tensor = recipe.tensor
    with np.errstate(all="ignore"):  # what is not finite is found in the result, and named
        cut = _cut(recipe.rowwise, tensor.uses_base, recipe.operator.widens)
        tiles = _tiles(recipe, block, inputs, aliases, out.size, scratch, cut)
        for tile in tiles:
            result = recipe.operator.apply(tile, tensor.prepared, reduction)
            start = tile.start - recipe.start(block)
            _round(result, out[start : start + tile.shape[0]])


def measure_block(
    recipe: TensorRecipe,
    statistic: Statistic,
    block: int,
    inputs: Sequence[Array | None],
    aliases: Sequence[int | None],
    scratch: Scratch,
) -> bytes:
    """Return a statistic of the merged elements of a block; parameters as in `compute_block`."""
    size = recipe.merged_elements(block)
    with np.errstate(all="ignore"):
        cut = _cut(statistic.rowwise, True, statistic.widens, statistic.widens_base)
        tiles = _tiles(recipe, block, inputs, aliases, size, scratch, cut)
        return statistic.measure(tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What tiles look like.

    Attributes
    ----------
    rowwise
        Whether they hold whole rows.
    base
        Whether the base is an input by itself: one that only stands for experts is not shown.
    stored
        Whether experts come in their stored dtypes.
    stored_base
        Whether the base does too, where no delta is to be added to it.
    """

    rowwise: bool
    base: bool
    stored: bool
    stored_base: bool = False


@functools.cache
def _cut(rowwise: bool, base: bool, stored: bool, stored_base: bool = False) -> _Cut:
    return _Cut(rowwise=rowwise, base=base, stored=stored, stored_base=stored_base)


def _tiles(
    recipe: TensorRecipe,
    block: int,
    inputs: Sequence[Array | BlockDecoder | None],
    aliases: Sequence[int | None],
    size: int,
    scratch: Scratch,
    cut: _Cut,
) -> Iterator[BlockInputs]:
    """Cut the first ``size`` elements of a block into tiles, in the work dtype as far as the cut says."""
    tensor, facts = recipe.tensor, recipe.facts
    joint, aliases = _join(recipe, inputs, aliases)
    delta = [ref is not None and ref.lora is not None and ref.lora.on is None for ref in tensor.slots]
    for slot, alias in enumerate(aliases):
        decoded = alias is not None and isinstance(inputs[alias], BlockDecoder)
        delta[slot] |= decoded and tensor.uses_base
    length = scratch.tile_elements
    if cut.rowwise and not facts.splits_row:
        length = max(1, length // facts.row_elements) * facts.row_elements
    elif unit := max((source.unit_elements for source in inputs if isinstance(source, BlockDecoder)), default=0):
        length = max(1, length // unit) * unit  # what is decoded is written in place then
    work, dtype, non_finite = tensor.work, np.dtype(tensor.work), tensor.params.values["non_finite"] == "allow"
    sums: tuple[Array, ...] = ()
    first, memo, some_delta = recipe.start(block), dict[Any, Any](), any(delta[1:])
    for start in range(0, size, length):
        stop = min(start + length, size)
        wide: list[Array | None] = []
        for slot, alias in enumerate(aliases):
            if alias is not None and alias != slot:
                wide.append(wide[alias])
            elif alias is None or (source := inputs[slot]) is None:
                wide.append(None)
            elif isinstance(source, BlockDecoder):
                wide.append(_decode(source, start, stop, None if delta[slot] else wide[0], slot, work, scratch))
            elif source.dtype == dtype or (cut.stored if slot else cut.stored_base and not some_delta):
                wide.append(source[start:stop])
            else:
                wide.append(_widen(source[start:stop], slot, work, scratch))
        experts, deltas = wide[1:], list[Array | None]()
        if some_delta:
            experts = [None if is_delta else part for part, is_delta in zip(wide[1:], delta[1:], strict=True)]
            deltas = [part if is_delta else None for part, is_delta in zip(wide[1:], delta[1:], strict=True)]
        if joint is not None:
            sums = (scratch.tile("sum", work, stop - start),)
            joint.fill(start, sums[0])
        yield BlockInputs(
            xp=np,  # from 2.0 on numpy is a namespace of the array API; array-api-compat's copy takes 0.1 s to import
            base=wide[0] if cut.base else None,
            experts=tuple(experts),
            deltas=tuple(deltas),
            sums=sums,
            shape=(stop - start,),
            dtype=dtype,
            non_finite=non_finite,
            scratch=scratch.rooms(work, stop - start),
            start=first + start,
            block=block,
            row_elements=facts.row_elements,
            memo=memo,
        )


def _join(
    recipe: TensorRecipe, inputs: Sequence[Array | BlockDecoder | None], aliases: Sequence[int | None]
) -> tuple[JointDecoder | None, Sequence[int | None]]:
    """Return what decodes several deltas together, where that is all that is wanted, and the slots that are left."""
    if not recipe.operator.sums_deltas:
        return None, aliases
    found: dict[int, BlockDecoder] = {}
    for slot, alias in enumerate(aliases):
        source = None if alias is None else inputs[alias]
        if isinstance(source, BlockDecoder):
            found[slot] = source
    if len(found) < _JOINED:
        return None, aliases
    weights = [recipe.tensor.prepared.coefficients[slot - 1] for slot in found]
    joint = JointDecoder(list(found.values()), weights, np.dtype(recipe.tensor.work))
    return joint, [None if slot in found else alias for slot, alias in enumerate(aliases)]


def add_delta(values: Array, delta: Array) -> Array:
    """Return stored values plus a delta, in the dtype of the delta."""
    with np.errstate(all="ignore"):
        return np.asarray(values.astype(delta.dtype) + delta)


def _decode(
    source: BlockDecoder, start: int, stop: int, base: Array | None, slot: int, work: str, scratch: Scratch
) -> Array:
    """Return a part of an approximate delta, or of the values that it makes with the base's."""
    out = scratch.tile(slot, work, stop - start)
    source.fill(start, out)
    return out if base is None else np.add(base, out, out=out)


def _widen(values: Array, slot: int, work: str, scratch: Scratch) -> Array:
    wide = scratch.tile(slot, work, values.size)
    np.copyto(wide, values, casting="unsafe")
    return wide


def convert(values: Array, out: Array) -> None:
    """Copy values into the output dtype, rounding once to nearest even."""
    with np.errstate(all="ignore"):
        _round(values, out)


def _round(values: Array, out: Array) -> None:
    """Round values into ``out``, once."""
    if values.dtype == np.float64 and out.dtype == numpy_dtype("BF16"):
        values = _to_odd(values)
    np.copyto(out, values, casting="unsafe")


def _to_odd(values: Array) -> Array:
    """Return float64 values as float32, inexact ones with an odd last bit, so that rounding further rounds only once.

    bfloat16 is reached through float32; rounding to nearest twice would turn some values just above a tie into ties.
    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
    to odd".
    """
    narrow = values.astype(np.float32)
    wide = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    bits -= np.abs(wide) > np.abs(values)  # towards zero; an overflow becomes the largest finite value
    bits |= (wide != values) & np.isfinite(values)
    return narrow


@functools.cache
def _infinity(dtype: np.dtype[Any]) -> int | None:
    return _INFINITY.get(dtype.name)


def all_finite(values: Array, scratch: Scratch) -> bool:
    """Return whether no value (1-D, of any mergeable dtype) is NaN or infinite."""
    infinity = _infinity(values.dtype)
    length = scratch.tile_elements
    for start in range(0, values.size, length):
        part = values[start : start + length]
        if infinity is None:
            room = np.frombuffer(scratch.buffer("finite", length), np.bool_)
            if not np.isfinite(part, out=room[: part.size]).all():
                return False
            continue
        # Bits that occur: where those of an exponent are not all among them, no exponent has all. So it is for weights
        # below 2, and one look does.
        if int(np.bitwise_or.reduce(part.view(np.uint16))) & infinity == infinity:
            # As integers, those of one sign lie above all of the other: two looks take less than one mask.
            negative = int(np.maximum.reduce(part.view(np.uint16))) - _SIGN
            if max(negative, int(np.maximum.reduce(part.view(np.int16)))) >= infinity:
                return False
    return True
