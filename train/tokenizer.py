"""Tokenizers behind one small protocol, so that the data pipeline never asks which one it has."""

import itertools
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

SEPARATOR_TOKEN = "<|endoftext|>"
"""The token that ends a document in a vocabulary that is trained here."""

KNOWN_SEPARATOR_TOKENS = (SEPARATOR_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens of a loaded vocabulary that end a document, the first that it has."""

MIN_BPE_VOCABULARY = 257
"""256 bytes and the separator."""

_BATCH_DOCUMENTS = 64


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def separator(self) -> int:
        """The id that ends each document."""
        ...

    def encode(self, text: bytes) -> Int32[np.ndarray, " tokens"]:
        """Encodes one text, without a separator."""
        ...

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Encodes many texts, each as `encode` does."""
        ...

    def decode(self, ids: Int32[np.ndarray, " tokens"]) -> str:
        """Decodes ids; what is not UTF-8 becomes U+FFFD."""
        ...

    def to_json(self) -> str:
        """Returns what `tokenizer_from_json` reads."""
        ...


class ByteTokenizer:
    """One token per byte; NUL, which no document holds, is the separator.

    So the vocabulary is 256 wide, a token fits a byte, and any encoding passes unchanged.
    """

    vocab_size = 256
    separator = 0

    def encode(self, text: bytes) -> Int32[np.ndarray, " tokens"]:
        """Returns the bytes of a text as ids."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Encodes many texts, each as `encode` does."""
        return map(self.encode, texts)

    def decode(self, ids: Int32[np.ndarray, " tokens"]) -> str:
        """Returns the text of ids, with U+FFFD for what is not UTF-8."""
        return bytes(np.asarray(ids).tolist()).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Returns the JSON that names this tokenizer."""
        return json.dumps({"type": "byte"})


class BpeTokenizer:
    """Byte-pair encoding through `tokenizers`.

    Text must be decoded for it: bytes that are not UTF-8 become U+FFFD, with a warning. Special
    tokens are added by nobody but the data pipeline (the separator), and text that spells one is
    encoded as text. A loaded vocabulary without a separator gets `SEPARATOR_TOKEN` as a new id.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Takes over a tokenizer of the `tokenizers` package.

        Args:
            tokenizer: A copy is made; its truncation and padding, if any, are switched off.
        """
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        # A truncation saved with a pretrained vocabulary would drop most of a document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if (
            self._tokenizer.get_vocab(with_added_tokens=True)
            .keys()
            .isdisjoint(KNOWN_SEPARATOR_TOKENS)
        ):
            self._tokenizer.add_special_tokens([SEPARATOR_TOKEN])
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.separator = next(ids[token] for token in KNOWN_SEPARATOR_TOKENS if token in ids)
        # Not the number of tokens: the ids of a loaded vocabulary may have gaps.
        self.vocab_size = 1 + max(ids.values())

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> "BpeTokenizer":
        """Trains a byte-level BPE vocabulary.

        Args:
            texts: The training documents, and none of validation or test.
            vocab_size: Size to reach, with the 256 bytes and the separator; a small text can
                give fewer tokens, with a warning.

        Returns:
            The tokenizer; the same for the same texts.

        Raises:
            ValueError: If `vocab_size` is below `MIN_BPE_VOCABULARY`.
        """
        check_vocab_size(vocab_size)
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[SEPARATOR_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(_decode, texts), trainer)
        if tokenizer.get_vocab_size() < vocab_size:
            warnings.warn(
                f"vocab_size={vocab_size} is not reached: the training documents give only "
                f"{tokenizer.get_vocab_size()} tokens",
                stacklevel=2,
            )
        return cls(tokenizer)

    def encode(self, text: bytes) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of a text, with a warning if it is not UTF-8."""
        return next(self.encode_all([text]))

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Encodes many texts, each as `encode` does."""
        for batch in itertools.batched(map(_decode, texts), _BATCH_DOCUMENTS):
            # In batches, since `tokenizers` spreads one over the cores.
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int32)

    def decode(self, ids: Int32[np.ndarray, " tokens"]) -> str:
        """Returns the text of ids, special tokens spelt out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        """Returns the `tokenizer.json` of the `tokenizers` package."""
        return self._tokenizer.to_str()


def check_vocab_size(vocab_size: int) -> None:
    """Checks the size of a vocabulary that is to be trained.

    Args:
        vocab_size: Number of tokens.

    Raises:
        ValueError: If it has no room for the 256 bytes and the separator.
    """
    if vocab_size < MIN_BPE_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for BPE; give at least {MIN_BPE_VOCABULARY} "
            "(256 bytes and the document separator)"
        )


def tokenizer_from_json(text: str) -> Tokenizer:
    """Reads what `to_json` wrote, or any `tokenizer.json` of the `tokenizers` package.

    Args:
        text: The JSON.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If it is neither.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the tokenizer is not JSON ({error}); give a tokenizer.json") from error
    if content == {"type": "byte"}:
        return ByteTokenizer()
    try:
        return BpeTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # `tokenizers` raises no class of its own
        raise ValueError(
            f"the tokenizer is not one of the tokenizers package ({error}); give a tokenizer.json"
        ) from error


def load_tokenizer(path: str) -> Tokenizer:
    """Loads a tokenizer from a file.

    Args:
        path: A `tokenizer.json`.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the file is missing, cannot be read or is no tokenizer.
    """
    # These raise for no path, where those of `Path` do for a long one or an unknown user's.
    file = Path(os.path.expanduser(path))
    if not os.path.isfile(file):
        raise ValueError(
            f"tokenizer='{path}' is neither 'byte' nor 'bpe' nor an existing tokenizer.json"
        )
    try:
        return tokenizer_from_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer='{path}' cannot be used: {error}") from error


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        # The same words for each document: the default filter then shows them once.
        warnings.warn(
            "some documents are not UTF-8: BPE reads their other bytes as U+FFFD, "
            "tokenizer='byte' keeps them",
            stacklevel=2,
        )
        return text.decode("utf-8", "replace")
