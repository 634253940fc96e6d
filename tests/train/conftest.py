"""What the tests of whole commands share: a corpus and a model that cost next to nothing."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from train.llama import PRESETS

_TINIER = dict(vocab_size=256, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64)


@pytest.fixture(scope="module")
def hardly_compiled() -> Iterator[None]:
    """A small model, little optimized: compiling is most of what these tests cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", _TINIER)  # pyright: ignore[reportArgumentType]
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a dozen short files."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(["row", "column", "\n"], 80)))
    return folder
