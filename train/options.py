"""What a training run is told: one flat set of options, checked before any work begins."""

import dataclasses
import pathlib
from typing import Any

import adahop_jax as adahop
from train.attention import AttentionName, Implementation, choose_attention
from train.data import DataConfig
from train.llama import LlamaConfig
from train.optimizer import OptimizerConfig

# Options that may change between the start of a run and its continuation.
_FREE = ("out", "recipes", "evaluate_every", "checkpoint_every", "keep_checkpoints")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of `adahop train`.

    Attributes:
      recipes: precisions to train in, one run after another on the same data: bf16, mxfp4,
        mxfp4-iht, adahop-lv1, adahop-lv2.
      out: folder of the runs; each recipe gets a folder in it. A run found there is continued.
      data: text file or folder (.xz and .gz too); by default Python's own standard library sources.
      model: model shape: tiny, small, 85m, llama-3.2-1b or llama-3.1-8b.
      steps: optimizer steps.
      batch_size: sequences of a micro-batch.
      accumulate: micro-batches of a step.
      seq_len: tokens of a sequence.
      learning_rate: its peak.
      warmup_steps: steps of linear rise to it.
      weight_decay: of AdamW, on matrices.
      clip_norm: largest global norm of a gradient.
      seed: of weights and random rounding.
      data_seed: of the split into train, validation and test, and of the order of the data.
      tokenizer: 'byte', 'bpe' (trained on the training documents), or a tokenizer.json.
      vocab_size: of a trained BPE.
      max_bytes: use only so much of the shuffled documents.
      calibration_steps: steps that vote on the patterns, for adahop recipes.
      k: rows, columns or channels extracted, for adahop recipes; by default 1/32 of the model's
        width, at most 64 (the paper's 64 at a width of 2048).
      table: strategy table (JSON) to use instead of calibrating.
      remat: recompute blocks in the backward pass instead of storing them.
      attention: xla, cudnn (flash attention, for NVIDIA GPUs), or auto: cudnn where that can be.
      evaluate_every: steps between validations.
      validation_batches: batches of a validation.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: checkpoints to keep.
    """

    recipes: tuple[str, ...] = ("bf16", "adahop-lv2")
    out: pathlib.Path = pathlib.Path("runs/default")
    data: str | None = None
    model: str = "small"
    steps: int = 200
    batch_size: int = 4
    accumulate: int = 1
    seq_len: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    data_seed: int = 0
    tokenizer: str = "byte"
    vocab_size: int = 4096
    max_bytes: int | None = None
    calibration_steps: int = 30
    k: int | None = None
    table: pathlib.Path | None = None
    remat: bool = False
    attention: AttentionName = "auto"
    evaluate_every: int = 50
    validation_batches: int = 8
    checkpoint_every: int = 50
    keep_checkpoints: int = 2

    def check(self) -> None:
        """Checks what can be checked without reading data.

        Raises:
          ValueError: for an option outside its range, an unknown recipe or model.
        """
        for name in (
            "accumulate",
            "evaluate_every",
            "validation_batches",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, but must be from 0 to 2**32 - 1.")
        if not self.recipes:
            raise ValueError(f"recipes is empty; name one of {', '.join(adahop.RECIPE_NAMES)}.")
        if len(set(self.recipes)) < len(self.recipes):
            raise ValueError(f"recipes is {' '.join(self.recipes)}, but names one twice.")
        for name in self.recipes:
            self.recipe(name)
        self.data_config()
        self.optimizer_config()
        self.model_config(vocab_size=256)
        if self.table is not None and not any(self.recipe(name).level for name in self.recipes):
            raise ValueError(
                f"table is '{self.table}', but recipes ({' '.join(self.recipes)}) take none; add "
                "adahop-lv1 or adahop-lv2."
            )
        self.load_table()

    def check_calibration(self) -> None:
        """Checks that a run goes on after its calibration.

        Raises:
          ValueError: if all of it would be in the precision of calibration.
        """
        calibrates = self.table is None and any(self.recipe(name).level for name in self.recipes)
        if calibrates and self.calibration_steps >= self.steps:
            raise ValueError(
                f"calibration_steps is {self.calibration_steps}, but must be below steps "
                f"({self.steps}): the whole run would be in the precision of calibration."
            )

    def recipe(self, name: str) -> adahop.Recipe:
        """The recipe of this name under these options."""
        k = self.k
        if k is None:
            k = max(1, min(64, self.model_config(vocab_size=256).dim // 32))
        return adahop.Recipe.named(name, calibration_steps=self.calibration_steps, k=k)

    def data_config(self) -> DataConfig:
        """Options of the data."""
        return DataConfig(
            path=self.data,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            seed=self.data_seed,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_bytes=self.max_bytes,
        )

    def model_config(self, vocab_size: int) -> LlamaConfig:
        """Shape of the model for a tokenizer of this size."""
        return LlamaConfig.preset(
            self.model,
            vocab_size=vocab_size,
            remat=self.remat,
            attention=self.choose_attention()[0],
        )

    def choose_attention(self) -> tuple[Implementation, str]:
        """The implementation of attention, and the reason for it, one sentence.

        Raises:
          ValueError: if the one that is asked for cannot be.
        """
        config = LlamaConfig.preset(self.model)
        return choose_attention(self.attention, config.dtype, config.head_dim)

    def optimizer_config(self) -> OptimizerConfig:
        """Options of the optimizer."""
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )

    def load_table(self) -> adahop.StrategyTable | None:
        """The table named by `table`, if any."""
        return None if self.table is None else read_table(self.table)

    def binding(self) -> dict[str, Any]:
        """The options that a continued run must share with its beginning, as JSON."""
        values = dataclasses.asdict(self)
        return {
            name: str(value) if isinstance(value, pathlib.Path) else value
            for name, value in values.items()
            if name not in _FREE
        }


def read_table(path: pathlib.Path) -> adahop.StrategyTable:
    """Reads a strategy table from a JSON file, or from the folder of a run.

    Raises:
      ValueError: if there is no such file, or it holds no table.
    """
    file = path / "table.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"table is '{path}', which cannot be read ({error}); give a JSON file from "
            "'adahop profile' or the folder of a run."
        ) from error
    try:
        return adahop.StrategyTable.from_json(text)
    except ValueError as error:
        raise ValueError(f"table is '{path}', but {error}") from error
