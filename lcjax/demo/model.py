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
    length: int = 64


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on a normalized residual stream.

    The stream is kept as ``(batch * length, width)``: XLA multiplies matrices of two dimensions
    half again as fast as stacks of them on a CPU.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.width
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def attend(self, x: jax.Array, batch: int) -> jax.Array:
        """Mixes each position with those before it."""
        rows, width = x.shape
        qkv = self.qkv(x).reshape(batch, rows // batch, 3, self.heads, width // self.heads)
        query, key, value = qkv.transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(rows, width))

    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """Maps ``(batch * length, width)`` to the same shape."""
        x = x + self.attend(self.attention_norm(x), batch)
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
        batch, length = tokens.shape
        x = self.embed(tokens) + self.position(jnp.arange(length))
        x = x.reshape(batch * length, -1)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(self.norm(x)).reshape(batch, length, VOCABULARY)


def loss_of(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per byte, of ``(batch, length + 1)`` tokens."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def parameter_count(config: Config) -> int:
    """Counts the parameters without allocating them."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
