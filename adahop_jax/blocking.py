"""Arrays as the operations here need them: checked, padded, and cut into blocks along an axis."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from adahop_jax import e2m1


def check_float(x: Any, name: str = "x") -> Array:
    """Returns x as a JAX array; raises TypeError unless it holds floats of at most 32 bits."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {x!r}, but must be an array of floats.") from None
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in (2, 4):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but must be float32, bfloat16 or float16; cast it first."
        )
    return x


def block_axis(axis: int, ndim: int, name: str = "axis") -> int:
    """Checks an axis and counts it from the end."""
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"{name} is {axis!r}, but must be an int.")
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} is {axis}, but the array has {ndim} axes.")
    return int(axis) - ndim if axis >= 0 else int(axis)


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The values that x's dtype holds, in float32.

    XLA may drop a rounding to bfloat16 that is followed by a widening, and go on with a producer's
    float32 values instead: other values than x's, and other ones in each fusion.
    """
    # Eight exponent bits whatever the dtype: with float16's five its subnormals would be flushed.
    return lax.reduce_precision(x.astype(jnp.float32), 8, jnp.finfo(x.dtype).nmant)


def padded_length(length: int, multiple: int) -> int:
    """The least multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def pad_axis(x: Array, axis: int, multiple: int) -> Array:
    """Zero-pads `axis` up to a multiple."""
    missing = padded_length(x.shape[axis], multiple) - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def to_blocks(x: Array, axis: int, block: int = e2m1.BLOCK) -> Array:
    """[..., L, ...] -> [..., L/block, block, ...]; `axis` is negative, and so it is the block's."""
    axis %= x.ndim
    shape = x.shape
    return x.reshape(*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])


def from_blocks(x: Array, axis: int) -> Array:
    """Inverse of `to_blocks`."""
    axis = axis % x.ndim
    shape = x.shape
    return x.reshape(*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])
