"""The public `quantize`: numerical corners, shapes, dtypes, randomness, transformations, errors."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import adahop_jax as adahop
from adahop_jax.backends import xla
from adahop_jax.e2m1 import SCALE_RULES

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def normal(*shape: int, dtype=jnp.float32) -> jax.Array:
    values = np.random.default_rng(shape).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def assert_bits(got: adahop.MXFP4Array, want: adahop.MXFP4Array) -> None:
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)


# Compiled as a whole: one operation at a time takes seconds.
dequantize = jax.jit(adahop.MXFP4Array.dequantize, static_argnums=1)


def float_bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


# --- numbers ---


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_31_finite_values_and_one_bad(bad: float, dtype) -> None:
    x = jnp.ones((2, 64), dtype).at[1, 40].set(bad)
    for rule in SCALE_RULES:
        q = adahop.quantize(x, scale_rule=rule)
        scales = np.asarray(q.scales)
        assert scales[1, 1] == 255
        assert np.all(np.delete(scales.ravel(), 3) < 255)
        values = np.asarray(dequantize(q), np.float32)
        assert np.all(np.isnan(values[1, 32:]))
        np.testing.assert_array_equal(np.delete(values.ravel(), range(96, 128)), 1.0)


# amax, then the byte and the bits of its dequantized value: 1e-38 is 1.70 x 2^-127, so 1.5 of a
# scale 2^-127 is nearest (2^-127 has the bits 0x00400000); 1e-40 is 0.017 of it, so 0 is nearest.
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize(("amax", "bits"), [(0.0, 0), (1e-38, 0x00600000), (1e-40, 0)])
def test_tiny_blocks_have_byte_zero_and_exact_values(amax: float, bits: int, rule) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 5], x[0, 6] = amax, -amax
    q = adahop.quantize(x, scale_rule=rule)
    assert q.scales.tolist() == [[0]]
    got = float_bits(dequantize(q))
    want = np.zeros((1, 32), np.uint32)
    want[0, 5], want[0, 6] = bits, bits | np.signbit(x[0, 6]).astype(np.uint32) << 31
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("power", [-120, -3, 0, 40, 120])
def test_scale_next_to_a_power_of_two(power: int) -> None:
    """One ulp decides, exactly, where a float logarithm would round."""
    two = np.float32(2.0**power)
    amax = {
        "below": np.nextafter(two, np.float32(0)),
        "at": two,
        "above": np.nextafter(two, np.float32(np.inf)),
        "at 1.5": 1.5 * two,
        "above 1.5": np.nextafter(1.5 * two, np.float32(np.inf)),
        "below 1.75": np.nextafter(1.75 * two, np.float32(0)),
        "at 1.75": 1.75 * two,
    }
    x = jnp.zeros((7, 32), jnp.float32).at[:, 9].set(np.array(list(amax.values())))
    floor = power - 2 + 127
    steps = {
        "floor": [-1, 0, 0, 0, 0, 0, 0],
        "even": [0, 0, 0, 0, 0, 0, 1],
        "ceil": [0, 0, 1, 1, 1, 1, 1],
        "rceil": [0, 0, 0, 0, 1, 1, 1],
    }
    for rule, raised in steps.items():
        got = adahop.quantize(x, scale_rule=rule).scales[:, 0]
        np.testing.assert_array_equal(got, floor + np.array(raised), err_msg=rule)


def test_magnitude_of_a_negative_block() -> None:
    x = -jnp.ones(32).at[3].set(100.0)
    q = adahop.quantize(x)
    assert q.scales.tolist() == [127 + 4]  # 100 = 1.56 x 2^6
    want = np.zeros(32)
    want[3] = -96.0  # 6.25 scales of 16 saturate at 6
    np.testing.assert_array_equal(dequantize(q), want)
    assert np.all(np.signbit(dequantize(q)))


def test_float32_is_not_rounded_to_bfloat16_first() -> None:
    x = jnp.zeros(32).at[:3].set(jnp.array([4.0, 0.2501, 0.25]))
    np.testing.assert_array_equal(dequantize(adahop.quantize(x))[:3], [4.0, 0.5, 0.0])
    narrow = dequantize(adahop.quantize(x.astype(jnp.bfloat16)), jnp.float32)
    np.testing.assert_array_equal(narrow[:3], [4.0, 0.0, 0.0])


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_jit_equals_eager(rule) -> None:
    x = normal(8, 96)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        eager = adahop.quantize(x.astype(dtype), scale_rule=rule)
        # The cast inside: it must not vanish in the compiler.
        jitted = jax.jit(lambda x, dtype=dtype: adahop.quantize(x.astype(dtype), scale_rule=rule))
        assert_bits(jitted(x), eager)


def test_one_operation_at_a_time_gives_the_same_bits() -> None:
    x = normal(8, 96)
    with jax.disable_jit():
        one_by_one = adahop.quantize(x, scale_rule="mse")
    assert_bits(adahop.quantize(x, scale_rule="mse"), one_by_one)


def test_the_cast_under_jit_is_a_rounding() -> None:
    x = jnp.zeros(32).at[:2].set(jnp.array([4.0, 0.2501]))
    q = jax.jit(lambda x: adahop.quantize(x.astype(jnp.bfloat16)))(x)
    assert dequantize(q)[1] == 0


@given(hnp.arrays(np.float32, (2, 32), elements=FINITE), st.sampled_from(SCALE_RULES))
def test_quantized_values_stay(x: np.ndarray, rule) -> None:
    """Decoded and encoded again: the same values, and no infinity from a finite input."""
    values = dequantize(adahop.quantize(x / 2, scale_rule=rule))
    assert np.all(np.isfinite(values))
    again = dequantize(adahop.quantize(values, scale_rule=rule))
    np.testing.assert_array_equal(float_bits(again), float_bits(values))


@given(hnp.arrays(np.float32, (1, 32), elements=st.floats(-1000, 1000, width=32)))
def test_nearest_of_fifteen_values(x: np.ndarray) -> None:
    """No other value of the block's grid is nearer."""
    q = adahop.quantize(x, scale_rule="floor")
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.concatenate([grid, -grid]) * 2.0 ** (int(q.scales[0, 0]) - 127)
    error = np.abs(np.asarray(dequantize(q), np.float64) - x)
    np.testing.assert_array_equal(error, np.abs(x.astype(np.float64)[..., None] - grid).min(-1))


# --- shapes and dtypes ---


@pytest.mark.parametrize("length", [1, 33, 40, 96, 544, 608])
def test_ragged_length_is_the_zero_padded_one(length: int) -> None:
    x = normal(3, length)
    blocks = -(-length // 32)
    q = adahop.quantize(x)
    assert (q.shape, q.codes.shape, q.scales.shape) == (x.shape, (3, 16 * blocks), (3, blocks))
    padded = adahop.quantize(jnp.pad(x, ((0, 0), (0, 32 * blocks - length))))
    assert_bits(q, padded)
    np.testing.assert_array_equal(dequantize(q), dequantize(padded)[:, :length])
    assert_bits(adahop.quantize(x.T, 0), jax.tree.map(jnp.transpose, q))


@pytest.mark.parametrize("shape", [(64,), (1, 1), (2, 16, 64), (2, 3, 4, 33)])
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    q = adahop.quantize(x)
    flat = adahop.quantize(x.reshape(-1, shape[-1]))
    assert q.shape == shape
    np.testing.assert_array_equal(q.codes.reshape(flat.codes.shape), flat.codes)
    np.testing.assert_array_equal(q.scales.reshape(flat.scales.shape), flat.scales)


@pytest.mark.parametrize(("shape", "axis"), [((0, 64), 1), ((0, 64), 0), ((3, 0), 1), ((0,), 0)])
def test_empty(shape: tuple[int, ...], axis: int) -> None:
    q = adahop.quantize(jnp.ones(shape), axis)
    assert q.shape == shape
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axis_is_counted_from_the_end(axis: int) -> None:
    x = normal(33, 34, 35)
    q = adahop.quantize(x, axis)
    assert q.axis == axis - 3
    for same in (axis - 3, np.int64(axis), np.int32(axis - 3)):
        other = adahop.quantize(x, same)
        assert type(other.axis) is int
        assert jax.tree.structure(other) == jax.tree.structure(q)
        assert_bits(other, q)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_half_precision_is_its_exact_value(dtype, rule) -> None:
    x = normal(4, 64, dtype=dtype) * jnp.asarray(2.0, dtype) ** -12
    q = adahop.quantize(x, scale_rule=rule)
    assert q.dtype == dtype
    assert_bits(q, adahop.quantize(x.astype(jnp.float32), scale_rule=rule))


def test_float16_subnormals_and_its_largest_value() -> None:
    x = jnp.zeros(64, jnp.float16).at[0].set(2.0**-24).at[32].set(65504.0)
    q = adahop.quantize(x)
    assert q.scales.tolist() == [127 - 26, 127 + 13]
    values = dequantize(q, jnp.float32)
    assert (values[0], values[32]) == (2.0**-24, 6 * 2.0**13)


def test_numpy_input() -> None:
    x = np.asarray(normal(2, 40))
    assert_bits(adahop.quantize(x), adahop.quantize(jnp.asarray(x)))


# --- stochastic rounding ---


def stochastic(x: jax.Array, seed: int, axis: int = -1) -> adahop.MXFP4Array:
    key = jax.random.key(seed)
    return adahop.quantize(x, axis, "rceil", "stochastic", key)


def test_noise_is_one_number_an_element() -> None:
    """No two blocks or keys share their noise; the frequency is that of the position."""
    x = np.full((256, 256), 0.3, np.float32)
    x[::32], x[:, ::32] = 6.0, 6.0  # a block along either axis has scale 1
    small = x < 1
    p = 0.6  # 0.3 between 0 and 0.5

    def went_up(seed: int, axis: int) -> np.ndarray:
        values = np.asarray(dequantize(stochastic(x, seed, axis)))
        assert np.all(np.isin(values[small], [0.0, 0.5]))
        return values == 0.5

    up = went_up(0, 1)
    assert abs(up[small].mean() - p) < 5 * np.sqrt(p * (1 - p) / small.sum())
    blocks = up[1:].reshape(255, 8, 32)[np.arange(255) % 32 != 31].reshape(-1, 32)
    assert len(np.unique(blocks, axis=0)) == len(blocks)
    agreement = np.mean((up == went_up(1, 1))[small])
    assert abs(agreement - (p**2 + (1 - p) ** 2)) < 0.02
    # The element's index decides, not its place within a block.
    np.testing.assert_array_equal(went_up(0, 0)[small], up[small])


def test_same_key_same_bits() -> None:
    x = normal(8, 96)
    want = stochastic(x, 3)
    assert_bits(stochastic(x, 3), want)
    assert_bits(jax.jit(stochastic, static_argnums=(1, 2))(x, 3), want)
    remat = jax.jit(jax.checkpoint(lambda x: stochastic(x, 3)))
    assert_bits(remat(x), want)
    legacy = adahop.quantize(x, -1, "rceil", "stochastic", jax.random.PRNGKey(3))
    assert_bits(legacy, want)


def test_nearest_rounding_ignores_a_key() -> None:
    x = normal(2, 64)
    assert_bits(adahop.quantize(x, key=jax.random.key(0)), adahop.quantize(x))


# --- transformations ---


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_vmap_equals_a_loop(rounding: str) -> None:
    x, keys = normal(3, 4, 40), jax.random.split(jax.random.key(0), 3)

    def one(x: jax.Array, key: jax.Array) -> adahop.MXFP4Array:
        return adahop.quantize(x, 1, "ceil", rounding, key)

    q = jax.vmap(one)(x, keys)
    for i in range(3):
        assert_bits(jax.tree.map(lambda part, i=i: part[i], q), one(x[i], keys[i]))
    inner = jax.vmap(one, in_axes=(1, None))(jnp.moveaxis(x, 0, 1), keys[0])
    assert_bits(jax.tree.map(lambda part: part[0], inner), one(x[0], keys[0]))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.grad(f)(x),
        lambda f, x: jax.jit(jax.grad(f))(x),
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.grad(jax.checkpoint(f))(x),
        lambda f, x: jax.vmap(jax.grad(f))(x[None]),
    ],
    ids=["grad", "jit", "jvp", "remat", "vmap"],
)
def test_differentiation_is_a_type_error(differentiate) -> None:
    """Integer codes would carry a zero gradient in silence."""
    with pytest.raises(TypeError, match=r"adahop_jax\.quantize cannot be differentiated"):
        differentiate(lambda x: jnp.sum(adahop.quantize(x).dequantize() * x), jnp.ones(32))


def test_a_stopped_gradient_passes() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(adahop.quantize(jax.lax.stop_gradient(x)).dequantize() * x)

    x = normal(64)
    np.testing.assert_array_equal(jax.grad(loss)(x), adahop.quantize(x).dequantize())


def test_one_trace_per_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    quantize = xla.XLABackend.quantize

    def counted(self, x, axis, quantizer, **arguments):
        traces.append(quantizer)
        return quantize(self, x, axis, quantizer, **arguments)

    monkeypatch.setattr(xla.XLABackend, "quantize", counted)
    x = normal(7, 71)  # a shape that no other test has compiled
    for factor in (1.0, 2.0, 3.0):
        adahop.quantize(x * factor)
        adahop.quantize(x * factor, axis=1, scale_rule="floor", backend="xla")
    assert len(traces) == 1
    for seed in range(3):
        stochastic(x, seed)
    assert len(traces) == 2
    adahop.quantize(x, axis=0)
    adahop.quantize(x.astype(jnp.bfloat16))
    assert len(traces) == 4


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"axis": 2}, ValueError, "axis is 2, but the array has 2 axes"),
        ({"axis": -3}, ValueError, "axis is -3, but the array has 2 axes"),
        ({"axis": 1.0}, TypeError, "axis is 1.0, but must be an int"),
        ({"axis": True}, TypeError, "axis is True, but must be an int"),
        (
            {"scale_rule": "round"},
            ValueError,
            "scale_rule is 'round', but must be one of floor, even, ceil, rceil, mse",
        ),
        ({"rounding": "up"}, ValueError, "rounding is 'up', but must be 'nearest' or 'stochastic'"),
        (
            {"rounding": "stochastic", "scale_rule": "rceil"},
            ValueError,
            "key is None, but stochastic rounding and random signs need a JAX key",
        ),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda', but must be one of auto, xla"),
    ],
)
def test_bad_arguments(arguments, error, sentence) -> None:
    with pytest.raises(error, match=sentence):
        adahop.quantize(jnp.ones((2, 32)), **arguments)


@pytest.mark.parametrize("rule", ["floor", "even", "mse"])
def test_stochastic_rounding_needs_a_rule_that_does_not_saturate(rule) -> None:
    with pytest.raises(ValueError, match=f"scale_rule is '{rule}'.*biased; use ceil or rceil"):
        adahop.quantize(jnp.ones(32), -1, rule, "stochastic", jax.random.key(0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool, jnp.complex64])
def test_only_floats(dtype) -> None:
    sentence = f"x has dtype {jnp.dtype(dtype)}, but must be float32, bfloat16 or float16"
    with pytest.raises(TypeError, match=sentence):
        adahop.quantize(jnp.ones((2, 32), dtype))


def test_eight_bit_floats_are_refused() -> None:
    with pytest.raises(TypeError, match="x has dtype float8_e4m3fn"):
        adahop.quantize(jnp.ones((2, 32), jnp.float8_e4m3fn))


def test_double_precision_is_refused() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match="x has dtype float64"):
        adahop.quantize(np.ones((2, 32), np.float64))


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(ValueError, match="axis is -1, but the array has 0 axes"):
        adahop.quantize(jnp.float32(1))


def test_errors_come_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("adahop_jax.quantization")
    monkeypatch.setattr(module, "_quantize", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match="rounding"):
        adahop.quantize(jnp.ones(32), rounding="up")
