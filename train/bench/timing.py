"""Times of device programs: many queued calls, one wait, and both sides of a ratio in turns."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
      seconds: a sample queues as many calls as last about so long.
      samples: of each program; the median counts.
    """

    seconds: float = 0.02
    samples: int = 5

    def __post_init__(self) -> None:
        """Checks both."""
        if not (self.seconds > 0 and self.samples >= 1):
            raise ValueError(
                f"seconds is {self.seconds} and samples is {self.samples}, but must be positive "
                "and at least 1."
            )


@dataclasses.dataclass(frozen=True)
class Work:
    """A program and the sets of arguments that its calls take in turns.

    Attributes:
      function: called with the arguments of a set; returns arrays.
      inputs: at least one set. Several keep one call from finding its inputs in a cache that the
        call before has filled.
    """

    function: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]

    def run(self, count: int) -> float:
        """Seconds that `count` calls take, from the first call to the last result."""
        # On a CPU programs may overlap, so that the last result does not stand for all of them.
        in_turn = jax.default_backend() == "cpu"
        result = None
        started = time.perf_counter()
        for i in range(count):
            result = self.function(*self.inputs[i % len(self.inputs)])
            if in_turn:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of seconds a call."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Slowest minus fastest, as a fraction of the median."""
        return (max(self.samples) - min(self.samples)) / self.seconds


def measure(works: Sequence[Work | str], plan: Plan) -> list[Timing | str]:
    """Times several programs in turns (A B C A B C ...), so that the device's drift hits all alike.

    Every program is compiled and run before the first sample.

    Args:
      works: programs; one that could not be made is stood for by the reason (see `attempt`).
      plan: how long to measure.

    Returns:
      A timing for each, or the reason, in one line, why there is none: a program that fails takes
      no other with it.
    """
    counts: list[int | str] = [
        work if isinstance(work, str) else attempt(lambda work=work: _calibrate(work, plan))
        for work in works
    ]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(plan.samples):
        for i, (work, count) in enumerate(zip(works, counts, strict=True)):
            if isinstance(work, Work) and isinstance(count, int):
                sample = attempt(lambda work=work, count=count: work.run(count) / count)
                if isinstance(sample, str):
                    counts[i] = sample
                else:
                    samples[i].append(sample)
    return [
        count if isinstance(count, str) else Timing(tuple(taken))
        for count, taken in zip(counts, samples, strict=True)
    ]


def reason(error: BaseException) -> str:
    """An error in one short line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def attempt[T](action: Callable[[], T]) -> T | str:
    """What an action returns, or the reason why it failed."""
    try:
        return action()
    except Exception as error:  # Whatever it is: the table goes on without this row.
        return reason(error)


def _calibrate(work: Work, plan: Plan) -> int:
    """How many calls make a sample; compiles and warms up on the way."""
    for arguments in work.inputs:
        jax.block_until_ready(work.function(*arguments))
    count = 1
    while (seconds := work.run(count)) < plan.seconds / 2:
        # One short run is a poor estimate, so that steps are bounded.
        count = min(10 * count, math.ceil(count * plan.seconds / seconds))
    return max(1, math.ceil(count * plan.seconds / seconds))
