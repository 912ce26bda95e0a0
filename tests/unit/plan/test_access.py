"""Access sets as values."""

import pytest

from mergepipe.plan.access import EXACT, OMITTED, TensorAccess

HALF = TensorAccess(levels=(bytes([OMITTED, EXACT]), None, bytes([EXACT, OMITTED])))


def test_what_is_left_out_of_a_block():
    assert [HALF.omitted(block) for block in range(3)] == [(0,), (2,), ()]
    assert not HALF.omits(1, 0)  # an expert that is always read
    assert not HALF.omits(0, 7)  # a block behind those that are merged


@pytest.mark.parametrize(
    ("levels", "full"),
    [((None,), True), ((b"\xff\xff", None), True), ((b"\xff\0",), False), ((b"\x07",), False), ((), True)],
)
def test_an_access_is_full_if_every_block_is_read_exactly(levels, full):
    assert TensorAccess(levels=levels).is_full == full


def test_the_digest_says_what_is_left_out_of_whom():
    other = TensorAccess(levels=(None, *HALF.levels[:1], HALF.levels[2]))
    assert len({HALF.digest(), other.digest(), TensorAccess(levels=HALF.levels[::-1]).digest()}) == 3
    assert HALF.digest() == TensorAccess(levels=tuple(HALF.levels)).digest()


def test_the_matrix_has_a_row_for_each_expert_and_a_column_for_each_block():
    assert HALF.matrix(3) == b"\0\xff\xff" + b"\xff\xff\xff" + b"\xff\0\xff"
