"""The election, bit for bit, on numbers of every kind: zeros of both signs, subnormals, sums that overflow."""


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.engine.kernel import Scratch
from mergepipe.operators.contract import BlockInputs
from mergepipe.operators.elect import Election

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.5e-38, -1.5e-38, 1.0, -1.0, 0.1, -0.1, 3.4e38, -3.4e38]
terms = st.integers(2, 5).flatmap(
    lambda count: st.lists(
        st.lists(
            st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False)),
            min_size=count,
            max_size=count,
        ),
        min_size=1,
        max_size=40,
    )
)


def sum_of_agreeing(rows, weights, *, normalize):
    """Return what is elected, with masks: a term agrees where its sign bit is that of the sum, in which -0 is +."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    negative = np.signbit(total + np.zeros_like(total))
    kept = [np.where(np.signbit(row) == negative, row, row.dtype.type(0)) for row in rows]
    total, divisor = kept[0].copy(), np.zeros_like(total)
    for row in kept[1:]:
        total += row
    if not normalize:
        return total
    for row, weight in zip(kept, weights, strict=True):
        divisor += np.where(row != 0, row.dtype.type(weight), row.dtype.type(0))
    divisor[divisor == 0] = 1
    return total / divisor


def election(rows, weights, *, normalize):
    work = rows[0].dtype.name
    inputs = BlockInputs(
        xp=np,
        base=None,
        experts=(),
        shape=rows[0].shape,
        dtype=rows[0].dtype,
        non_finite=False,
        scratch=Scratch().rooms(work, rows[0].size),
    )
    made = Election(inputs)
    for row, weight in zip(rows, weights, strict=True):
        term = inputs.scratch(made.scratch)
        term[...] = row
        made.add(term, weight)
    return made.result(normalize=normalize)


@pytest.mark.parametrize("work", ["float32", "float64"])
@pytest.mark.parametrize("normalize", [True, False])
@given(terms, st.sampled_from([0.25, 1.0, None]))
def test_agreeing_terms_are_summed_as_with_masks(work, normalize, columns, weight):
    rows = list(np.array(columns, work).T.copy())
    weights = [weight or 0.1 * (1 + number) for number in range(len(rows))]
    weights = [float(np.dtype(work).type(value)) for value in weights]
    with np.errstate(all="ignore"):
        want = sum_of_agreeing(rows, weights, normalize=normalize)
        got = election(rows, weights, normalize=normalize)
    # A sum of opposite infinities elects nothing; whatever comes of it is an error.
    usable = np.isfinite(want)
    assert np.array_equal(usable, np.isfinite(got))
    assert got[usable].tobytes() == want[usable].tobytes()


def test_where_all_terms_are_minus_zero_the_sum_is_plus_zero():
    rows = [np.float32([-0.0, -0.0, 0.0]), np.float32([-0.0, 0.0, -0.0])]
    for normalize in (True, False):
        assert election(rows, [0.5, 0.5], normalize=normalize).tobytes() == bytes(12)
