"""Errors: of the package's own, naming the leaf, the file and what was expected."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax_helpers import LAYOUTS, Training, item_of, manager, opened, same, save

import lcjax
from lcjax import chain, storage
from lcjax.container import Writer

layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module", params=LAYOUTS)
def original(request, tmp_path_factory):
    """A run of three steps in one layout."""
    root = tmp_path_factory.mktemp(request.param)
    training = Training()
    with manager(root, chain=LAYOUTS[request.param]) as m:
        for step in range(3):
            save(m, step, training.next())
    return root


@pytest.fixture
def root(original, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def restore(root, step=2, **kwargs):
    with manager(root) as m:
        return m.restore(step, args=lcjax.args.Restore(**kwargs))


def files_of(root, step=2):
    """The files that a step needs, by what they are."""
    item = item_of(root, step)
    with opened(root, step) as o:
        (own,) = (ref for ref in o.refs if ref.kind == "own")
        key, *_, last = o.chain_refs
    found = {"key frame": key, "delta": last, "own": own}
    paths = {what: chain.locate(item, ref) for what, ref in found.items()}
    return {**paths, "manifest": item / chain.MANIFEST_FILE}


KINDS = ["manifest", "key frame", "delta", "own"]
kinds = pytest.mark.parametrize("kind", KINDS)


class TestDamagedFiles:
    @kinds
    def test_a_missing_file(self, root, kind):
        path = files_of(root)[kind]
        path.unlink()
        with pytest.raises(lcjax.MissingFileError, match=path.name) as caught:
            restore(root)
        assert str(path) in str(caught.value)

    def test_a_missing_manifest_is_not_taken_for_an_orbax_step(self, root):
        files_of(root)["manifest"].unlink()
        with manager(root) as m:
            for args in (ocp.args.StandardRestore(), ocp.args.PyTreeRestore(), None):
                with pytest.raises(lcjax.MissingFileError, match=r"manifest\.lcjax: missing"):
                    m.restore(2) if args is None else m.restore(2, args=args)

    @kinds
    def test_a_flipped_bit(self, root, kind):
        path = files_of(root)[kind]
        data = path.read_bytes()
        rng = np.random.default_rng(len(kind))
        offsets = {0, 8, 10, 12, 16, len(data) - 1, len(data) - 20, len(data) - 50}
        offsets |= {int(k) for k in rng.integers(0, len(data), 12)}
        for offset in sorted(offsets):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << int(rng.integers(8))
            path.write_bytes(bytes(damaged))
            with pytest.raises(
                (lcjax.CorruptDataError, lcjax.UnsupportedFormatError), match=path.name
            ):
                restore(root)
        path.write_bytes(data)
        assert restore(root)["step"] == 3

    @kinds
    def test_a_truncated_file(self, root, kind):
        path = files_of(root)[kind]
        data = path.read_bytes()
        for size in (0, 1, 15, 16, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises(lcjax.CorruptDataError, match=path.name):
                restore(root)
        path.write_bytes(data + b"x")
        with pytest.raises(lcjax.CorruptDataError, match=path.name):
            restore(root)

    def test_a_swapped_segment(self, root):
        files = files_of(root)
        shutil.copy(files["key frame"], files["delta"])
        with pytest.raises(lcjax.LcjaxError, match=files["delta"].name):
            restore(root)

    def test_damage_within_a_leaf_names_the_leaf(self, root):
        path = files_of(root)["key frame"]
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
        with pytest.raises(lcjax.CorruptDataError, match=r"expected") as caught:
            restore(root)
        assert "params/dense/" in str(caught.value)

    def test_other_steps_are_not_hurt_by_a_damaged_manifest(self, root):
        files_of(root)["manifest"].write_bytes(b"")
        assert restore(root, 1)["step"] == 2


class TestTargets:
    @pytest.fixture
    def target(self):
        return Training().next()

    def change(self, target, **params):
        return {**target, "params": {"dense": {**target["params"]["dense"], **params}}}

    def test_the_target_fits(self, original, target):
        assert restore(original, item=target)["step"] == 3

    @pytest.mark.parametrize("cls", [ocp.args.StandardRestore, ocp.args.PyTreeRestore])
    def test_a_wrong_shape(self, original, target, cls):
        wrong = self.change(target, kernel=jax.ShapeDtypeStruct((64, 47), jnp.float32))
        with (
            manager(original) as m,
            pytest.raises(
                lcjax.TreeMismatchError, match=r"'params/dense/kernel'.*\(64, 48\).*\(64, 47\)"
            ),
        ):
            m.restore(2, args=cls(wrong))

    def test_a_missing_leaf(self, original, target):
        wrong = self.change(target, scale=jnp.ones(48))
        with pytest.raises(
            lcjax.TreeMismatchError, match=r"missing from the checkpoint:\s+'params/dense/scale'"
        ):
            restore(original, item=wrong)

    def test_an_extra_leaf(self, original, target):
        wrong = {k: v for k, v in target.items() if k != "key"}
        with pytest.raises(
            lcjax.TreeMismatchError, match=r"missing from the target:\s+'key'[^/]*partial"
        ):
            restore(original, item=wrong)
        assert restore(original, item=wrong, partial_restore=True)["step"] == 3

    @pytest.mark.parametrize(
        ("name", "wanted", "message"),
        [
            ("step", "three", r"'step' was saved as a Python int.*a Python str"),
            ("step", jnp.zeros(3), r"'step' was saved with shape \(\).*\(3,\)"),
            ("key", jax.ShapeDtypeStruct((3,), jnp.uint32), r"'key' was saved with shape \(2,\)"),
            ("key", jax.random.key(0, impl="rbg"), r"'key'.*threefry2x32.*rbg"),
            ("key", 1, r"'key' was saved with shape \(2,\).*a Python int"),
            ("step", jax.random.key(0), r"'step'"),
            ("step", object(), r"'step' is a builtins.object"),
        ],
    )
    def test_another_kind_of_leaf(self, original, target, name, wanted, message):
        with pytest.raises(lcjax.LcjaxError, match=message):
            restore(original, item={**target, name: wanted})

    def test_text_and_numbers(self, tmp_path):
        with manager(tmp_path, "lossless") as m:
            save(m, 0, {"name": "run", "z": 1 + 2j})
            for wanted in ({"name": 3, "z": 0j}, {"name": "x", "z": 0.0}):
                with pytest.raises(lcjax.TreeMismatchError, match="name|z"):
                    m.restore(0, args=lcjax.args.Restore(wanted))

    def test_transforms_are_refused(self, original):
        with manager(original) as m, pytest.raises(NotImplementedError, match="transforms"):
            m.restore(2, args=ocp.args.PyTreeRestore(transforms={"a": ocp.Transform()}))


class TestUnsupportedLeaves:
    @pytest.mark.parametrize(
        ("leaf", "message"),
        [
            (object(), "builtins.object"),
            (np.array(["a"]), "dtype is <U1"),
            (np.array([None]), "dtype is object"),
            (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
            (np.ma.masked_array([1.0], [True]), "MaskedArray"),
            (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct"),
            (lambda: None, "function"),
            ({1, 2}, "builtins.set"),
        ],
    )
    def test_they_are_named_when_saved(self, tmp_path, leaf, message):
        with manager(tmp_path) as m:
            with pytest.raises(lcjax.UnsupportedLeafError, match=rf"'params/odd'.*{message}"):
                m.save(0, args=ocp.args.StandardSave({"params": {"odd": leaf}}))
            save(m, 1, {"params": {"even": 1}})
            assert m.restore(1) == {"params": {"even": 1}}


class TestLimits:
    def test_without_a_target_the_limit_holds(self, original, monkeypatch):
        with pytest.raises(lcjax.CorruptDataError, match=r"more than 1000 bytes.*target"):
            restore(original, max_bytes=1000)
        monkeypatch.setenv("LCJAX_MAX_RESTORE_BYTES", "1000")
        with pytest.raises(lcjax.CorruptDataError, match="LCJAX_MAX_RESTORE_BYTES"):
            restore(original)
        assert restore(original, item=Training().next())["step"] == 3


class TestHostileManifests:
    def rewrite(self, root, change):
        """Changes a manifest's description and seals it with right hashes."""
        path = item_of(root, 2) / chain.MANIFEST_FILE
        with storage.File(path) as file:
            meta = file.reader.meta
        change(meta)
        storage.write_container(path, Writer().finish(meta))
        return path

    @pytest.mark.parametrize(
        "name", ["../../../../etc/passwd", "/etc/passwd", "..", "", "a" * 31 + "/", "\x00" * 32]
    )
    def test_names_that_are_paths(self, root, name):
        path = self.rewrite(root, lambda meta: meta["segments"][0].update(name=name))
        with pytest.raises(lcjax.CorruptDataError, match=f"{path}: its list of segments"):
            restore(root)

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.pop("segments"),
            lambda m: m["segments"].reverse(),
            lambda m: m["segments"].pop(0),
            lambda m: m["segments"].pop(),
            lambda m: m["segments"].insert(0, m["segments"][0]),
            lambda m: m["segments"][0].update(kind="own"),
            lambda m: m.pop("skeleton"),
            lambda m: m.pop("leaves"),
            lambda m: m["leaves"].pop(),
            lambda m: m.update(kind="message"),
            lambda m: m.update(leaves=m["leaves"] * 2),
            lambda m: m.update(step="5"),
            lambda m: m.update(preset=None),
            lambda m: m.update(shardings=[1]),
            lambda m: [e.update(shape=[1 << 61]) for e in m["leaves"] if "shape" in e],
            lambda m: [e.update(shape=[-1]) for e in m["leaves"] if "shape" in e],
            lambda m: [e.update(dtype="object") for e in m["leaves"] if "dtype" in e],
            lambda m: [e.update(sharding=99) for e in m["leaves"] if "shape" in e],
            lambda m: [e.update(codec="alone") for e in m["leaves"] if e.get("codec") == "lc"],
        ],
    )
    def test_other_damage(self, root, change):
        self.rewrite(root, change)
        with pytest.raises(lcjax.LcjaxError, match=str(root)):
            restore(root)

    def test_an_unknown_prng(self, root):
        def change(meta):
            (key,) = (e for e in meta["leaves"] if e["kind"] == "key")
            key["impl"] = "no such PRNG"

        self.rewrite(root, change)
        with pytest.raises(lcjax.LcjaxError, match="leaf 'key'.*no such PRNG"):
            restore(root)

    def test_a_sharding_that_is_no_sharding_is_only_a_lost_sharding(self, root):
        self.rewrite(root, lambda meta: meta.update(shardings=["{", "nonsense"][:1]))
        assert restore(root)["step"] == 3

    @pytest.mark.parametrize(
        "text", ["{}", "[]", "null", '{"sharding_type": "x"}', "1", '{"sharding_type": []}']
    )
    def test_hostile_shardings(self, root, text):
        self.rewrite(root, lambda meta: meta.update(shardings=[text]))
        with manager(root) as m:
            assert m.restore(2)["step"] == 3
            assert m.item_metadata(2).tree["params"]["dense"]["kernel"].sharding is None

    def test_a_list_without_its_last_segment(self, root):
        # What is left is a chain too, but of an older state than the rest of the step.
        def edit(meta):
            chained = [s for s in meta["segments"] if s["kind"] == "chain"]
            meta["segments"].remove(chained[-1])

        path = self.rewrite(root, edit)
        with pytest.raises(lcjax.CorruptDataError, match=f"{path}: its chains lead to"):
            restore(root)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{}",
            '{"sharding_type":"SingleDeviceSharding","device_str":1.5}',
            '{"sharding_type":"NamedSharding","shape":[1],"axis_names":["x"],'
            '"partition_spec":["x","x"]}',
            '{"sharding_type":"NamedSharding","shape":[1],"axis_names":["x"],'
            '"partition_spec":["x",null,null,null]}',
        ],
    )
    def test_shardings_only_cost_the_placement(self, root, text):
        expected = restore(root)

        def edit(meta):
            meta["shardings"] = [text] * len(meta["shardings"])

        self.rewrite(root, edit)
        found = restore(root)
        same(found, expected)
