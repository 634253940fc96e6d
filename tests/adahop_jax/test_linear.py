"""`dot` against a float64 model of the three products that shares no code with the library."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

import adahop_jax as adahop
from adahop_jax import MatmulStrategies, OperandFormat, Recipe, Strategy

ALL = tuple(Strategy)
# Every strategy once in every product, and never the same one in two products of a layer.
LATIN = [
    MatmulStrategies(ALL[i], ALL[(i + 1) % 6], ALL[(i + 2) % 6], k=(3, 4, 5)) for i in range(6)
]
STOCHASTIC = OperandFormat("rceil", "stochastic")
NOISY = Recipe(activation=STOCHASTIC, weight=STOCHASTIC, gradient=STOCHASTIC)
IHT = MatmulStrategies.uniform("iht")

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]


def model_quantized(m: np.ndarray, axis: int, rotated: int = 0) -> np.ndarray:
    """`m` after zero-padding, rotation and the floor rule's rounding, along `axis`."""
    m = np.moveaxis(m, axis, -1)
    padded = math.lcm(32, rotated or 1) * -(-m.shape[-1] // math.lcm(32, rotated or 1))
    m = np.pad(m, ((0, 0), (0, padded - m.shape[-1])))
    if rotated:
        h = np.ones((1, 1))
        while len(h) < rotated:
            h = np.block([[h, h], [h, -h]])
        h /= math.sqrt(rotated)
        m = (m.reshape(len(m), -1, rotated) @ h).reshape(m.shape)
    blocks = m.reshape(len(m), -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** np.where(amax > 0, np.frexp(amax)[1] - 3, -127)
    candidates = _E2M1[_EVEN_FIRST]
    nearest = np.argmin(np.abs(np.abs(blocks / scale)[..., None] - candidates), axis=-1)
    q = np.sign(blocks) * candidates[nearest] * scale
    return np.moveaxis(q.reshape(m.shape), -1, axis)


def model_bf16(m: np.ndarray) -> np.ndarray:
    return m.astype(jnp.bfloat16).astype(np.float64)


def largest(norms: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-norms, kind="stable")[:k]


def model_product(
    strategy: Strategy, a: np.ndarray, b: np.ndarray, k: int, n: int = 32
) -> np.ndarray:
    """A [M, K] x B [K, N] as the paper words it."""
    if strategy == "bf16":
        return model_bf16(a) @ model_bf16(b)
    if strategy == "plain":
        return model_quantized(a, 1) @ model_quantized(b, 0)
    if strategy == "iht_oe_inner":
        inner = largest(np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=1), k)
        rest_a, rest_b = a.copy(), b.copy()
        rest_a[:, inner], rest_b[inner] = 0, 0
        picked = model_bf16(a[:, inner]) @ model_bf16(b[inner])
        return model_quantized(rest_a, 1, n) @ model_quantized(rest_b, 0, n) + picked
    out = model_quantized(a, 1, n) @ model_quantized(b, 0, n)
    if strategy == "iht_oe_left":
        rows = largest(np.linalg.norm(a, axis=1), k)
        out[rows] = model_bf16(a[rows]) @ model_bf16(b)
    if strategy == "iht_oe_right":
        columns = largest(np.linalg.norm(b, axis=0), k)
        out[:, columns] = model_bf16(a) @ model_bf16(b[:, columns])
    return out


def model_dot(
    x: jax.Array, w: jax.Array, g: jax.Array, strategies: MatmulStrategies, n: int = 32
) -> list[np.ndarray]:
    """(y, gx, gradient of the kernel), in the paper's layout W [out, in]."""
    x64, kernel, g64 = (np.asarray(m, np.float64) for m in (x, w, g))
    W = kernel.T
    assert isinstance(strategies.k, tuple)
    k_y, k_gx, k_gw = strategies.k
    y = model_product(strategies.y, x64, W.T, k_y, n)
    gx = model_product(strategies.gx, g64, W, k_gx, n)
    gw = model_product(strategies.gw, g64.T, x64, k_gw, n)
    return [y, gx, gw.T]


@functools.partial(jax.jit, static_argnums=(3, 4))
def gradients(x, w, g, strategies, recipe=None, key=None):
    """(y, gx, gw)."""
    y, pull = jax.vjp(lambda x, w: adahop.dot(x, w, strategies, recipe=recipe, key=key), x, w)
    return y, *pull(g)


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def outlying(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    """Noise with two strong rows and two strong columns, of different strengths."""
    m = np.array(normal(*shape, seed=seed))
    m[[1, 7]] *= [[30.0], [15.0]]
    m[:, [2, 9]] *= [25.0, 12.0]
    return jnp.asarray(m).astype(dtype)


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def assert_bits(got, want) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


# --- the three products ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("strategies", LATIN, ids=lambda s: f"{s.y}-{s.gx}-{s.gw}")
def test_products_equal_the_model(strategies: MatmulStrategies, dtype) -> None:
    """Ragged in all three contractions; the kernel stays float32, and so does its gradient."""
    x, w = outlying(40, 48, dtype=dtype), outlying(48, 36, seed=1)
    g = outlying(40, 36, seed=2, dtype=dtype)
    y, gx, gw = gradients(x, w, g, strategies)
    assert (y.dtype, gx.dtype, gw.dtype) == (dtype, dtype, jnp.float32)
    want_y, want_gx, want_gw = model_dot(x, w, g, strategies)
    rounding = 2**-8 if dtype == jnp.bfloat16 else 2e-6  # half a bfloat16 ulp, at most
    assert relative(y, want_y) < rounding
    assert relative(gx, want_gx) < rounding
    assert relative(gw, want_gw) < 2e-6  # no bfloat16 anywhere after the accumulation


@pytest.mark.parametrize("block_size", [16, 128])
def test_block_size_of_the_recipe(block_size: int) -> None:
    x, w, g = outlying(40, 48), outlying(48, 36, seed=1), outlying(40, 36, seed=2)
    strategies = MatmulStrategies("iht", "iht_oe_left", "iht_oe_right", k=2)
    got = gradients(x, w, g, strategies, Recipe(block_size=block_size))
    for out, want in zip(got, model_dot(x, w, g, strategies, block_size), strict=True):
        assert relative(out, want) < 2e-6


@pytest.mark.parametrize(
    ("strategy", "side"), [("iht_oe_left", "columns"), ("iht_oe_right", "rows")]
)
def test_sides_of_gw_in_the_kernel_layout(strategy: str, side: str) -> None:
    """OE-left of g^T x takes output channels, the kernel gradient's columns; OE-right its rows."""
    x, w, g = np.array(normal(64, 32)), normal(32, 48, seed=1), np.array(normal(64, 48, seed=2))
    x[:, [3, 20]] *= 8
    g[:, [5, 40]] *= 8
    exact = x.astype(np.float64).T @ g
    strategies = MatmulStrategies("bf16", "bf16", strategy, k=2)
    _, _, gw = gradients(jnp.asarray(x), w, jnp.asarray(g), strategies)
    # The relative error of each output channel, or input channel: the two taken out are exact.
    axis, taken = (0, [5, 40]) if side == "columns" else (1, [3, 20])
    error = np.linalg.norm(gw - exact, axis=axis) / np.linalg.norm(exact, axis=axis)
    assert error[taken].max() < 0.01
    assert np.delete(error, taken).min() > 0.04


@pytest.mark.parametrize(
    ("strategy", "least", "most"),
    [("plain", 0.08, 0.25), ("iht", 0.08, 0.25), ("iht_oe_left", 0.02, 0.2), ("bf16", 1e-4, 5e-3)],
)
def test_error_against_the_exact_gradients(strategy: str, least: float, most: float) -> None:
    """Neither worse than FP4 rounding, nor a hidden path of high precision."""
    x, w, g = normal(64, 96), normal(96, 64, seed=1), normal(64, 64, seed=2)
    others = "plain" if strategy == "bf16" else strategy
    x64, w64, g64 = (np.asarray(m, np.float64) for m in (x, w, g))
    exact = (x64 @ w64, g64 @ w64.T, x64.T @ g64)
    for i in range(3):
        each = [others] * 3
        each[i] = strategy
        out = gradients(x, w, g, MatmulStrategies(*each, k=8))[i]
        assert least < relative(out, exact[i]) < most


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_all_bf16_is_the_plain_product(dtype) -> None:
    x, w, g = (normal(*s, dtype=dtype) for s in ((2, 12, 40), (40, 24), (2, 12, 24)))

    def plain(x, w, g):
        y, pull = jax.vjp(jnp.dot, x, w)
        return y, *pull(g)

    assert_bits(gradients(x, w, g, MatmulStrategies.uniform("bf16")), jax.jit(plain)(x, w, g))


def test_all_bf16_with_master_weights() -> None:
    """bf16 x and f32 w: the kernel's gradient keeps the bits that bfloat16 would drop."""
    x, w, g = normal(64, 40, dtype=jnp.bfloat16), normal(40, 24), normal(64, 24, dtype=jnp.bfloat16)
    y, gx, gw = gradients(x, w, g, MatmulStrategies.uniform("bf16"))
    assert (y.dtype, gx.dtype, gw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    assert relative(gw, exact) < 1e-6 < 1e-3 < relative(model_bf16(np.asarray(gw)), exact)


def test_strategy_by_name_takes_k_from_the_recipe() -> None:
    x, w, g = outlying(32, 32), outlying(32, 32, seed=1), outlying(32, 32, seed=2)
    got = gradients(x, w, g, "iht_oe_left", Recipe(k=2))
    want = gradients(x, w, g, MatmulStrategies.uniform("iht_oe_left", k=2), Recipe())
    assert_bits(got, want)


# --- shapes ---

MIXED = MatmulStrategies("iht_oe_left", "iht_oe_inner", "iht_oe_right")


@pytest.mark.parametrize(
    ("leading", "K", "N", "strategies"),
    [
        ((33,), 40, 1, IHT),
        ((33,), 40, 1, MIXED),
        ((50,), 96, 4, MIXED),
        ((1,), 40, 10, MIXED),
        ((), 64, 16, IHT),
        ((2, 16), 64, 10, MIXED),
        ((2, 3, 4), 40, 4, IHT),
    ],
)
def test_ragged_shapes(leading, K: int, N: int, strategies: MatmulStrategies) -> None:
    """k = 64 exceeds every size here, so it is clipped."""
    x, w, g = normal(*leading, K), normal(K, N, seed=1), normal(*leading, N, seed=2)
    y, gx, gw = gradients(x, w, g, strategies)
    assert (y.shape, gx.shape, gw.shape) == ((*leading, N), x.shape, w.shape)
    want = model_dot(x.reshape(-1, K), w, g.reshape(-1, N), strategies)
    assert relative(y.reshape(-1, N), want[0]) < 2e-6
    assert relative(gx.reshape(-1, K), want[1]) < 2e-6
    assert relative(gw, want[2]) < 2e-6


def test_equal_to_the_zero_padded_result() -> None:
    strategies = LATIN[1]
    x, w, g = normal(33, 40), normal(40, 10, seed=1), normal(33, 10, seed=2)
    got = gradients(x, w, g, strategies)
    padded = (
        jnp.pad(x, ((0, 31), (0, 24))),
        jnp.pad(w, ((0, 24), (0, 22))),
        jnp.pad(g, ((0, 31), (0, 22))),
    )
    for part, whole in zip(got, gradients(*padded, strategies), strict=True):
        cut = np.asarray(whole)[: part.shape[0], : part.shape[1]]
        np.testing.assert_allclose(part, cut, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategies", LATIN[::2], ids=lambda s: f"{s.y}-{s.gx}-{s.gw}")
def test_no_tokens(strategies: MatmulStrategies) -> None:
    x, w, g = jnp.zeros((0, 64)), normal(64, 12), jnp.zeros((0, 12))
    y, gx, gw = gradients(x, w, g, strategies)
    assert (y.shape, gx.shape) == ((0, 12), (0, 64))
    np.testing.assert_array_equal(gw, np.zeros((64, 12)))


# --- bad input, and numbers that are not finite ---


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("strategies", LATIN, ids=lambda s: f"{s.y}-{s.gx}-{s.gw}")
def test_nan_and_infinity_stay_visible(strategies: MatmulStrategies, bad: float) -> None:
    """One bad entry makes its row and column of the two products it enters bad, and no other."""
    clean = {"x": normal(40, 48), "w": normal(48, 36, seed=1), "g": normal(40, 36, seed=2)}
    for name, where in (("x", (3, 5)), ("w", (5, 7)), ("g", (3, 7))):
        tensors = dict(clean)
        tensors[name] = clean[name].at[where].set(bad)
        outs = gradients(tensors["x"], tensors["w"], tensors["g"], strategies)
        want = [np.zeros(out.shape, bool) for out in outs]
        if name == "x":
            want[0][3], want[2][5] = True, True
        elif name == "w":
            want[0][:, 7], want[1][:, 5] = True, True
        else:
            want[1][3], want[2][:, 7] = True, True
        for out, mask in zip(outs, want, strict=True):
            np.testing.assert_array_equal(~np.isfinite(out), mask)


def test_bad_arguments() -> None:
    x, w = normal(4, 8), normal(8, 3)
    with pytest.raises(ValueError, match=r"x \(4, 8\) and w \(3, 8\)"):
        adahop.dot(x, w.T, "iht")
    with pytest.raises(ValueError, match=r"w \(8,\)"):
        adahop.dot(x, w[:, 0], "iht")
    with pytest.raises(TypeError, match="x has dtype int32"):
        adahop.dot(jnp.ones((4, 8), jnp.int32), w, "iht")
    with pytest.raises(TypeError, match="w has dtype int32"):
        adahop.dot(x, jnp.ones((8, 3), jnp.int32), "iht")
    with pytest.raises(ValueError, match="'ihtt'"):
        adahop.dot(x, w, "ihtt")
    for recipe in (NOISY, Recipe(signs="random")):
        with pytest.raises(ValueError, match="key is None"):
            adahop.dot(x, w, "iht", recipe=recipe)


# --- transformations ---


def test_jit_equals_eager() -> None:
    x, w, g = normal(40, 48), normal(48, 36, seed=1), normal(40, 36, seed=2)
    strategies = MatmulStrategies("plain", "bf16", "bf16")
    y, pull = jax.vjp(lambda x, w: adahop.dot(x, w, strategies), x, w)
    for a, b in zip((y, *pull(g)), gradients(x, w, g, strategies), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_input_is_rounded_before_it_is_quantized() -> None:
    """XLA may drop the rounding to bfloat16 of what feeds the layer: then bits depend on fusion."""
    x, w = normal(64, 64, dtype=jnp.bfloat16), normal(64, 64, seed=1)

    @jax.jit
    def activation(x):
        return x + x * x

    @jax.jit
    def fused(x, w):
        return adahop.dot(activation(x), w, "iht")

    apart = jax.jit(lambda h, w: adahop.dot(h, w, "iht"))(activation(x), w)
    np.testing.assert_array_equal(fused(x, w).astype(jnp.float32), apart.astype(jnp.float32))


@pytest.mark.parametrize(
    ("strategies", "shared_w"), [(LATIN[1], False), (LATIN[3], True)], ids=["batched_w", "shared_w"]
)
def test_vmap_equals_a_loop(strategies: MatmulStrategies, shared_w: bool) -> None:
    xs, g = normal(3, 20, 40), normal(3, 20, 12, seed=2)
    ws = normal(40, 12, seed=1) if shared_w else normal(3, 40, 12, seed=1)
    mapped = jax.jit(
        jax.vmap(
            functools.partial(gradients, strategies=strategies), (0, None if shared_w else 0, 0)
        )
    )(xs, ws, g)
    for i in range(3):
        single = gradients(xs[i], ws if shared_w else ws[i], g[i], strategies)
        for a, b in zip(mapped, single, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_scan_over_layers_with_master_weights() -> None:
    """bf16 activations, f32 kernels: inside a scan the cotangents' dtypes have to be right."""
    x, ws = normal(20, 32, dtype=jnp.bfloat16), normal(3, 32, 32, seed=1) / 6
    strategies = MatmulStrategies("iht", "plain", "iht_oe_right", k=3)
    c = normal(20, 32, seed=2)

    def scanned(ws, x):
        h, _ = jax.lax.scan(lambda h, w: (adahop.dot(h, w, strategies), None), x, ws)
        return jnp.sum(h.astype(jnp.float32) * c)

    def looped(ws, x):
        for w in ws:
            x = adahop.dot(x, w, strategies)
        return jnp.sum(x.astype(jnp.float32) * c)

    got = jax.jit(jax.grad(scanned, argnums=(0, 1)))(ws, x)
    want = jax.jit(jax.grad(looped, argnums=(0, 1)))(ws, x)
    assert (got[0].dtype, got[1].dtype) == (jnp.float32, jnp.bfloat16)
    assert relative(got[0], want[0]) < 1e-5
    assert relative(got[1], want[1]) < 1e-5


@pytest.mark.parametrize("strategies", LATIN, ids=lambda s: f"{s.y}-{s.gx}-{s.gw}")
def test_cotangents_have_the_dtypes_of_the_primals(strategies: MatmulStrategies) -> None:
    """Checked by scan, where a wrong dtype is an error, and without computing anything."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x, w = jnp.zeros((20, 32), dtype), jnp.zeros((2, 32, 32), jnp.float32)

        def loss(x, w):
            h, _ = jax.lax.scan(lambda h, w: (adahop.dot(h, w, strategies), None), x, w)
            return h.sum()

        gx, gw = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w)
        assert (gx.dtype, gw.dtype) == (dtype, jnp.float32)
        assert jax.eval_shape(lambda x, w: adahop.dot(x, w[0], strategies), x, w).dtype == dtype


@pytest.mark.parametrize(
    ("strategies", "recipe"),
    [
        (MatmulStrategies("plain", "plain", "iht_oe_right", k=3), Recipe()),
        (MatmulStrategies("bf16", "plain", "iht"), Recipe(gradient=STOCHASTIC, signs="random")),
    ],
    ids=["nearest", "stochastic"],
)
def test_remat_gives_equal_bits(strategies: MatmulStrategies, recipe: Recipe) -> None:
    x, w, key = normal(40, 32), normal(32, 32, seed=1), jax.random.key(3)

    def loss(x, w, key):
        h = adahop.dot(jnp.sin(x), w, strategies, recipe=recipe, key=key)
        return jnp.sum(jnp.tanh(h) ** 2)

    def grad(f):
        return jax.jit(jax.grad(f, argnums=(0, 1)))(x, w, key)

    want = grad(loss)
    assert_bits(grad(jax.checkpoint(loss)), want)
    policy = jax.checkpoint_policies.save_only_these_names(adahop.RESIDUAL_NAME)
    assert_bits(grad(jax.checkpoint(loss, policy=policy)), want)


def test_grad_inside_scan_inside_vmap() -> None:
    xs, w = normal(2, 3, 20, 32), normal(32, 32, seed=1)

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(adahop.dot(x, w, MIXED) ** 2))(w), None

    got = jax.jit(jax.vmap(lambda x: jax.lax.scan(step, w, x)[0]))(xs)
    one_step = jax.jit(lambda w, x: step(w, x)[0])
    for i in range(2):
        want = w
        for x in xs[i]:
            want = one_step(want, x)
        np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-5)


def test_donated_buffers() -> None:
    x, w, g = normal(40, 32), normal(32, 32, seed=1), normal(40, 32, seed=2)
    strategies = MatmulStrategies("bf16", "plain", "iht_oe_right", k=3)
    want = gradients(x, w, g, strategies)
    donating = jax.jit(lambda x, w, g: gradients(x, w, g, strategies), donate_argnums=(0, 1, 2))
    buffers = [m + 0 for m in (x, w, g)]
    assert_bits(donating(*buffers), want)
    assert buffers[1].is_deleted()


@pytest.mark.parametrize("strategies", [IHT, LATIN[3]], ids=["iht", "one_bf16"])
def test_forward_mode_is_a_type_error(strategies: MatmulStrategies) -> None:
    x, w = normal(4, 8), normal(8, 3)

    def loss(x):
        return adahop.dot(x, w, strategies).sum()

    for derivative in (lambda x: jax.jvp(loss, (x,), (x,)), jax.hessian(loss)):
        with pytest.raises(TypeError, match=r"forward-mode|differentiated"):
            jax.jit(derivative).lower(x)


@pytest.mark.parametrize("argument", [0, 1], ids=["x", "w"])
@pytest.mark.parametrize("strategy", ["iht", "iht_oe_left", "iht_oe_right"])
def test_gradient_of_a_gradient_is_a_type_error(strategy: str, argument: int) -> None:
    """Through the integer codes it would be zero, or only the BF16 part, in silence."""
    x, w = normal(4, 8), normal(8, 3)

    def penalty(*operands):
        gx, gw = jax.grad(lambda x, w: adahop.dot(x, w, strategy).sum(), argnums=(0, 1))(*operands)
        return jnp.sum(gx**2) + jnp.sum(gw**2)

    with pytest.raises(TypeError, match="differentiated"):
        jax.jit(jax.grad(penalty, argnums=argument)).lower(x, w)


def test_one_trace_per_configuration() -> None:
    traces = []

    @functools.partial(jax.jit, static_argnums=2)
    def step(x, w, strategies):
        traces.append(strategies)
        return jax.grad(lambda w: adahop.dot(x, w, strategies).sum())(w)

    x, w = normal(8, 32), normal(32, 8)
    for gw in ("iht", "iht", "bf16", "bf16", "iht"):
        step(x, w, MatmulStrategies("iht", "iht", gw, k=4))
    assert [s.gw for s in traces] == ["iht", "bf16"]


# --- what is saved, and what is computed ---


def saved_by_name(gw: str, dtype, T: int = 96, K: int = 64, k: int = 4) -> list:
    """Avals that a names-based remat policy keeps of a layer whose input is computed."""
    x, w = jnp.zeros((T, K), dtype), jnp.zeros((K, 32), jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names(adahop.RESIDUAL_NAME)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return adahop.dot(jnp.tanh(x), w, MatmulStrategies("iht", "iht", gw, k=k)).sum()

    residuals = saved_residuals(layer, x, w)
    return [aval for aval, source in residuals if "from the argument" not in source]


def by_dtype(avals: list) -> dict[str, int]:
    """Bytes by dtype."""
    sizes: dict[str, int] = {}
    for aval in avals:
        name = np.dtype(aval.dtype).name
        sizes[name] = sizes.get(name, 0) + aval.size * aval.dtype.itemsize
    return sizes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("gw", ALL)
def test_saved_residuals(gw: str, dtype) -> None:
    T, K, k = 96, 64, 4
    packed = T * K // 2 + T * K // 32  # 4.25 bits a value
    whole = {np.dtype(dtype).name: T * K * np.dtype(dtype).itemsize}
    want = {
        "plain": {"uint8": packed},
        "iht": {"uint8": packed},
        "iht_oe_right": {"uint8": packed, "bfloat16": T * k * 2, "int32": k * 4},
        "iht_oe_left": whole,
        "iht_oe_inner": whole,
        "bf16": {"bfloat16": T * K * 2},
    }[gw]
    assert by_dtype(saved_by_name(gw, dtype, T, K, k)) == want


@pytest.mark.parametrize("gw", ["plain", "iht", "iht_oe_right"])
def test_packed_residuals_replace_x_without_remat(gw: str) -> None:
    """Besides the packed form nothing of x's size stays alive, x itself included."""
    T, K = 96, 64
    x, w = jnp.zeros((T, K), jnp.bfloat16), jnp.zeros((K, 32), jnp.float32)
    strategies = MatmulStrategies("iht", "iht", gw, k=4)
    residuals = saved_residuals(lambda x, w: adahop.dot(x, w, strategies), x, w)
    floats = [a.shape for a, _ in residuals if jnp.issubdtype(a.dtype, jnp.floating)]
    assert sorted(floats) == sorted([(K, 32), *([(T, 4)] if gw == "iht_oe_right" else [])])


def quantized_products(jaxpr) -> int:
    """Equations called `mxfp4_product` in a jaxpr and everything inside it."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.params.get("name") == "mxfp4_product"
        for leaf in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                count += quantized_products(inner)
    return count


@pytest.mark.parametrize(
    ("strategies", "count"),
    [
        (MatmulStrategies("bf16", "bf16", "bf16"), 0),
        (MatmulStrategies("iht", "bf16", "bf16"), 1),
        (MatmulStrategies("bf16", "iht", "bf16"), 1),
        (MatmulStrategies("bf16", "bf16", "iht_oe_right"), 1),
        (MatmulStrategies("iht_oe_inner", "iht_oe_left", "bf16"), 2),
        (MatmulStrategies("plain", "plain", "plain"), 3),
        (MatmulStrategies("iht", "iht", "iht"), 3),
        (MatmulStrategies("iht_oe_left", "iht_oe_left", "iht_oe_left"), 3),
        (MatmulStrategies("iht_oe_right", "iht_oe_right", "iht_oe_right"), 3),
    ],
    ids=str,
)
def test_number_of_quantized_products(strategies: MatmulStrategies, count: int) -> None:
    x, w = jnp.zeros((8, 32), jnp.bfloat16), jnp.zeros((32, 8), jnp.float32)

    def both(x, w):
        y, pull = jax.vjp(lambda x, w: adahop.dot(x, w, strategies), x, w)
        return pull(y)

    assert quantized_products(jax.make_jaxpr(both)(x, w).jaxpr) == count


# --- random numbers ---


def test_same_key_same_bits() -> None:
    x, w, g = normal(40, 48), normal(48, 36, seed=1), normal(40, 36, seed=2)
    for strategy, recipe in (("plain", NOISY), ("iht", Recipe(signs="random"))):
        one, again, other = (
            gradients(x, w, g, strategy, recipe, jax.random.key(i)) for i in (1, 1, 2)
        )
        assert_bits(one, again)
        assert all(np.any(np.asarray(a != b)) for a, b in zip(one, other, strict=True))
    raw = gradients(x, w, g, "plain", NOISY, jax.random.PRNGKey(1))
    assert_bits(raw, gradients(x, w, g, "plain", NOISY, jax.random.key(1)))


def test_every_use_of_an_operand_draws_its_own_noise() -> None:
    """Identity matrices expose the six rounded operands of a layer under one key."""
    n = 64
    eye, m = jnp.eye(n), jnp.asarray(np.random.default_rng(0).uniform(-6, 6, (n, n)), jnp.float32)
    plain, key = MatmulStrategies.uniform("plain"), jax.random.key(5)

    def rounded(x, w, g):
        return gradients(x, w, g, plain, NOISY, key)

    y_x, _, gw_x = rounded(m, eye, eye)
    y_w, gx_w, _ = rounded(eye, m, eye)
    _, gx_g, gw_g = rounded(eye, eye, m)
    # Every block's largest magnitude is in (3, 6], so that one scale, 1, serves all.
    errors = np.stack([np.ravel(q - m) for q in (y_x, gw_x.T, y_w, gx_w.T, gx_g, gw_g)])
    assert np.all(errors.std(axis=1) > 0.2)
    assert np.abs(errors).max() < 2
    correlations = np.corrcoef(errors) - np.eye(6)
    assert np.abs(correlations).max() < 6 / n  # six standard deviations of n * n samples


@pytest.mark.parametrize("strategy", ["plain", "iht_oe_right"])
def test_stochastic_rounding_is_unbiased(strategy: str) -> None:
    """The mean over keys converges as 1/sqrt(keys); rounding to nearest stays where it is."""
    x, w, g = normal(32, 32), normal(32, 32, seed=1), normal(32, 32, seed=2)
    strategies = MatmulStrategies.uniform(strategy, k=2)
    draws = 1024
    keys = jax.random.split(jax.random.key(0), draws)
    outs = jax.vmap(lambda key: gradients(x, w, g, strategies, NOISY, key))(keys)
    rceil = OperandFormat("rceil")
    nearest = gradients(x, w, g, strategies, Recipe(activation=rceil, weight=rceil, gradient=rceil))
    x64, w64, g64 = (np.asarray(m, np.float64) for m in (x, w, g))
    exact = (x64 @ w64, g64 @ w64.T, x64.T @ g64)
    for out, still, want in zip(outs, nearest, exact, strict=True):
        limit = 1.5 * relative(out[0], want) / math.sqrt(draws) + 1e-3
        assert relative(np.mean(np.asarray(out, np.float64), axis=0), want) < limit < 0.02
        assert relative(still, want) > 0.05


def test_stochastic_gradient_alone_is_unbiased_in_gx_and_gw() -> None:
    """The recipe of choice: g stochastic, x and W to nearest. Identities leave g alone visible."""
    eye, g = jnp.eye(32), normal(32, 32)
    recipe = Recipe(gradient=STOCHASTIC)
    keys = jax.random.split(jax.random.key(0), 1024)
    outs = jax.vmap(
        lambda key: gradients(eye, eye, g, MatmulStrategies.uniform("plain"), recipe, key)
    )(keys)
    np.testing.assert_array_equal(outs[0], np.broadcast_to(np.eye(32), (1024, 32, 32)))
    for out in outs[1:]:
        assert relative(out[0], g) > 0.05
        assert relative(np.mean(np.asarray(out, np.float64), axis=0), g) < 0.02


def test_random_signs_cancel() -> None:
    """Signs on one operand alone would give an error of about 1.4, not that of FP4 rounding."""
    x, w, g = normal(40, 48), normal(48, 36, seed=1), normal(40, 36, seed=2)
    recipe = Recipe(signs="random")
    keys = jax.random.split(jax.random.key(0), 64)
    x64, w64, g64 = (np.asarray(m, np.float64) for m in (x, w, g))
    exact = (x64 @ w64, g64 @ w64.T, x64.T @ g64)
    strategies = MatmulStrategies("iht", "iht_oe_left", "iht_oe_right", k=2)
    outs = jax.vmap(lambda key: gradients(x, w, g, strategies, recipe, key))(keys)
    for out, want in zip(outs, exact, strict=True):
        assert 0.05 < relative(out[0], want) < 0.25
        assert relative(np.mean(np.asarray(out, np.float64), axis=0), want) < 0.08


@pytest.mark.parametrize("strategy", Strategy)
def test_a_numpy_cotangent_serves(strategy):
    x, w = jnp.ones((40, 32)), jnp.ones((32, 8))
    y, pull = jax.vjp(lambda x, w: adahop.dot(x, w, strategy), x, w)
    for got, want in zip(pull(np.ones(y.shape, np.float32)), pull(jnp.ones(y.shape)), strict=True):
        np.testing.assert_array_equal(got, want)
