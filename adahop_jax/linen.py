"""Flax Linen: a Dense layer that takes its strategies from a variable collection."""

import warnings
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from adahop_jax.calibration import PROBE_NAME, PROBES, new_probe, observe, probe_paths
from adahop_jax.linear import dot
from adahop_jax.recipe import Recipe
from adahop_jax.strategy import MatmulStrategies, StrategyTable

TABLE = "adahop"
"""Linen collection of the strategies, nested like 'params'; its nodes are static."""

RNG = "adahop"
"""Name of the random stream that stochastic rounding and random signs draw from."""

_STRATEGIES_NAME = "strategies"


class Dense(nn.Dense):
    """`nn.Dense` whose three matmuls run in MXFP4, each under its own strategy.

    Arguments, parameter tree and initialization are those of `nn.Dense`. The strategies come from
    the 'adahop' collection passed to `apply` (see `bind`); without it from `strategies`; without
    that from the recipe's initial table: the uniform strategy, or what calibration computes in. A
    layer whose strategies are all BF16 computes exactly as `nn.Dense` does.

    `init` also makes the collection 'adahop_probes'. When `apply` is given it, the gradient with
    respect to it holds this layer's votes (see `adahop_jax.table_from_votes`).

    Attributes:
      recipe: formats, block size, backend, classifier.
      strategies: for a layer that takes no table.
    """

    recipe: Recipe = Recipe()
    strategies: MatmulStrategies | None = None

    @nn.compact
    def __call__(self, inputs: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Applies the layer to [..., in]; returns [..., out] in the compute dtype.

        Raises:
          ValueError: if a quantized layer was given a dot_general, or lacks the 'adahop' random
            stream that its recipe needs.
        """
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, compute_kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None and compute_kernel is not None

        strategies = self._strategies()
        if strategies.all_bf16 or self.is_initializing():
            y = self._plain_product(x, compute_kernel)
        else:
            if self.dot_general is not None or self.dot_general_cls is not None:
                raise ValueError(
                    f"dot_general of layer {self._path()!r} is set, but a quantized layer has its "
                    "own products; leave it None."
                )
            # The kernel goes in as it is stored: master weights are rounded once, straight to FP4.
            y = dot(x, kernel, strategies, recipe=self.recipe, key=self._key())
        probe = self._probe()
        if probe is not None and not self.is_initializing():
            y = observe(y, x, compute_kernel, probe, self.recipe.classifier)
        if bias is not None:
            y += jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))
        return y

    def _plain_product(self, x: Array, kernel: Array) -> Array:
        if self.dot_general_cls is not None:
            dot_general = self.dot_general_cls()
        else:
            dot_general = self.dot_general or lax.dot_general
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return dot_general(x, kernel, dims, precision=self.precision)

    def _strategies(self) -> MatmulStrategies:
        if self.has_variable(TABLE, _STRATEGIES_NAME):
            return self.get_variable(TABLE, _STRATEGIES_NAME)
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe is {self.recipe!r}, but must be a Recipe; see Recipe.named.")
        if self.strategies is not None and not isinstance(self.strategies, MatmulStrategies):
            raise TypeError(f"strategies is {self.strategies!r}, but must be a MatmulStrategies.")
        default = self.strategies or self.recipe.initial_table().default
        assert default is not None
        return default

    def _probe(self) -> Array | None:
        calibrates = self.recipe.level is not None and self.strategies is None
        if self.is_initializing() and calibrates and not self.is_mutable_collection(PROBES):
            warnings.warn(
                f"layer {self._path()!r} cannot make its probe, so no table will hold it and it "
                f"stays in BF16: init must leave '{PROBES}' mutable, and a lifted transform carry "
                f"it, as nn.scan does with variable_axes={{'params': 0, '{PROBES}': 0}}, "
                f"variable_broadcast='{TABLE}', split_rngs={{'params': True, '{RNG}': True}}.",
                stacklevel=2,
            )
        if self.is_initializing() and self.is_mutable_collection(PROBES):
            return self.variable(PROBES, PROBE_NAME, new_probe).value
        return self.get_variable(PROBES, PROBE_NAME)

    def _key(self) -> Array | None:
        if not self.recipe.needs_key:
            return None
        if not self.has_rng(RNG):
            raise ValueError(
                f"layer {self._path()!r} draws random numbers under its recipe; pass "
                f"rngs={{'{RNG}': key}} to apply."
            )
        return self.make_rng(RNG)

    def _path(self) -> str:
        return "/".join(self.path)


def bind(table: StrategyTable, probes: Any) -> dict[str, Any]:
    """The 'adahop' collection that gives every layer of a model its strategies.

    `model.apply({'params': params, 'adahop': bind(table, probes)}, x)`; it has no arrays, so it
    costs nothing and may be made inside jit.

    Args:
      table: strategies by path.
      probes: the 'adahop_probes' collection from `init`, which knows the model's layers.

    Raises:
      TypeError: if the table is no StrategyTable.
      ValueError: if the table names a layer that the model lacks, or lacks one and has no default.
    """
    if not isinstance(table, StrategyTable):
        raise TypeError(f"table is {table!r}, but must be a StrategyTable.")
    collection: dict[str, Any] = {}
    for path, strategies in table.resolve(probe_paths(probes)).items():
        node = collection
        for name in filter(None, path.split("/")):
            node = node.setdefault(name, {})
        node[_STRATEGIES_NAME] = strategies
    return collection
