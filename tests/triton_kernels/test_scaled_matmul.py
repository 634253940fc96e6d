"""The block-scaled product, interpreted, against float64."""

import numpy as np
import pytest

from triton_kernels import interpreter, scaled_matmul

# In the dimensions of a program, as small as the interpreter likes them.
TILE = scaled_matmul.Tiles(64, 32, 64, 2, stages=2, warps=4, descriptor=False)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def operand(rng, rows, k):
    codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
    return codes, rng.integers(120, 134, (rows, k // 32), np.uint8)


def value(codes, scales):
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    signed = np.where(nibbles & 8, -1, 1) * MAGNITUDES[nibbles & 7]
    return signed * np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)


def run(a, b, dtype="float32", tile=TILE):
    (m, half), n = a[0].shape, len(b[0])
    plan = scaled_matmul.plan(m, n, 2 * half, dtype, tile=tile)
    return interpreter.run(plan, [*a, *b])[0]


@pytest.mark.parametrize("shape", [(1, 1, 32), (64, 32, 64), (70, 45, 96), (130, 33, 288)])
@pytest.mark.parametrize("descriptor", [False, True])
def test_ragged_shapes(shape, descriptor):
    """Sums of 288 exact products of at most 6 significant bits within 2^20 of each other."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = operand(rng, m, k), operand(rng, n, k)
    # A descriptor's rows have to be 16 bytes apart or a multiple of it: any k divisible by 32.
    got = run(a, b, tile=TILE._replace(descriptor=descriptor))
    x, y = value(*a), value(*b)
    assert np.all(np.abs(got - x @ y.T) <= k * 2.0**-24 * (np.abs(x) @ np.abs(y).T))


def test_a_nan_block_reaches_its_row_and_no_other():
    rng = np.random.default_rng(1)
    a, b = operand(rng, 40, 96), operand(rng, 35, 96)
    a[1][7, 1] = 255
    got = run(a, b)
    assert np.isnan(got[7]).all()
    assert np.isfinite(np.delete(got, 7, 0)).all()


def test_bfloat16_is_rounded_once():
    rng = np.random.default_rng(2)
    a, b = operand(rng, 64, 64), operand(rng, 64, 64)
    got = run(a, b, "bfloat16")
    np.testing.assert_array_equal(got, run(a, b).astype(got.dtype))


def test_bad_input():
    with pytest.raises(ValueError, match=r"^k is 33, but must be a positive multiple of 32\.$"):
        scaled_matmul.plan(1, 1, 33, "float32")
    with pytest.raises(ValueError, match=r"^m is 0, but must be at least 1\.$"):
        scaled_matmul.plan(0, 1, 32, "float32")
    with pytest.raises(ValueError, match=r"^target is 'sm_90', but must be one of sm_100, "):
        scaled_matmul.plan(1, 1, 32, "float32", target="sm_90")
    with pytest.raises(ValueError, match=r"^out_dtype is 'int8', but must be one of "):
        scaled_matmul.plan(1, 1, 32, "int8")
