"""The reference backend: plain XLA, on every platform.

Its carriers are bfloat16 matrices, padded along the contraction: an MXFP4 value has two significant
bits, so bfloat16 holds it exactly, and products of bfloat16 accumulate in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt8

from adahop_jax import e2m1
from adahop_jax.backends.base import Quantizer
from adahop_jax.blocking import from_blocks, pad_axis, padded_length, to_blocks, widen
from adahop_jax.hadamard import transform
from adahop_jax.mxfp4 import MXFP4Array
from adahop_jax.products import dot_f32


class XLABackend:
    """See `Backend`."""

    name = "xla"

    def quantize(
        self,
        x: Float[Array, "..."],
        axis: int,
        quantizer: Quantizer,
        *,
        signs: Array | None = None,
        key: Array | None = None,
    ) -> MXFP4Array:
        """See `Backend.quantize`."""
        codes, scales = _encode(x, axis, quantizer, signs, key)
        packed = e2m1.pack(from_blocks(codes, axis), axis)
        # A transform fills up its last block, so that the axis is longer afterwards.
        length = padded_length(x.shape[axis], quantizer.block_size or 1)
        return MXFP4Array(packed, jnp.squeeze(scales, axis), axis, length, x.dtype)

    def carrier(
        self,
        x: Float[Array, "R C"],
        axis: int,
        quantizer: Quantizer,
        *,
        signs: Array | None = None,
        key: Array | None = None,
    ) -> BFloat16[Array, "padded_R padded_C"]:
        """See `Backend.carrier`."""
        codes, scales = _encode(x, axis, quantizer, signs, key)
        return from_blocks(e2m1.decode(codes, scales), axis).astype(jnp.bfloat16)

    def decode(self, q: MXFP4Array) -> BFloat16[Array, "R C"]:
        """See `Backend.decode`."""
        return q.padded_values().astype(jnp.bfloat16)

    def multiply(
        self, a: BFloat16[Array, "..."], b: BFloat16[Array, "..."], contract: tuple[int, int]
    ) -> Float[Array, "M N"]:
        """See `Backend.multiply`."""
        return mxfp4_product(a, b, contract)


def _encode(
    x: Array, axis: int, quantizer: Quantizer, signs: Array | None, key: Array | None
) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
    """Signed codes and scale bytes, blocked along `axis`."""
    x = widen(x)
    if quantizer.block_size is not None:
        x = transform(x, quantizer.block_size, axis, signs)
    blocks = to_blocks(pad_axis(x, axis, e2m1.BLOCK), axis)
    scales = e2m1.scale_bytes(blocks, axis, quantizer.scale_rule)
    v = e2m1.scaled_magnitude(blocks, scales)
    if quantizer.rounding == "stochastic":
        assert key is not None
        code = e2m1.stochastic_code(v, e2m1.random_bits(key, v.shape))
    else:
        code = e2m1.nearest_code(v)
    code = e2m1.signed_code(code, blocks)
    return jnp.where(scales == e2m1.NAN_BYTE, jnp.uint8(0), code), scales


@jax.jit(static_argnames="contract")
def mxfp4_product(
    a: BFloat16[Array, "..."], b: BFloat16[Array, "..."], contract: tuple[int, int]
) -> Float[Array, "M N"]:
    """A product of carriers, under a name of its own so that they can be counted in a jaxpr."""
    return dot_f32(a, b, contract)


BACKEND = XLABackend()
