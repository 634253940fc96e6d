"""Every operation is timed, and counted with the bytes that it has to move."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from jaxtyping import Array

from adahop_jax.backends import Request, choose_backend
from train.bench.ceilings import Ceilings
from train.bench.quantizers import measure_quantizers
from train.bench.timing import Plan

pytestmark = pytest.mark.usefixtures("hardly_compiled")
XLA = choose_backend("xla")[0]


class Picky(type(XLA)):
    """XLA's operations, but along the last axis alone, and in 4 bits always."""

    name = "picky"

    def encode(self, x: Array, requests: Sequence[Request]) -> tuple[Any, ...]:
        if any(request.axis == 0 for request in requests):
            raise NotImplementedError("axis 0")
        return super().encode(x, [dataclasses.replace(r, packed=True) for r in requests])


def test_bytes_and_rates(plan: Plan, ceilings: Ceilings) -> None:
    said: list[str] = []
    group = measure_quantizers([XLA], 64, 96, ceilings, plan, said.append)
    assert not group.failed and said == ["quantizers of xla: compiling"]
    moved = {(row["operation"], row["hadamard"]): row["bytes_per_value"] for row in group.rows}
    packed, bf16 = 17 / 32, 2
    for hadamard in ("", "32"):
        assert moved.pop(("encode last axis", hadamard)) == 2 + packed
        assert moved.pop(("encode first axis", hadamard)) == 2 + packed
        assert moved.pop(("encode both axes", hadamard)) == 2 + 2 * packed
        working = ("encode last (working) + first", hadamard)
        assert moved.pop(working) == 2 + bf16 + packed
    assert moved.pop(("decode last axis", "")) == packed + bf16
    assert moved.pop(("decode first axis", "")) == packed + bf16
    assert not moved
    for row in group.rows:
        rate = row["bytes_per_value"] * 64 * 96 / row["seconds"]
        assert row["bytes_per_second"] == rate and row["of_copy"] == rate / 1e12


def test_rows_that_the_host_may_limit(plan: Plan, ceilings: Ceilings) -> None:
    slow_host = Ceilings(copy=None, fp8=None, call=1e3)
    for found, near in ((ceilings, False), (slow_host, True)):
        group = measure_quantizers([XLA], 32, 32, found, plan, lambda text: None)
        assert {row["near_host"] for row in group.rows} == {near}
    assert {row["of_copy"] for row in group.rows} == {None}


def test_a_backend_that_fails_loses_its_rows_alone(plan: Plan, ceilings: Ceilings) -> None:
    group = measure_quantizers([Picky(), XLA], 32, 32, ceilings, plan, lambda text: None)
    failed = {(row["backend"], row["operation"]) for row in group.rows if row.get("failed")}
    operations = ("encode first axis", "encode both axes", "decode first axis")
    assert failed == {("picky", operation) for operation in operations}
    # Its working form is the packed one, so that there is no row for it.
    assert len([row for row in group.rows if row["backend"] == "picky"]) == 8
    assert len([row for row in group.rows if row["backend"] == "xla"]) == 10
