"""Cross entropy of a linear head, without all of its logits in memory at once.

For a vocabulary of 128,256 the float32 logits of 8192 tokens are 4.2 GB, and differentiating
through them keeps more than two such arrays. Here a group of tokens is taken to its loss and, in
the same pass, to the gradients: their logits are computed once and then forgotten.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from adahop_jax.products import dot_f32

LOGITS_AT_ONCE = 2**28
"""Logits of a group of tokens: 1 GiB in float32."""


def linear_cross_entropy(
    x: Float[Array, "... dim"],
    w: Float[Array, "..."],
    targets: Int[Array, "..."],
    *,
    axis: int,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Float[Array, ""]:
    """Mean cross entropy in nats of the logits x w, over all tokens.

    Products take operands in x's dtype and accumulate in float32; everything between them is
    float32. Not for second derivatives.

    Args:
      x: hidden states; its leading axes are tokens.
      w: the head, [vocab, dim] or [dim, vocab]; may be wider than x (float32 master weights).
      targets: a token each; one beyond the vocabulary gives NaN.
      axis: of w, over which it is multiplied: 1 for [vocab, dim], 0 for [dim, vocab].
      logits_at_once: tokens are taken in as few groups of equal size as have no more logits.

    Returns:
      The float32 mean. The gradient of x has x's dtype; that of w is accumulated in float32 and
      has w's.
    """
    tokens = math.prod(targets.shape)
    groups = max(1, -(-tokens * w.shape[1 - axis] // logits_at_once))
    # Whole tiles of a matrix product, unless there is but one group.
    size = tokens if groups == 1 else -(-tokens // groups // 64) * 64
    flat = x.reshape(tokens, x.shape[-1])
    return _loss(axis, max(size, 1), flat, w, targets.reshape(tokens))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(axis: int, size: int, x: Array, w: Array, targets: Array) -> Array:
    w = w.astype(x.dtype)

    def group(total: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        loss, _ = _losses(axis, w, *inputs)
        return total + jnp.sum(loss), None

    total, _ = _scan(group, jnp.float32(0), size, x, targets)
    return total / x.shape[0]


def _forward(
    axis: int, size: int, x: Array, w: Array, targets: Array
) -> tuple[Array, tuple[Array, Array]]:
    low = w.astype(x.dtype)

    def group(
        carry: tuple[Array, Array], inputs: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        total, w_gradient = carry
        loss, gradient = _losses(axis, low, *inputs)
        gradient = gradient.astype(x.dtype)
        x_gradient = dot_f32(gradient, low, (1, 1 - axis)).astype(x.dtype)
        sides = (gradient, inputs[0]) if axis == 1 else (inputs[0], gradient)
        return (total + jnp.sum(loss), w_gradient + dot_f32(*sides, (0, 0))), x_gradient

    start = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32))
    (total, w_gradient), x_gradient = _scan(group, start, size, x, targets)
    x_gradient = x_gradient.reshape(-1, x.shape[1])[: x.shape[0]]
    return total / x.shape[0], (x_gradient, w_gradient.astype(w.dtype))


def _backward(
    axis: int, size: int, residuals: tuple[Array, Array], g: Array
) -> tuple[Array, Array, None]:
    x_gradient, w_gradient = residuals
    factor = g / x_gradient.shape[0]
    x_gradient = (x_gradient.astype(jnp.float32) * factor).astype(x_gradient.dtype)
    return x_gradient, (w_gradient * factor).astype(w_gradient.dtype), None


_loss.defvjp(_forward, _backward)


def _losses(
    axis: int, w: Array, x: Array, targets: Array, counts: Array
) -> tuple[Float[Array, " tokens"], Float[Array, "tokens vocab"]]:
    """Loss of each token that counts, and its gradient by the logits.

    The gradient of a token that does not count meets an x of zeros in w's gradient, and x's is cut
    off.
    """
    logits = dot_f32(x, w, (1, axis))
    largest = jnp.max(logits, axis=1, keepdims=True)
    norm = largest + jnp.log(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1, mode="fill")
    hit = jnp.arange(logits.shape[1]) == targets[:, None]
    return jnp.where(counts, (norm - picked)[:, 0], 0), jnp.exp(logits - norm) - hit


def _scan[Carry](
    group: Callable[[Carry, tuple[Array, Array, Array]], tuple[Carry, Any]],
    carry: Carry,
    size: int,
    x: Array,
    targets: Array,
) -> tuple[Carry, Any]:
    """Takes groups of tokens in turn, the last one filled up with tokens that do not count."""
    tokens = x.shape[0]
    count = -(-tokens // size)
    padding = count * size - tokens
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(count, size, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(count, size)
    counts = (jnp.arange(count * size) < tokens).reshape(count, size)
    with jax.named_scope("head"):
        return jax.lax.scan(group, carry, (x, targets, counts))
