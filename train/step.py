"""The training step: loss, gradients, votes and update as one pure function of the state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import adahop_jax as adahop
from train.llama import Llama, LlamaConfig


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "optimizer", "key", "votes"),
    meta_fields=("table",),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; a pytree.

    Attributes:
      step: int32, updates done.
      params: float32 master weights.
      optimizer: optax state.
      key: JAX key of the run; step n draws from `fold_in(key, n)`.
      votes: calibration's votes so far, nested like the 'adahop_probes' collection.
      table: strategies of all layers, static; None while calibration votes.
    """

    step: Int[Array, ""]
    params: Any
    optimizer: Any
    key: Array
    votes: Any
    table: adahop.StrategyTable | None


class StepMetrics(NamedTuple):
    """Scalars of one step: mean loss in nats a token, and the gradient's global norm."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


TrainStep = Callable[
    [TrainState, Int[Array | np.ndarray, "micro batch length"]], tuple[TrainState, StepMetrics]
]


def build_model(config: LlamaConfig, recipe: adahop.Recipe) -> Llama:
    """A Llama whose blocks' linear layers follow a recipe."""
    return Llama(config, functools.partial(adahop.Dense, recipe=recipe))


def init_state(
    model: Llama, optimizer: optax.GradientTransformation, recipe: adahop.Recipe, seed: int
) -> TrainState:
    """The state of a new run; a seed gives the same weights under every recipe."""
    key_init, key_run = jax.random.split(jax.random.key(seed))

    def init(key: Array) -> tuple[Any, Any, Any]:
        variables = model.init(key, jnp.zeros((1, 8), jnp.int32))
        params = variables["params"]
        return params, optimizer.init(params), variables["adahop_probes"]

    params, optimizer_state, probes = jax.jit(init)(key_init)
    table = recipe.initial_table() if recipe.level is None else None
    return TrainState(jnp.int32(0), params, optimizer_state, key_run, probes, table)


def make_train_step(
    model: Llama, optimizer: optax.GradientTransformation, recipe: adahop.Recipe
) -> TrainStep:
    """Makes the jitted step (state, batches) -> (state, metrics).

    `batches` holds the tokens of the micro-batches whose gradients are averaged before the update;
    a sequence has one token more than the model sees. The state is donated. There is one trace for
    calibration, in which votes are added up, and one for each table.
    """

    def loss_fn(params: Any, probes: Any, table: Any, tokens: Array, key: Array) -> Array:
        return _loss(model, recipe, params, probes, table, tokens, key)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batches: Array) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        probes = jax.tree.map(jnp.zeros_like, state.votes)

        def micro_batch(total: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
            index, tokens = inputs
            loss, gradients = jax.value_and_grad(loss_fn, argnums=(0, 1))(
                state.params, probes, state.table, tokens, jax.random.fold_in(key, index)
            )
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        count = batches.shape[0]
        start = (jnp.float32(0), (jax.tree.map(jnp.zeros_like, state.params), probes))
        if count == 1:
            total, _ = micro_batch(start, (jnp.int32(0), batches[0]))
        else:
            total, _ = jax.lax.scan(micro_batch, start, (jnp.arange(count), batches))
        loss, (gradients, votes) = total
        # Votes add up over micro-batches; gradients and the loss are means.
        loss, gradients = jax.tree.map(lambda leaf: leaf / count, (loss, gradients))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            optimizer=optimizer_state,
            key=state.key,
            votes=jax.tree.map(jnp.add, state.votes, votes),
            table=state.table,
        )
        return new, StepMetrics(loss, optax.tree.norm(gradients))

    return step


def make_eval_step(
    model: Llama, recipe: adahop.Recipe
) -> Callable[[TrainState, Int[Array | np.ndarray, "batch length"]], Float[Array, ""]]:
    """Makes the jitted mean loss of a batch, computed in the precision that the state trains in."""

    @jax.jit
    def evaluate(state: TrainState, tokens: Array) -> Array:
        return _loss(
            model, recipe, state.params, state.votes, state.table, tokens, state.key, probing=False
        )

    return evaluate


def finish_calibration(state: TrainState, recipe: adahop.Recipe) -> TrainState:
    """Replaces the votes' missing table by the one they give; costs the step one retrace."""
    return dataclasses.replace(state, table=adahop.table_from_votes(state.votes, recipe))


def _loss(
    model: Llama,
    recipe: adahop.Recipe,
    params: Any,
    probes: Any,
    table: adahop.StrategyTable | None,
    tokens: Int[Array, "batch length"],
    key: Array,
    *,
    probing: bool = True,
) -> Float[Array, ""]:
    calibrating = table is None
    table = recipe.initial_table() if calibrating else table
    variables = {"params": params, "adahop": adahop.bind(table, probes)}
    if calibrating and probing:
        variables["adahop_probes"] = probes
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return cast(Array, model.apply(variables, inputs, targets, rngs={"adahop": key}))
