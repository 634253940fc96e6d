"""`adahop bench step`: one training step under each recipe."""

import dataclasses
import pathlib
from typing import Any

import jax

import adahop_jax as adahop
from train.attention import AttentionName
from train.bench import profile
from train.bench.recipe_step import TRACED, measure_step
from train.bench.report import (
    PERCENT,
    TIMES,
    Column,
    Group,
    check_json,
    describe,
    find_backend,
    fixed,
    progress,
    show,
    significant,
    write_json,
)
from train.bench.timing import attempt
from train.display import Display
from train.options import TrainOptions

_GIB = significant(2**-30)


@dataclasses.dataclass(frozen=True)
class Step:
    """Measures a training step under each recipe: time, memory, and where the time goes.

    Model, optimizer and step are those of `adahop train`; tokens are random. No calibration is run:
    under an adahop recipe y and gx are iht and gw is iht_oe_right in every layer, or a table says.

    Attributes:
      model: model shape; llama-3.2-1b by default, tiny on a CPU.
      seq_len: tokens of a sequence; 4096 by default, 64 on a CPU.
      batch_size: sequences of a step.
      recipes: precisions to measure, one after the other; ratios are to bf16.
      backend: of the recipes.
      steps: steps to time; the median counts.
      k: rows, columns or channels extracted; by default that of `adahop train`.
      table: strategy table (JSON) of the adahop recipes.
      attention: xla, cudnn, or auto: cudnn where that can be.
      remat: recompute blocks in the backward pass instead of storing them.
      json: file for all figures.
    """

    model: str | None = None
    seq_len: int | None = None
    batch_size: int = 2
    recipes: tuple[str, ...] = ("bf16", "adahop-lv2")
    backend: str = "auto"
    steps: int = 10
    k: int | None = None
    table: pathlib.Path | None = None
    attention: AttentionName = "auto"
    remat: bool = False
    json: pathlib.Path | None = None

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        on_cpu = jax.default_backend() == "cpu"
        options = TrainOptions(
            recipes=self.recipes,
            model=("tiny" if on_cpu else "llama-3.2-1b") if self.model is None else self.model,
            seq_len=(64 if on_cpu else 4096) if self.seq_len is None else self.seq_len,
            batch_size=self.batch_size,
            k=self.k,
            table=self.table,
            attention=self.attention,
            remat=self.remat,
        )
        self._check(options)
        describe(display)
        display.say("attention: {}; {}".format(*options.choose_attention()))
        steps, parts = _step_group(options), _parts_group()
        missing: list[str] = []
        with progress(display) as report:
            for name in self.recipes:
                report(f"{options.model} in {name}")
                found = attempt(
                    lambda name=name: measure_step(options, self._recipe(options, name), self.steps)
                )
                if isinstance(found, str):
                    steps.rows.append({"recipe": name, "failed": found})
                    continue
                steps.rows.append({"recipe": name, **found.cells})
                if isinstance(found.parts, str):
                    missing.append(f"No breakdown of {name}'s time: {found.parts}.")
                else:
                    parts.rows.append({"recipe": name, **found.parts})
        relate(steps.rows)
        groups = [steps, parts] if parts.rows else [steps]
        for group in groups:
            show(display, group)
        for line in missing:
            display.say(line)
        if self.json is not None:
            write_json(self.json, "step", dataclasses.asdict(self), groups)
        return 1 if steps.failed else 0

    def _check(self, options: TrainOptions) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}, but must be at least 1.")
        options.check()
        find_backend(self.backend)
        check_json(self.json)

    def _recipe(self, options: TrainOptions, name: str) -> adahop.Recipe:
        return dataclasses.replace(options.recipe(name), backend=self.backend)


def relate(rows: list[dict[str, Any]]) -> None:
    """Adds the ratios to the row of bf16, where there is one."""
    base = next((row for row in rows if row["recipe"] == "bf16" and "seconds" in row), None)
    for row in rows:
        if base is not None and "seconds" in row:
            row["ratio"] = base["seconds"] / row["seconds"]
            if row["saved_bytes"]:
                row["saved_ratio"] = base["saved_bytes"] / row["saved_bytes"]


def _step_group(options: TrainOptions) -> Group:
    return Group(
        "step",
        f"Training step of {options.model}, {options.batch_size} x {options.seq_len} tokens"
        + (", blocks recomputed" if options.remat else ""),
        (
            Column("recipe", "recipe"),
            Column("seconds", "ms", fixed(1, 1e3)),
            Column("spread", "spread", PERCENT),
            Column("tokens_per_second", "tokens/s", fixed(0)),
            Column("ratio", "bf16 / this", TIMES),
            Column("flops_per_second", "TFLOP/s", significant(1e-12)),
            Column("program_bytes", "program GiB", _GIB),
            Column("temp_bytes", "of it temp", _GIB),
            Column("device_peak_bytes", "peak GiB", _GIB),
            Column("peak_is_own", "", lambda own: "" if own else "or less"),
            Column("saved_bytes", "saved inputs GiB", _GIB),
            Column("saved_ratio", "bf16 / this", TIMES),
            Column("loss", "loss", fixed(3)),
            Column("compile_seconds", "compile s", fixed(0)),
        ),
        notes=(
            "Program: XLA's arguments, outputs and temporaries, donated ones once. Peak: the most "
            "that this process has held on the device so far. Saved inputs: of the blocks' linear "
            "layers, each counted for itself also where several share an input.",
        ),
    )


def _parts_group() -> Group:
    return Group(
        "parts",
        f"Where the time goes, ms a step (trace of {TRACED} steps)",
        (
            Column("recipe", "recipe"),
            *(Column(part, part, fixed(1, 1e3)) for part in profile.PARTS),
            Column("idle", "idle", fixed(1, 1e3)),
            Column("without_path", "by name only", PERCENT),
        ),
        notes=(
            "Quantizers: all in the blocks' linear layers but their products (casts and picking "
            "outliers too). Attention: with rotary positions. Idle: the step's median less all "
            "kernels. By name only: the share of kernels whose trace tells no operation.",
        ),
    )
