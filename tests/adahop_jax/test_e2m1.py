import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_suite import RULES, golden_input
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adahop_jax import e2m1

VALUES = np.array(e2m1.E2M1_VALUES)
BLOCKS = hnp.arrays(
    np.float32, (2, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def test_all_codes_decode_and_encode_to_themselves():
    codes = jnp.arange(16, dtype=jnp.uint8)
    for byte in (2, 127, 134, 200):
        x = e2m1.decode(codes, jnp.uint8(byte))
        want = np.concatenate([VALUES, -VALUES]) * 2.0 ** (byte - 127)
        np.testing.assert_array_equal(np.asarray(x, np.float64), want)
        again = e2m1.nearest_code(e2m1.scaled_magnitude(x, jnp.uint8(byte)))
        np.testing.assert_array_equal(e2m1.signed_code(again, x), codes)
    np.testing.assert_array_equal(e2m1.code_value(codes[:8]), VALUES)


@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (134, 128.0), (254, 2.0**127)]
)
def test_scale_bytes_are_powers_of_two(byte, value):
    got = e2m1.decode(jnp.uint8(2), jnp.uint8(byte))
    assert np.asarray(got).view(np.uint32) == np.float32(value).view(np.uint32)


def test_byte_255_is_nan_whatever_the_code():
    assert np.all(np.isnan(e2m1.decode(jnp.arange(16, dtype=jnp.uint8), jnp.uint8(255))))


def test_ties_go_to_the_even_code_and_large_values_saturate():
    v = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30])
    np.testing.assert_array_equal(e2m1.nearest_code(v), [0, 2, 2, 4, 4, 6, 6, 7, 7, 7])
    one_ulp_above = jnp.nextafter(v[:7], jnp.inf)
    np.testing.assert_array_equal(e2m1.nearest_code(one_ulp_above), [1, 2, 3, 4, 5, 6, 7])


def test_the_low_nibble_is_the_even_index():
    codes = jnp.array([1, 2, 0xF, 0], jnp.uint8)
    np.testing.assert_array_equal(e2m1.pack(codes, 0), [0x21, 0x0F])
    np.testing.assert_array_equal(e2m1.unpack(e2m1.pack(codes, 0), 0), codes)


@pytest.mark.parametrize("rule", e2m1.SCALE_RULES)
def test_one_nan_or_infinity_marks_the_block(rule):
    for bad in (np.nan, np.inf, -np.inf):
        x = jnp.ones((3, 32), jnp.bfloat16).at[1, 17].set(bad)
        assert e2m1.scale_bytes(x, -1, rule)[:, 0].tolist()[1] == 255
        assert np.count_nonzero(e2m1.scale_bytes(x, -1, rule) == 255) == 1


@given(BLOCKS)
def test_mse_takes_the_better_of_two_exponents(x):
    """Judged in float64 by an independent search over the eight magnitudes."""
    floor = np.asarray(e2m1.scale_bytes(jnp.asarray(x), -1, "floor"))
    byte = np.asarray(e2m1.scale_bytes(jnp.asarray(x), -1, "mse"))
    assert np.all((byte == floor) | (byte == floor + 1))

    def error(b):
        v = np.abs(x.astype(np.float64)) / 2.0 ** (b.astype(np.float64) - 127)
        nearest = np.abs(v[..., None] - VALUES).min(-1)
        return np.sum(nearest**2, axis=-1) * 4.0 ** (b.astype(np.float64)[:, 0] - 127)

    chosen, other = error(byte), error(np.where(byte == floor, floor + 1, floor))
    # Squares of errors cut to 2^-11 decide; they can prefer the other only within that resolution.
    unit = 4.0 ** (floor.astype(np.float64)[:, 0] - 127)
    assert np.all(chosen <= other + 32 * 2 * 2.0**-11 * 2 * unit)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_stochastic_codes_turn_at_the_oracles_probability(stochastic_file, oracle, dtype, rule):
    """The smallest uniform number rounds up wherever p > 0, and p itself divides up from down."""
    x = golden_input(oracle, dtype).astype(jnp.float32)
    scales = jnp.repeat(jnp.asarray(oracle[f"{dtype}_{rule}_scale"]), 32, axis=-1)
    v = e2m1.scaled_magnitude(x, scales)
    up_p, low, high = (oracle[f"{dtype}_{rule}_{name}"] for name in ("p_up", "lo_code", "hi_code"))
    negative = np.signbit(np.asarray(x))
    # Rounding a negative value's magnitude up moves it down.
    p = np.where(negative & (low != high), 1 - up_p, up_p)
    near, far = np.where(negative, high, low) & 7, np.where(negative, low, high) & 7

    def codes(uniform):
        bits = np.clip(uniform * 2.0**24, 0, 2**24 - 1).astype(np.uint32) << 8
        return np.asarray(e2m1.stochastic_code(v, jnp.asarray(bits)))

    step = 2.0**-24
    np.testing.assert_array_equal(codes(np.zeros_like(p)), np.where(p > 0, far, near))
    below, above = np.floor(p / step - 1) * step, np.ceil(p / step + 1) * step
    sure = (p > 2 * step) & (p < 1 - 2 * step)
    np.testing.assert_array_equal(codes(below)[sure], far[sure])
    np.testing.assert_array_equal(codes(above)[sure], near[sure])


@given(BLOCKS)
def test_stochastic_rounding_keeps_what_is_on_the_grid(x):
    x = jnp.asarray(x)
    byte = e2m1.scale_bytes(x, -1, "rceil")
    v = e2m1.scaled_magnitude(x, byte)
    on_grid = e2m1.code_value(e2m1.nearest_code(v))
    for bits in (0, 0xFFFFFFFF):
        random_bits = jnp.full(v.shape, bits, jnp.uint32)
        code = e2m1.stochastic_code(on_grid, random_bits)
        np.testing.assert_array_equal(e2m1.code_value(code), on_grid)


def test_random_bits_depend_on_the_global_index_alone():
    key = jax.random.key(3)
    whole = e2m1.random_bits(key, (4, 64))
    assert len(np.unique(whole)) == whole.size
    np.testing.assert_array_equal(whole, jax.jit(e2m1.random_bits, static_argnums=1)(key, (4, 64)))
