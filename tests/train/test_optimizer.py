"""The optimizer follows its formulas, computed here by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.llama import Llama, LlamaConfig
from train.optimizer import OptimizerConfig, decay_mask, make_optimizer

CONFIG = OptimizerConfig(learning_rate=0.5, steps=110, warmup_steps=10, final_fraction=0.2)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 0.05),
        (9, 0.45),
        (10, 0.5),
        (35, 0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2),
        (60, 0.3),
        (110, 0.1),
        (1000, 0.1),
    ],
)
def test_schedule(step: int, rate: float) -> None:
    _, schedule = make_optimizer(CONFIG)
    np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(schedule)(jnp.int32(step)), rate, rtol=1e-6)


def test_schedule_without_warmup_starts_at_the_peak() -> None:
    _, schedule = make_optimizer(OptimizerConfig(learning_rate=0.5, steps=10, final_fraction=0.0))
    for step, rate in ((0, 0.5), (5, 0.25), (10, 0.0)):
        np.testing.assert_allclose(schedule(step), rate, atol=1e-7)


def test_two_updates_by_hand() -> None:
    """AdamW with bias correction, decoupled decay, and the rate of the update's own step."""
    config = OptimizerConfig(
        learning_rate=0.1,
        steps=4,
        warmup_steps=2,
        weight_decay=0.3,
        b1=0.8,
        b2=0.9,
        eps=1e-3,
        clip_norm=math.inf,
    )
    optimizer, _ = make_optimizer(config)
    params: Any = {
        "up": {"kernel": jnp.full((2, 2), 2.0)},
        "norm": {"scale": jnp.full((2,), 3.0)},
    }
    state = optimizer.init(params)
    m = v = 0.0
    kernel, scale = 2.0, 3.0
    for step, (g, rate) in enumerate([(0.5, 0.0), (-0.2, 0.05), (0.1, 0.1)], start=1):
        grads = jax.tree.map(lambda x, g=g: jnp.full_like(x, g), params)
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        direction = (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.9**step)) + 1e-3)
        kernel -= rate * (direction + 0.3 * kernel)
        scale -= rate * direction
        np.testing.assert_allclose(params["up"]["kernel"], kernel, rtol=1e-5)
        np.testing.assert_allclose(params["norm"]["scale"], scale, rtol=1e-5)


def _first_moment(clip_norm: float, grads: Any) -> Any:
    """Tells what AdamW was given: with b1 = 0, its first moment is the gradient."""
    config = OptimizerConfig(learning_rate=1.0, steps=2, b1=0.0, clip_norm=clip_norm)
    optimizer, _ = make_optimizer(config)
    params = jax.tree.map(jnp.zeros_like, grads)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    return optax.tree.get(state, "mu")


def test_clipping_is_by_the_norm_of_all_gradients() -> None:
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped = _first_moment(1.0, grads)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [[0.8]], rtol=1e-6)
    for clip_norm in (5.1, math.inf):
        same = _first_moment(clip_norm, grads)
        np.testing.assert_array_equal(same["a"], grads["a"])
        np.testing.assert_array_equal(same["b"], grads["b"])


def test_a_nan_gradient_stays_visible() -> None:
    clipped = _first_moment(1.0, {"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(())})
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(clipped))


def test_decay_mask_of_a_llama() -> None:
    config = LlamaConfig.preset("tiny", tie_embeddings=False)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)["params"]
    mask = {
        jax.tree_util.keystr(path, simple=True, separator="/"): decays
        for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(params))
    }
    assert {path for path, decays in mask.items() if not decays} == {
        "embedding/embedding",
        "norm/scale",
        *(f"block_{i}/{name}/scale" for i in range(2) for name in ("attention_norm", "mlp_norm")),
    }
    assert sum(mask.values()) == 7 * 2 + 1


def test_states_are_float32_and_their_tree_is_stable() -> None:
    optimizer, _ = make_optimizer(CONFIG)
    params = {"kernel": jnp.ones((2, 3))}
    state = optimizer.init(params)
    _, after = optimizer.update(params, state, params)
    moments = [x.dtype for x in jax.tree.leaves(state) if x.ndim]
    assert moments == [jnp.float32, jnp.float32]
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), after
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0, but must be positive"),
        ({"learning_rate": math.nan}, "learning_rate is nan, but must be positive"),
        ({"learning_rate": math.inf}, "learning_rate is inf, but must be positive and finite"),
        ({"steps": 0}, "steps is 0, but must be an int of at least 1"),
        ({"steps": 10.5}, "steps is 10.5, but must be an int of at least 1"),
        ({"warmup_steps": 100}, r"warmup_steps is 100, but must be .* below steps \(100\)"),
        ({"warmup_steps": -1}, "warmup_steps is -1, but must be an int of at least 0"),
        ({"warmup_steps": 0.1}, "warmup_steps is 0.1, but must be an int"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5, but must be between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, but must be finite and not negative"),
        ({"weight_decay": math.inf}, "weight_decay is inf, but must be finite"),
        ({"b1": 1.0}, "b1 is 1.0, but must be at least 0 and below 1"),
        ({"b2": -0.1}, "b2 is -0.1, but must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps is 0.0, but must be positive"),
        ({"eps": math.inf}, "eps is inf, but must be positive and finite"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0, but must be positive"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"learning_rate": 1e-3, "steps": 100, **changes})
