"""A kernel launch as plain data, so that every framework runs the same one."""

import dataclasses
from typing import Any

TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
    "uint32": "u32",
    "int8": "i8",
    "uint8": "u8",
}
"""Triton's names of the dtypes (by their NumPy or ml_dtypes names) that kernels here take."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype name of a kernel's array: row-major, at an address divisible by 16.

    Attributes:
      shape: of the array.
      dtype: its name.
      block: for an input that the kernel takes as a tensor descriptor, the shape of its blocks.
    """

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: `kernel(*inputs, *scalars, *outputs, **constants)` on a grid.

    The kernel's parameters come in this order. No output need be initialized: a kernel writes every
    element of it.

    Attributes:
      kernel: a `@triton.jit` function.
      grid: programs along up to three axes.
      inputs: the arrays read.
      scalars: integers, fixed at compile time where the framework can.
      outputs: the arrays written.
      constants: the constexpr parameters, (name, value).
      num_warps: warps a program.
      num_stages: depth of software pipelining.
      operations: floating-point operations, for the floor of its time.
    """

    kernel: Any
    grid: tuple[int, ...]
    inputs: tuple[ArraySpec, ...]
    scalars: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int = 4
    num_stages: int = 1
    operations: int = 0
