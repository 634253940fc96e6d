"""The product of two MXFP4 matrices, on matrix units that take FP4 with block scales.

out[m, n] = sum_k a[m, k] b[n, k], accumulated in float32 and rounded once. 2 M N K operations; at
least 17/32 (M K + N K) + 2 M N bytes (a 16-bit output).

A NaN block makes its row or column of the output NaN: the units read scale byte 255 as NaN. Where
the last step reaches past the end of K, codes are read as 0 and scales as one, since 0 times a NaN
would be NaN.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from triton_kernels.launch import ArraySpec, Launch
from triton_kernels.tiling import store_tile, tile_of

_E2M1 = tl.constexpr("e2m1")


@triton.jit
def _load(
    x_ptr, row, step, ROWS, STRIDE, padding,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] of a matrix of bytes, from `row` and column step * WIDTH on."""
    # Rows past the last are not stored, so that any bytes do for them.
    rows = tl.minimum(row + tl.arange(0, HEIGHT), ROWS - 1).to(tl.int64)
    cols = step * WIDTH + tl.arange(0, WIDTH)
    at = x_ptr + rows[:, None] * STRIDE + cols[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(cols < STRIDE)[None, :], other=padding)


@triton.jit
def scaled_matmul(
    a, a_scales_ptr, b, b_scales_ptr, M, N, K, out_ptr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One output tile a program; a and b are tensor descriptors or pointers."""
    i, j = tile_of(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP)
    row = i * TILE_M
    col = j * TILE_N

    # From K alone the compiler would not know how these are aligned, and load bytes one by one.
    blocks = tl.multiple_of(K // 32, ALIGNMENT)
    stride = blocks * 16
    BYTES: tl.constexpr = TILE_K // 2
    BLOCKS: tl.constexpr = TILE_K // 32
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(K, TILE_K)):
        if DESCRIPTOR:
            x = a.load([row, step * BYTES])
            y = b.load([col, step * BYTES])
        else:
            x = _load(a, row, step, M, stride, 0, TILE_M, BYTES, EVEN)
            y = _load(b, col, step, N, stride, 0, TILE_N, BYTES, EVEN)
        x_scales = _load(a_scales_ptr, row, step, M, blocks, 127, TILE_M, BLOCKS, EVEN)
        y_scales = _load(b_scales_ptr, col, step, N, blocks, 127, TILE_N, BLOCKS, EVEN)
        acc = tl.dot_scaled(x, x_scales, _E2M1, y.T, y_scales, _E2M1, acc)
    store_tile(out_ptr, acc, row, col, M, N)


class Tiles(NamedTuple):
    """One row of the tile table.

    Attributes:
      m: rows of an output tile.
      n: its columns.
      k: of the contraction a step, a multiple of 32.
      group: rows of tiles that are walked together.
      stages: depth of software pipelining.
      warps: a program's.
      descriptor: whether codes come through tensor descriptors.
    """

    m: int
    n: int
    k: int
    group: int
    stages: int
    warps: int
    descriptor: bool


# Choices by what the compiler reports: the FP4 instruction, no spilled registers, operands that are
# copied to shared memory asynchronously, and stages that fit there. None of it is measured.
TILES: dict[str, Tiles] = {
    "sm_100": Tiles(128, 256, 256, 8, stages=4, warps=8, descriptor=True),
    "sm_120": Tiles(128, 128, 256, 8, stages=3, warps=8, descriptor=True),
    "gfx950": Tiles(256, 128, 256, 8, stages=2, warps=8, descriptor=False),
}
"""The tiles of each family of hardware with FP4 units."""

_DTYPES = ("float32", "bfloat16", "float16")


def plan(
    m: int, n: int, k: int, out_dtype: str, *, target: str = "sm_100", tile: Tiles | None = None
) -> Launch:
    """Plans a product.

    Args:
      m: rows of a, at least 1.
      n: rows of b, at least 1.
      k: the contraction, a multiple of 32.
      out_dtype: 'float32', 'bfloat16' or 'float16'.
      target: the family of hardware, a name in `TILES`.
      tile: instead of the table's.

    Returns:
      A launch with the inputs a's codes uint8 [m, k/2] and scale bytes uint8 [m, k/32], b's codes
      [n, k/2] and scale bytes [n, k/32], and the output [m, n].

    Raises:
      ValueError: if a size, the dtype or the target is none of these.
    """
    for name, size in (("m", m), ("n", n)):
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be at least 1.")
    if k < 1 or k % 32:
        raise ValueError(f"k is {k}, but must be a positive multiple of 32.")
    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype is {out_dtype!r}, but must be one of {', '.join(_DTYPES)}.")
    if target not in TILES:
        raise ValueError(f"target is {target!r}, but must be one of {', '.join(TILES)}.")
    tile = tile or TILES[target]

    def codes(rows: int, height: int) -> ArraySpec:
        return ArraySpec(
            (rows, k // 2), "uint8", (height, tile.k // 2) if tile.descriptor else None
        )

    return Launch(
        kernel=scaled_matmul,
        grid=(-(-m // tile.m) * -(-n // tile.n),),
        inputs=(
            codes(m, tile.m),
            ArraySpec((m, k // 32), "uint8"),
            codes(n, tile.n),
            ArraySpec((n, k // 32), "uint8"),
        ),
        scalars=(m, n, k),
        outputs=(ArraySpec((m, n), out_dtype),),
        constants=(
            ("TILE_M", tile.m),
            ("TILE_N", tile.n),
            ("TILE_K", tile.k),
            ("GROUP", tile.group),
            ("DESCRIPTOR", tile.descriptor),
            ("EVEN", k % tile.k == 0),
            ("ALIGNMENT", math.gcd(k // 32, 16)),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        operations=2 * m * n * k,
    )
