"""The README's code, run as it stands there."""

import pathlib
import re

import adahop_jax as adahop

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_trains_and_sets_its_table():
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    table = names["table"]
    assert isinstance(table, adahop.StrategyTable)
    assert set(table) == {"up", "down"}
    # One trace while votes are cast, and one with the table.
    assert names["train_step"]._cache_size() == 2
    before = names["loss_fn"](names["variables"]["params"], names["probes"], None, names["x"])
    after = names["loss_fn"](names["params"], names["probes"], table, names["x"])
    assert after < 0.8 * before


def test_every_public_name_is_real_and_every_documented_name_is_public():
    for name in adahop.__all__:
        assert getattr(adahop, name).__doc__ or name.isupper()
    table = README.split("## What there is")[1].split("Recipes by name")[0]
    for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", row):
            assert name in adahop.__all__, name


def test_recipes_are_all_named():
    for name in adahop.RECIPE_NAMES:
        assert f"`{name}`" in README
