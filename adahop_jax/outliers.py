"""Outlier rows and columns: which ones stand out, by L2 norm."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from adahop_jax.blocking import check_float, widen


def top_outliers(x: Float[Array, "R C"], k: int, axis: int) -> Int[Array, " k"]:
    """Indices of the k rows or columns of largest L2 norm.

    They are found anew on each call: a frozen strategy fixes that there is an extraction, not which
    rows it takes. The ranking by L2 norm is this library's choice.

    Args:
      x: a matrix, float32, bfloat16 or float16.
      k: how many; at most the number of rows (columns).
      axis: 0 for rows, 1 for columns.

    Returns:
      int32 indices, largest norm first, ties by lowest index. A row that holds a NaN ranks first.

    Raises:
      TypeError: if x is not a float array.
      ValueError: for an x that is no matrix, another axis, or a k that is negative or too large.
    """
    x = check_float(x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, but must be a matrix [rows, columns].")
    if axis not in (0, 1):
        raise ValueError(f"axis is {axis!r}, but must be 0 (rows) or 1 (columns).")
    if not hasattr(k, "__index__") or not 0 <= k <= x.shape[axis]:
        raise ValueError(f"k is {k}, but must be in 0..{x.shape[axis]} for x of shape {x.shape}.")
    return top_indices(slice_norms(x, axis), k)


def slice_norms(x: Float[Array, "R C"], axis: int) -> Float[Array, " n"]:
    """L2 norms of the rows (axis=0) or columns (axis=1), over a common power of two.

    Each slice is scaled by a power of two of its own while its squares are summed, and the norms so
    that the largest is near 2^100: neither huge nor tiny values lose their rank.
    """
    x = widen(x)
    largest = jnp.max(jnp.abs(x), axis=1 - axis, keepdims=True, initial=0.0)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1.0))
    exponent = jnp.clip(exponent, -126, 126)
    scaled = x * jnp.ldexp(jnp.float32(1.0), -exponent)
    norms = jnp.sqrt(jnp.sum(scaled * scaled, axis=1 - axis, keepdims=True))
    relative = exponent - jnp.max(exponent, initial=-126) + 100
    norms = norms * jnp.ldexp(jnp.float32(1.0), jnp.maximum(relative, -126))
    return jnp.squeeze(norms, 1 - axis)


def top_indices(scores: Float[Array, " n"], k: int) -> Int[Array, " k"]:
    """Indices of the k largest scores, NaN first, then largest first, ties by lowest index."""
    if not k:
        return jnp.zeros((0,), jnp.int32)
    # A NaN with its sign bit set, such as inf - inf may give, would rank last.
    scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)
    return lax.top_k(scores, k)[1]
