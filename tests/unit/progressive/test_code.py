"""The code of a block: residuals are bounds, levels get better, any range can be decoded, nothing depends on chance."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.progressive import check_code, decoded, norm, normal
from support.quick import examples

from mergepipe.digest import content_digest
from mergepipe.errors import PackError
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import _row_sums, encode_block, encode_zero
from mergepipe.progressive.levels import LEVEL_BITS, LEVELS, MIN_ELEMENTS, STAGE_BITS, pack_key

SHAPES = [(256, 1024), (292, 896), (17, 257), (40, 4096), (3, 9000), (1, 300_000), (700, 65), (3000, 7), (5000, 1)]


@pytest.mark.parametrize(("rows", "row_elements"), SHAPES)
def test_residuals_of_ordinary_deltas_are_tight_bounds(rows, row_elements):
    check_code(normal(0, rows, row_elements), row_elements, tight=1e-6)


def test_levels_of_a_normal_delta_err_about_as_little_as_scalar_quantisers_can():
    code = check_code(normal(1, 256, 1024), 1024)
    shares = code.residuals / norm(normal(1, 256, 1024))
    # Max, "Quantizing for minimum distortion", 1960; 6 and 8 bits by Bennett's formula.
    best = np.array([0.6028, 0.3428, 0.1858, 0.0975, 0.04999, 0.02533, 0.00644])
    assert (shares <= best * np.array([1.02, 1.02, 1.03, 1.04, 1.06, 1.08, 1.12])).all()
    assert (shares >= best * 0.98).all()


# Of a row: nothing, or numbers of its own size, some of which may be zeros of either sign, or one much larger.
row_sizes = st.one_of(st.just(0.0), st.floats(-45, 38).map(lambda power: 10.0**power))


@st.composite
def deltas(draw):
    """Draw a delta of whole rows of any sizes: (delta, elements of a row)."""
    row_elements = draw(st.sampled_from([1, 2, 3, 8, 63, 255, 256, 257, 1000, 8192, 8200]))
    rows = draw(st.integers(1, max(1, min(600, 20_000 // row_elements))))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.array(draw(st.lists(row_sizes, min_size=4, max_size=4)))[random.integers(0, 4, rows)]
    values = random.standard_normal((rows, row_elements)) * sizes[:, None]
    kind = draw(st.sampled_from(["normal", "sparse", "signs", "heavy", "spike", "negative zeros"]))
    if kind == "sparse":
        values *= random.random(values.shape) < 0.1
    elif kind == "signs":
        values = np.sign(values) * sizes[:, None]
    elif kind == "heavy":
        values *= np.exp(random.standard_normal(values.shape) * 3)
    elif kind == "spike":
        values.reshape(-1)[random.integers(0, values.size)] = 3e38
    elif kind == "negative zeros":
        values[random.random(values.shape) < 0.5] = -0.0
    limit = float(np.finfo(np.float32).max)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return np.clip(values, -limit, limit).astype(dtype).reshape(-1), row_elements


@given(deltas(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_residuals_are_bounds_whatever_the_delta(case, data):
    delta, row_elements = case
    code = check_code(delta, row_elements)
    start = data.draw(st.integers(0, delta.size))
    stop = data.draw(st.integers(start, delta.size))
    level = data.draw(st.integers(1, LEVELS))
    part = np.full(stop - start, np.nan, data.draw(st.sampled_from([np.float32, np.float64])))
    BlockDecoder(code.chunks[:level], delta.size, row_elements).fill(start, part)
    assert np.array_equal(part, decoded(code, level, delta.size, row_elements)[start:stop])


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-37, 1e-36, 1e-30, 1e-20, 1e20, 1e30, 1e35, 1e36, 1e38])
def test_residuals_are_bounds_at_every_size(scale):
    check_code((np.random.default_rng(0).uniform(-3, 3, 4096) * scale).astype(np.float32), 512)


@pytest.mark.parametrize(("power", "is_coded"), [(-119.7, True), (-120, False), (119.99, True), (120, False)])
def test_scales_end_where_the_document_says(power, is_coded):
    delta = (np.random.default_rng(0).choice([-1.0, 1.0], 4096) * 2.0**power).astype(np.float32)
    code = check_code(delta, 512)
    assert any(code.chunks) == is_coded
    assert np.isfinite(code.residuals[0]) == (power < 120)


def test_residuals_are_bounds_for_float64_beyond_the_range_of_its_squares():
    delta = np.random.default_rng(0).standard_normal(4096) * 1e-200
    code = check_code(delta, 512)
    assert code.chunks == (b"",) * LEVELS
    assert 0 < code.residuals[0] < norm(delta) * (1 + 1e-6)


def test_residuals_of_float64_are_against_what_was_given():
    delta = normal(0, 64, 512).astype(np.float64) * (1 + 1e-9)
    check_code(delta, 512, tight=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300, 3e38])
def test_a_block_that_has_no_code_says_so(value):
    delta = normal(0, 20, 512).astype(np.float64)
    delta[777] = value
    code = encode_block(delta, 512)
    assert code.chunks == (b"",) * LEVELS
    assert np.isinf(code.residuals).all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_delta_of_zeros_takes_no_bytes(zero):
    code = encode_block(np.full(5000, zero, np.float32), 100)
    assert code.chunks == encode_zero().chunks == (b"",) * LEVELS
    assert not code.residuals.any()
    assert not encode_zero().residuals.any()
    assert not decoded(code, 3, 5000, 100).any()


def test_rows_of_zeros_take_no_bits():
    delta = normal(0, 64, 1024).reshape(64, 1024)
    whole = encode_block(delta.reshape(-1), 1024)
    delta[1::2] = 0
    half = check_code(delta.reshape(-1), 1024, tight=1e-6)
    for stage, bits in enumerate(STAGE_BITS):
        assert len(whole.chunks[stage]) - len(half.chunks[stage]) == bits * 32 * 128
    values = decoded(half, 2, delta.size, 1024).reshape(64, 1024)
    assert not values[1::2].any()
    assert values[::2].all()


def test_discrete_deltas_are_exact_but_for_the_rounding_of_points():
    delta = np.random.default_rng(0).choice(np.array([0, 1, -1, 2, -4], np.float32), 8192) * np.float32(2**-9)
    code = check_code(delta, 8192)
    assert code.residuals[3] <= norm(delta) * 2**-10


@pytest.mark.parametrize(
    ("rows", "row_elements"), [(16, 1024), (16_384, 1), (64, 256), (32, 513), (2, 8192), (1, 2**18)]
)
def test_all_stages_take_at_most_11_twentieths_of_bf16(rows, row_elements):
    elements = rows * row_elements
    assert elements >= MIN_ELEMENTS
    code = encode_block(normal(0, rows, row_elements), row_elements)
    header_share = 44 * LEVELS + 160
    assert sum(code.sizes) + header_share <= 0.55 * 2 * elements


def test_bytes_depend_on_the_values_alone():
    """Not on threads, on what was coded before, or on where the values lie in memory."""
    delta = normal(3, 100, 896)
    want = encode_block(delta, 896)
    found = []

    def work(seed):
        for number in range(3):
            encode_block(normal(seed + number, 50 + number, 333), 333)
            moved = np.empty(delta.size + 1, np.float32)[1:]
            moved[:] = delta
            found.append(encode_block(moved, 896))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert all(code.chunks == want.chunks and np.array_equal(code.residuals, want.residuals) for code in found)


def test_bytes_are_those_of_this_code_version():
    """A change here changes packs that people have: it needs a new `CODE_VERSION`."""
    whole = np.arange(-5000, 5000, dtype=np.float32) * np.float32(0.75)
    cases = [(whole, 1), (whole, 2500), (whole * whole * whole, 250), (np.where(whole % 5 == 0, whole, 0), 100)]
    cases.append((np.sqrt(np.abs(whole.astype(np.float64))) * np.sign(whole), 10))
    digests = []
    for delta, row_elements in cases:
        code = encode_block(delta, row_elements)
        digests.append(content_digest(b"".join(code.chunks) + code.residuals.astype("<f8").tobytes()).hex()[:16])
    assert digests == GOLDEN


GOLDEN = ["faa71cf97177b0cb", "70a6450b2fb06fee", "4e998ea8c2b84a8e", "80712a763377ba80", "801e4a0d78439e1b"]


def test_sums_are_taken_in_one_order_everywhere():
    """Slab after slab, as numpy adds along an axis that is not the last; then by halves."""
    wide = np.random.default_rng(0).standard_normal((7, 1024)) ** 2
    slabs = wide.reshape(7, 16, 64)
    total = slabs[:, 0].copy()
    for number in range(1, 16):
        total = total + slabs[:, number]
    for half in (32, 16, 8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    assert np.array_equal(_row_sums(wide.copy()), total[:, 0])


@pytest.mark.parametrize("level", range(1, LEVELS + 1))
def test_a_decoder_knows_its_level_and_its_units(level):
    code = encode_block(normal(0, 10, 300), 300)
    decoder = BlockDecoder(code.chunks[:level], 3000, 300)
    assert (decoder.level, decoder.unit_elements) == (level, 300)


def test_parts_that_end_at_units_are_decoded_in_place_and_others_alike():
    delta = normal(0, 300, 320)
    code = encode_block(delta, 320)
    for level in range(1, LEVELS + 1):
        whole = decoded(code, level, delta.size, 320)
        decoder = BlockDecoder(code.chunks[:level], delta.size, 320)
        for start, stop in [(0, 320), (320, 640 * 7), (1, 2), (319, 321), (70_001, 96_000), (95_999, 96_000), (5, 5)]:
            part = np.empty(stop - start, np.float32)
            decoder.fill(start, part)
            assert np.array_equal(part, whole[start:stop])


@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_every_way_to_apply_scales_gives_the_same_numbers(spread):
    """Few scales are in the tables, many are multiplied with."""
    delta = normal(7, 400, 256, spread)
    code = check_code(delta, 256)
    for level, bits in enumerate(LEVEL_BITS, 1):
        values = decoded(code, level, delta.size, 256)
        assert len(np.unique(values)) > 2**bits
        one = BlockDecoder(code.chunks[:level], delta.size, 256)
        rows = [np.empty(256, np.float32) for _ in range(400)]
        for number, row in enumerate(rows):
            one.fill(number * 256, row)
        assert np.array_equal(np.concatenate(rows), values)


def _damaged(chunk: bytes, change: str) -> bytes:
    match change:
        case "short":
            return chunk[:-1]
        case "long":
            return chunk + b"\0"
        case "scales too large":
            return b"\xff\x7f" + chunk[2:]
        case "scales too small":
            return b"\x00\x80" + chunk[2:]
        case "overflow":
            return b"\xff\x00" + chunk[2:12] + b"\xff\x7b" + chunk[14:]
        case "points":
            return chunk[:12] + b"\x00\x7c" + chunk[14:]
        case _:
            return chunk[:2] + bytes(10) + chunk[12:16]


@pytest.mark.parametrize(
    "change", ["short", "long", "scales too large", "scales too small", "points", "zero", "overflow"]
)
def test_chunks_that_no_encoder_makes_are_refused(change):
    code = encode_block(normal(0, 10, 300), 300)
    with pytest.raises(PackError):
        BlockDecoder([_damaged(code.chunks[0], change)], 3000, 300)


def test_chunks_of_a_block_are_all_there_or_none():
    code = encode_block(normal(0, 10, 300), 300)
    with pytest.raises(PackError, match="stage 2 has 0 bytes"):
        BlockDecoder([code.chunks[0], b""], 3000, 300)


def test_a_decoder_needs_chunks():
    with pytest.raises(PackError, match="0 chunks"):
        BlockDecoder([], 3000, 300)


def test_keys_depend_on_both_digests_and_the_geometry():
    first, second = bytes(32), bytes(31) + b"\1"
    keys = {pack_key(first, second), pack_key(second, first), pack_key(first, first), pack_key(first, second, 64)}
    assert len(keys) == 4
    assert pack_key(first, second) in keys
