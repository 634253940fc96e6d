"""Device functions that products share: which output tile comes next, and how one is stored."""

import triton
import triton.language as tl


@triton.jit
def tile_of(index, rows, cols, GROUP: tl.constexpr):
    """Row and column of a tile; GROUP rows of tiles are walked column by column."""
    first = index // (GROUP * cols) * GROUP
    height = min(rows - first, GROUP)
    return first + index % height, index % (GROUP * cols) // height


@triton.jit
def store_tile(out_ptr, tile, row, col, M, N):
    """Writes what of a tile lies inside of the output [M, N], rounded to its dtype."""
    rm = row + tl.arange(0, tile.shape[0])
    rn = col + tl.arange(0, tile.shape[1])
    at = out_ptr + rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(at, tile.to(out_ptr.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])
