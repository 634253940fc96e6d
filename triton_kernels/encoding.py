"""Device functions that turn groups of values, held in registers, into MXFP4 codes and scale bytes.

A *group* is what one thread works on: the 32 values of a block, or the 64 or 128 of a Hadamard
block, as a tuple of tensors, one for each position. So butterflies and maxima need neither shuffles
nor shared memory, whatever axis the group runs along.

The bits are those of `adahop_jax.e2m1` and `adahop_jax.hadamard`, the reference. One exception: in
transformed blocks whose largest magnitude passes 2^110, the factor that scales a block would be a
subnormal number, and codes at the middle between two neighbours may round the other way.
"""

import triton
import triton.language as tl

BLOCK = 32
NAN_BYTE = tl.constexpr(255)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _butterfly(values, DISTANCE: tl.constexpr):
    out = ()
    for i in tl.static_range(len(values)):
        if i & DISTANCE:
            out = out + (values[i - DISTANCE] - values[i],)
        else:
            out = out + (values[i] + values[i + DISTANCE],)
    return out


@triton.jit
def transform(values, SIZE: tl.constexpr):
    """Unscaled Hadamard transforms of SIZE consecutive values, neighbours first.

    Returns:
      The values and, for each block of 32, magnitudes whose maximum is the block's.
    """
    for level in tl.static_range(6):
        if (2 << level) < SIZE:
            values = _butterfly(values, 1 << level)
    magnitudes = ()
    if SIZE > 1 and SIZE <= 32:
        # Of a + b and a - b the larger is |a| + |b|, rounding included.
        for i in tl.static_range(len(values)):
            if i & (SIZE // 2):
                magnitudes = magnitudes + (magnitudes[i - SIZE // 2],)
            else:
                m = tl.abs(values[i]) + tl.abs(values[i + SIZE // 2])
                magnitudes = magnitudes + (m,)
    if SIZE > 1:
        values = _butterfly(values, SIZE // 2)
    if SIZE == 1 or SIZE > 32:
        for i in tl.static_range(len(values)):
            magnitudes = magnitudes + (tl.abs(values[i]),)
    return values, magnitudes


@triton.jit
def largest_magnitude(magnitudes, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """The largest magnitude of a block after a transform of SIZE, by a tree; NaN if one is."""
    level = ()
    for j in tl.static_range(32):
        # Of pairs that `transform` gave one magnitude, one is enough.
        if SIZE == 1 or SIZE > 32 or (j & (SIZE // 2)) == 0:
            level = level + (magnitudes[FIRST + j],)
    for _ in tl.static_range(5):
        if len(level) > 1:
            above = ()
            for j in tl.static_range(len(level) // 2):
                above = above + (_larger(level[j], level[j + len(level) // 2]),)
            level = above
    return level[0]


@triton.jit
def floor_byte(largest, RULE: tl.constexpr):
    """The E8M0 byte of blocks by their largest magnitude; see `adahop_jax.e2m1.scale_bytes`.

    Rule 'mse' starts from the floor byte.
    """
    bits = largest.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    byte = exponent - 2
    if RULE == "even":
        byte += ((bits & 0x7FFFFF) >= 0x600000).to(tl.int32)
    elif RULE == "ceil":
        byte += ((bits & 0x7FFFFF) >= 1).to(tl.int32)
    elif RULE == "rceil":
        byte += ((bits & 0x7FFFFF) >= 0x400001).to(tl.int32)
    return tl.where(exponent == 255, NAN_BYTE, tl.maximum(byte, 0))


@triton.jit
def inverse_scale(byte):
    """2^(127 - byte), float32, for bytes up to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _grid_units(v):
    """|v| in units of its E2M1 step (0.5 below 2, 1 below 4, then 2), and 2 log2(step) + 2."""
    magnitude = tl.abs(v)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127)
    units = magnitude * ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    return units, 2 * (exponent - 127)


@triton.jit
def _to_nearest_even(units):
    """Rounds 0 <= units < 2^22: there float32 has no fractions."""
    return (units + 8388608.0) - 8388608.0


@triton.jit
def nearest_value(v):
    """The E2M1 magnitude nearest to |v|."""
    units, offset = _grid_units(v)
    step = ((126 + (offset >> 1)) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(_to_nearest_even(units) * step, 6.0)


@triton.jit
def _signed_code(v, count, offset):
    code = tl.minimum(count.to(tl.int32) + offset, 7)
    return code | ((v.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def nearest_code(v):
    """Signed codes, int32, of scaled values; ties to the even code."""
    units, offset = _grid_units(v)
    return _signed_code(v, _to_nearest_even(units), offset)


@triton.jit
def stochastic_code(v, noise):
    """Signed codes rounded up with probability equal to the fraction, to 2^-17.

    Args:
      v: scaled values of at most 6.
      noise: 16 random bits an element, int32 or uint32.
    """
    units, offset = _grid_units(v)
    lower = tl.floor(units)
    # Odd multiples of 2^-17: unbiased to half a step of 2^-16, and a value on the grid stays.
    threshold = ((noise & 0xFFFF).to(tl.float32) + 0.5) * 1.52587890625e-05
    return _signed_code(v, lower + (threshold < units - lower).to(tl.float32), offset)


@triton.jit
def packed_word(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight nearest codes in an int32, the first in the lowest bits."""
    return (
        nearest_code(v0)
        | (nearest_code(v1) << 4)
        | (nearest_code(v2) << 8)
        | (nearest_code(v3) << 12)
        | (nearest_code(v4) << 16)
        | (nearest_code(v5) << 20)
        | (nearest_code(v6) << 24)
        | (nearest_code(v7) << 28)
    )


# An E2M1 value times 2^-6 is an E4M3 number whose bits are s 0 c c c 0 0 with c the code, so that
# the pairwise conversion of sm_89 finishes the work. Before it a value is rounded to the E2M1 grid,
# by adding and subtracting 1.5 * 2^22 p with p = max(2^floor(log2 |v|), 2^-6), twice the grid's
# step. What rounds to 8 (0x20) becomes 6 (0x1C). Signs come from the value itself: a sum loses -0.
_ROUND = """
abs.f32 a, ${i};
max.f32 a, a, 0f3C800000;
mov.b32 t, a;
and.b32 t, t, 0x7F800000;
mov.b32 a, t;
fma.rn.f32 w, a, 0f4AC00000, ${i};
fma.rn.f32 q{j}, a, 0fCAC00000, w;
"""
_CONVERT = """
cvt.rn.satfinite.e4m3x2.f32 lo, q1, q0;
cvt.rn.satfinite.e4m3x2.f32 hi, q3, q2;
mov.b32 {codes}, {{lo, hi}};
and.b32 t, {codes}, 0x20202020;
shr.u32 t, t, 3;
sub.u32 {codes}, {codes}, t;
cvt.rn.satfinite.e4m3x2.f32 lo, ${i1}, ${i0};
cvt.rn.satfinite.e4m3x2.f32 hi, ${i3}, ${i2};
mov.b32 {signs}, {{lo, hi}};
"""


def packed_word_assembly() -> str:
    """PTX from eight values times 2^-6 ($1 to $8) to eight codes ($0)."""
    lines = ["{", ".reg .f32 a, w, q0, q1, q2, q3;", ".reg .b32 t, even, odd, seven, sodd;"]
    lines.append(".reg .b16 lo, hi;")
    for codes, signs, first in (("even", "seven", 1), ("odd", "sodd", 2)):
        operands = [first + 2 * j for j in range(4)]
        lines += [_ROUND.format(i=i, j=j) for j, i in enumerate(operands)]
        names = {f"i{j}": i for j, i in enumerate(operands)}
        lines.append(_CONVERT.format(codes=codes, signs=signs, **names))
    lines.append(
        """
shr.u32 even, even, 2;
and.b32 even, even, 0x07070707;
shl.b32 odd, odd, 2;
and.b32 odd, odd, 0x70707070;
or.b32 even, even, odd;
shr.u32 seven, seven, 4;
and.b32 seven, seven, 0x08080808;
or.b32 even, even, seven;
and.b32 sodd, sodd, 0x80808080;
or.b32 $0, even, sodd;
}"""
    )
    return "\n".join(lines)


_PACKED_WORD = tl.constexpr(packed_word_assembly())


@triton.jit
def packed_word_ptx(v0, v1, v2, v3, v4, v5, v6, v7):
    """As `packed_word`, of values times 2^-6: about eight instructions a value."""
    return tl.inline_asm_elementwise(
        _PACKED_WORD,
        "=r,r,r,r,r,r,r,r,r",
        [v0, v1, v2, v3, v4, v5, v6, v7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
