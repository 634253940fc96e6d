"""A Llama in Flax Linen whose blocks' linear layers are made by a factory: any precision fits in.

Parameter tree: 'embedding', 'block_<i>/{attention_norm, attention/{q, k, v, o}, mlp_norm,
mlp/{gate, up, down}}', 'norm' and, unless the head is tied to the embedding, 'head'.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from train.loss import linear_cross_entropy

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 (Radford et al. 2019)."""

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and precision of a Llama.

    Attributes:
      vocab_size: number of tokens.
      dim: width of the residual stream.
      layers: number of blocks.
      heads: query heads; a head has dim / heads channels.
      kv_heads: key and value heads, each shared by heads / kv_heads query heads.
      ffn_dim: inner width of the feed-forward layers.
      rope_theta: base of the rotary wavelengths.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: whether the LM head is the embedding table.
      dtype: dtype of the computation, by name ('bfloat16' or 'float32').
      param_dtype: dtype of the stored parameters, by name.
      remat: whether blocks are recomputed in the backward pass instead of being stored.
      attention: implementation of attention, 'xla' or 'cudnn'; see
        `train.attention.choose_attention`.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: bool = False
    attention: Literal["xla", "cudnn"] = "xla"

    def __post_init__(self) -> None:
        """Checks the configuration.

        Raises:
          ValueError: for a value no model can have.
        """
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, but must be an int of at least 1.")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, but must be positive and finite.")
        for name in ("dtype", "param_dtype"):
            # Names, not types, are stored: they compare, hash and go through JSON.
            object.__setattr__(self, name, _dtype_name(name, getattr(self, name)))
        if self.attention not in ("xla", "cudnn"):
            raise ValueError(f"attention is {self.attention!r}, but must be 'xla' or 'cudnn'.")
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}, but must be a multiple of heads ({self.heads}).")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, but must be a multiple of kv_heads ({self.kv_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"dim / heads is {self.dim} / {self.heads} = {self.head_dim}, but must be even: "
                "rotary embedding turns pairs of channels."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "LlamaConfig":
        """A configuration by name, with some of its values changed.

        The two 'llama-3' presets have the published shapes, without the rescaling of rotary
        frequencies that lets the published weights read beyond 8192 tokens.

        Args:
          name: one of `PRESETS`.
          **changes: attributes to replace, such as `vocab_size=256`.

        Raises:
          ValueError: for an unknown name or attribute, or values that do not go together.
        """
        if name not in PRESETS:
            raise ValueError(f"model is {name!r}, but must be {_choices(name, PRESETS)}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for change in changes:
            if change not in known:
                raise ValueError(
                    f"model attribute is {change!r}, but must be {_choices(change, known)}."
                )
        return cls(**{**PRESETS[name], **changes})


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": dict(vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=160),
    "small": dict(vocab_size=256, dim=128, layers=4, heads=4, kv_heads=2, ffn_dim=352),
    "85m": dict(vocab_size=256, dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048),
    "llama-3.2-1b": dict(
        vocab_size=128_256,
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn_dim=8192,
        rope_theta=500_000.0,
    ),
    "llama-3.1-8b": dict(
        vocab_size=128_256,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn_dim=14_336,
        rope_theta=500_000.0,
        tie_embeddings=False,
    ),
}
"""Model shapes by name."""


def rotary_embedding(
    x: Float[Array, "batch length heads channels"],
    positions: Int[Array, " length"],
    theta: float,
) -> Float[Array, "batch length heads channels"]:
    """Turns channel pairs by an angle that grows with position (RoFormer, arXiv 2104.09864).

    Channel i is paired with channel i + channels / 2 and turns by
    position * theta^(-2i / channels). Scores between turned queries and keys depend on the
    difference of their positions alone.

    Args:
      x: queries or keys, with an even number of channels.
      positions: of the tokens.
      theta: base of the wavelengths.

    Returns:
      The turned x, in its dtype; angles and products are float32.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245) with rotary positions."""

    config: LlamaConfig
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "batch length dim"]) -> Float[Array, "batch length dim"]:
        """Mixes tokens with those before them."""
        config = self.config
        batch, length, _ = x.shape
        positions = jnp.arange(length)

        def heads(name: str, count: int) -> Array:
            y = _linear(self.dense, config, count * config.head_dim, name)(x)
            return y.reshape(batch, length, count, config.head_dim)

        q = rotary_embedding(heads("q", config.heads), positions, config.rope_theta)
        k = rotary_embedding(heads("k", config.kv_heads), positions, config.rope_theta)
        v = heads("v", config.kv_heads)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=config.attention)
        y = y.reshape(batch, length, config.dim)
        return _linear(self.dense, config, config.dim, "o", residual=True)(y)


class MLP(nn.Module):
    """SwiGLU feed-forward layer (arXiv 2002.05202)."""

    config: LlamaConfig
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "batch length dim"]) -> Float[Array, "batch length dim"]:
        """Maps each token by itself."""
        config = self.config
        gate = _linear(self.dense, config, config.ffn_dim, "gate")(x)
        up = _linear(self.dense, config, config.ffn_dim, "up")(x)
        return _linear(self.dense, config, config.dim, "down", residual=True)(nn.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block."""

    config: LlamaConfig
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "batch length dim"]) -> Float[Array, "batch length dim"]:
        """Adds attention, then the feed-forward layer, to the residual stream."""
        config = self.config
        y = _norm(config, "attention_norm")(x)
        x = x + Attention(config, self.dense, name="attention")(y)
        y = _norm(config, "mlp_norm")(x)
        return x + MLP(config, self.dense, name="mlp")(y)


class Head(nn.Module):
    """The weight of an LM head of its own."""

    config: LlamaConfig

    @nn.compact
    def __call__(self) -> Float[Array, "dim vocab"]:
        """The weight as it is stored."""
        config = self.config
        init = nn.initializers.normal(INIT_STD)
        return self.param("kernel", init, (config.dim, config.vocab_size), config.param_dtype)


class Llama(nn.Module):
    """A Llama language model.

    Attributes:
      config: shape and precision.
      dense: makes the linear layers of the blocks, called as
        `dense(features, use_bias=False, dtype=..., param_dtype=..., kernel_init=..., name=...)`.
        Embedding and LM head are plain Flax.
    """

    config: LlamaConfig
    dense: Callable[..., nn.Module] = nn.Dense

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        targets: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "..."]:
        """Predicts each next token.

        Args:
          tokens: [batch, length]; one outside the vocabulary gives NaN.
          targets: the next tokens, for a loss that needs no array of all logits; one beyond the
            vocabulary gives NaN.

        Returns:
          float32 logits [batch, length, vocab], or the mean cross entropy of the targets in nats.

        Raises:
          TypeError: if tokens are not integers.
          ValueError: if tokens are not 2-D.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens have dtype {tokens.dtype}, but must be integers.")
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tokens.shape}, but must be [batch, length].")
        config = self.config
        embedding = nn.Embed(
            config.vocab_size,
            config.dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=nn.initializers.normal(INIT_STD),
            name="embedding",
        )
        x = embedding(tokens)
        block = nn.remat(Block) if config.remat else Block
        for i in range(config.layers):
            x = block(config, self.dense, name=f"block_{i}")(x)
        x = _norm(config, "norm")(x)
        if config.tie_embeddings:
            w, axis = embedding.embedding, 1
        else:
            w, axis = Head(config, name="head")(), 0
        if targets is not None:
            return linear_cross_entropy(x, w, targets, axis=axis)
        with jax.named_scope("head"):
            logits = lax.dot_general(x, w.astype(x.dtype), (((2,), (axis,)), ((), ())))
        return logits.astype(jnp.float32)


def cross_entropy(
    logits: Float[Array, "... vocab"], targets: Int[Array, "..."]
) -> Float[Array, ""]:
    """Mean cross entropy in nats, in float32; NaN for a target beyond the vocabulary."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.mean(losses)


def parameter_count(params: PyTree) -> int:
    """Number of values in a tree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def flops_per_token(config: LlamaConfig, length: int) -> int:
    """Floating-point operations of a training step per token: 6 N + 12 layers * length * dim.

    N counts the weights that multiply a token: the blocks' linear layers and the LM head. A weight
    costs a multiplication and an addition in the forward pass and twice that in the backward pass;
    the second term is the attention scores and their use, counted without the causal mask (PaLM,
    arXiv 2204.02311, appendix B). Recomputation is not counted.

    Args:
      config: of the model.
      length: of the sequences, in tokens.
    """
    attention = config.dim * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = 3 * config.dim * config.ffn_dim
    weights = config.layers * (attention + mlp) + config.dim * config.vocab_size
    return 6 * weights + 12 * config.layers * length * config.dim


def _norm(config: LlamaConfig, name: str) -> nn.Module:
    # RMSNorm (arXiv 1910.07467); Flax computes the statistics and the scaling in float32.
    return nn.RMSNorm(config.norm_eps, config.dtype, config.param_dtype, name=name)


def _linear(
    dense: Callable[..., nn.Module],
    config: LlamaConfig,
    features: int,
    name: str,
    residual: bool = False,
) -> nn.Module:
    # Projections into the residual stream start smaller, by 1/sqrt of their number (GPT-2, Radford
    # et al. 2019), so that the stream's variance does not grow with depth.
    std = INIT_STD / (2 * config.layers) ** 0.5 if residual else INIT_STD
    return dense(
        features,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.normal(std),
        name=name,
    )


def _dtype_name(name: str, value: Any) -> str:
    try:
        dtype = jnp.dtype(value).name
    except TypeError:
        dtype = None
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is {value!r}, but must be 'bfloat16' or 'float32'.")
    return dtype


def _choices(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"one of {', '.join(known)}" + (f" (close: {', '.join(close)})" if close else "")
