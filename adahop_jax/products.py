"""Matrix products of bfloat16 operands with a float32 result."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def bf16_product(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "M N"]:
    """The high-precision path: operands rounded to bfloat16, see `dot_f32`."""
    return dot_f32(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), contract)


def dot_f32(a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "M N"]:
    """Product of two bfloat16 matrices over one axis of each, accumulated and returned in float32.

    XLA's CPU backend has no bfloat16 product with a float32 result, so there the operands are
    widened, which is exact.
    """
    dims = (((contract[0],), (contract[1],)), ((), ()))

    def widened(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)

    def native(a: Array, b: Array) -> Array:
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(a, b, cpu=widened, default=native)
