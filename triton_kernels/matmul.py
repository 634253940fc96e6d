"""The product of two E4M3 matrices, each row of which has a power-of-two factor: for FP8 units.

out[m, n] = fa[m] fb[n] sum_k a[m, k] b[n, k], accumulated in float32, scaled in the epilogue and
rounded once, so that no separate pass scales the output. 2 M N K operations; at least
M K + N K + 2 M N bytes (a 16-bit output).

Programs are as many as multiprocessors and walk over output tiles, in groups of rows that share
columns of b in the L2 cache; operands come through tensor descriptors, and the loop over k is fused
with the one over tiles, so that the next tile's first loads overlap this one's epilogue. The caller
makes the descriptors: made in the kernel they would need scratch memory, which keeps the launch out
of CUDA graphs.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from triton_kernels.launch import ArraySpec, Launch
from triton_kernels.tiling import store_tile, tile_of


@triton.jit
def matmul_rows(
    a, fa_ptr, b, fb_ptr, M, N, K, out_ptr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Persistent; see the module. a and b are tensor descriptors."""
    rows = tl.cdiv(M, TILE_M)
    cols = tl.cdiv(N, TILE_N)
    steps = tl.cdiv(K, TILE_K)
    for index in tl.range(tl.program_id(0), rows * cols, PROGRAMS, flatten=True):
        i, j = tile_of(index, rows, cols, GROUP)
        row = i * TILE_M
        col = j * TILE_N
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(steps):
            x = a.load([row, k * TILE_K])
            y = b.load([col, k * TILE_K])
            acc = tl.dot(x, y.T, acc)
        rm = row + tl.arange(0, TILE_M)
        rn = col + tl.arange(0, TILE_N)
        fa = tl.load(fa_ptr + rm, mask=rm < M, other=0.0)
        fb = tl.load(fb_ptr + rn, mask=rn < N, other=0.0)
        # The factors' product first: one may be huge and the other tiny.
        acc = acc * (fa[:, None] * fb[None, :])
        if PARTS == 1:
            store_tile(out_ptr, acc, row, col, M, N)
        else:
            # Half a tile at a time needs half the shared memory, which buys a stage of the loop.
            halves = tl.permute(tl.reshape(acc, (TILE_M, 2, TILE_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            store_tile(out_ptr, left, row, col, M, N)
            store_tile(out_ptr, right, row, col + TILE_N // 2, M, N)


class Tiles(NamedTuple):
    """One row of the tile table."""

    m: int
    n: int
    k: int
    group: int
    parts: int
    stages: int
    warps: int


def tiles(k: int) -> Tiles:
    """The tile of a product, as measured on one H200 for its contraction.

    At 16384 x 4096 x 4096 the group of 4 ran at 1473 TFLOP/s, that of 8 at 1454; for the weight's
    gradient, whose contraction is 16384, it was the other way round (1525 and 1543). Half a tile at
    a time in the epilogue makes room for a fourth stage: 1454 instead of 1407. Tiles of 256 x 128,
    128 x 128 and 64 deep were 5 to 10 % slower.
    """
    return Tiles(128, 256, 128, 4 if k < 8192 else 8, 2, 4, 8)


def plan(
    m: int, n: int, k: int, out_dtype: str, *, programs: int = 132, tile: Tiles | None = None
) -> Launch:
    """Plans a product, no size being zero.

    Args:
      m: rows of a.
      n: rows of b.
      k: the contraction, a multiple of 32.
      out_dtype: 'float32', 'bfloat16' or 'float16'.
      programs: multiprocessors of the device.
      tile: instead of the table's.

    Returns:
      A launch with the inputs a float8_e4m3fn [m, k], its factors float32 [m], b [n, k], its
      factors [n], and the output [m, n].
    """
    tile = tile or tiles(k)
    count = -(-m // tile.m) * -(-n // tile.n)
    if out_dtype == "float32" and tile.parts == 2:
        # Twice the bytes in the epilogue: a stage less.
        tile = tile._replace(stages=tile.stages - 1)
    return Launch(
        kernel=matmul_rows,
        grid=(min(programs, count),),
        inputs=(
            ArraySpec((m, k), "float8_e4m3fn", (tile.m, tile.k)),
            ArraySpec((m,), "float32"),
            ArraySpec((n, k), "float8_e4m3fn", (tile.n, tile.k)),
            ArraySpec((n,), "float32"),
        ),
        scalars=(m, n, k),
        outputs=(ArraySpec((m, n), out_dtype),),
        constants=(
            ("TILE_M", tile.m),
            ("TILE_N", tile.n),
            ("TILE_K", tile.k),
            ("GROUP", tile.group),
            ("PROGRAMS", min(programs, count)),
            ("PARTS", tile.parts),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        operations=2 * m * n * k,
    )
