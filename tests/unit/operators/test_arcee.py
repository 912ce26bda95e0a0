"""arcee_fusion: exact divergences and quantiles, the same bits everywhere, rows whole or of no matter."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from support import reference_select
from support.divergence_bits import divergence_bits
from support.operators import Run, merge, tensor_params
from support.quick import examples
from support.reference import same_bits
from support.selections import inputs, stored, whole

from mergepipe.digest import content_digest
from mergepipe.errors import OperatorError
from mergepipe.operators.arcee import ArceeFusion
from mergepipe.operators.divergence import Divergences, Importances

ARCEE = ArceeFusion()
ROWS = ((4, 6), (5, 1), (2, 3, 5), (3, 70), (9, 64), (2, 1, 4))
ONE_ROW = ((), (1,), (23,), (1, 7), (200,))

cases = st.builds(
    inputs,
    seed=st.integers(0, 1000),
    count=st.just(1),
    shape=st.sampled_from(ROWS),
    kind=st.sampled_from(["coarse", "near", "wide"]),
    work=st.sampled_from(["float32", "float64"]),
)
flat_cases = st.builds(
    inputs,
    seed=st.integers(0, 1000),
    count=st.just(1),
    shape=st.sampled_from(ONE_ROW),
    kind=st.sampled_from(["coarse", "near", "wide"]),
    work=st.sampled_from(["float32", "float64"]),
)


def run(base, expert, **options):
    return Run(ARCEE, base, [expert], tensor_params(ARCEE, [{}], {}), **options)


def factors(base, expert, **options):
    """Return the divergence of each row, as the statistic measures it."""
    one = run(base, expert, **options)
    return np.frombuffer(b"".join(one.values(Divergences(slots=(0, 1)))), one.work)


@settings(max_examples=examples(30))
@given(cases)
def test_it_is_the_reference_of_the_measured_divergences_however_the_tensor_is_cut(arrays):
    base, expert = arrays
    want = reference_select.arcee_fusion(base, expert, factors(base, expert))
    assert same_bits(whole(ARCEE, base, [expert]), want, zero_signs=False)


@given(cases)
def test_divergences_are_those_of_the_slow_formula_and_do_not_depend_on_the_cutting(arrays):
    base, expert = arrays
    got = factors(base, expert)
    want = reference_select.row_divergences(base, expert)
    # Both sum with errors of about 1e-16 where the terms cancel; a float32 is off by half a rounding besides.
    assert np.allclose(got, want, rtol=1e-9 if got.dtype == np.float64 else 6.1e-8, atol=1e-14)
    for block, tile in ((6, 4), (1, 1), (200, 128)):
        assert same_bits(
            factors(base, expert, block_elements=block, tile=tile, find_zeros=False), got, zero_signs=False
        )


@settings(max_examples=examples(30))
@given(flat_cases)
def test_in_a_tensor_of_one_row_the_importance_is_the_change(arrays):
    base, expert = arrays
    got = whole(ARCEE, base, [expert])
    assert same_bits(got, reference_select.arcee_fusion(base, expert), zero_signs=False)


@pytest.mark.parametrize("seed", range(8))
def test_the_divergence_of_the_only_row_would_choose_nothing_else(seed):
    base, expert = inputs(seed, 1, (301,), "near", "float64")
    common = reference_select.row_divergences(base, expert)
    assert common[0] > 0
    assert same_bits(merge(ARCEE, base, [expert]), reference_select.arcee_fusion(base, expert, common))


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_that_of_the_formula_with_slow_divergences(seed):
    base, expert = inputs(seed, 1, (40, 64), "near")
    slow = reference_select.row_divergences(base, expert).astype(np.float32)
    got, want = merge(ARCEE, base, [expert]), reference_select.arcee_fusion(base, expert, slow)
    taken = got != base
    assert 0.01 < taken.mean() < 0.2
    importance = np.abs(expert - base) * slow[:, np.newaxis]
    threshold = reference_select.arcee_threshold(importance)
    clear = np.abs(importance / threshold - 1) > 1e-6
    assert clear.mean() > 0.99
    assert same_bits(got[clear], want[clear])


def test_what_is_taken_is_the_expert_up_to_the_rounding_of_the_delta():
    base, expert = inputs(1, 1, (40, 64), "coarse")
    got = merge(ARCEE, base, [expert])
    assert ((got == base) | (got == expert)).all()


def test_divergences_have_these_bits_on_every_machine():
    want = "5bac1d199df90b06ac60e86d32a5ea4613b8587dbf2193d662e6750cc69365f8"
    assert content_digest(divergence_bits()).hex() == want


def test_divergences_have_the_same_bits_without_wide_vectors():
    options = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(options), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.divergence_bits"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout == divergence_bits()


@pytest.mark.parametrize("place", [0, 1])
def test_the_base_may_be_listed_beside_the_expert(place):
    base, expert = inputs(2, 1, (9, 64), "near")
    listed = [expert]
    listed.insert(place, base)
    assert same_bits(merge(ARCEE, base, listed, base_expert=place), merge(ARCEE, base, [expert]))


@pytest.mark.parametrize(("count", "base_expert"), [(2, None), (1, 0)])
def test_other_numbers_of_experts_are_refused(count, base_expert):
    params = tensor_params(ARCEE, [{}] * count, {}, base_expert=base_expert)
    with pytest.raises(OperatorError, match="exactly one other checkpoint") as caught:
        ARCEE.prepare(params, "float32")
    assert caught.value.hint


@pytest.mark.parametrize("shape", [(9, 64), (5, 6), (23,)])
def test_a_stored_delta_is_as_good_as_the_expert(shape):
    base, expert = inputs(3, 1, shape, "coarse")
    none, delta = stored(base, [expert])
    got = merge(ARCEE, base, none, deltas=delta)
    assert same_bits(got, merge(ARCEE, base, [expert]), zero_signs=False)


@pytest.mark.parametrize("shape", [(), (23,), (0,), (0, 3), (4, 6), (3, 70)])
def test_an_expert_that_is_the_base_or_absent_gives_the_base(shape):
    (base,) = inputs(4, 0, shape, "near")
    assert same_bits(merge(ARCEE, base, [base.copy()], find_zeros=False), base, zero_signs=False)
    assert same_bits(merge(ARCEE, base, [None]), base)


def test_where_most_elements_do_not_differ_all_that_do_are_taken():
    base, expert = inputs(5, 1, (40, 64), "coarse")
    expert[:32] = base[:32]
    assert same_bits(merge(ARCEE, base, [expert]), expert, zero_signs=False)


def test_a_single_element_is_taken():
    assert merge(ARCEE, np.float32(1.5), [np.float32(2.5)]) == 2.5


@pytest.mark.parametrize("shape", [(8, 3), (24,)])
def test_not_a_number_passes_through_and_equal_infinities_stay(shape):
    base, expert = (array.reshape(-1) for array in inputs(6, 1, shape, "near"))
    expert[10] = np.nan
    base[20] = expert[20] = np.inf
    got = merge(ARCEE, base.reshape(shape), [expert.reshape(shape)], non_finite="allow", find_zeros=False).reshape(-1)
    assert np.isnan(got[10])
    assert got[20] == np.inf
    assert np.isfinite(np.delete(got, [10, 20])).all()


def test_divergences_are_kept_where_rows_are_long_and_taken_again_where_they_are_short():
    for shape, kept in (((9, 64), True), ((9, 63), False), ((576,), False)):
        base, expert = inputs(7, 1, shape, "near")
        one = run(base, expert)
        one.result()
        kinds = {type(statistic) for statistic, _ in one.measured}
        assert (Divergences in kinds) is kept
        assert (Importances in kinds) is (len(shape) > 1)


def test_the_key_of_the_importances_does_not_depend_on_what_follows_from_the_content():
    known = Importances(slots=(0, 1), known=np.ones(3, np.float32))
    other = Importances(slots=(0, 1))
    assert known == other
    assert known.digest() == other.digest()
    assert hash(known) == hash(other)


def test_a_changed_block_is_measured_alone():
    base, expert = inputs(8, 1, (16, 64), "near")
    other = expert.copy()
    other[5] += 0.5 * (other[5] - base[5])
    runs = [run(base, x, block_elements=256) for x in (expert, other)]
    for statistic in (Divergences(slots=(0, 1)), Importances(slots=(0, 1))):
        measured = [one.values(statistic) for one in runs]
        assert [a == b for a, b in zip(*measured, strict=True)] == [True, False, True, True]


def test_the_key_stays_where_the_threshold_does():
    base, expert = inputs(9, 1, (300,), "near")
    most, least = (pick(np.abs(expert - base)) for pick in (np.argmax, np.argmin))
    keys = [run(base, expert).reduction().key]
    for place, value in ((most, 2.0), (least, 2.0)):
        other = expert.copy()
        other[place] = base[place] + value
        keys.append(run(base, other).reduction().key)
    assert keys[0] == keys[1] != keys[2]


def test_inputs_are_never_written_to():
    base, expert = inputs(9, 1, (9, 64), "near")
    copies = base.copy(), expert.copy()
    merge(ARCEE, base, [expert])  # the driver's tiles are read-only
    assert same_bits(base, copies[0])
    assert same_bits(expert, copies[1])
