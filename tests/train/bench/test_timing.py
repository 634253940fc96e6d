"""Samples are long enough, taken in turns, and a program that fails takes no other with it."""

from collections.abc import Callable

import pytest

from train.bench import timing
from train.bench.timing import Plan, Timing, Work, attempt, measure, reason


class Clock:
    """Time that passes only while a program runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def program(self, name: str, *durations: float) -> Callable[[int], None]:
        """Takes these durations in turns, the last one from then on."""
        left = list(durations)

        def run(argument: int) -> None:
            self.calls.append((name, argument))
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def runs(calls: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Consecutive calls of one program, counted."""
    out: list[tuple[str, int]] = []
    for name, _ in calls:
        if out and out[-1][0] == name:
            out[-1] = (name, out[-1][1] + 1)
        else:
            out.append((name, 1))
    return out


def test_samples_last_long_enough_and_alternate(clock: Clock) -> None:
    fast, slow = (Work(clock.program(n, s), [(0,)]) for n, s in (("f", 2**-10), ("s", 2**-3)))
    outcomes = measure([fast, slow], Plan(seconds=0.25, samples=3))
    assert outcomes == [Timing((2**-10,) * 3), Timing((2**-3,) * 3)]
    # All programs are compiled before the first sample; then a quarter of a second of each.
    assert runs(clock.calls)[-6:] == [("f", 256), ("s", 2)] * 3
    assert [name for name, _ in runs(clock.calls)][:2] == ["f", "s"]


def test_a_slow_first_call_is_no_sample(clock: Clock) -> None:
    (outcome,) = measure([Work(clock.program("a", 100.0, 1.0), [(0,)])], Plan(0.5, 3))
    assert outcome == Timing((1.0, 1.0, 1.0))


def test_inputs_take_turns(clock: Clock) -> None:
    measure([Work(clock.program("a", 1.0), [(1,), (2,), (3,)])], Plan(4.0, 1))
    assert [argument for _, argument in clock.calls[-4:]] == [1, 2, 3, 1]
    assert [argument for _, argument in clock.calls[:3]] == [1, 2, 3]  # each compiled


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_one_wait_a_sample_where_calls_queue(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    """A wait costs ten calls: the number of calls is not to be taken from a run of one."""
    waits: list[int] = []

    def wait(result: object) -> None:
        waits.append(len(clock.calls))
        clock.now += 10 * 2**-10

    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: platform)
    (outcome,) = measure([Work(clock.program("a", 2**-10), [(0,)])], Plan(0.25, 2))
    assert isinstance(outcome, Timing)
    if platform == "gpu":
        calls = waits[-1] - waits[-2]
        assert 0.2 < calls * outcome.seconds < 0.3
        assert outcome.seconds == pytest.approx((1 + 10 / calls) * 2**-10)
    else:
        # Calls may overlap on a CPU, so that each is waited for.
        assert outcome.seconds == pytest.approx(11 * 2**-10, rel=0.05)


def test_median_and_spread() -> None:
    found = Timing((4.0, 1.0, 2.0))
    assert (found.seconds, found.spread) == (2.0, 1.5)


@pytest.mark.parametrize("failing_call", [0, 4])
def test_a_failure_stays_alone(clock: Clock, failing_call: int) -> None:
    calls = 0

    def fails(argument: int) -> None:
        nonlocal calls
        calls += 1
        clock.now += 1.0
        if calls > failing_call:
            raise MemoryError("no room\nfor this")

    works = [Work(fails, [(0,)]), "SyntaxError: not made", Work(clock.program("a", 1.0), [(0,)])]
    outcomes = measure(works, Plan(1.0, 5))
    assert outcomes == ["MemoryError: no room", "SyntaxError: not made", Timing((1.0,) * 5)]


def test_attempt_and_reason() -> None:
    assert attempt(lambda: 3) == 3
    assert attempt(lambda: 1 // 0) == "ZeroDivisionError: integer division or modulo by zero"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(ValueError("x" * 500))) == 160


@pytest.mark.parametrize(("seconds", "samples"), [(0.0, 3), (1.0, 0)])
def test_plans_that_measure_nothing(seconds: float, samples: int) -> None:
    with pytest.raises(ValueError, match="must be positive and at least 1"):
        Plan(seconds, samples)
