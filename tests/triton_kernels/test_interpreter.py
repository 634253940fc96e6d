import dataclasses
import os
import pathlib
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from triton_kernels import interpreter
from triton_kernels.interpreter import run
from triton_kernels.launch import ArraySpec, Launch

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = tl.constexpr("e2m1")


def launch(kernel, inputs, outputs, scalars=(), grid=(1,), **constants):
    """A launch for these input arrays, and for outputs given as (shape, dtype)."""
    return Launch(
        kernel=kernel,
        grid=grid,
        inputs=tuple(ArraySpec(x.shape, x.dtype.name) for x in inputs),
        scalars=scalars,
        outputs=tuple(ArraySpec(*spec) for spec in outputs),
        constants=tuple(constants.items()),
    )


@triton.jit
def _copy(x_ptr, n, out_ptr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i + SHIFT, value.to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _sum(x_ptr, y_ptr, out_ptr, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    tl.store(out_ptr + i, -(tl.load(x_ptr + i) + tl.load(y_ptr + i)))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    acc = tl.full((SIZE, SIZE), 1.0, tl.float32)
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), acc))


@triton.jit
def _dot_scaled(a_ptr, sa_ptr, b_ptr, sb_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr,
                K: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, M)[:, None]
    cols = tl.arange(0, N)[:, None]
    a = tl.load(a_ptr + rows * (K // 2) + tl.arange(0, K // 2)[None, :])
    b = tl.load(b_ptr + cols * (K // 2) + tl.arange(0, K // 2)[None, :])
    sa = tl.load(sa_ptr + rows * (K // 32) + tl.arange(0, K // 32)[None, :])
    sb = tl.load(sb_ptr + cols * (K // 32) + tl.arange(0, K // 32)[None, :])
    acc = tl.zeros((M, N), tl.float32)
    acc = tl.dot_scaled(a, sa, E2M1, b.T, sb, E2M1, acc)
    tl.store(out_ptr + rows * N + tl.arange(0, N)[None, :], acc)


@triton.jit
def _program_ids(out_ptr, GRID: tl.constexpr):
    x = tl.program_id(0)
    y = tl.program_id(1)
    z = tl.program_id(2)
    tl.store(out_ptr + (x * GRID[1] + y) * GRID[2] + z, x + 100 * y + 10000 * z)


@triton.jit
def _scalar(value, other, out_ptr):
    product = value * other
    tl.store(out_ptr, product.to(tl.uint32))
    tl.store(out_ptr + 1, (product >> 32).to(tl.uint32))


@triton.jit
def _philox(seed, out_ptr, COUNTER: tl.constexpr):
    zero = tl.zeros((1,), tl.uint32)
    if COUNTER is None:
        words = tl.randint4x(seed, zero)
    else:
        words = tl.philox(
            seed, zero + COUNTER[0], zero + COUNTER[1], zero + COUNTER[2], zero + COUNTER[3]
        )
    for j in tl.static_range(4):
        tl.store(out_ptr + j + tl.arange(0, 1), words[j])


@triton.jit
def _copy_by_descriptors(x_ptr, ROWS, out_ptr, COLS: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, [ROWS, COLS], [COLS, 1], [4, 16])
    target = tl.make_tensor_descriptor(out_ptr, [ROWS, COLS], [COLS, 1], [4, 16])
    for i in tl.range(tl.cdiv(ROWS, 4)):
        for j in tl.range(tl.cdiv(COLS, 16)):
            target.store([4 * i, 16 * j], source.load([4 * i, 16 * j]))


@triton.jit
def _copy_from_descriptor(x, ROWS, out_ptr, COLS: tl.constexpr):
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)
    cols = tl.arange(0, COLS)
    at = out_ptr + rows[:, None] * COLS + cols[None, :]
    tl.store(at, x.load([tl.program_id(0) * 4, 0]), mask=(rows < ROWS)[:, None])


@triton.jit
def _fails(out_ptr):
    tl.static_assert(False, "on purpose")


def convert(x, dtype):
    plan = launch(_copy, [x], [(x.shape, dtype)], (x.size,), TILE=16, SHIFT=0)
    plan = dataclasses.replace(plan, grid=(-(-x.size // 16),))
    return run(plan, [x])[0]


def test_this_process_interprets():
    assert interpreter.interpreting()


def test_unwritten_elements_hold_the_pattern():
    x = np.arange(40, dtype=np.uint8)
    (out,) = run(launch(_copy, [x], [((40,), "uint8")], (17,), TILE=64, SHIFT=0), [x])
    np.testing.assert_array_equal(out[:17], x[:17])
    np.testing.assert_array_equal(out[17:], 0xA5)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_write_next_to_an_output_is_an_error(shift):
    x = np.arange(16, dtype=np.uint8)
    plan = launch(_copy, [x], [((16,), "uint8")], (16,), TILE=16, SHIFT=shift)
    with pytest.raises(RuntimeError, match=r"_copy wrote outside of outputs\[0\]\."):
        run(plan, [x])


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", E4M3.__name__, "int32", "uint32", "int8", "uint8"]
)
def test_every_dtype_keeps_its_bits(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).integers(0, 256, 48 * dtype.itemsize, np.uint8).view(dtype)
    np.testing.assert_array_equal(convert(x, dtype.name).view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_two_bytes_widens_exactly(dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(getattr(ml_dtypes, dtype, dtype))
    plan = launch(_copy, [x], [(x.shape, "float32")], (x.size,), TILE=x.size, SHIFT=0)
    np.testing.assert_array_equal(run(plan, [x])[0], x.astype(np.float32))


def test_every_e4m3_pattern_widens_exactly():
    x = np.arange(256, dtype=np.uint8).view(E4M3)
    np.testing.assert_array_equal(convert(x, "float32"), x.astype(np.float32))
    assert np.isnan(convert(x, "float32")[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize(
    ("dtype", "given", "want"),
    [
        # Ties go to the even neighbour, one unit in the last place beside a tie to the nearest.
        ("bfloat16", 1 + 2.0**-8, 1.0),
        ("bfloat16", 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        ("bfloat16", 1 + 2.0**-8 + 2.0**-23, 1 + 2.0**-7),
        ("bfloat16", 2 - 2.0**-9, 2.0),
        ("bfloat16", 3.4e38, np.inf),
        ("float16", 1 + 2.0**-11, 1.0),
        ("float16", 65520.0, np.inf),
        (E4M3.__name__, 1.0625, 1.0),
        (E4M3.__name__, 1.1875, 1.25),
        (E4M3.__name__, 1.9375, 2.0),
        (E4M3.__name__, 2.0**-10, 0.0),
        (E4M3.__name__, 1.5 * 2.0**-9, 2.0**-8),
        # As conversions of NVIDIA GPUs do, to the largest number.
        (E4M3.__name__, 1000.0, 448.0),
        (E4M3.__name__, np.inf, 448.0),
        (E4M3.__name__, np.nan, np.nan),
    ],
)
def test_narrowing_rounds_as_gpus_do(dtype, given, want):
    for sign in (1, -1):
        x = np.full(16, sign * given, np.float32)
        np.testing.assert_array_equal(convert(x, dtype).astype(np.float64), sign * want)


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3.__name__])
def test_arithmetic_of_narrow_floats_is_that_of_their_values(dtype):
    x, y = np.random.default_rng(0).normal(size=(2, 64)).astype(getattr(ml_dtypes, dtype))
    (out,) = run(launch(_sum, [x, y], [((64,), dtype)], TILE=64), [x, y])
    np.testing.assert_array_equal(out, -(x + y))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", E4M3.__name__])
def test_dot_accumulates_in_float32(dtype):
    """Multiples of 1/16 up to 4: sums of 16 products are exact in float32, but not in float16."""
    rng = np.random.default_rng(0)
    a, b = (
        (rng.integers(-15, 16, (16, 16)) * 2.0 ** rng.integers(-4, 1, (16, 16)) / 4).astype(
            getattr(ml_dtypes, dtype, dtype)
        )
        for _ in range(2)
    )
    (out,) = run(launch(_dot, [a, b], [((16, 16), "float32")], SIZE=16), [a, b])
    want = 1 + a.astype(np.float64) @ b.astype(np.float64)
    assert (want != want.astype(np.float16)).any()
    np.testing.assert_array_equal(out, want)


def test_dot_of_a_nan_is_nan_in_its_row():
    a = np.ones((16, 16), E4M3)
    b = a.copy()
    a[3, 5] = np.nan
    (out,) = run(launch(_dot, [a, b], [((16, 16), "float32")], SIZE=16), [a, b])
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), 17.0)


def test_dot_scaled_is_the_product_of_the_decoded_operands():
    """Against float64; the sums of 64 products differ from float32's by at most 64 roundings."""
    rng = np.random.default_rng(0)
    operands, decoded = [], []
    for rows in (16, 32):
        codes = rng.integers(0, 256, (rows, 32), np.uint8)
        scales = rng.integers(100, 156, (rows, 2), np.uint8)
        scales[3, 1] = 0
        scales[4] = 255
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        value = np.concatenate([magnitude, -magnitude])[np.stack([codes & 15, codes >> 4], -1)]
        factor = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(int) - 127))
        operands += [codes, scales]
        decoded.append((value.reshape(rows, 2, 32) * factor[..., None]).reshape(rows, 64))
    plan = launch(_dot_scaled, operands, [((16, 32), "float32")], M=16, N=32, K=64)
    (out,) = run(plan, operands)
    want = decoded[0] @ decoded[1].T
    bound = 64 * 2.0**-24 * (np.abs(decoded[0]) @ np.abs(decoded[1]).T)
    nan = np.isnan(want)
    assert nan[4].all() and nan[:, 4].all() and nan.sum() == 16 + 32 - 1
    np.testing.assert_array_equal(np.isnan(out), nan)
    assert (np.abs(out - want) <= bound)[~nan].all()


@pytest.mark.parametrize("grid", [(6,), (3, 2), (2, 3, 4)])
def test_every_program_of_the_grid_runs_once(grid):
    whole = (*grid, 1, 1)[:3]
    (out,) = run(launch(_program_ids, [], [(whole, "int32")], (), grid, GRID=whole), [])
    x, y, z = np.indices(whole)
    np.testing.assert_array_equal(out, x + 100 * y + 10000 * z)


@pytest.mark.parametrize("value", [3, -3, 2**31 - 1, 2**31, 3 * 2**30, 2**40 + 5, -(2**35)])
def test_scalars_that_do_not_fit_32_bits_have_64(value):
    (out,) = run(launch(_scalar, [], [((2,), "uint32")], (value, 2**33)), [])
    assert out.view(np.int64)[0] == np.int64(np.uint64(value * 2**33 % 2**64))


def test_random_numbers_are_those_of_philox():
    """Known answers of Philox4x32-10 by its authors."""
    for counter, seed, words in (
        (None, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        (out,) = run(launch(_philox, [], [((4,), "uint32")], (seed,), COUNTER=counter), [])
        assert out.tolist() == [int(word, 16) for word in words.split()]


def test_descriptors_made_in_the_kernel_load_and_store_within_bounds():
    x = np.arange(6 * 48, dtype=np.uint8).reshape(6, 48)
    plan = launch(_copy_by_descriptors, [x], [(x.shape, "uint8")], (6,), COLS=48)
    np.testing.assert_array_equal(run(plan, [x])[0], x)


@pytest.mark.parametrize("dtype", ["uint8", E4M3.__name__, "bfloat16"])
def test_an_input_with_a_block_is_a_descriptor(dtype):
    x = np.arange(6 * 16).reshape(6, 16).astype(getattr(ml_dtypes, dtype, dtype))
    plan = launch(_copy_from_descriptor, [x], [(x.shape, dtype)], (6,), (2,), COLS=16)
    plan = dataclasses.replace(plan, inputs=(ArraySpec(x.shape, dtype, block=(4, 16)),))
    np.testing.assert_array_equal(run(plan, [x])[0], x)


def test_inputs_need_not_be_row_major_or_aligned():
    x = np.arange(1, 35, dtype=np.float32).view(np.uint8)[4:].view(np.float32)
    assert x.ctypes.data % 16
    np.testing.assert_array_equal(convert(x, "float32"), x)
    np.testing.assert_array_equal(convert(x[::-2], "float32"), x[::-2])


def test_threads_take_turns():
    xs = [np.full(256, i, np.int32) for i in range(4)]
    outs = {}
    threads = [
        threading.Thread(target=lambda i=i: outs.update({i: convert(xs[i], "int32")}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        np.testing.assert_array_equal(outs[i], xs[i])


def test_triton_is_left_as_it_was():
    """Even after a failure."""
    module = triton.runtime.interpreter
    before = dict(vars(module)), dict(vars(module.interpreter_builder)), dict(vars(tl.tensor))
    convert(np.ones(16, np.float32), "bfloat16")
    with pytest.raises(triton.runtime.errors.InterpreterError, match="on purpose"):
        run(launch(_fails, [], [((1,), "uint8")]), [])
    after = dict(vars(module)), dict(vars(module.interpreter_builder)), dict(vars(tl.tensor))
    # The program's index and the grid stay.
    for names in (before[1], after[1]):
        for name in ("grid_idx", "grid_dim"):
            names.pop(name, None)
    assert before == after


def test_wrong_inputs_are_named():
    x = np.zeros((2, 8), np.uint8)
    plan = launch(_copy, [x], [((16,), "uint8")], (16,), TILE=16, SHIFT=0)
    with pytest.raises(TypeError, match=r"^0 inputs are given, but the plan wants 1\.$"):
        run(plan, [])
    with pytest.raises(
        TypeError, match=r"^inputs\[0\] is int8\[2, 8\], but the plan wants uint8\[2, 8\]\.$"
    ):
        run(plan, [x.view(np.int8)])
    with pytest.raises(TypeError, match=r"^inputs\[0\] is uint8\[16\], but"):
        run(plan, [x.reshape(16)])


@pytest.mark.parametrize("grid", [(), (1, 1, 1, 1)])
def test_a_grid_of_no_or_four_axes_is_an_error(grid):
    x = np.zeros(16, np.uint8)
    plan = launch(_copy, [x], [((16,), "uint8")], (16,), grid, TILE=16, SHIFT=0)
    with pytest.raises(ValueError, match=r"must have one to three axes\.$"):
        run(plan, [x])


@pytest.mark.parametrize("late", [False, True])
def test_triton_imported_for_compilation_is_an_error(late):
    """Also if the variable is set between the imports of triton and of the kernel."""
    program = f"""
import os
import triton
if {late}:
    os.environ["TRITON_INTERPRET"] = "1"
from triton_kernels import decode, interpreter
assert not interpreter.interpreting()
try:
    interpreter.run(decode.plan(1, 1), [])
except RuntimeError as error:
    print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout == (
        "triton was imported for compilation; to interpret kernels set TRITON_INTERPRET=1 "
        "before it is imported.\n"
    ), done.stderr
