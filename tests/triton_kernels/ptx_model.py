"""Evaluates straight-line PTX in NumPy, after the PTX ISA, for inline assembly without a GPU.

Registers hold bit patterns (uint16 or uint32 arrays), as many elements as there are threads. Values
outside the ISA's guarantees are not modelled: an instruction, modifier or operand that is not in
the tables here raises ValueError, and so does a register that is read before it is written.
"""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_WIDTHS = {".b16": 16, ".b32": 32, ".f32": 32}
_UINT = {16: np.uint16, 32: np.uint32}


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, rounded once, to nearest even.

    The product of two 24-bit significands is exact in float64. The sum need not be, so it is
    rounded to odd there: the error of the float64 sum, which is a float64 itself (Knuth's TwoSum),
    tells the direction in which the odd neighbour lies. From 53 >= 2 * 24 + 2 bits rounded to odd
    the rounding to float32 is that of the exact sum, subnormal results included.
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.uint64) & 1) == 0
    towards_error = np.nextafter(total, np.copysign(np.inf, error))
    odd = np.where((error != 0) & even & np.isfinite(total), towards_error, total)
    return odd.astype(np.float32)


def _float(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float32)


def _bits(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, np.float32).view(np.uint32)


def _add_sat(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Clamped to [+0, 1]; NaN gives +0."""
    total = _float(a) + _float(b)
    return _bits(np.where(total > 0, np.minimum(total, np.float32(1)), np.float32(0)))


def _mul_f16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # The product of two 11-bit significands is exact in float32, so it is rounded once.
    x, y = (np.ascontiguousarray(n).view(np.float16).astype(np.float32) for n in (a, b))
    return (x * y).astype(np.float16).view(np.uint32)


def _funnel_left(a: np.ndarray, b: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The upper half of b:a shifted left by count modulo 32."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    return ((both << (count & np.uint32(31)).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Byte i is that of b:a which nibble i of the selector names, or copies of its sign bit."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (8 * (nibble & np.uint32(7))).astype(np.uint64)) & np.uint64(255)
        byte = np.where(nibble & np.uint32(8), np.where(byte >> np.uint64(7), 255, 0), byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def _shift_left(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.where(count > 31, 0, a << (count & np.uint32(31))).astype(np.uint32)


def _shift_right(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.where(count > 31, 0, a >> (count & np.uint32(31))).astype(np.uint32)


def _max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """NaN only if both are."""
    return _bits(np.fmax(_float(a), _float(b)))


def _e4m3(value: np.ndarray) -> np.ndarray:
    """To nearest even; beyond the largest number the largest, NaN stays."""
    code = np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), code)


def _e4m3x2_f16x2(a: np.ndarray) -> np.ndarray:
    return _e4m3(np.ascontiguousarray(a).view(np.float16).astype(np.float32)).view(np.uint16)


def _e4m3x2_f32(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The first operand fills the upper byte."""
    return _e4m3(np.stack([_float(low), _float(high)], -1)).view(np.uint16)[:, 0]


# Instruction: widths of destination and sources, and the function of their bits.
_INSTRUCTIONS: dict[str, tuple[tuple[int, ...], Callable[..., np.ndarray]]] = {
    "abs.f32": ((32, 32), lambda a: a & np.uint32(0x7FFFFFFF)),
    "add.f32": ((32, 32, 32), lambda a, b: _bits(_float(a) + _float(b))),
    "add.sat.f32": ((32, 32, 32), _add_sat),
    "fma.rn.f32": ((32,) * 4, lambda a, b, c: _bits(fma(_float(a), _float(b), _float(c)))),
    "mul.rn.f16x2": ((32, 32, 32), _mul_f16x2),
    "shf.l.wrap.b32": ((32,) * 4, _funnel_left),
    "prmt.b32": ((32,) * 4, _permute),
    "and.b32": ((32, 32, 32), lambda a, b: a & b),
    "or.b32": ((32, 32, 32), lambda a, b: a | b),
    "shl.b32": ((32, 32, 32), _shift_left),
    "mov.b32": ((32, 32), lambda a: a),
    "shr.u32": ((32, 32, 32), _shift_right),
    "sub.u32": ((32, 32, 32), lambda a, b: a - b),
    "max.f32": ((32, 32, 32), _max),
    "cvt.rn.satfinite.e4m3x2.f16x2": ((16, 32), _e4m3x2_f16x2),
    "cvt.rn.satfinite.e4m3x2.f32": ((16, 32, 32), _e4m3x2_f32),
}
# The same by another name: the rounding that add has by default.
_INSTRUCTIONS["add.rn.f32"] = _INSTRUCTIONS["add.f32"]
_INSTRUCTIONS["add.rn.sat.f32"] = _INSTRUCTIONS["add.sat.f32"]

_OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


def _statements(assembly: str) -> list[tuple[str, list[str]]]:
    """Opcodes and operands; a braced pair is one operand."""
    body = assembly.strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise ValueError("the assembly has to be one braced block, so that its registers are local")
    statements = [s.strip() for s in body[1:-1].split(";")]
    if statements.pop():
        raise ValueError("the last statement lacks its semicolon")
    out = []
    for statement in statements:
        opcode, _, operands = statement.partition(" ")
        out.append((opcode, _OPERAND.findall(operands)))
    return out


class _Machine:
    def __init__(self, operands: dict[str, np.ndarray], count: int):
        self.count = count
        self.widths = {f"${i}": 32 for i in range(32)}
        self.registers = operands

    def read(self, name: str, width: int) -> np.ndarray:
        if name.startswith("{"):
            low, high = (self.read(part, 16).astype(np.uint32) for part in name[1:-1].split(","))
            return low | high << np.uint32(16)
        name = name.strip()
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", name):
            return np.full(self.count, int(name[2:], 16), np.uint32)
        if re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", name):
            return np.full(self.count, int(name, 0), np.uint32)
        if name not in self.registers:
            raise ValueError(f"register {name} is read before it is written")
        self.check(name, width)
        return self.registers[name]

    def write(self, name: str, width: int, value: np.ndarray) -> None:
        self.check(name, width)
        self.registers[name] = value.astype(_UINT[width])

    def check(self, name: str, width: int) -> None:
        if self.widths.get(name) != width:
            raise ValueError(f"register {name} was not declared with {width} bits")


def evaluate(assembly: str, inputs: Sequence[np.ndarray], outputs: int = 1) -> list[np.ndarray]:
    """Runs a block of PTX.

    Args:
      assembly: of LLVM's inline kind, in one pair of braces: $0 and on are the outputs, then come
        the inputs.
      inputs: 1-D arrays of one length, of 32-bit elements.
      outputs: how many.

    Returns:
      The outputs, uint32.

    Raises:
      ValueError: for what this model does not know.
    """
    operands = {f"${outputs + i}": np.array(x).view(np.uint32) for i, x in enumerate(inputs)}
    machine = _Machine(operands, inputs[0].size)
    for opcode, names in _statements(assembly):
        if opcode == ".reg":
            width = _WIDTHS[names[0]]
            machine.widths |= {name: width for name in names[1:]}
            continue
        if opcode not in _INSTRUCTIONS:
            raise ValueError(f"unknown instruction {opcode}")
        widths, function = _INSTRUCTIONS[opcode]
        if len(names) != len(widths):
            raise ValueError(f"{opcode} takes {len(widths)} operands, not {names}")
        with np.errstate(all="ignore"):
            sources = [machine.read(*pair) for pair in zip(names[1:], widths[1:], strict=True)]
            machine.write(names[0], widths[0], function(*sources))
    return [machine.registers[f"${i}"] for i in range(outputs)]


def overwritten_inputs(assembly: str, constraints: str) -> set[str]:
    """Inputs read after an output was written that may share their register (no '=&')."""
    outputs = [c for c in constraints.split(",") if c.startswith("=")]
    shared = {f"${i}" for i, c in enumerate(outputs) if "&" not in c}
    inputs = {f"${i}" for i in range(len(outputs), constraints.count(",") + 1)}
    written, late = False, set()
    for _, names in _statements(assembly):
        if written:
            late |= inputs & set(names[1:])
        written |= names[0] in shared
    return late


def interpret(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Lets Triton's interpreter run inline assembly, by this model.

    Returns:
      A list to which every call adds its assembly and constraints.
    """
    calls: list[tuple[str, str]] = []

    def create_inline_asm(
        self: InterpreterBuilder, assembly: str, constraints: str, values: list, *_: Any
    ) -> SimpleNamespace:
        calls.append((assembly, constraints))
        shape = values[0].data.shape
        out = evaluate(assembly, [v.data.reshape(-1) for v in values], constraints.count("="))
        handles = [TensorHandle(o.view(np.int32).reshape(shape), tl.int32) for o in out]
        return SimpleNamespace(get_result=handles.__getitem__)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)
    return calls
