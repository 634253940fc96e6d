"""How fast a backend encodes and decodes, against the device's copy."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from adahop_jax.backends import Backend, Quantizer, Request
from train.bench.ceilings import Ceilings
from train.bench.inputs import normal
from train.bench.report import MICROSECONDS, PERCENT, Column, Group, fixed, significant
from train.bench.timing import Plan, Timing, Work, attempt, measure

_PACKED_BYTES = 17 / 32
_THREADS = 8


def measure_quantizers(
    backends: Sequence[Backend],
    tokens: int,
    width: int,
    ceilings: Ceilings,
    plan: Plan,
    report: Callable[[str], None],
) -> Group:
    """Times every way to encode a bfloat16 [tokens, width], and to decode it."""
    group = Group(
        "quantizers",
        f"Quantizers on bfloat16 [{tokens}, {width}]",
        (
            Column("backend", "backend"),
            Column("operation", "operation"),
            Column("hadamard", "Hadamard"),
            Column("seconds", "µs", MICROSECONDS),
            Column("bytes_per_value", "B/value", fixed(2)),
            Column("bytes_per_second", "GB/s", significant(1e-9)),
            Column("of_copy", "of copy", PERCENT),
            Column("spread", "spread", PERCENT),
            Column("near_host", "", lambda near: "near host" if near else ""),
        ),
        notes=(
            "Bytes are those that the operation must move: 2 read a value, 17/32 written an axis "
            "(packed) or what the working form holds; decoding reads 17/32 and writes a carrier. "
            "Near host: shorter than two queued calls, so that the host may be what was measured.",
        ),
    )
    inputs = [(normal(key, (tokens, width)),) for key in jax.random.split(jax.random.key(2), 2)]
    for backend in backends:
        report(f"quantizers of {backend.name}: compiling")
        for row, work in _prepare(_rows(backend, inputs[0][0]), inputs):
            (timing,) = measure([work], plan)
            cells: dict[str, Any] = {"backend": backend.name, "operation": row.operation}
            cells["hadamard"] = "" if row.block_size is None else str(row.block_size)
            if isinstance(timing, Timing):
                moved = _bytes_per_value(row, inputs[0][0])
                rate = moved * tokens * width / timing.seconds
                cells |= {"seconds": timing.seconds, "spread": timing.spread}
                cells |= {"bytes_per_value": moved, "bytes_per_second": rate}
                cells["of_copy"] = rate / ceilings.copy if ceilings.copy else None
                cells["near_host"] = timing.seconds < 2 * (ceilings.call or 0)
            else:
                cells["failed"] = timing
            group.rows.append(cells)
    return group


@dataclasses.dataclass(frozen=True)
class _Row:
    """One operation; `encode` makes its input where that is no plain matrix."""

    operation: str
    block_size: int | None
    requests: tuple[Request, ...]
    program: Callable[..., tuple[Any, ...]]
    encode: Callable[..., tuple[Any, ...]] | None = None


def _rows(backend: Backend, x: jax.Array) -> list[_Row]:
    rows = []
    for block_size in (None, 32):
        quantizer = Quantizer("floor", "nearest", block_size)
        last, first = (Request(axis, quantizer, packed=True) for axis in (1, 0))
        working = Request(1, quantizer)
        operations = {
            "encode last axis": (last,),
            "encode first axis": (first,),
            "encode both axes": (last, first),
        }
        if not _same_form(backend, x, working, last):
            # What a layer asks of its input: one form to multiply now, one to keep.
            operations["encode last (working) + first"] = (working, first)
        for operation, requests in operations.items():
            program = functools.partial(backend.encode, requests=requests)
            rows.append(_Row(operation, block_size, requests, program))
    for name, axis in (("last", 1), ("first", 0)):
        requests = (Request(axis, Quantizer(), packed=True),)
        encode = functools.partial(backend.encode, requests=requests)
        decode = functools.partial(_decode, backend)
        rows.append(_Row(f"decode {name} axis", None, requests, decode, encode))
    return rows


def _same_form(backend: Backend, x: jax.Array, *requests: Request) -> bool:
    """Whether a backend makes the same of all these; also where it makes nothing at all."""
    forms = attempt(
        lambda: [
            jax.tree.flatten(jax.eval_shape(lambda x, r=r: backend.encode(x, (r,)), x))
            for r in requests
        ]
    )
    return isinstance(forms, str) or all(form == forms[0] for form in forms)


def _decode(backend: Backend, encoded: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(backend.carrier(one) for one in encoded)


def _prepare(
    rows: Sequence[_Row], inputs: Sequence[tuple[jax.Array]]
) -> list[tuple[_Row, Work | str]]:
    """Compiles all rows at once: XLA takes seconds for each of its own quantizers."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        # Lowered one after the other: a backend's own compiler need not stand several threads.
        jobs = [attempt(lambda row=row: _submit(pool, row, inputs)) for row in rows]
        return [
            (row, job if isinstance(job, str) else attempt(job))
            for row, job in zip(rows, jobs, strict=True)
        ]


def _submit(
    pool: concurrent.futures.Executor, row: _Row, inputs: Sequence[tuple[jax.Array]]
) -> Callable[[], Work]:
    """Starts to compile; what it returns waits for the end."""
    if row.encode is None:
        program = pool.submit(jax.jit(row.program).lower(*inputs[0]).compile)
        return lambda: Work(program.result(), inputs)
    encode = pool.submit(jax.jit(row.encode).lower(*inputs[0]).compile)
    encoded = jax.eval_shape(row.encode, *inputs[0])
    decode = pool.submit(jax.jit(row.program).lower(encoded).compile)
    return lambda: Work(decode.result(), [(encode.result()(*one),) for one in inputs])


def _bytes_per_value(row: _Row, x: jax.Array) -> float:
    """What an operation has to move, for each value of the matrix."""
    if row.encode is not None:
        carriers = jax.eval_shape(row.program, jax.eval_shape(row.encode, x))
        return _PACKED_BYTES + _nbytes(carriers) / x.size
    outputs = jax.eval_shape(row.program, x)
    return x.dtype.itemsize + sum(
        _PACKED_BYTES if request.packed else _nbytes(output) / x.size
        for request, output in zip(row.requests, outputs, strict=True)
    )


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
