"""Packed MXFP4 to E4M3 carriers with one power-of-two factor a row, for FP8 matrix units.

An E2M1 value times 2^t is an E4M3 number for -8 <= t <= 6. The factor of a row brings its largest
block to t = 6, so that blocks down to 2^-14 of it are exact; below, values round to multiples of
2^-17 of the row's largest block scale, and finally to zero.

Bytes moved a value: 17/32 read, 1 written; about five instructions.
"""

import triton
import triton.language as tl

from triton_kernels.launch import ArraySpec, Launch

# The bits of a code are those of a float16 times 2^-14: c at bits 9 to 11, the sign at 15. Each
# step takes two codes of a byte pair, in both halves of a register. float16 reaches from 2^-24 to
# 2^15, so the factor 2^(14+t) comes in two parts: 2^7, and 2^(7+t) in $3. Smallest result: 2^-21.
_PAIR = """
shl.b32 c, z, {code};
and.b32 c, c, 0x0E000E00;
shl.b32 s, z, {sign};
and.b32 s, s, 0x80008000;
or.b32 c, c, s;
mul.rn.f16x2 c, c, k;
mul.rn.f16x2 c, c, $3;
cvt.rn.satfinite.e4m3x2.f16x2 {out}, c;
"""


def decoding_assembly() -> str:
    """PTX from eight codes ($2) and a pair of float16 factors ($3) to eight E4M3 ($0, $1)."""
    lines = ["{", ".reg .b32 z, c, s, k, e;", ".reg .b16 even, odd;", "mov.b32 k, 0x58005800;"]
    for out, selector in (("$0", "0x4140"), ("$1", "0x4342")):
        lines.append(f"prmt.b32 z, $2, 0, {selector};")
        lines.append(_PAIR.format(code=9, sign=12, out="even"))
        lines.append(_PAIR.format(code=5, sign=8, out="odd"))
        lines += ["mov.b32 e, {even, odd};", f"prmt.b32 {out}, e, 0, 0x3120;"]
    return "\n".join(lines + ["}"])


_DECODE = tl.constexpr(decoding_assembly())


@triton.jit
def _decode_word_ptx(word, factor):
    return tl.inline_asm_elementwise(
        _DECODE, "=&r,=&r,r,r", [word, factor], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _value(code):
    """The E2M1 value of a signed code, float32."""
    magnitude = code & 7
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    value = tl.where(
        magnitude < 2, magnitude.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True)
    )
    return tl.where(code >= 8, -value, value)


@triton.jit
def _decode_word(word, power):
    """As the PTX, by float32 arithmetic."""
    first = tl.zeros_like(word)
    second = tl.zeros_like(word)
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True)
    for j in tl.static_range(8):
        value = _value((word >> (4 * j)) & 15) * factor
        byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        if j < 4:
            first |= byte << (8 * j)
        else:
            second |= byte << (8 * j - 32)
    return first, second


@triton.jit
def decode_rows(
    codes_ptr, scales_ptr, ROWS, BLOCKS, values_ptr, factors_ptr,
    TILE_ROWS: tl.constexpr, TILE_BLOCKS: tl.constexpr, ALL_BLOCKS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A tile of rows and blocks; each program finds its rows' largest scales anew."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = row < ROWS
    row = row.to(tl.int64)
    every = tl.arange(0, ALL_BLOCKS)
    all_bytes = tl.load(
        scales_ptr + row[:, None] * BLOCKS + every[None, :],
        mask=inside[:, None] & (every < BLOCKS)[None, :],
        other=0,
    ).to(tl.int32)
    largest = tl.max(tl.where(all_bytes == 255, 0, all_bytes), axis=1)
    if tl.program_id(1) == 0:
        # 2^(largest - 133), in two factors since the exponent may lie below -126.
        normal = (tl.maximum(largest - 6, 1) << 23).to(tl.float32, bitcast=True)
        rest = ((127 + tl.minimum(largest - 7, 0)) << 23).to(tl.float32, bitcast=True)
        tl.store(factors_ptr + row, normal * rest, mask=inside)
    block = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    mask = inside[:, None] & (block < BLOCKS)[None, :]
    position = row[:, None] * BLOCKS + block[None, :]
    byte = tl.load(scales_ptr + position, mask=mask, other=0).to(tl.int32)
    # Below 2^-20 nothing is left of a block.
    power = tl.maximum(byte - largest[:, None] + 6, -20)
    lane = tl.arange(0, 4)[None, None, :]
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    mask = mask[:, :, None]
    word = tl.load(words_ptr + position[:, :, None] * 4 + lane, mask=mask, other=0)
    if FAST:
        half = (power + 22) << 10
        half = half | (half << 16)
        first, second = _decode_word_ptx(word, tl.broadcast_to(half[:, :, None], word.shape))
    else:
        first, second = _decode_word(word, tl.broadcast_to(power[:, :, None], word.shape))
    nan = (byte == 255)[:, :, None]
    first = tl.where(nan, 0x7F7F7F7F, first)
    second = tl.where(nan, 0x7F7F7F7F, second)
    both = tl.reshape(tl.join(first, second), (TILE_ROWS, TILE_BLOCKS, 8))
    out = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + position[:, :, None] * 8
    tl.store(out + tl.arange(0, 8)[None, None, :], both, mask=mask)


def plan(rows: int, blocks: int, *, fast: bool = True) -> Launch:
    """Plans the decoding of a packed matrix, neither axis empty.

    Args:
      rows: of the matrix.
      blocks: of 32 values, a row.
      fast: conversions of sm_89 and above, instead of plain Triton.

    Returns:
      A launch with the inputs codes uint8 [rows, 16 blocks] and scale bytes uint8 [rows, blocks],
      and the outputs values float8_e4m3fn [rows, 32 blocks] and factors float32 [rows]; what a row
      stands for is values times factor.
    """
    all_blocks = 1 << (blocks - 1).bit_length()
    tile_blocks = min(all_blocks, 128)
    tile_rows = 512 // tile_blocks
    return Launch(
        kernel=decode_rows,
        grid=(-(-rows // tile_rows), -(-blocks // tile_blocks)),
        inputs=(ArraySpec((rows, 16 * blocks), "uint8"), ArraySpec((rows, blocks), "uint8")),
        scalars=(rows, blocks),
        outputs=(ArraySpec((rows, 32 * blocks), "float8_e4m3fn"), ArraySpec((rows,), "float32")),
        constants=(
            ("TILE_ROWS", tile_rows),
            ("TILE_BLOCKS", tile_blocks),
            ("ALL_BLOCKS", all_blocks),
            ("FAST", fast),
        ),
        num_warps=4,
    )
