"""What layers save is counted to the byte."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import adahop_jax as adahop
from train.bench.recipe_step import make_program
from train.bench.saved import saved_input_bytes, tagged_bytes
from train.options import TrainOptions

OPTIONS = TrainOptions(model="tiny", batch_size=3, seq_len=32)
TOKENS = 3 * 32
WIDTHS = [64] * 6 + [160]  # inputs of a block's layers
"""Of the 'tiny' model, which has two blocks."""


def test_tagged_bytes_counts_names_and_repetitions() -> None:
    def f(x: jax.Array) -> jax.Array:
        kept = checkpoint_name(x[:2].astype(jnp.bfloat16), "mine")  # 4 bytes
        other = checkpoint_name(x, "another")

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.jit(lambda c: checkpoint_name(c * 2, "mine"))(carry), None  # 3 * 4 bytes

        out, _ = jax.lax.scan(body, x, None, length=5)
        return kept.astype(jnp.float32).sum() + other.sum() + out.sum()

    assert tagged_bytes(jax.make_jaxpr(f)(jnp.ones(3)).jaxpr, "mine") == 4 + 5 * 12


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_saved_inputs_of_the_model(backend: str) -> None:
    def saved(name: str) -> int:
        recipe = dataclasses.replace(OPTIONS.recipe(name), backend=backend)
        program = make_program(OPTIONS, recipe)
        table = program.state.table
        assert table is not None
        return saved_input_bytes(program.step, program.state, program.batches[0], table)

    assert saved("bf16") == 2 * 2 * TOKENS * sum(WIDTHS)
    packed = 2 * TOKENS * sum(WIDTHS) * 17 // 32
    assert saved("mxfp4-iht") == packed
    # Level 2 as measured: two columns (k is 1/32 of the width) of every input too, and where.
    assert saved("adahop-lv2") == packed + 2 * len(WIDTHS) * (2 * 2 * TOKENS + 2 * 4)


def test_layers_that_stay_in_bf16_count_in_full() -> None:
    program = make_program(OPTIONS, OPTIONS.recipe("adahop-lv2"))
    table = adahop.StrategyTable(
        {"block_1/mlp/down": adahop.MatmulStrategies.uniform("bf16")},
        default=adahop.MatmulStrategies.uniform("iht"),
    )
    state = dataclasses.replace(program.state, table=table)
    found = saved_input_bytes(program.step, state, program.batches[0], table)
    packed = TOKENS * (2 * sum(WIDTHS) - 160) * 17 // 32
    assert found == packed + 2 * TOKENS * 160
