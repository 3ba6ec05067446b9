"""lcjax against Orbax itself: every kind of leaf, asked for in every way.

What is expected comes from Orbax's own handlers, run on the same input, wherever they accept it.
Where lcjax differs on purpose a table says what it gives instead, and why: ``parity_table.py`` for
leaves, ``parity_trees.py`` for partial targets, and the dicts below.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import parity_table as table
import parity_trees as trees
import pytest
from orbax_helpers import item_of, manager, opened, run_on_eight_devices, same, save

import lcjax
from lcjax import tree
from lcjax.container import Reader

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    # Where Orbax gives up in the middle of reading, that is reported later.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LEAVES = table.leaves()
# What Orbax's PyTree handler saves: text too, but no numpy scalars.
PYTREE_LEAVES = {
    name
    for name in LEAVES
    if name == "py_str" or not (name in table.SAVED_BY_US_ALONE or name.startswith("scalar_"))
}


@pytest.fixture(scope="module")
def standard():
    made = table.Pair()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pytree():
    made = table.Pair(ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave, ocp.args.PyTreeRestore)
    yield made
    made.close()


class TestLeaves:
    @pytest.mark.parametrize(
        ("name", "column"), table.cells(LEAVES, table.COLUMNS, LEAVES, table.COLUMNS)
    )
    def test_cell(self, standard, name, column):
        table.check_cell(standard, name, LEAVES[name], column, table.COLUMNS[column])

    def test_every_difference_has_its_cell(self):
        columns = {*table.COLUMNS, *table.PLACED}
        for name, column in table.differences():
            assert name in LEAVES and column in columns
        assert {*table.SAVED_BY_US_ALONE} <= {*LEAVES}

    def test_on_eight_devices(self):
        here = Path(__file__).parent
        done = run_on_eight_devices(here / "parity_sharded.py", "-o", "addopts=")
        assert done.returncode == 0, done.stdout[-8000:]
        passed = int(done.stdout.rpartition(" passed")[0].split()[-1])
        assert passed >= 250, done.stdout[-2000:]
        assert "skipped" not in done.stdout

    @pytest.mark.parametrize("kind", ["larger", "smaller"])
    @pytest.mark.parametrize("name", ["two_d", "int4", "bfloat16"])
    def test_not_strict(self, standard, name, kind):
        leaf = LEAVES[name]
        standard.save(name, {"leaf": leaf, "other": 1})
        shape = (leaf.shape[0] + {"larger": 3, "smaller": -3}[kind], *leaf.shape[1:])
        target = {"leaf": jax.ShapeDtypeStruct(shape, leaf.dtype), "other": 0}
        theirs, ours = standard.restore(name, target, strict=False)
        table.alike(ours["leaf"], theirs["leaf"], name)
        assert ours["leaf"].shape == shape
        for found in standard.restore(name, target):
            assert isinstance(found, ValueError)

    def test_a_numpy_target_of_another_shape_is_not_ignored(self, standard):
        standard.save("np_float32", {"leaf": LEAVES["np_float32"], "other": 1})
        target = {"leaf": np.zeros(5, np.float32), "other": 0}
        theirs, ours = standard.restore("np_float32", target)
        assert theirs["leaf"].shape == (8,)  # whatever the target says
        table.refused(ours)
        _, ours = standard.restore("np_float32", target, strict=False)
        same(ours["leaf"], LEAVES["np_float32"][:5])

    def test_casts_warn_of_nothing(self, tmp_path):
        state = {
            "nan": jnp.asarray(np.float32("nan")),
            "large": jnp.asarray(1e30),
            "c": jnp.ones(1) * 1j,
        }
        target = {
            "nan": jax.ShapeDtypeStruct((), jnp.float16),
            "large": jax.ShapeDtypeStruct((), jnp.float16),
            "c": jax.ShapeDtypeStruct((1,), jnp.float32),
        }
        with manager(tmp_path, "lossless") as m:
            save(m, 0, state)
            with np.errstate(all="raise"):
                restored = m.restore(0, args=ocp.args.StandardRestore(target))
        assert np.isnan(restored["nan"])
        assert np.isinf(restored["large"])
        assert restored["c"].tolist() == [0.0]


class TestContainers:
    @pytest.mark.parametrize("name", trees.containers())
    def test_with_and_without_a_target(self, standard, name):
        state = trees.containers()[name]
        assert standard.save(f"container_{name}", state) == (None, None)
        theirs, ours = standard.restore(f"container_{name}")
        same(ours, theirs, "no target")
        for target in (state, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)):
            theirs, ours = standard.restore(f"container_{name}", target)
            assert jax.tree.structure(ours) == jax.tree.structure(state)
            assert jax.tree.structure(ours) == jax.tree.structure(theirs)
            same(jax.tree.leaves(ours), jax.tree.leaves(theirs))
            assert type(ours) is type(state)

    def test_int_keys_stay_ints(self, standard):
        state = {"k": {1: trees.X, 20: trees.Y}}
        standard.save("int_keys", state)
        theirs, ours = standard.restore("int_keys")
        assert [*theirs["k"]] == ["1", "20"]
        assert [*ours["k"]] == [1, 20]
        theirs, ours = standard.restore("int_keys", state)
        same(ours, theirs)

    def test_a_bare_leaf_and_an_empty_tree(self, standard):
        for name, state in {"leaf": trees.X, "number": 3, "no_leaf": {}}.items():
            theirs, ours = standard.save(f"bare_{name}", state)
            assert isinstance(theirs, ValueError)
            assert ours is None
            for target in (None, state):
                same(standard.restore(f"bare_{name}", target)[1], state)


def fields(metadata):
    if metadata is None or isinstance(metadata, dict | list | tuple):
        return metadata
    of_all = {"type": type(metadata), "name": metadata.name, "in": metadata.directory.name[-5:]}
    named = ("shape", "dtype", "sharding")
    return of_all | {field: getattr(metadata, field, None) for field in named}


def is_described(metadata):
    return metadata is None or hasattr(metadata, "directory") or not jax.tree.leaves(metadata)


def same_metadata(ours, theirs):
    ours, theirs = (
        jax.tree_util.tree_flatten_with_path(m, is_leaf=is_described)[0] for m in (ours, theirs)
    )
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        a, b = fields(a), fields(b)
        for described in (a, b):
            if isinstance(described, dict):
                described.pop("in", None)
        assert a == b, jax.tree_util.keystr(path)


class TestMetadata:
    CUSTOM = {"run": "a", "numbers": [1, 2.5, None]}  # noqa: RUF012

    def state(self, pair):
        pytree = pair.saving is ocp.args.PyTreeSave
        names = PYTREE_LEAVES if pytree else {*LEAVES} - {*table.SAVED_BY_US_ALONE}
        kinds = {name: LEAVES[name] for name in LEAVES if name in names}
        return {"leaves": kinds, **trees.containers()}

    @pytest.fixture(params=["standard", "pytree"])
    def described(self, request):
        """The metadata that the two checkpointers give, with and without custom metadata."""
        pair = request.getfixturevalue(request.param)
        state = self.state(pair)
        found = {}
        for name, custom in (("plain", None), ("custom", self.CUSTOM)):
            assert pair.save(f"metadata_{name}", state, custom_metadata=custom) == (None, None)
            found[name] = tuple(
                c.metadata(pair.path(f"metadata_{name}", kind))
                for kind, c in (("orbax", pair.theirs), ("lcjax", pair.ours))
            )
        return found

    @pytest.mark.parametrize("name", ["plain", "custom"])
    def test_of_a_checkpointer(self, described, name):
        theirs, ours = described[name]
        assert type(ours) is type(theirs)
        for field in ("metrics", "performance_metrics", "custom_metadata"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert ours.item_handlers == "lcjax.CheckpointHandler"
        assert type(ours.item_metadata) is type(theirs.item_metadata)
        assert ours.item_metadata.custom_metadata == theirs.item_metadata.custom_metadata
        assert ours.item_metadata.custom_metadata == (self.CUSTOM if name == "custom" else None)
        same_metadata(ours.item_metadata.tree, theirs.item_metadata.tree)

    def test_how_it_is_stored_is_not_said_in_orbaxs_terms(self, described):
        theirs, ours = (m.item_metadata.tree["leaves"]["float32"] for m in described["plain"])
        assert theirs.storage.chunk_shape == (8,)
        assert ours.storage is None

    def test_of_a_manager(self, tmp_path):
        state = {"leaves": {n: LEAVES[n] for n in ("float32", "key", "py_int", "none")}, "n": [1]}
        found = []
        for kind, make in (
            ("orbax", lambda path: ocp.CheckpointManager(path)),
            ("lcjax", lambda path: manager(path, "lossless")),
        ):
            with make(tmp_path / kind) as m:
                args = ocp.args.StandardSave(state, custom_metadata=self.CUSTOM)
                m.save(3, args=args, custom_metadata={"step": 3}, metrics={"loss": 1.0})
                m.wait_until_finished()
                found.append((m.item_metadata(3), m.metadata(3)))
        (their_item, their_step), (our_item, our_step) = found
        same_metadata(our_item.tree, their_item.tree)
        assert our_item.custom_metadata == their_item.custom_metadata == self.CUSTOM
        assert our_step.custom_metadata == their_step.custom_metadata == {"step": 3}
        assert our_step.metrics == their_step.metrics
        same_metadata(our_step.item_metadata.tree, our_item.tree)


# Orbax wants np.dtype in SaveArgs; lcjax takes jnp.bfloat16 as well.
SAVED_DTYPES = ["bfloat16", "float16", "float32", "float64", "int32", "int8"]


class TestSaveArgs:
    STATE = {  # noqa: RUF012
        "jax": jnp.linspace(-3, 3, 9),
        "numpy": np.linspace(-3, 3, 9),
        "int": 3,
        "float": 0.1,
        "bool": True,
        "none": None,
        "empty": {},
        "nested": [jnp.arange(3), (1.5,)],
    }

    @pytest.mark.parametrize("dtype", SAVED_DTYPES)
    @pytest.mark.parametrize("kind", ["standard", "pytree"])
    def test_dtype(self, request, kind, dtype):
        pair = request.getfixturevalue(kind)
        arg = ocp.SaveArgs(dtype=np.dtype(dtype))
        for name, args in (
            ("all", jax.tree.map(lambda _: arg, self.STATE)),
            ("one", {**jax.tree.map(lambda _: ocp.SaveArgs(), self.STATE), "jax": arg}),
            ("some", {**jax.tree.map(lambda _: None, self.STATE), "numpy": arg}),
        ):
            key = f"save_args_{dtype}_{name}"
            assert pair.save(key, self.STATE, save_args=args) == (None, None)
            theirs, ours = pair.restore(key)
            same(ours, theirs, name)
            assert ours["jax" if name == "one" else "numpy"].dtype == (
                jax.dtypes.canonicalize_dtype(dtype) if name == "one" else dtype
            )

    def test_keys_and_text_have_no_dtype(self, pytree):
        state = {"k": jax.random.key(1), "t": "text"}
        args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype("float16")), state)
        assert pytree.save("save_args_keys", state, save_args=args) == (None, None)
        same(pytree.restore("save_args_keys")[1], state)

    def test_a_tree_of_another_structure_is_refused(self, standard):
        args = {"jax": ocp.SaveArgs()}
        for found in standard.save("save_args_other", self.STATE, save_args=args):
            assert isinstance(found, ValueError)


ARGS = trees.restore_args()
TARGETS = trees.argument_targets()
NO_SHARDING = "Orbax wants a sharding for a jax array; lcjax takes the saved or the default one"
NO_DTYPE = "Orbax casts the data of PRNG keys and then fails; keys have no dtype"
# Arguments under which lcjax restores what Orbax refuses, as it was saved.
LENIENT = {
    "jax": NO_SHARDING,
    "array": NO_SHARDING,
    "dtype": NO_DTYPE,
    "dtype bfloat16": NO_DTYPE,
    "sharding and dtype": NO_DTYPE,
}
OF_A_SHAPE = ("same shape", "larger, strict", "larger", "smaller", "another rank")


def argument_cells():
    cells = []
    for leaf in trees.ARGUMENT_LEAVES:
        shape = getattr(LEAVES[leaf], "shape", ())
        for target in TARGETS:
            if target == "float16" and not table.is_array(LEAVES[leaf]):
                continue
            cells += [
                (leaf, target, arg)
                for arg in ARGS
                if arg not in OF_A_SHAPE or (shape and not table.is_key(LEAVES[leaf]))
            ]
    return cells


class TestRestoreArgs:
    @pytest.mark.parametrize(("name", "target", "arg"), argument_cells())
    def test_cell(self, pytree, name, target, arg):
        leaf = LEAVES[name]
        assert pytree.save(name, {"leaf": leaf, "other": 1}) == (None, None)
        item = None if target == "no target" else {"leaf": TARGETS[target](leaf), "other": 0}
        args = {"leaf": ARGS[arg](leaf), "other": ocp.RestoreArgs()}
        theirs, ours = pytree.restore(name, item, restore_args=args)
        where = f"{name}, {target}, {arg}"
        if isinstance(theirs, Exception):
            if isinstance(ours, Exception):
                table.refused(ours)
            elif table.is_key(leaf):
                assert LENIENT.get(arg) is NO_DTYPE or target == "float16", where
                same(ours["leaf"], leaf, where)
            else:
                assert LENIENT[arg] is NO_SHARDING, where
                exact = leaf if table.is_array(leaf) else jnp.asarray(leaf)
                # Orbax too would complete the arguments with the target's dtype.
                dtype = np.float16 if (target, arg) == ("float16", "array") else exact.dtype
                same(np.asarray(ours["leaf"]), np.asarray(exact).astype(dtype), where)
            return
        assert not isinstance(ours, Exception), (where, ours)
        is_exact = isinstance(ours["leaf"], np.ndarray) and table.is_jax(theirs["leaf"])
        if is_exact:  # see table.EXACT
            assert name == "np_float64"
            shape = theirs["leaf"].shape
            kept = min(shape[0], len(leaf))
            same(ours["leaf"][:kept], leaf[:kept])
            assert ours["leaf"].shape == shape
            assert not ours["leaf"][kept:].any()
        else:
            table.alike(ours["leaf"], theirs["leaf"], where, cast=True)
        assert ours["other"] == 1

    def test_they_are_matched_through_the_target(self, tmp_path):
        """An nnx state saved as its pure dict, and arguments for the state."""
        state = trees.containers()["nnx_state"]
        pure = jax.tree.map(lambda x: x, {"linear": {"kernel": state["linear"]["kernel"][...]}})
        wanted = trees.nnx.State({"linear": {"kernel": state["linear"]["kernel"]}})
        args = jax.tree.map(lambda _: ocp.RestoreArgs(dtype=jnp.float16), wanted)
        with manager(tmp_path, "lossless") as m:
            save(m, 0, pure)
            restored = m.restore(0, args=ocp.args.PyTreeRestore(wanted, restore_args=args))
        assert jax.tree.leaves(restored)[0].dtype == jnp.float16

    def test_arguments_for_leaves_that_were_not_saved_are_refused(self, pytree):
        pytree.save("float32", {"leaf": LEAVES["float32"], "other": 1})
        args = {"leaf": ocp.RestoreArgs(), "other": ocp.RestoreArgs(), "typo": ocp.RestoreArgs()}
        theirs, ours = pytree.restore("float32", restore_args=args)
        assert isinstance(theirs, ValueError)
        table.refused(ours)
        assert "typo" in str(ours)


class TestPartial:
    @pytest.mark.parametrize("case", trees.partial_cases())
    def test_case(self, pytree, case):
        assert pytree.save("partial", trees.base()) == (None, None)
        target, options = trees.partial_cases()[case]
        theirs, ours = pytree.restore("partial", target, **options)
        if case in trees.PARTIAL_DIFFERENCES:
            _, expected = trees.PARTIAL_DIFFERENCES[case]
            if expected is None:
                table.refused(ours)
                assert not isinstance(theirs, Exception), "the table is out of date"
            else:
                same(ours, expected)
                with pytest.raises(AssertionError):  # else the table is out of date
                    same(theirs, expected)
        elif isinstance(theirs, Exception):
            assert isinstance(ours, lcjax.TreeMismatchError), ours
        else:
            assert not isinstance(ours, Exception), ours
            same(ours, theirs)

    def test_what_stays_as_it_was_is_named_in_the_log(self, pytree, caplog):
        pytree.save("partial", trees.base())
        target = {"x": 0, "n": {"new": 5}, "other": 1}
        with caplog.at_level("WARNING"):
            _, ours = pytree.restore("partial", target, partial_restore=True)
        assert (ours["n"], ours["other"]) == ({"new": 5}, 1)
        assert [r.message for r in caplog.records if "n/new, other" in r.message]

    def test_lcjaxs_own_arguments_want_every_leaf_of_the_target(self, tmp_path):
        with manager(tmp_path, "lossless") as m:
            save(m, 0, trees.base())
            with pytest.raises(lcjax.TreeMismatchError, match="'new'"):
                m.restore(0, args=lcjax.args.Restore({"new": 5}, partial_restore=True))

    def test_standard_takes_placeholders_too(self, standard):
        standard.save("partial", trees.base())
        theirs, ours = standard.restore("partial", trees.changed(x=...))
        assert isinstance(theirs, ValueError)
        same(ours, trees.changed(x=...))

    def test_without_a_shape_to_go_by_the_limit_on_memory_holds(self, tmp_path, monkeypatch):
        state = {"x": jnp.zeros(1000), "y": 1}
        target = {"x": jax.ShapeDtypeStruct((1000,), jnp.float32), "y": 0}
        with manager(tmp_path, "lossless") as m:
            save(m, 0, state)
            monkeypatch.setenv("LCJAX_MAX_RESTORE_BYTES", "3999")
            for args in (
                ocp.args.PyTreeRestore({"x": 0, "y": 0}),
                ocp.args.PyTreeRestore({"x": 0}, partial_restore=True),
                ocp.args.StandardRestore(target, strict=False),
                ocp.args.StandardRestore(),
            ):
                with pytest.raises(lcjax.CorruptDataError, match="more than 3999 bytes"):
                    m.restore(0, args=args)
            same(m.restore(0, args=ocp.args.StandardRestore(target)), state)
            assert m.restore(0, args=ocp.args.PyTreeRestore({"y": 0}, partial_restore=True)) == {
                "y": 1
            }


class TestNames:
    """``tree.match_names`` and ``tree.flatten_names`` by themselves."""

    def saved(self):
        return tree.flatten({"a": {"b": 1, "c": [2, 3]}, "d": None, "e": {}}).skeleton

    @pytest.mark.parametrize(
        ("target", "kept"),
        [
            ({"a": {"new": 0}}, [("a", "new")]),
            ({"new": {"deep": 0}}, [("new", "deep")]),
            ({"e": {"new": 0}}, [("e", "new")]),
            ({"a": {"c": [0]}}, []),
        ],
    )
    def test_room_for_new_leaves(self, target, kept):
        matched = tree.match_names(target, self.saved(), partial=True)
        assert [*matched.kept] == kept
        assert matched.rebuild(["x"] * len(matched.pairs)) == {
            **target,
            **({"a": {"c": ["x"]}} if not kept else {}),
        }
        with pytest.raises(lcjax.TreeMismatchError):
            tree.match_names(target, self.saved())

    @pytest.mark.parametrize(
        "target",
        [
            {"a": 0},
            {"a": {"b": {"deeper": 0}}},
            {"a": {"c": [0, 0, 0]}},
            {"a": {"c": {"x": 0}}},
            {"d": 0},
            {"d": {"x": 0}},
            {"e": 0},
            [0],
        ],
    )
    def test_no_room(self, target):
        if target == [0]:
            assert tree.match_names(target, self.saved(), partial=True).kept == (("0",),)
            return
        with pytest.raises(lcjax.TreeMismatchError, match="missing from the checkpoint"):
            tree.match_names(target, self.saved(), partial=True)

    def test_placeholders_need_not_have_been_saved(self):
        target = {"a": {"b": ..., "c": [0, 0]}, "d": ..., "new": ...}
        matched = tree.match_names(target, self.saved())
        assert matched.skipped == (0,)
        assert matched.kept == ()
        assert matched.rebuild([7, 8]) == {"a": {"b": ..., "c": [7, 8]}, "d": ..., "new": ...}


class Chunks:
    """Which chunks of an item belong to which leaf, and which of them were read."""

    def __init__(self, root, step, monkeypatch):
        with opened(root, step) as o:
            chains, own = o.segments()
            self.of = {}
            for segment in [s for chain in chains for s in chain] + own:
                for name, leaf in segment.leaves.items():
                    for chunk in leaf.chunks.values():
                        key = (segment.reader.name, chunk.number)
                        where = (segment.reader.where, segment.reader._chunks[chunk.number])
                        self.of.setdefault(name, {})[key] = where
        self.read = set()
        real = Reader.chunk

        def chunk(reader, number):
            self.read.add((reader.name, number))
            return real(reader, number)

        monkeypatch.setattr(Reader, "chunk", chunk)

    def damage(self, name):
        """Flips a bit in every chunk of a leaf."""
        for path, (offset, size, _) in self.of[name].values():
            data = bytearray(Path(path).read_bytes())
            assert size > 0
            data[offset + size // 2] ^= 1
            Path(path).write_bytes(bytes(data))


WAYS = {
    "PyTreeRestore": lambda kept: ocp.args.PyTreeRestore({kept: 0}, partial_restore=True),
    "lcjax": lambda kept: lcjax.args.Restore({kept: jnp.zeros((40, 50))}, partial_restore=True),
    "placeholders": lambda kept: ocp.args.PyTreeRestore(
        {"a": ..., "b": ..., "c": {"d": ...}, "n": ..., kept: 0}
    ),
    "Standard placeholders": lambda kept: ocp.args.StandardRestore(
        {"a": ..., "b": ..., "c": {"d": ...}, "n": ..., kept: jnp.zeros((40, 50))}
    ),
    "Standard None": lambda kept: ocp.args.StandardRestore(
        {"a": None, "b": None, "c": {"d": None}, "n": None, kept: jnp.zeros((40, 50))}
    ),
}


@pytest.mark.parametrize("preset", ["lossless", "paper"])
@pytest.mark.parametrize("way", WAYS)
class TestOnlyWhatIsReturnedIsDecoded:
    @pytest.fixture
    def expected(self, tmp_path, preset):
        """Three steps of a chain; what the last one restores to as a whole."""
        rng = np.random.default_rng(0)

        def leaf(scale):
            return jnp.asarray(rng.standard_normal((40, 50)).astype(np.float32) * scale)

        state = {"a": leaf(1), "b": leaf(1), "c": {"d": leaf(1)}, "n": jnp.arange(2000)}
        with manager(tmp_path, preset) as m:
            for step in range(3):
                save(m, step, state)
                state = jax.tree.map(lambda v: v + (leaf(0.01) if v.ndim == 2 else 1), state)
            return m.restore(2)

    @pytest.mark.parametrize("kept", ["a", "b"])
    def test_chunks(self, tmp_path, expected, preset, way, kept, monkeypatch):
        with manager(tmp_path, preset) as m:
            chunks = Chunks(tmp_path, 2, monkeypatch)
            assert {*chunks.of} == {"a", "b", "c/d", "n"}
            restored = m.restore(2, args=WAYS[way](kept))
            same(restored[kept], expected[kept])
            assert chunks.read
            others = {key for name in chunks.of if name != kept for key in chunks.of[name]}
            assert not chunks.read & others
            assert {*chunks.of[kept]} <= chunks.read
            m.restore(2)
            assert others <= chunks.read

    def test_damage_elsewhere_does_not_matter(self, tmp_path, expected, preset, way, monkeypatch):
        chunks = Chunks(tmp_path, 2, monkeypatch)
        for name in ("b", "c/d", "n"):
            chunks.damage(name)
        with manager(tmp_path, preset) as m:
            same(m.restore(2, args=WAYS[way]("a"))["a"], expected["a"])
            for damaged in ("b",):
                with pytest.raises(lcjax.CorruptDataError, match="damaged"):
                    m.restore(2, args=WAYS[way](damaged))
            with pytest.raises(lcjax.CorruptDataError, match="damaged"):
                m.restore(2)
        assert (item_of(tmp_path, 2) / "manifest.lcjax").exists()
