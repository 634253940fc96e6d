"""The linear operation y = x w with quantized forward and backward products.

One `custom_vjp` encloses all three matmuls, float in and float out: the integer codes inside carry
no gradient. What it saves for the backward pass is tagged with `checkpoint_name`, so that a remat
policy can keep it by name.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from adahop_jax.backends import Backend, choose_backend
from adahop_jax.blocking import check_float
from adahop_jax.contraction import Operand, overwrite_rows, product
from adahop_jax.products import bf16_product
from adahop_jax.quantization import check_key, undifferentiable
from adahop_jax.recipe import Recipe
from adahop_jax.strategy import MatmulStrategies, Strategy

RESIDUAL_NAME = "adahop_residual"
"""Name of the saved activations, for `jax.checkpoint_policies.save_only_these_names`."""

# Every use of random numbers in a layer draws from a stream of its own: shared noise would
# correlate the errors of gx and gw.
_STREAMS = ("y_x", "y_w", "gx_g", "gx_w", "gw_x", "gw_g", "y_signs", "gx_signs", "gw_signs")


_OPERAND_KINDS = {"x": "activation", "w": "weight", "g": "gradient"}


class _Config(NamedTuple):
    strategies: MatmulStrategies
    recipe: Recipe

    def of(self, matmul: str) -> tuple[Strategy, int]:
        """Strategy and k of 'y', 'gx' or 'gw'."""
        return next(
            (strategy, k) for name, strategy, k in self.strategies.items() if name == matmul
        )

    @property
    def backend(self) -> Backend:
        return choose_backend(self.recipe.backend)[0]


class _Saved(NamedTuple):
    """What gw needs of x: its encoding, or x itself where a BF16 path needs all of it."""

    x: Float[Array, "T K"] | None
    packed: Any
    outlier_indices: Int[Array, " k"] | None
    outlier_columns: Float[Array, "T k"] | None


def dot(
    x: Float[Array, "... K"],
    w: Float[Array, "K N"],
    strategies: MatmulStrategies | Strategy | str,
    *,
    recipe: Recipe | None = None,
    key: Array | None = None,
) -> Float[Array, "... N"]:
    """The product x @ w, differentiable, with each of the three matmuls in its own strategy.

    The forward product quantizes x and w along K. The backward pass quantizes the cotangent g and w
    along N for gx, and g and x along the tokens for gw. Saved for it: w, and x in 4.25 bits a value
    (with a compact [tokens, k] in bfloat16 where gw is OE-right), or x as it is where gw is BF16,
    OE-left or OE-inner, whose high-precision part needs every entry.

    With BF16 for all three and operands of one dtype this is `lax.dot_general`, bits and gradients
    included.

    Args:
      x: activations, any leading shape (its axes are tokens); float32, bfloat16 or float16.
      w: weight in Flax's layout [in, out]; may be wider than x (float32 master weights).
      strategies: of the three matmuls, or one strategy for all.
      recipe: formats, block size, signs and backend; its policy plays no role here.
      key: a JAX key, for a recipe that draws random numbers. Under `vmap` split it: members that
        share a key share their noise.

    Returns:
      y in x's dtype. The gradient of x has x's dtype; that of w is accumulated in float32 and has
      w's.

    Raises:
      TypeError: for operands that are not float arrays, and for second derivatives.
      ValueError: for shapes that do not match, unknown strategies, or a missing key.
    """
    x, w = check_float(x, "x"), check_float(w, "w")
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x {x.shape} and w {w.shape} must have the shapes [..., K] and [K, N].")
    recipe = recipe or Recipe()
    if not isinstance(strategies, MatmulStrategies):
        strategies = MatmulStrategies.uniform(strategies, recipe.k)
    if strategies.all_bf16 and x.dtype == w.dtype:
        return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    check_key(key, recipe.needs_key)
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = cast(Array, _dot(_Config(strategies, recipe), tokens, w, key if recipe.needs_key else None))
    return y.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(config: _Config, x: Array, w: Array, key: Array | None) -> Array:
    streams = _streams(key)
    return _output(config, _operand(config, "y", "x", x, 1, streams), w, streams)


def _output(
    config: _Config, x_operand: Operand, w: Array, streams: dict[str, Array | None]
) -> Array:
    w_operand = _operand(config, "y", "w", w, 0, streams)
    return _product(config, "y", x_operand, w_operand, x_operand.values.dtype)


def _forward(config: _Config, x: Array, w: Array, key: Array | None) -> tuple[Array, tuple]:
    x, w = _once(x), _once(w)
    streams = _streams(key)
    operands = {
        "y": _operand(config, "y", "x", x, 1, streams),
        "gw": _operand(config, "gw", "x", x, 0, streams),
    }
    operands = _encode(config, operands, packed=("gw",))
    saved = _save(config, operands["gw"])
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL_NAME), saved)
    return _output(config, operands["y"], w, streams), (saved, w, key)


def _backward(config: _Config, residuals: tuple, g: Array) -> tuple[Array, Array, None]:
    saved, w, key = residuals
    w, g = _once(w), _once(jnp.asarray(g))  # A caller of `vjp` may bring a NumPy cotangent.
    streams = _streams(key)
    operands = {
        "gx": _operand(config, "gx", "g", g, 1, streams),
        "gw": _operand(config, "gw", "g", g, 0, streams),
    }
    operands = _encode(config, operands)
    w_operand = _operand(config, "gx", "w", w, 1, streams)
    # y has x's dtype, and so has its cotangent.
    gx = _product(config, "gx", operands["gx"], w_operand, g.dtype)
    return gx, _weight_gradient(config, saved, operands["gw"], streams, w.dtype), None


_dot.defvjp(_forward, _backward)


def _once(operand: Array) -> Array:
    """Keeps a gradient of the gradient from being zero in silence."""
    return cast(Array, undifferentiable(operand, "the gradient of adahop_jax.dot", "pass"))


def _encode(
    config: _Config, operands: dict[str, Operand], packed: tuple[str, ...] = ()
) -> dict[str, Operand]:
    """Encodes one matrix for those of its products that quantize all of it, in one read."""
    wanted = []
    for matmul in operands:
        strategy, _ = config.of(matmul)
        needs_values = strategy is Strategy.IHT_OE_LEFT and matmul in packed
        if strategy not in (Strategy.BF16, Strategy.IHT_OE_INNER) and not needs_values:
            wanted.append(matmul)
    if not wanted:
        return operands
    requests = [operands[m].request(packed=m in packed) for m in wanted]
    encoded = config.backend.encode(operands[wanted[0]].values, requests)
    done = zip(wanted, encoded, strict=True)
    return operands | {m: dataclasses.replace(operands[m], encoded=e) for m, e in done}


def _save(config: _Config, operand: Operand) -> _Saved:
    strategy, k = config.of("gw")
    if strategy is Strategy.BF16:
        return _Saved(operand.values.astype(jnp.bfloat16), None, None, None)
    if operand.encoded is None:
        return _Saved(operand.values, None, None, None)
    if strategy is Strategy.IHT_OE_RIGHT:
        indices, columns = operand.outliers(k)
        return _Saved(None, operand.encoded, indices, columns.astype(jnp.bfloat16))
    return _Saved(None, operand.encoded, None, None)


def _weight_gradient(
    config: _Config,
    saved: _Saved,
    g_operand: Operand,
    streams: dict[str, Array | None],
    dtype: Any,
) -> Float[Array, "K N"]:
    """The kernel's gradient x^T g."""
    if saved.x is not None:
        x_operand = _operand(config, "gw", "x", saved.x, 0, streams)
        return _product(config, "gw", x_operand, g_operand, dtype)
    backend = config.backend
    out = backend.multiply(backend.carrier(saved.packed), g_operand.carrier(backend), dtype)
    if saved.outlier_indices is None or saved.outlier_columns is None:
        return out
    # Columns of x are rows of the kernel's gradient.
    rows = bf16_product(saved.outlier_columns, g_operand.values, (0, 0)).astype(dtype)
    return overwrite_rows(out, saved.outlier_indices, rows)


def _product(config: _Config, matmul: str, a: Operand, b: Operand, dtype: Any) -> Array:
    strategy, k = config.of(matmul)
    if matmul == "gw":
        # The kernel's gradient x^T g is the transpose of the table's g^T x: left and right swap.
        strategy = strategy.mirrored
    return product(strategy, a, b, k=k, backend=config.backend, dtype=dtype)


def _operand(
    config: _Config,
    matmul: str,
    tensor: str,
    values: Array,
    axis: int,
    streams: dict[str, Array | None],
) -> Operand:
    strategy, _ = config.of(matmul)
    quantizer = config.recipe.quantizer(_OPERAND_KINDS[tensor], strategy)
    signs = _signs(config, matmul, streams)
    return Operand(values, axis, quantizer, streams[f"{matmul}_{tensor}"], signs)


def _streams(key: Array | None) -> dict[str, Array | None]:
    if key is None:
        return dict.fromkeys(_STREAMS)
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(_STREAMS)}


def _signs(config: _Config, matmul: str, streams: dict[str, Array | None]) -> Array | None:
    if config.recipe.signs == "none":
        return None
    key = streams[f"{matmul}_signs"]
    assert key is not None
    return jax.random.rademacher(key, (config.recipe.block_size,), jnp.int8)
