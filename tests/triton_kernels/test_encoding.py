"""Codes and scale bytes of the device functions, as generic Triton and as PTX."""

import fractions
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from adahop_jax import e2m1
from triton_kernels import encoding, interpreter
from triton_kernels.launch import ArraySpec, Launch

from .ptx_model import evaluate, fma, overwritten_inputs

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
INPUT_SCALE = np.float32(2.0**-6)
"""What the PTX takes is the scaled value times this."""
RNG = np.random.default_rng(0)


def _interesting() -> np.ndarray:
    """Scaled values, |v| < 8: where codes turn, their float32 neighbours, and ever smaller ones."""
    turns = np.array([*TIES, *e2m1.E2M1_VALUES, 7.0], np.float32)
    sides = [np.nextafter(turns, np.float32(side)) for side in (-1, 9)]
    largest = np.nextafter(np.float32(8), np.float32(0))
    powers = np.ldexp(np.float32(1), np.arange(-149, 3))
    odd = np.ldexp(np.float32(1.5), np.arange(-148, -20))
    v = np.concatenate([turns, *sides, [largest], powers, odd]).astype(np.float32)
    return np.concatenate([v, -v])


def _random(count: int) -> np.ndarray:
    """Full mantissas, from 2^-126 to just below 8; half of them where codes turn."""
    scale = np.where(RNG.random(count) < 0.5, RNG.integers(-3, 3, count), RNG.integers(-126, 3))
    v = np.ldexp(1 + RNG.integers(0, 2**23, count) / 2.0**23, scale).astype(np.float32)
    return v * RNG.choice(np.array([-1, 1], np.float32), count)


def _eights() -> np.ndarray:
    """Float32 [n, 8]: at each place every interesting value, beside several kinds of others."""
    v, rows = _interesting(), []
    for place in range(8):
        fillers = [np.full((v.size, 8), f, np.float32) for f in (0, -0.0, 6, -6, 2.5, -0.25)]
        for eights in (*fillers, _random(8 * v.size).reshape(-1, 8)):
            eights[:, place] = v
            rows.append(eights)
    return np.concatenate([*rows, _random(1 << 17).reshape(-1, 8)])


def _reference_words(v: np.ndarray) -> np.ndarray:
    x = jnp.asarray(v)
    codes = e2m1.signed_code(e2m1.nearest_code(jnp.abs(x)), x)
    return np.asarray(e2m1.pack(codes, -1)).view(np.uint32)[:, 0]


@triton.jit
def _words(x_ptr, out_ptr, COUNT: tl.constexpr):
    row = tl.arange(0, COUNT)
    at = x_ptr + row * 8
    a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    e, f, g, h = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    tl.store(out_ptr + row, encoding.packed_word(a, b, c, d, e, f, g, h))


@triton.jit
def _values(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, encoding.nearest_value(tl.load(x_ptr + at)))


@triton.jit
def _stochastic(x_ptr, noise_ptr, out_ptr, DRAWS: tl.constexpr):
    value = tl.program_id(0)
    draw = tl.arange(0, DRAWS)
    x = tl.load(x_ptr + value + tl.zeros_like(draw))
    tl.store(out_ptr + value * DRAWS + draw, encoding.stochastic_code(x, tl.load(noise_ptr + draw)))


@triton.jit
def _bytes(x_ptr, out_ptr, COUNT: tl.constexpr, RULE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, encoding.floor_byte(tl.load(x_ptr + at), RULE))


def _launch(
    kernel: Any, inputs: list[np.ndarray], out: tuple[tuple[int, ...], str], **constants: Any
) -> np.ndarray:
    """One program for each row of a 2-D output, else one."""
    specs = tuple(ArraySpec(x.shape, x.dtype.name) for x in inputs)
    grid = (out[0][0] if len(out[0]) == 2 else 1,)
    plan = Launch(kernel, grid, specs, (), (ArraySpec(*out),), tuple(constants.items()))
    return interpreter.run(plan, inputs)[0]


def _filled(x: np.ndarray) -> np.ndarray:
    """Zero rows up to a power of two."""
    out = np.zeros((1 << (len(x) - 1).bit_length(), *x.shape[1:]), x.dtype)
    out[: len(x)] = x
    return out


def _ptx_words(u: np.ndarray) -> np.ndarray:
    places = [np.ascontiguousarray(u[:, j]) for j in range(8)]
    return evaluate(encoding.packed_word_assembly(), places)[0]


def test_the_ptx_gives_the_codes_of_the_reference():
    u = _eights() * INPUT_SCALE
    # Multiplied back it is exact, also where the smallest values were rounded.
    np.testing.assert_array_equal(_ptx_words(u), _reference_words(u / INPUT_SCALE))


def test_the_ptx_gives_the_codes_of_its_smallest_inputs():
    bits = np.array([0, 1, 2, 3, 0x7FFFFF, 0x800000], np.uint32)
    u = np.concatenate([bits, bits | 0x80000000]).view(np.float32)
    words = _ptx_words(np.repeat(u[:, None], 8, axis=1))
    np.testing.assert_array_equal(words, np.where(np.signbit(u), 0x88888888, 0))


def test_the_ptx_of_a_nan_leaves_other_blocks_alone():
    v = np.full((2, 8), 3.0, np.float32)
    v[0, 4] = np.nan
    assert _ptx_words(v * INPUT_SCALE)[1] == 0x55555555


def test_the_ptx_reads_its_inputs_before_it_writes_the_output():
    """Its constraint '=r' lets the output share a register with an input."""
    assert not overwritten_inputs(encoding.packed_word_assembly(), "=r,r,r,r,r,r,r,r,r")


def test_generic_words_are_those_of_the_reference():
    v = _eights()
    x = _filled(v)
    got = _launch(_words, [x], ((len(x),), "int32"), COUNT=len(x))
    np.testing.assert_array_equal(got.view(np.uint32)[: len(v)], _reference_words(v))


def test_nearest_values_are_those_of_the_codes():
    v = _filled(np.concatenate([_interesting(), _random(1000)]))
    got = _launch(_values, [v], (v.shape, "float32"), COUNT=len(v))
    want = e2m1.code_value(e2m1.nearest_code(jnp.abs(jnp.asarray(v))))
    np.testing.assert_array_equal(got, want)


def test_stochastic_codes_over_all_noise():
    """Of the 65536 noises as many round up as the fraction says, to half of one."""
    grid = np.array(e2m1.E2M1_VALUES, np.float32)
    between = RNG.uniform(0, 6, 12).astype(np.float32)
    rare = [2.0**-19, 2.0**-16, 0.5 - 2.0**-19, 0.5 + 2.0**-17, 3.0 + 2.0**-17, 6 - 2.0**-15]
    tiny = [2.0**-149, 2.0**-126]
    v = np.concatenate([grid, between, TIES, np.array(rare + tiny)]).astype(np.float32)
    v = np.concatenate([v, -v])
    noise = np.arange(65536, dtype=np.int32)
    codes = _launch(_stochastic, [v, noise], ((len(v), 65536), "int32"), DRAWS=65536)
    assert np.all(codes >> 3 == np.signbit(v)[:, None])
    magnitude = codes & 7
    lower = np.searchsorted(grid, np.abs(v), side="right") - 1
    assert np.all((magnitude == lower[:, None]) | (magnitude == lower[:, None] + 1))
    for i, x in enumerate(np.abs(v)):
        if x in grid:
            assert np.all(magnitude[i] == lower[i]), x
            continue
        low, high = (fractions.Fraction(float(grid[lower[i] + j])) for j in (0, 1))
        wanted = (fractions.Fraction(float(x)) - low) / (high - low) * 65536
        raised = int(np.count_nonzero(magnitude[i] > lower[i]))
        assert abs(raised - wanted) <= fractions.Fraction(1, 2)


def test_stochastic_codes_use_16_bits_of_noise():
    v = RNG.uniform(-6, 6, 8).astype(np.float32)
    noise = RNG.integers(0, 65536, 1024).astype(np.uint32)
    above = noise | (RNG.integers(1, 65536, 1024).astype(np.uint32) << 16)
    codes = [
        _launch(_stochastic, [v, n], ((8, 1024), "int32"), DRAWS=1024)
        for n in (noise, above, above.view(np.int32))
    ]
    assert len(np.unique(codes[0])) > 8
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(codes[0], codes[2])


@pytest.mark.parametrize("rule", e2m1.SCALE_RULES)
def test_scale_bytes_at_the_thresholds_of_the_mantissa(rule):
    """By magnitude alone: rule 'mse' starts from the floor byte."""
    edges = (0x000000, 0x400000, 0x600000, 0x7FFFFF)
    mantissas = np.unique(np.clip([e + d for e in edges for d in (-1, 0, 1, 2)], 0, 0x7FFFFF))
    exponents = np.array([0, 1, 2, 3, 4, 126, 127, 128, 253, 254, 255])
    bits = (exponents[:, None] << 23 | mantissas[None, :]).reshape(-1).astype(np.uint32)
    largest = _filled(bits.view(np.float32))
    got = _launch(_bytes, [largest], (largest.shape, "int32"), COUNT=len(largest), RULE=rule)
    blocks = jnp.zeros((len(largest), 32), jnp.float32).at[:, 5].set(largest)
    want = e2m1.scale_bytes(blocks, -1, "floor" if rule == "mse" else rule)[:, 0]
    assert set(np.asarray(want)) >= {0, 1, 2, 124, 125, 252, 255}
    np.testing.assert_array_equal(got, want)


class TestModel:
    """The evaluator itself, where a wrong one would hide a wrong kernel."""

    def test_fma_rounds_once(self):
        """Against exact rational arithmetic, sums of very different magnitudes included."""
        exponents = RNG.integers(-60, 40, (3, 400))
        a, b, c = np.ldexp(RNG.uniform(1, 2, (3, 400)), exponents).astype(np.float32)
        c *= RNG.choice(np.array([-1, 1], np.float32), 400)
        # Products of 1.5 * 2^-k beside a tie of the sum: rounding twice goes wrong here.
        a[:40], b[:40] = 1.5, np.ldexp(1.0, -np.arange(20, 60))
        c[:40] = np.where(np.arange(40) % 2, 1 + 2.0**-23, -1)
        a[40:44], b[40:44], c[40:44] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**24, -(2.0**24), 2, -2]
        a[44:48], b[44:48], c[44:48] = 2.0**-75, [2.0**-75, 2.0**-74, 1, 3], 2.0**-149
        got = fma(a, b, c)
        for x, y, z, r in zip(*(m.astype(float) for m in (a, b, c, got)), strict=True):
            exact = fractions.Fraction(x) * fractions.Fraction(y) + fractions.Fraction(z)
            r32 = np.float32(r)
            others = [np.nextafter(r32, np.float32(s)) for s in (-np.inf, np.inf)]
            error = abs(fractions.Fraction(float(r32)) - exact)
            for other in others:
                distance = abs(fractions.Fraction(float(other)) - exact)
                assert error < distance or (error == distance and not r32.view(np.uint32) & 1)

    def test_instructions(self):
        def one(code: str, *inputs: int) -> int:
            registers = "{ .reg .b16 lo, hi; .reg .b32 t; "
            (out,) = evaluate(f"{registers} {code} }}", [np.array([i], np.uint32) for i in inputs])
            return int(out[0])

        a, b = 0x83828180, 0x07060504
        assert one("prmt.b32 $0, $1, $2, 0x5410;", a, b) == 0x05048180
        assert one("prmt.b32 $0, $1, $2, 0x8C73;", a, b) == 0xFF000783
        assert one("shf.l.wrap.b32 $0, $1, $2, 4;", 0x90000000, 0x12345678) == 0x23456789
        assert one("shl.b32 $0, $1, 36;", 0xFF) == 0
        half, two, e4m3 = 0x3800, 0x4000, "cvt.rn.satfinite.e4m3x2.f16x2 lo, "
        assert one("mul.rn.f16x2 $0, $1, $2;", two << 16 | half, half << 16 | 0x0001) == 0x3C000000
        pack = "mov.b32 $0, {lo, lo};"
        assert one(f"{e4m3} $1; {pack}", 0x7C00 << 16 | 0xFC00) == 0x7EFE7EFE
        # Halves of the smallest subnormal, 2^-9: to the even one.
        assert one(f"{e4m3} $1; {pack}", 0x1A00 << 16 | 0x1400) == 0x02000200
        assert one(f"{e4m3} $1; {pack}", 0x7E00 << 16 | 0x3C00) == 0x7F387F38
        more, minus, nan = np.array([1.5, -1e-9, np.nan], np.float32).view(np.uint32)
        both = "cvt.rn.satfinite.e4m3x2.f32 lo, $1, $2;"
        assert one(f"{both} {pack}", more, minus) == 0x3C803C80
        assert one(f"{both} {pack}", 0x7F800000, nan) == 0x7E7F7E7F
        assert one("add.sat.f32 $0, $1, 0f00000000;", more) == 0x3F800000
        assert one("add.sat.f32 $0, $1, 0f00000000;", minus) == 0
        assert one("add.sat.f32 $0, $1, 0f00000000;", nan) == 0
        assert one("max.f32 $0, $1, $2;", nan, minus) == minus
        assert one("sub.u32 $0, $1, $2;", 1, 2) == 0xFFFFFFFF
        assert one("shr.u32 $0, $1, 28;", 0x90000000) == 9

    @pytest.mark.parametrize(
        "code",
        [
            "{ add.rz.f32 $0, $1, $1; }",
            "{ and.b32 $0, $1, t; }",
            "{ .reg .b32 t; and.b32 $0, $1, t; }",
            "{ .reg .b16 h; mov.b32 h, $1; }",
            "{ mov.b32 $0, $1, $1; }",
            "{ mov.b32 $0, $1 }",
            "mov.b32 $0, $1;",
        ],
    )
    def test_what_it_does_not_know_is_an_error(self, code):
        with pytest.raises(ValueError, match=r"instruction|register|operands|semicolon|block"):
            evaluate(code, [np.zeros(1, np.uint32)])

    def test_a_late_read_is_found(self):
        late = "{ mov.b32 $0, $1; and.b32 $0, $0, $2; }"
        assert overwritten_inputs(late, "=r,r,r") == {"$2"}
        assert not overwritten_inputs(late, "=&r,r,r")
