"""Estimates from samples: they come back as they were written, and are drawn towards the mean where they are noise."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.graph.samples import Estimates, estimated_gram, shrunk


@given(st.integers(2, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_estimates_come_back_as_they_were_written(count, blocks, seed):
    rng = np.random.default_rng(seed)
    estimates = Estimates(
        products=rng.normal(size=(blocks, count * (count + 1) // 2)),
        squares=rng.normal(size=(blocks, count)),
        errors=rng.normal(size=(blocks, count)),
    )
    found = Estimates.decode(estimates.encode(), count, blocks)
    assert (found.products == estimates.products).all()
    assert (found.squares == estimates.squares).all()
    assert (found.errors == estimates.errors).all()


def test_estimates_without_noise_stay():
    squares = np.array([[1.0, 2.0, 5.0], [4.0, 4.0, 4.0]])
    found, errors = shrunk(squares, np.zeros((2, 3)), np.full(3, 100.0))
    np.testing.assert_allclose(found, squares, rtol=1e-15)
    assert (errors == 0).all()


def test_estimates_that_differ_no_more_than_their_noise_become_their_mean():
    squares = np.array([[9.0, 10.0, 11.0]])
    found, errors = shrunk(squares, np.full((1, 3), 2.0), np.full(3, 100.0))
    np.testing.assert_allclose(found, 10.0)
    assert (errors == 0).all()


def test_a_mean_is_one_of_elements_so_a_short_block_gets_its_share():
    found, _ = shrunk(np.array([[10.0, 5.0]]), np.array([[9.0, 9.0]]), np.array([100.0, 50.0]))
    np.testing.assert_allclose(found, [[10.0, 5.0]])
    found, _ = shrunk(np.array([[10.0, 11.0]]), np.array([[9.0, 9.0]]), np.array([100.0, 50.0]))
    np.testing.assert_allclose(found, [[14.0, 7.0]])


def test_drawing_towards_the_mean_brings_noisy_estimates_nearer_to_the_truth():
    rng = np.random.default_rng(1)
    truth = np.exp(rng.normal(0, 0.2, (1, 400)))
    noise = 0.3
    seen = truth + rng.normal(0, noise, truth.shape)
    found, _ = shrunk(seen, np.full(truth.shape, noise), np.full(400, 64.0))
    assert np.sum((found - truth) ** 2) < 0.5 * np.sum((seen - truth) ** 2)
    np.testing.assert_allclose(found.sum(), seen.sum())


def test_a_single_block_and_what_is_not_finite_stay():
    for squares in (np.array([[3.0]]), np.array([[3.0, np.inf]])):
        found, _ = shrunk(squares, np.ones(squares.shape), np.full(squares.shape[1], 64.0))
        assert (found == squares).all()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_no_sum_of_vectors_is_estimated_longer_than_the_sum_of_their_lengths(count, blocks, seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(blocks, count, 6)) * rng.integers(0, 2, (blocks, count, 1))
    products = np.stack([(v @ v.T)[np.triu_indices(count)] for v in vectors])
    squares = rng.exponential(size=(count, blocks))
    gram, weights = estimated_gram(products, squares), rng.normal(size=count)
    longest = np.sum(np.sum(np.abs(weights)[:, None] * np.sqrt(squares), axis=0) ** 2)
    assert -1e-9 <= weights @ gram @ weights <= longest * (1 + 1e-12)


def test_equal_vectors_are_estimated_as_equal_whatever_their_sample():
    products = np.array([[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]])
    squares = np.array([[9.0, 2.0], [9.0, 2.0]])
    gram = estimated_gram(products, squares)
    np.testing.assert_allclose(gram, 11.0, rtol=1e-15)
