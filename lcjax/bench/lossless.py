"""Bit-exact sizes and speeds of successive training states, beside other lossless codecs.

Trains the demo's transformer, in float32 and in bfloat16, and keeps states some steps apart;
every codec stores the later state for a reader who has the earlier one. Peers get their better
case by size: array by array, or all arrays as one (column layout). All run on one core. Bytes
of lcjax are those of its chunks' payloads; ``lcjax file`` is a whole message as it is written,
hashes and descriptions included. What a codec decodes is compared with the original.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lcjax.bench import BenchError
from lcjax.bench import _lossless_methods as methods
from lcjax.bench._lossless_methods import FILE, OURS, Method, Stored
from lcjax.bench._lossless_pairs import Leaf, Pair, Table, pairs
from lcjax.demo import settings as demo

HELP = "bit-exact sizes and speeds beside other lossless codecs"
ROUNDS = 3  # of all methods in turn; the best of the rounds' medians counts
CALLS = 3  # of one method in a round, of which the median counts


class Entry(NamedTuple):
    """A method that stored a pair and gave it back.

    Attributes:
      method: the method.
      given: what it encodes, see ``Method.prepare``.
      stored: what it made of that.
      layout: ``leaves``, or ``joined`` where all arrays were given as one.
    """

    method: Method
    given: Any
    stored: Stored
    layout: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments."""
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("lcjax-bench-lossless"),
        metavar="DIR",
        help="where the states are kept for the next time (default: lcjax-bench-lossless)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--pairs", metavar="TEXT", help="only pairs with this in their name")
    parser.add_argument("--methods", metavar="TEXT", help="only methods with this in their name")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains or loads the states, runs every method on every pair, and prints the outcome.

    Raises:
      BenchError: no pair has the wanted name, or lcjax did not give back what it was given.
    """
    settings, table = demo.Settings(), Table()
    if options.quick:
        settings, table = demo.quick(settings), Table(rows=1 << 10, width=16, warmup=10)
    made = pairs(options.out, settings, table, lambda what: _say(f"training: {what}"))
    chosen = [pair for pair in made if (options.pairs or "") in pair.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(pair.name for pair in made))
        raise BenchError(f"no pair has {options.pairs!r} in its name; there are {names}")
    tools = available(methods.PEERS)
    tools = [tool for tool in tools if (options.methods or "") in tool.name or tool.name == OURS]
    rows = []
    with one_core():
        for pair in chosen:
            _say(f"coding: {pair.name} {pair.dtype.name}")
            rows += measure(pair, tools)
    for line in conclusion(rows):
        print(line)
    return rows


def available(modules: Iterable[str]) -> list[Method]:
    """Our methods and those of the peers that are installed; names the others on stderr."""
    tools = methods.own()
    for module in modules:
        found = methods.peers(module)
        if not found:
            name = methods.PEERS[module][0]
            _say(f"{name} is not installed, its rows are left out: pip install 'lcjax[bench]'")
        tools += found
    return tools


def measure(pair: Pair, tools: Sequence[Method]) -> list[dict[str, Any]]:
    """The rows of one pair.

    Raises:
      BenchError: lcjax did not give back what it was given.
    """
    entries = [entry for tool in tools if (entry := _try(pair, tool))]
    seconds: list[list[tuple[float, float]]] = [[] for _ in entries]
    for _ in range(ROUNDS):
        for entry, times in zip(entries, seconds, strict=True):
            times.append(_time(entry))
    return [
        {
            "pair": pair.name,
            "dtype": pair.dtype.name,
            "method": entry.method.name,
            "layout": entry.layout,
            "bytes": entry.stored.size,
            "ratio": pair.nbytes / entry.stored.size,
            "encode_gbs": pair.nbytes / 1e9 / min(time for time, _ in times),
            "decode_gbs": pair.nbytes / 1e9 / min(time for _, time in times),
        }
        for entry, times in zip(entries, seconds, strict=True)
    ]


def conclusion(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each pair: lcjax beside the peer that stored it in the fewest bytes."""
    lines = []
    for key in dict.fromkeys((row["pair"], row["dtype"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["pair"], row["dtype"]) == key}
        ours = found.pop(OURS)
        found.pop(FILE, None)
        if not found:
            continue
        best = min(found.values(), key=lambda row: row["bytes"])
        size, *speeds = (ours[x] / best[x] for x in ("bytes", "encode_gbs", "decode_gbs"))
        lines.append(
            f"{' '.join(key)}: {size:.3f} times the bytes of the smallest peer, {best['method']}, "
            f"at {speeds[0]:.2f} times its speed of encoding and {speeds[1]:.2f} of decoding"
        )
    return lines


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and all that are started meanwhile, on one core.

    Some peers share their work out among threads that no argument turns off.
    """
    if not hasattr(os, "sched_setaffinity"):
        _say("this system cannot keep a process on one core: z4ai runs on several")
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _try(pair: Pair, tool: Method) -> Entry | None:
    """Stores a pair in each layout that the method takes; the smaller one that is right."""
    layouts = {"leaves": pair.leaves}
    if tool.joins and len(pair.leaves) > 1:
        layouts["joined"] = (_joined(pair.leaves),)
    entries = []
    for layout, leaves in layouts.items():
        given = tool.prepare(leaves)
        stored = tool.encode(given)
        if _same(tool.decode(stored, given), leaves):
            entries.append(Entry(tool, given, stored, layout))
        elif tool.name in (OURS, FILE):
            raise BenchError(f"{tool.name} gives back other values of {pair.name}: a defect")
        else:
            _say(f"{tool.name} gives back other values of {pair.name} {pair.dtype}: left out")
    return min(entries, key=lambda entry: entry.stored.size, default=None)


def _joined(leaves: Sequence[Leaf]) -> Leaf:
    """All leaves as one flat one."""
    sides = zip(*leaves, strict=True)
    return Leaf(*(np.concatenate([part.reshape(-1) for part in side]) for side in sides))


def _same(decoded: Sequence[Any], leaves: Sequence[Leaf]) -> bool:
    """Whether every leaf came back, bit for bit."""
    return len(decoded) == len(leaves) and all(
        _raw(found) == _raw(leaf.new) for found, leaf in zip(decoded, leaves, strict=True)
    )


def _raw(value: Any) -> bytes:
    return value.tobytes() if hasattr(value, "tobytes") else bytes(value)


def _time(entry: Entry) -> tuple[float, float]:
    """Median seconds of encoding and of decoding a pair."""
    method, given, stored, _ = entry
    encode = _median(lambda: method.encode(given))
    return encode, _median(lambda: method.decode(stored, given))


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
