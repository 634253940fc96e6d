"""`MXFP4Array` as a value: its parts, its shape, and its way through transformations of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import MXFP4Array

# One block: codes 1, 2 in the first byte, 8 (-0) and 15 (-6) in the second, zeros otherwise.
CODES = np.zeros((1, 16), np.uint8)
CODES[0, :2] = 0x21, 0xF8


# Compiled as a whole: one operation at a time takes seconds.
dequantize = jax.jit(MXFP4Array.dequantize, static_argnums=1)


def sample(*shape: int, axis: int = -1) -> MXFP4Array:
    return adahop.quantize(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), axis)


def assert_same(got: MXFP4Array, want: MXFP4Array) -> None:
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)
    assert (got.axis, got.length, got.dtype) == (want.axis, want.length, want.dtype)


# --- values ---


@pytest.mark.parametrize(("byte", "scale"), [(127, 1.0), (134, 128.0), (0, 2.0**-127)])
def test_values_of_hand_made_parts(byte: int, scale: float) -> None:
    q = MXFP4Array.from_parts(CODES, np.full((1, 1), byte, np.uint8))
    want = np.zeros((1, 32))
    want[0, :4] = 0.5 * scale, 1.0 * scale, -0.0, -6.0 * scale
    got = np.asarray(q.dequantize())
    # By bits: comparing floats might flush subnormals, and would not see the sign of zero.
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))


def test_byte_255_is_nan_in_its_own_block_only() -> None:
    codes = np.concatenate([CODES, CODES], axis=1)
    q = MXFP4Array.from_parts(codes, np.array([[255, 127]], np.uint8))
    got = np.asarray(q.dequantize())
    assert np.all(np.isnan(got[:, :32]))
    assert np.all(np.isfinite(got[:, 32:]))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_along_any_axis(axis: int) -> None:
    shape = [2, 3, 5]
    shape[axis] = 64
    x = jax.random.normal(jax.random.key(0), shape)
    q = adahop.quantize(x, axis)
    again = MXFP4Array.from_parts(q.codes, q.scales, axis)
    assert again.axis == (axis if axis < 0 else axis - 3)
    assert again.shape == tuple(shape)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))
    # The same blocks along the last axis hold the same values.
    last = dequantize(adahop.quantize(jnp.moveaxis(x, axis, -1)))
    np.testing.assert_array_equal(jnp.moveaxis(dequantize(q), axis, -1), last)


def test_length_cuts_the_last_block() -> None:
    x = jax.random.normal(jax.random.key(0), (40, 3))
    q = adahop.quantize(x, 0)
    assert (q.codes.shape, q.scales.shape, q.shape) == ((32, 3), (2, 3), (40, 3))
    again = MXFP4Array.from_parts(q.codes, q.scales, 0, length=40)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))
    padded = np.asarray(jax.jit(MXFP4Array.padded_values)(q))
    assert padded.shape == (64, 3)
    np.testing.assert_array_equal(padded[:40], dequantize(q))
    assert not padded[40:].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dequantize_gives_the_dtype_of_the_input_by_default(dtype) -> None:
    x = jnp.arange(64, dtype=dtype)
    q = adahop.quantize(x)
    assert q.dtype == dtype
    assert q.dequantize().dtype == dtype
    for other in (jnp.float32, jnp.bfloat16, jnp.float16):
        got = dequantize(q, other)
        assert got.dtype == other
        # Exact in each of them: two significant bits.
        np.testing.assert_array_equal(np.asarray(got, np.float64), dequantize(q, jnp.float32))


def test_size_in_bytes_is_four_and_a_quarter_bits_a_value() -> None:
    q = sample(8, 96)
    assert (q.ndim, q.shape) == (2, (8, 96))
    assert q.nbytes * 8 == 8 * 96 * 4.25
    assert repr(q) == "MXFP4Array(shape=(8, 96), axis=-1, dtype=bfloat16)"


# --- parts that do not belong together ---


@pytest.mark.parametrize(
    ("codes", "scales", "arguments", "error", "sentence"),
    [
        ((2, 32), (2, 1), {}, ValueError, r"codes \(2, 32\) and scales \(2, 1\) do not belong"),
        ((2, 32), (3, 2), {}, ValueError, "do not belong together"),
        ((2, 32), (2,), {}, ValueError, "do not belong together"),
        ((2, 24), (2, 1), {}, ValueError, "16 bytes of codes for each scale"),
        ((32, 2), (2, 2), {}, ValueError, "along axis -1"),
        ((2, 32), (2, 2), {"axis": 2}, ValueError, "axis is 2, but the array has 2 axes"),
        ((2, 32), (2, 2), {"axis": 0.5}, TypeError, "axis is 0.5, but must be an int"),
        ((2, 32), (2, 2), {"length": 65}, ValueError, "length is 65, but 2 blocks hold 64 values"),
        ((2, 32), (2, 2), {"length": 32}, ValueError, "length is 32, but 2 blocks hold 64 values"),
        ((2, 32), (2, 2), {"length": -1}, ValueError, "length is -1"),
        ((2, 0), (2, 0), {"length": -5}, ValueError, "length is -5"),
    ],
)
def test_parts_that_do_not_fit(codes, scales, arguments, error, sentence) -> None:
    parts = np.zeros(codes, np.uint8), np.zeros(scales, np.uint8)
    with pytest.raises(error, match=sentence):
        MXFP4Array.from_parts(*parts, **arguments)


@pytest.mark.parametrize("name", ["codes", "scales"])
def test_parts_of_another_dtype(name: str) -> None:
    parts = {"codes": np.zeros((1, 16), np.uint8), "scales": np.zeros((1, 1), np.uint8)}
    parts[name] = parts[name].astype(np.int8)
    with pytest.raises(TypeError, match=f"{name} has dtype int8, but must be uint8"):
        MXFP4Array.from_parts(**parts)


def test_no_blocks() -> None:
    q = MXFP4Array.from_parts(np.zeros((3, 0), np.uint8), np.zeros((3, 0), np.uint8), length=0)
    assert q.dequantize().shape == (3, 0)


# --- transformations ---


def test_leaves_are_codes_and_scales() -> None:
    q = sample(4, 40)
    codes, scales = jax.tree.leaves(q)
    assert codes is q.codes
    assert scales is q.scales
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".codes", ".scales"]
    other = jax.tree.structure(sample(4, 41))
    assert jax.tree.structure(q) != other  # the length is part of the structure


def test_through_jit_and_tree_map() -> None:
    q = sample(4, 40)
    assert_same(jax.jit(lambda q: q)(q), q)
    assert_same(jax.tree.map(lambda part: part, q), q)
    jitted = jax.jit(lambda q: q.dequantize(jnp.float32))(q)
    np.testing.assert_array_equal(jitted, q.dequantize())


def test_vmap_adds_a_leading_axis() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 40, 5))
    q = jax.vmap(lambda x: adahop.quantize(x, 0))(x)
    assert (q.axis, q.shape) == (-2, (3, 40, 5))
    assert_same(q, adahop.quantize(x, 1))
    values = jax.vmap(dequantize)(q)
    np.testing.assert_array_equal(values, dequantize(q))


def test_scan_stacks_and_unstacks() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, 40))
    _, q = jax.lax.scan(lambda carry, x: (carry, adahop.quantize(x, 1)), 0, x)
    assert_same(q, adahop.quantize(x, 2))
    _, values = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), 0, q)
    np.testing.assert_array_equal(values, dequantize(q))


def test_eval_shape() -> None:
    x = jax.ShapeDtypeStruct((4, 40), jnp.bfloat16)
    q = jax.eval_shape(lambda x: adahop.quantize(x, 1), x)
    assert (q.shape, q.dtype, q.axis) == ((4, 40), jnp.bfloat16, -1)
    assert (q.codes.shape, q.codes.dtype, q.scales.shape) == ((4, 32), jnp.uint8, (4, 2))
    assert jax.eval_shape(MXFP4Array.dequantize, q).shape == (4, 40)


def test_donation() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 64))
    want, given = adahop.quantize(x), adahop.quantize(x)
    kept = jax.jit(lambda q: (q, q.dequantize()), donate_argnums=0)
    got, values = kept(given)
    assert given.codes.is_deleted()
    assert_same(got, want)
    np.testing.assert_array_equal(values, dequantize(want))


def test_attributes_are_fixed() -> None:
    q = sample(2, 32)
    with pytest.raises(AttributeError):
        q.axis = 0  # pyright: ignore[reportAttributeAccessIssue]
