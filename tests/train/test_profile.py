"""A profile is the calibration of a run, with what it found."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import adahop_jax as adahop
import train.profile
from train.data import Dataset, load_data
from train.display import Display
from train.options import TrainOptions
from train.profile import Profile, profile_model
from train.run import run_recipe
from train.step import StepMetrics, TrainState

LV2 = "adahop-lv2"
STEPS = 3
pytestmark = pytest.mark.usefixtures("hardly_compiled")


@pytest.fixture(scope="module")
def options(small_corpus: Path) -> TrainOptions:
    return TrainOptions(
        recipes=(LV2,),
        data=str(small_corpus),
        model="tiny",
        steps=STEPS,
        batch_size=2,
        accumulate=2,
        seq_len=16,
        warmup_steps=1,
        calibration_steps=STEPS,
        validation_batches=1,
    )


@pytest.fixture(scope="module")
def dataset(options: TrainOptions) -> Dataset:
    return load_data(options.data_config())


@pytest.fixture(scope="module")
def profile(options: TrainOptions, dataset: Dataset) -> Profile:
    return profile_model(options, LV2, dataset, Display(Console(file=io.StringIO())))


def test_every_micro_batch_votes_once_on_every_tensor(profile: Profile) -> None:
    assert len(profile.votes) == 7
    for votes in profile.votes.values():
        np.testing.assert_array_equal(np.sum(votes, axis=1), [2 * STEPS] * 3)


def test_patterns_are_those_with_most_votes(profile: Profile) -> None:
    assert profile.patterns.keys() == profile.votes.keys()
    names = ("row", "col", "none")
    for path, votes in profile.votes.items():
        assert list(profile.patterns[path]) == ["x", "w", "g"]
        for counts, pattern in zip(votes, profile.patterns[path].values(), strict=True):
            winners = [n for n, c in zip(names, counts, strict=True) if c == max(counts)]
            assert pattern == (winners[0] if len(winners) == 1 else "none")


def test_the_table_is_what_the_level_gives_for_the_patterns(profile: Profile) -> None:
    assert profile.table.keys() == profile.patterns.keys()
    for path, found in profile.patterns.items():
        # k is 1 for a width of 32.
        expected = adahop.MatmulStrategies.from_patterns(**found, level=2, k=1)
        assert profile.table[path] == expected


def test_a_run_calibrates_to_the_same_table(
    profile: Profile, options: TrainOptions, dataset: Dataset, tmp_path: Path
) -> None:
    """Same weights, same data, same steps."""
    given = dataclasses.replace(options, out=tmp_path)
    result = run_recipe(given, LV2, dataset, Display(Console(file=io.StringIO())))
    assert result.table == profile.table


def test_json_holds_all_of_it_and_is_a_table(profile: Profile) -> None:
    text = profile.to_json()
    assert adahop.StrategyTable.from_json(text) == profile.table
    data = json.loads(text)
    assert data["patterns"] == {path: dict(found) for path, found in profile.patterns.items()}
    assert data["votes"] == profile.votes


def test_the_steps_of_the_recipe_are_taken_and_no_more(
    options: TrainOptions, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []

    def step(state: TrainState, tokens: np.ndarray) -> tuple[TrainState, StepMetrics]:
        shapes.append(tokens.shape)
        votes = jax.tree.map(lambda leaf: leaf + 1, state.votes)
        return dataclasses.replace(state, votes=votes), StepMetrics(jnp.ones(()), jnp.ones(()))

    monkeypatch.setattr(train.profile, "make_train_step", lambda *_: step)
    given = dataclasses.replace(options, calibration_steps=2, accumulate=1)
    profile_model(given, LV2, dataset, Display(Console(file=io.StringIO())))
    assert shapes == [(1, 2, 17)] * 2
