"""The `adahop` command: train, profile, table show, bench."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from train.bench.kernels import Kernels
from train.bench.step import Step
from train.data import load_data
from train.display import Display
from train.options import TrainOptions, read_table
from train.profile import profile_model
from train.run import RunStoppedError, check_table, run_recipe


@dataclasses.dataclass(frozen=True)
class Train(TrainOptions):
    """Trains a Flax Llama in one precision after another and compares the losses."""

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        self.check()
        self.check_calibration()
        dataset = load_data(self.data_config())
        display.dataset(dataset)
        display.say("attention: {}; {}".format(*self.choose_attention()))
        check_table(self, dataset)
        results = [run_recipe(self, recipe, dataset, display) for recipe in self.recipes]
        display.results(results)
        display.say(f"Runs are in {self.out}: metrics.jsonl, table.json, checkpoints.")
        return 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """Shows the outlier patterns of a model's tensors and the strategy table they give.

    Trains for the calibration steps in BF16 while the patterns vote, and keeps nothing.

    Attributes:
      recipe: adahop-lv1 or adahop-lv2.
      data: text file or folder; by default Python's own standard library sources.
      model: model shape: tiny, small, 85m, llama-3.2-1b or llama-3.1-8b.
      steps: calibration steps.
      batch_size: sequences of a step.
      seq_len: tokens of a sequence.
      seed: of weights.
      json: file for patterns, votes and table.
    """

    recipe: str = "adahop-lv2"
    data: str | None = None
    model: str = "small"
    steps: int = 30
    batch_size: int = 4
    seq_len: int = 256
    seed: int = 0
    json: pathlib.Path | None = None

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        options = TrainOptions(
            recipes=(self.recipe,),
            data=self.data,
            model=self.model,
            steps=self.steps,
            warmup_steps=min(TrainOptions.warmup_steps, self.steps - 1),
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seed=self.seed,
            calibration_steps=self.steps,
        )
        options.check()
        if options.recipe(self.recipe).level is None:
            raise ValueError(
                f"recipe is {self.recipe!r}, which has no table to calibrate; use adahop-lv1 or "
                "adahop-lv2."
            )
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise ValueError(f"json is '{self.json}', but its folder does not exist; create it.")
        if self.json is not None and self.json.is_dir():
            raise ValueError(f"json is '{self.json}', which is a folder; give a file.")
        found = profile_model(options, self.recipe, load_data(options.data_config()), display)
        display.strategies(found.table, found.patterns)
        if self.json is not None:
            self.json.write_text(found.to_json(), encoding="utf-8")
            display.say(f"Written to {self.json}; 'adahop train --table' takes it.")
        return 0


@dataclasses.dataclass(frozen=True)
class Table:
    """Prints a strategy table: `adahop table show PATH`.

    Attributes:
      action: what to do.
      path: JSON file, or the folder of a run.
      json: print it as JSON.
    """

    action: tyro.conf.Positional[Literal["show"]]
    path: tyro.conf.Positional[pathlib.Path]
    json: bool = False

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        table = read_table(self.path)
        if self.json:
            print(table.to_json())
        else:
            display.strategies(table)
        return 0


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measures speed and memory on the device at hand.

    Attributes:
      what: what to measure.
    """

    what: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[Kernels, tyro.conf.subcommand("kernels")]
            | Annotated[Step, tyro.conf.subcommand("step")]
        ]
    ]

    def run(self, display: Display) -> int:
        """Runs the command; returns the exit code."""
        return self.what.run(display)


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


_DESCRIPTION = (
    "Trains language models with MXFP4 matmuls, each under the strategy that its outliers call for."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
      0, or 2 after bad input (one sentence on standard error), or 1 for a run that stopped early.
    """
    try:
        command = tyro.cli(Command, prog="adahop", args=arguments, description=_DESCRIPTION)
        code = command.run(Display())
        sys.stdout.flush()  # here, where a reader that has gone is dealt with
        return code
    except (ValueError, TypeError) as error:
        print(f"adahop: {error}", file=sys.stderr)
        return 2
    except RunStoppedError as error:
        print(f"adahop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("adahop: interrupted before a step was done, or twice.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
