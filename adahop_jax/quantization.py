"""The public `quantize`: checks, a guard against silent zero gradients, the backend's call."""

import functools

import jax
from jaxtyping import Array, Float

from adahop_jax.backends import Quantizer, choose_backend
from adahop_jax.blocking import block_axis, check_float
from adahop_jax.e2m1 import ScaleRule, check_scale_rule
from adahop_jax.mxfp4 import MXFP4Array


def quantize(
    x: Float[Array, "..."],
    axis: int = -1,
    scale_rule: ScaleRule = "floor",
    rounding: str = "nearest",
    key: Array | None = None,
    backend: str = "auto",
) -> MXFP4Array:
    """Quantizes to MXFP4 in blocks of 32 along an axis.

    Args:
      x: float32, bfloat16 or float16, at least 1-D; any length along `axis` (padded with zeros
        inside).
      axis: the block axis; for an operand of a product, its contraction.
      scale_rule: how a block's power-of-two scale follows from its largest magnitude. 'floor' (OCP
        MX v1.0): 2^(floor(log2 amax) - 2), values above 6 scales saturate; 'even': amax is first
        rounded to one mantissa bit; 'ceil', 'rceil': the exponent of amax, of amax/6, is rounded
        up, nothing saturates; 'mse': the better of the floor exponent and the next by squared
        error.
      rounding: 'nearest' (ties to even), or 'stochastic', unbiased, with 'ceil' or 'rceil' only.
      key: a JAX key, for stochastic rounding. Each element's noise depends on the key and on its
        global index alone.
      backend: 'auto' or the name of a backend.

    Returns:
      An MXFP4Array. A block that holds a NaN or an infinity dequantizes to NaN.

    Raises:
      TypeError: if x is not a float array, or is differentiated (its integer codes would carry a
        zero gradient in silence: `adahop_jax.dot` is the differentiable operation).
      ValueError: for an unknown rule, rounding, axis or backend, or a missing key.
    """
    x = check_float(x)
    axis = block_axis(axis, x.ndim)
    check_scale_rule(scale_rule, rounding)
    check_key(key, rounding == "stochastic")
    chosen, _ = choose_backend(backend)
    return _quantize(x, key, axis, Quantizer(scale_rule, rounding), chosen.name)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _quantize(
    x: Array, key: Array | None, axis: int, quantizer: Quantizer, backend: str
) -> MXFP4Array:
    x = undifferentiable(x, "adahop_jax.quantize")
    return choose_backend(backend)[0].quantize(x, axis, quantizer, key=key)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def undifferentiable(x: Array, name: str, remedy: str = "use adahop_jax.dot, or pass") -> Array:
    """The identity, which raises a TypeError when it is differentiated."""
    return x


@undifferentiable.defjvp
def _undifferentiable_jvp(name: str, remedy: str, primals: tuple, tangents: tuple) -> tuple:
    raise TypeError(
        f"{name} cannot be differentiated (rounding has no useful gradient); {remedy} "
        "jax.lax.stop_gradient of the operand."
    )


def check_key(key: Array | None, needed: bool) -> None:
    """Raises ValueError if random numbers are needed and there is no key."""
    if needed and key is None:
        raise ValueError("key is None, but stochastic rounding and random signs need a JAX key.")
