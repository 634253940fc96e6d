"""The optimizer of pre-training: clipped AdamW under warm-up and cosine decay."""

import dataclasses
import math

import jax
import optax
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
      learning_rate: the peak, reached at step `warmup_steps`.
      warmup_steps: steps of linear rise from zero; 0 starts at the peak.
      steps: length of the run; the schedule ends there.
      final_fraction: of the peak, left at the end.
      weight_decay: of matrices, times the learning rate (decoupled, arXiv 1711.05101).
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root of the latter.
      clip_norm: largest global norm of a gradient; longer ones are scaled down to it.
    """

    learning_rate: float
    steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """Checks the configuration.

        Raises:
          ValueError: for a value outside its range.
        """
        checks = {
            "learning_rate": (0 < self.learning_rate < math.inf, "must be positive and finite"),
            "steps": (
                isinstance(self.steps, int) and self.steps >= 1,
                "must be an int of at least 1",
            ),
            "warmup_steps": (
                isinstance(self.warmup_steps, int) and 0 <= self.warmup_steps < self.steps,
                f"must be an int of at least 0 and below steps ({self.steps})",
            ),
            "final_fraction": (0 <= self.final_fraction <= 1, "must be between 0 and 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "must be finite and not negative"),
            "b1": (0 <= self.b1 < 1, "must be at least 0 and below 1"),
            "b2": (0 <= self.b2 < 1, "must be at least 0 and below 1"),
            "eps": (0 < self.eps < math.inf, "must be positive and finite"),
            "clip_norm": (self.clip_norm > 0, "must be positive; inf never clips"),
        }
        for name, (valid, demand) in checks.items():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}, but {demand}.")


def make_optimizer(config: OptimizerConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds the optimizer of a run.

    A gradient is clipped by its global norm, then goes through AdamW. Its states have the dtype of
    the parameters, so float32 master weights have float32 states.

    Args:
      config: of the optimizer.

    Returns:
      The optax transformation, and the schedule it follows: the learning rate of the update number
      `step`, counted from 0. It rises linearly from 0 at step 0 to the peak at step `warmup_steps`,
      falls along half a cosine to `final_fraction * learning_rate` at step `steps`, and stays there
      (arXiv 1608.03983).
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_fraction * config.learning_rate,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            config.b1,
            config.b2,
            config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
    return optimizer, schedule


def decay_mask(params: PyTree) -> PyTree:
    """Tells which parameters decay: the kernels of linear layers.

    Norm scales do not, since shrinking them only rescales what follows; nor does an embedding,
    whose rare rows would decay at every step and learn at few.

    Args:
      params: a Flax parameter tree.

    Returns:
      A tree of bools of the same structure.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "kernel", params
    )
