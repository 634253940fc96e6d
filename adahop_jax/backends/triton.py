"""The Triton backend: kernels of `triton_kernels`, called through jax-triton.

Matrices are encoded *contraction-major*: as the MXFP4Array of the matrix whose last axis is the
contraction, so that products never transpose. On hardware without FP4 units (Hopper) a carrier is
an E4M3 matrix with a power-of-two factor a row; on hardware with them it is the packed matrix.

Stochastic rounding draws Philox numbers from the key and each element's place in the encoding:
other numbers than the xla backend's, with the same distribution to 2^-17 of a step.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from adahop_jax.backends.base import Quantizer, Request
from adahop_jax.backends.triton_launch import check_device, device, launch
from adahop_jax.blocking import padded_length
from adahop_jax.mxfp4 import MXFP4Array
from triton_kernels import decode, matmul, quantize, scaled_matmul


class Carrier(NamedTuple):
    """Row i stands for values[i] * factors[i]; the contraction is the last axis."""

    values: Float8e4m3fn[Array, "free padded_contraction"]
    factors: Float[Array, " free"]


class TritonBackend:
    """See `Backend`."""

    name = "triton"

    def check_device(self) -> None:
        """Raises RuntimeError unless these kernels can run on JAX's default device."""
        check_device()

    def quantize(
        self,
        x: Float[Array, "..."],
        axis: int,
        quantizer: Quantizer,
        *,
        signs: Array | None = None,
        key: Array | None = None,
    ) -> MXFP4Array:
        """See `Backend.quantize`."""
        axis += x.ndim
        # A matrix with its blocks along axis 0 is encoded as it lies; else the axis goes last.
        down = x.ndim > 1 and math.prod(x.shape[:axis]) == 1 and axis < x.ndim - 1
        rows = x if down else jnp.moveaxis(x, axis, -1)
        free = rows.shape[axis + 1 :] if down else rows.shape[:-1]
        length, width = x.shape[axis], math.prod(free)
        shape = (length, width) if down else (width, length)
        request = Request(0 if down else 1, quantizer, signs, key, packed=True)
        (encoded,) = self.encode(rows.reshape(shape), (request,))
        lead = x.shape[:axis] if down else ()
        parts = [
            jnp.moveaxis(part.reshape(*lead, *free, part.shape[-1]), -1, axis)
            for part in (encoded.codes, encoded.scales)
        ]
        return MXFP4Array(parts[0], parts[1], axis - x.ndim, encoded.length, x.dtype)

    def encode(self, x: Float[Array, "R C"], requests: Sequence[Request]) -> tuple[MXFP4Array, ...]:
        """See `Backend.encode`; contraction-major."""
        if len({r.axis for r in requests}) != len(requests):
            return tuple(self.encode(x, (request,))[0] for request in requests)
        by_axis = {request.axis: _encoding(request) for request in requests}
        lengths = {
            r.axis: padded_length(x.shape[r.axis], r.quantizer.block_size or 1) for r in requests
        }
        if not x.size:
            return tuple(_empty(x, r.axis, by_axis[r.axis], lengths[r.axis]) for r in requests)
        native = device().native
        tile = None if native else _interpreted_tile(_matrix_shape(x))
        plan = quantize.plan(_matrix_shape(x), x.dtype.name, by_axis, fast=native, tile=tile)
        inputs = [x]
        for request in sorted(requests, key=lambda r: r.axis):
            encoding = by_axis[request.axis]
            signs = cast(Array, request.signs).astype(jnp.int8) if encoding.signs else x
            key = cast(Array, request.key)
            inputs += [signs, jax.random.bits(key, (2,), "uint32") if encoding.stochastic else x]
        parts = iter(launch(plan, *inputs))
        encoded = {
            axis: MXFP4Array(next(parts), next(parts), -1, lengths[axis], x.dtype)
            for axis in sorted(by_axis)
        }
        return tuple(encoded[request.axis] for request in requests)

    def carrier(self, encoded: MXFP4Array) -> Carrier | MXFP4Array:
        """See `Backend.carrier`."""
        if device().fp4:
            return encoded
        rows, blocks = _matrix_shape(encoded.scales)
        if not rows * blocks:
            values = jnp.zeros((rows, 32 * blocks), jnp.float8_e4m3fn)
            return Carrier(values, jnp.ones((rows,), jnp.float32))
        plan = decode.plan(rows, blocks, fast=device().native)
        return Carrier(*launch(plan, encoded.codes, encoded.scales))

    def multiply(
        self, a: Carrier | MXFP4Array, b: Carrier | MXFP4Array, dtype: Any
    ) -> Float[Array, "M N"]:
        """See `Backend.multiply`."""
        dtype = jnp.dtype(dtype)
        left, right = (c.values if isinstance(c, Carrier) else c.codes for c in (a, b))
        (m, k), (n, _) = _matrix_shape(left), _matrix_shape(right)
        if not m * n * k:
            return jnp.zeros((m, n), dtype)
        if isinstance(a, Carrier) and isinstance(b, Carrier):
            plan = matmul.plan(m, n, k, dtype.name, programs=device().multiprocessors)
            return launch(plan, a.values, a.factors, b.values, b.factors)[0]
        a, b = cast(MXFP4Array, a), cast(MXFP4Array, b)
        plan = scaled_matmul.plan(m, n, 2 * k, dtype.name, target=device().fp4 or "sm_100")
        return launch(plan, a.codes, a.scales, b.codes, b.scales)[0]


def _interpreted_tile(shape: tuple[int, int]) -> quantize.Tile:
    """A program costs the interpreter much the same whatever its size: few, large ones."""
    rows, cols = (min(max(128, 1 << (n - 1).bit_length()), 1024) for n in shape)
    return quantize.Tile(rows, cols, rows * cols // 64, 4)


def _encoding(request: Request) -> quantize.Encoding:
    quantizer, signs = request.quantizer, None
    if request.signs is not None and quantizer.block_size is not None:
        signs = "block" if request.signs.shape == (quantizer.block_size,) else "full"
    return quantize.Encoding(
        quantizer.scale_rule, quantizer.rounding == "stochastic", quantizer.block_size, signs
    )


def _empty(x: Array, axis: int, encoding: quantize.Encoding, length: int) -> MXFP4Array:
    free, blocks = x.shape[1 - axis], quantize.count_blocks(x.shape[axis], encoding)
    codes = jnp.zeros((free, 16 * blocks), jnp.uint8)
    return MXFP4Array(codes, jnp.zeros((free, blocks), jnp.uint8), -1, length, x.dtype)


def _matrix_shape(x: Array) -> tuple[int, int]:
    rows, columns = x.shape
    return rows, columns


BACKEND = TritonBackend()
