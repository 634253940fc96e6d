"""Tests of the tokenizers and of their files."""

import functools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from train.tokenizer import (
    SEPARATOR_TOKEN,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_json,
)

TEXTS = [
    b"the cat sat on the mat, the rat sat on the cat. " * 20,
    b"def f(x):\n    return x\n" * 20,
]
SAMPLE = 'the cat\n\n  sat; "日本" é\t'.encode()


@functools.cache
def trained() -> BpeTokenizer:
    return BpeTokenizer.train(TEXTS, 270)


@pytest.fixture
def bpe() -> BpeTokenizer:
    return trained()


def words(**tokens: int) -> tokenizers.Tokenizer:
    """A pretrained vocabulary that splits at spaces."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(tokens, unk_token="unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@given(st.binary(max_size=200))
def test_bytes_are_their_own_ids(data: bytes):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(data)
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_byte_vocabulary_is_256_wide_and_its_separator_is_nul():
    assert (ByteTokenizer().vocab_size, ByteTokenizer().separator) == (256, 0)


@pytest.mark.parametrize("id_", [256, -1])
def test_byte_decode_refuses_other_ids(id_: int):
    with pytest.raises(ValueError, match=r"range\(0, 256\)"):
        ByteTokenizer().decode(np.array([65, id_]))


def test_bpe_has_the_size_asked_for_and_merges_what_is_frequent(bpe: BpeTokenizer):
    assert bpe.vocab_size == 270
    ids = bpe.encode(TEXTS[0])
    assert ids.dtype == np.int32
    assert len(ids) < len(TEXTS[0]) / 2
    assert set(ids.tolist()) <= set(range(270))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_bpe_round_trip(string: str):
    tokenizer = trained()
    assert tokenizer.decode(tokenizer.encode(string.encode())) == string


def test_encode_all_keeps_order_over_its_batches(bpe: BpeTokenizer):
    texts = [b"%d the cat " % i * (i % 7) for i in range(200)]
    for tokenizer in (bpe, ByteTokenizer()):
        encoded = list(tokenizer.encode_all(texts))
        assert [e.tolist() for e in encoded] == [tokenizer.encode(t).tolist() for t in texts]


def test_bpe_training_is_deterministic_and_in_the_order_of_nothing(bpe: BpeTokenizer):
    assert BpeTokenizer.train(TEXTS, 270).to_json() == bpe.to_json()
    assert BpeTokenizer.train(TEXTS[::-1], 270).to_json() == bpe.to_json()
    assert BpeTokenizer.train(TEXTS[:1], 270).to_json() != bpe.to_json()


def test_text_that_spells_the_separator_is_text(bpe: BpeTokenizer):
    text = f"a {SEPARATOR_TOKEN} b"
    ids = bpe.encode(text.encode())
    assert bpe.separator not in ids
    assert bpe.decode(ids) == text
    assert bpe.decode(np.array([bpe.separator])) == SEPARATOR_TOKEN


def test_bpe_replaces_what_is_not_utf8_and_says_so(bpe: BpeTokenizer):
    with pytest.warns(UserWarning, match="not UTF-8.*U\\+FFFD.*tokenizer='byte'"):
        ids = bpe.encode(b"caf\xe9!")
    assert bpe.decode(ids) == "caf\N{REPLACEMENT CHARACTER}!"
    with pytest.warns(UserWarning, match="not UTF-8"):
        BpeTokenizer.train([*TEXTS, b"caf\xe9"], 270)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bpe.encode("café!".encode())


def test_vocabulary_that_a_small_text_cannot_fill_warns():
    with pytest.warns(UserWarning, match="vocab_size=5000 is not reached"):
        tokenizer = BpeTokenizer.train(TEXTS, 5000)
    assert 257 < tokenizer.vocab_size < 5000


def test_vocabulary_too_small():
    with pytest.raises(ValueError, match=r"vocab_size=256 is too small for BPE.*at least 257"):
        BpeTokenizer.train(TEXTS, 256)
    assert BpeTokenizer.train(TEXTS, 257).vocab_size == 257


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: BpeTokenizer.train(TEXTS, 270)])
def test_saved_and_loaded_tokenizer_is_the_same(make, tmp_path: Path):
    saved: Tokenizer = make()
    path = tmp_path / "tokenizer.json"
    path.write_text(saved.to_json(), "utf-8")
    loaded = load_tokenizer(str(path))
    assert type(loaded) is type(saved)
    assert loaded.to_json() == saved.to_json()
    assert (loaded.vocab_size, loaded.separator) == (saved.vocab_size, saved.separator)
    assert loaded.encode(SAMPLE).tolist() == saved.encode(SAMPLE).tolist()
    assert loaded.decode(loaded.encode(SAMPLE)) == SAMPLE.decode()


def test_truncation_padding_and_templates_of_a_loaded_vocabulary_do_not_apply():
    tokenizer = words(unk=0, a=1, b=2, begin=3)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=3)
    tokenizer.post_processor = processors.TemplateProcessing("begin $A", None, [("begin", 3)])
    loaded = BpeTokenizer(tokenizer)
    assert loaded.encode(b"a b a b a").tolist() == [1, 2, 1, 2, 1]
    assert loaded.encode(b"a").tolist() == [1]
    assert tokenizer.truncation is not None  # the caller's own is left as it was


def test_separator_of_a_loaded_vocabulary():
    assert BpeTokenizer(words(**{"unk": 0, "a": 1, "</s>": 2})).separator == 2
    assert BpeTokenizer(words(**{"</s>": 0, "<|endoftext|>": 1, "unk": 2})).separator == 1
    added = BpeTokenizer(words(unk=0, a=1))
    assert (added.separator, added.vocab_size) == (2, 3)
    assert tokenizer_from_json(added.to_json()).separator == 2


def test_vocabulary_with_gaps_covers_its_largest_id():
    loaded = BpeTokenizer(words(**{"unk": 0, "a": 70_000, "</s>": 1}))
    assert loaded.vocab_size == 70_001
    assert loaded.encode(b"a").tolist() == [70_000]


def test_load_refuses_what_is_no_tokenizer(tmp_path: Path):
    for name in ("bytes", "", "x" * 300, "~no-such-user/tokenizer.json", str(tmp_path)):
        message = f"tokenizer='{name}' is neither 'byte' nor 'bpe' nor an existing"
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name)
    path = tmp_path / "tokenizer.json"
    for content, fragment in (("{", "not JSON"), (json.dumps({"a": 1}), "tokenizers package")):
        path.write_text(content, "utf-8")
        with pytest.raises(ValueError, match=f"cannot be used.*{fragment}") as caught:
            load_tokenizer(str(path))
        assert f"tokenizer='{path}'" in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be used"):
        load_tokenizer(str(path))
