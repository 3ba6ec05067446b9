"""A trainer that is to be killed: forks one run for each line of its standard input.

Each line is ``root layout seed``. The run restores the latest step, checks it against the
log, and goes on saving for ever; it logs each step once it is committed. Forking saves
importing everything anew for each run.
"""

import hashlib
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax_helpers import LAYOUTS, registry

KEEP = 3


def true_state(step):
    """What the trainer holds at a step; the same in every process."""
    rng = np.random.default_rng(7)
    params = rng.standard_normal((64, 48)).astype(np.float32)
    moved = np.random.default_rng(step).standard_normal((64, 48)).astype(np.float32)
    return {"params": {"kernel": params + np.float32(0.01) * moved}, "count": np.int64(step)}


def digest(tree):
    parts = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def log_of(root):
    """Step -> digest, of the steps known to be committed."""
    try:
        with open(root + ".log") as file:
            lines = [line.split() for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return {}
    return {int(step): found for step, found in lines}


def open_manager(root, layout):
    return ocp.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(max_to_keep=KEEP, cleanup_tmp_directories=True),
        handler_registry=registry("paper", LAYOUTS[layout]),
    )


def train(root, layout):
    m = open_manager(root, layout)
    latest = m.latest_step()
    if latest is not None:
        restored = m.restore(latest)
        assert digest(restored) == log_of(root).get(latest, digest(restored))
    step = 0 if latest is None else latest + 1
    with open(root + ".log", "a") as log:
        while True:
            state = jax.tree.map(jnp.asarray, true_state(step))
            m.save(step, args=ocp.args.StandardSave(state))
            m.wait_until_finished()
            log.write(f"{step} {digest(m.restore(step))}\n")
            log.flush()
            step += 1


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        root, layout = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                train(root, layout)
            finally:
                os._exit(1)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main()
