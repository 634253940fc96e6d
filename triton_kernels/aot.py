"""Compiles launches ahead of time, also for hardware that is not at hand."""

import dataclasses
import re
import subprocess
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from triton_kernels.launch import TRITON_TYPES, ArraySpec, Launch

TARGETS: dict[str, GPUTarget] = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""Hopper, data center Blackwell, workstation Blackwell and CDNA 4."""

_INT32 = range(-(2**31), 2**31)
# What Triton's own launcher derives from an argument's value.
_DIVISIBLE = ["tt.divisibility", 16]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a target.

    Attributes:
      assembly: PTX or AMDGCN.
      ir: the Triton IR it was made from, before anything of the target.
      shared_memory: bytes a program.
      registers: vector registers a thread.
      stack: bytes a thread in memory, among them spilled registers.
      num_warps: warps a program; more than the launch's where warps are specialized.
    """

    assembly: str
    ir: str
    shared_memory: int
    registers: int
    stack: int
    num_warps: int


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compiles a launch as Triton would on its first call; no GPU is needed.

    Args:
      launch: the plan.
      target: a name in `TARGETS`.

    Raises:
      ValueError: if the target is none of them.
      RuntimeError: if triton was imported with TRITON_INTERPRET=1.
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}, but must be one of {', '.join(TARGETS)}.")
    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError(
            "triton was imported with TRITON_INTERPRET=1; to compile kernels leave it unset."
        )
    kernel = triton.compile(
        _source(launch),
        target=TARGETS[target],
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": True,
        },
    )
    registers, stack = (_amd_usage if "amdgcn" in kernel.asm else _nvidia_usage)(kernel)
    return Compiled(
        assembly=kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"],
        ir=kernel.asm["ttir"],
        shared_memory=kernel.metadata.shared,
        registers=registers,
        stack=stack,
        num_warps=kernel.metadata.num_warps,
    )


def _source(launch: Launch) -> ASTSource:
    """The kernel with the types of its arguments, specialized as Triton does for their values."""
    constants = dict(launch.constants)
    arguments: list[ArraySpec | int] = [*launch.inputs, *launch.scalars, *launch.outputs]
    signature, attributes = {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        argument = arguments.pop(0)
        if isinstance(argument, ArraySpec):
            signature[name] = _array_type(argument)
            if argument.block is None:
                attributes[i,] = [_DIVISIBLE]
        elif argument == 1:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32" if argument in _INT32 else "i64"
            if argument % 16 == 0:
                attributes[i,] = [_DIVISIBLE]
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)


def _array_type(spec: ArraySpec) -> str:
    element = TRITON_TYPES[spec.dtype]
    return f"*{element}" if spec.block is None else f"tensordesc<{element}{list(spec.block)}>"


def _nvidia_usage(kernel: CompiledKernel) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return _number(r"REG:(\d+)", report), _number(r"STACK:(\d+)", report)


def _amd_usage(kernel: CompiledKernel) -> tuple[int, int]:
    assembly = kernel.asm["amdgcn"]
    return (
        _number(r"\.vgpr_count: +(\d+)", assembly),
        _number(r"\.private_segment_fixed_size: +(\d+)", assembly),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in the report on a kernel's resources: {text[:500]!r}.")
    return int(match[1])
