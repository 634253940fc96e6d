"""One matrix product under a strategy: transform, quantize, multiply, extract."""

import dataclasses
import functools
import math
import operator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from adahop_jax.backends import Backend, Quantizer, Request, choose_backend
from adahop_jax.blocking import check_float
from adahop_jax.e2m1 import ScaleRule, check_scale_rule
from adahop_jax.hadamard import check_block_size
from adahop_jax.outliers import slice_norms, top_indices
from adahop_jax.products import bf16_product
from adahop_jax.quantization import check_key, undifferentiable
from adahop_jax.strategy import DEFAULT_K, Strategy


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
      values: a matrix in the layout in which it is stored.
      axis: its contraction axis, 0 or 1.
      quantizer: how it becomes MXFP4.
      key: for stochastic rounding.
      signs: for the transform.
      encoded: the whole matrix encoded so, where that was done before.
    """

    values: Float[Array, "R C"]
    axis: int
    quantizer: Quantizer
    key: Array | None = None
    signs: Array | None = None
    encoded: Any = None

    def request(self, *, packed: bool = False) -> Request:
        """What encodes it."""
        return Request(self.axis, self.quantizer, self.signs, self.key, packed)

    def carrier(self, backend: Backend) -> Any:
        """The quantized matrix as the backend's product takes it."""
        encoded = self.encoded
        if encoded is None:
            (encoded,) = backend.encode(self.values, (self.request(),))
        return backend.carrier(encoded)

    def outliers(self, k: int) -> tuple[Int[Array, " k"], Float[Array, "..."]]:
        """Indices of the k largest rows (of A; columns of B), and those slices of the matrix."""
        free = 1 - self.axis
        indices = top_indices(slice_norms(self.values, free), min(k, self.values.shape[free]))
        return indices, take(self.values, indices, free)


def product(
    strategy: Strategy, a: Operand, b: Operand, *, k: int, backend: Backend, dtype: Any
) -> Float[Array, "M N"]:
    """A x B over one axis of each stored matrix, accumulated in float32 and rounded to `dtype`.

    Row i of the result depends on row i of A alone (blocks run along the contraction), so that
    OE-left needs no cleaned copy of A: it overwrites k rows of the result, and OE-right k columns.
    """
    contract = (a.axis, b.axis)
    if strategy is Strategy.BF16:
        return bf16_product(a.values, b.values, contract).astype(dtype)
    if strategy is Strategy.IHT_OE_INNER:
        return _inner_extraction(a, b, k, backend).astype(dtype)
    out = backend.multiply(a.carrier(backend), b.carrier(backend), dtype)
    if strategy is Strategy.IHT_OE_LEFT:
        indices, rows = a.outliers(k)
        return overwrite_rows(out, indices, bf16_product(rows, b.values, contract).astype(dtype))
    if strategy is Strategy.IHT_OE_RIGHT:
        indices, columns = b.outliers(k)
        columns = bf16_product(a.values, columns, contract).astype(dtype)
        return _overwrite_columns(out, indices, columns)
    return out


def _inner_extraction(a: Operand, b: Operand, k: int, backend: Backend) -> Float[Array, "M N"]:
    """Takes k channels out of both operands and adds their BF16 product.

    Channel i contributes the outer product of A[:, i] and B[i, :], whose Frobenius norm is the
    product of theirs; the largest go.
    """
    norms = [slice_norms(side.values, side.axis) for side in (a, b)]
    # Over their maxima, so that the products neither overflow nor all underflow.
    scores = functools.reduce(jnp.multiply, [n / jnp.max(n, initial=1e-37) for n in norms])
    indices = top_indices(scores, min(k, scores.shape[0]))
    picked, kept = [], []
    for side in (a, b):
        picked.append(take(side.values, indices, side.axis))
        where = (indices,) if side.axis == 0 else (slice(None), indices)
        values = side.values.at[where].set(0, unique_indices=True)
        kept.append(dataclasses.replace(side, values=values, encoded=None))
    rest = product(Strategy.IHT, kept[0], kept[1], k=0, backend=backend, dtype=jnp.float32)
    return rest + bf16_product(picked[0], picked[1], (a.axis, b.axis))


def take(matrix: Array, indices: Int[Array, " k"], axis: int) -> Array:
    """Rows (axis=0) or columns (axis=1) of a matrix."""
    return jnp.take(matrix, indices, axis=axis, mode="clip", unique_indices=True)


def overwrite_rows(
    out: Float[Array, "M N"], indices: Int[Array, " k"], rows: Float[Array, "k N"]
) -> Float[Array, "M N"]:
    """`out` with these rows."""
    return out.at[indices].set(rows, unique_indices=True)


def _overwrite_columns(out: Array, indices: Array, columns: Array) -> Array:
    return out.at[:, indices].set(columns, unique_indices=True)


def matmul(
    a: Float[Array, "... M K"],
    b: Float[Array, "K N"],
    strategy: Strategy | str,
    k: int = DEFAULT_K,
    block_size: int = 32,
    signs: Array | None = None,
    scale_rule: ScaleRule = "floor",
    rounding: str = "nearest",
    key: Array | None = None,
    backend: str = "auto",
) -> Float[Array, "... M N"]:
    """One product a @ b in a strategy's arithmetic: to study errors and to compare kernels.

    Not differentiable: `adahop_jax.dot` is the operation with gradients.

    Args:
      a: left operand; leading axes count as further rows.
      b: right operand.
      strategy: a `Strategy` or its value.
      k: rows, columns or channels extracted, clipped to the size at hand.
      block_size: of the Hadamard transform along K: 16, 32, 64 or 128.
      signs: optional +1/-1 factors before the transform, [block_size] or [K].
      scale_rule: of both operands, see `quantize`.
      rounding: of both operands, 'nearest' or 'stochastic'.
      key: for stochastic rounding.
      backend: 'auto' or the name of a backend.

    Returns:
      The product in the operands' common dtype, accumulated in float32. The BF16 path rounds its
      operands to bfloat16, whatever their dtype.

    Raises:
      TypeError: for operands that are not float arrays, or under differentiation.
      ValueError: for shapes that do not match and unknown choices.
    """
    a, b = check_float(a, "a"), check_float(b, "b")
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"a {a.shape} and b {b.shape} must have the shapes [..., M, K] and [K, N]."
        )
    try:
        strategy = Strategy(strategy)
    except ValueError:
        raise ValueError(
            f"strategy is {strategy!r}, but must be one of {', '.join(Strategy)}."
        ) from None
    if not hasattr(k, "__index__") or k < 0:
        raise ValueError(f"k is {k!r}, but must be a non-negative integer.")
    check_block_size(block_size)
    check_scale_rule(scale_rule, rounding)
    check_key(key, rounding == "stochastic")
    if signs is not None and jnp.shape(signs) not in ((block_size,), (b.shape[0],)):
        raise ValueError(
            f"signs has shape {jnp.shape(signs)}, but must be ({block_size},) or ({b.shape[0]},)."
        )
    chosen, _ = choose_backend(backend)
    quantizer = Quantizer(scale_rule, rounding, block_size if strategy.transforms else None)
    return _matmul(a, b, signs, key, strategy, operator.index(k), quantizer, chosen.name)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _matmul(
    a: Array,
    b: Array,
    signs: Array | None,
    key: Array | None,
    strategy: Strategy,
    k: int,
    quantizer: Quantizer,
    backend: str,
) -> Array:
    a, b = (cast(Array, undifferentiable(x, "adahop_jax.matmul")) for x in (a, b))
    key_a, key_b = (None, None) if key is None else jax.random.split(key)
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    out = product(
        strategy,
        Operand(rows, 1, quantizer, key_a, signs),
        Operand(b, 0, quantizer, key_b, signs),
        k=k,
        backend=choose_backend(backend)[0],
        dtype=jnp.result_type(a, b),
    )
    return out.reshape(*a.shape[:-1], b.shape[1])
