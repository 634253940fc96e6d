"""The product of E4M3 matrices with factors, against float64.

Where operands hold small integers every partial sum is exact in float32, so that the result must be
the float64 one, rounded once to the output's dtype: bit for bit.
"""

import ml_dtypes
import numpy as np
import pytest

from triton_kernels import interpreter, matmul
from triton_kernels.launch import ArraySpec
from triton_kernels.matmul import Tiles

E4M3 = ml_dtypes.float8_e4m3fn
SMALL = Tiles(16, 32, 64, 2, 2, 3, 4)
"""Many tiles of a small product: 16 x 32, 64 deep, in groups of 2 rows, stored by halves."""
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def integers(rows: int, k: int, seed: int) -> np.ndarray:
    """-8 to 8; |a . b| <= 64 k is below 2^24."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, k)).astype(np.float32).astype(E4M3)


def powers(rows: int, seed: int, low: int = -3, high: int = 3) -> np.ndarray:
    exponents = np.random.default_rng(seed).integers(low, high + 1, rows)
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def run(
    a: np.ndarray,
    fa: np.ndarray,
    b: np.ndarray,
    fb: np.ndarray,
    dtype: str = "float32",
    programs: int = 132,
    tile: Tiles | None = None,
) -> np.ndarray:
    (m, k), n = a.shape, len(b)
    plan = matmul.plan(m, n, k, dtype, programs=programs, tile=tile)
    return interpreter.run(plan, [a, fa, b, fb])[0]


def reference(a: np.ndarray, fa: np.ndarray, b: np.ndarray, fb: np.ndarray) -> np.ndarray:
    product = a.astype(np.float64) @ b.astype(np.float64).T
    return product * fa[:, None].astype(np.float64) * fb.astype(np.float64)


def operands(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return integers(m, k, 0), powers(m, 1), integers(n, k, 2), powers(n, 3)


# One tile and less, several ragged ones, N of every alignment, K of less and more than a tile.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 32), (3, 5, 96), (130, 257, 160), (128, 256, 256), (129, 8, 32), (7, 520, 416)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_measured_tile(m, n, k, dtype):
    arrays = operands(m, n, k)
    got = run(*arrays, dtype=dtype)
    assert got.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(got, reference(*arrays).astype(DTYPES[dtype]))


@pytest.mark.parametrize("programs", [1, 3, 7, 132])
@pytest.mark.parametrize("tile", [SMALL, SMALL._replace(group=3, parts=1), SMALL._replace(group=8)])
def test_programs_walk_over_all_tiles(programs, tile):
    """7 x 5 tiles, of which the last are ragged and no group is full at the end."""
    arrays = operands(100, 131, 96)
    np.testing.assert_array_equal(
        run(*arrays, programs=programs, tile=tile), reference(*arrays).astype(np.float32)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_values(dtype):
    """All of E4M3's magnitudes, subnormals included.

    Float32 sums of k exact products are off by at most k 2^-24 times the sum of their magnitudes;
    the output adds half a unit in its last place, or half of its smallest subnormal.
    """
    rng = np.random.default_rng(0)
    m, n, k = 70, 90, 320
    a, b = (rng.integers(0, 127, (rows, k), np.uint8) for rows in (m, n))
    a, b = (x | rng.choice(np.array([0, 128], np.uint8), x.shape) for x in (a, b))
    a, b = a.view(E4M3), b.view(E4M3)
    fa, fb = powers(m, 1, -12, -3), powers(n, 3, -12, -3)
    want = reference(a, fa, b, fb)
    assert np.abs(want).max() < 65504
    magnitudes = reference(np.abs(a), fa, np.abs(b), fb)
    last_place = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    error = np.abs(run(a, fa, b, fb, dtype).astype(np.float64) - want)
    bound = magnitudes * k * 2.0**-24
    assert np.all(error <= bound * (1 + last_place) + last_place * np.abs(want) + 2.0**-25)
    assert np.median(np.abs(want)) > 100 * np.median(bound)


def test_one_factor_huge_and_the_other_tiny():
    """Their product is taken first: the sum times either would overflow or vanish."""
    a, b = np.full((4, 256), 448, E4M3), np.full((6, 256), 448, E4M3)
    a[2:], b[3:] = 2.0**-9, 2.0**-9
    fa = np.array([2.0**121, 2.0**-133, 2.0**121, 2.0**-133], np.float32)
    fb = np.array([2.0**-121, 2.0**100, 2.0**-120, 2.0**-121, 2.0**100, 2.0**127], np.float32)
    want = reference(a, fa, b, fb)
    with np.errstate(over="ignore"):
        want = np.where(np.abs(want) < 2.0**-126, 0, want).astype(np.float32)
    got = run(a, fa, b, fb)
    normal = (want != 0) & np.isfinite(want)
    assert np.count_nonzero(normal) >= 12
    np.testing.assert_array_equal(got[normal], want[normal])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row_and_column(dtype):
    a, fa, b, fb = operands(40, 70, 96)
    a[17, 95], b[33, 0] = np.nan, np.nan
    got = run(a, fa, b, fb, dtype, tile=SMALL)
    nan = np.zeros(got.shape, bool)
    nan[17] = nan[:, 33] = True
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    want = reference(a, fa, b, fb).astype(got.dtype)
    np.testing.assert_array_equal(got[~nan], want[~nan])


def test_padding_reads_no_neighbours():
    """K of half a tile: NaN in the next row must not enter the tail of this one."""
    a, fa, b, fb = operands(20, 40, 32)
    a[1::2], b[1::2] = np.nan, np.nan
    got = run(a, fa, b, fb, tile=SMALL)
    np.testing.assert_array_equal(got[::2, ::2], reference(a, fa, b, fb)[::2, ::2])


class TestPlan:
    def test_shapes(self):
        plan = matmul.plan(300, 500, 96, "bfloat16", programs=4)
        tile = matmul.tiles(96)
        assert plan.inputs == (
            ArraySpec((300, 96), "float8_e4m3fn", (tile.m, tile.k)),
            ArraySpec((300,), "float32"),
            ArraySpec((500, 96), "float8_e4m3fn", (tile.n, tile.k)),
            ArraySpec((500,), "float32"),
        )
        assert plan.outputs == (ArraySpec((300, 500), "bfloat16"),)
        assert plan.scalars == (300, 500, 96)
        assert plan.operations == 2 * 300 * 500 * 96
        assert (plan.num_warps, plan.num_stages) == (tile.warps, tile.stages)

    def test_no_more_programs_than_tiles(self):
        for programs, want in ((4, 4), (6, 6), (132, 6)):
            plan = matmul.plan(300, 500, 96, "float32", programs=programs)
            assert plan.grid == (want,)
            assert dict(plan.constants)["PROGRAMS"] == want

    def test_float32_outputs_have_a_stage_less(self):
        """Where they go through shared memory by halves."""
        for dtype, parts, stages in (("float32", 2, 2), ("float16", 2, 3), ("float32", 1, 3)):
            tile = SMALL._replace(parts=parts)
            assert matmul.plan(64, 64, 64, dtype, tile=tile).num_stages == stages

    def test_long_contractions_have_larger_groups(self):
        assert matmul.tiles(4096).group < matmul.tiles(16384).group

    def test_plans_are_equal_and_hash_by_their_arguments(self):
        plans = [
            matmul.plan(64, 64, 64, "float32"),
            matmul.plan(64, 64, 64, "float16"),
            matmul.plan(64, 64, 64, "float32", tile=SMALL),
            matmul.plan(64, 65, 64, "float32"),
        ]
        assert len({*plans, matmul.plan(64, 64, 64, "float32")}) == len(plans)
