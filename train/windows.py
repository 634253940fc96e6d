"""From a token stream to batches, in an order that resumes exactly."""

import itertools
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer

# In this thread: a window is a slice of memory, so that threads could only cost time.
_INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Windows:
    """A token stream as a sequence of windows, each token but the first predicted once.

    Window i holds tokens `[i * seq_len, (i + 1) * seq_len]`, both ends included, so that
    neighbours share one token: the last target of one is the first input of the next.
    """

    def __init__(self, stream: Integer[np.ndarray, " tokens"], seq_len: int) -> None:
        """Takes a stream of at least `seq_len + 1` tokens; it is not copied."""
        self._stream, self._seq_len = stream, seq_len

    def __len__(self) -> int:
        """Returns the number of whole windows."""
        return max(0, len(self._stream) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Int32[np.ndarray, " seq_len_plus_1"]:
        """Returns one window."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._seq_len
        return self._stream[start : start + self._seq_len + 1].astype(np.int32)


class TrainIterator:
    """Endless training batches, int32 [batch_size, seq_len + 1], reshuffled every epoch.

    A batch may take its last sequences from the next epoch, so that none is dropped.
    """

    def __init__(self, windows: Windows, batch_size: int, seed: int, fingerprint: str) -> None:
        """Starts at the first batch.

        Args:
            windows: At least one.
            batch_size: Windows per batch.
            seed: Fixes the order of every epoch.
            fingerprint: Of the data; saved in the state, so that other data are refused.
        """
        # An endless data set has no remainder to drop; keeping it overflows with batches of one.
        batches = _shuffled(windows, seed).repeat().batch(batch_size, drop_remainder=True)
        self._iterator = iter(batches.to_iter_dataset(_INLINE))
        self._identity = {"batch_size": batch_size, "fingerprint": fingerprint}

    def __iter__(self) -> "TrainIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Int32[np.ndarray, "batch seq_len_plus_1"]:
        """Returns the next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position: small, made of what JSON has."""
        return {"position": self._iterator.get_state(), **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position, so that the next batch is the one that followed it.

        Args:
            state: What `get_state` returned, perhaps in another process.

        Raises:
            ValueError: If it belongs to other data, or to another batch size.
        """
        if not {"position", *self._identity} <= set(state):
            raise ValueError(f"state={state!r} is not one that get_state returned")
        if state["fingerprint"] != self._identity["fingerprint"]:
            raise ValueError(
                "the data changed since the state was saved (fingerprint "
                f"{state['fingerprint'][:12]}, now {self._identity['fingerprint'][:12]}); resume "
                "with the same documents, tokenizer, seed, fractions, max_bytes and seq_len"
            )
        if state["batch_size"] != self._identity["batch_size"]:
            raise ValueError(
                f"batch_size={self._identity['batch_size']} differs from the saved state's; "
                f"resume with batch_size={state['batch_size']}"
            )
        self._iterator.set_state(dict(state["position"]))


def evaluation_batches(
    windows: Windows, batch_size: int, seed: int, count: int | None
) -> list[Int32[np.ndarray, "batch seq_len_plus_1"]]:
    """Returns the first batches of one shuffled order, the same at every call.

    Args:
        windows: At least one.
        batch_size: Windows per batch; the last of all windows may make a smaller batch.
        seed: Fixes the order, so that a few batches sample the whole stream.
        count: At most so many batches; None for all.

    Returns:
        Batches of int32 [batch_size, seq_len + 1].

    Raises:
        ValueError: If `count` is below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"count={count} must be at least 1, or None for the whole split")
    batches = _shuffled(windows, seed).batch(batch_size)
    return list(itertools.islice(batches.to_iter_dataset(_INLINE), count))


def _shuffled(windows: Windows, seed: int) -> grain.MapDataset:
    return grain.MapDataset.source(windows).seed(seed).shuffle()
