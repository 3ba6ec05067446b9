"""What ``lcjax bench fidelity`` trains: two models, three optimizers, repeatable batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lcjax.bench import data_file
from lcjax.demo import data as text
from lcjax.demo.model import Config, Transformer

MODELS = ("transformer", "cnn")
OPTIMIZERS = ("adamw", "sgd", "muon")
HORIZON = 1500  # steps of the schedule; the benchmark looks at its first half
WARMUP = 50
FASHION = "fashion12k.npz"

State = dict[str, Any]


class Size(NamedTuple):
    """How large a task is.

    Attributes:
      width: of the transformer; the CNN has a quarter of it as channels.
      depth: blocks of the transformer.
      batch: sequences of the transformer per step; the CNN takes four times as many images.
      validation: sequences to validate on; four times as many images.
    """

    width: int
    depth: int
    batch: int
    validation: int


FULL = Size(width=128, depth=3, batch=8, validation=256)
QUICK = Size(width=64, depth=2, batch=8, validation=128)


class Cnn(nnx.Module):
    """Two convolutions and two dense layers for images of 28 x 28."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, channels, (3, 3), rngs=rngs)
        self.second = nnx.Conv(channels, 2 * channels, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(49 * 2 * channels, 4 * channels, rngs=rngs)
        self.out = nnx.Linear(4 * channels, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps float32 ``(batch, 28, 28, 1)`` to logits ``(batch, 10)``."""
        x = nnx.max_pool(nnx.relu(self.first(images)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


class Task:
    """A model, an optimizer and data; everything in it repeats bit for bit on one machine.

    Args:
      model: one of ``MODELS``.
      optimizer: one of ``OPTIMIZERS``.
      size: how large.

    Raises:
      BenchError: the model's data is not there.
    """

    def __init__(self, model: str, optimizer: str, size: Size):
        self.name = f"{model} {optimizer}"
        self.model, self.optimizer = model, optimizer
        build, loss, self._batch, self._validation = _MODELS[model](size)
        graph, _ = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        tx = _transform(model, optimizer)

        def init() -> State:
            params = nnx.state(build(rngs=nnx.Rngs(0)), nnx.Param)
            return {"params": params, "opt_state": tx.init(params)}

        def loss_of(params: Any, batch: Any) -> jax.Array:
            return _cross_entropy(loss(nnx.merge(graph, params), batch[0]), batch[1])

        def step(state: State, batch: Any) -> State:
            gradient = jax.grad(loss_of)(state["params"], batch)
            updates, opt_state = tx.update(gradient, state["opt_state"], state["params"])
            return {
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
            }

        def logits(params: Any, inputs: Any) -> jax.Array:
            values = loss(nnx.merge(graph, params), inputs)
            return jax.nn.log_softmax(values.reshape(-1, values.shape[-1]))

        self._init = jax.jit(init)
        self._step = jax.jit(step, donate_argnums=0)
        self._logits = jax.jit(logits)

    def start(self) -> State:
        """The state before the first step."""
        return self._init()

    def train(self, state: State, order: int, first: int, steps: int) -> State:
        """Trains on; the given state stays as it is.

        Args:
          state: numpy or jax arrays.
          order: number of the batch order.
          first: steps that the state has behind it.
          steps: how many to take.
        """
        state = jax.tree.map(jnp.array, state)
        for step in range(first, first + steps):
            state = self._step(state, self._batch(order, step))
        return state

    def log_probabilities(self, state: State) -> np.ndarray:
        """Of every class at every validated position, float32 ``(positions, classes)``."""
        inputs, _ = self._validation
        count = max(1, len(inputs) // 4)
        parts = [inputs[at : at + count] for at in range(0, len(inputs), count)]
        return np.concatenate([np.asarray(self._logits(state["params"], p)) for p in parts])

    def validation_loss(self, state: State) -> float:
        """Mean cross-entropy over the validation set, in nats."""
        found = self.log_probabilities(state)
        labels = self._validation[1].reshape(-1)
        return float(-found[np.arange(labels.size), labels].mean(dtype=np.float64))


def divergence(true: np.ndarray, other: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence from log probabilities ``(positions, classes)``, in nats."""
    true = true.astype(np.float64)
    return float((np.exp(true) * (true - other)).sum(axis=1).mean())


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _transform(model: str, optimizer: str) -> optax.GradientTransformation:
    """The optimizer, its rate warmed up and then on a cosine over ``HORIZON`` steps."""

    def rate(peak: float) -> Callable[[Any], Any]:
        return optax.warmup_cosine_decay_schedule(0.0, peak, WARMUP, HORIZON)

    adam_rate = 2e-3 if model == "transformer" else 1e-3
    if optimizer == "sgd":
        return optax.sgd(rate(0.1 if model == "transformer" else 0.02), momentum=0.9)
    if optimizer == "muon":
        return optax.contrib.muon(rate(adam_rate), consistent_rms=0.2)
    return optax.adamw(rate(adam_rate))


def _transformer(size: Size) -> Any:
    """Builder, logits, batches and validation set of the demo's model and text."""
    config = Config(width=size.width, depth=size.depth, heads=4, length=64)
    corpus = text.load_corpus()
    held_out = text.validation_set(corpus.validation, size.validation, config.length)

    def batch(order: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = text.batch(corpus.train, order, step, size.batch, config.length)
        return tokens[:, :-1], tokens[:, 1:]

    build = functools.partial(Transformer, config)
    return build, Transformer.__call__, batch, (held_out[:, :-1], held_out[:, 1:])


def _cnn(size: Size) -> Any:
    """The same of the small CNN and Fashion-MNIST."""
    source = "Fashion-MNIST: uint8 images (n, 28, 28), labels (n,), test_images, test_labels"
    with np.load(data_file(FASHION, "an excerpt of Fashion-MNIST", source)) as file:
        images, labels, test_images, test_labels = (
            file[name] for name in ("images", "labels", "test_images", "test_labels")
        )
    held_out = slice(4 * size.validation)

    def inputs(chosen: np.ndarray) -> np.ndarray:
        return (chosen[..., None] / np.float32(255)).astype(np.float32)

    def batch(order: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.random.default_rng((order, step)).integers(0, len(images), 4 * size.batch)
        return inputs(images[chosen]), labels[chosen].astype(np.int32)

    validation = inputs(test_images[held_out]), test_labels[held_out].astype(np.int32)
    return functools.partial(Cnn, size.width // 4), Cnn.__call__, batch, validation


_MODELS: dict[str, Callable[[Size], Any]] = {"transformer": _transformer, "cnn": _cnn}
