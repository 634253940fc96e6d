"""Which implementation of attention a model uses, and why."""

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "cudnn"]
AttentionName = Literal["auto", "xla", "cudnn"]

_LARGEST_HEAD = 128


def choose_attention(name: str, dtype: str, head_dim: int) -> tuple[Implementation, str]:
    """Picks an implementation of `jax.nn.dot_product_attention`.

    Args:
      name: 'xla' stores every score, so memory grows with the square of the length; 'cudnn' (flash
        attention) stores none, but needs an NVIDIA GPU; 'auto' is 'cudnn' where that can be.
      dtype: of queries, keys and values, by name.
      head_dim: channels of a head.

    Returns:
      'xla' or 'cudnn', and the reason for it, one sentence.

    Raises:
      ValueError: for an unknown name, or if 'cudnn' is asked for and cannot be.
    """
    if name not in ("auto", "xla", "cudnn"):
        raise ValueError(f"attention is {name!r}, but must be one of auto, xla, cudnn.")
    if name == "xla":
        return name, "named by the caller."
    obstacle = _obstacle(dtype, head_dim)
    if obstacle is None:
        reason = "named by the caller." if name == "cudnn" else "this is an NVIDIA GPU."
        return "cudnn", reason
    if name == "cudnn":
        raise ValueError(f"attention is 'cudnn', but {obstacle}; give xla or auto.")
    return "xla", f"{obstacle}."


def _obstacle(dtype: str, head_dim: int) -> str | None:
    """What keeps cuDNN from computing the attention of a model, if anything."""
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version:
        return f"cuDNN needs an NVIDIA GPU, and this is a {device.platform}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"cuDNN computes in 16 bits, and the model in {dtype}"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return (
            f"cuDNN needs heads of at most {_LARGEST_HEAD} channels, a multiple of 8, and the "
            f"model's have {head_dim}"
        )
    return None
