"""From a configuration to a data set: documents, their split, their tokens."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Integer

from train.text import Document, read_source, truncate_utf8
from train.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    check_vocab_size,
    load_tokenizer,
)
from train.windows import TrainIterator, Windows, evaluation_batches

SPLITS = ("train", "validation", "test")

_FORMAT = 1  # part of the fingerprint: raise it when the same data would give other batches


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and how it is cut.

    Attributes:
        path: A text file, a folder, a .xz or a .gz file; None for the sources of the running
            Python's standard library.
        seq_len: Tokens that one sequence predicts; its window holds one more.
        batch_size: Sequences per batch.
        seed: Fixes the order of the documents, hence the split, and the order of the windows.
        tokenizer: 'byte', 'bpe' (trained on the training documents) or a tokenizer.json.
        vocab_size: Size of a vocabulary that is trained ('bpe' only).
        fractions: Shares of train, validation and test, by bytes.
        max_bytes: Keep only so many bytes of the shuffled documents; None for all.
    """

    path: str | None = None
    seq_len: int = 256
    batch_size: int = 8
    seed: int = 0
    tokenizer: str = "byte"
    vocab_size: int = 4096
    fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without reading anything.

        Raises:
            TypeError: If a number is not a whole one where it has to be.
            ValueError: If a value is out of range.
        """
        for name in ("seq_len", "batch_size", "seed", "vocab_size", "max_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) and (name, value) != ("max_bytes", None):
                raise TypeError(f"{name}={value!r} must be a whole number")
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        shares = self.fractions
        if (
            not isinstance(shares, tuple)  # of a frozen class, so it has to be hashable
            or len(shares) != 3
            or not all(f > 0 for f in shares)
            or abs(sum(shares) - 1) > 1e-6
        ):
            raise ValueError(
                f"fractions={self.fractions} must be three positive shares (train, validation, "
                "test) that sum to 1, such as (0.9, 0.05, 0.05)"
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes={self.max_bytes} must be positive, or None for all")
        if self.tokenizer == "bpe":
            check_vocab_size(self.vocab_size)


@dataclass(frozen=True)
class SplitSummary:
    """Sizes of one split.

    Attributes:
        documents: Number of documents.
        bytes: Bytes of their text.
        tokens: Tokens, one separator per document included.
        windows: Sequences per pass over the split.
        unused_tokens: Tokens at the end that no sequence predicts, fewer than `seq_len`.
    """

    documents: int
    bytes: int
    tokens: int
    windows: int
    unused_tokens: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: bits per byte = loss in nats / ln 2 / bytes per token."""
        return self.bytes / self.tokens


@dataclass(frozen=True, eq=False)
class Dataset:
    """The three splits as token streams, and the ways to read them.

    Attributes:
        config: What it was loaded by.
        source: Name of the source.
        tokenizer: Save its `to_json()` beside a run and resume with that file.
        fingerprint: SHA-256 over all that decides the batches but the batch size: documents,
            tokenizer, seed, fractions and seq_len.
        summary: Sizes by split.
        documents: Names of the documents by split, in the order of the stream.
        skipped_files: Files of a folder left out, as binary or empty.
        duplicates: Documents left out because one of the same content was kept.
    """

    config: DataConfig
    source: str
    tokenizer: Tokenizer
    fingerprint: str
    summary: Mapping[str, SplitSummary]
    documents: Mapping[str, tuple[str, ...]]
    skipped_files: int
    duplicates: int
    _windows: Mapping[str, Windows]

    @property
    def vocab_size(self) -> int:
        """Number of token ids; with BPE perhaps not the size that was asked for."""
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the validation split, where losses are compared."""
        return self.summary["validation"].bytes_per_token

    def train_iterator(self) -> TrainIterator:
        """Returns a new iterator over training batches, at the first of them."""
        config = self.config
        return TrainIterator(
            self._windows["train"], config.batch_size, config.seed, self.fingerprint
        )

    def validation_batches(
        self, count: int | None = None
    ) -> list[Int32[np.ndarray, "batch seq_len_plus_1"]]:
        """Returns batches of the validation split, the same at every call.

        The windows come in one fixed shuffled order, so that a few batches sample many documents.

        Args:
            count: At most so many batches; None for the whole split.

        Returns:
            Batches of int32 [batch_size, seq_len + 1]; the last of the split may have fewer
            rows: weigh it by them.

        Raises:
            ValueError: If `count` is below 1.
        """
        return self._evaluation_batches("validation", count)

    def test_batches(
        self, count: int | None = None
    ) -> list[Int32[np.ndarray, "batch seq_len_plus_1"]]:
        """Returns batches of the test split; as `validation_batches`, but never tune on them."""
        return self._evaluation_batches("test", count)

    def _evaluation_batches(self, split: str, count: int | None) -> list[np.ndarray]:
        config = self.config
        return evaluation_batches(self._windows[split], config.batch_size, config.seed, count)


def load_data(config: DataConfig) -> Dataset:
    """Reads, splits and tokenizes.

    Documents of equal content are kept once, so that none is in two splits. The others are put
    in the order of SHA-256(seed, content): a shuffle that depends on nothing but the seed and
    the texts, not on names, the file system or a random number generator. The first
    `max_bytes` of them are kept, and the splits are consecutive parts of that order, cut at the
    document ends nearest to the fractions. A vocabulary is trained on the training part only.

    Args:
        config: What to read, and how to cut it.

    Returns:
        The data set, in memory at 1, 2 or 4 bytes per token.

    Raises:
        ValueError: If a path or the tokenizer cannot be used, or a split would have no window.
    """
    fixed = None
    if config.tokenizer != "bpe":  # before the data are read, since it may fail
        fixed = ByteTokenizer() if config.tokenizer == "byte" else load_tokenizer(config.tokenizer)
    source = read_source(config.path)
    shuffled, digests = _shuffle(source.documents, config.seed)
    duplicates = len(source.documents) - len(shuffled)
    kept = shuffled
    if config.max_bytes is not None:
        kept = _first_bytes(shuffled, config.max_bytes)
    splits = dict(zip(SPLITS, _split(kept, config.fractions, source.name), strict=True))
    tokenizer = fixed or BpeTokenizer.train(
        (document.data for document in splits["train"]), config.vocab_size
    )
    streams = {name: _stream(tokenizer, part) for name, part in splits.items()}
    summary = {
        name: _summarize(name, splits[name], len(streams[name]), config.seq_len, source.name)
        for name in SPLITS
    }
    return Dataset(
        config=config,
        source=source.name,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(config, tokenizer, digests[: len(kept)]),
        summary=summary,
        documents={name: tuple(d.name for d in part) for name, part in splits.items()},
        skipped_files=source.skipped_files,
        duplicates=duplicates,
        _windows={name: Windows(streams[name], config.seq_len) for name in SPLITS},
    )


def _shuffle(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[str]]:
    """Orders documents by a hash of seed and content, one of each content; also the hashes."""
    by_key: dict[str, Document] = {}
    for document in documents:
        content = hashlib.sha256(document.data).hexdigest()
        by_key.setdefault(hashlib.sha256(f"{seed} {content}".encode()).hexdigest(), document)
    keys = sorted(by_key)
    return [by_key[key] for key in keys], keys


def _first_bytes(documents: Sequence[Document], count: int) -> list[Document]:
    kept: list[Document] = []
    for document in documents:
        data = truncate_utf8(document.data, count)
        if data:
            kept.append(Document(document.name, data))
        if len(data) < len(document.data):
            break
        count -= len(data)
    return kept


def _split(
    documents: Sequence[Document], fractions: tuple[float, float, float], source: str
) -> tuple[Sequence[Document], Sequence[Document], Sequence[Document]]:
    n = len(documents)
    if n < 3:
        raise ValueError(
            f"path='{source}' gives {n} documents of different content, fewer than one for each "
            "of train, validation and test; give more text (or a larger max_bytes)"
        )
    ends = np.cumsum([len(document.data) for document in documents])
    # Each split keeps at least one document, whatever the fractions.
    first = 1 + int(np.argmin(np.abs(ends[: n - 2] - fractions[0] * ends[-1])))
    target = (fractions[0] + fractions[1]) * ends[-1]
    second = first + 1 + int(np.argmin(np.abs(ends[first : n - 1] - target)))
    return documents[:first], documents[first:second], documents[second:]


def _stream(tokenizer: Tokenizer, documents: Sequence[Document]) -> Integer[np.ndarray, " tokens"]:
    """Concatenates the tokens of documents, a separator after each, in the narrowest dtype."""
    widths = ((1 << 8, np.uint8), (1 << 16, np.uint16))
    dtype = next((d for size, d in widths if tokenizer.vocab_size <= size), np.int32)
    separator = np.array([tokenizer.separator], dtype)
    encoded = tokenizer.encode_all(document.data for document in documents)
    parts = itertools.chain.from_iterable((ids.astype(dtype), separator) for ids in encoded)
    return np.concatenate(list(parts))


def _summarize(
    name: str, documents: Sequence[Document], tokens: int, seq_len: int, source: str
) -> SplitSummary:
    if tokens <= seq_len:
        raise ValueError(
            f"path='{source}' gives the {name} split {tokens} tokens, too few for one sequence of "
            f"seq_len={seq_len} and its target; give more text, a smaller seq_len or other "
            "fractions"
        )
    windows, unused = divmod(tokens - 1, seq_len)
    size = sum(len(document.data) for document in documents)
    return SplitSummary(len(documents), size, tokens, windows, unused)


def _fingerprint(config: DataConfig, tokenizer: Tokenizer, digests: Sequence[str]) -> str:
    content = {
        "format": _FORMAT,
        "documents": list(digests),  # of seed and content
        "tokenizer": tokenizer.to_json(),
        "fractions": list(config.fractions),
        "max_bytes": config.max_bytes,
        "seq_len": config.seq_len,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
