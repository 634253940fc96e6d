"""Which rows or columns rank first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import adahop_jax as adahop


@given(
    hnp.arrays(np.int8, (6, 4), elements=st.integers(-4, 4)),
    st.integers(0, 4),
    st.integers(0, 1),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
def test_largest_norm_first_ties_by_lowest_index(x, k: int, axis: int, dtype) -> None:
    """Small whole numbers: many ties, exact norms."""
    norms = np.sum(x.astype(int) ** 2, axis=1 - axis)
    want = sorted(range(len(norms)), key=lambda i: (-norms[i], i))[:k]
    got = adahop.top_outliers(jnp.asarray(x, dtype), k, axis)
    assert (got.dtype, got.shape) == (jnp.int32, (k,))
    np.testing.assert_array_equal(got, want)


def test_the_norm_is_not_the_largest_magnitude() -> None:
    x = jnp.array([[3.0, 0.0], [2.0, -2.9]])
    assert adahop.top_outliers(x, 1, 0).tolist() == [1]
    assert adahop.top_outliers(-x.T, 1, 1).tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, -np.nan])
def test_a_row_with_a_nan_ranks_first(bad: float) -> None:
    """Whatever its sign: the NaN that a processor makes of inf - inf has the sign bit set."""
    x = np.ones((4, 3), np.float32)
    x[1] = 1e30
    x[3] = 2.0
    x[2, 0] = bad
    assert adahop.top_outliers(x, 4, 0).tolist()[0] == 2
    assert adahop.top_outliers(x.T, 4, 1).tolist()[0] == 2
    assert adahop.top_outliers(x, 1, 0).tolist() == [2]
    # Without rows that overflow the rest is ranked as before.
    assert adahop.top_outliers(np.delete(x, 1, 0), 3, 0).tolist() == [1, 2, 0]


def test_infinity_is_larger_than_all_but_nan() -> None:
    x = jnp.array([[1.0, 2.0], [1.0, -jnp.inf], [3.0, 0.0]])
    assert adahop.top_outliers(x, 3, 0).tolist() == [1, 2, 0]


@pytest.mark.parametrize("factor", [2e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 8e37])
def test_huge_and_tiny_rows_keep_their_order(factor: float) -> None:
    x = jnp.array([[1.0, 1.0], [1.0, 3.0], [2.0, 1.0], [4.0, 0.0]]) * jnp.float32(factor)
    assert adahop.top_outliers(x, 4, 0).tolist() == [3, 1, 2, 0]


def test_huge_and_tiny_rows_in_one_matrix() -> None:
    x = jnp.array([[1e-30, 0.0], [1e-20, 0.0], [1e-3, 0.0], [1.0, 0.0], [1e30, 1e30]])
    assert adahop.top_outliers(x, 5, 0).tolist() == [4, 3, 2, 1, 0]


def test_empty() -> None:
    assert adahop.top_outliers(jnp.ones((0, 4)), 0, 0).shape == (0,)
    assert adahop.top_outliers(jnp.ones((3, 0)), 2, 0).tolist() == [0, 1]
    assert adahop.top_outliers(jnp.ones((3, 4)), 0, 1).dtype == jnp.int32


def test_jit_and_vmap() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 8, 5))
    want = [adahop.top_outliers(m, 4, 0) for m in x]
    np.testing.assert_array_equal(jax.vmap(lambda m: adahop.top_outliers(m, 4, 0))(x), want)
    jitted = jax.jit(adahop.top_outliers, static_argnums=(1, 2))
    np.testing.assert_array_equal(jitted(x[1], 4, 0), want[1])


@pytest.mark.parametrize(
    ("shape", "k", "axis", "sentence"),
    [
        ((4,), 1, 0, r"x has shape \(4,\), but must be a matrix"),
        ((2, 3, 4), 1, 0, r"x has shape \(2, 3, 4\), but must be a matrix"),
        ((4, 6), 1, 2, "axis is 2, but must be 0"),
        ((4, 6), 1, -1, "axis is -1, but must be 0"),
        ((4, 6), 5, 0, r"k is 5, but must be in 0..4 for x of shape \(4, 6\)"),
        ((4, 6), 7, 1, "k is 7, but must be in 0..6"),
        ((4, 6), -1, 0, "k is -1, but must be in 0..4"),
    ],
)
def test_bad_arguments(shape, k, axis, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        adahop.top_outliers(jnp.ones(shape), k, axis)


def test_only_floats() -> None:
    with pytest.raises(TypeError, match="x has dtype int32"):
        adahop.top_outliers(jnp.ones((3, 3), jnp.int32), 1, 0)
