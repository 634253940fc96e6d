import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adahop_jax as adahop
from adahop_jax.hadamard import BLOCK_SIZES


def test_matrix_is_the_oracles(hadamard_matrix_file, oracle):
    want = oracle["H"]
    n = len(want)
    np.testing.assert_allclose(adahop.hadamard_matrix(n), want, rtol=0, atol=1e-16)
    # And it is what the transform applies: rows of the identity give the rows of H.
    got = adahop.hadamard_transform(jnp.eye(n), n)
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("tag", ["nosign", "signblock", "signfull"])
@pytest.mark.parametrize("where", ["last", "first"])
def test_transform_matches_float64(hadamard_file, oracle, where, tag):
    n = int(oracle["n"])
    x = oracle[f"x_{where}"]
    axis = -1 if where == "last" else 0
    signs = {
        "nosign": None,
        "signblock": oracle["sign_block"],
        "signfull": oracle["sign_full"][: x.shape[axis]],
    }[tag]
    if tag == "signfull" and len(oracle["sign_full"]) != x.shape[axis]:
        pytest.fail("the oracle's signs do not fit the axis")
    got = np.asarray(adahop.hadamard_transform(x, n, axis, signs), np.float64)
    want = oracle[f"y_{where}_{tag}"]
    # log2(n) float32 roundings of values no larger than the block's norm, and one of the scaling.
    blocks = np.moveaxis(want, axis, -1).reshape(-1, n)
    norms = np.linalg.norm(blocks, axis=-1, keepdims=True)
    errors = np.abs(np.moveaxis(got - want, axis, -1).reshape(-1, n))
    assert np.all(errors <= norms * (np.log2(n) + 2) * 2.0**-24 * np.sqrt(n))


@pytest.mark.parametrize("n", BLOCK_SIZES)
def test_operands_rotations_cancel(n):
    """(x H)(H^T w) = x w, also for a contraction that fills no block, and with signs."""
    length = n + 8
    keys = jax.random.split(jax.random.key(n), 3)
    x = jax.random.normal(keys[0], (5, length), jnp.bfloat16)
    w = jax.random.normal(keys[1], (length, 3))
    signs = jax.random.rademacher(keys[2], (n,), jnp.int8)
    for s in (None, signs):
        rotated = adahop.hadamard_transform(x, n, 1, s) @ adahop.hadamard_transform(w, n, 0, s)
        want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        np.testing.assert_allclose(rotated, want, atol=3e-5)


def test_bfloat16_is_widened_before_it_is_added():
    """Accumulating in bfloat16 would lose the small terms: 256 + 1 is 256 there."""
    x = jnp.zeros((32,), jnp.bfloat16).at[0].set(256).at[1:].set(1)
    got = adahop.hadamard_transform(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[0], 287 / np.sqrt(32), rtol=1e-7)


@given(
    shape=st.lists(st.integers(0, 3), min_size=0, max_size=2),
    length=st.integers(0, 70),
    axis=st.integers(0, 2),
)
def test_any_axis_is_the_last_axis_moved(shape, length, axis):
    axis = min(axis, len(shape))
    dims = [*shape[:axis], length, *shape[axis:]]
    x = np.random.default_rng(length).standard_normal(dims).astype(np.float32)
    got = adahop.hadamard_transform(x, 16, axis)
    moved = adahop.hadamard_transform(np.moveaxis(x, axis, -1), 16, -1)
    assert got.shape[axis] == -(-length // 16) * 16
    np.testing.assert_array_equal(np.moveaxis(got, axis, -1), moved)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"block_size": 24}, "block_size is 24, but must be one of 16, 32, 64, 128"),
        ({"axis": 2}, "axis is 2, but the array has 2 axes"),
        ({"signs": np.ones(7)}, r"signs has shape \(7,\), but must be \(32,\) or \(64,\)"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        adahop.hadamard_transform(jnp.ones((2, 64)), **arguments)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x has dtype int32, but must be float32"):
        adahop.hadamard_transform(jnp.ones((2, 64), jnp.int32))
