"""Layers under each strategy against BF16, with the floor that follows from the ceilings."""

from typing import Any

import numpy as np
import pytest

from adahop_jax import MatmulStrategies
from adahop_jax.backends import choose_backend
from train.bench import layers
from train.bench.ceilings import Ceilings
from train.bench.layers import layer_floor, measure_layers, parse_strategies
from train.bench.timing import Plan

pytestmark = pytest.mark.usefixtures("hardly_compiled")
XLA = choose_backend("xla")[0]


def measured(strategies: list[str], ceilings: Ceilings, plan: Plan) -> list[dict[str, Any]]:
    group = measure_layers([XLA], strategies, [(64, 32)], 96, 2, ceilings, plan, lambda text: None)
    return group.rows


def test_parse_strategies() -> None:
    assert parse_strategies("iht_oe_left", 3) == (
        "iht_oe_left",
        MatmulStrategies.uniform("iht_oe_left", 3),
    )
    mixed = "iht/bf16/iht_oe_inner"
    assert parse_strategies(mixed, 3) == (mixed, MatmulStrategies("iht", "bf16", "iht_oe_inner", 3))
    name, usual = parse_strategies("lv2", 3)
    assert usual == MatmulStrategies("iht", "iht", "iht_oe_right", 3)
    assert name == "lv2 (iht/iht/iht_oe_right)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iht/iht", "must be lv2, one strategy, or three"),
        ("ith", "y is 'ith', but must be one of plain, iht"),
    ],
)
def test_strategies_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strategies(text, 1)


def test_floor_is_three_products_and_one_pass() -> None:
    ceilings = Ceilings(copy=1e12, fp8=1e15, call=None)
    # 16384 x 4096 x 4096: 1.649e12 operations, and 3.0625 bytes of 1.51e8 values.
    assert layer_floor((4096, 4096), 16_384, ceilings) == pytest.approx(
        1.649e-3 + 0.4624e-3, rel=1e-3
    )
    assert layer_floor((4096, 4096), 16_384, Ceilings(None, 1e15, None)) is None
    assert layer_floor((4096, 4096), 16_384, Ceilings(1e12, None, None)) is None


def test_a_layer_is_its_three_products() -> None:
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((5, 4), (4, 3), (5, 3)))
    found = layers._layer(layers._bf16)(x, w, g)
    for output, expected in zip(found, (x @ w, g @ w.T, x.T @ g), strict=True):
        np.testing.assert_array_equal(output, expected)


def test_rows(ceilings: Ceilings, plan: Plan) -> None:
    rows = measured(["iht", "lv2", "bf16"], ceilings, plan)
    assert [row["strategies"] for row in rows] == [
        "iht",
        "lv2 (iht/iht/iht_oe_right)",
        "bf16",
    ]
    for row in rows:
        assert row["ratio"] == row["bf16"] / row["seconds"]
        assert row["gap"] == row["seconds"] / layer_floor((64, 32), 96, ceilings)
        assert "failed" not in row
    # Two operands in 4 bits; nothing at all where both sides run the same program.
    assert 0.05 < rows[0]["difference"] < 0.3
    assert rows[2]["difference"] == 0


def test_a_strategy_that_fails_loses_its_row_alone(
    ceilings: Ceilings, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    dot = layers.adahop.dot

    def picky(x: Any, w: Any, strategies: MatmulStrategies, **rest: Any) -> Any:
        if strategies.gx == "iht_oe_left":
            raise MemoryError("no room")
        return dot(x, w, strategies, **rest)

    monkeypatch.setattr(layers.adahop, "dot", picky)
    rows = measured(["iht", "iht_oe_left"], ceilings, plan)
    assert "failed" not in rows[0] and rows[1]["failed"] == "MemoryError: no room"
    assert rows[1]["bf16"] > 0 and "ratio" not in rows[1]


def test_a_shape_without_room_leaves_the_others(
    ceilings: Ceilings, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = layers.normal

    def small(key: Any, shape: tuple[int, ...]) -> Any:
        if 64 in shape:
            raise MemoryError("no room")
        return normal(key, shape)

    monkeypatch.setattr(layers, "normal", small)
    shapes = [(64, 32), (32, 32)]
    group = measure_layers([XLA], ["iht"], shapes, 32, 2, ceilings, plan, lambda text: None)
    assert [row.get("failed") for row in group.rows] == ["MemoryError: no room", None]
    assert [row["shape"] for row in group.rows] == ["64x32", "32x32"]
