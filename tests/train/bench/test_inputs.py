"""Operands are what they say: exact in MXFP4, exact in FP8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from train.bench.inputs import bf16_gemm, fp8_gemm, normal, representable, to_fp8


@pytest.mark.parametrize("shape", [(6, 96), (70, 6), (40, 45)])
@pytest.mark.parametrize("axis", [0, 1])
def test_representable_values_survive_quantization(shape: tuple[int, int], axis: int) -> None:
    x = representable(jax.random.key(0), shape, axis)
    assert (x.shape, x.dtype) == (shape, jnp.bfloat16)
    np.testing.assert_array_equal(adahop.quantize(x, axis=axis - 2).dequantize(), x)
    np.testing.assert_array_equal(x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16), x)


def test_representable_slices_differ_in_magnitude() -> None:
    x = np.asarray(representable(jax.random.key(0), (64, 96), 1), np.float32)
    largest = np.abs(x).max(axis=1)
    assert largest.max() / largest.min() >= 8
    # All eight magnitudes of a block occur, and both signs.
    blocks = np.abs(x).reshape(-1, 32)
    units = 2.0 ** (np.floor(np.log2(blocks.max(axis=1, keepdims=True))) - 2)
    assert set(np.unique(blocks / units)) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    assert (x < 0).any()
    other = representable(jax.random.key(1), (64, 96), 1)
    assert not np.array_equal(x, np.asarray(other, np.float32))


def test_products_agree_on_values_that_both_hold() -> None:
    a_key, b_key = jax.random.split(jax.random.key(2))
    a, b = representable(a_key, (64, 8), 0), representable(b_key, (16, 64), 1)
    expected = np.asarray(a, np.float32).T @ np.asarray(b, np.float32).T
    # One rounding to bfloat16 at the end.
    np.testing.assert_allclose(bf16_gemm(a, b, (0, 1)).astype(float), expected, rtol=2**-8)
    fp8 = fp8_gemm(to_fp8(a, 0), to_fp8(b, 1))
    assert fp8.dtype == jnp.bfloat16
    np.testing.assert_allclose(fp8.astype(float), expected, rtol=2**-8)


def test_normal_has_the_dtype() -> None:
    x = normal(jax.random.key(0), (1000,))
    assert x.dtype == jnp.bfloat16 and 0.9 < float(x.astype(jnp.float32).std()) < 1.1
