"""The arithmetic of MXFP4 blocks, by exponent bits: scale bytes, E2M1 codes, packing, decoding.

An MXFP4 block is 32 elements of format E2M1 (1 sign, 2 exponent, 1 mantissa bit) that share one
E8M0 scale byte b, worth 2^(b-127) (OCP Microscaling Formats v1.0, sections 5.2 and 5.3).

Everything that decides a bit works on the integer pattern of a float32, or multiplies by powers of
two that are normal numbers: XLA flushes float32 subnormals to zero, a float logarithm is off by one
next to a power of two, and casts to the float8/float4 types lose NaN. Backends that write their
own kernels have to reproduce these functions bit for bit.

Functions here take *blocked* arrays: one axis of length 32 holds the elements of a block.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

BLOCK = 32
"""Elements that share a scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; bit 3 of a code is the sign."""

NAN_BYTE = 255
"""The E8M0 byte of a block that holds a NaN or an infinity; it dequantizes to NaN."""

ScaleRule = Literal["floor", "even", "ceil", "rceil", "mse"]
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)

NONSATURATING_RULES: tuple[ScaleRule, ...] = ("ceil", "rceil")
"""Rules under which no element exceeds 6 scales, so that stochastic rounding is unbiased."""

# A rule raises the floor exponent by one when amax = m * 2^k, 1 <= m < 2, has a mantissa field of
# at least this much: m >= 1.75 (amax rounded to one mantissa bit, ties to even), m > 1, m > 1.5.
_RAISE_AT: dict[str, int] = {"even": 0x600000, "ceil": 0x000001, "rceil": 0x400001}
_SIGN = 0x80000000
_MANTISSA = 0x7FFFFF
_EXPONENT_MAX = 255


def magnitude_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bit pattern of |x| in float32; ordered like |x|, with infinity and then NaN above."""
    return _bits(x.astype(jnp.float32)) & jnp.uint32(~_SIGN & 0xFFFFFFFF)


def scale_bytes(x: Float[Array, "..."], axis: int, scale_rule: ScaleRule) -> UInt8[Array, "..."]:
    """E8M0 byte of every block.

    Args:
      x: blocked values, any float of at most 32 bits.
      axis: the axis of length 32 that holds a block; it is kept, with length 1.
      scale_rule: `floor` gives floor(log2 amax) - 2 (OCP); `even`, `ceil` and `rceil` add one where
        amax, as m * 2^k, has m >= 1.75, m > 1 or m > 1.5; `mse` takes whichever of the floor
        exponent and the next has the smaller squared error over the block, the floor one on a tie.

    Returns:
      Bytes b = max(exponent, -127) + 127; 255 for a block with a NaN or an infinity.
    """
    amax = jnp.max(magnitude_bits(x), axis=axis, keepdims=True)
    exponent = (amax >> 23).astype(jnp.int32)
    raised = jnp.zeros_like(exponent)
    if scale_rule in _RAISE_AT:
        raised = ((amax & _MANTISSA) >= _RAISE_AT[scale_rule]).astype(jnp.int32)
    # An exponent field e means k = e - 127, so the byte (k - 2) + 127 is e - 2.
    byte = jnp.maximum(exponent - 2 + raised, 0)
    byte = jnp.where(exponent == _EXPONENT_MAX, NAN_BYTE, byte).astype(jnp.uint8)
    if scale_rule != "mse":
        return byte
    return jnp.where(_next_exponent_is_better(x, byte, axis), byte + jnp.uint8(1), byte)


def _next_exponent_is_better(x: Array, byte: Array, axis: int) -> Array:
    """Compares the squared errors of two adjacent exponents, in integers.

    The error of an element is a multiple of a tiny power of two; cut to 2^-11 of the smaller scale
    its square sums exactly in int32 (at most 32 * 2^24), in whatever order a backend adds.
    """
    v = scaled_magnitude(x, byte)

    def squared_error(unit: float) -> Array:
        quantized = code_value(nearest_code(v * (1 / unit))) * unit
        error = (jnp.abs(v - quantized) * 2048.0).astype(jnp.int32)
        return jnp.sum(error * error, axis=axis, keepdims=True)

    return (squared_error(2.0) < squared_error(1.0)) & (byte != NAN_BYTE)


def scaled_magnitude(x: Float[Array, "..."], byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """|x| / 2^(byte-127) in float32, exact wherever it is at least 2^-22, also for subnormal x."""
    bits = magnitude_bits(x)
    exponent = 127 - byte.astype(jnp.int32)
    half = exponent >> 1
    normal = _from_bits(bits) * _power_of_two(half) * _power_of_two(exponent - half)
    # A subnormal is its mantissa field times 2^-149; only the lowest bytes leave anything of it.
    subnormal_unit = _power_of_two(jnp.maximum(exponent - 149, -126))
    subnormal = bits.astype(jnp.int32).astype(jnp.float32) * subnormal_unit
    return jnp.where(bits <= _MANTISSA, subnormal, normal)


def nearest_code(v: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """E2M1 magnitude code 0..7 nearest to v >= 0, ties to the even code, 7 (= 6.0) above 5."""
    passed = (v > 0.25, v >= 0.75, v > 1.25, v >= 1.75, v > 2.5, v >= 3.5, v > 5.0)
    return sum((above.astype(jnp.uint8) for above in passed), jnp.zeros(v.shape, jnp.uint8))


def stochastic_code(
    v: Float[Array, "..."], random_bits: UInt32[Array, "..."]
) -> UInt8[Array, "..."]:
    """E2M1 magnitude code of v >= 0, rounded up with probability (v - lower) / (upper - lower).

    Args:
      v: scaled magnitudes; those above 6 saturate, which is biased.
      random_bits: 32 independent bits an element; the upper 24 make the uniform number in [0, 1),
        so that a value on the grid never moves.
    """
    reached = ((v >= value).astype(jnp.uint8) for value in E2M1_VALUES[1:])
    lower = sum(reached, jnp.zeros(v.shape, jnp.uint8))
    step = jnp.where(v < 2.0, 0.5, jnp.where(v < 4.0, 1.0, 2.0))
    uniform = (random_bits >> 8).astype(jnp.float32) * 2.0**-24
    up = (uniform * step < v - code_value(lower)) & (v < 6.0)
    return lower + up.astype(jnp.uint8)


def code_value(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The float32 magnitude 0..6 of codes 0..7."""
    code = code.astype(jnp.int32)
    normal = _from_bits((((code >> 1) + 126) << 23 | (code & 1) << 22).astype(jnp.uint32))
    return jnp.where(code < 2, code.astype(jnp.float32) * 0.5, normal)


def signed_code(code: UInt8[Array, "..."], x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Adds the sign bit of x, -0 and negative underflow included, to magnitude codes."""
    sign = _bits(x.astype(jnp.float32)) >> 28 & 8
    return code | sign.astype(jnp.uint8)


def pack(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Packs pairs of 4-bit codes along `axis`: the even index in the low nibble."""
    axis %= codes.ndim
    shape = codes.shape
    pairs = codes.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | high << 4


def unpack(packed: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Inverse of `pack`."""
    axis %= packed.ndim
    shape = packed.shape
    pairs = jnp.stack([packed & 15, packed >> 4], axis=axis + 1)
    return pairs.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


def decode(codes: UInt8[Array, "..."], byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Exact float32 value of signed codes under (broadcast) scale bytes; NaN under byte 255.

    Assembled from integer fields, so that values below 2^-126 come out as the subnormals they are.
    """
    code = codes.astype(jnp.int32) & 7
    exponent = byte.astype(jnp.int32) + (code >> 1) - 1
    mantissa = jnp.where(code > 1, code & 1, 0)
    normal = jnp.where(
        exponent < _EXPONENT_MAX, exponent << 23 | mantissa << 22, _EXPONENT_MAX << 23
    )
    # (1 + m/2) * 2^(exponent-127), counted in units of 2^-149; the exponent is 0 or -1 here.
    subnormal = (2 | mantissa) << jnp.minimum(exponent + 21, 21)
    bits = jnp.where(exponent > 0, normal, subnormal)
    bits = jnp.where(code == 0, 0, bits).astype(jnp.uint32)
    bits |= (codes.astype(jnp.uint32) & 8) << 28
    return jnp.where(byte == NAN_BYTE, jnp.float32(jnp.nan), _from_bits(bits))


def _bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(exponent: Array) -> Array:
    """2^exponent for int32 exponents of normal float32 numbers."""
    return _from_bits((exponent + 127).astype(jnp.uint32) << 23)


def check_scale_rule(scale_rule: str, rounding: str) -> None:
    """Raises ValueError unless the rule exists and suits the rounding."""
    if scale_rule not in SCALE_RULES:
        raise ValueError(
            f"scale_rule is {scale_rule!r}, but must be one of {', '.join(SCALE_RULES)}."
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding is {rounding!r}, but must be 'nearest' or 'stochastic'.")
    if rounding == "stochastic" and scale_rule not in NONSATURATING_RULES:
        raise ValueError(
            f"scale_rule is {scale_rule!r}, under which values saturate and stochastic rounding is "
            f"biased; use {' or '.join(NONSATURATING_RULES)}."
        )


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 random bits an element, a function of the key and the element's global index alone."""
    return jax.random.bits(key, shape, jnp.uint32)
