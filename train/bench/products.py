"""How fast a backend multiplies what it has encoded, against XLA's BF16 and FP8 products."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from adahop_jax.backends import Backend, Quantizer, Request
from train.bench.inputs import bf16_gemm, fp8_gemm, normal, representable, to_fp8
from train.bench.report import TIMES, Column, Group, significant
from train.bench.timing import Plan, Timing, Work, attempt, measure

_CHECKED_ROWS = 64

# Operands of y = x w, gx = g w^T and gw = x^T g, with their contraction axes.
_PRODUCTS = {"y": (("x", 1), ("w", 0)), "gx": (("g", 1), ("w", 1)), "gw": (("x", 0), ("g", 0))}


def measure_products(
    backends: Sequence[Backend],
    shapes: Sequence[tuple[int, int]],
    tokens: int,
    plan: Plan,
    report: Callable[[str], None],
) -> Group:
    """Times the three products of layers [in, out]."""
    group = Group(
        "products",
        f"Products of encoded matrices, {tokens} tokens, bfloat16 results",
        (
            Column("shape", "in x out"),
            Column("product", "product"),
            Column("backend", "backend"),
            Column("bf16", "BF16 TFLOP/s", significant(1e-12)),
            Column("fp8", "FP8 TFLOP/s", significant(1e-12)),
            Column("ours", "ours TFLOP/s", significant(1e-12)),
            Column("to_bf16", "to BF16", TIMES),
            Column("to_fp8", "to FP8", TIMES),
            Column("relative_error", "rel. error", lambda e: f"{e:.1e}"),
            Column("bf16_error", "BF16's", lambda e: f"{e:.1e}"),
        ),
        notes=(
            "FP8 is given its operands with the contraction last, and the values of MXFP4, as ours "
            f"is; BF16 multiplies normal values. Errors are of the first {_CHECKED_ROWS} rows, "
            "against a float64 product of operands that MXFP4 holds exactly.",
        ),
    )
    for inner, outer in shapes:
        for product in _PRODUCTS:
            report(f"products: {inner}x{outer} {product}")
            shape = (inner, outer)
            rows = attempt(lambda s=shape, p=product: _rows(backends, s, tokens, p, plan))
            if isinstance(rows, str):
                rows = [{"shape": f"{inner}x{outer}", "product": product, "failed": rows}]
            group.rows += rows
    return group


def _rows(
    backends: Sequence[Backend], shape: tuple[int, int], tokens: int, product: str, plan: Plan
) -> list[dict[str, Any]]:
    """A row for each backend, all measured in turns."""
    sizes = {"x": (tokens, shape[0]), "w": shape, "g": (tokens, shape[1])}
    (a_size, a_axis), (b_size, b_axis) = [(sizes[name], axis) for name, axis in _PRODUCTS[product]]
    keys = [jax.random.split(key, 2) for key in jax.random.split(jax.random.key(3), 2)]
    exact = [(representable(a, a_size, a_axis), representable(b, b_size, b_axis)) for a, b in keys]
    contract = (a_axis, b_axis)
    xla = {
        "bf16": Work(
            bf16_gemm, [(normal(a, a_size), normal(b, b_size), contract) for a, b in keys]
        ),
        "fp8": Work(fp8_gemm, [(to_fp8(a, a_axis), to_fp8(b, b_axis)) for a, b in exact]),
    }
    ours = [
        attempt(lambda backend=backend: _ours(backend, exact, contract)) for backend in backends
    ]
    timings = measure([*xla.values(), *ours], plan)
    flops = 2 * tokens * shape[0] * shape[1]
    rates = {
        name: flops / timing.seconds
        for name, timing in zip(xla, timings, strict=False)
        if isinstance(timing, Timing)
    }
    failed = [timing for timing in timings[: len(xla)] if isinstance(timing, str)]
    reference = _reference(*exact[0], contract)
    bf16_error = _error(bf16_gemm(*exact[0], contract), reference)
    rows = []
    for backend, work, timing in zip(backends, ours, timings[len(xla) :], strict=True):
        row: dict[str, Any] = {"shape": f"{shape[0]}x{shape[1]}", "product": product}
        row |= {"backend": backend.name, **rates, "bf16_error": bf16_error}
        if isinstance(timing, Timing) and isinstance(work, Work):
            rate = flops / timing.seconds
            row |= {"ours": rate, "seconds": timing.seconds, "spread": timing.spread}
            row |= {f"to_{name}": rate / other for name, other in rates.items()}
            out = work.function(*work.inputs[0])
            row["relative_error"] = _error(out, reference)
        failures = [*failed, timing] if isinstance(timing, str) else failed
        if failures:
            row["failed"] = "; ".join(failures)
        rows.append(row)
    return rows


def _ours(
    backend: Backend, pairs: Sequence[tuple[Array, Array]], contract: tuple[int, int]
) -> Work:
    """The backend's product of carriers made beforehand."""

    @functools.partial(jax.jit, static_argnums=1)
    def prepare(x: Array, axis: int) -> Any:
        (encoded,) = backend.encode(x, (Request(axis, Quantizer()),))
        return backend.carrier(encoded)

    @jax.jit
    def multiply(a: Any, b: Any) -> Array:
        return backend.multiply(a, b, jnp.bfloat16)

    carriers = [
        tuple(prepare(x, axis) for x, axis in zip(pair, contract, strict=True)) for pair in pairs
    ]
    return Work(multiply, carriers)


def _reference(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The first rows of the product, in float64."""
    with jax.enable_x64(True):
        a = lax.slice_in_dim(
            a, 0, min(_CHECKED_ROWS, a.shape[1 - contract[0]]), axis=1 - contract[0]
        )
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a.astype(jnp.float64), b.astype(jnp.float64), dims)


def _error(out: Float[Array, "M N"], reference: Array) -> float:
    """Relative to the reference, in the Frobenius norm."""
    with jax.enable_x64(True):
        difference = out[: reference.shape[0]].astype(jnp.float64) - reference
        return float(jnp.linalg.norm(difference) / jnp.linalg.norm(reference))
