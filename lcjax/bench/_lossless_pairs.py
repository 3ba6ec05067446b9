"""Pairs of successive states to code: made by training, kept in a file for the next time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from lcjax.demo.settings import Settings
from lcjax.dtypes import dtype_from_name

BFLOAT16 = "bfloat16"
FINE_TUNE_RATE = 1e-5  # AdamW then moves about 2% of bfloat16 values to a neighbour
MOMENTS = ("mu", "nu")


class Table(NamedTuple):
    """The hashed trigram model whose embedding is the pair ``embedding``.

    Attributes:
      rows: buckets that trigrams of bytes are hashed to.
      width: elements of a row.
      warmup: steps before the first state.
      rate: learning rate of plain gradient descent, which leaves unused rows alone.
    """

    rows: int = 1 << 15
    width: int = 64
    warmup: int = 100
    rate: float = 1.0


class Leaf(NamedTuple):
    """An array at two moments, both contiguous and of the same shape and dtype."""

    old: np.ndarray
    new: np.ndarray


class Pair(NamedTuple):
    """Two successive states of one kind of array.

    Attributes:
      name: for example ``nu late``.
      leaves: the model's arrays in a fixed order.
    """

    name: str
    leaves: tuple[Leaf, ...]

    @property
    def dtype(self) -> np.dtype:
        """That of all leaves."""
        return self.leaves[0].new.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one of the two states in memory."""
        return sum(leaf.new.nbytes for leaf in self.leaves)


Progress = Callable[[str], None]


def pairs(folder: pathlib.Path, settings: Settings, table: Table, progress: Progress) -> list[Pair]:
    """The pairs of given settings, from the folder if they have been made before.

    Args:
      folder: where the states are kept; made if missing.
      settings: what is trained: the early pair ends after a quarter of the steps, the late one
        after nine tenths, and ``save_every`` steps lie between the states of a pair.
      table: the embedding's model.
      progress: told in words what is being trained.
    """
    about = json.dumps([dataclasses.asdict(settings), table._asdict(), FINE_TUNE_RATE])
    digest = hashlib.sha256(about.encode()).hexdigest()[:12]
    path = folder / f"states-{digest}.npz"
    if path.is_file():
        return _load(path)
    made = [*_trained(settings, "float32", progress), *_trained(settings, BFLOAT16, progress)]
    progress("embedding")
    made.append(Pair("embedding", (_embedding(settings, table),)))
    folder.mkdir(parents=True, exist_ok=True)
    _save(path, made)
    return made


def marks(settings: Settings) -> dict[str, tuple[int, int]]:
    """The steps of each phase's two states."""
    gap = settings.save_every
    ends = {"early": settings.steps // 4, "late": settings.steps * 9 // 10}
    return {name: (end - end % gap - gap, end - end % gap) for name, end in ends.items()}


def _save(path: pathlib.Path, made: Iterable[Pair]) -> None:
    """Writes pairs; numpy's files know no bfloat16, so the bits are stored."""
    arrays = {}
    for pair in made:
        for index, leaf in enumerate(pair.leaves):
            for side, value in leaf._asdict().items():
                bits = value.view(f"u{value.dtype.itemsize}")
                arrays[f"{pair.name}|{pair.dtype.name}|{index}|{side}"] = bits
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def _load(path: pathlib.Path) -> list[Pair]:
    """Reads what ``_save`` wrote, in the same order."""
    found: dict[tuple[str, str], dict[str, list[np.ndarray]]] = {}
    with np.load(path) as file:
        for key in file.files:
            name, dtype, _, side = key.split("|")
            sides = found.setdefault((name, dtype), {"old": [], "new": []})
            sides[side].append(file[key].view(dtype_from_name(dtype, str(path))))
    return [
        Pair(name, tuple(map(Leaf, sides["old"], sides["new"])))
        for (name, _), sides in found.items()
    ]


def _trained(settings: Settings, dtype: str, progress: Progress) -> list[Pair]:
    """Trains the demo's transformer; parameters and moments of both phases.

    In bfloat16 everything is: parameters, gradients and moments. From the end of that run a
    second one goes on with a small constant rate, as a fine-tune does.
    """
    from lcjax.demo import train

    params, _ = train.Program(settings).init()
    params = _cast(params, dtype)
    opt_state = train.optimizer(settings).init(params)
    wanted = marks(settings)
    last = max(step for both in wanted.values() for step in both)
    progress(f"transformer, {dtype}")
    states = {}
    for step, state in _steps(settings, params, opt_state, last):
        if step == last:
            params = state[0]
        if any(step in both for both in wanted.values()):
            states[step] = _arrays(*state)
    made = [
        Pair(f"{kind} {phase}", tuple(map(Leaf, states[a][kind], states[b][kind])))
        for phase, (a, b) in wanted.items()
        for kind in ("params", *MOMENTS)
    ]
    if dtype == BFLOAT16:
        progress("fine-tune, bfloat16")
        made.append(_fine_tune(settings, params))
    return made


def _fine_tune(settings: Settings, params: Any) -> Pair:
    """Goes on from trained parameters with a new optimizer and a small rate."""
    from lcjax.demo import train

    gap = settings.save_every
    seed, steps = settings.seed + 1, 100 * gap
    tuned = dataclasses.replace(
        settings, learning_rate=FINE_TUNE_RATE, warmup=1, steps=steps, seed=seed
    )
    opt_state = train.optimizer(tuned).init(params)
    states = {
        step: _arrays(*state)["params"]
        for step, state in _steps(tuned, params, opt_state, 2 * gap)
        if step in (gap, 2 * gap)
    }
    return Pair("params fine-tune", tuple(map(Leaf, states[gap], states[2 * gap])))


def _steps(
    settings: Settings, params: Any, opt_state: Any, last: int
) -> Iterable[tuple[int, tuple[Any, Any]]]:
    """Trains, and yields each step's number and state; the state is gone after the next one."""
    import jax
    import jax.numpy as jnp

    from lcjax.demo import data, train

    program = train.Program(settings)
    text = data.load_corpus().train
    # The step donates its arguments; what the caller has stays the caller's.
    params, opt_state = jax.tree.map(jnp.copy, (params, opt_state))
    yield 0, (params, opt_state)
    for step in range(last):
        tokens = data.batch(text, settings.seed, step, settings.batch, settings.model.length)
        params, opt_state, _ = program.step(params, opt_state, tokens)
        yield step + 1, (params, opt_state)


def _arrays(params: Any, opt_state: Any) -> dict[str, list[np.ndarray]]:
    """Copies of the parameters and of Adam's moments, leaf by leaf."""
    import jax

    trees = {"params": params, **{name: getattr(opt_state[0], name) for name in MOMENTS}}
    return {name: [np.array(leaf) for leaf in jax.tree.leaves(one)] for name, one in trees.items()}


def _cast(tree: Any, dtype: str) -> Any:
    import jax

    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _embedding(settings: Settings, table: Table) -> Leaf:
    """A float32 table ``(rows, width)`` of which a step changes only the rows that it used.

    The model predicts a byte from the row that the three bytes before it are hashed to.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from lcjax.demo import data
    from lcjax.demo.model import VOCABULARY

    def loss(both: tuple[Any, Any], rows: Any, following: Any) -> Any:
        logits = both[0][rows] @ both[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    @jax.jit
    def step(both: tuple[Any, Any], rows: Any, following: Any) -> tuple[Any, Any]:
        gradient = jax.grad(loss)(both, rows, following)
        return jax.tree.map(lambda p, g: p - table.rate * g, both, gradient)

    rng = np.random.default_rng(settings.seed)
    shapes = ((table.rows, table.width), (table.width, VOCABULARY))
    both = tuple(jnp.asarray(0.1 * rng.standard_normal(s), jnp.float32) for s in shapes)
    text = data.load_corpus().train
    old = None
    for number in range(table.warmup + settings.save_every):
        if number == table.warmup:
            old = np.array(both[0])
        tokens = data.batch(text, settings.seed, number, settings.batch, settings.model.length)
        rows = _hashed(tokens, table.rows)
        both = step(both, rows, tokens[:, 3:])
    assert old is not None
    return Leaf(old, np.array(both[0]))


def _hashed(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Bucket of the three bytes before each byte but the first three, int32."""
    words = tokens.astype(np.uint32)
    key = words[:, :-3] << 16 | words[:, 1:-2] << 8 | words[:, 2:-1]
    mixed = (key * np.uint32(0x9E3779B1)) >> np.uint32(8)  # the low bits mix least
    return (mixed % np.uint32(rows)).astype(np.int32)
