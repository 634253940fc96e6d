"""One recipe's training step: compiled, timed, and traced."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import adahop_jax as adahop
from train.bench import profile
from train.bench.layers import usual_strategies
from train.bench.saved import saved_input_bytes
from train.bench.timing import attempt
from train.llama import LlamaConfig, flops_per_token
from train.optimizer import make_optimizer
from train.options import TrainOptions
from train.step import TrainState, build_model, init_state, make_train_step

TRACED = 2
"""Steps that are traced."""

_WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What was measured of one recipe.

    Attributes:
      cells: of its row.
      parts: seconds a step by part, with 'busy' and 'idle'; or why there are none.
    """

    cells: dict[str, Any]
    parts: dict[str, Any] | str


@dataclasses.dataclass(frozen=True)
class Program:
    """A recipe's training step with all that it takes.

    Attributes:
      config: of the model.
      step: the jitted step, as `train.step.make_train_step` makes it.
      state: the first state, with its table set.
      batches: random tokens, to be taken in turns.
    """

    config: LlamaConfig
    step: Any
    state: TrainState
    batches: list[jax.Array]


def make_program(options: TrainOptions, recipe: adahop.Recipe) -> Program:
    """Makes the step that `adahop train` would run, in the vocabulary of the model's preset.

    Raises:
      ValueError: if the table given does not fit the model.
    """
    config = options.model_config(LlamaConfig.preset(options.model).vocab_size)
    model = build_model(config, recipe)
    optimizer, _ = make_optimizer(options.optimizer_config())
    table = step_table(options, recipe)
    state = dataclasses.replace(init_state(model, optimizer, recipe, options.seed), table=table)
    adahop.bind(table, state.votes)
    step = make_train_step(model, optimizer, recipe)
    return Program(config, step, state, _random_tokens(config.vocab_size, options))


def measure_step(options: TrainOptions, recipe: adahop.Recipe, steps: int) -> StepResult:
    """Compiles a recipe's training step, times it, and traces it."""
    program = make_program(options, recipe)
    table = program.state.table
    assert table is not None
    arguments = (program.state, program.batches[0])
    saved = None if options.remat else saved_input_bytes(program.step, *arguments, table)
    started = time.perf_counter()
    compiled = program.step.lower(*arguments).compile()
    compiling = time.perf_counter() - started
    peak = _device_peak()
    runner = _Runner(compiled, program.state, program.batches)
    durations = runner.take(_WARM_UP + steps)[_WARM_UP:]
    seconds = statistics.median(durations)
    tokens = options.batch_size * options.seq_len
    memory = compiled.memory_analysis()
    cells = {
        "seconds": seconds,
        "spread": (max(durations) - min(durations)) / seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": tokens * flops_per_token(program.config, options.seq_len) / seconds,
        "loss": runner.loss,
        "saved_bytes": saved,
        "compile_seconds": compiling,
        **_program_memory(memory),
    }
    after = _device_peak()
    if after is not None:
        # The device's peak is that of the process: an earlier recipe's may be higher.
        cells["device_peak_bytes"] = after
        cells["peak_is_own"] = after != peak
    return StepResult(cells, attempt(lambda: _parts(runner, compiled, seconds)))


class _Runner:
    """Steps of one state."""

    def __init__(self, step: Callable[..., Any], state: TrainState, batches: list[jax.Array]):
        self.step, self.state, self.batches = step, state, batches
        self.loss = float("nan")

    def take(self, count: int) -> list[float]:
        """Takes steps, waiting for each as training does; returns their durations."""
        durations = []
        for i in range(count):
            started = time.perf_counter()
            self.state, metrics = self.step(self.state, self.batches[i % len(self.batches)])
            self.loss = float(metrics.loss)
            durations.append(time.perf_counter() - started)
        return durations


def step_table(options: TrainOptions, recipe: adahop.Recipe) -> adahop.StrategyTable:
    """The strategies to measure: the recipe's own, those given, or what level 2 mostly chooses."""
    if recipe.level is None:
        return recipe.initial_table()
    return options.load_table() or adahop.StrategyTable.uniform(usual_strategies(recipe.k))


def _parts(runner: _Runner, compiled: Any, seconds: float) -> dict[str, Any] | str:
    data = profile.record(lambda: runner.take(TRACED))
    events = profile.device_events(data, profile.op_paths(compiled.as_text() or ""))
    if not events:
        return f"a trace of {jax.devices()[0].device_kind} holds no kernels"
    found = {part: total / TRACED for part, total in profile.breakdown(events).items()}
    busy = sum(found.values())
    unknown = sum(event.seconds for event in events if not event.path) / TRACED
    return found | {
        "busy": busy,
        "idle": max(seconds - busy, 0.0),
        "without_path": unknown / busy,
        "longest": profile.longest(events, 60),
    }


def _random_tokens(vocab_size: int, options: TrainOptions) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shape = (1, options.batch_size, options.seq_len + 1)
    return [jax.device_put(rng.integers(vocab_size, size=shape, dtype=np.int32)) for _ in range(2)]


def _device_peak() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def _program_memory(memory: Any) -> dict[str, int | None]:
    """What XLA says of the program: without the bytes of the state, which is donated, twice."""
    if memory is None:
        return {}
    names = ("argument", "output", "alias", "temp")
    sizes = {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names}
    total = sum(sizes.values()) - 2 * sizes["alias_bytes"]
    return {**sizes, "program_bytes": total}
