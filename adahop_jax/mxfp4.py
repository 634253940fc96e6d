"""The value type of the library: a tensor stored as packed E2M1 codes and E8M0 scale bytes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from adahop_jax import e2m1
from adahop_jax.blocking import block_axis, from_blocks, to_blocks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("axis", "length", "dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class MXFP4Array:
    """An MXFP4 tensor: 4.25 bits a value, in blocks of 32 along one axis.

    A pytree with the leaves `codes` and `scales`. The block axis is counted from the end, so that
    leading axes added by `vmap` or `scan` leave it valid.

    Attributes:
      codes: uint8, two E2M1 codes a byte along `axis` (even index in the low nibble); the axis has
        length 16 * ceil(length / 32), the codes past `length` being those of zeros.
      scales: uint8 E8M0 bytes, ceil(length / 32) along `axis`.
      axis: the block axis, negative.
      length: number of values along `axis`.
      dtype: dtype of the array that was quantized, and the default of `dequantize`.
    """

    codes: UInt8[Array, "..."]
    scales: UInt8[Array, "..."]
    axis: int
    length: int
    dtype: Any

    @classmethod
    def from_parts(
        cls,
        codes: UInt8[Array, "..."],
        scales: UInt8[Array, "..."],
        axis: int = -1,
        *,
        length: int | None = None,
        dtype: Any = jnp.float32,
    ) -> "MXFP4Array":
        """Builds an array from packed codes and scale bytes made elsewhere.

        Args:
          codes: uint8, packed along `axis`, 16 bytes a block.
          scales: uint8, one a block along `axis`, otherwise shaped like `codes`.
          axis: the block axis.
          length: values along `axis`; by default all that the codes hold.
          dtype: the dtype that `dequantize` gives by default.

        Raises:
          TypeError: if codes or scales are not uint8.
          ValueError: if the shapes do not belong together.
        """
        codes, scales = jnp.asarray(codes), jnp.asarray(scales)
        for name, part in (("codes", codes), ("scales", scales)):
            if part.dtype != jnp.uint8:
                raise TypeError(f"{name} has dtype {part.dtype}, but must be uint8.")
        axis = block_axis(axis, codes.ndim)
        blocks = codes.shape[axis] // 16
        expected = list(codes.shape)
        expected[axis] = blocks
        if codes.shape[axis] % 16 or list(scales.shape) != expected:
            raise ValueError(
                f"codes {codes.shape} and scales {scales.shape} do not belong together: along axis "
                f"{axis} there must be 16 bytes of codes for each scale."
            )
        length = 32 * blocks if length is None else length
        if not isinstance(length, int) or not max(0, 32 * blocks - 31) <= length <= 32 * blocks:
            raise ValueError(f"length is {length}, but {blocks} blocks hold {32 * blocks} values.")
        return cls(codes, scales, axis, length, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this stands for."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: Any = None) -> Float[Array, "..."]:
        """The values, exact in float32, float16's range permitting, and bfloat16.

        Args:
          dtype: of the result; by default the dtype of the array that was quantized.

        Returns:
          The array of shape `shape`, NaN throughout a block whose scale byte is 255.
        """
        return _dequantize(self, jnp.dtype(self.dtype if dtype is None else dtype))

    def padded_values(self) -> Float[Array, "..."]:
        """Float32 values of whole blocks: the length along `axis` is a multiple of 32."""
        codes = to_blocks(e2m1.unpack(self.codes, self.axis), self.axis)
        values = e2m1.decode(codes, jnp.expand_dims(self.scales, self.axis + self.ndim + 1))
        return from_blocks(values, self.axis)

    def __repr__(self) -> str:
        return (
            f"MXFP4Array(shape={self.shape}, axis={self.axis}, dtype={np.dtype(self.dtype).name})"
        )


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q: MXFP4Array, dtype: Any) -> Float[Array, "..."]:
    values = jax.lax.slice_in_dim(q.padded_values(), 0, q.length, axis=q.axis % q.ndim)
    return values.astype(dtype)
