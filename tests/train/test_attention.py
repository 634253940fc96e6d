"""Flash attention is chosen where it can be, and refused in one sentence where it cannot."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from train import attention
from train.attention import choose_attention
from train.llama import Llama, LlamaConfig


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for an NVIDIA GPU."""
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    device = types.SimpleNamespace(platform="gpu", client=client)
    monkeypatch.setattr(attention.jax, "devices", lambda: [device])
    return device


def test_auto_is_flash_on_an_nvidia_gpu(gpu: types.SimpleNamespace) -> None:
    assert choose_attention("auto", "bfloat16", 64) == ("cudnn", "this is an NVIDIA GPU.")
    assert choose_attention("cudnn", "bfloat16", 128) == ("cudnn", "named by the caller.")
    assert choose_attention("xla", "bfloat16", 64) == ("xla", "named by the caller.")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "obstacle"),
    [
        ("float32", 64, "computes in 16 bits, and the model in float32"),
        ("bfloat16", 136, "at most 128 channels, a multiple of 8, and the model's have 136"),
        ("bfloat16", 20, "a multiple of 8, and the model's have 20"),
    ],
)
def test_models_that_flash_cannot_compute(
    gpu: types.SimpleNamespace, dtype: str, head_dim: int, obstacle: str
) -> None:
    name, reason = choose_attention("auto", dtype, head_dim)
    assert name == "xla" and obstacle in reason
    with pytest.raises(ValueError, match=f"attention is 'cudnn', but .*{obstacle}; give xla"):
        choose_attention("cudnn", dtype, head_dim)


def test_other_devices(gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.client.platform_version = "rocm 60000"
    assert choose_attention("auto", "bfloat16", 64)[0] == "xla"
    monkeypatch.undo()
    name, reason = choose_attention("auto", "bfloat16", 64)
    assert (name, reason) == ("xla", "cuDNN needs an NVIDIA GPU, and this is a cpu.")
    with pytest.raises(ValueError, match="attention is 'flash', but must be one of auto"):
        choose_attention("flash", "bfloat16", 64)


@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_the_model_uses_what_its_configuration_names(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def record(q: Any, k: Any, v: Any, *, is_causal: bool, implementation: str) -> Any:
        seen.append((is_causal, implementation))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    config = LlamaConfig.preset("tiny", attention=name)
    jax.eval_shape(Llama(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert seen == [(True, name)] * config.layers


def test_a_configuration_names_an_implementation() -> None:
    with pytest.raises(ValueError, match="attention is 'auto', but must be 'xla' or 'cudnn'"):
        LlamaConfig.preset("tiny", attention="auto")
