"""The linear operation on the Triton backend (interpreted), under JAX's transforms.

Products are of the same codes as the xla backend's, so results differ by the order of sums only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import MatmulStrategies, Strategy

_STRATEGIES = MatmulStrategies(y=Strategy.IHT, gx=Strategy.IHT_OE_LEFT, gw=Strategy.IHT_OE_RIGHT)


def _recipe(backend):
    return adahop.Recipe(backend=backend, k=2)


def _operands():
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(40, 96), (96, 64)]))
    return x, w


def _loss(backend):
    return lambda x, w: jnp.sum(
        adahop.dot(x, w, _STRATEGIES, recipe=_recipe(backend), key=jax.random.key(7)) ** 2
    )


def _close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), got, want)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_value_and_gradients_are_those_of_the_xla_backend(wrap):
    got, want = (
        jax.jit(jax.value_and_grad(wrap(_loss(b)), argnums=(0, 1)))(*_operands())
        for b in ("triton", "xla")
    )
    _close(got, want)


def test_vmap():
    x, w = _operands()
    xs = jnp.stack([x, 2 * x + 1])
    gradient = jax.grad(_loss("triton"))
    _close(jax.vmap(gradient, (0, None))(xs, w), jnp.stack([gradient(a, w) for a in xs]))


def test_scan():
    x, w = _operands()
    xs = jnp.stack([x, 2 * x + 1])
    gradient = jax.grad(_loss("triton"))
    got = jax.lax.scan(lambda carry, a: (carry, gradient(a, w)), 0, xs)[1]
    _close(got, jnp.stack([gradient(a, w) for a in xs]))


def test_one_trace():
    count = 0

    @jax.jit
    def step(x, w):
        nonlocal count
        count += 1
        return jax.grad(_loss("triton"))(x, w)

    x, w = _operands()
    step(x, w)
    step(x + 1, w)
    assert count == 1
