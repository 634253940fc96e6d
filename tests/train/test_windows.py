"""Tests of the windows of any sizes; `test_data.py` has those of whole data sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.windows import TrainIterator, Windows, evaluation_batches


def starts(batches: list[np.ndarray], seq_len: int) -> list[int]:
    """The numbers of windows in batches of a stream that counts from 0."""
    return [int(row[0]) // seq_len for batch in batches for row in batch]


@given(st.integers(0, 200), st.integers(1, 50))
def test_windows_predict_each_token_once_but_a_short_rest(length: int, seq_len: int):
    windows = Windows(np.arange(length, dtype=np.uint8), seq_len)
    rows = [windows[i] for i in range(len(windows))]
    assert all(row.shape == (seq_len + 1,) and row.dtype == np.int32 for row in rows)
    targets = [int(token) for row in rows for token in row[1:]]
    assert targets == list(range(1, len(targets) + 1))
    assert 0 <= max(length, 1) - 1 - len(targets) < seq_len
    inputs = [int(token) for row in rows for token in row[:-1]]
    assert inputs == list(range(len(targets)))
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


@settings(max_examples=20)  # grain takes milliseconds to shuffle an index of a small range
@given(
    count=st.integers(1, 12),
    rest=st.integers(0, 2),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    position=st.integers(0, 8),
)
def test_training_of_any_size_resumes_and_covers_each_epoch(
    count: int, rest: int, batch_size: int, seed: int, position: int
):
    windows = Windows(np.arange(count * 3 + 1 + rest, dtype=np.uint8), 3)
    batches = -(-2 * count // batch_size)  # two epochs at least
    iterator = TrainIterator(windows, batch_size, seed, "data")
    expected = [next(iterator) for _ in range(max(batches, position + 2))]
    order = starts(expected, 3)
    assert sorted(order[:count]) == sorted(order[count : 2 * count]) == list(range(count))
    before = TrainIterator(windows, batch_size, seed, "data")
    for _ in range(position):
        next(before)
    resumed = TrainIterator(windows, batch_size, seed, "data")
    resumed.set_state(before.get_state())
    for batch in expected[position : position + 2]:
        assert batch.shape == (batch_size, 4)
        np.testing.assert_array_equal(next(resumed), batch)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 9), st.none() | st.integers(1, 40))
def test_evaluation_of_any_size_drops_nothing(
    count: int, batch_size: int, seed: int, most: int | None
):
    windows = Windows(np.arange(count * 3 + 1, dtype=np.uint8), 3)
    batches = evaluation_batches(windows, batch_size, seed, most)
    order = starts(batches, 3)
    whole = starts(evaluation_batches(windows, batch_size, seed, None), 3)
    assert sorted(whole) == list(range(count))
    assert order == whole[: len(order)]
    assert len(order) == min(count, (count if most is None else most) * batch_size)
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
