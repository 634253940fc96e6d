"""Fused (signs,) Hadamard transform and MXFP4 quantization, along one axis or both in one read.

Both results are *contraction-major*: codes [free, 16 blocks] and scale bytes [free, blocks], where
the contraction axis lies last, whichever axis of the matrix it is. That is what the matrix units
take, so products need no transposes.

Bytes moved a value: 2 read (bfloat16) and 17/32 written for each axis. Operations: about 15
instructions a value and axis with a transform of 32, so that both axes at once are near the limit
of instruction issue as well as that of memory.
"""

import math
import struct
from typing import NamedTuple

import triton
import triton.language as tl

from triton_kernels.encoding import (
    BLOCK,
    NAN_BYTE,
    floor_byte,
    inverse_scale,
    largest_magnitude,
    nearest_value,
    packed_word,
    packed_word_ptx,
    stochastic_code,
    transform,
)
from triton_kernels.launch import ArraySpec, Launch


@triton.jit
def _halves(t, WIDTH: tl.constexpr):
    """The even and the odd columns of [R, WIDTH]."""
    return tl.split(tl.reshape(t, (t.shape[0], WIDTH // 2, 2)))


@triton.jit
def _pair(t):
    even, odd = _halves(t, 2)
    return tl.reshape(even, (t.shape[0],)), tl.reshape(odd, (t.shape[0],))


@triton.jit
def _columns(t, WIDTH: tl.constexpr):
    """The columns of [R, WIDTH] as a tuple; WIDTH is 4 or 8."""
    even, odd = _halves(t, WIDTH)
    if WIDTH == 4:
        a, c = _pair(even)
        b, d = _pair(odd)
        return a, b, c, d
    else:
        a, c, e, g = _columns(even, 4)
        b, d, f, h = _columns(odd, 4)
        return a, b, c, d, e, f, g, h


@triton.jit
def _load_along_rows(
    x_ptr, signs_ptr, row, col, inside, COLS,
    GROUP: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, SIGNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Groups of consecutive columns, read VECTOR at a time."""
    base = x_ptr + row.to(tl.int64) * COLS + col
    lane = tl.arange(0, VECTOR)[None, :]
    out = ()
    for first in tl.static_range(0, GROUP, VECTOR):
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (col[:, None] + first + lane < COLS)
        t = tl.load(base[:, None] + (first + lane), mask=mask, other=0.0).to(tl.float32)
        if SIGNS == "block":
            t = t * tl.load(signs_ptr + (first + lane) % SIZE).to(tl.float32)
        elif SIGNS == "full":
            sign = tl.load(signs_ptr + col[:, None] + first + lane, mask=mask, other=1)
            t = t * sign.to(tl.float32)
        out = out + _columns(t, VECTOR)
    return out


@triton.jit
def _load_along_columns(
    x_ptr, signs_ptr, row, col, inside, ROWS, COLS,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, SIGNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Groups of consecutive rows, one group for each of WIDTH adjacent columns."""
    lane = tl.arange(0, WIDTH)[None, :]
    base = x_ptr + row.to(tl.int64)[:, None] * COLS + (col[:, None] + lane)
    column_mask = inside[:, None] & (col[:, None] + lane < COLS)
    left = ()
    right = ()
    for j in tl.static_range(GROUP):
        mask = column_mask
        if not EVEN:
            mask = mask & (row[:, None] + j < ROWS)
        t = tl.load(base + j * COLS, mask=mask, other=0.0).to(tl.float32)
        if SIGNS == "block":
            t = t * tl.load(signs_ptr + j % SIZE).to(tl.float32)
        elif SIGNS == "full":
            sign = tl.load(signs_ptr + row + j, mask=row + j < ROWS, other=1)
            t = t * sign.to(tl.float32)[:, None]
        if WIDTH == 2:
            a, b = _pair(t)
            left = left + (a,)
            right = right + (b,)
        else:
            left = left + (tl.reshape(t, (t.shape[0],)),)
    return left, right


@triton.jit
def _next_exponent_is_better(values, FIRST: tl.constexpr, factor):
    """Compares squared errors, in integers: see `adahop_jax.e2m1`."""
    below = tl.zeros_like(factor).to(tl.int32)
    above = tl.zeros_like(factor).to(tl.int32)
    for j in tl.static_range(32):
        v = tl.abs(values[FIRST + j] * factor)
        e1 = (tl.abs(v - nearest_value(v)) * 2048.0).to(tl.int32)
        e2 = (tl.abs(v - nearest_value(v * 0.5) * 2.0) * 2048.0).to(tl.int32)
        below += e1 * e1
        above += e2 * e2
    return above < below


@triton.jit
def _stochastic_word(v, key_ptr, counter):
    """Eight stochastic codes; the noise is Philox of the key and a counter an eight of values."""
    seed = tl.load(key_ptr).to(tl.uint64) << 32 | tl.load(key_ptr + 1).to(tl.uint64)
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    noise = tl.philox(seed, low, high, zero, zero)
    word = tl.zeros_like(low).to(tl.int32)
    for j in tl.static_range(8):
        bits = (noise[j // 2] >> (16 * (j % 2))).to(tl.int32)
        word |= stochastic_code(v[j], bits) << (4 * j)
    return word


@triton.jit
def _store_group(
    values, codes_ptr, scales_ptr, key_ptr, outer, block, inside, blocks,
    GROUP: tl.constexpr, SIZE: tl.constexpr, GAIN: tl.constexpr, RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Encodes a group; `outer` is its index along the free axis, `block` its first block."""
    ROWS: tl.constexpr = outer.shape[0]
    values, magnitudes = transform(values, SIZE)
    for sub in tl.static_range(GROUP // 32):
        byte = floor_byte(largest_magnitude(magnitudes, sub * 32, SIZE) * GAIN, RULE)
        # GAIN times a power of two: the transform's scaling costs nothing.
        factor = inverse_scale(tl.minimum(byte, 253)) * GAIN
        if RULE == "mse":
            better = _next_exponent_is_better(values, sub * 32, factor) & (byte != NAN_BYTE)
            byte += better.to(tl.int32)
            factor = inverse_scale(tl.minimum(byte, 253)) * GAIN
        if FAST and not STOCHASTIC:
            factor = factor * 0.015625
        position = outer.to(tl.int64) * blocks + block + sub
        words = ()
        for w in tl.static_range(4):
            v = ()
            for j in tl.static_range(8):
                v = v + (values[sub * 32 + w * 8 + j] * factor,)
            if STOCHASTIC:
                word = _stochastic_word(v, key_ptr, position * 4 + w)
            elif FAST:
                word = packed_word_ptx(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
            else:
                word = packed_word(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
            words = words + (tl.where(byte == NAN_BYTE, 0, word),)
        quad = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        quad = tl.reshape(quad, (ROWS, 4))
        where = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + position[:, None] * 4
        tl.store(where + tl.arange(0, 4)[None, :], quad, mask=inside[:, None])
        tl.store(scales_ptr + position, byte.to(tl.uint8), mask=inside)


@triton.jit
def _encode_tile(
    program, x_ptr, signs_ptr, key_ptr, codes_ptr, scales_ptr, ROWS, COLS, blocks,
    AXIS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, GAIN: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Encodes a tile along one contraction axis."""
    across = tl.cdiv(COLS, TILE_COLS)
    row0 = program // across * TILE_ROWS
    col0 = program % across * TILE_COLS
    if AXIS == 1:
        ACROSS: tl.constexpr = TILE_COLS // GROUP
        for first in tl.static_range(0, TILE_ROWS * ACROSS, LANES):
            index = first + tl.arange(0, LANES)
            row = row0 + index // ACROSS
            col = col0 + index % ACROSS * GROUP
            inside = (row < ROWS) & (col < COLS)
            values = _load_along_rows(
                x_ptr, signs_ptr, row, col, inside, COLS, GROUP, VECTOR, EVEN, SIGNS, SIZE
            )
            _store_group(
                values, codes_ptr, scales_ptr, key_ptr, row, col // 32, inside, blocks,
                GROUP, SIZE, GAIN, RULE, STOCHASTIC, FAST,
            )  # fmt: skip
    else:
        DOWN: tl.constexpr = TILE_ROWS // GROUP
        # Two columns a thread make reads of 4 bytes; longer groups would fill the registers.
        WIDTH: tl.constexpr = 2 if GROUP == 32 and RULE != "mse" else 1
        for first in tl.range(0, DOWN * (TILE_COLS // WIDTH), LANES):
            index = first + tl.arange(0, LANES)
            # Neighbouring lanes take groups below one another, whose codes lie side by side.
            row = row0 + index % DOWN * GROUP
            col = col0 + index // DOWN * WIDTH
            inside = row < ROWS
            pair = _load_along_columns(
                x_ptr, signs_ptr, row, col, inside, ROWS, COLS, WIDTH, GROUP, EVEN, SIGNS, SIZE
            )
            for side in tl.static_range(WIDTH):
                _store_group(
                    pair[side], codes_ptr, scales_ptr, key_ptr, col + side, row // 32,
                    inside & (col + side < COLS), blocks,
                    GROUP, SIZE, GAIN, RULE, STOCHASTIC, FAST,
                )  # fmt: skip


@triton.jit
def quantize_axis(
    x_ptr, signs_ptr, key_ptr, ROWS, COLS, BLOCKS, codes_ptr, scales_ptr,
    AXIS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, GAIN: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Blocks along one axis."""
    _encode_tile(
        tl.program_id(0), x_ptr, signs_ptr, key_ptr, codes_ptr, scales_ptr, ROWS, COLS, BLOCKS,
        AXIS, TILE_ROWS, TILE_COLS, LANES, VECTOR, EVEN, SIGNS, GROUP,
        SIZE, GAIN, RULE, STOCHASTIC, FAST,
    )  # fmt: skip


@triton.jit
def quantize_both_axes(
    x_ptr, signs0_ptr, key0_ptr, signs1_ptr, key1_ptr, ROWS, COLS, BLOCKS0, BLOCKS1,
    codes0_ptr, scales0_ptr, codes1_ptr, scales1_ptr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    EVEN0: tl.constexpr, SIGNS0: tl.constexpr, GROUP0: tl.constexpr, SIZE0: tl.constexpr,
    GAIN0: tl.constexpr, RULE0: tl.constexpr, STOCHASTIC0: tl.constexpr,
    EVEN1: tl.constexpr, SIGNS1: tl.constexpr, GROUP1: tl.constexpr, SIZE1: tl.constexpr,
    GAIN1: tl.constexpr, RULE1: tl.constexpr, STOCHASTIC1: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Blocks along axis 0 and along axis 1; the tile's second read comes from a cache."""
    program = tl.program_id(0)
    _encode_tile(
        program, x_ptr, signs1_ptr, key1_ptr, codes1_ptr, scales1_ptr, ROWS, COLS, BLOCKS1,
        1, TILE_ROWS, TILE_COLS, LANES, VECTOR, EVEN1, SIGNS1, GROUP1,
        SIZE1, GAIN1, RULE1, STOCHASTIC1, FAST,
    )  # fmt: skip
    _encode_tile(
        program, x_ptr, signs0_ptr, key0_ptr, codes0_ptr, scales0_ptr, ROWS, COLS, BLOCKS0,
        0, TILE_ROWS, TILE_COLS, LANES, VECTOR, EVEN0, SIGNS0, GROUP0,
        SIZE0, GAIN0, RULE0, STOCHASTIC0, FAST,
    )  # fmt: skip


class Tile(NamedTuple):
    """Rows and columns of a program's tile, groups worked on at a time, and warps."""

    rows: int
    cols: int
    lanes: int
    warps: int


TILE = Tile(128, 128, 128, 4)
"""Of one axis: 128 rows fill whole sectors with the codes of a column. At 16384 x 14336 on one H200
0.21 to 0.24 ms an axis; 256 x 64 took 0.26 ms."""

TILE_BOTH = Tile(64, 128, 128, 4)
"""Of both axes: 0.42 ms there, 128 x 128 took 0.43 to 0.46 ms, two warps instead of four 0.47."""


class Encoding(NamedTuple):
    """How blocks along one axis are made.

    Attributes:
      scale_rule: 'floor', 'even', 'ceil', 'rceil' or 'mse'.
      stochastic: rounding with random bits, for 'ceil' and 'rceil'.
      block_size: 16, 32, 64 or 128, of the Hadamard transform before; None for none.
      signs: None; 'block' for [block_size] factors of +1 and -1; 'full' for [length].
    """

    scale_rule: str = "floor"
    stochastic: bool = False
    block_size: int | None = None
    signs: str | None = None


def count_blocks(length: int, encoding: Encoding) -> int:
    """Blocks along an axis of this length, that a transform may fill up to its block size."""
    size = encoding.block_size or 1
    return -(-(-(-length // size) * size) // BLOCK)


def plan(
    shape: tuple[int, int],
    dtype: str,
    encodings: dict[int, Encoding],
    *,
    fast: bool = True,
    tile: Tile | None = None,
) -> Launch:
    """Plans the quantization of a matrix.

    Args:
      shape: of the matrix, no axis of length 0.
      dtype: its dtype.
      encodings: for contraction axis 0, 1 or both (in this order: outputs follow it).
      fast: conversions of sm_89 and above, instead of plain Triton.
      tile: instead of a measured one; sides are powers of two, of at least the block size.

    Returns:
      A launch with the inputs x and, for each axis, signs (int8) and key (uint32 [2]); what an
      encoding does not need may be x itself. Outputs for each axis: codes uint8 [free, 16 blocks]
      and scale bytes uint8 [free, blocks].
    """
    rows, cols = shape
    tile = tile or (TILE if len(encodings) == 1 else TILE_BOTH)
    if max(encoding.block_size or 1 for encoding in encodings.values()) > tile.rows:
        tile = TILE
    inputs = [ArraySpec(shape, dtype)]
    outputs, constants, counts = [], {}, []
    for axis, encoding in sorted(encodings.items()):
        length, free = shape[axis], shape[1 - axis]
        blocks = count_blocks(length, encoding)
        size = encoding.block_size or 1
        group = max(BLOCK, size)
        suffix = str(axis) if len(encodings) > 1 else ""
        signs = {None: None, "block": (size,), "full": (length,)}[encoding.signs]
        inputs += [
            ArraySpec(signs, "int8") if signs else inputs[0],
            ArraySpec((2,), "uint32") if encoding.stochastic else inputs[0],
        ]
        outputs += [ArraySpec((free, 16 * blocks), "uint8"), ArraySpec((free, blocks), "uint8")]
        counts.append(blocks)
        constants |= {
            f"EVEN{suffix}": length % group == 0,
            f"SIGNS{suffix}": encoding.signs or "none",
            f"GROUP{suffix}": group,
            f"SIZE{suffix}": size,
            f"GAIN{suffix}": _float32(1 / math.sqrt(size)),
            f"RULE{suffix}": encoding.scale_rule,
            f"STOCHASTIC{suffix}": encoding.stochastic,
        }
    if len(encodings) == 1:
        constants["AXIS"] = next(iter(encodings))
    constants |= {
        "TILE_ROWS": tile.rows,
        "TILE_COLS": tile.cols,
        "LANES": tile.lanes,
        "VECTOR": 4 if dtype == "float32" else 8,
        "FAST": fast,
    }
    return Launch(
        kernel=quantize_axis if len(encodings) == 1 else quantize_both_axes,
        grid=(-(-rows // tile.rows) * -(-cols // tile.cols),),
        inputs=tuple(inputs),
        scalars=(rows, cols, *counts),
        outputs=tuple(outputs),
        constants=tuple(constants.items()),
        num_warps=tile.warps,
    )


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
