"""Rates and errors of products, and a backend that multiplies wrongly shows."""

from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array

from adahop_jax.backends import choose_backend
from train.bench import products
from train.bench.products import measure_products
from train.bench.timing import Plan

pytestmark = pytest.mark.usefixtures("hardly_compiled")
XLA = choose_backend("xla")[0]


class Wrong(type(XLA)):
    """XLA's operations, made worse."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor

    def multiply(self, a: Any, b: Any, dtype: Any) -> Array:
        if not self.factor:
            raise NotImplementedError("no product")
        return (super().multiply(a, b, jnp.float32) * self.factor).astype(dtype)


def test_rates_and_errors(plan: Plan) -> None:
    group = measure_products([XLA], [(64, 96), (40, 33)], 70, plan, lambda text: None)
    assert not group.failed
    assert [(row["shape"], row["product"]) for row in group.rows] == [
        (shape, product) for shape in ("64x96", "40x33") for product in ("y", "gx", "gw")
    ]
    for row, flops in zip(group.rows, [2 * 70 * 64 * 96] * 3 + [2 * 70 * 40 * 33] * 3, strict=True):
        assert row["ours"] == flops / row["seconds"]
        assert row["to_bf16"] == row["ours"] / row["bf16"]
        assert row["to_fp8"] == row["ours"] / row["fp8"]
        # One rounding to bfloat16: at most 2^-9, about 2^-9.2 in the norm.
        assert 1e-3 < row["relative_error"] < 2**-9
        assert 1e-3 < row["bf16_error"] < 2**-9


def test_a_wrong_product_shows(plan: Plan) -> None:
    backends = [Wrong("wrong", 1.01), XLA, Wrong("broken", 0)]
    group = measure_products(backends, [(64, 32)], 32, plan, lambda text: None)
    by_name = {row["backend"]: row for row in group.rows if row["product"] == "gw"}
    assert by_name["wrong"]["relative_error"] == pytest.approx(0.01, rel=0.1)
    assert by_name["xla"]["relative_error"] < 2**-9
    assert by_name["broken"]["failed"] == "NotImplementedError: no product"
    assert "relative_error" not in by_name["broken"] and by_name["broken"]["bf16"] > 0


def test_a_missing_reference_is_said(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fp8(a: Array, b: Array) -> Array:
        raise NotImplementedError("no FP8 here")

    monkeypatch.setattr(products, "fp8_gemm", no_fp8)
    group = measure_products([XLA], [(32, 32)], 32, plan, lambda text: None)
    for row in group.rows:
        assert row["failed"] == "NotImplementedError: no FP8 here"
        assert row["to_bf16"] > 0 and "to_fp8" not in row


def test_a_shape_without_room_leaves_the_others(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = products.normal

    def small(key: Array, shape: tuple[int, ...]) -> Array:
        if 64 in shape:
            raise MemoryError("no room")
        return normal(key, shape)

    monkeypatch.setattr(products, "normal", small)
    group = measure_products([XLA], [(64, 32), (32, 32)], 32, plan, lambda text: None)
    assert [row.get("failed") for row in group.rows] == ["MemoryError: no room"] * 3 + [None] * 3
