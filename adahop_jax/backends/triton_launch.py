"""Launches `triton_kernels` plans on JAX arrays: through jax-triton, or in Triton's interpreter."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from triton_kernels.launch import Launch


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels are planned for.

    Attributes:
      native: compiled for a GPU; else interpreted.
      fp4: the name in `scaled_matmul.TILES` of its units for block-scaled FP4 products, or None.
      multiprocessors: how many.
    """

    native: bool
    fp4: str | None
    multiprocessors: int


@functools.cache
def device() -> Device:
    """JAX's default device."""
    if jax.default_backend() != "gpu":
        return Device(native=False, fp4=None, multiprocessors=2)
    gpu = jax.devices()[0]
    capability = _capability(gpu)
    fp4 = "sm_120" if capability >= (12, 0) else "sm_100" if capability >= (10, 0) else None
    return Device(True, fp4, getattr(gpu, "core_count", 132))


def check_device() -> None:
    """Raises RuntimeError, with what would do, where the kernels cannot run."""
    platform = jax.default_backend()
    if platform != "gpu":
        from triton import knobs

        if platform == "cpu" and knobs.runtime.interpret:
            return
        raise RuntimeError(
            f"backend 'triton' needs an NVIDIA GPU, and JAX's default backend here is {platform}; "
            "use backend='xla', or set TRITON_INTERPRET=1 to run the kernels, slowly, on the CPU."
        )
    gpu = jax.devices()[0]
    if "rocm" in getattr(gpu.client, "platform_version", "").lower():
        raise RuntimeError(
            "backend 'triton' was not tried on AMD GPUs (its kernels are only compiled for them); "
            "use backend='xla'."
        )
    if _capability(gpu) < (8, 9):
        raise RuntimeError(
            f"backend 'triton' needs FP8 units (compute capability 8.9 or later), and "
            f"{gpu.device_kind} has {gpu.compute_capability}; use backend='xla'."
        )


def _capability(gpu: object) -> tuple[int, ...]:
    return tuple(int(n) for n in str(getattr(gpu, "compute_capability", "0.0")).split("."))


def launch(plan: Launch, *inputs: Array) -> tuple[Array, ...]:
    """Runs a plan; under `vmap` one launch after another, by a loop.

    Raises:
      TypeError: if the inputs are not those of the plan.
    """
    for given, spec in zip(inputs, plan.inputs, strict=True):
        if given.shape != spec.shape or given.dtype.name != spec.dtype:
            raise TypeError(f"{plan.kernel} was planned for {spec}, but got {jax.typeof(given)}.")
    return _launch(plan)(*inputs)


@functools.lru_cache(maxsize=4096)
def _launch(plan: Launch):
    """One function a plan, so that JAX sees the same one again and traces it once."""
    outputs = tuple(jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in plan.outputs)

    def interpreted(*inputs: Array) -> tuple[Array, ...]:
        from triton_kernels import interpreter

        def run(*arrays):
            return tuple(interpreter.run(plan, list(arrays)))

        return jax.pure_callback(run, outputs, *inputs, vmap_method="sequential")

    def compiled(*inputs: Array) -> tuple[Array, ...]:
        import jax_triton

        operands: list[Any] = [
            jax_triton.TensorDescriptor.from_array(x, spec.block) if spec.block else x
            for x, spec in zip(inputs, plan.inputs, strict=True)
        ]
        return jax_triton.triton_call(
            *operands,
            *plan.scalars,
            kernel=plan.kernel,
            out_type=outputs,
            grid=cast(Any, plan.grid),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            backend_options={"enable_fp_fusion": True},
            **dict(plan.constants),
        )

    return jax.custom_batching.sequential_vmap(compiled if device().native else interpreted)
