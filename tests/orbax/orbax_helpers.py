"""What the tests of the Orbax side share: states, comparison bit by bit, a second opinion."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath

import lcjax
from lcjax import session

LINKED = lcjax.ChainOptions(layout="linked", delta_budget=1e9)
POOLED = lcjax.ChainOptions(layout="pooled", delta_budget=1e9, grace_seconds=0)
LAYOUTS = {"linked": LINKED, "pooled": POOLED}


def registry(preset="paper", chain=LINKED, **options):
    return lcjax.handler_registry(preset=preset, chain=chain, **options)


@contextlib.contextmanager
def manager(path, preset="paper", chain=LINKED, keep=None, handler_registry=None, **options):
    """A manager as a script would build it, with lcjax in charge of every pytree item."""
    made = ocp.CheckpointManager(
        path,
        options=ocp.CheckpointManagerOptions(max_to_keep=keep, **options),
        handler_registry=handler_registry or registry(preset, chain),
    )
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):  # a save that a test made to fail
            made.close()


def save(m, step, state, **kwargs):
    """Saves and waits."""
    m.save(step, args=ocp.args.StandardSave(state), **kwargs)
    m.wait_until_finished()


class Training:
    """A small train state that moves the way training moves one; always the same shapes."""

    def __init__(self, seed=0, rate=0.01):
        self.rng = np.random.default_rng(seed)
        self.rate = rate
        self.step = 0
        self.params = {
            "dense": {
                "kernel": self.rng.standard_normal((64, 48)).astype(np.float32),
                "bias": np.zeros(48, np.float32),
            }
        }

    def state(self):
        params = jax.tree.map(jnp.asarray, self.params)
        return {
            "params": params,
            "opt_state": optax.adam(1e-3).init(params),
            "step": self.step,
            "key": jax.random.key(self.step),
        }

    def next(self):
        self.step += 1
        self.params = jax.tree.map(
            lambda v: v + self.rate * self.rng.standard_normal(v.shape).astype(np.float32),
            self.params,
        )
        return self.state()


def every_kind():
    """A tree of every kind of leaf and container, with the values that are easily lost."""
    odd = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0x807FFFFF], np.uint32)
    grid = np.arange(-8, 8)
    return {
        "float32": jnp.asarray(odd.view(np.float32)),
        "float32_large": jnp.linspace(-1, 1, 1000, dtype=jnp.float32).reshape(20, 50),
        "float16": jnp.asarray(np.array([1, 0x8000, 0x7E01, 0x03FF], np.uint16).view(np.float16)),
        "bfloat16": jnp.asarray(np.array([1, 0x8000, 0x7FC1], np.uint16).view(ml_dtypes.bfloat16)),
        "float8_e4m3fn": jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
        "float8_e5m2": jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2)),
        "int4": jnp.asarray(grid, jnp.int4),
        "uint4": jnp.asarray(grid + 8, jnp.uint4),
        "int8": jnp.asarray(grid, jnp.int8),
        "uint8": jnp.arange(256, dtype=jnp.uint8),
        "int32": jnp.asarray([-(2**31), 2**31 - 1], jnp.int32),
        "bool": jnp.asarray([True, False, True]),
        "complex64": jnp.asarray([1 - 2j, complex("nan"), -0.0j], jnp.complex64),
        "empty": jnp.zeros((0, 3), jnp.float32),
        "zero_d": jnp.asarray(-0.0, jnp.float32),
        "numpy_float64": np.array([1 / 3, -0.0, np.nan, 5e-324]),
        "numpy_int64": np.array([-(2**63), 2**63 - 1]),
        "numpy_strided": np.arange(12.0, dtype=np.float32).reshape(3, 4).T,
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "python": {"int": -5, "large": 10**30, "float": 0.1, "zero": -0.0, "bool": True},
        "text": "schön",
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "nested": [1, [jnp.ones(2)], {"x": None}],
    }


def same(a, b, where=""):
    """Asserts that two trees are the same: containers, types, dtypes and every bit."""
    assert type(a) is type(b) or (isinstance(a, jax.Array) and isinstance(b, jax.Array)), (
        f"{where}: {type(a)} against {type(b)}"
    )
    if isinstance(a, dict):
        assert sorted(map(repr, a)) == sorted(map(repr, b)), f"{where}: {[*a]} against {[*b]}"
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{where}: {len(a)} against {len(b)} children"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{k}")
    elif isinstance(a, jax.Array | np.ndarray):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(a) == jax.random.key_impl(b), where
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype, f"{where}: {a.dtype} against {b.dtype}"
        assert a.shape == b.shape, f"{where}: {a.shape} against {b.shape}"
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{where}: other bits"
    elif len(jax.tree.leaves(a)) != 1 or jax.tree.leaves(a)[0] is not a:  # a registered class
        assert jax.tree.structure(a) == jax.tree.structure(b), where
        same(jax.tree.leaves(a), jax.tree.leaves(b), where)
    else:
        assert repr(a) == repr(b), f"{where}: {a!r} against {b!r}"


def abstract(tree):
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def item_of(root, step, item="default"):
    return epath.Path(root) / str(step) / item


def opened(root, step, item="default"):
    return session.Opened(item_of(root, step, item))


def is_key_frame(root, step, item="default"):
    with opened(root, step, item) as o:
        return o.record.key_frame


def chain_length(root, step, item="default"):
    with opened(root, step, item) as o:
        return len(o.chain_refs)


class Recorder:
    """What each step must restore to, computed beside the handler by the pure functions.

    The handler alone decides which step is a key frame and what a delta builds on; given
    that, the pure functions must come to the very same values.
    """

    def __init__(self, root, item="default", preset="paper"):
        self.root, self.item, self.preset = root, item, preset
        self.refs = {}
        self.expected = {}
        self.bases = {}
        self._steps_of = {}

    def note(self, step, tree, preset=None):
        """Follows a save that is on disk now."""
        with opened(self.root, step, self.item) as o:
            chains, _ = o.segments()
            base = chains[0][-1].base if chains else None
            assert o.record.key_frame == (base is None)
        before = None if base is None else self.refs[base]
        _, ref = lcjax.encode(tree, before, preset=preset or self.preset)
        self.refs[ref.id] = ref
        self.bases[step] = None if base is None else self._steps_of[base]
        self._steps_of[ref.id] = step
        self.expected[step] = ref.tree

    def check(self, m, steps=None):
        """Compares every listed step with what was recorded."""
        listed = m.all_steps() if steps is None else steps
        assert listed
        for step in listed:
            same(m.restore(step), self.expected[step], f"step {step}")


def new_bytes(path, seen):
    """Bytes of the files below a path whose inodes are not in ``seen``; adds them to it."""
    total = 0
    for file in Path(path).rglob("*"):
        if file.is_file():
            status = file.stat()
            # Inode numbers of deleted files come back, but not with the same time.
            identity = (status.st_ino, status.st_mtime_ns)
            if identity not in seen:
                seen.add(identity)
                total += status.st_size
    return total


def no_links(monkeypatch, error, after=0):
    """Makes every hard link fail, from the ``after``-th on."""
    real, count = os.link, iter(range(10**9))

    def link(source, target, **kwargs):
        if next(count) >= after:
            raise error
        return real(source, target, **kwargs)

    monkeypatch.setattr("lcjax.storage.os.link", link)


def run_on_eight_devices(path, *options):
    """Runs a file of tests in a process of its own that sees eight CPU devices."""
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options, str(path)],
        env=env,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def cases_on_eight_devices(path, report):
    """The same; (class, name) of each test -> its failures and ``("skipped", reason)`` pairs."""
    done = run_on_eight_devices(path, f"--junit-xml={report}")
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = [e.text for e in case if e.tag in ("failure", "error")]
        skips = [("skipped", e.get("message")) for e in case if e.tag == "skipped"]
        key = (case.get("classname").rpartition(".")[2], case.get("name"))
        # A test with failing subtests has several entries.
        found.setdefault(key, []).extend(failures or skips)
    return found
