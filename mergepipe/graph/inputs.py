"""The content of a slot: digests of what is stored, and of what is computed from an adapter's stored factors."""

from __future__ import annotations

from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import digest_at, record_digest
from mergepipe.plan.values import InputRef, LoraRef


def slot_digest(ref: InputRef, index: SourceIndex) -> bytes | None:
    """Return the tensor digest of a slot, or None while any of its content is not known."""
    if ref.lora is None:
        return index.tensor(ref.source, ref.info)
    factors = known_factors(ref.lora, index)
    on = None if ref.lora.on is None else index.tensor(ref.lora.on.source, ref.lora.on.info)
    if factors is None or (ref.lora.on is not None and on is None):
        return None
    return record_digest("lora-tensor", factors, on)


def slot_blocks(ref: InputRef, index: SourceIndex) -> bytes | None:
    """Return the packed block digests of a slot, or None while any of its content is not known."""
    if ref.lora is None:
        return index.blocks(ref.source, ref.info)
    factors = known_factors(ref.lora, index)
    on = None if ref.lora.on is None else index.blocks(ref.lora.on.source, ref.lora.on.info)
    if factors is None or (ref.lora.on is not None and on is None):
        return None
    count = ref.grid(index.geometry).count
    return b"".join(
        lora_block(factors, block, digest_at(on, block))
        for block in range(count)
    )


def known_factors(lora: LoraRef, index: SourceIndex) -> bytes | None:
    """Return the digest of an adapter's delta, from the digests of its factors; None while one is not known."""
    a, b = (index.tensor(factor.source, factor.info) for factor in (lora.a, lora.b))
    return None if a is None or b is None else factors_digest(lora, a, b)


def factors_digest(lora: LoraRef, a: bytes, b: bytes) -> bytes:
    """Return the digest of an adapter's delta from the tensor digests of its factors."""
    return record_digest("lora", a, b, lora.scaling, lora.transposed)


def lora_block(factors: bytes, block: int, on: bytes | None) -> bytes:
    """Return the digest of one block of an adapter's delta, or of the values with it where ``on`` is a block digest.

    All of the factors count, not the rows that the block needs: they are small, and change together.
    """
    return record_digest("lora-block", factors, block, on)
