"""`Dense` beside `nn.Dense`, and under the transformations of Linen."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import MatmulStrategies, OperandFormat, Recipe, StrategyTable
from adahop_jax.calibration import PROBES
from adahop_jax.linen import RNG, TABLE

BF16 = MatmulStrategies.uniform("bf16")
IHT = MatmulStrategies.uniform("iht")
PLAIN = MatmulStrategies.uniform("plain")
STOCHASTIC = Recipe(gradient=OperandFormat("rceil", "stochastic"))
ALL_STOCHASTIC = Recipe(activation=OperandFormat("rceil", "stochastic"))
KEY = jax.random.key(0)


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def assert_bits(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


class Pair(nn.Module):
    """Two layers, of either kind, one of them in a submodule."""

    dense: type[nn.Dense] = adahop.Dense

    @nn.compact
    def __call__(self, x):
        return self.dense(16, name="down")(nn.tanh(Inner(self.dense, name="inner")(x)))


class Inner(nn.Module):
    dense: type[nn.Dense]

    @nn.compact
    def __call__(self, x):
        return self.dense(24, name="up")(x)


class Residual(nn.Module):
    """One layer of a scanned stack."""

    @nn.compact
    def __call__(self, x, _):
        return x + 0.3 * adahop.Dense(16, name="up")(x), None


def scanned(probes_stacked: bool, length: int = 3) -> nn.Module:
    axes = {"params": 0, **({PROBES: 0} if probes_stacked else {})}
    stack = nn.scan(
        Residual,
        variable_axes=axes,
        variable_broadcast=[TABLE, *([] if probes_stacked else [PROBES])],
        split_rngs={"params": True, RNG: True},
        length=length,
    )
    return stack()


# --- a drop-in for nn.Dense ---


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_bias": False},
        {"dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "use_bias": False},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16, "use_bias": False},
        {"precision": jax.lax.Precision.HIGHEST, "bias_init": nn.initializers.normal(1.0)},
        {"kernel_init": nn.initializers.orthogonal()},
        {"dot_general": jax.lax.dot_general},
        {"dot_general_cls": lambda: jax.lax.dot_general},
    ],
    ids=lambda a: "-".join(a) or "default",
)
def test_bf16_layer_is_nn_dense(arguments: dict) -> None:
    """Parameters, outputs and gradients, bit for bit."""
    x = normal(2, 5, 40, dtype=arguments.get("dtype", jnp.float32))
    ours, theirs = adahop.Dense(12, strategies=BF16, **arguments), nn.Dense(12, **arguments)
    assert isinstance(ours, nn.Dense)
    params = ours.init(KEY, x)["params"]
    assert_bits(params, theirs.init(KEY, x)["params"])

    def value_and_gradients(layer):
        def loss(params, x):
            y = layer.apply({"params": params}, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    assert_bits(value_and_gradients(ours), value_and_gradients(theirs))


def test_the_uncalibrated_default_computes_in_bf16_or_as_the_recipe_says() -> None:
    x = normal(4, 32)
    params = nn.Dense(8).init(KEY, x)

    def output(layer):
        return jax.jit(layer.apply)(params, x)

    plain, iht = (output(adahop.Dense(8, strategies=s)) for s in (PLAIN, IHT))
    assert_bits(output(adahop.Dense(8)), output(nn.Dense(8)))
    assert_bits(output(adahop.Dense(8, recipe=Recipe(calibration_precision="mxfp4"))), plain)
    assert_bits(output(adahop.Dense(8, recipe=Recipe.named("mxfp4-iht"))), iht)
    assert np.any(np.asarray(plain != iht))


def test_parameters_of_a_whole_model() -> None:
    x = normal(4, 32)
    ours, theirs = Pair().init(KEY, x), Pair(nn.Dense).init(KEY, x)
    assert_bits(ours["params"], theirs["params"])
    assert set(ours) == {"params", PROBES}
    assert_bits(Pair().init(KEY, x, mutable=["params"]), theirs)


def test_recipe_that_draws_needs_no_stream_at_init() -> None:
    layer = adahop.Dense(8, recipe=STOCHASTIC, strategies=IHT)
    assert_bits(
        layer.init(KEY, normal(4, 32))["params"], nn.Dense(8).init(KEY, normal(4, 32))["params"]
    )


# --- the quantized layer ---


@pytest.mark.parametrize("leading", [(), (0,), (2, 3, 4)])
def test_leading_shapes_and_the_gradient_of_the_bias(leading: tuple[int, ...]) -> None:
    x, c = normal(*leading, 40), normal(*leading, 12, seed=1)
    strategies = MatmulStrategies("iht_oe_left", "plain", "iht_oe_right", k=2)
    layer = adahop.Dense(12, strategies=strategies)
    params = layer.init(KEY, x)["params"] | {"bias": normal(12)}

    def loss(params, x):
        y = layer.apply({"params": params}, x)
        return jnp.sum(y * c), y

    (_, y), (gp, gx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    assert (y.shape, gx.shape) == ((*leading, 12), x.shape)

    @jax.jit
    def by_hand(kernel, x):
        y, pull = jax.vjp(lambda k, x: adahop.dot(x, k, strategies), kernel, x)
        return y, *pull(c)

    product, gw, want_gx = by_hand(params["kernel"], x)
    np.testing.assert_allclose(y, product + params["bias"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gx, want_gx, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gp["kernel"], gw, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gp["bias"], c.reshape(-1, 12).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16], ids=["x32", "x16"])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["p32", "p16"])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16], ids=["none", "d32", "d16"])
def test_dtypes_are_those_of_nn_dense(dtype, param_dtype, x_dtype) -> None:
    x = jnp.zeros((4, 32), x_dtype)

    def shapes(layer):
        params = layer.init(KEY, x)["params"]

        def loss(params, x):
            y = layer.apply({"params": params}, x)
            return y.sum(), y

        return params, jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    arguments = {"dtype": dtype, "param_dtype": param_dtype}
    ours = jax.eval_shape(lambda: shapes(adahop.Dense(8, strategies=IHT, **arguments)))
    assert ours == jax.eval_shape(lambda: shapes(nn.Dense(8, **arguments)))


def test_master_weights_are_rounded_once() -> None:
    """Through bfloat16, 0.2501 would become the tie 0.25, and then 0 instead of 0.5."""
    x, kernel = jnp.eye(32, dtype=jnp.bfloat16), jnp.full((32, 1), 0.2501).at[0].set(6.0)
    layer = adahop.Dense(1, use_bias=False, dtype=jnp.bfloat16, strategies=PLAIN)
    y = jax.jit(layer.apply)({"params": {"kernel": kernel}}, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32)[:, 0], [6.0] + [0.5] * 31)


def test_kernel_gradient_keeps_float32_bits() -> None:
    x = normal(64, 32, dtype=jnp.bfloat16)
    layer = adahop.Dense(8, dtype=jnp.bfloat16, strategies=IHT)
    params = layer.init(KEY, x)["params"]
    loss = jax.jit(jax.grad(lambda p: jnp.sum(jnp.tanh(layer.apply({"params": p}, x)))))
    gw = loss(params)["kernel"]
    assert np.any(np.asarray(gw != gw.astype(jnp.bfloat16).astype(jnp.float32)))


@pytest.mark.parametrize(
    "argument",
    [{"dot_general": jax.lax.dot_general}, {"dot_general_cls": lambda: jax.lax.dot_general}],
    ids=lambda a: next(iter(a)),
)
def test_quantized_layer_refuses_a_dot_general(argument: dict) -> None:
    layer = adahop.Dense(8, name="up", strategies=IHT, **argument)
    x = normal(4, 32)
    variables = layer.init(KEY, x)
    with pytest.raises(ValueError, match=r"dot_general of layer .* is set"):
        layer.apply(variables, x)


def test_random_stream() -> None:
    x = normal(4, 32)
    layer = adahop.Dense(8, recipe=ALL_STOCHASTIC, strategies=IHT)
    params = {"params": layer.init(KEY, x)["params"]}
    with pytest.raises(ValueError, match=r"rngs=\{'adahop': key\}"):
        layer.apply(params, x)
    with pytest.raises(ValueError, match="adahop"):
        layer.apply(params, x, rngs={"dropout": KEY})
    apply = jax.jit(lambda key: layer.apply(params, x, rngs={RNG: key}))
    one, again, other = (apply(jax.random.key(i)) for i in (1, 1, 2))
    assert_bits(one, again)
    assert np.any(np.asarray(one != other))


def test_two_layers_draw_different_noise() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [adahop.Dense(8, recipe=ALL_STOCHASTIC, strategies=IHT)(x) for _ in range(2)]

    x = normal(4, 32)
    kernel = normal(32, 8, seed=1)
    layer = {"kernel": kernel, "bias": jnp.zeros(8)}
    params = {"params": {"Dense_0": layer, "Dense_1": layer}}
    one, two = jax.jit(lambda: Twice().apply(params, x, rngs={RNG: KEY}))()
    assert np.any(np.asarray(one != two))


# --- the table ---


@functools.partial(jax.jit, static_argnums=1)
def pair_outputs(variables, table, x):
    """Output of each layer of Pair, so that a change can be traced to its layer."""
    collection = {TABLE: adahop.bind(table, variables[PROBES])} if table is not None else {}
    _, state = Pair().apply(
        {"params": variables["params"], **collection},
        x,
        capture_intermediates=lambda module, _: isinstance(module, nn.Dense),
        mutable=["intermediates"],
    )
    found = state["intermediates"]
    return {"inner/up": found["inner"]["up"]["__call__"], "down": found["down"]["__call__"]}


def test_table_changes_exactly_the_named_layer() -> None:
    x = normal(4, 32)
    variables = Pair().init(KEY, x)
    plain = pair_outputs(variables, StrategyTable.uniform(BF16), x)
    assert_bits(pair_outputs(variables, None, x), plain)
    down = pair_outputs(variables, StrategyTable({"down": IHT}, default=BF16), x)
    assert_bits(down["inner/up"], plain["inner/up"])
    assert np.any(np.asarray(down["down"][0] != plain["down"][0]))
    up = pair_outputs(variables, StrategyTable({"inner/up": IHT}, default=BF16), x)
    assert np.any(np.asarray(up["inner/up"][0] != plain["inner/up"][0]))
    # With this input `down` still computes as nn.Dense does.
    layer = {"params": variables["params"]["down"]}
    again = nn.Dense(16).apply(layer, jnp.tanh(up["inner/up"][0]))
    np.testing.assert_allclose(up["down"][0], again, rtol=1e-6, atol=1e-6)


def test_table_wins_over_the_layers_own_strategies() -> None:
    x = normal(4, 32)
    layer = adahop.Dense(8, strategies=IHT)
    variables = layer.init(KEY, x)
    bound = adahop.bind(StrategyTable.uniform(BF16), variables[PROBES])
    assert bound == {"strategies": BF16}
    got = layer.apply({"params": variables["params"], TABLE: bound}, x)
    assert_bits(got, nn.Dense(8).apply({"params": variables["params"]}, x))


def test_bind() -> None:
    probes = Pair().init(KEY, normal(4, 32))[PROBES]
    table = StrategyTable({"down": IHT, "inner/up": PLAIN})
    bound = adahop.bind(table, probes)
    assert bound == {"down": {"strategies": IHT}, "inner": {"up": {"strategies": PLAIN}}}
    assert jax.tree.leaves(bound) == []
    with pytest.raises(ValueError, match=r"'inner/upp'.*close: inner/up"):
        adahop.bind(StrategyTable({"inner/upp": IHT}, default=BF16), probes)
    with pytest.raises(ValueError, match="lacks 'inner/up'"):
        adahop.bind(StrategyTable({"down": IHT}), probes)
    with pytest.raises(ValueError, match="no adahop_jax layer made"):
        adahop.bind(table, {"down": {"kernel": jnp.zeros((2, 2))}})


def test_table_in_a_train_state_retraces_once_per_change() -> None:
    x = normal(4, 32)
    variables = Pair().init(KEY, x)
    traces = []

    @jax.jit
    def step(state):
        traces.append(state["table"])
        collection = adahop.bind(state["table"], variables[PROBES])

        def loss(params):
            return jnp.sum(Pair().apply({"params": params, TABLE: collection}, x) ** 2)

        grads = jax.grad(loss)(state["params"])
        return state | {"params": jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)}

    state = {"params": variables["params"], "table": StrategyTable.uniform("bf16")}
    for _ in range(3):
        state = step(state)
    # A table read back from JSON is another object of the same value.
    for _ in range(2):
        text = StrategyTable({"down": IHT}, default=BF16).to_json()
        state = step(state | {"table": StrategyTable.from_json(text)})
    assert traces == [StrategyTable.uniform("bf16"), StrategyTable({"down": IHT}, default=BF16)]
    assert state["table"] == traces[-1]


# --- Linen's transformations ---


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "broadcast"])
def test_scan_over_layers(stacked: bool) -> None:
    x = normal(20, 16)
    model = scanned(stacked)
    variables = model.init(KEY, x, None)
    assert variables[PROBES]["up"]["votes"].shape == ((3, 3, 3) if stacked else (3, 3))
    strategies = MatmulStrategies("iht", "plain", "bf16")
    table = StrategyTable({"up": strategies})

    def loss(params, probes):
        collections = {"params": params, PROBES: probes, TABLE: adahop.bind(table, probes)}
        return jnp.sum(model.apply(collections, x, None)[0] ** 2)

    def unrolled(params):
        h = x
        for i in range(3):
            kernel, bias = params["up"]["kernel"][i], params["up"]["bias"][i]
            h = h + 0.3 * (adahop.dot(h, kernel, strategies) + bias)
        return jnp.sum(h**2)

    grads, votes = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], variables[PROBES])
    want = jax.jit(jax.grad(unrolled))(variables["params"])
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max()))
    counts = np.asarray(votes["up"]["votes"])
    assert np.all(counts.sum(-1) == (1 if stacked else 3))


def test_scanned_layers_draw_different_noise() -> None:
    """The same input and kernel in every layer of the stack, and no two outputs alike."""

    class Probe(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x, adahop.Dense(8, recipe=ALL_STOCHASTIC, strategies=IHT)(x)

    stack = nn.scan(
        Probe, variable_broadcast="params", split_rngs={"params": False, RNG: True}, length=3
    )()
    x = normal(4, 32)
    params = {"params": stack.init(KEY, x, None)["params"]}
    outs = jax.jit(lambda: stack.apply(params, x, None, rngs={RNG: KEY})[1])()
    assert not any(np.array_equal(outs[i], outs[i - 1]) for i in range(3))


def test_remat() -> None:
    """Equal gradients, random numbers included, and a vote each."""
    x = normal(20, 32)

    class Model(nn.Module):
        wrap: bool

        @nn.compact
        def __call__(self, x):
            dense = nn.remat(adahop.Dense) if self.wrap else adahop.Dense
            return dense(16, recipe=STOCHASTIC, strategies=IHT, name="up")(jnp.sin(x))

    variables = Model(False).init(KEY, x)
    assert_bits(Model(True).init(KEY, x), variables)

    def gradient(wrap):
        def loss(variables):
            return jnp.sum(Model(wrap).apply(variables, x, rngs={RNG: KEY}) ** 2)

        return jax.jit(jax.grad(loss))(variables)

    got = gradient(True)
    assert_bits(got, gradient(False))
    np.testing.assert_array_equal(got[PROBES]["up"]["votes"].sum(-1), 1)


def test_vmap() -> None:
    mapped = nn.vmap(
        adahop.Dense,
        variable_axes={"params": None, PROBES: None, TABLE: None},
        split_rngs={"params": False},
    )(8, strategies=IHT)
    x = normal(3, 10, 32)
    variables = mapped.init(KEY, x)
    assert_bits(variables["params"], nn.Dense(8).init(KEY, x)["params"])
    bound = adahop.bind(StrategyTable.uniform(IHT), variables[PROBES])

    def loss(params, probes):
        y = mapped.apply({"params": params, PROBES: probes, TABLE: bound}, x)
        return jnp.sum(y**2), y

    (grads, votes), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        variables["params"], variables[PROBES]
    )
    single = jax.jit(adahop.Dense(8, strategies=IHT).apply)
    for i in range(3):
        want = single({"params": variables["params"]}, x[i])
        np.testing.assert_allclose(y[i], want, rtol=1e-5, atol=1e-5)
    assert grads["kernel"].shape == (32, 8)
    np.testing.assert_array_equal(votes["votes"].sum(-1), 3)


def test_a_layer_used_twice_votes_twice() -> None:
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = adahop.Dense(16, name="shared")
            return layer(layer(x))

    x = normal(10, 16)
    variables = Shared().init(KEY, x)
    assert list(variables[PROBES]) == ["shared"]
    votes = jax.jit(jax.grad(lambda v: jnp.sum(Shared().apply(v, x) ** 2)))(variables)[PROBES]
    np.testing.assert_array_equal(votes["shared"]["votes"].sum(-1), 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "adahop-lv2"}, "recipe is 'adahop-lv2', but must be a Recipe"),
        ({"strategies": "iht"}, "strategies is 'iht', but must be a MatmulStrategies"),
    ],
)
def test_layer_options_of_another_type(arguments, sentence):
    with pytest.raises(TypeError, match=sentence):
        adahop.Dense(8, **arguments).init(jax.random.key(0), jnp.ones((2, 4)))


def test_bind_needs_a_table():
    with pytest.raises(TypeError, match="table is None, but must be a StrategyTable"):
        adahop.bind(None, {})


def test_scan_that_carries_no_probes_is_warned_of():
    """Its layers would be in no table, and stay in BF16 without a word."""

    class Body(nn.Module):
        recipe: Recipe

        @nn.compact
        def __call__(self, x, _):
            return adahop.Dense(8, recipe=self.recipe, name="up")(x), None

    scanned = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    x = jnp.ones((4, 8))
    with pytest.warns(
        UserWarning, match=r"layer 'up' cannot make its probe, .*BF16: .*variable_axes="
    ):
        scanned(Recipe.named("adahop-lv2")).init(jax.random.key(0), x, None)
    # A uniform recipe needs no table.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scanned(Recipe.named("mxfp4-iht")).init(jax.random.key(0), x, None)
