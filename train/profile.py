"""Profiling a model: the calibration steps of a run, and what they found."""

import dataclasses
import json
from collections.abc import Mapping

import jax
import numpy as np

import adahop_jax as adahop
from train.data import Dataset
from train.display import Display
from train.optimizer import make_optimizer
from train.options import TrainOptions
from train.step import build_model, init_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Profile:
    """Patterns of a model's tensors.

    Attributes:
      table: the strategies that a recipe's level gives for them.
      patterns: {layer: {'x': pattern, 'w': pattern, 'g': pattern}}.
      votes: {layer: [3 tensors][3 counts]}, tensors x, w, g and patterns row, col, none.
    """

    table: adahop.StrategyTable
    patterns: Mapping[str, Mapping[str, adahop.Pattern]]
    votes: Mapping[str, list[list[float]]]

    def to_json(self) -> str:
        """A strategy table's JSON with the patterns and votes added."""
        data = json.loads(self.table.to_json())
        return json.dumps(data | {"patterns": self.patterns, "votes": self.votes}, indent=2)


def profile_model(
    options: TrainOptions, recipe_name: str, dataset: Dataset, display: Display
) -> Profile:
    """Trains a new model for the recipe's calibration steps and reads the votes."""
    recipe = options.recipe(recipe_name)
    model = build_model(options.model_config(dataset.vocab_size), recipe)
    optimizer, _ = make_optimizer(options.optimizer_config())
    state = init_state(model, optimizer, recipe, options.seed)
    step = make_train_step(model, optimizer, recipe)
    batches = dataset.train_iterator()
    tokens_per_step = options.accumulate * options.batch_size * options.seq_len
    with display.progress("profile", 0, recipe.calibration_steps) as progress:
        for _ in range(recipe.calibration_steps):
            tokens = np.stack([next(batches) for _ in range(options.accumulate)])
            with progress.step(tokens_per_step) as report:
                state, metrics = step(state, tokens)
                report(float(metrics.loss))
    return Profile(
        table=adahop.table_from_votes(state.votes, recipe),
        patterns=adahop.patterns_from_votes(state.votes),
        votes=jax.tree.map(
            lambda leaf: np.asarray(leaf).tolist(), adahop.votes_by_layer(state.votes)
        ),
    )
