"""What the device can do at all: copies and large products, measured in the run that uses them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from train.bench.inputs import bf16_gemm, fp8_gemm, normal, representable, to_fp8
from train.bench.report import PERCENT, Column, Group, significant
from train.bench.timing import Plan, Timing, Work, measure

_LONGER = 5


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates that a measurement is held against; None where they could not be measured.

    Attributes:
      copy: bytes a second, read and written ones counted.
      fp8: floating-point operations a second of an FP8 product.
      call: seconds that the host takes to queue a call.
    """

    copy: float | None
    fp8: float | None
    call: float | None


def measure_ceilings(copies: tuple[int, ...], size: int, plan: Plan) -> tuple[Group, Ceilings]:
    """Measures copies of arrays of so many bytes, and products of matrices of this size."""
    # Longer runs than elsewhere: what counts is what the device sustains.
    plan = dataclasses.replace(plan, seconds=plan.seconds * _LONGER)
    group = Group(
        "ceilings",
        "Ceilings of this device",
        (
            Column("what", "what"),
            Column("seconds", "ms", lambda s: f"{s * 1e3:.4f}"),
            Column("rate", "rate"),
            Column("spread", "spread", PERCENT),
        ),
    )
    found: dict[str, float] = {}

    def record(what: str, outcome: Timing | str, amount: float, unit: float, name: str) -> None:
        row: dict[str, Any] = {"what": what}
        if isinstance(outcome, str):
            row["failed"] = outcome
        else:
            rate = amount / outcome.seconds
            found[what] = rate
            row |= {"seconds": outcome.seconds, "spread": outcome.spread, "per_second": rate}
            row["rate"] = f"{significant(1 / unit)(rate)} {name}" if unit else ""
        group.rows.append(row)

    keys = jax.random.split(jax.random.key(0), 2)
    arrays: list[tuple[jax.Array]] = []
    for size_bytes in copies:
        arrays = [(normal(key, (size_bytes // 2,)),) for key in keys]
        (outcome,) = measure([Work(_negate, arrays)], plan)
        record(f"copy {_bytes(size_bytes)}", outcome, 2 * size_bytes, 1e12, "TB/s")
    arrays = []
    outcomes = measure(_products(size), plan)
    for what, outcome in zip(("BF16", "FP8", "FP8 of MXFP4 values"), outcomes, strict=True):
        record(f"{what} product {size}^3", outcome, 2 * size**3, 1e12, "TFLOP/s")
    (outcome,) = measure([Work(_negate, [(jnp.zeros(8, jnp.bfloat16),)])], plan)
    record("one queued call (host)", outcome, 1, 0, "")
    call = found.pop("one queued call (host)", None)
    return group, Ceilings(
        copy=max((rate for what, rate in found.items() if "copy" in what), default=None),
        fp8=max((rate for what, rate in found.items() if "FP8" in what), default=None),
        call=None if call is None else 1 / call,
    )


def _products(size: int) -> list[Work]:
    shape = (size, size)
    keys = [jax.random.split(key, 2) for key in jax.random.split(jax.random.key(1), 2)]
    bf16 = [(normal(a, shape), normal(b, shape), (1, 1)) for a, b in keys]
    exact = [tuple(to_fp8(representable(key, shape, 1), 1) for key in pair) for pair in keys]
    return [
        Work(bf16_gemm, bf16),
        Work(fp8_gemm, [(to_fp8(a, 1), to_fp8(b, 1)) for a, b, _ in bf16]),
        Work(fp8_gemm, exact),
    ]


@jax.jit
def _negate(x: jax.Array) -> jax.Array:
    """A copy that XLA cannot leave out."""
    return -x


def _bytes(count: int) -> str:
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 1e6:.3g} MB"
