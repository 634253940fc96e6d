"""The step is one pure function: traced once a table, exact under every way of computing it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adahop_jax as adahop
from adahop_jax import OperandFormat, Recipe
from train.llama import Llama, LlamaConfig
from train.optimizer import OptimizerConfig, make_optimizer
from train.step import (
    StepMetrics,
    TrainState,
    build_model,
    finish_calibration,
    init_state,
    make_eval_step,
    make_train_step,
)

CONFIG = LlamaConfig(vocab_size=64, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64)
LENGTH = 16
BF16, MXFP4, IHT, LV1, LV2 = (
    Recipe.named(name, calibration_steps=2, k=2) for name in adahop.RECIPE_NAMES
)
STOCHASTIC = dataclasses.replace(
    IHT, signs="random", gradient=OperandFormat(scale_rule="ceil", rounding="stochastic")
)
OPTIMIZER, _ = make_optimizer(OptimizerConfig(learning_rate=0.01, steps=100))


@contextlib.contextmanager
def _hardly_optimized() -> Iterator[None]:
    """Compiling is most of what these tests cost."""
    with pytest.MonkeyPatch.context() as patch:
        options = {"xla_backend_optimization_level": 0}
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=options))
        yield


def batches(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, CONFIG.vocab_size, (*shape, LENGTH + 1)).astype(np.int32)


@functools.cache
def model(recipe: Recipe, remat: bool = False) -> Llama:
    return build_model(dataclasses.replace(CONFIG, remat=remat), recipe)


@functools.cache
def _first_state(recipe: Recipe, seed: int = 0) -> TrainState:
    with _hardly_optimized():
        return init_state(model(recipe), OPTIMIZER, recipe, seed)


def new_state(recipe: Recipe) -> TrainState:
    """A copy, since steps consume their state."""
    first = jax.tree.map(jnp.copy, _first_state(BF16))
    return dataclasses.replace(first, table=recipe.initial_table() if not recipe.level else None)


def train_step(recipe: Recipe, remat: bool = False, optimize: bool | None = None) -> Any:
    # Some tests need these two as they are in practice, so that all others share them.
    return _train_step(recipe, remat, recipe in (BF16, IHT) if optimize is None else optimize)


@functools.cache
def _train_step(recipe: Recipe, remat: bool, optimize: bool) -> Any:
    with contextlib.nullcontext() if optimize else _hardly_optimized():
        return make_train_step(model(recipe, remat), OPTIMIZER, recipe)


@functools.cache
def eval_step(recipe: Recipe) -> Any:
    with _hardly_optimized():
        return make_eval_step(model(recipe), recipe)


def run(
    step: Any, state: TrainState, count: int, shape: tuple[int, ...] = (1, 2)
) -> tuple[TrainState, list[StepMetrics]]:
    metrics = []
    for seed in range(count):
        state, of_step = step(state, batches(*shape, seed=seed))
        metrics.append(StepMetrics(*map(np.asarray, of_step)))
    return state, metrics


@functools.cache
def calibrated() -> tuple[TrainState, TrainState, list[StepMetrics], tuple[int, ...]]:
    """A run of two calibration steps and two more: the two states, metrics, traces by step."""
    step = train_step(LV2)
    state, traces = new_state(LV2), []
    metrics: list[StepMetrics] = []
    kept: list[TrainState] = []
    for seed in range(4):
        if seed == 2:
            kept.append(jax.tree.map(jnp.copy, state))
            state = finish_calibration(state, LV2)
        state, of_step = step(state, batches(1, 2, seed=seed))
        metrics.append(StepMetrics(*map(np.asarray, of_step)))
        traces.append(step._cache_size())
    return kept[0], state, metrics, tuple(traces)


def equal(a: Any, b: Any) -> bool:
    def bits(leaf: Any) -> Any:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if key else leaf)

    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bits(x).tobytes() == bits(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def products(step: Any, state: TrainState, tokens: np.ndarray) -> int:
    """Quantized products in the step's program."""

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            total += equation.params.get("name") == "mxfp4_product"
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                total += count(inner) if hasattr(inner, "eqns") else 0
        return total

    return count(jax.make_jaxpr(step)(state, tokens).jaxpr)


def test_one_trace_for_calibration_and_one_for_the_table() -> None:
    *_, traces = calibrated()
    assert traces == (1, 1, 2, 2)


def test_a_step_traces_the_model_once() -> None:
    """And an equal table, made anew, is no reason for another trace."""
    calls = 0

    def dense(*args: Any, **kwargs: Any) -> adahop.Dense:
        nonlocal calls
        calls += 1
        return adahop.Dense(*args, recipe=BF16, **kwargs)

    with _hardly_optimized():
        step = make_train_step(Llama(CONFIG, dense), OPTIMIZER, BF16)
    state = new_state(BF16)
    for _ in range(3):
        state = dataclasses.replace(state, table=adahop.StrategyTable.uniform("bf16"))
        state, _ = step(state, batches(1, 2))
    assert calls == 7 * CONFIG.layers


def test_the_state_is_donated() -> None:
    state = new_state(BF16)
    train_step(BF16)(state, batches(1, 2))
    for name in ("params", "optimizer", "votes", "step"):
        leaves = jax.tree.leaves(getattr(state, name))
        assert leaves and all(leaf.is_deleted() for leaf in leaves), name


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    # Plain gradient descent: the difference of the parameters is the gradient.
    optimizer = optax.sgd(1.0)
    with _hardly_optimized():
        step = make_train_step(model(LV2), optimizer, LV2)

    def take(tokens: np.ndarray) -> tuple[Any, StepMetrics, Any]:
        first = new_state(LV2)
        state = dataclasses.replace(first, optimizer=optimizer.init(first.params))
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = step(state, tokens)
        gradient = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
        return gradient, metrics, state.votes

    tokens = batches(8)
    whole, metrics_whole, votes_whole = take(tokens[None])
    parts, metrics_parts, votes_parts = take(tokens.reshape(4, 2, -1))
    np.testing.assert_allclose(metrics_parts.loss, metrics_whole.loss, rtol=1e-3)
    np.testing.assert_allclose(metrics_parts.gradient_norm, metrics_whole.gradient_norm, rtol=0.01)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        # bfloat16 has 8 bits; a mean taken for a sum would be off by a factor of 4.
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)
    for votes, count in ((votes_whole, 1), (votes_parts, 4)):
        found = adahop.votes_by_layer(votes)
        assert len(found) == 7
        for array in found.values():
            np.testing.assert_array_equal(array.sum(axis=1), [count] * 3)


def test_a_seed_gives_the_same_weights_under_every_recipe() -> None:
    for recipe in (MXFP4, IHT, LV1, LV2):
        state = _first_state(recipe)
        assert equal(state.params, _first_state(BF16).params)
        assert equal(state.key, _first_state(BF16).key)
        assert (state.table is None) == (recipe.level is not None)
    assert not equal(_first_state(BF16, seed=1).params, _first_state(BF16).params)
    assert not equal(_first_state(BF16, seed=1).key, _first_state(BF16).key)


def test_master_weights_and_moments_stay_float32() -> None:
    _, state, *_ = calibrated()
    floats = [
        leaf
        for leaf in jax.tree.leaves((state.params, state.optimizer))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert len(floats) == 3 * len(jax.tree.leaves(state.params))
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    assert int(state.step) == 4


def test_votes_are_cast_in_calibration_alone() -> None:
    at_table, at_end, *_ = calibrated()
    for votes in adahop.votes_by_layer(at_table.votes).values():
        np.testing.assert_array_equal(votes.sum(axis=1), [2, 2, 2])
    assert equal(at_end.votes, at_table.votes)
    assert at_end.table == adahop.table_from_votes(at_table.votes, LV2)


def test_the_key_of_the_run_does_not_move() -> None:
    at_table, at_end, *_ = calibrated()
    assert equal(at_end.key, _first_state(BF16).key)
    assert equal(at_table.key, _first_state(BF16).key)


def test_the_quantized_path_is_taken_three_times_a_layer() -> None:
    layers = 2
    config = dataclasses.replace(CONFIG, layers=layers)
    for recipe, table, expected in (
        (BF16, BF16.initial_table(), 0),
        (MXFP4, MXFP4.initial_table(), 21),
        (IHT, IHT.initial_table(), 21),
        (LV2, None, 0),
        (LV2, adahop.StrategyTable.uniform("iht"), 21),
        (LV2, adahop.StrategyTable.uniform("bf16"), 0),
    ):
        deeper = build_model(config, recipe)
        state = jax.eval_shape(lambda m=deeper, r=recipe: init_state(m, OPTIMIZER, r, 0))
        state = dataclasses.replace(state, table=table)
        step = make_train_step(deeper, OPTIMIZER, recipe)
        assert products(step, state, batches(1, 2)) == expected * layers
        if recipe is IHT:  # accumulation scans: one program for all micro-batches
            assert products(step, state, batches(3, 2)) == expected * layers
        evaluate = make_eval_step(deeper, recipe)
        assert products(evaluate, state, batches(2)) == expected // 3 * layers


def test_each_recipe_has_losses_of_its_own() -> None:
    *_, of_lv2, _ = calibrated()
    _, of_bf16 = run(train_step(BF16), new_state(BF16), 4)
    _, of_iht = run(train_step(IHT), new_state(IHT), 2)
    of_mxfp4 = [eval_step(MXFP4)(new_state(MXFP4), batches(2))]
    losses = {"bf16": of_bf16[:2], "iht": of_iht, "bf16 later": of_bf16[2:], "lv2": of_lv2[2:]}
    found = {name: [float(m.loss) for m in metrics] for name, metrics in losses.items()}
    found["mxfp4"] = [float(loss) for loss in of_mxfp4]
    for one, other in (("bf16", "iht"), ("bf16", "mxfp4"), ("iht", "mxfp4"), ("bf16 later", "lv2")):
        for a, b in zip(found[one], found[other], strict=False):
            assert a != b, (one, other)
            # Close all the same: 4-bit products are no other model.
            np.testing.assert_allclose(a, b, rtol=0.05)


def test_calibration_computes_as_bf16_does_bit_for_bit() -> None:
    """With full optimization, since fusion could round the two differently."""
    found = [run(train_step(recipe, optimize=True), new_state(recipe), 2) for recipe in (BF16, LV2)]
    (plain, plain_metrics), (calibrating, calibrating_metrics) = found
    assert equal(plain_metrics, calibrating_metrics)
    assert equal(plain.params, calibrating.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(plain.votes))


def test_random_numbers_come_from_the_key_and_the_step_alone() -> None:
    step = train_step(STOCHASTIC)

    def losses(**changes: Any) -> list[Any]:
        state = dataclasses.replace(new_state(STOCHASTIC), **changes)
        return run(step, state, 2)[1]

    first = losses()
    assert np.isfinite(first).all()
    assert equal(first, losses())
    for other in (losses(key=jax.random.key(5)), losses(step=jnp.int32(7))):
        assert other[0].loss != first[0].loss
        assert other[0].gradient_norm != first[0].gradient_norm
    assert step._cache_size() == 1


# Fusion is what could round the two differently; noise does not depend on it.
@pytest.mark.parametrize(
    ("recipe", "optimize"), [(IHT, True), (STOCHASTIC, False)], ids=["nearest", "stochastic"]
)
def test_recomputing_blocks_changes_no_bit(recipe: Recipe, optimize: bool) -> None:
    """The second loss follows an update: it would show another gradient, or other noise."""
    found = [
        run(train_step(recipe, remat, optimize), new_state(recipe), 2)[1] for remat in (False, True)
    ]
    assert [m.loss for m in found[0]] == [m.loss for m in found[1]]
    assert [m.gradient_norm for m in found[0]] == [m.gradient_norm for m in found[1]]


def test_evaluation_leaves_the_state_alone() -> None:
    _, state, *_ = calibrated()
    before = jax.tree.map(jnp.copy, state)
    evaluate, tokens = eval_step(LV2), batches(2, seed=9)
    first, second = evaluate(state, tokens), evaluate(state, tokens)
    assert first == second and first.shape == ()
    assert equal(state, before)


@pytest.mark.parametrize("recipe", [BF16, IHT], ids=["bf16", "iht"])
def test_evaluation_is_in_the_precision_of_training(recipe: Recipe) -> None:
    tokens = batches(1, 2)
    evaluated = eval_step(recipe)(new_state(recipe), tokens[0])
    _, metrics = train_step(recipe)(new_state(recipe), tokens)
    np.testing.assert_allclose(evaluated, metrics.loss, rtol=1e-6)
    other = eval_step(BF16)(new_state(BF16), tokens[0])
    assert (abs(float(other - evaluated)) > 1e-5) == (recipe is not BF16)


def test_evaluation_follows_the_table() -> None:
    _, state, *_ = calibrated()
    tokens = batches(2, seed=9)
    as_bf16 = dataclasses.replace(state, table=adahop.StrategyTable.uniform("bf16"))
    assert eval_step(LV2)(state, tokens) != eval_step(LV2)(as_bf16, tokens)
    # While there is no table yet, validation is in what calibration computes in.
    calibrating = dataclasses.replace(state, table=None)
    assert eval_step(LV2)(calibrating, tokens) == eval_step(LV2)(as_bf16, tokens)


def test_a_table_must_fit_the_model() -> None:
    table = adahop.StrategyTable({"block_9/mlp/up": adahop.MatmulStrategies.uniform("iht")})
    state = dataclasses.replace(new_state(LV2), table=table)
    with pytest.raises(ValueError, match="block_9/mlp/up"):
        train_step(LV2)(state, batches(1, 2))
