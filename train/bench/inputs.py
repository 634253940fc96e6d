"""Random operands, and the products that they go through, written once for all groups."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from adahop_jax import e2m1

LAST_AXES = (((1,), (1,)), ((), ()))
"""Contraction of both last axes, the layout that FP8 hardware products take."""


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Array:
    """Standard normal values, rounded to `dtype`."""
    return jax.random.normal(key, shape).astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape", "axis"))
def representable(key: Array, shape: tuple[int, int], axis: int) -> Float[Array, "R C"]:
    """Random bfloat16 values that MXFP4 along `axis` holds exactly, magnitudes varied by slices.

    Quantizing them changes nothing, so that a product of their encodings has an exact reference
    that no backend had a part in. Where `axis` is no multiple of the block size, the last block is
    quantized as if it were filled up with zeros.
    """
    values_key, scale_key = jax.random.split(key)
    free = 1 - axis
    scale_shape = [1, 1]
    scale_shape[free] = shape[free]
    exponents = jax.random.randint(scale_key, scale_shape, -2, 3)
    values = jax.random.normal(values_key, shape) * jnp.exp2(exponents.astype(jnp.float32))
    length = shape[axis]
    padding = [(0, 0), (0, 0)]
    padding[axis] = (0, -length % e2m1.BLOCK)
    padded = jnp.pad(values, padding)
    split = list(padded.shape)
    split[axis : axis + 1] = [padded.shape[axis] // e2m1.BLOCK, e2m1.BLOCK]
    blocks = padded.reshape(split)
    # The block's largest value comes to lie in [4, 8), which rounds to 4 or 6: the same scale.
    largest = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True)
    unit = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-20))) - 2)
    codes = e2m1.nearest_code(jnp.abs(blocks) / unit)
    rounded = jnp.sign(blocks) * e2m1.code_value(codes) * unit
    whole = rounded.reshape(padded.shape)
    return lax.slice_in_dim(whole, 0, length, axis=axis).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="axis")
def to_fp8(x: Float[Array, "R C"], axis: int) -> Float[Array, "F K"]:
    """Float8_e4m3fn with the contraction axis last."""
    return (x if axis == 1 else x.T).astype(jnp.float8_e4m3fn)


@functools.partial(jax.jit, static_argnames="contract")
def bf16_gemm(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "M N"]:
    """XLA's product of bfloat16 operands, with a bfloat16 result."""
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())))


@jax.jit
def fp8_gemm(a: Array, b: Array) -> Float[Array, "M N"]:
    """XLA's product of FP8 operands over both last axes, with a bfloat16 result."""
    return lax.dot_general(a, b, LAST_AXES, preferred_element_type=jnp.bfloat16)
