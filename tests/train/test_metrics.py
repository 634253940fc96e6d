"""The log loses no record that counts, and keeps none that a resumed run would write again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from train.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, steps: range, resume_at: int = 0) -> None:
    log = MetricsLog(path, resume_at=resume_at)
    for step in steps:
        log.write(step, loss=1 / step)
    log.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_records_come_back_in_order_and_exactly(path: Path) -> None:
    log = MetricsLog(path)
    log.write(1, loss=0.1, tokens=64)
    log.write(1, event="table")
    log.write(2, loss=1 / 3)
    log.close()
    assert path.read_text().count("\n") == 3
    assert read_metrics(path) == [
        {"step": 1, "loss": 0.1, "tokens": 64},
        {"step": 1, "event": "table"},
        {"step": 2, "loss": 1 / 3},
    ]


def test_a_record_can_be_read_at_once(path: Path) -> None:
    """A process that is killed next must not take it along in a buffer."""
    log = MetricsLog(path)
    log.write(1, loss=2.0)
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    log.sync()
    log.close()


def test_a_missing_file_has_no_records(path: Path) -> None:
    assert read_metrics(path) == []


def test_half_a_line_is_left_out(path: Path) -> None:
    write(path, range(1, 4))
    text = path.read_text()
    for cut in range(1, len(text.splitlines()[-1]) + 1):
        path.write_text(text[:-cut])
        # A cut of the line's end alone leaves the whole record.
        assert steps(path) == ([1, 2, 3] if cut == 1 else [1, 2])


def test_resuming_cleans_half_a_line_away(path: Path) -> None:
    write(path, range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    write(path, range(4, 6), resume_at=3)
    assert steps(path) == [1, 2, 3, 4, 5]
    for line in path.read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    ("resume_at", "kept"), [(0, []), (1, [1]), (3, [1, 2, 3]), (9, [1, 2, 3, 4, 5])]
)
def test_resuming_drops_what_the_checkpoint_does_not_hold(
    path: Path, resume_at: int, kept: list[int]
) -> None:
    write(path, range(1, 6))
    write(path, range(0), resume_at)
    assert steps(path) == kept


def test_an_uninterrupted_and_a_resumed_log_are_the_same_bytes(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write(whole, range(1, 9))
    write(resumed, range(1, 7))
    write(resumed, range(5, 9), resume_at=4)
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(path: Path, value: float) -> None:
    log = MetricsLog(path)
    log.write(1, loss=value)
    log.close()
    (record,) = read_metrics(path)
    assert repr(record["loss"]) == repr(value)
    write(path, range(0), resume_at=1)
    assert repr(read_metrics(path)[0]["loss"]) == repr(value)


@pytest.mark.parametrize("line", ["[1]", "3", '{"loss": 1}', '{"step": "1"}', "", "null"])
def test_a_line_that_is_no_record_is_left_out(path: Path, line: str) -> None:
    good: dict[str, Any] = {"step": 1, "loss": 0.5}
    path.write_text(f"{line}\n{json.dumps(good)}\n")
    assert read_metrics(path) == [good]
