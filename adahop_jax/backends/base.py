"""What a backend has to provide, and how one is chosen."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
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


@dataclasses.dataclass(frozen=True)
class Request:
    """One of the encodings of a matrix that `Backend.encode` makes.

    Attributes:
      axis: the contraction axis, 0 or 1.
      quantizer: how values become MXFP4.
      signs: for the transform, see `adahop_jax.hadamard_transform`.
      key: for stochastic rounding.
      packed: asks for the 4-bit form, to be kept until later; else any form may come back that
        makes the carrier cheap.
    """

    axis: int
    quantizer: Quantizer
    signs: Array | None = None
    key: Array | None = None
    packed: bool = False


@runtime_checkable
class Backend(Protocol):
    """Whole-array operations of one implementation.

    Matrices may be ragged: a backend pads as it needs, with zeros. Encoded matrices and *carriers*
    (what the product takes) are opaque pytrees: they stand for exactly the quantized matrix.
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

    def encode(self, x: Float[Array, "R C"], requests: Sequence[Request]) -> tuple[Any, ...]:
        """The encodings asked for, in one read of the matrix where the backend can."""
        ...

    def carrier(self, encoded: Any) -> Any:
        """An encoded matrix as an operand of the product."""
        ...

    def multiply(self, a: Any, b: Any, dtype: Any) -> Float[Array, "M N"]:
        """Product of two carriers over their contraction axes.

        Accumulated in float32 and rounded once, to `dtype`.
        """
        ...


_MODULES = {"xla": "adahop_jax.backends.xla", "triton": "adahop_jax.backends.triton"}


def choose_backend(name: str) -> tuple[Backend, str]:
    """Picks a backend.

    Args:
      name: 'auto', or the name of a backend.

    Returns:
      The backend and the reason for it, one sentence.

    Raises:
      ValueError: for an unknown name.
      RuntimeError: for a backend that cannot run here.
    """
    if name == "auto":
        platform = jax.default_backend()
        if platform != "gpu":
            return _load("xla"), f"xla serves every platform, {platform} among them."
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != "9.0":
            return _load("xla"), (
                f"the kernels of triton were measured on compute capability 9.0 only, and this GPU "
                f"is {capability}; name 'triton' to use them all the same."
            )
        if missing := _missing_for_triton():
            return _load("xla"), f"{missing} is not installed; triton is faster on this GPU."
        return _load("triton"), "triton is the fastest on this GPU."
    if name not in _MODULES:
        raise ValueError(f"backend is {name!r}, but must be one of auto, {', '.join(_MODULES)}.")
    return _load(name), "named by the caller."


def _missing_for_triton() -> str | None:
    packages = ("triton", "jax_triton")
    return next((p for p in packages if importlib.util.find_spec(p) is None), None)


def _load(name: str) -> Backend:
    if name == "triton" and (missing := _missing_for_triton()):
        raise RuntimeError(
            f"backend 'triton' needs the package {missing}; pip install 'adahop-jax[triton]'."
        )
    backend = importlib.import_module(_MODULES[name]).BACKEND
    if name == "triton":
        backend.check_device()
    return backend
