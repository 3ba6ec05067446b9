"""What a restore costs training, beside what it costs on disk.

Trains, saves every 25 steps through each method with its own reference, restores at several
points, trains 100 steps on in several batch orders, and compares validation losses with those of
the same orders from the true state. *Lost steps* are the mean gap over the slope of the curve; the
bound is one-sided, 95%, over batch orders. Bytes are a save's mean from the fourth save on;
``key_bytes`` are those of the first. ``params_ratio`` is of the parameters in the median save, so
that a key frame on the way, which the mean of bytes counts, is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lcjax import policy
from lcjax.bench import BenchError, _rivals
from lcjax.bench._coders import Coder, Files, Saved
from lcjax.bench._lost_steps import Curve, estimate, fit
from lcjax.bench._tasks import FULL, MODELS, OPTIMIZERS, QUICK, Size, State, Task, divergence

HELP = "bytes per save and steps of training lost by a restore, beside other lossy methods"
EVERY = 25  # steps between two saves
FIRST = 50  # the first save, a key frame
STEADY = 3  # saves that do not count: the key frame, and two that settle
AFTER = (25, 50, 75, 100)  # steps after a restore at which the loss is taken
CURVE_FROM = 100  # the curve is fitted from here on
OUT = "lcjax-bench-fidelity"
EXACT = "exact"
OURS = ("balanced", "extreme")
ORBAX = "Orbax"
PUBLISHED = _rivals.Excp()
# The grid that ExCP's constants are tuned on, from no pruning of parameters to all it can.
ALPHAS = (0.0, 5e-5, 5e-3, 1e-2, 1.0)
BETAS = (0.0, 1.0, 2.0)
TUNED_RATIO = 60  # the second tuned row reaches it


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
      size: of the models.
      points: steps of the restores.
      orders: batch orders of our presets and of tuned ExCP.
      fewer: those of the other methods.
      optimizers: by default.
    """

    size: Size
    points: tuple[int, ...]
    orders: int
    fewer: int
    optimizers: tuple[str, ...]


FULL_PLAN = Plan(FULL, (300, 450, 600), 8, 4, OPTIMIZERS)
QUICK_PLAN = Plan(QUICK, (200,), 4, 2, ("adamw",))


class Method(NamedTuple):
    """A row of the table.

    Attributes:
      name: its name.
      make: its coder, given a folder.
      orders: how many batch orders.
    """

    name: str
    make: Callable[[pathlib.Path], Coder]
    orders: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments."""
    add = parser.add_argument
    add("--quick", action="store_true", help="small models, one restore, AdamW: under 10 minutes")
    add("--models", default=None, help=f"some of {','.join(MODELS)} (default: all that can run)")
    add("--optimizers", default=None, help=f"some of {','.join(OPTIMIZERS)}")
    add("--methods", metavar="TEXT", help="only methods with this in their name")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw bytes against lost steps")
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(OUT),
        metavar="DIR",
        help=f"where results are kept: a run that stops goes on from there (default: {OUT})",
    )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures what is not in the folder yet, and prints the outcome.

    Raises:
      BenchError: arguments that make no sense, data or a package missing, results of other
        settings in the folder.
    """
    plan = QUICK_PLAN if options.quick else FULL_PLAN
    results = Results(options.out, plan)
    rows: list[dict[str, Any]] = []
    with _quiet():
        for task in _tasks(options, plan):
            bench = _Bench(task, plan, results, options.out / "saves")
            rows += bench.rows(options.methods or "")
    if not rows:
        raise BenchError(f"no method has {options.methods!r} in its name")
    if options.plot:
        picture(rows, options.plot)
    return rows


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices of Orbax and of lossy presets."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tasks(options: argparse.Namespace, plan: Plan) -> Iterator[Task]:
    models = _some(options.models, MODELS, MODELS)
    for model in models:
        for optimizer in _some(options.optimizers, OPTIMIZERS, plan.optimizers):
            try:
                yield Task(model, optimizer, plan.size)
            except BenchError as error:
                if options.models:
                    raise
                _say(f"{model} is left out: {error}")
                break


def _some(text: str | None, known: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    names = text.split(",") if text else default
    for name in names:
        if name not in known:
            raise BenchError(f"unknown {name!r}; choose from {', '.join(known)}")
    return names


class Results:
    """Measurements in a file of JSON lines, so that a run can stop and go on.

    Args:
      folder: where the file is.
      plan: written at its top.

    Raises:
      BenchError: the file has results of other settings or presets.
    """

    def __init__(self, folder: pathlib.Path, plan: Plan):
        rules = {name: repr(policy.Preset(name).all_rules) for name in policy.PRESETS}
        head = json.loads(json.dumps({"plan": plan, "presets": rules}))
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        self._found: dict[tuple[Any, ...], Any] = {}
        text = self._path.read_text() if self._path.exists() else ""
        lines = text.splitlines()
        if text and not text.endswith("\n"):  # cut off when a run was stopped
            self._path.write_text(text + "\n")
        if not lines:
            self._path.write_text(json.dumps(head) + "\n")
        elif json.loads(lines[0]) != head:
            raise BenchError(
                f"{self._path} has results of other settings or presets: delete it, or name "
                "another folder with --out"
            )
        for line in lines[1:]:
            try:
                key, value = json.loads(line)
            except ValueError:
                continue  # a line that was cut off
            self._found[tuple(key)] = value

    def get(self, *key: Any) -> Any:
        """What was measured, or None."""
        return self._found.get(key)

    def once(self, *key: Any, measure: Callable[[], Any]) -> Any:
        """What was measured, now if it was not before."""
        if key not in self._found:
            self._found[key] = measure()
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


class _Bench:
    """One task's measurements."""

    def __init__(self, task: Task, plan: Plan, results: Results, folder: pathlib.Path):
        self._task, self._plan, self._results, self._folder = task, plan, results, folder
        self._states: dict[int, State] = {}
        self._truth: dict[int, np.ndarray] = {}
        self._curve = Curve(0.0, 0.0)

    def rows(self, wanted: str) -> list[dict[str, Any]]:
        """Measures all methods with ``wanted`` in their name, and Orbax."""
        self._train()
        methods = [m for m in self._methods() if m.name == ORBAX or wanted in m.name]
        if self._task.optimizer == "adamw" and wanted in "ExCP, tuned":
            methods += self._tuned()
        made = [self._row(method) for method in methods]
        orbax = made[0]
        for row in made:
            row["ratio_orbax"] = orbax["bytes"] / row["bytes"]
        return made + [self._rarely(row, orbax) for row in made if row["method"] in OURS]

    def _train(self) -> None:
        """The uninterrupted run: states at every save, the curve of its loss."""
        task, last = self._task, max(self._plan.points)
        _say(f"{task.name}: training")
        state, losses = task.start(), {}
        for step in range(0, last + AFTER[-1], EVERY):
            state = task.train(state, 0, step, EVERY)
            if FIRST <= step + EVERY <= last:
                self._states[step + EVERY] = jax.device_get(state)
            if step + EVERY >= CURVE_FROM:
                losses[step + EVERY] = task.validation_loss(state)
        self._curve = fit(losses)
        self._truth = {p: task.log_probabilities(self._states[p]) for p in self._plan.points}

    def _methods(self) -> list[Method]:
        few, many = self._plan.fewer, self._plan.orders
        methods = [
            Method(ORBAX, lambda folder: Files(folder), 1),
            Method("lossless", lambda folder: Files(folder, "lossless"), 1),
            *(
                Method(name, lambda folder, name=name: Files(folder, name), many)  # type: ignore[misc]
                for name in OURS
            ),
            *(
                Method(
                    f"paper, {bits} bits",
                    lambda folder, bits=bits: Files(folder, "paper", bits),  # type: ignore[misc]
                    few,
                )
                for bits in (2, 3, 4)
            ),
            Method("SZ3, 0.5 rms", lambda _: _rivals.sz3(0.5, 0.5), few),
            Method("SZ3, 1.5 rms", lambda _: _rivals.sz3(1.5, 1.0), few),
            Method("8-bit moments", lambda _: _rivals.eight_bit(), few),
        ]
        if self._task.optimizer == "adamw":
            methods.append(Method("ExCP, published", lambda _: _rivals.excp(PUBLISHED), few))
        return methods

    def _tuned(self) -> list[Method]:
        """ExCP with the fewest lost steps on this run: of all its constants, of small ones."""
        point = self._plan.points[len(self._plan.points) // 2]
        trials = []
        for constants in (_rivals.Excp(alpha, beta) for alpha in ALPHAS for beta in BETAS):
            measure = functools.partial(self._trial, constants, point)
            key = (self._task.name, "trial", f"ExCP, {constants}")
            trials.append((*self._results.once(*key, measure=measure), constants))
        chosen = {"ExCP, tuned": min(trials)[2]}
        small = [trial for trial in trials if trial[1] >= TUNED_RATIO]
        if small:
            chosen[f"ExCP, tuned above {TUNED_RATIO}x"] = min(small)[2]
        for name, constants in chosen.items():
            _say(f"{self._task.name}: {name}: {constants}")
        return [
            Method(name, lambda _, c=constants: _rivals.excp(c), self._plan.orders)  # type: ignore[misc]
            for name, constants in chosen.items()
        ]

    def _trial(self, constants: _rivals.Excp, point: int) -> tuple[float, float]:
        """Mean loss after a restore in two orders, and the ratio, after four saves."""
        coder = _rivals.excp(constants)
        for step in range(point - 4 * EVERY, point + 1, EVERY):
            saved = coder.save(step, self._states[step])
        restored, _ = coder.restore()
        losses = [self._losses(restored, point, order) for order in (1, 2)]
        ratio = _nbytes(self._states[point]) / saved.bytes
        _say(f"{self._task.name}: ExCP, {constants}: {ratio:.1f}x, loss {np.mean(losses):.4f}")
        return float(np.mean(losses)), ratio

    def _losses(self, state: State, point: int, order: int) -> list[float]:
        """Validation losses of a run that goes on from a state."""
        found, at = [], 0
        for after in AFTER:
            state = self._task.train(state, order, point + at, after - at)
            at = after
            found.append(self._task.validation_loss(state))
        return found

    def _row(self, method: Method) -> dict[str, Any]:
        cells = [(p, o) for p in self._plan.points for o in range(1, method.orders + 1)]
        missing = [cell for cell in cells if not self._results.get(*self._key(method, *cell))]
        if missing or not self._results.get(*self._key(method, "saves")):
            self._measure(method, missing)
        saves, decode, kl = self._results.get(*self._key(method, "saves"))
        steady = [Saved(*saved) for saved in saves[STEADY:]]
        restored = {cell: self._results.get(*self._key(method, *cell)) for cell in cells}
        exact = {cell: self._exact(*cell) for cell in cells}
        outcome = estimate(exact, restored, self._curve, AFTER)
        state = self._states[self._plan.points[0]]
        size = float(np.mean([s.bytes for s in steady]))
        params = float(np.median([s.params for s in steady]))
        return {
            "model": self._task.model,
            "optimizer": self._task.optimizer,
            "method": method.name,
            "bytes": round(size),
            "key_bytes": saves[0][0],
            "ratio_raw": _nbytes(state) / size,
            "ratio_orbax": None,
            "params_ratio": _nbytes(state["params"]) / params,
            "kl": kl,
            "gap": outcome.gap,
            "lost_steps": outcome.lost_steps,
            "lost_steps_upper": outcome.upper,
            "encode_s": float(np.mean([s.encode_s for s in steady])),
            "decode_s": decode,
        }

    def _key(self, method: Method, *what: Any) -> tuple[Any, ...]:
        return self._task.name, method.name, *what

    def _exact(self, point: int, order: int) -> Any:
        return self._results.once(
            self._task.name,
            EXACT,
            point,
            order,
            measure=lambda: self._losses(self._states[point], point, order),
        )

    def _measure(self, method: Method, missing: Sequence[tuple[int, int]]) -> None:
        """Saves the whole run, restoring at the points, and trains on."""
        _say(f"{self._task.name}: {method.name}")
        coder = method.make(self._folder)
        saves, seconds, divergences = [], [], []
        for step, state in self._states.items():
            saves.append(coder.save(step, state))
            if step not in self._plan.points:
                continue
            restored, decode = coder.restore()
            seconds.append(decode)
            found = self._task.log_probabilities(restored)
            divergences.append(divergence(self._truth[step], found))
            for point, order in missing:
                if point == step:
                    measure = functools.partial(self._losses, restored, point, order)
                    self._results.once(*self._key(method, point, order), measure=measure)
        coder.close()
        summary = (saves, float(np.mean(seconds)), float(np.mean(divergences)))
        self._results.once(*self._key(method, "saves"), measure=lambda: summary)

    def _rarely(self, row: dict[str, Any], orbax: dict[str, Any]) -> dict[str, Any]:
        """Orbax at intervals that write the same bytes; half a longer interval is lost."""
        interval = EVERY * orbax["bytes"] / row["bytes"]
        lost = (interval - EVERY) / 2
        unknown = dict.fromkeys(("key_bytes", "encode_s", "decode_s"))
        return {
            **row,
            **unknown,
            "method": f"Orbax every {interval:.0f} steps, as few bytes as {row['method']}",
            "params_ratio": None,
            "kl": 0.0,
            "gap": 0.0,
            "lost_steps": lost,
            "lost_steps_upper": lost,
        }


def _nbytes(state: Any) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state))


def picture(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws bytes per save against lost steps, a panel for each model and optimizer."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys((row["model"], row["optimizer"]) for row in rows))
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(6.5 * columns, 5 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for panel, task in zip(panels, tasks, strict=False):
        for row in rows:
            if (row["model"], row["optimizer"]) != task:
                continue
            ours = row["method"] in (*OURS, "lossless")
            computed = row["method"].startswith("Orbax every")
            x, y = row["bytes"] / 1e3, row["lost_steps"]
            style = {"color": "tab:red" if ours else "gray" if computed else "tab:blue"}
            above = np.nan_to_num(row["lost_steps_upper"] - y)
            panel.errorbar([x], [y], [[0], [above]], fmt="s" if ours else "o", capsize=2, **style)
            name = row["method"].partition(", as few")[0]
            panel.annotate(name, (x, y), (4, 3), textcoords="offset points", fontsize=7)
        panel.axhline(0, color="black", linewidth=0.5)
        panel.set(xscale="log", xlabel="kB per save", ylabel="lost steps", title=" ".join(task))
        panel.set_yscale("symlog", linthresh=10)
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=120)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
