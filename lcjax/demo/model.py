"""The demo's model: a small pre-norm transformer over bytes, in Flax nnx."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of the transformer.

    Attributes:
        width: size of the residual stream.
        depth: number of blocks.
        heads: attention heads per block.
        length: longest sequence, in bytes.
    """

    width: int = 192
    depth: int = 4
    heads: int = 6
    length: int = 96


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on a normalized residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.width
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(batch, length, width)`` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.position = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32 ``(batch, length)`` to logits ``(batch, length, 256)``."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per byte, of ``(batch, length + 1)`` tokens."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def parameter_count(config: Config) -> int:
    """Counts the parameters without allocating them."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
