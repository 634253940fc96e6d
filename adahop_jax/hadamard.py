"""The block Hadamard transform: rotates every block of n values along an axis.

The transform is computed by butterflies in float32, in a fixed order (neighbours first), and scaled
once at the end, so that every backend can give the same bits.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from adahop_jax.blocking import block_axis, check_float, from_blocks, pad_axis, to_blocks

BLOCK_SIZES = (16, 32, 64, 128)


def check_block_size(block_size: int) -> None:
    """Raises ValueError unless this block size is supported."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size is {block_size!r}, but must be one of {', '.join(map(str, BLOCK_SIZES))}."
        )


def hadamard_matrix(block_size: int) -> np.ndarray:
    """The orthonormal, symmetric Sylvester-Hadamard matrix, float64 [block_size, block_size]."""
    check_block_size(block_size)
    index = np.arange(block_size)
    parity = np.bitwise_count(index[:, None] & index[None, :]) & 1
    return (1.0 - 2.0 * parity) / np.sqrt(block_size)


def hadamard_transform(
    x: Float[Array, "..."],
    block_size: int = 32,
    axis: int = -1,
    signs: Array | None = None,
) -> Float[Array, "..."]:
    """Replaces each block b of `block_size` values along `axis` by H (signs * b).

    H is the orthonormal Sylvester matrix; H H^T = I, so a product whose operands are both
    transformed along their contraction is unchanged (up to rounding).

    Args:
      x: floats of at most 32 bits; computed in float32.
      block_size: 16, 32, 64 or 128.
      axis: the axis to transform.
      signs: optional +1/-1 factors applied before H, [block_size] (one vector for all blocks) or
        [L] (one a position of the axis).

    Returns:
      Float32, shaped like x, but with `axis` zero-padded to a multiple of `block_size` first (a
      shorter result could not hold the transform of a ragged last block).

    Raises:
      TypeError: if x is not a float array.
      ValueError: for another block size, axis or shape of signs.
    """
    check_block_size(block_size)
    x = check_float(x)
    axis = block_axis(axis, x.ndim)
    if signs is not None:
        signs = jnp.asarray(signs)
        if signs.shape not in ((block_size,), (x.shape[axis],)):
            raise ValueError(
                f"signs has shape {signs.shape}, but must be ({block_size},) or ({x.shape[axis]},)."
            )
    return _transform(x, block_size, axis, signs)


def transform(x: Array, block_size: int, axis: int, signs: Array | None) -> Array:
    """`hadamard_transform` without its checks; `axis` is negative."""
    # Signs of the whole axis are meant for the axis as given, before it is padded.
    if signs is not None and signs.shape[0] != block_size:
        x = x * _along(signs, axis, x.ndim).astype(x.dtype)
        signs = None
    blocks = to_blocks(pad_axis(x, axis, block_size), axis, block_size).astype(jnp.float32)
    if signs is not None:
        blocks = blocks * _along(signs, axis, blocks.ndim).astype(jnp.float32)
    return from_blocks(_butterflies(blocks, block_size, axis), axis)


_transform = functools.partial(jax.jit, static_argnums=(1, 2))(transform)


def _butterflies(blocks: Array, block_size: int, axis: int) -> Array:
    axis %= blocks.ndim
    shape = blocks.shape
    distance = 1
    while distance < block_size:
        split = (block_size // (2 * distance), 2, distance)
        pairs = blocks.reshape(*shape[:axis], *split, *shape[axis + 1 :])
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        blocks = jnp.stack([a + b, a - b], axis=axis + 1).reshape(shape)
        distance *= 2
    return blocks * np.float32(1 / math.sqrt(block_size))


def _along(vector: Array, axis: int, ndim: int) -> Array:
    return vector.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])
