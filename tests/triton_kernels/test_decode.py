"""MXFP4 to E4M3 with a factor a row, against the reference's decoding."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from adahop_jax import e2m1
from triton_kernels import decode, interpreter
from triton_kernels.launch import ArraySpec, Launch

from . import ptx_model

RNG = np.random.default_rng(0)
POWERS = range(-20, 7)


def random_codes(rows: int, blocks: int) -> np.ndarray:
    return RNG.integers(0, 256, (rows, 16 * blocks), np.uint8)


def random_scales(rows: int, blocks: int, spread: int) -> np.ndarray:
    """Bytes within `spread` of the row's largest, which may be any up to 254."""
    largest = RNG.integers(0, 255, (rows, 1))
    largest[:2] = [[0], [254]][:rows]
    scales = np.maximum(largest - RNG.integers(0, spread + 1, (rows, blocks)), 0)
    # The largest is somewhere, not first.
    scales[np.arange(rows), RNG.integers(0, blocks, rows)] = largest[:, 0]
    return scales.astype(np.uint8)


def run(codes: np.ndarray, scales: np.ndarray, fast: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values and the factors of rows."""
    plan = decode.plan(*scales.shape, fast=fast)
    values, factors = interpreter.run(plan, [codes, scales])
    return values, factors


def reference(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What the packed matrix stands for, float64."""
    units = e2m1.decode(e2m1.unpack(jnp.asarray(codes), -1), jnp.uint8(127))
    scale = np.ldexp(1.0, scales.astype(int) - 127)
    scale[scales == 255] = np.nan
    return np.asarray(units, np.float64) * np.repeat(scale, 32, axis=1)


def stands_for(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    assert values.dtype == ml_dtypes.float8_e4m3fn and factors.dtype == np.float32
    return values.astype(np.float64) * factors.astype(np.float64)[:, None]


def largest_scale(scales: np.ndarray) -> np.ndarray:
    """Of each row, [rows, 1]; NaN blocks do not count."""
    return np.ldexp(1.0, np.where(scales == 255, 0, scales).max(1, keepdims=True).astype(int) - 127)


@pytest.fixture(params=[False, True], ids=["generic", "ptx"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether plans are those of conversion instructions, which the interpreter learns then."""
    if request.param:
        ptx_model.interpret(monkeypatch)
    return request.param


# Rows and blocks that fill no tile; several tiles of both; a row shorter than a tile's blocks.
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (37, 33), (9, 130), (520, 1)], ids=str)
def test_blocks_within_fifteen_binades_are_exact(shape: tuple[int, int], fast: bool):
    codes, scales = random_codes(*shape), random_scales(*shape, spread=14)
    values, factors = run(codes, scales, fast)
    want, got = reference(codes, scales), stands_for(values, factors)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_array_equal(factors, largest_scale(scales)[:, 0] * 2.0**-6)


def test_all_codes_at_all_places_and_powers(fast):
    """A block of each code and a block of each rotation of all, 15 binades and more."""
    codes = np.concatenate(
        [
            np.repeat(np.arange(16)[:, None], 32, 1),
            [np.roll(np.arange(32) % 16, j) for j in range(8)],
        ]
    ).astype(np.uint8)
    blocks = np.asarray(e2m1.pack(jnp.asarray(codes), -1))
    codes = np.concatenate([blocks.reshape(1, -1)] * 15)
    scales = np.repeat(np.arange(127, 112, -1)[:, None].astype(np.uint8), len(blocks), 1)
    # A block that makes every row's largest scale 2^0.
    codes = np.concatenate([codes, codes[:, :16]], axis=1)
    scales = np.concatenate([scales, np.full((15, 1), 127, np.uint8)], axis=1)
    np.testing.assert_array_equal(stands_for(*run(codes, scales, fast)), reference(codes, scales))


def test_blocks_far_below_the_largest_round_to_even(fast):
    """To multiples of 2^-15 of the row's largest scale, and to zero at last."""
    codes, scales = random_codes(8, 40), np.full((8, 40), 140, np.uint8)
    scales[:, 1:] -= np.arange(39, dtype=np.uint8) * 3
    values, factors = run(codes, scales, fast)
    want, unit = reference(codes, scales), largest_scale(scales) * 2.0**-15
    np.testing.assert_array_equal(stands_for(values, factors), np.round(want / unit) * unit)
    error = np.abs(stands_for(values, factors) - want) / largest_scale(scales)
    # Half a unit, and it is reached: the bound is no looser than it has to be.
    assert error.max() == 2.0**-16
    np.testing.assert_array_equal(np.signbit(values.astype(np.float32)), np.signbit(want))


def test_a_nan_block_is_nan_and_leaves_its_row_alone(fast):
    """All values of it, and its scale is not the row's largest."""
    codes, scales = random_codes(7, 9), random_scales(7, 9, 5)
    before = scales.copy()
    scales[2, 4] = scales[3, 0] = scales[3, 8] = 255
    scales[5] = 255
    values, factors = run(codes, scales, fast)
    assert np.all(np.isfinite(factors))
    nan = np.repeat(scales == 255, 32, axis=1)
    np.testing.assert_array_equal(np.isnan(values.astype(np.float32)), nan)
    kept = before[np.arange(7) != 5]
    largest = np.where(scales == 255, 0, scales).max(1)
    assert np.all(largest[[0, 1, 4, 6]] == kept[[0, 1, 4, 5]].max(1))
    want = np.where(nan, 0, reference(codes, np.where(scales == 255, 0, scales)))
    got = np.where(nan, 0, stands_for(np.where(nan, values.dtype.type(0), values), factors))
    np.testing.assert_array_equal(got, want)


def test_rows_of_zeros(fast):
    """Their scale byte is 0, whose factor 2^-133 is subnormal; -0 stays."""
    codes = np.zeros((3, 64), np.uint8)
    codes[1] = 0x88
    scales = np.zeros((3, 4), np.uint8)
    scales[2] = 127
    values, factors = run(codes, scales, fast)
    np.testing.assert_array_equal(factors, [2.0**-133, 2.0**-133, 2.0**-6])
    np.testing.assert_array_equal(values.view(np.uint8), np.repeat([[0], [0x80], [0]], 128, axis=1))


def test_the_factor_of_every_largest_scale():
    scales = np.arange(255, dtype=np.uint8)[:, None]
    _, factors = run(np.zeros((255, 16), np.uint8), scales)
    np.testing.assert_array_equal(factors, np.ldexp(np.float32(1), np.arange(255) - 133))


@triton.jit
def _both_paths(words_ptr, powers_ptr, generic_ptr, ptx_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words_ptr + at)
    power = tl.load(powers_ptr + at)
    first, second = decode._decode_word(word, power)
    tl.store(generic_ptr + at * 2, first)
    tl.store(generic_ptr + at * 2 + 1, second)
    half = (power + 22) << 10
    first, second = decode._decode_word_ptx(word, half | (half << 16))
    tl.store(ptx_ptr + at * 2, first)
    tl.store(ptx_ptr + at * 2 + 1, second)


def _words() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words and powers, int32, and the values, float64 [count, 8]: each code at each place."""
    codes = RNG.integers(0, 16, (1024, 8))
    for place in range(8):
        for code in range(16):
            codes[place * 16 + code :: 128, place] = code
    words = np.bitwise_or.reduce(codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32)), 1)
    words = np.tile(words.view(np.int32), len(POWERS))
    powers = np.repeat(np.array(POWERS, np.int32), 1024)
    signed = np.array([*e2m1.E2M1_VALUES, *(-v for v in e2m1.E2M1_VALUES)])
    values = signed[np.tile(codes, (len(POWERS), 1))] * np.ldexp(1.0, powers)[:, None]
    return words, powers, values


def test_both_paths_of_a_word(monkeypatch):
    """Each is the E4M3 number nearest to code times power, ties to even."""
    calls = ptx_model.interpret(monkeypatch)
    words, powers, values = _words()
    count = 1 << (len(words) - 1).bit_length()
    inputs = [np.resize(words, count), np.resize(powers, count)]
    specs = tuple(ArraySpec((count,), "int32") for _ in inputs)
    outputs = (ArraySpec((count, 2), "int32"),) * 2
    plan = Launch(_both_paths, (1,), specs, (), outputs, (("COUNT", count),))
    generic, ptx = (x[: len(words)].view(np.uint8) for x in interpreter.run(plan, inputs))
    assert len(calls) == 1
    want = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(ptx, want)
    np.testing.assert_array_equal(generic, want)
    exact = powers >= -8
    np.testing.assert_array_equal(values[exact].astype(ml_dtypes.float8_e4m3fn), values[exact])


def test_the_ptx_reads_its_inputs_before_it_writes_an_output(monkeypatch):
    """Or says by '=&r' that an output must not share a register with an input."""
    calls = ptx_model.interpret(monkeypatch)
    run(random_codes(1, 1), random_scales(1, 1, 0), fast=True)
    assert calls and not ptx_model.overwritten_inputs(*calls[0])


@pytest.mark.parametrize(
    ("rows", "blocks", "grid"),
    [(1, 1, (1, 1)), (512, 1, (1, 1)), (513, 1, (2, 1)), (9, 128, (3, 1)), (4, 129, (1, 2))],
)
def test_plan(rows, blocks, grid):
    plan = decode.plan(rows, blocks)
    assert plan.grid == grid
    assert plan.inputs == (
        ArraySpec((rows, 16 * blocks), "uint8"),
        ArraySpec((rows, blocks), "uint8"),
    )
    assert plan.outputs == (
        ArraySpec((rows, 32 * blocks), "float8_e4m3fn"),
        ArraySpec((rows,), "float32"),
    )
    assert plan == decode.plan(rows, blocks) and hash(plan) == hash(decode.plan(rows, blocks))
    assert plan != decode.plan(rows, blocks, fast=False)
