"""The Llama computes what the papers define, at the published sizes."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from train.llama import (
    PRESETS,
    Llama,
    LlamaConfig,
    _norm,
    cross_entropy,
    flops_per_token,
    parameter_count,
    rotary_embedding,
)

TINY = LlamaConfig.preset("tiny", dtype="float32")
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, TINY.vocab_size)


# Compiling is most of what these tests cost: so programs are shared, and little optimized.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def init(config: LlamaConfig) -> Any:
    return _init(dataclasses.replace(config, dtype="float32", remat=False))


@functools.cache
def _init(config: LlamaConfig) -> Any:
    return _jit(Llama(config).init)(jax.random.key(0), TOKENS)["params"]


def apply(config: LlamaConfig, params: Any, tokens: Array) -> Array:
    return _apply(config)({"params": params}, tokens)


def loss(config: LlamaConfig, params: Any, tokens: Array) -> Array:
    logits: Any = Llama(config).apply({"params": params}, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


@functools.cache
def _apply(config: LlamaConfig) -> Any:
    return _jit(Llama(config).apply)


@functools.cache
def loss_and_grads(config: LlamaConfig) -> Any:
    return _jit(jax.value_and_grad(functools.partial(loss, config)))


def test_parameter_tree_has_readable_paths() -> None:
    config = LlamaConfig.preset("tiny", layers=1, tie_embeddings=False)
    shapes = jax.eval_shape(Llama(config).init, jax.random.key(0), TOKENS)["params"]
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert found == {
        "embedding/embedding": (256, 64),
        "block_0/attention_norm/scale": (64,),
        "block_0/attention/q/kernel": (64, 64),
        "block_0/attention/k/kernel": (64, 32),
        "block_0/attention/v/kernel": (64, 32),
        "block_0/attention/o/kernel": (64, 64),
        "block_0/mlp_norm/scale": (64,),
        "block_0/mlp/gate/kernel": (64, 160),
        "block_0/mlp/up/kernel": (64, 160),
        "block_0/mlp/down/kernel": (160, 64),
        "norm/scale": (64,),
        "head/kernel": (64, 256),
    }


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("small", 771_200),
        ("85m", 85_150_464),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_parameter_count_of_presets(preset: str, count: int) -> None:
    config = LlamaConfig.preset(preset)
    assert parameter_count(jax.eval_shape(Llama(config).init, jax.random.key(0), TOKENS)) == count


def test_flops_per_token_counts_matmul_weights_six_times() -> None:
    config = LlamaConfig.preset("tiny", tie_embeddings=False)
    params = init(config)
    norms = 64 * (2 * config.layers + 1)
    weights = parameter_count(params) - norms - config.vocab_size * config.dim
    assert flops_per_token(config, 0) == 6 * weights
    # Scores and their use: 2 products of 2 * length * dim each, forward and twice backward.
    assert flops_per_token(config, 100) - flops_per_token(config, 0) == 2 * 12 * 100 * 64
    assert flops_per_token(TINY, 0) == 6 * weights


def test_forward_equals_numpy() -> None:
    """The whole model against a direct float64 transcription of its definition."""
    config = LlamaConfig.preset("tiny", dtype="float32", tie_embeddings=False, norm_eps=1e-3)
    shapes = jax.tree.map(np.shape, init(config), is_leaf=lambda x: hasattr(x, "shape"))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: rng.normal(0, 0.3, shape), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps) * scale

    def rotate(x: np.ndarray) -> np.ndarray:  # [length, channels], as complex numbers
        half = config.head_dim // 2
        angle = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def forward(tokens: np.ndarray) -> np.ndarray:
        x = params["embedding"]["embedding"][tokens]
        for i in range(config.layers):
            p = params[f"block_{i}"]
            y = norm(x, p["attention_norm"]["scale"])
            heads = []
            for head in range(config.heads):
                d, shared = config.head_dim, head // (config.heads // config.kv_heads)
                a = p["attention"]
                q = rotate(y @ a["q"]["kernel"][:, head * d : (head + 1) * d])
                k = rotate(y @ a["k"]["kernel"][:, shared * d : (shared + 1) * d])
                v = y @ a["v"]["kernel"][:, shared * d : (shared + 1) * d]
                score = q @ k.T / math.sqrt(d)
                weight = np.exp(score - score.max(-1, keepdims=True)) * np.tri(len(x))
                heads.append(weight / weight.sum(-1, keepdims=True) @ v)
            x = x + np.concatenate(heads, -1) @ p["attention"]["o"]["kernel"]
            y = norm(x, p["mlp_norm"]["scale"])
            gate = y @ p["mlp"]["gate"]["kernel"]
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * (y @ p["mlp"]["up"]["kernel"]))
                @ (p["mlp"]["down"]["kernel"])
            )
        return norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]

    logits = apply(config, jax.tree.map(jnp.float32, params), TOKENS)
    expected = np.stack([forward(np.asarray(row)) for row in TOKENS])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def test_tied_head_is_the_embedding() -> None:
    params = init(TINY)
    assert "head" not in params
    untied = {**params, "head": {"kernel": params["embedding"]["embedding"].T}}
    config = LlamaConfig.preset("tiny", dtype="float32", tie_embeddings=False)
    np.testing.assert_allclose(
        apply(TINY, params, TOKENS), apply(config, untied, TOKENS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_causal(dtype: str) -> None:
    config = LlamaConfig.preset("tiny", dtype=dtype)
    changed = TOKENS.at[:, 7].add(1) % config.vocab_size
    before, after = (apply(config, init(config), t) for t in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    for position in range(7, TOKENS.shape[1]):
        assert np.any(before[:, position] != after[:, position]), position


def test_rotary_scores_depend_on_relative_position_only() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rotary_embedding(x, jnp.array([p]), 10_000.0)
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(0, 0) == pytest.approx(float(jnp.sum(q * k)), abs=1e-5)
    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-3)
    assert abs(score(5, 2) - score(2, 5)) > 1e-2
    assert abs(score(5, 2) - score(6, 2)) > 1e-2


def test_rotary_angles() -> None:
    """Channel pair i at position p turns by p theta^(-2i/channels), also in bfloat16 at far p."""
    x = jnp.zeros((1, 2, 1, 8)).at[..., :4].set(1.0)
    positions = np.array([3, 8191])
    angle = positions[:, None] * 100.0 ** (-2 * np.arange(4) / 8)
    expected = np.concatenate([np.cos(angle), np.sin(angle)], -1)
    turned = rotary_embedding(x, jnp.asarray(positions), 100.0)
    np.testing.assert_allclose(turned[0, :, 0], expected, atol=2e-3)
    low = rotary_embedding(x.astype(jnp.bfloat16), jnp.asarray(positions), 100.0)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low[0, :, 0].astype(np.float32), expected, atol=6e-3)


def test_grouped_queries_equal_repeated_key_value_heads() -> None:
    full = LlamaConfig.preset("tiny", dtype="float32", kv_heads=4)

    def repeat(path: Any, x: Array) -> Array:
        if path[-2].key not in ("k", "v"):
            return x
        heads = x.reshape(TINY.dim, TINY.kv_heads, TINY.head_dim)
        return jnp.repeat(heads, 2, axis=1).reshape(TINY.dim, TINY.dim)

    params = jax.tree_util.tree_map_with_path(repeat, init(TINY))
    np.testing.assert_allclose(
        apply(TINY, init(TINY), TOKENS), apply(full, params, TOKENS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
def test_norm_is_computed_in_float32(magnitude: float) -> None:
    """Only input and output are bfloat16: scaling or summing in it would be off by more."""
    config = LlamaConfig.preset("tiny")
    x = (magnitude * jax.random.normal(jax.random.key(0), (5, 4096))).astype(jnp.bfloat16)
    scale = jax.random.uniform(jax.random.key(1), (4096,), minval=0.5, maxval=2.0)
    found: Any = _norm(config, "norm").apply({"params": {"scale": scale}}, x)
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt(np.mean(exact**2, -1, keepdims=True) + config.norm_eps)
    exact *= np.asarray(scale, np.float64)
    # Half a unit in the last place is at most 2^-8 of the value; a little for float32.
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert np.all(error <= np.abs(exact) * 2.0**-8 * 1.001)


def test_initial_scales() -> None:
    params = init(TINY)
    stds = {name: float(jnp.std(x["kernel"])) for name, x in params["block_0"]["mlp"].items()}
    assert stds["gate"] == pytest.approx(0.02, rel=0.05)
    assert stds["up"] == pytest.approx(0.02, rel=0.05)
    assert stds["down"] == pytest.approx(0.01, rel=0.05)
    attention = params["block_0"]["attention"]
    assert float(jnp.std(attention["o"]["kernel"])) == pytest.approx(0.01, rel=0.05)
    assert float(jnp.std(attention["q"]["kernel"])) == pytest.approx(0.02, rel=0.05)
    assert float(jnp.std(params["embedding"]["embedding"])) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_loss_is_that_of_a_uniform_guess(tied: bool) -> None:
    config = LlamaConfig.preset("tiny", tie_embeddings=tied)
    tokens = jax.random.randint(jax.random.key(5), (8, 33), 0, config.vocab_size)
    logits = apply(config, init(config), tokens[:, :-1])
    assert float(cross_entropy(logits, tokens[:, 1:])) == pytest.approx(
        math.log(config.vocab_size), abs=0.05
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_loss_of_targets_is_that_of_the_logits(tied: bool, dtype: str, tolerance: float) -> None:
    config = LlamaConfig.preset("tiny", dtype=dtype, layers=1, tie_embeddings=tied)
    params = init(config)

    def of_targets(params: Any, tokens: Array) -> Any:
        return Llama(config).apply({"params": params}, tokens[:, :-1], tokens[:, 1:])

    value, grads = _jit(jax.value_and_grad(of_targets))(params, TOKENS)
    expected, exact = loss_and_grads(config)(params, TOKENS)
    assert value.shape == () and value.dtype == jnp.float32
    assert float(value) == pytest.approx(float(expected), rel=tolerance)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, grads, exact))
    assert float(difference / optax.tree.norm(exact)) < tolerance


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_learns(tied: bool) -> None:
    """The loss of targets along the head's weight, against its derivative."""
    config = LlamaConfig.preset("tiny", dtype="float32", layers=1, tie_embeddings=tied)
    params = init(config)
    names = ("embedding", "embedding") if tied else ("head", "kernel")
    w = params[names[0]][names[1]]

    def of_weight(w: Array) -> Any:
        changed = {**params, names[0]: {names[1]: w}}
        return Llama(config).apply({"params": changed}, TOKENS[:, :-1], TOKENS[:, 1:])

    direction = jax.random.normal(jax.random.key(3), w.shape)
    _, gradient = (program := _jit(jax.value_and_grad(of_weight)))(w)
    slope = (program(w + 1e-3 * direction)[0] - program(w - 1e-3 * direction)[0]) / 2e-3
    derivative = jnp.vdot(gradient, direction)
    assert abs(float(slope)) > 0.1
    assert float(derivative) == pytest.approx(float(slope), rel=1e-2)


def test_bfloat16_compute_keeps_float32_parameters_and_gradients() -> None:
    config = LlamaConfig.preset("tiny", layers=1)
    params = init(config)
    value, grads = loss_and_grads(config)(params, TOKENS)
    exact_value, exact = loss_and_grads(dataclasses.replace(config, dtype="float32"))(
        params, TOKENS
    )
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}
    assert abs(float(value - exact_value)) < 0.01
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, grads, exact))
    assert 1e-4 < float(difference / optax.tree.norm(exact)) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_remat_changes_neither_loss_nor_gradients(dtype: str) -> None:
    plain = LlamaConfig.preset("tiny", dtype=dtype, layers=1)
    remat = dataclasses.replace(plain, remat=True)
    params = init(plain)
    remat_shapes = jax.eval_shape(Llama(remat).init, jax.random.key(0), TOKENS)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(remat_shapes)
    (value, grads), (remat_value, remat_grads) = (
        loss_and_grads(config)(params, TOKENS) for config in (plain, remat)
    )
    assert float(value) == float(remat_value)
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, grads, remat_grads))
    assert float(difference / optax.tree.norm(grads)) < tolerance


def test_remat_stores_less() -> None:
    def stored(config: LlamaConfig) -> int:
        def residuals(params: Any) -> Any:
            return jax.vjp(lambda p: Llama(config).apply({"params": p}, TOKENS), params)[1]

        return parameter_count(jax.eval_shape(residuals, init(TINY)))

    assert stored(dataclasses.replace(TINY, remat=True)) < stored(TINY) / 1.5


def test_overfits_one_batch() -> None:
    config = LlamaConfig.preset("tiny")
    optimizer = optax.adam(3e-3)

    @_jit
    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(functools.partial(loss, config))(params, TOKENS)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params, value = init(config), jnp.inf
    state = optimizer.init(params)
    for _ in range(100):
        params, state, value = step(params, state)
    assert float(value) < 0.05


class _Probed(nn.Dense):
    """Stands for a layer with a static table entry, a probe and a random stream."""

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        y = super().__call__(inputs)
        if self.is_initializing():
            self.variable("adahop_probes", "votes", lambda: jnp.zeros(()))
            return y
        scale = self.get_variable("adahop", "strategies").scale
        noise = jax.random.uniform(self.make_rng("adahop"), ())
        return y * scale + (self.get_variable("adahop_probes", "votes") * noise).astype(y.dtype)


@jax.tree_util.register_static
class _Entry:
    scale = 2.0


@pytest.mark.parametrize("remat", [False, True])
def test_layers_made_by_the_factory_see_collections_and_keys(remat: bool) -> None:
    """All linear layers of the blocks, and only those, also under remat."""
    config = LlamaConfig.preset("tiny", remat=remat, layers=1, tie_embeddings=False)
    model = Llama(config, dense=_Probed)
    variables = _jit(model.init)(jax.random.key(0), TOKENS)
    probes = variables["adahop_probes"]
    layers = {"attention": {"q", "k", "v", "o"}, "mlp": {"gate", "up", "down"}}
    assert {
        name: {part: set(x) for part, x in block.items()} for name, block in probes.items()
    } == {"block_0": layers}
    entry = _Entry()
    table = jax.tree.map(lambda _: entry, probes)
    table = jax.tree.map(
        lambda node: {"strategies": node["votes"]},
        table,
        is_leaf=lambda node: isinstance(node, dict) and "votes" in node,
    )

    def probed_loss(probes: Any, key: Array) -> Array:
        logits: Any = model.apply(
            {"params": variables["params"], "adahop": table, "adahop_probes": probes},
            TOKENS,
            rngs={"adahop": key},
        )
        return cross_entropy(logits, TOKENS)

    value, votes = _jit(jax.value_and_grad(probed_loss))(probes, jax.random.key(2))
    assert all(float(x) != 0 for x in jax.tree.leaves(votes))
    assert float(value) != float(cross_entropy(apply(config, variables["params"], TOKENS), TOKENS))


def test_cross_entropy_in_nats_is_stable() -> None:
    logits = jnp.array([[0.0, 0.0, 0.0, 0.0], [1e4, 0.0, -1e4, 0.0], [0.0, 2.0, 0.0, -jnp.inf]])
    targets = jnp.array([1, 0, 1])
    expected = (math.log(4) + 0.0 + math.log(1 + 2 * math.exp(-2))) / 3
    assert float(cross_entropy(logits, targets)) == pytest.approx(expected, rel=1e-6)
    assert float(cross_entropy(logits[1:2], jnp.array([2]))) == pytest.approx(2e4)
    low = cross_entropy(jnp.zeros((2, 3, 1000), jnp.bfloat16), jnp.zeros((2, 3), jnp.int32))
    assert low.dtype == jnp.float32
    assert float(low) == pytest.approx(math.log(1000), rel=1e-6)


def test_faults_stay_visible() -> None:
    assert np.isnan(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 4])))
    assert np.isnan(cross_entropy(jnp.array([[jnp.nan, 0.0]]), jnp.array([1])))
    logits = apply(TINY, init(TINY), TOKENS.at[0, 3].set(TINY.vocab_size))
    assert np.all(np.isnan(logits[0, 3:]))
    assert np.all(np.isfinite(logits[1]))


def test_configuration_is_hashable_and_goes_through_names() -> None:
    assert LlamaConfig.preset("tiny", dtype=jnp.float32) == TINY
    assert hash(LlamaConfig.preset("tiny", dtype=jnp.float32)) == hash(TINY)
    assert TINY.dtype == "float32"
    assert LlamaConfig.preset("tiny").dtype == "bfloat16"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compute_in_bfloat16_on_float32_weights(name: str) -> None:
    config = LlamaConfig.preset(name)
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 66}, r"dim is 66, but must be a multiple of heads \(4\)"),
        ({"heads": 8, "kv_heads": 3}, r"heads is 8, but must be a multiple of kv_heads \(3\)"),
        ({"dim": 60}, r"dim / heads is 60 / 4 = 15, but must be even"),
        ({"layers": 0}, "layers is 0, but must be an int of at least 1"),
        ({"layers": 2.5}, "layers is 2.5, but must be an int"),
        ({"heads": "4"}, "heads is '4', but must be an int"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0, but must be positive and finite"),
        ({"rope_theta": math.inf}, "rope_theta is inf, but must be positive and finite"),
        ({"norm_eps": math.nan}, "norm_eps is nan, but must be positive and finite"),
        ({"dtype": "float16"}, "dtype is 'float16', but must be 'bfloat16' or 'float32'"),
        ({"param_dtype": "fp32"}, "param_dtype is 'fp32', but must be"),
        ({"kv_head": 2}, r"attribute is 'kv_head', but must be one of .*close: kv_heads"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.preset("tiny", **changes)


def test_unknown_preset_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"model is 'llama-3.2-1B', but .*close: llama-3.2-1b"):
        LlamaConfig.preset("llama-3.2-1B")


def test_bad_tokens_are_refused() -> None:
    with pytest.raises(TypeError, match="tokens have dtype float32, but must be integers"):
        apply(TINY, init(TINY), jnp.zeros((2, 3)))
    with pytest.raises(
        ValueError, match=r"tokens have shape \(3,\), but must be \[batch, length\]"
    ):
        apply(TINY, init(TINY), jnp.zeros(3, jnp.int32))
