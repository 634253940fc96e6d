"""What a backend has to provide, and how one is chosen."""

import dataclasses
import importlib
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from adahop_jax.e2m1 import ScaleRule
from adahop_jax.mxfp4 import MXFP4Array


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one operand becomes MXFP4: static, hashable.

    Attributes:
      scale_rule: see `adahop_jax.quantize`.
      rounding: 'nearest' or 'stochastic'.
      block_size: of the Hadamard transform along the same axis before, or None for no transform.
    """

    scale_rule: ScaleRule = "floor"
    rounding: str = "nearest"
    block_size: int | None = None


@runtime_checkable
class Backend(Protocol):
    """Whole-array operations of one implementation.

    Matrices are 2-D and may be ragged: a backend pads as it needs, with zeros. A *carrier* is
    whatever the backend's product takes as an operand: an opaque value that stands for exactly the
    dequantized matrix.
    """

    name: str

    def quantize(
        self,
        x: Float[Array, "..."],
        axis: int,
        quantizer: Quantizer,
        *,
        signs: Array | None = None,
        key: Array | None = None,
    ) -> MXFP4Array:
        """Transforms (where asked) and quantizes along a negative axis: the reference's bits."""
        ...

    def carrier(
        self,
        x: Float[Array, "R C"],
        axis: int,
        quantizer: Quantizer,
        *,
        signs: Array | None = None,
        key: Array | None = None,
    ) -> Any:
        """The carrier of `quantize(x, ...)`, without making the packed form where that costs."""
        ...

    def decode(self, q: MXFP4Array) -> Any:
        """The carrier of a packed matrix."""
        ...

    def multiply(self, a: Any, b: Any, contract: tuple[int, int]) -> Float[Array, "M N"]:
        """Product of two carriers over one axis of each, accumulated and returned in float32."""
        ...


_MODULES = {"xla": "adahop_jax.backends.xla"}


def choose_backend(name: str) -> tuple[Backend, str]:
    """Picks a backend.

    Args:
      name: 'auto', or the name of a backend.

    Returns:
      The backend and the reason for it, one sentence.

    Raises:
      ValueError: for an unknown name.
    """
    if name == "auto":
        platform = jax.default_backend()
        return _load("xla"), f"xla serves every platform, {platform} among them."
    if name not in _MODULES:
        raise ValueError(f"backend is {name!r}, but must be one of auto, {', '.join(_MODULES)}.")
    return _load(name), "named by the caller."


def _load(name: str) -> Backend:
    return importlib.import_module(_MODULES[name]).BACKEND
