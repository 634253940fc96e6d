"""Recipes: names, the table that each starts with, and what is refused."""

import dataclasses

import jax
import pytest

from adahop_jax import (
    RECIPE_NAMES,
    Level,
    MatmulStrategies,
    OperandFormat,
    Recipe,
    Strategy,
    StrategyTable,
)
from adahop_jax.backends import Quantizer

STOCHASTIC = OperandFormat("rceil", "stochastic")

# name: (level, strategy of the first table)
NAMES = {
    "bf16": (None, "bf16"),
    "mxfp4": (None, "plain"),
    "mxfp4-iht": (None, "iht"),
    "adahop-lv1": (Level.LV1, "bf16"),
    "adahop-lv2": (Level.LV2, "bf16"),
}


def test_every_name() -> None:
    assert set(RECIPE_NAMES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_level_and_first_table(name: str) -> None:
    recipe = Recipe.named(name)
    level, strategy = NAMES[name]
    assert recipe.level is level
    table = recipe.initial_table()
    assert table == StrategyTable.uniform(MatmulStrategies.uniform(strategy))
    assert table.default is not None
    assert not recipe.needs_key
    # Calibration in MXFP4 is plain; a uniform policy has no calibration.
    other = Recipe.named(name, calibration_precision="mxfp4").initial_table()
    assert other == (table if level is None else StrategyTable.uniform("plain"))


def test_defaults_are_the_published_method() -> None:
    recipe = Recipe()
    assert recipe == Recipe.named("adahop-lv2")
    assert recipe.activation == recipe.weight == recipe.gradient == OperandFormat()
    assert OperandFormat() == OperandFormat("floor", "nearest")
    assert (recipe.block_size, recipe.k, recipe.signs) == (32, 64, "none")
    assert (recipe.calibration_steps, recipe.calibration_precision) == (30, "bf16")
    assert (recipe.classifier, recipe.backend) == ("published", "auto")


def test_changes() -> None:
    recipe = Recipe.named("mxfp4-iht", k=8, gradient=STOCHASTIC)
    assert (recipe.policy, recipe.k, recipe.gradient) == ("iht", 8, STOCHASTIC)
    assert recipe.activation == OperandFormat()
    with pytest.raises(TypeError, match="recipe field is 'kk', but must be one of policy, "):
        Recipe.named("mxfp4-iht", kk=8)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("adahop_lv2", r" \(did you mean adahop-lv2\?\)"), ("mxfp", r" \(did you mean mxfp4\?\)")],
)
def test_unknown_name(name: str, hint: str) -> None:
    known = ", ".join(RECIPE_NAMES)
    with pytest.raises(ValueError, match=f"recipe is '{name}', but must be one of {known}{hint}"):
        Recipe.named(name)


def test_a_name_without_a_close_one() -> None:
    with pytest.raises(ValueError, match=r"recipe is 'zzz', but must be one of [^()]*\.$"):
        Recipe.named("zzz")


def test_needs_key() -> None:
    assert Recipe(signs="random").needs_key
    for operand in ("activation", "weight", "gradient"):
        assert dataclasses.replace(Recipe(), **{operand: STOCHASTIC}).needs_key
        assert not dataclasses.replace(Recipe(), **{operand: OperandFormat("rceil")}).needs_key


def test_quantizer_of_an_operand() -> None:
    recipe = Recipe(
        activation=OperandFormat("mse"),
        weight=OperandFormat("even"),
        gradient=STOCHASTIC,
        block_size=64,
    )
    for strategy in Strategy:
        n = None if strategy in ("plain", "bf16") else 64
        assert recipe.quantizer("activation", strategy) == Quantizer("mse", "nearest", n)
        assert recipe.quantizer("weight", strategy) == Quantizer("even", "nearest", n)
        assert recipe.quantizer("gradient", strategy) == Quantizer("rceil", "stochastic", n)


def test_static_value() -> None:
    recipe = Recipe(k=3, gradient=STOCHASTIC)
    assert recipe == Recipe(k=3, gradient=OperandFormat("rceil", "stochastic"))
    assert hash(recipe) == hash(Recipe(k=3, gradient=STOCHASTIC))
    assert recipe != Recipe(k=4, gradient=STOCHASTIC)
    assert jax.tree.leaves(recipe) == []
    with pytest.raises(AttributeError):
        recipe.k = 4  # pyright: ignore[reportAttributeAccessIssue]
    traces = []
    step = jax.jit(lambda recipe, x: traces.append(recipe) or x)
    for k in (3, 3, 4, 3):
        step(Recipe(k=k), 1.0)
    assert [recipe.k for recipe in traces] == [3, 4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"policy": "lv3"}, "policy is 'lv3', but must be one of bf16, plain, iht, lv1, lv2"),
        ({"signs": True}, "signs is True, but must be one of none, random"),
        ({"classifier": "best"}, "classifier is 'best', but must be one of published, robust"),
        (
            {"calibration_precision": "fp8"},
            "calibration_precision is 'fp8', but must be one of bf16, mxfp4",
        ),
        ({"block_size": 31}, "block_size is 31, but must be one of 16, 32, 64, 128"),
        ({"k": -1}, "k is -1, but must be an integer of at least 0"),
        ({"k": 2.5}, "k is 2.5, but must be an integer of at least 0"),
        ({"calibration_steps": 0}, "calibration_steps is 0, but must be an integer of at least 1"),
        ({"backend": "cuda"}, "backend is 'cuda', but must be one of auto, xla"),
    ],
)
def test_bad_fields(arguments, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Recipe(**arguments)
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(Recipe(), **arguments)


@pytest.mark.parametrize("operand", ["activation", "weight", "gradient"])
def test_formats_are_operand_formats(operand: str) -> None:
    with pytest.raises(TypeError, match=f"{operand} is 'floor', but must be an OperandFormat"):
        Recipe(**{operand: "floor"})


@pytest.mark.parametrize(
    ("scale_rule", "rounding", "sentence"),
    [
        ("round", "nearest", "scale_rule is 'round', but must be one of floor, even, ceil"),
        ("floor", "up", "rounding is 'up', but must be 'nearest' or 'stochastic'"),
        ("floor", "stochastic", "scale_rule is 'floor'.*biased; use ceil or rceil"),
        ("even", "stochastic", "scale_rule is 'even'.*biased; use ceil or rceil"),
        ("mse", "stochastic", "scale_rule is 'mse'.*biased; use ceil or rceil"),
    ],
)
def test_bad_formats(scale_rule, rounding, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        OperandFormat(scale_rule, rounding)


@pytest.mark.parametrize("scale_rule", ["ceil", "rceil"])
def test_stochastic_formats(scale_rule) -> None:
    assert OperandFormat(scale_rule, "stochastic").rounding == "stochastic"
