"""One training run: steps, validation, calibration, checkpoints, and going on after a stop."""

import contextlib
import dataclasses
import math
import pathlib
import signal
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import flax
import jax
import numpy as np
from jaxtyping import Int

import adahop_jax as adahop
from train.checkpoint import CheckpointStore
from train.data import Dataset
from train.display import Display
from train.metrics import MetricsLog, read_metrics
from train.optimizer import make_optimizer
from train.options import TrainOptions
from train.step import (
    TrainState,
    build_model,
    finish_calibration,
    init_state,
    make_eval_step,
    make_train_step,
)


class RunStoppedError(Exception):
    """A run ended before its last step; the message says why, and where it can go on."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a finished run reports.

    Attributes:
      recipe: its name.
      train_loss: mean over the last tenth of the steps, nats a token.
      validation_loss: at the end, nats a token.
      bits_per_byte: the same a byte of text, in bits.
      seconds_per_step: median once the strategies are set; None if no step ran in this process.
      table: strategies it ended with.
    """

    recipe: str
    train_loss: float
    validation_loss: float
    bits_per_byte: float
    seconds_per_step: float | None
    table: adahop.StrategyTable


def check_table(options: TrainOptions, dataset: Dataset) -> None:
    """Checks that the table given, if any, fits the model.

    Raises:
      ValueError: if it names a layer that the model lacks, or lacks one.
    """
    table = options.load_table()
    if table is not None:
        model = build_model(options.model_config(dataset.vocab_size), adahop.Recipe())
        tokens = jax.ShapeDtypeStruct((1, 8), np.int32)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        adahop.bind(table, variables["adahop_probes"])


def run_recipe(
    options: TrainOptions, recipe_name: str, dataset: Dataset, display: Display
) -> RunResult:
    """Trains in one recipe, from the start or from the folder's last checkpoint.

    Raises:
      ValueError: if the folder holds another run, or cannot be written.
      RunStoppedError: if the loss is no longer finite, or the user interrupts.
    """
    folder = options.out / recipe_name
    with CheckpointStore(folder / "checkpoints", options.keep_checkpoints) as store:
        store.prepare()
        run = _Run(options, recipe_name, dataset, folder, store, display)
        try:
            return run.finish()
        finally:
            run.log.close()


class _Run:
    """The moving parts of a run, on the host."""

    def __init__(
        self,
        options: TrainOptions,
        recipe_name: str,
        dataset: Dataset,
        folder: pathlib.Path,
        store: CheckpointStore,
        display: Display,
    ) -> None:
        self.options, self.dataset, self.store, self.display = options, dataset, store, display
        self.recipe_name, self.recipe = recipe_name, options.recipe(recipe_name)
        self.folder = folder
        model = build_model(options.model_config(dataset.vocab_size), self.recipe)
        optimizer, self.schedule = make_optimizer(options.optimizer_config())
        self.train_step = make_train_step(model, optimizer, self.recipe)
        self.eval_step = make_eval_step(model, self.recipe)
        self.batches = dataset.train_iterator()
        self.validation = dataset.validation_batches(options.validation_batches)

        def new_state() -> TrainState:
            return init_state(model, optimizer, self.recipe, options.seed)

        if store.latest_step() is None:
            self.state = new_state()
            table = options.load_table()
            if table is not None and self.recipe.level is not None:
                # Checked against the model before the first step.
                adahop.bind(table, self.state.votes)
                self.state = dataclasses.replace(self.state, table=table)
        else:
            self.state = self._restore(jax.eval_shape(new_state))
            display.say(f"{recipe_name}: continuing at step {int(self.state.step)}")
        self.step = int(self.state.step)
        self.log = MetricsLog(folder / "metrics.jsonl", resume_at=self.step)
        if self.state.table is not None:
            self._write_table(self.state.table)
        (folder / "tokenizer.json").write_text(dataset.tokenizer.to_json(), encoding="utf-8")

    def finish(self) -> RunResult:
        """Takes all steps that are left."""
        with (
            self.display.progress(self.recipe_name, self.step, self.options.steps) as progress,
            _interruptible() as interrupted,
        ):
            while self.step < self.options.steps:
                with progress.step(self._tokens_per_step) as report:
                    report(self._take_step())
                if self._after_step(progress.validated):
                    progress.durations.clear()
                if interrupted():
                    raise RunStoppedError(self._stop(f"interrupted at step {self.step}"))
        durations = progress.durations[1:]
        losses, validations = self._logged("loss"), self._logged("validation_loss")
        if not losses or not validations:
            raise ValueError(
                f"'{self.log.path}' lacks the records of the finished run; restore it, or give "
                "another out."
            )
        validation = validations[-1]
        assert self.state.table is not None
        return RunResult(
            recipe=self.recipe_name,
            train_loss=statistics.fmean(losses[-math.ceil(len(losses) / 10) :]),
            validation_loss=validation,
            bits_per_byte=self._bits_per_byte(validation),
            # The first of them compiles.
            seconds_per_step=statistics.median(durations) if durations else None,
            table=self.state.table,
        )

    @property
    def _tokens_per_step(self) -> int:
        return self.options.accumulate * self.options.batch_size * self.options.seq_len

    def _take_step(self) -> float:
        tokens: Int[np.ndarray, "micro batch length"] = np.stack(
            [next(self.batches) for _ in range(self.options.accumulate)]
        )
        self.state, metrics = self.train_step(self.state, tokens)
        loss, gradient_norm = float(metrics.loss), float(metrics.gradient_norm)
        self.log.write(
            self.step + 1,
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=float(np.asarray(self.schedule(self.step))),
            tokens=(self.step + 1) * self._tokens_per_step,
        )
        self.step += 1
        # A gradient that is not finite has already spoilt the parameters.
        for name, value in (("loss", loss), ("gradient's norm", gradient_norm)):
            if not math.isfinite(value):
                why = f"the {name} is {value} at step {self.step}"
                raise RunStoppedError(self._stop(why, save=False))
        return loss

    def _after_step(self, validated: Callable[[float], None]) -> bool:
        """Calibrates, validates and saves where that is due; returns whether the table was set."""
        last = self.step == self.options.steps
        calibrated = self.state.table is None and (
            last or self.step >= self.recipe.calibration_steps
        )
        if calibrated:
            self._set_table()
        if last or self.step % self.options.evaluate_every == 0:
            validated(self._validate())
        if last or self.step % self.options.checkpoint_every == 0:
            self._save()
        return calibrated

    def _set_table(self) -> None:
        self.state = finish_calibration(self.state, self.recipe)
        assert self.state.table is not None
        self._write_table(self.state.table)
        self.log.write(self.step, event="table")
        self.display.table_set(self.recipe_name, self.step, self.state.table)

    def _write_table(self, table: adahop.StrategyTable) -> None:
        (self.folder / "table.json").write_text(table.to_json(), encoding="utf-8")

    def _validate(self) -> float:
        losses = [float(self.eval_step(self.state, batch)) for batch in self.validation]
        loss = statistics.fmean(losses, [len(batch) for batch in self.validation])
        self.log.write(
            self.step, validation_loss=loss, validation_bits_per_byte=self._bits_per_byte(loss)
        )
        self.display.validated(self.recipe_name, self.step, loss)
        return loss

    def _bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.dataset.bytes_per_token

    def _save(self) -> None:
        self.log.sync()
        metadata = {
            "recipe": self.recipe_name,
            "options": self.options.binding(),
            "data": self.batches.get_state(),
            "fingerprint": self.dataset.fingerprint,
            "table": self.state.table and self.state.table.to_json(),
            "versions": {"jax": jax.__version__, "flax": flax.__version__},
        }
        try:
            self.store.save(self.step, _arrays(self.state), metadata)
        except ValueError as error:  # A full disk, say: nothing the user typed.
            raise RunStoppedError(f"{self.recipe_name}: {error}") from error

    def _restore(self, like: TrainState) -> TrainState:
        metadata = self.store.read_metadata()
        saved, wanted = metadata["options"], self.options.binding()
        for name, value in wanted.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r}, but the run in '{self.folder}' was started with "
                    f"{saved.get(name)!r}; give that, or another out."
                )
        if metadata["fingerprint"] != self.dataset.fingerprint:
            raise ValueError(
                f"data is '{self.dataset.source}', whose text or tokenizer is not what the run in "
                f"'{self.folder}' was started with; restore it, or give another out."
            )
        _, arrays, _ = self.store.restore(None, _arrays(like))
        self.batches.set_state(metadata["data"])
        text = metadata["table"]
        table = None if text is None else adahop.StrategyTable.from_json(text)
        return TrainState(**arrays, table=table)

    def _stop(self, why: str, save: bool = True) -> str:
        if save and self.store.latest_step() != self.step:
            self._save()
        latest = self.store.latest_step()
        kept = f"the last checkpoint, step {latest}, is" if latest else "no checkpoint was kept"
        return f"{self.recipe_name}: {why}; {kept} in '{self.store.folder}'."

    def _logged(self, name: str) -> list[float]:
        return [record[name] for record in read_metrics(self.log.path) if name in record]


def _arrays(state: TrainState) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(state) if field.name != "table"]
    return {name: getattr(state, name) for name in names}


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Lets the step in hand finish on the first Ctrl-C; the second one stops at once."""
    seen = False

    def handle(number: int, frame: Any) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
