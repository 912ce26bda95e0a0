"""The content of a slot: digests of what is stored, and of what is computed from an adapter's stored factors."""

from __future__ import annotations

from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import digest_at, record_digest, sampled_pin
from mergepipe.plan.sampling import sampled_sources
from mergepipe.plan.values import InputRef, LoraRef, OutputPlan


def source_pin(plan: OutputPlan, source: str, index: SourceIndex) -> bytes | None:
    """Return the pin of a source of an output (`mergepipe.digest.sampled_pin`), or None while it is not known.

    It follows from the plan alone which one that is: the digest of all content, or the fingerprint where the output
    does not read the source whole.
    """
    return _pin(source, index, sampled=source in sampled_sources(plan))


def source_pins(plan: OutputPlan, index: SourceIndex) -> dict[str, bytes | None]:
    """Return the pins of all sources of an output, by name: `source_pin` of each."""
    sampled = frozenset(sampled_sources(plan))
    return {source: _pin(source, index, sampled=source in sampled) for source in plan.sources}


def _pin(source: str, index: SourceIndex, *, sampled: bool) -> bytes | None:
    if not sampled:
        return index.digest(source)
    fingerprint = index.fingerprint(source)
    return None if fingerprint is None else sampled_pin(fingerprint)


def slot_digest(ref: InputRef, index: SourceIndex) -> bytes | None:
    """Return the tensor digest of a slot, or None while any of its content is not known."""
    if ref.lora is None:
        partial = ref.levels is not None
        return index.partial(ref.source, ref.info, ref.levels or b"") if partial else index.tensor(ref.source, ref.info)
    factors = known_factors(ref.lora, index)
    on = None if ref.lora.on is None else index.tensor(ref.lora.on.source, ref.lora.on.info)
    if factors is None or (ref.lora.on is not None and on is None):
        return None
    return record_digest("lora-tensor", factors, on)


def slot_blocks(ref: InputRef, index: SourceIndex) -> bytes | None:
    """Return the packed block digests of a slot, or None while any of its content is not known.

    A block that is never read stands there with the digest of its sample.
    """
    if ref.lora is None and ref.levels is not None:
        return index.pins(ref.source, ref.info, ref.levels)
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
