"""Bytes that linear layers save for their backward pass."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import adahop_jax as adahop


def saved_input_bytes(
    train_step: Any, state: Any, tokens: Array | np.ndarray, table: adahop.StrategyTable
) -> int:
    """Bytes of inputs that the blocks' linear layers keep for the backward pass.

    Each layer counts for itself, also where several share an input: layers in BF16 with 2 bytes a
    value, others with what `adahop_jax.dot` has tagged.

    Args:
      train_step: of `train.step.make_train_step`, without rematerialization.
      state: a `TrainState` of arrays or their shapes, with the table set.
      tokens: a step's tokens, or their shape.
      table: strategies of the layers.
    """
    jaxpr = jax.make_jaxpr(train_step)(state, tokens)
    micro, batch, length = tokens.shape
    values = micro * batch * (length - 1)
    plain = sum(
        2 * values * kernel.shape[0] for path, kernel in _kernels(state) if table[path].all_bf16
    )
    return plain + tagged_bytes(jaxpr.jaxpr, adahop.RESIDUAL_NAME)


def tagged_bytes(jaxpr: Any, name: str) -> int:
    """Bytes of the values that `checkpoint_name` has given a name, in a jaxpr and those inside."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name" and equation.params["name"] == name:
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(tagged_bytes(inner, name) for inner in _inner(equation.params))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(entry, "jaxpr", entry)  # a closed jaxpr holds a plain one
            if hasattr(inner, "eqns"):
                yield inner


def _kernels(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, kernel) of the layers that a table speaks of."""
    for keys, _ in jax.tree_util.tree_flatten_with_path(state.votes)[0]:
        names = [key.key for key in keys[:-1]]
        layer = state.params
        for name in names:
            layer = layer[name]
        yield "/".join(names), layer["kernel"]
