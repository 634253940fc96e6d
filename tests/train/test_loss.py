"""The loss of a head in groups of tokens is that of all logits, and so are its gradients."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from train.loss import linear_cross_entropy

TOKENS, DIM, VOCAB = (2, 150), 16, 40
X = jax.random.normal(jax.random.key(0), (*TOKENS, DIM))
TARGETS = jax.random.randint(jax.random.key(1), TOKENS, 0, VOCAB)
W = jax.random.normal(jax.random.key(2), (VOCAB, DIM))


def direct(x: Array, w: Array, targets: Array) -> Array:
    logits = jnp.dot(x, w.T, precision="highest")
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def norm(x: Array) -> float:
    return float(jnp.linalg.norm(x.astype(jnp.float32)))


@pytest.mark.parametrize("axis", [0, 1])
# One group; five groups of 64; three of 128, of which the last one is mostly filled up.
@pytest.mark.parametrize("at_once", [2**28, 64 * VOCAB, 110 * VOCAB])
def test_loss_and_gradients_are_those_of_all_logits(axis: int, at_once: int) -> None:
    def ours(x: Array, w: Array) -> Array:
        w = w if axis == 1 else w.T
        return 3 * linear_cross_entropy(x, w, TARGETS, axis=axis, logits_at_once=at_once)

    value, gradients = jax.value_and_grad(ours, argnums=(0, 1))(X, W)
    expected, exact = jax.value_and_grad(lambda x, w: 3 * direct(x, w, TARGETS), argnums=(0, 1))(
        X, W
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(ours(X, W)) == pytest.approx(float(expected), rel=1e-6)
    for found, wanted in zip(gradients, exact, strict=True):
        assert found.shape == wanted.shape
        assert norm(found - wanted) < 1e-6 * norm(wanted)


def test_bfloat16_operands_and_float32_between() -> None:
    x = X.astype(jnp.bfloat16)
    loss = jax.value_and_grad(
        lambda x, w: linear_cross_entropy(x, w, TARGETS, axis=1), argnums=(0, 1)
    )
    value, (x_gradient, w_gradient) = loss(x, W)
    rounded = W.astype(jnp.bfloat16).astype(jnp.float32)
    expected, exact = jax.value_and_grad(direct, argnums=(0, 1))(
        x.astype(jnp.float32), rounded, TARGETS
    )
    assert (value.dtype, x_gradient.dtype, w_gradient.dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    # The gradient by the logits is rounded to bfloat16 on its way into the products.
    assert norm(x_gradient - exact[0]) < 2**-8 * norm(exact[0])
    assert norm(w_gradient - exact[1]) < 2**-8 * norm(exact[1])


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for value in equation.params.values():
            for entry in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(entry, "jaxpr", entry)
                if hasattr(inner, "eqns"):
                    yield from shapes(inner)


@pytest.mark.parametrize(("groups", "most"), [(1, 300), (3, 128), (5, 64)])
def test_no_more_logits_than_allowed(groups: int, most: int) -> None:
    at_once = -(-300 // groups) * VOCAB
    jaxpr = jax.make_jaxpr(
        jax.grad(
            lambda x, w: linear_cross_entropy(x, w, TARGETS, axis=1, logits_at_once=at_once),
            argnums=(0, 1),
        )
    )(X, W)
    rows = [math.prod(shape[:-1]) for shape in shapes(jaxpr.jaxpr) if shape[-1:] == (VOCAB,)]
    assert max(rows) == most


@pytest.mark.parametrize("at_once", [2**28, 64 * VOCAB])
def test_large_logits_are_stable_and_faults_stay_visible(at_once: int) -> None:
    def loss(x: Array, targets: Array) -> tuple[Array, Array]:
        return jax.value_and_grad(
            lambda x: linear_cross_entropy(x, W, targets, axis=1, logits_at_once=at_once)
        )(x)

    value, gradient = loss(1e4 * X, TARGETS)
    assert float(value) == pytest.approx(float(direct(1e4 * X, W, TARGETS)), rel=1e-5)
    assert np.isfinite(gradient).all()
    assert np.isnan(loss(X, TARGETS.at[1, 149].set(VOCAB))[0])
    assert np.isnan(loss(X.at[0, 0, 0].set(jnp.nan), TARGETS)[0])


def test_a_token_alone() -> None:
    found = linear_cross_entropy(jnp.zeros((1, 1, DIM)), W, jnp.zeros((1, 1), jnp.int32), axis=1)
    assert float(found) == pytest.approx(math.log(VOCAB), rel=1e-6)
