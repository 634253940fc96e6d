"""What a run shows on the terminal."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import rich.box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import adahop_jax as adahop
from train.data import Dataset

if TYPE_CHECKING:
    from train.run import RunResult


class Display:
    """Progress bars, messages and tables.

    On a terminal a bar is redrawn in place; elsewhere only whole lines are printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Writes to this console, by default standard output."""
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            # A file or a pipe has no width: nothing is to be wrapped or cut.
            self.console.width = 1000

    def say(self, text: str) -> None:
        """Prints a line."""
        # A path may hold what rich takes for markup.
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def dataset(self, dataset: Dataset) -> None:
        """Prints what the data is."""
        parts = [
            f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
            for name, split in dataset.summary.items()
        ]
        for count, what in (
            (dataset.skipped_files, "files without text skipped"),
            (dataset.duplicates, "duplicates left out"),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        self.say(f"data: {dataset.source} ({'; '.join(parts)})")

    @contextlib.contextmanager
    def progress(self, recipe: str, start: int, steps: int) -> Iterator["RunProgress"]:
        """Shows a bar for the steps of a run."""
        columns = (
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        with Progress(
            *columns, console=self.console, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task(recipe, total=steps, completed=start, status="compiling")
            yield RunProgress(progress, task)

    def table_set(self, recipe: str, step: int, table: adahop.StrategyTable) -> None:
        """Says that calibration is over, and what it chose."""
        counts = collections.Counter(
            str(strategy) for entry in table.values() for _, strategy, _ in entry.items()
        )
        chosen = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        self.say(f"{recipe}: step {step}: strategy table set ({chosen})")

    def validated(self, recipe: str, step: int, loss: float) -> None:
        """Prints a validation loss."""
        self.say(f"{recipe}: step {step}: validation loss {loss:.4f}")

    def results(self, results: Sequence["RunResult"]) -> None:
        """Prints runs side by side; gaps are to the first."""
        table = Table(box=rich.box.SIMPLE_HEAD)
        table.add_column("recipe")
        for title in ("train loss", "validation loss", "gap", "bits/byte", "ms/step"):
            table.add_column(title, justify="right")
        for result in results:
            gap = result.validation_loss - results[0].validation_loss
            seconds = result.seconds_per_step
            table.add_row(
                result.recipe,
                f"{result.train_loss:.4f}",
                f"{result.validation_loss:.4f}",
                f"{gap:+.4f}" if result is not results[0] else "",
                f"{result.bits_per_byte:.4f}",
                f"{1000 * seconds:.0f}" if seconds is not None else "",
            )
        self.console.print(table)

    def strategies(
        self,
        table: adahop.StrategyTable,
        patterns: Mapping[str, Mapping[str, adahop.Pattern]] | None = None,
    ) -> None:
        """Prints a strategy table, with the patterns it came from where they are known."""
        view = Table(box=rich.box.SIMPLE_HEAD)
        view.add_column("layer")
        for tensor in ("x", "W", "g") if patterns else ():
            view.add_column(tensor)
        for matmul in ("y", "gx", "gw"):
            view.add_column(matmul)
        rows = list(table.items())
        if table.default is not None:
            rows.append(("(all others)" if rows else "(all layers)", table.default))
        for path, entry in rows:
            found = patterns.get(path, {}) if patterns else {}
            cells = [str(found.get(name, "")) for name in ("x", "w", "g")] if patterns else []
            strategies = [
                f"{strategy} (k={k})" if strategy.extracts else str(strategy)
                for _, strategy, k in entry.items()
            ]
            view.add_row(path, *cells, *strategies)
        self.console.print(view)


class RunProgress:
    """The bar of one run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Moves this task of a rich progress display."""
        self._progress, self._task = progress, task
        self._validation = ""
        self.durations: list[float] = []

    @contextlib.contextmanager
    def step(self, tokens: int) -> Iterator[Callable[[float], None]]:
        """Times a step; call what it yields with the loss once it is known."""
        started = time.monotonic()

        def report(loss: float) -> None:
            self.durations.append(time.monotonic() - started)
            rate = f"{tokens / self.durations[-1]:,.0f} tokens/s"
            status = f"loss {loss:.3f}{self._validation}  {rate}"
            self._progress.update(self._task, advance=1, status=status)

        yield report

    def validated(self, loss: float) -> None:
        """Shows the validation loss from now on."""
        self._validation = f" (validation {loss:.3f})"
