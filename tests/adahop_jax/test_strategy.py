"""Strategies and their table: the published choices, values without arrays, JSON."""

import copy
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adahop_jax import Level, MatmulStrategies, Pattern, Strategy, StrategyTable
from adahop_jax.strategy import DEFAULT_K, strategy_for

# The published table, A's pattern in rows and B's in columns; `*` is where the levels differ.
PUBLISHED = """
      row  none         col
row   iht  iht_oe_left  iht_oe_right
none  iht  iht          iht_oe_right
col   iht  iht          *
"""
OPPOSITE = {"row": "col", "col": "row", "none": "none"}
IHT = MatmulStrategies.uniform("iht")
LEFT = MatmulStrategies("iht_oe_left", "plain", "bf16", k=8)


def published(a: str, b: str, level: int) -> str:
    header, *lines = (line.split() for line in PUBLISHED.strip().splitlines())
    cell = {line[0]: dict(zip(header, line[1:], strict=True)) for line in lines}[a][b]
    return cell.replace("*", {1: "iht_oe_right", 2: "bf16"}[level])


# --- the published choices ---


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("a", "b"), list(itertools.product(Pattern, repeat=2)))
def test_strategy_of_a_pair(a: Pattern, b: Pattern, level: int) -> None:
    want = published(a, b, level)
    assert strategy_for(a, b, level) is Strategy(want)
    assert strategy_for(a, b, Level(level)) is Strategy(want)
    if level == 2:
        assert strategy_for(a, b) is Strategy(want)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("x", "w", "g"), list(itertools.product(Pattern, repeat=3)))
def test_strategies_of_a_layer(x: Pattern, w: Pattern, g: Pattern, level: int) -> None:
    """y = x W^T, gx = g W, gw = g^T x: a transposed operand has the opposite pattern."""
    got = MatmulStrategies.from_patterns(x, w, g, level, k=5)
    want = {
        "y": published(x, OPPOSITE[w], level),
        "gx": published(g, w, level),
        "gw": published(OPPOSITE[g], x, level),
    }
    assert {name: str(strategy) for name, strategy, _ in got.items()} == want
    assert got.k == tuple(5 if "oe" in strategy else 0 for strategy in want.values())
    if level == 2:
        assert MatmulStrategies.from_patterns(x, w, g, k=5) == got


@pytest.mark.parametrize(
    ("x", "w", "g", "y", "gx", "gw"),
    [
        # Typical of the literature: channels in x, tokens in g, nothing in W.
        ("col", "none", "row", "iht", "iht_oe_left", "bf16"),
        ("none", "none", "none", "iht", "iht", "iht"),
        # Outliers in one tensor only, which a swap of sides or transposes would misplace.
        ("row", "none", "none", "iht_oe_left", "iht", "iht"),
        ("none", "row", "none", "iht_oe_right", "iht", "iht"),
        ("none", "col", "none", "iht", "iht_oe_right", "iht"),
        ("none", "none", "row", "iht", "iht_oe_left", "iht"),
        ("none", "none", "col", "iht", "iht", "iht_oe_left"),
        ("col", "none", "none", "iht", "iht", "iht_oe_right"),
    ],
)
def test_layers_written_out(x, w, g, y, gx, gw) -> None:
    got = MatmulStrategies.from_patterns(Pattern(x), Pattern(w), Pattern(g))
    assert (got.y, got.gx, got.gw) == (y, gx, gw)


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match="3"):
        strategy_for(Pattern.ROW, Pattern.NONE, 3)


# --- one strategy ---


def test_properties() -> None:
    assert [str(s) for s in Strategy if s.extracts] == [
        "iht_oe_left",
        "iht_oe_right",
        "iht_oe_inner",
    ]
    assert [str(s) for s in Strategy if not s.transforms] == ["plain", "bf16"]
    assert Strategy.IHT_OE_LEFT.mirrored is Strategy.IHT_OE_RIGHT
    for strategy in Strategy:
        assert strategy.mirrored.mirrored is strategy
        assert (strategy.mirrored is strategy) == (strategy not in ("iht_oe_left", "iht_oe_right"))


# --- the strategies of one layer ---


def test_names_become_strategies_and_k_three_numbers() -> None:
    assert LEFT.y is Strategy.IHT_OE_LEFT
    assert LEFT.k == (8, 0, 0)
    assert MatmulStrategies("iht_oe_left", "iht_oe_inner", "iht_oe_right").k == (DEFAULT_K,) * 3
    each = MatmulStrategies("iht_oe_left", "iht", "iht_oe_right", k=(1, 2, 3))
    assert each.k == (1, 0, 3)
    assert list(each.items()) == [
        ("y", Strategy.IHT_OE_LEFT, 1),
        ("gx", Strategy.IHT, 0),
        ("gw", Strategy.IHT_OE_RIGHT, 3),
    ]


def test_layers_compare_by_value() -> None:
    """An unused k makes no difference, so that it costs no retrace either."""
    assert MatmulStrategies("iht", "iht", "bf16", k=3) == MatmulStrategies("iht", "iht", "bf16")
    assert MatmulStrategies(*["iht_oe_left"] * 3, k=3) != MatmulStrategies(*["iht_oe_left"] * 3)
    assert hash(MatmulStrategies(Strategy.IHT, "iht", "iht", k=9)) == hash(IHT)
    assert MatmulStrategies("iht", "plain", "iht") != MatmulStrategies("plain", "iht", "iht")
    with pytest.raises(AttributeError):
        IHT.y = Strategy.BF16  # pyright: ignore[reportAttributeAccessIssue]


def test_all_bf16() -> None:
    assert MatmulStrategies.uniform("bf16").all_bf16
    assert not MatmulStrategies("bf16", "bf16", "iht").all_bf16
    assert not IHT.all_bf16


@pytest.mark.parametrize("k", [-1, 1.5, "8", (1, 2), (1, 2, -3), (1, 2, 3, 4), None])
def test_bad_k(k) -> None:
    with pytest.raises((ValueError, TypeError)):
        MatmulStrategies("iht_oe_left", "iht_oe_left", "iht_oe_left", k=k)


@pytest.mark.parametrize("k", [-1, (1, 2), (1, 2, -3)])
def test_bad_k_is_named(k) -> None:
    with pytest.raises(
        ValueError, match=r"k is .*, but must be one or three non-negative integers"
    ):
        MatmulStrategies.uniform("iht", k=k)


@pytest.mark.parametrize("name", ["y", "gx", "gw"])
def test_unknown_strategies_are_named(name: str) -> None:
    names = {"y": "iht", "gx": "iht", "gw": "iht"} | {name: "iht_left"}
    known = ", ".join(Strategy)
    with pytest.raises(ValueError, match=f"{name} is 'iht_left', but must be one of {known}"):
        MatmulStrategies(**names)
    with pytest.raises(ValueError, match="strategy is 'lv2', but must be one of"):
        MatmulStrategies.uniform("lv2")


# --- the table as a map ---


def test_mapping() -> None:
    table = StrategyTable({"b": IHT, "a/x": LEFT})
    assert list(table) == ["a/x", "b"]
    assert len(table) == 2
    assert dict(table) == {"a/x": LEFT, "b": IHT}
    assert table.default is None
    assert "c" not in table
    assert table.get("c") is None
    assert StrategyTable({"b": IHT}, default=LEFT)["c"] == LEFT
    assert StrategyTable({"b": IHT}, default=LEFT)["b"] == IHT
    assert StrategyTable.uniform("plain")["any"] == MatmulStrategies.uniform("plain")
    assert StrategyTable.uniform(LEFT).default is LEFT
    assert bool(StrategyTable.uniform("plain"))  # no layers named, and yet a table


def test_unknown_paths_name_close_ones() -> None:
    table = StrategyTable({"block_0/mlp/up": IHT, "block_0/mlp/down": IHT, "head": IHT})
    with pytest.raises(KeyError, match=r"'block_0/mlp/upp' is not in the table \(close: block_0"):
        table["block_0/mlp/upp"]
    with pytest.raises(KeyError, match=r"'zzz' is not in the table\."):
        table["zzz"]


def test_immutable() -> None:
    layers = {"a": IHT}
    table = StrategyTable(layers)
    before = hash(table)
    layers["a"] = LEFT
    layers["b"] = LEFT
    assert table == StrategyTable({"a": IHT})
    assert hash(table) == before
    with pytest.raises(TypeError):
        table["a"] = LEFT  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError):
        del table["a"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(AttributeError):
        table.default = LEFT  # pyright: ignore[reportAttributeAccessIssue]


def test_tables_compare_by_value() -> None:
    one = StrategyTable({"a": IHT, "b": LEFT}, default=IHT)
    two = StrategyTable({"b": LEFT, "a": IHT}, default=IHT)
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one
    for other in (
        StrategyTable({"a": IHT, "b": LEFT}),
        StrategyTable({"a": IHT}, default=IHT),
        StrategyTable({"a": LEFT, "b": IHT}, default=IHT),
        StrategyTable({"a": IHT, "c": LEFT}, default=IHT),
        {"a": IHT, "b": LEFT},
    ):
        assert one != other


def test_entries_are_checked() -> None:
    with pytest.raises(TypeError, match=r"layers\['a'\] is 'iht', but must be a MatmulStrategies"):
        StrategyTable({"a": "iht"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"layers\[0\]"):
        StrategyTable({0: IHT})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="default is 'iht', but must be a MatmulStrategies or None"):
        StrategyTable(default="iht")  # pyright: ignore[reportArgumentType]


def test_resolve() -> None:
    table = StrategyTable({"a": IHT}, default=LEFT)
    assert table.resolve(["a", "b"]) == {"a": IHT, "b": LEFT}
    assert table.resolve({"b": None, "a": None}) == {"a": IHT, "b": LEFT}
    assert StrategyTable({"a": IHT}).resolve(["a"]) == {"a": IHT}
    with pytest.raises(ValueError, match=r"names 'up_prj', which the model lacks \(close: up_proj"):
        StrategyTable({"up_prj": IHT}).resolve(["up_proj", "x"])
    with pytest.raises(ValueError, match="names 'a', which the model lacks"):
        table.resolve(["b"])
    with pytest.raises(ValueError, match="the table lacks 'b'; add it, or give the table a def"):
        StrategyTable({"a": IHT}).resolve(["a", "b"])
    with pytest.raises(ValueError, match="the table lacks 'b' and 2 other layers of the model"):
        StrategyTable({"a": IHT}).resolve(["a", "b", "c", "d"])


# --- as pytrees ---


@pytest.mark.parametrize("value", [IHT, StrategyTable({"a": LEFT}), StrategyTable.uniform("iht")])
def test_no_leaves(value) -> None:
    assert jax.tree.leaves(value) == []
    assert jax.tree.map(lambda leaf: leaf, value) == value
    leaves, structure = jax.tree.flatten({"table": value, "step": 0})
    assert leaves == [0]
    assert jax.tree.unflatten(structure, [1])["table"] == value


def test_one_retrace_a_change() -> None:
    traces = []

    @jax.jit
    def step(table: StrategyTable, x: jax.Array) -> tuple[StrategyTable, jax.Array]:
        traces.append(table)
        return table, x + 1

    def table(strategy: str) -> StrategyTable:
        return StrategyTable({"a": IHT, "b": MatmulStrategies.uniform(strategy)})

    x = jnp.zeros(())
    for strategy, expected in [("iht", 1), ("iht", 1), ("bf16", 2), ("iht", 2), ("bf16", 2)]:
        out, x = step(table(strategy), x)
        assert len(traces) == expected
        assert out == table(strategy)
    step(StrategyTable.from_json(table("iht").to_json()), x)
    assert len(traces) == 2


def test_tables_pass_through_scan_and_grad() -> None:
    table = StrategyTable({"a": LEFT})

    def loss(x: jax.Array, state: dict) -> jax.Array:
        state, _ = jax.lax.scan(lambda state, _: (state, None), state, None, length=2)
        assert state["table"] == table
        return x * 2

    assert jax.grad(loss)(1.0, {"table": table, "n": jnp.ones(2)}) == 2.0


# --- JSON ---

LAYERS = st.builds(
    MatmulStrategies,
    *[st.sampled_from(Strategy)] * 3,
    k=st.one_of(st.integers(0, 999), st.tuples(*[st.integers(0, 999)] * 3)),
)


@given(st.dictionaries(st.text(), LAYERS, max_size=4), st.none() | LAYERS)
def test_json_round_trip(layers: dict, default: MatmulStrategies | None) -> None:
    table = StrategyTable(layers, default=default)
    text = table.to_json()
    again = StrategyTable.from_json(text)
    assert again == table
    assert hash(again) == hash(table)
    assert again.to_json() == text


def test_json_is_readable() -> None:
    text = StrategyTable({"block_0/up": LEFT}, default=IHT).to_json()
    assert json.loads(text) == {
        "format": "adahop-strategy-table",
        "version": 1,
        "default": {"y": "iht", "gx": "iht", "gw": "iht"},
        "layers": {
            "block_0/up": {
                "y": {"strategy": "iht_oe_left", "k": 8},
                "gx": "plain",
                "gw": "bf16",
            }
        },
    }
    assert "\n" in text


def document(**changes) -> str:
    whole = {
        "format": "adahop-strategy-table",
        "version": 1,
        "default": None,
        "layers": {"a/b": {"y": "iht", "gx": "iht", "gw": "iht_oe_left"}},
    }
    return json.dumps(whole | changes)


def test_json_by_hand() -> None:
    table = StrategyTable.from_json(document())
    assert table == StrategyTable({"a/b": MatmulStrategies("iht", "iht", "iht_oe_left")})
    assert table["a/b"].k == (0, 0, DEFAULT_K)


def layer(**changes) -> str:
    return document(layers={"a/b": {"y": "iht", "gx": "iht", "gw": "iht"} | changes})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "the strategy table is not JSON"),
        ("[]", "the text is no strategy table"),
        (document(format="other"), "the text is no strategy table"),
        (document(version=2), "the strategy table has version 2, but must be 1"),
        (document(layers=[]), r"layers is \[\], but must be an object"),
        (layer(y="iht_left"), "a/b.y is 'iht_left', but must be one of plain, iht"),
        (layer(gx={"k": 3}), "a/b.gx is None, but must be one of"),
        (layer(extra="iht"), "a/b is .*, but must be an object with y, gx and gw"),
        (document(layers={"a/b": "iht"}), "a/b is 'iht', but must be an object with y, gx and gw"),
        (document(default={"y": "iht"}), "default is .*, but must be an object with y, gx and gw"),
        (layer(gw={"strategy": "iht_oe_left", "k": -1}), "k is "),
        (layer(gw={"strategy": "iht_oe_left", "k": None}), "k is "),
        # Misspelt names, which would otherwise change nothing in silence.
        (document(layer={}), "layer"),
        (layer(gw={"strategy": "iht_oe_left", "K": 3}), "K"),
    ],
)
def test_bad_json(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StrategyTable.from_json(text)
