"""Tests, trees and checkpoints that the Orbax wheel ships, with lcjax in the place of Orbax.

They need eight devices; ``test_orbax_inherited.py`` runs them in a process of their own.
"""

from pathlib import Path

import jax
import orbax.checkpoint as ocp
import parity_chex
import pytest
from absl import flags
from orbax.checkpoint._src.handlers import composite_checkpoint_handler, pytree_checkpoint_handler
from orbax_helpers import same
from test_orbax_inherited import CANNOT_PASS, SAVED_BY_US, WORDINGS

import lcjax

flags.FLAGS.mark_as_parsed()
parity_chex.provide()
from orbax.checkpoint._src.checkpointers import checkpointer_test_utils  # noqa: E402
from orbax.checkpoint._src.testing import test_tree_utils  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Where Orbax gives up in the middle of reading, that is reported later.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def ours(handler):
    """What takes the place of a handler of Orbax's tests."""
    if isinstance(handler, pytree_checkpoint_handler.PyTreeCheckpointHandler):
        return lcjax.CheckpointHandler("lossless")
    if isinstance(handler, composite_checkpoint_handler.CompositeCheckpointHandler):
        registry = lcjax.handler_registry("lossless")
        return composite_checkpoint_handler.CompositeCheckpointHandler(handler_registry=registry)
    return handler


class _Inherited(checkpointer_test_utils.CheckpointerTestBase.Test):
    def setUp(self):
        name = self.id().rpartition(".")[2]
        for start, reason in CANNOT_PASS.items():
            if name.startswith(start):
                self.skipTest(reason)
        super().setUp()

    def assertRaisesRegex(self, error, pattern, *args, **kwargs):
        return super().assertRaisesRegex(error, WORDINGS.get(pattern, pattern), *args, **kwargs)


class TestCheckpointer(_Inherited):
    def checkpointer(self, handler, **kwargs):
        return ocp.Checkpointer(ours(handler), **kwargs)


class TestAsyncCheckpointer(_Inherited):
    def checkpointer(self, handler, **kwargs):
        return ocp.AsyncCheckpointer(ours(handler), **kwargs)


del _Inherited  # it is not a test by itself

EMPTY = {"None": None, "Dict": {}, "List": [], "Tuple": ()}


def expected_metadata(case):
    """Orbax's table: what is empty as itself, of leaves the name of their type."""
    return jax.tree.map(
        lambda entry: EMPTY[entry.value_type] if entry.skip_deserialize else entry.value_type,
        case.expected_nested_tree_metadata,
    )


def described(metadata):
    if isinstance(metadata, ocp.metadata.ScalarMetadata):
        return "scalar"
    return "np.ndarray" if metadata.sharding is None else "jax.Array"


@pytest.mark.parametrize("saving", [ocp.args.PyTreeSave, ocp.args.StandardSave])
@pytest.mark.parametrize("case", test_tree_utils.TEST_PYTREES, ids=str)
def test_trees(tmp_path, case, saving):
    tree = case.provide_tree()
    with ocp.Checkpointer(lcjax.CheckpointHandler("lossless")) as checkpointer:
        if case.expected_save_response is not None and case.unique_name not in SAVED_BY_US:
            # Orbax raises a ValueError; here the error has a class of its own.
            with pytest.raises(lcjax.UnsupportedLeafError, match=case.unique_name):
                checkpointer.save(tmp_path / "item", args=saving(tree))
            return
        checkpointer.save(tmp_path / "item", args=saving(tree))
        restoring = {
            ocp.args.PyTreeSave: ocp.args.PyTreeRestore,
            ocp.args.StandardSave: ocp.args.StandardRestore,
        }[saving]
        restored = checkpointer.restore(tmp_path / "item", args=restoring(tree))
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        same(jax.tree.leaves(restored), jax.tree.leaves(tree))
        metadata = checkpointer.metadata(tmp_path / "item").item_metadata.tree
    if case.unique_name not in SAVED_BY_US:
        assert jax.tree.map(described, metadata) == expected_metadata(case)


CHECKPOINTS = (
    Path(ocp.__file__).parent / "experimental/v1/_src/testing/compatibility/checkpoints"
) / "v0_checkpoints"
ITEMS = sorted(
    [
        *CHECKPOINTS.glob("direct_checkpoint/*/*"),
        *CHECKPOINTS.glob("composite_checkpoint/*/*/state"),
    ]
)


def outcome(handler, path, args):
    """What a restore gives, or that it failed."""
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            return checkpointer.restore(path, args=args)
    except Exception as e:
        return e


@pytest.mark.parametrize(
    "path", ITEMS, ids=[str(p.relative_to(CHECKPOINTS)).replace("/", "-") for p in ITEMS]
)
def test_checkpoints_of_plain_orbax(path):
    for theirs, args in (
        (ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeRestore),
        (ocp.StandardCheckpointHandler(), ocp.args.StandardRestore),
    ):
        expected = outcome(theirs, path, args())
        found = outcome(lcjax.CheckpointHandler(), path, args())
        if isinstance(expected, Exception):
            assert isinstance(found, (OSError, ValueError)), found
        else:
            same(found, expected)
    if "has_metadata" in path.parts[-1] + path.parts[-2]:
        assert isinstance(found, dict)
