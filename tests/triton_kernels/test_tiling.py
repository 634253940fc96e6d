"""The walk over output tiles that products share."""

import numpy as np
import triton
import triton.language as tl

from triton_kernels import interpreter, tiling
from triton_kernels.launch import ArraySpec, Launch


@triton.jit
def _walk(rows, cols, out_ptr, GROUP: tl.constexpr):
    index = tl.program_id(0)
    row, col = tiling.tile_of(index, rows, cols, GROUP)
    tl.store(out_ptr + 2 * index, row)
    tl.store(out_ptr + 2 * index + 1, col)


def test_each_tile_is_visited_once_and_groups_share_columns():
    """The walk over tiles: a group's rows of one column follow one another."""
    rows, cols, group = 7, 5, 3
    plan = Launch(
        _walk,
        (rows * cols,),
        (),
        (rows, cols),
        (ArraySpec((rows * cols, 2), "int32"),),
        (("GROUP", group),),
    )
    (tiles,) = interpreter.run(plan, [])
    assert len({tuple(tile) for tile in tiles}) == rows * cols
    assert tiles.min() == 0 and tuple(tiles.max(0)) == (rows - 1, cols - 1)
    for first in range(0, rows, group):
        height = min(group, rows - first)
        ours = tiles[first * cols : (first + height) * cols].reshape(cols, height, 2)
        np.testing.assert_array_equal(
            np.sort(ours[..., 0], 1), [range(first, first + height)] * cols
        )
        np.testing.assert_array_equal(ours[..., 1], np.arange(cols)[:, None].repeat(height, 1))
