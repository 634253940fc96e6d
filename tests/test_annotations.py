"""Shapes and dtypes of annotations, checked while everything runs (jaxtyping and beartype)."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]

# Flax's own annotations of nn.Dense cannot be checked at run time, so linen.py is left out.
_PROGRAM = """
import pathlib
from jaxtyping import install_import_hook
paths = [p for p in pathlib.Path("adahop_jax").rglob("*.py") if p.stem not in ("__init__", "linen")]
names = [".".join(p.with_suffix("").parts) for p in paths]
with install_import_hook(names, "beartype.beartype"):
    import adahop_jax as adahop
import jax, jax.numpy as jnp
from jaxtyping import TypeCheckError

x = jax.random.normal(jax.random.key(0), (2, 50, 40), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), (40, 24))
stochastic = adahop.OperandFormat("rceil", "stochastic")
recipe = adahop.Recipe(
    activation=adahop.OperandFormat("mse"), gradient=stochastic, signs="random", block_size=16
)
key = jax.random.key(2)
for strategy in adahop.Strategy:
    strategies = adahop.MatmulStrategies.uniform(strategy, k=4)
    adahop.matmul(x, w, strategy, k=4)

    def loss(x, w, probe):
        y = adahop.dot(x, w, strategies, recipe=recipe, key=key)
        return jnp.sum(adahop.observe(y, x, w, probe, "robust"))

    jax.grad(loss, argnums=(0, 1, 2))(x, w, jnp.zeros((3, 3)))
for rule in ("floor", "even", "ceil", "rceil", "mse"):
    adahop.quantize(x, -2, rule).dequantize()
adahop.classify([x[0], w, x[1]], "published")
adahop.top_outliers(w, 3, 1)
adahop.hadamard_transform(x, signs=jnp.ones((32,)))
layer = adahop.Dense(8, strategies=strategies)
variables = layer.init(key, x)
adahop.bind(adahop.StrategyTable.uniform("iht"), variables["adahop_probes"])
layer.apply(variables, x)

try:
    adahop.top_outliers(jnp.ones((3,)), 1, 0)
except TypeCheckError:
    print("checked")
"""


def test_arrays_are_what_their_annotations_say():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The hook is on: a wrong shape fails in the annotation, before the function's own check.
    assert done.stdout == "checked\n"
