"""Tests of the split, the windows and the iterator that resumes."""

import dataclasses
import functools
import gzip
import json
import lzma
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train import data
from train.data import SPLITS, DataConfig, Dataset, load_data
from train.tokenizer import BpeTokenizer, ByteTokenizer
from train.windows import TrainIterator

CONFIG = DataConfig(seq_len=16, batch_size=4, seed=3, fractions=(0.6, 0.2, 0.2))
WORDS = ("the", "of", "and", "in", "is", "that", "was", "for", "on", "are", "with", "they")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty files of 100 to 700 bytes, each with its number in every word."""
    root = tmp_path_factory.mktemp("corpus")
    source = random.Random(0)
    for i in range(40):
        words = [f"{source.choice(WORDS)}{i}" for _ in range(source.randint(25, 125))]
        (root / f"{i}.txt").write_text(" ".join(words))
    return root


@pytest.fixture
def config(folder: Path) -> DataConfig:
    return dataclasses.replace(CONFIG, path=str(folder))


@pytest.fixture
def dataset(config: DataConfig) -> Dataset:
    return load_data(config)


def take(iterator: TrainIterator, count: int) -> list[list[list[int]]]:
    return [next(iterator).tolist() for _ in range(count)]


def stream(dataset: Dataset, split: str, folder: Path) -> bytes:
    """The bytes of a split by its documents' names, with the byte tokenizer's separators."""
    return b"".join((folder / name).read_bytes() + b"\0" for name in dataset.documents[split])


def windows_of(stream: bytes, seq_len: int) -> list[bytes]:
    starts = range(0, len(stream) - seq_len, seq_len)
    return [stream[start : start + seq_len + 1] for start in starts]


# Split.


def test_each_document_is_in_one_split_and_the_split_follows_the_fractions(
    dataset: Dataset, folder: Path
):
    names = [name for split in SPLITS for name in dataset.documents[split]]
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    total = sum(dataset.summary[split].bytes for split in SPLITS)
    longest = max(path.stat().st_size for path in folder.iterdir())
    for split, fraction in zip(SPLITS, CONFIG.fractions, strict=True):
        assert abs(dataset.summary[split].bytes - fraction * total) <= longest


def test_documents_are_shuffled_before_the_split_by_the_seed(config: DataConfig, dataset: Dataset):
    other = load_data(dataclasses.replace(config, seed=4))
    assert set(other.documents["test"]) != set(dataset.documents["test"])
    for split in SPLITS:
        assert list(dataset.documents[split]) != sorted(dataset.documents[split])


def test_split_is_by_content_and_not_by_name(config: DataConfig, folder: Path, tmp_path: Path):
    for i, path in enumerate(sorted(folder.iterdir())):
        (tmp_path / f"renamed{-i}.txt").write_bytes(path.read_bytes())
    renamed = load_data(dataclasses.replace(config, path=str(tmp_path)))
    assert renamed.fingerprint == load_data(config).fingerprint
    assert take(renamed.train_iterator(), 3) == take(load_data(config).train_iterator(), 3)


def test_documents_of_equal_content_are_kept_once(config: DataConfig, folder: Path, tmp_path: Path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / f"copy of {path.name}").write_bytes(path.read_bytes())
    (tmp_path / "empty.txt").touch()
    doubled = load_data(dataclasses.replace(config, path=str(tmp_path)))
    assert doubled.duplicates == 40
    assert doubled.skipped_files == 1
    assert doubled.fingerprint == load_data(config).fingerprint


@given(
    st.lists(st.integers(1, 1000), min_size=3, max_size=30),
    st.tuples(*[st.floats(0.01, 1)] * 3),
)
def test_every_split_has_a_document_and_none_is_lost(sizes: list[int], weights):
    fractions = tuple(w / sum(weights) for w in weights)
    documents = [data.Document(str(i), b"x" * size) for i, size in enumerate(sizes)]
    parts = data._split(documents, fractions, "source")
    assert [d for part in parts for d in part] == documents
    assert all(parts)
    # No other cut before the first document of the validation split would be nearer.
    ends = np.cumsum(sizes)[:-2]
    distance = abs(sum(sizes[: len(parts[0])]) - fractions[0] * sum(sizes))
    assert distance == pytest.approx(np.abs(ends - fractions[0] * sum(sizes)).min())


def test_max_bytes_keeps_the_first_of_the_shuffled_documents(config: DataConfig, dataset: Dataset):
    whole = [name for split in SPLITS for name in dataset.documents[split]]
    part = load_data(dataclasses.replace(config, max_bytes=4000))
    names = [name for split in SPLITS for name in part.documents[split]]
    assert sum(part.summary[split].bytes for split in SPLITS) == 4000
    assert names == whole[: len(names)]
    assert len(names) < len(whole)
    everything = load_data(dataclasses.replace(config, max_bytes=10**9))
    assert everything.summary == dataset.summary


def test_max_bytes_cuts_between_characters_and_ends_there(config: DataConfig, tmp_path: Path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text("a" + "é" * (i + 60), "utf-8")
    whole = load_data(dataclasses.replace(config, path=str(tmp_path)))
    names = [name for split in SPLITS for name in whole.documents[split]]
    size = sum((tmp_path / name).stat().st_size for name in names[:4])
    part = load_data(dataclasses.replace(config, path=str(tmp_path), max_bytes=size + 42))
    assert sum(part.summary[split].bytes for split in SPLITS) == size + 41
    assert [name for split in SPLITS for name in part.documents[split]] == names[:5]


# Windows.


def test_batches_are_int32_windows_of_the_documents(dataset: Dataset, folder: Path):
    batch = next(dataset.train_iterator())
    assert batch.shape == (4, 17)
    assert batch.dtype == np.int32
    expected = windows_of(stream(dataset, "train", folder), 16)
    assert all(bytes(row.astype(np.uint8)) in expected for row in batch)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_evaluation_covers_every_window_once_and_is_the_same_each_time(
    config: DataConfig, folder: Path, split: str
):
    count = load_data(config).summary[split].windows
    size = count // 4 + 1  # leaves a rest: three full batches and a smaller one
    dataset = load_data(dataclasses.replace(config, batch_size=size))
    read = dataset.validation_batches if split == "validation" else dataset.test_batches
    batches = read()
    rows = [bytes(row.astype(np.uint8)) for batch in batches for row in batch]
    assert Counter(rows) == Counter(windows_of(stream(dataset, split, folder), 16))
    assert [len(batch) for batch in batches] == [size, size, size, count - 3 * size]
    assert all(batch.dtype == np.int32 for batch in batches)
    for most in (1, 3, 10**6):
        again = read(most)
        assert len(again) == min(most, len(batches))
        assert all((a == b).all() for a, b in zip(again, batches, strict=False))


def test_few_validation_batches_sample_many_documents(dataset: Dataset, folder: Path):
    expected = windows_of(stream(dataset, "validation", folder), 16)
    first = [bytes(r.astype(np.uint8)) for b in dataset.validation_batches(3) for r in b]
    assert max(expected.index(row) for row in first) > len(expected) // 2


def test_summary_adds_up(dataset: Dataset, folder: Path):
    for split in SPLITS:
        summary = dataset.summary[split]
        sizes = [(folder / name).stat().st_size for name in dataset.documents[split]]
        assert summary.documents == len(sizes)
        assert summary.bytes == sum(sizes)
        assert summary.tokens == sum(sizes) + len(sizes)
        assert summary.windows * 16 + summary.unused_tokens + 1 == summary.tokens
        assert 0 <= summary.unused_tokens < 16
    validation = dataset.summary["validation"]
    assert dataset.bytes_per_token == validation.bytes / validation.tokens
    assert dataclasses.asdict(validation)["bytes"] == validation.bytes


# Order of training, and resuming.


def test_each_epoch_has_every_window_once_in_another_order(dataset: Dataset, folder: Path):
    expected = Counter(windows_of(stream(dataset, "train", folder), 16))
    windows = dataset.summary["train"].windows
    assert windows % 4 != 0  # so that a batch lies across the epochs
    batches = take(dataset.train_iterator(), 3 * windows // 4 + 1)
    rows = [bytes(row) for batch in batches for row in batch]
    epochs = [rows[e * windows : (e + 1) * windows] for e in range(3)]
    assert [Counter(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != windows_of(stream(dataset, "train", folder), 16)


def test_order_depends_on_the_seed_in_every_epoch(config: DataConfig, dataset: Dataset):
    windows = dataset.summary["train"].windows
    orders = []
    for seed in (3, 4):
        # The same windows, so that only their order can differ.
        other = dataclasses.replace(dataset, config=dataclasses.replace(config, seed=seed))
        rows = [row for b in take(other.train_iterator(), windows) for row in b]
        orders += [rows[e * windows : (e + 1) * windows] for e in range(2)]
    # A seed that is the epoch plus the run's seed would give seed 3's second epoch again.
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_two_loads_are_the_same(config: DataConfig, dataset: Dataset):
    again = load_data(config)
    assert again.fingerprint == dataset.fingerprint
    assert again.documents == dataset.documents
    assert take(again.train_iterator(), 50) == take(dataset.train_iterator(), 50)
    for a, b in zip(again.test_batches(), dataset.test_batches(), strict=True):
        assert (a == b).all()


def test_resume_gives_the_batches_of_the_uninterrupted_iterator(config: DataConfig):
    dataset = load_data(config)
    per_epoch = dataset.summary["train"].windows // 4
    expected = take(dataset.train_iterator(), 2 * per_epoch + 5)
    # At the start, in mid-epoch, right before, in and after the batch across the epochs.
    for position in (0, 1, per_epoch // 2, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        interrupted = dataset.train_iterator()
        take(interrupted, position)
        state = json.loads(json.dumps(interrupted.get_state()))
        take(interrupted, 2)  # the state is a value: going on does not change it
        resumed = load_data(config).train_iterator()
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert take(resumed, 5) == expected[position : position + 5]


def test_set_state_moves_an_iterator_back(dataset: Dataset):
    iterator = dataset.train_iterator()
    state = iterator.get_state()
    first = take(iterator, 3)
    iterator.set_state(state)
    assert take(iterator, 3) == first


def test_evaluation_does_not_move_training(dataset: Dataset):
    expected = take(dataset.train_iterator(), 4)
    iterator = dataset.train_iterator()
    batches = take(iterator, 2)
    dataset.validation_batches()
    assert batches + take(iterator, 2) == expected


def test_iterators_start_no_thread(dataset: Dataset):
    before = set(threading.enumerate())
    take(dataset.train_iterator(), 3)
    dataset.validation_batches(3)
    assert set(threading.enumerate()) == before


def test_one_window_and_a_batch_larger_than_the_split(tmp_path: Path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"%d" % i * 10)
    config = dataclasses.replace(CONFIG, path=str(tmp_path), seq_len=10, batch_size=3)
    dataset = load_data(config)
    assert [dataset.summary[split].windows for split in SPLITS] == [1, 1, 1]
    batch = next(dataset.train_iterator())
    assert batch.shape == (3, 11)
    assert (batch == batch[0]).all()
    assert [b.shape for b in dataset.validation_batches(5)] == [(1, 11)]


# Fingerprint.


def test_fingerprint_changes_with_all_that_decides_the_batches(
    config: DataConfig, dataset: Dataset, tmp_path: Path
):
    bpe = tmp_path / "tokenizer.json"
    bpe.write_text(BpeTokenizer.train([b"the of and the of"], 258).to_json(), "utf-8")
    changes: list[dict] = [
        {"seed": 4},
        {"seq_len": 17},
        {"fractions": (0.61, 0.2, 0.19)},
        {"max_bytes": 4000},
        {"max_bytes": 4001},  # of the same documents
        {"tokenizer": str(bpe)},
    ]
    seen = {load_data(dataclasses.replace(config, **change)).fingerprint for change in changes}
    assert len(seen | {dataset.fingerprint}) == len(changes) + 1
    assert load_data(dataclasses.replace(config, batch_size=9)).fingerprint == dataset.fingerprint


def test_changed_documents_are_refused_in_one_sentence(
    config: DataConfig, dataset: Dataset, folder: Path, tmp_path: Path
):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    one = tmp_path / "7.txt"
    one.write_bytes(one.read_bytes()[:-1] + b"?")
    changed = load_data(dataclasses.replace(config, path=str(tmp_path)))
    with pytest.raises(ValueError, match="the data changed since the state was saved") as caught:
        changed.train_iterator().set_state(dataset.train_iterator().get_state())
    assert dataset.fingerprint[:12] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_batch_size_and_a_foreign_state_are_refused(config: DataConfig, dataset: Dataset):
    iterator = dataset.train_iterator()
    other = load_data(dataclasses.replace(config, batch_size=8)).train_iterator()
    with pytest.raises(ValueError, match=r"batch_size=8 differs.*resume with batch_size=4"):
        other.set_state(iterator.get_state())
    with pytest.raises(ValueError, match="is not one that get_state returned"):
        iterator.set_state({"next_index": 3})


# Sources and tokenizers, end to end.


def test_archives_give_the_batches_of_the_plain_file(config: DataConfig, tmp_path: Path):
    text = b"\n\n\n".join(b"paragraph %d of a long file " % i * 20 for i in range(100))
    batches = []
    for suffix, compress in ((".txt", bytes), (".xz", lzma.compress), (".gz", gzip.compress)):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(compress(text))
        dataset = load_data(dataclasses.replace(config, path=str(path)))
        batches.append((take(dataset.train_iterator(), 10), dataset.fingerprint))
    assert batches[0] == batches[1] == batches[2]


def test_bytes_that_are_not_utf8_pass(config: DataConfig, tmp_path: Path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes(range(128, 256)) + b"%d" % i)
    dataset = load_data(dataclasses.replace(config, path=str(tmp_path)))
    rows = [row for batch in dataset.validation_batches() for row in batch]
    assert {int(token) for row in rows for token in row} >= set(range(128, 256))
    bpe = dataclasses.replace(dataset.config, tokenizer="bpe", vocab_size=260)
    with pytest.warns(UserWarning, match="not UTF-8"):
        assert load_data(bpe).vocab_size == 260


def test_bpe_is_trained_on_the_training_documents_only(
    config: DataConfig, dataset: Dataset, folder: Path
):
    loaded = load_data(dataclasses.replace(config, tokenizer="bpe", vocab_size=300))
    assert loaded.documents == dataset.documents
    documents = {
        split: [(folder / name).read_bytes() for name in loaded.documents[split]]
        for split in SPLITS
    }
    expected = BpeTokenizer.train(documents["train"], 300)
    everything = BpeTokenizer.train([d for split in SPLITS for d in documents[split]], 300)
    assert loaded.tokenizer.to_json() == expected.to_json()
    assert loaded.tokenizer.to_json() != everything.to_json()
    assert loaded.vocab_size == 300
    assert loaded.bytes_per_token == pytest.approx(
        sum(map(len, documents["validation"]))
        / sum(len(expected.encode(d)) + 1 for d in documents["validation"])
    )


def test_saved_vocabulary_resumes_the_run_that_trained_it(config: DataConfig, tmp_path: Path):
    trained = load_data(dataclasses.replace(config, tokenizer="bpe", vocab_size=300))
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.tokenizer.to_json(), "utf-8")
    loaded = load_data(dataclasses.replace(config, tokenizer=str(path)))
    assert loaded.fingerprint == trained.fingerprint
    resumed, original = loaded.train_iterator(), trained.train_iterator()
    take(original, 5)
    resumed.set_state(original.get_state())
    assert take(resumed, 5) == take(original, 5)


def test_bpe_documents_end_with_the_separator_and_decode_to_the_text(
    config: DataConfig, folder: Path
):
    dataset = load_data(dataclasses.replace(config, tokenizer="bpe", vocab_size=300, seq_len=1))
    windows = dataset._windows["validation"]
    ids = np.array([windows[0][0], *(windows[i][1] for i in range(len(windows)))])
    ends = np.flatnonzero(ids == dataset.tokenizer.separator)
    texts = [dataset.tokenizer.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]
    names = dataset.documents["validation"]
    assert texts == [(folder / name).read_text() for name in names]
    assert ends[-1] == len(ids) - 1


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.int32)],
)
def test_stream_has_the_narrowest_dtype_that_holds_every_id(vocab_size: int, dtype):
    class Wide(ByteTokenizer):
        separator = vocab_size - 1

        def encode(self, text: bytes) -> np.ndarray:
            return np.full(len(text), vocab_size - 1, np.int32)

    Wide.vocab_size = vocab_size
    tokens = data._stream(Wide(), [data.Document("a", b"xy"), data.Document("b", b"z")])
    assert tokens.dtype == dtype
    assert tokens.tolist() == [vocab_size - 1] * 5


def test_default_data_need_no_path():
    dataset = load_data(DataConfig(max_bytes=300_000))
    assert dataset.source.startswith("standard library of Python 3")
    assert dataset.vocab_size == 256
    assert next(dataset.train_iterator()).shape == (8, 257)


# Errors: one sentence each, before the data are read where that can be.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"seed": 2**32}, "seed=4294967296 must be from 0"),
        ({"fractions": (0.9, 0.1, 0.0)}, "fractions=(0.9, 0.1, 0.0) must be three positive"),
        ({"fractions": (0.9, 0.1)}, "must be three positive shares"),
        ({"fractions": 0.9}, "fractions=0.9 must be three positive shares"),
        ({"fractions": [0.9, 0.05, 0.05]}, "such as (0.9, 0.05, 0.05)"),
        ({"fractions": (0.9, 0.9, 0.9)}, "sum to 1"),
        ({"fractions": (float("nan"), 0.5, 0.5)}, "must be three positive shares"),
        ({"max_bytes": 0}, "max_bytes=0 must be positive"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size=100 is too small for BPE"),
    ],
)
def test_config_refuses_values_out_of_range(change: dict, message: str):
    with pytest.raises(ValueError) as caught:
        DataConfig(**change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"seq_len": 2.5}, {"batch_size": "4"}, {"seed": 1.5}, {"vocab_size": 3e2}, {"max_bytes": 1e6}]
    + [{"seq_len": None}],
)
def test_config_refuses_what_is_no_whole_number(change: dict):
    ((name, value),) = change.items()
    with pytest.raises(TypeError) as caught:
        DataConfig(**change)
    assert str(caught.value) == f"{name}={value!r} must be a whole number"


def test_missing_tokenizer_is_found_before_the_data_are_read(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data, "read_source", functools.partial(pytest.fail, "data were read"))
    with pytest.raises(ValueError, match="tokenizer='word' is neither 'byte' nor 'bpe'"):
        load_data(dataclasses.replace(config, tokenizer="word"))


def test_too_few_documents(config: DataConfig, tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    (tmp_path / "b.txt").write_bytes(b"b" * 1000)
    (tmp_path / "copy.txt").write_bytes(b"b" * 1000)
    with pytest.raises(ValueError, match="gives 2 documents of different content, fewer than"):
        load_data(dataclasses.replace(config, path=str(tmp_path)))


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_too_small_for_one_sequence(config: DataConfig, split: str):
    # The smallest of the three, so that its size is the limit.
    fractions = tuple(0.1 if name == split else 0.45 for name in SPLITS)
    config = dataclasses.replace(config, fractions=fractions)
    tokens = load_data(config).summary[split].tokens
    message = f"the {split} split {tokens} tokens, too few for one sequence of seq_len={tokens} and"
    with pytest.raises(ValueError, match=message):
        load_data(dataclasses.replace(config, seq_len=tokens))
    exact = load_data(dataclasses.replace(config, seq_len=tokens - 1)).summary[split]
    assert (exact.windows, exact.unused_tokens) == (1, 0)


def test_count_of_batches_must_be_positive(dataset: Dataset):
    for read in (dataset.validation_batches, dataset.test_batches):
        with pytest.raises(ValueError, match="count=0 must be at least 1"):
            read(0)
