"""The reference backend: plain XLA, on every platform.

Its carriers are bfloat16 matrices, padded along the contraction: an MXFP4 value has two significant
bits, so bfloat16 holds it exactly, and products of bfloat16 accumulate in float32.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt8

from adahop_jax import e2m1
from adahop_jax.backends.base import Quantizer, Request
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

    def encode(
        self, x: Float[Array, "R C"], requests: Sequence[Request]
    ) -> tuple["MXFP4Array | Carrier", ...]:
        """See `Backend.encode`: MXFP4Arrays where packed, else carriers."""
        return tuple(
            self.quantize(x, r.axis - 2, r.quantizer, signs=r.signs, key=r.key)
            if r.packed
            else _direct_carrier(x, r)
            for r in requests
        )

    def carrier(self, encoded: "MXFP4Array | Carrier") -> "Carrier":
        """See `Backend.carrier`."""
        if isinstance(encoded, Carrier):
            return encoded
        return Carrier(encoded.padded_values().astype(jnp.bfloat16), encoded.axis + encoded.ndim)

    def multiply(self, a: "Carrier", b: "Carrier", dtype: Any) -> Float[Array, "M N"]:
        """See `Backend.multiply`."""
        return mxfp4_product(a.values, b.values, (a.axis, b.axis)).astype(dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True, eq=False)
class Carrier:
    """A matrix in its stored layout, padded along its contraction axis, 0 or 1."""

    values: BFloat16[Array, "padded_R padded_C"]
    axis: int


def _direct_carrier(x: Array, request: Request) -> Carrier:
    """The carrier without the packed form between."""
    axis = request.axis - 2
    codes, scales = _encode(x, axis, request.quantizer, request.signs, request.key)
    values = from_blocks(e2m1.decode(codes, scales), axis).astype(jnp.bfloat16)
    return Carrier(values, request.axis)


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
