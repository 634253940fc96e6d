"""Runs launches in Triton's interpreter, on NumPy arrays: slow, for tests where there is no GPU.

Triton's interpreter keeps bfloat16 and float8 as integers. Up to 3.9 it truncates to bfloat16,
loses NaN in conversions to and from float8 and rounds ties away from zero, and does arithmetic
(`tl.dot` too) on bit patterns. While a launch runs here, ml_dtypes does all that, as GPUs do: to
nearest, ties to even, and to float8 with saturation.

What still differs from a GPU: `tl.dot` of float32 is not rounded to tf32; sums have another order;
reductions and `tl.maximum` of bfloat16 and float8 compare bit patterns, so convert to float32
first; inline assembly is missing; a masked-off load gives 0 where `other` is not given.
"""

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.launch import ArraySpec, Launch

_POISON = 0xA5
_ALIGNMENT = 16
_GUARD = 4096

# All launches run in one thread, one after the other: the interpreter patches Triton's modules, for
# all threads, while a kernel runs. It is started here, on import, since a thread has the mode of
# the one that started it, and XLA calls back with subnormal numbers flushed to zero.
_WORKER = concurrent.futures.ThreadPoolExecutor(1, "triton_interpreter")
_WORKER.submit(int).result()

# How the dtypes are to be read that the interpreter keeps in an integer of their size.
_CARRIED = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn}


def interpreting() -> bool:
    """Whether this process interprets kernels: decided when triton was first imported."""
    return isinstance(tl.cdiv, triton_interpreter.InterpretedFunction)


def run(launch: Launch, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a launch; one at a time, whatever thread it is called from.

    Args:
      launch: the plan.
      inputs: arrays of the shapes and dtypes it names (float8 and bfloat16 are those of ml_dtypes);
        they are not written, and copied only where they are not row-major at an address divisible
        by 16.

    Returns:
      Its outputs. An element that the kernel did not write holds bytes 0xA5.

    Raises:
      RuntimeError: if triton was imported without TRITON_INTERPRET=1, or if the kernel wrote next
        to an output.
      TypeError: if the inputs are not those of the plan.
      ValueError: if the grid has not one to three axes.
    """
    if not interpreting() or not isinstance(launch.kernel, triton_interpreter.InterpretedFunction):
        raise RuntimeError(
            "triton was imported for compilation; to interpret kernels set TRITON_INTERPRET=1 "
            "before it is imported."
        )
    if not 1 <= len(launch.grid) <= 3:
        raise ValueError(f"grid is {launch.grid}, but must have one to three axes.")
    if len(inputs) != len(launch.inputs):
        raise TypeError(f"{len(inputs)} inputs are given, but the plan wants {len(launch.inputs)}.")
    for i, (given, spec) in enumerate(zip(inputs, launch.inputs, strict=True)):
        if tuple(given.shape) != spec.shape or given.dtype != _numpy_dtype(spec):
            raise TypeError(
                f"inputs[{i}] is {given.dtype}{list(given.shape)}, but the plan wants "
                f"{spec.dtype}{list(spec.shape)}."
            )
    read = [_Array(_aligned(a), s.dtype) for a, s in zip(inputs, launch.inputs, strict=True)]
    arguments = [
        array.descriptor(spec.block) if spec.block else array
        for array, spec in zip(read, launch.inputs, strict=True)
    ]
    scalars = [_scalar(value) for value in launch.scalars]
    written = [_Poisoned(spec) for spec in launch.outputs]

    def interpret() -> None:
        with _corrected(), np.errstate(all="ignore"):
            launch.kernel[launch.grid](*arguments, *scalars, *written, **dict(launch.constants))

    _WORKER.submit(interpret).result()
    for i, output in enumerate(written):
        if not output.guards_are_intact():
            raise RuntimeError(f"{launch.kernel.__name__} wrote outside of outputs[{i}].")
    return [output.array for output in written]


class _DType(str):
    """A dtype's name, with the size that a tensor descriptor checks."""

    itemsize: int


class _Array:
    """What the interpreter asks of a tensor, for an array that is its own storage."""

    def __init__(self, array: np.ndarray, dtype: str):
        self.array = array
        self.dtype = _DType(dtype)
        self.dtype.itemsize = array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def descriptor(self, block: tuple[int, ...]) -> TensorDescriptor:
        return TensorDescriptor(self, list(self.size()), list(self.stride()), list(block))

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> "_Array":
        return self

    def cpu(self) -> "_Array":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Array":
        return _Array(self.array[:0], self.dtype)

    def set_(self, storage: "_Array", *_: Any) -> "_Array":
        self.array = storage.array
        return self

    def copy_(self, _: "_Array") -> "_Array":
        return self


class _Poisoned(_Array):
    """An output, filled and surrounded with a pattern of bytes."""

    def __init__(self, spec: ArraySpec):
        dtype = _numpy_dtype(spec)
        size = math.prod(spec.shape) * dtype.itemsize
        self._bytes = _aligned_bytes(size + 2 * _GUARD)
        self._bytes[...] = _POISON
        inner = self._bytes[_GUARD : _GUARD + size]
        super().__init__(inner.view(dtype).reshape(spec.shape), spec.dtype)

    def guards_are_intact(self) -> bool:
        end = _GUARD + self.array.nbytes
        return bool(
            (self._bytes[:_GUARD] == _POISON).all() and (self._bytes[end:] == _POISON).all()
        )


def _scalar(value: int) -> Any:
    if -(2**31) <= value < 2**31:
        return value
    # The interpreter would compute with uint32 up to 2^32, where compiled kernels have int64.
    handle = triton_interpreter.TensorHandle(np.array([value], np.int64), tl.int64)
    return tl.tensor(handle, tl.int64)


def _numpy_dtype(spec: ArraySpec) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))


def _aligned(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    if array.ctypes.data % _ALIGNMENT == 0:
        return array
    copy = _aligned_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _aligned_bytes(size: int) -> np.ndarray:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    return raw[-raw.ctypes.data % _ALIGNMENT :][:size]


@contextlib.contextmanager
def _corrected() -> Iterator[None]:
    """Replaces what the interpreter gets wrong, or does again and again, within the context."""
    builder = triton_interpreter.interpreter_builder
    corrected: list[tuple[Any, str, Any]] = [
        (triton_interpreter, "_convert_float", _convert_float),
        (triton_interpreter, "_patch_lang", _patch_once(triton_interpreter._patch_lang)),
        (builder, "create_dot", _dot_of(builder.create_dot)),
        (builder, "binary_op", _arithmetic_of(builder.binary_op)),
        (builder, "unary_op", _arithmetic_of(builder.unary_op)),
        # Checks of integer overflow triple the work, and do nothing unless debugging.
        (builder, "options", triton_interpreter.InterpreterOptions(sanitize_overflow=False)),
    ]
    if not hasattr(builder, "create_dot_scaled"):
        # triton 3.6.
        corrected.append((builder, "create_dot_scaled", _dot_scaled))
    with contextlib.ExitStack() as stack:
        for owner, name, value in corrected:
            stack.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, value)
        yield


_ABSENT = object()


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _patch_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Every call of a device function patches Triton anew, at half the cost of a run."""
    scopes: dict[int, Any] = {}

    def patch(kernel: Any) -> Any:
        module = id(kernel.__globals__)
        if module not in scopes:
            scopes[module] = patch_lang(kernel)
            # Before 3.9, int(array of one element), which NumPy no longer takes.
            setattr(tl.tensor, "__index__", lambda self: self.handle.data.item())  # noqa: B010
        return scopes[module]

    return patch


def _value(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """What the interpreter's array stands for."""
    carried = _CARRIED.get(dtype)
    return data if carried is None else data.view(carried)


def _convert_float(
    data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: Any
) -> np.ndarray:
    """Converts to nearest, ties to even; the result holds the bits, as an unsigned integer."""
    dtypes = {tl.float16: np.float16, tl.float32: np.float32, **_CARRIED}
    if source not in dtypes or target not in dtypes:
        raise NotImplementedError(f"no conversion from {source} to {target} is interpreted here.")
    value = _value(data, source).astype(np.float32)
    if target == tl.float8e4nv:
        value = np.clip(value, -448, 448)
    return value.astype(dtypes[target]).view(f"u{target.primitive_bitwidth // 8}")


def _dot_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(a: Any, b: Any, acc: Any, *options: Any) -> Any:
        if acc.dtype.scalar != tl.float32:
            return original(a, b, acc, *options)
        x, y = (_value(t.data, t.dtype.scalar).astype(np.float32, copy=False) for t in (a, b))
        return triton_interpreter.TensorHandle(np.matmul(x, y) + acc.data, tl.float32)

    return dot


def _arithmetic_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def arithmetic(*arguments: Any) -> Any:
        *handles, op = arguments
        dtype = handles[0].dtype.scalar
        if dtype not in _CARRIED:
            return original(*arguments)
        result = op(*(_value(t.data, dtype) for t in handles))
        if result.dtype == _CARRIED[dtype]:
            result = result.view(handles[0].data.dtype)
        return triton_interpreter.TensorHandle(result, dtype)

    return arithmetic


def _dot_scaled(
    a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any
) -> Any:
    """`tl.dot_scaled` of MXFP4 operands that are packed along the contraction."""
    *_, acc = rest
    product = np.matmul(_decoded(a.data, a_scale.data), _decoded(b.data.T, b_scale.data).T)
    return triton_interpreter.TensorHandle(product + acc.data, tl.float32)


def _decoded(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 values of packed codes [rows, K/2] under scale bytes [rows, K/32]."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    values = table[np.stack([codes & 15, codes >> 4], axis=-1)]
    factors = np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - 127)
    factors[scales.view(np.uint8) == 255] = np.nan
    return (values.reshape(*scales.shape, 32) * factors[..., None]).reshape(len(codes), -1)
