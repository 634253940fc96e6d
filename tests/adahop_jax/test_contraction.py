"""`matmul` under every strategy, against a float64 model of each that shares no code with it."""

import csv
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import Strategy

STRATEGIES = tuple(Strategy)

# --- the model: PAPER's words and the conventions of the reference data, in float64 ---

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_RAISE_FROM = {
    "floor": 2.0,
    "even": 1.75,
    "ceil": np.nextafter(1, 2),
    "rceil": np.nextafter(1.5, 2),
}


def padded(matrix: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, -matrix.shape[axis] % multiple)
    return np.pad(matrix, widths)


def mxfp4(matrix: np.ndarray, axis: int, rule: str) -> np.ndarray:
    """Every 32 values along `axis` on the grid of their common scale."""
    rows = padded(matrix if axis == 1 else matrix.T, 1, 32)
    blocks = rows.reshape(len(rows), -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    mantissa, power = np.frexp(amax)  # amax = (2 mantissa) 2^(power - 1)
    exponent = power - 1 - 2 + (2 * mantissa >= _RAISE_FROM[rule])
    scale = np.exp2(np.where(amax > 0, np.maximum(exponent, -127), -127).astype(float))
    distances = np.abs(np.abs(blocks / scale)[..., None] - _E2M1)
    # Of two equally near codes the even one.
    code = np.argmin(distances + 1e-9 * (np.arange(8) % 2), axis=-1)
    result = (np.copysign(_E2M1[code], blocks) * scale).reshape(rows.shape)
    return result if axis == 1 else result.T


def rotated(matrix: np.ndarray, axis: int, n: int, signs: np.ndarray | None) -> np.ndarray:
    """Signs, then the Sylvester matrix, on every n values along `axis`."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    rows = matrix if axis == 1 else matrix.T
    if signs is not None and len(signs) == rows.shape[1]:
        rows, signs = rows * signs, None
    blocks = padded(rows, 1, n).reshape(len(rows), -1, n)
    blocks = blocks if signs is None else blocks * signs
    result = (blocks @ h / np.sqrt(n)).reshape(len(rows), -1)
    return result if axis == 1 else result.T


def bfloat16(matrix: np.ndarray) -> np.ndarray:
    return matrix.astype(jnp.bfloat16).astype(np.float64)


def top(norms: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-norms, kind="stable")[:k]


def model(strategy: str, a, b, k: int, n: int = 32, signs=None, rule: str = "floor") -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)

    def iht(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = rotated(a, 1, n, signs), rotated(b, 0, n, signs)
        return mxfp4(a, 1, rule) @ mxfp4(b, 0, rule)

    match strategy:
        case "bf16":
            return bfloat16(a) @ bfloat16(b)
        case "plain":
            return mxfp4(a, 1, rule) @ mxfp4(b, 0, rule)
        case "iht":
            return iht(a, b)
        case "iht_oe_left":
            out, rows = iht(a, b), top(np.sum(a**2, axis=1), k)
            out[rows] = bfloat16(a[rows]) @ bfloat16(b)
            return out
        case "iht_oe_right":
            out, columns = iht(a, b), top(np.sum(b**2, axis=0), k)
            out[:, columns] = bfloat16(a) @ bfloat16(b[:, columns])
            return out
        case "iht_oe_inner":
            channels = top(np.sum(a**2, axis=0) * np.sum(b**2, axis=1), k)
            kept = ~np.isin(np.arange(a.shape[1]), channels)
            extracted = bfloat16(a[:, channels]) @ bfloat16(b[channels])
            return iht(a * kept, b * kept[:, None]) + extracted
    raise AssertionError(strategy)


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --- operands ---


def integers(*shape: int, rows=(), columns=(), factor: int = 41, seed: int = 0) -> np.ndarray:
    """Whole numbers, whose rotations are far from every rounding midpoint or exactly on it.

    A float32 rotation therefore has the float64 model's codes. With the factor 41 the outliers
    do not fit bfloat16.
    """
    matrix = np.random.default_rng((seed, *shape)).integers(-9, 10, shape).astype(np.float32)
    matrix[list(rows)] *= factor
    matrix[:, list(columns)] *= factor
    return matrix


def outlying(m: int, k: int, n: int, factor: int = 41) -> tuple[np.ndarray, np.ndarray]:
    """Operands with strong rows and strong columns in both."""
    a = integers(m, k, rows=[1 % m, 4 % m], columns=[2, 9], factor=factor)
    return a, integers(k, n, rows=[3, 9], columns=[n - 1, n // 2], factor=factor, seed=1)


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


# --- each strategy's arithmetic ---


@pytest.mark.parametrize("shape", [(40, 96, 24), (7, 33, 5), (1, 40, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arithmetic(strategy: Strategy, shape: tuple[int, int, int]) -> None:
    a, b = outlying(*shape)
    out = adahop.matmul(a, b, strategy, k=3)
    assert out.dtype == jnp.float32
    assert relative(out, model(strategy, a, b, 3)) < 1e-6


@pytest.mark.parametrize("rule", ["even", "ceil", "rceil"])
def test_scale_rule_of_both_operands(rule) -> None:
    a, b = outlying(20, 96, 24)
    want = model("iht", a, b, 0, rule=rule)
    assert relative(adahop.matmul(a, b, "iht", scale_rule=rule), want) < 1e-6
    assert relative(want, model("iht", a, b, 0)) > 0.01


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_block_size_and_signs(n: int) -> None:
    """K = 104 fills no block of any size; signs are per block or per position."""
    a, b = outlying(9, 104, 7)
    for length, strategy in ((0, "iht"), (n, "iht_oe_left"), (104, "iht_oe_inner")):
        signs = np.random.default_rng(length).choice(np.array([-1, 1], np.int8), length)
        signs = signs if length else None
        out = adahop.matmul(a, b, strategy, k=2, block_size=n, signs=signs)
        assert relative(out, model(strategy, a, b, 2, n, signs)) < 1e-6


def test_the_bfloat16_path_rounds_its_operands() -> None:
    """Also under jit, where a compiler may drop float32 -> bfloat16 -> float32."""
    a, b = np.full((1, 3), 1 + 2.0**-9, np.float32), np.ones((3, 1), np.float32)
    for multiply in (adahop.matmul, jax.jit(adahop.matmul, static_argnums=(2, 3))):
        assert multiply(a, b, "bf16", 1)[0, 0] == 3.0
        for strategy in ("iht_oe_left", "iht_oe_right", "iht_oe_inner"):
            assert multiply(a, b, strategy, 3)[0, 0] == 3.0


SIDES = [
    ("iht_oe_left", {"rows": [3, 17]}, {"columns": [2, 5]}),
    ("iht_oe_left", {"rows": [3, 17]}, {}),
    ("iht_oe_right", {}, {"columns": [2, 5]}),
    ("iht_oe_right", {"rows": [3, 17]}, {"columns": [2, 5]}),
]


@pytest.mark.parametrize(("strategy", "in_a", "in_b"), SIDES)
def test_sides_are_not_swapped(strategy: str, in_a: dict, in_b: dict) -> None:
    """Left overwrites the rows of A's outliers and nothing else, right the columns of B's."""
    a, b = integers(20, 64, **in_a), integers(64, 10, seed=1, **in_b)
    iht, exact = adahop.matmul(a, b, "iht"), adahop.matmul(a, b, "bf16")
    want = np.array(iht)
    taken = np.s_[[3, 17], :] if strategy == "iht_oe_left" else np.s_[:, [2, 5]]
    want[taken] = exact[taken]
    np.testing.assert_allclose(adahop.matmul(a, b, strategy, k=2), want, rtol=1e-6)
    assert relative(want, iht) > 0.01


@pytest.mark.parametrize("column", [0, 13])
def test_inner_takes_the_right_channels(column: int) -> None:
    """The product of both norms decides, and what is taken is not counted twice."""
    a, b = integers(20, 64, columns=[4]), integers(64, 10, seed=1)
    a[:, column] *= 9
    b[column] *= 9  # 81 times in the product, against 41
    b[30] *= 7
    out = adahop.matmul(a, b, "iht_oe_inner", k=1)
    rest_a, rest_b = a.copy(), b.copy()
    rest_a[:, column], rest_b[column] = 0, 0
    channel = bfloat16(a[:, [column]]) @ bfloat16(b[[column]])
    want = np.asarray(adahop.matmul(rest_a, rest_b, "iht"), np.float64) + channel
    assert relative(out, want) < 1e-6
    # A channel that is large in one operand and zero in the other contributes nothing.
    b[4] = 0
    a[:, 4] *= 100
    assert relative(adahop.matmul(a, b, "iht_oe_inner", k=1), model("iht_oe_inner", a, b, 1)) < 1e-6


@pytest.mark.parametrize("strategy", ["iht_oe_left", "iht_oe_right", "iht_oe_inner"])
def test_k_from_nothing_to_more_than_everything(strategy: str) -> None:
    a, b = outlying(12, 40, 11)
    np.testing.assert_array_equal(adahop.matmul(a, b, strategy, k=0), adahop.matmul(a, b, "iht"))
    everything = np.asarray(adahop.matmul(a, b, "bf16"))
    out = adahop.matmul(a, b, strategy, k=10**6)
    np.testing.assert_allclose(out, everything, rtol=1e-6)


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "dtype"),
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (jnp.float16, jnp.bfloat16, jnp.float32),
    ],
)
@pytest.mark.parametrize("strategy", ["iht_oe_left", "iht_oe_inner"])
def test_dtypes(strategy: str, a_dtype, b_dtype, dtype) -> None:
    """The operands' exact values count; float32 accumulates; one rounding at the end."""
    a, b = outlying(20, 96, 24, factor=4)  # whole numbers up to 36 * 4: exact in each dtype
    out = adahop.matmul(jnp.asarray(a, a_dtype), jnp.asarray(b, b_dtype), strategy, k=2)
    assert out.dtype == dtype
    want = adahop.matmul(a, b, strategy, k=2)
    np.testing.assert_array_equal(np.asarray(out, np.float32), want.astype(dtype))


# --- the reference's errors ---


@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize(
    ("pattern_a", "pattern_b"), [("row", "none"), ("none", "col"), ("col", "none")]
)
def test_mean_errors_of_the_reference(golden, pattern_a: str, pattern_b: str, rule) -> None:
    """Means over draws agree within 4 %: five draws there and here, which spread by 1 or 2 %."""
    magnitude, count, draws = 30, 16, 5
    key = (pattern_a, pattern_b, str(magnitude), str(count), "independent", rule, "32")
    with (golden / "errors" / "errors.csv").open() as file:
        lines = [line for line in csv.reader(file) if tuple(line[:7]) == key]
    assert len(lines) >= 3
    want = np.mean([[float(cell) for cell in line[8:12]] for line in lines], axis=0)

    def planted(rng: np.random.Generator, pattern: str) -> np.ndarray:
        matrix = rng.standard_normal((256, 256)).astype(np.float32)
        chosen = rng.choice(256, count, replace=False)
        if pattern != "none":
            matrix[np.s_[:, chosen] if pattern == "col" else chosen] *= magnitude
        return matrix

    errors = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        a, b = planted(rng, pattern_a), planted(rng, pattern_b)
        exact = a.astype(np.float64) @ b
        errors.append(
            [
                relative(adahop.matmul(a, b, strategy, k=count, scale_rule=rule), exact)
                for strategy in ("plain", "iht", "iht_oe_left", "iht_oe_right")
            ]
        )
    np.testing.assert_allclose(np.mean(errors, axis=0), want, rtol=0.04)


# --- shapes ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ragged_contraction_is_the_zero_padded_one(strategy: Strategy) -> None:
    def both(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        missing = -a.shape[1] % 128
        whole_a, whole_b = jnp.pad(a, ((0, 1), (0, missing))), jnp.pad(b, ((0, missing), (0, 1)))
        multiply = functools.partial(adahop.matmul, strategy=strategy, k=2)
        return multiply(a, b), multiply(whole_a, whole_b)

    sizes = [(3, 608, 2), (100, 101, 99)]
    if strategy == "plain":
        sizes += [(5, 33, 3), (5, 40, 3), (4, 96, 6), (3, 544, 2)]
    pairs = [(normal(m, k), normal(k, n)) for m, k, n in sizes]
    products = jax.jit(lambda pairs: [both(a, b) for a, b in pairs])(pairs)
    for size, (out, whole) in zip(sizes, products, strict=True):
        assert relative(out, whole[:-1, :-1]) < 1e-6, size
        assert not np.any(whole[-1]), size
        assert not np.any(whole[:, -1]), size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty(strategy: Strategy) -> None:
    for a, b in (
        ((0, 40), (40, 3)),
        ((5, 40), (40, 0)),
        ((2, 0, 40), (40, 3)),
        ((0, 2, 8), (8, 1)),
    ):
        out = adahop.matmul(jnp.ones(a), jnp.ones(b), strategy, k=2)
        assert out.shape == (*a[:-1], b[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_contraction_of_nothing_is_zero(strategy: Strategy) -> None:
    for leading in ((5,), (2, 5)):
        out = adahop.matmul(jnp.ones((*leading, 0)), jnp.ones((0, 3)), strategy, k=2)
        np.testing.assert_array_equal(out, np.zeros((*leading, 3)))


@pytest.mark.parametrize("strategy", ["iht", "iht_oe_left"])
def test_leading_axes_are_further_rows(strategy: str) -> None:
    a, b = normal(2, 3, 4, 40), normal(40, 5)
    out = adahop.matmul(a, b, strategy, k=2)
    flat = adahop.matmul(a.reshape(24, 40), b, strategy, k=2)
    np.testing.assert_array_equal(out, flat.reshape(2, 3, 4, 5))


# --- numbers that are not finite, huge or tiny ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_reaches_the_output(strategy: Strategy, dtype) -> None:
    """One NaN among 31 finite values: its row (of A) or column (of B) of the result, no other."""
    a, b = normal(6, 64, dtype=dtype), normal(64, 5, dtype=dtype)
    for bad in (np.nan, -np.nan):
        out = np.asarray(adahop.matmul(a.at[2, 40].set(bad), b, strategy, k=1), np.float32)
        assert np.isnan(out[2]).all()
        assert np.isfinite(np.delete(out, 2, 0)).all()
        out = np.asarray(adahop.matmul(a, b.at[40, 3].set(bad), strategy, k=1), np.float32)
        assert np.isnan(out[:, 3]).all()
        assert np.isfinite(np.delete(out, 3, 1)).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_infinity_is_never_finite_again(strategy: Strategy) -> None:
    a, b = normal(6, 64), normal(64, 5)
    out = np.asarray(adahop.matmul(a.at[2, 40].set(-jnp.inf), b, strategy, k=1))
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, 0)).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tiny_and_zero_operands_stay_finite(strategy: Strategy) -> None:
    b = jnp.ones((40, 3))
    for amax in (1e-38, 1e-40):
        out = np.asarray(adahop.matmul(jnp.full((5, 40), amax), b, strategy, k=2))
        assert np.all((out >= 0) & (out <= 1e-36))
    np.testing.assert_array_equal(adahop.matmul(jnp.zeros((5, 40)), b, strategy, k=2), 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_powers_of_two_pass_through(strategy: Strategy) -> None:
    """Scaling an operand scales the result, exactly, over most of float32's range."""
    a, b = normal(6, 64), normal(64, 5)
    want = np.asarray(adahop.matmul(a, b, strategy, k=1))
    for power in (-100, 100):
        scaled = adahop.matmul(a * 2.0**power, b, strategy, k=1)
        np.testing.assert_array_equal(scaled, want * np.float32(2.0**power))


# --- stochastic rounding ---


def test_stochastic_products_are_unbiased() -> None:
    """Also where B is A's transpose: shared noise would add its variance to every square."""
    a = normal(1, 64)  # one row, so that both copies have the same index for the same element
    keys = jax.random.split(jax.random.key(0), 4000)

    def draw(key: jax.Array) -> jax.Array:
        return adahop.matmul(a, a.T, "plain", scale_rule="rceil", rounding="stochastic", key=key)

    draws = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
    exact = np.asarray(a, np.float64) @ np.asarray(a, np.float64).T
    error = draws.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(draws.mean(axis=0) - exact) < 5 * error)


def test_the_key_decides() -> None:
    a, b = normal(4, 40), normal(40, 3)

    def multiply(seed: int) -> jax.Array:
        key = jax.random.key(seed)
        return adahop.matmul(a, b, "iht", scale_rule="ceil", rounding="stochastic", key=key)

    np.testing.assert_array_equal(multiply(0), multiply(0))
    assert np.all(np.asarray(multiply(0)) != multiply(1))
    np.testing.assert_array_equal(multiply(0), jax.jit(jax.checkpoint(lambda: multiply(0)))())


# --- transformations ---


@pytest.mark.parametrize("strategy", ["plain", "iht_oe_left", "iht_oe_inner"])
def test_jit_equals_eager(strategy: str) -> None:
    a, b = normal(8, 96), normal(96, 7)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return adahop.matmul(a, b, strategy, k=2)

    eager = multiply(a, b)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(multiply)(a, b), np.float32), np.asarray(eager, np.float32)
    )


@pytest.mark.parametrize("strategy", ["iht_oe_left", "iht_oe_right", "iht_oe_inner"])
def test_vmap_and_scan_equal_a_loop(strategy: str) -> None:
    """Each slice ranks its own outliers."""
    a = jnp.stack([integers(6, 40, rows=[i], columns=[2 * i], seed=i) for i in range(3)])
    b = jnp.stack([integers(40, 5, rows=[i], columns=[i], seed=9 + i) for i in range(3)])

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return adahop.matmul(a, b, strategy, k=1)

    want = [np.asarray(multiply(x, y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(jax.vmap(multiply)(a, b), want, rtol=1e-6)
    _, scanned = jax.lax.scan(lambda carry, ab: (carry, multiply(*ab)), 0, (a, b))
    np.testing.assert_allclose(scanned, want, rtol=1e-6)


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("strategy", ["plain", "iht_oe_left", "bf16"])
def test_differentiation_is_a_type_error(strategy: str, argument: int) -> None:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(adahop.matmul(a, b, strategy))

    with pytest.raises(TypeError, match=r"adahop_jax\.matmul cannot be differentiated"):
        jax.grad(loss, argument)(jnp.ones((3, 32)), jnp.ones((32, 2)))


def test_one_trace_per_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("adahop_jax.contraction")
    traces, product = [], module.product

    def counted(strategy, *operands, **arguments):
        traces.append(strategy)
        return product(strategy, *operands, **arguments)

    monkeypatch.setattr(module, "product", counted)
    a, b = normal(5, 37), normal(37, 3)  # shapes that no other test has compiled
    for factor in (1.0, 2.0, 3.0):
        adahop.matmul(a * factor, b, "plain")
        adahop.matmul(a, b * factor, Strategy.PLAIN, backend="xla", scale_rule="floor")
    assert traces == ["plain"]
    adahop.matmul(a, b, "iht")
    adahop.matmul(a, b, "iht_oe_left", k=2)
    adahop.matmul(a, b, "iht_oe_left", k=3)
    assert traces == ["plain", "iht", "iht_oe_left", "iht_oe_left"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_bf16_has_no_quantized_product(strategy: Strategy) -> None:
    """A path that ran in high precision in silence would have a small error, too."""
    multiply = functools.partial(adahop.matmul, strategy=strategy)
    text = str(jax.make_jaxpr(multiply)(normal(4, 32), normal(32, 4)))
    assert len(re.findall("name=mxfp4_product", text)) == (strategy != "bf16")


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"strategy": "iht_oe"},
            "strategy is 'iht_oe', but must be one of "
            "plain, iht, iht_oe_left, iht_oe_right, iht_oe_inner, bf16",
        ),
        ({"k": -1}, "k is -1, but must be a non-negative integer"),
        ({"k": 2.0}, "k is 2.0, but must be a non-negative integer"),
        ({"block_size": 48}, "block_size is 48, but must be one of 16, 32, 64, 128"),
        ({"scale_rule": "round"}, "scale_rule is 'round', but must be one of"),
        ({"rounding": "up"}, "rounding is 'up', but must be 'nearest' or 'stochastic'"),
        ({"rounding": "stochastic"}, "scale_rule is 'floor'.*biased; use ceil or rceil"),
        ({"rounding": "stochastic", "scale_rule": "ceil"}, "key is None"),
        ({"signs": np.ones(5)}, r"signs has shape \(5,\), but must be \(32,\) or \(64,\)"),
        ({"backend": "cuda"}, "backend is 'cuda', but must be one of auto, xla"),
        ({"b": np.ones((32, 3))}, r"a \(2, 64\) and b \(32, 3\) must have the shapes"),
        ({"b": np.ones((1, 64, 3))}, r"b \(1, 64, 3\) must have the shapes \[..., M, K\]"),
        ({"a": np.ones(64)}, r"a \(64,\) and b \(64, 3\) must have the shapes"),
    ],
)
def test_bad_arguments(arguments, sentence) -> None:
    operands = {"a": np.ones((2, 64)), "b": np.ones((64, 3)), "strategy": "iht"}
    with pytest.raises(ValueError, match=sentence):
        adahop.matmul(**operands | arguments)


@pytest.mark.parametrize("name", ["a", "b"])
def test_only_floats(name: str) -> None:
    operands = {"a": jnp.ones((32, 32)), "b": jnp.ones((32, 32))}
    operands[name] = operands[name].astype(jnp.int8)
    with pytest.raises(TypeError, match=f"{name} has dtype int8, but must be float32"):
        adahop.matmul(**operands, strategy="iht")
