"""Padding and blocks along any axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adahop_jax.blocking import (
    block_axis,
    check_float,
    from_blocks,
    pad_axis,
    padded_length,
    to_blocks,
    widen,
)


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_padded_length_is_the_least_multiple(length: int, multiple: int) -> None:
    got = padded_length(length, multiple)
    assert got % multiple == 0
    assert length <= got < length + multiple


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_blocks_along_an_axis(axis: int) -> None:
    shape = [2, 3, 5]
    shape[axis] = 6
    x = jnp.arange(np.prod(shape)).reshape(shape)
    blocks = to_blocks(x, axis, 3)
    assert blocks.shape[axis] == 3
    assert blocks.shape[axis - 1] == 2
    for b in range(2):
        for i in range(3):
            # Without the axis of the elements the blocks lie along `axis`.
            got = jnp.take(jnp.take(blocks, i, axis), b, axis)
            np.testing.assert_array_equal(got, jnp.take(x, 3 * b + i, axis))
    np.testing.assert_array_equal(from_blocks(blocks, axis), x)


def test_blocks_are_of_32_by_default_and_may_be_none() -> None:
    assert to_blocks(jnp.ones((2, 96)), -1).shape == (2, 3, 32)
    assert to_blocks(jnp.ones((2, 0)), -1).shape == (2, 0, 32)
    assert from_blocks(jnp.ones((2, 0, 32)), -1).shape == (2, 0)
    assert to_blocks(jnp.ones((0, 64)), -1).shape == (0, 2, 32)


def test_zeros_are_added_at_the_end_of_the_axis() -> None:
    x = jnp.ones((3, 5))
    got = pad_axis(x, -2, 4)
    np.testing.assert_array_equal(got, np.pad(np.ones((3, 5)), ((0, 1), (0, 0))))
    assert pad_axis(x, -1, 5) is x
    assert pad_axis(jnp.ones((0, 5)), -2, 4).shape == (0, 5)


@pytest.mark.parametrize(("axis", "want"), [(0, -3), (2, -1), (-1, -1), (-3, -3)])
def test_axis_from_the_end(axis: int, want: int) -> None:
    for same in (axis, np.int64(axis)):
        got = block_axis(same, 3)
        assert got == want
        assert type(got) is int


@pytest.mark.parametrize("axis", [3, -4])
def test_axis_out_of_range(axis: int) -> None:
    with pytest.raises(ValueError, match=f"where is {axis}, but the array has 3 axes"):
        block_axis(axis, 3, "where")


@pytest.mark.parametrize("axis", [1.0, True, None, "1"])
def test_axis_that_is_no_int(axis) -> None:
    with pytest.raises(TypeError, match=f"axis is {axis!r}, but must be an int"):
        block_axis(axis, 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_floats_pass_unchanged(dtype) -> None:
    x = jnp.ones(3, dtype)
    assert check_float(x) is x
    assert isinstance(check_float(np.ones(3, dtype)), jax.Array)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e5m2", "float64"])
def test_others_do_not(dtype: str) -> None:
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match=f"w has dtype {dtype}, but must be float32, bfloat16 or"),
    ):
        check_float(jnp.ones(3, dtype), "w")


def test_what_is_no_array():
    with pytest.raises(TypeError, match="w is None, but must be an array of floats"):
        check_float(None, "w")


def test_widening_keeps_the_rounding_of_a_producer():
    """Also where one fusion makes the bfloat16 values and widens them."""
    x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)

    def produce(x):
        return x + x * x

    apart = widen(jax.jit(produce)(x))
    np.testing.assert_array_equal(jax.jit(lambda x: widen(produce(x)))(x), apart)
    tiny = jnp.float16(2.0**-24)
    assert widen(tiny) == 2.0**-24
