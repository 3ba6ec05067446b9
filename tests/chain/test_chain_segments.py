"""``lcjax.chain`` and ``lcjax.storage`` by themselves, without Orbax."""

import os

import pytest
from etils import epath

from lcjax import chain, errors, storage
from lcjax.chain import ChainOptions, SegmentRef
from lcjax.container import Writer


def container(text="content"):
    writer = Writer()
    writer.add(text.encode() * 20)
    return writer.finish({"text": text})


def ref(name="a" * 32, size=10, kind="chain", pooled=False):
    return SegmentRef(name, size, kind, pooled)


@pytest.fixture
def root(tmp_path):
    return epath.Path(tmp_path)


def item(root, step, name="default"):
    path = root / str(step) / name
    path.mkdir(parents=True)
    return path


def manifest(item_path, refs):
    finished = Writer().finish({"segments": [r.to_json() for r in refs]})
    storage.write_container(item_path / chain.MANIFEST_FILE, finished)


def inode(path):
    return os.stat(path).st_ino


class TestOptions:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [({"layout": "heap"}, "auto, linked, pooled"), ({"max_chain": 0}, "at least 1")],
    )
    def test_bad_options_are_refused(self, bad, message):
        with pytest.raises(ValueError, match=message):
            ChainOptions(**bad)

    def test_a_chain_grows_to_max_chain(self):
        options = ChainOptions(max_chain=3, delta_budget=100)
        assert [chain.wants_key_frame([ref()] * n, options) for n in range(5)] == [
            True,
            False,
            False,
            True,
            True,
        ]

    def test_deltas_may_weigh_delta_budget_key_frames(self):
        options = ChainOptions(delta_budget=0.5)
        refs = [ref(size=100), ref(size=50)]
        assert not chain.wants_key_frame(refs, options)
        assert chain.wants_key_frame([*refs, ref(size=1)], options)


class TestRefs:
    def test_round_trip(self):
        refs = (ref(), ref("b" * 32, 0, "own", True))
        assert chain.refs_from_json([r.to_json() for r in refs], "m") == refs

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "../../etc/passwd"},
            {"name": "/etc/passwd"},
            {"name": "a" * 31},
            {"name": "A" * 32},
            {"name": "a" * 32 + "\n"},
            {"name": "a" * 31 + "/"},
            {"name": 7},
            {"name": None},
            {"size": -1},
            {"size": 1.5},
            {"size": True},
            {"size": "10"},
            {"kind": "other"},
            {"kind": None},
            {"pooled": 1},
            {"pooled": None},
        ],
    )
    def test_hostile_entries_are_refused(self, change):
        with pytest.raises(errors.CorruptDataError, match=r"manifest at hand: .*segments"):
            chain.refs_from_json([{**ref().to_json(), **change}], "manifest at hand")

    @pytest.mark.parametrize("raw", [None, {}, "abc", 3, [None], ["a" * 32], [[]]])
    def test_hostile_lists_are_refused(self, raw):
        with pytest.raises(errors.CorruptDataError, match="segments"):
            chain.refs_from_json(raw, "m")


class TestLinked:
    def test_carried_segments_share_the_inode(self, root):
        first, second = item(root, 1), item(root, 2)
        made = chain.add_segment(first, root, container(), "chain", False)
        assert chain.carry_segments(first, second, [made]) == (made,)
        assert inode(chain.locate(first, made)) == inode(chain.locate(second, made))
        assert chain.is_whole(second, [made])

    def test_equal_segments_of_one_chain_are_stored_once(self, root):
        first, second, third = item(root, 1), item(root, 2), item(root, 3)
        key = chain.add_segment(first, root, container("key"), "chain", False)
        delta = chain.add_segment(first, root, container("same"), "chain", False)
        refs = chain.carry_segments(first, second, [key, delta])
        before = inode(chain.locate(first, delta))
        refs += (chain.add_segment(second, root, container("same"), "chain", False),)
        assert refs == (key, delta, delta)
        assert inode(chain.locate(second, delta)) == before
        assert chain.carry_segments(second, third, refs) == refs
        assert len(list(third.iterdir())) == 2

    def test_without_links_they_are_copied(self, root, monkeypatch):
        first, second = item(root, 1), item(root, 2)
        made = chain.add_segment(first, root, container(), "chain", False)

        def fail(*_, **__):
            raise PermissionError(1, "no")

        monkeypatch.setattr("lcjax.storage.os.link", fail)
        chain.carry_segments(first, second, [made])
        a, b = chain.locate(first, made), chain.locate(second, made)
        assert a.read_bytes() == b.read_bytes()
        assert inode(a) != inode(b)

    def test_a_vanished_source_is_named(self, root):
        first, second = item(root, 1), item(root, 2)
        with pytest.raises(errors.MissingFileError, match="a" * 32):
            chain.carry_segments(first, second, [ref()])

    def test_a_shortened_file_is_not_whole(self, root):
        first = item(root, 1)
        made = chain.add_segment(first, root, container(), "chain", False)
        path = chain.locate(first, made)
        path.write_bytes(path.read_bytes()[:-1])
        assert not chain.is_whole(first, [made])


class TestPooled:
    def test_the_pool_is_found_from_items_and_from_bare_steps(self, root):
        inner, bare = item(root, 1), root / "2"
        bare.mkdir()
        made = chain.add_segment(inner, root, container(), "chain", True)
        expected = root / chain.POOL_DIRECTORY / f"{made.name}.lcx"
        assert chain.locate(inner, made) == expected
        assert chain.locate(bare, made) == expected

    def test_a_missing_segment_names_the_pool(self, root):
        lost = ref(pooled=True)
        with pytest.raises(errors.MissingFileError, match=rf"lcjax_segments/{'a' * 32}"):
            chain.locate(item(root, 1), lost)

    @pytest.mark.parametrize("layout", ["auto", "linked", "pooled"])
    def test_a_save_that_stands_alone_is_never_pooled(self, root, layout):
        assert chain.choose_layout(item(root, 1), None, ChainOptions(layout=layout)) is False

    @pytest.mark.parametrize("layout", ["auto", "linked", "pooled"])
    def test_auto_follows_the_file_system(self, root, layout, monkeypatch):
        step = item(root, 1)
        options = ChainOptions(layout=layout)
        assert chain.choose_layout(step, root, options) is (layout == "pooled")

        def fail(*_, **__):
            raise OSError(95, "not supported")

        monkeypatch.setattr("lcjax.storage.os.link", fail)
        assert chain.choose_layout(step, root, options) is (layout != "linked")
        assert list(step.iterdir()) == []  # the probe cleans up


class TestCollection:
    def make(self, root, text):
        return chain.add_segment(root / "x", root, container(text), "chain", True)

    def names(self, root):
        found = {p.name for p in (root / chain.POOL_DIRECTORY).iterdir()}
        return sorted(found - {chain.COMMIT_MARKER})

    def test_only_what_nobody_names_goes(self, root):
        kept, used, running, lost = (self.make(root, t) for t in "abcd")
        manifest(item(root, 1), [kept])
        manifest(item(root, "2.orbax-checkpoint-tmp", "d.orbax-checkpoint-tmp"), [running])
        assert chain.collect(root, {used.name}, 0) == [lost.name]
        assert self.names(root) == sorted(f"{r.name}.lcx" for r in (kept, used, running))

    def test_the_young_stay(self, root):
        lost = self.make(root, "a")
        assert chain.collect(root, set(), 3600) == []
        path = root / chain.POOL_DIRECTORY / f"{lost.name}.lcx"
        os.utime(path, (1, 1))
        assert chain.collect(root, set(), 3600) == [lost.name]

    def test_writing_a_segment_again_renews_its_age(self, root):
        lost = self.make(root, "a")
        os.utime(root / chain.POOL_DIRECTORY / f"{lost.name}.lcx", (1, 1))
        assert self.make(root, "a") == lost
        assert chain.collect(root, set(), 3600) == []

    def test_an_unreadable_manifest_stops_it(self, root):
        self.make(root, "a")
        step = item(root, 1)
        manifest(step, [])
        path = step / chain.MANIFEST_FILE
        path.write_bytes(path.read_bytes()[:-3])
        assert chain.collect(root, set(), 0) == []
        path.unlink()
        assert len(chain.collect(root, set(), 0)) == 1

    def test_leftovers_of_killed_writers_go_and_foreign_files_stay(self, root):
        self.make(root, "a")
        pool = root / chain.POOL_DIRECTORY
        (pool / "x.lcx.1-2.tmp").write_bytes(b"half")
        (pool / "README").write_bytes(b"mine")
        chain.collect(root, set(), 0)
        assert self.names(root) == ["README"]

    def test_what_cannot_be_deleted_costs_no_save(self, root, monkeypatch):
        self.make(root, "a")

        def fail(*_, **__):
            raise PermissionError(13, "no")

        monkeypatch.setattr(type(root), "unlink", fail)
        assert chain.collect(root, set(), 0) == []

    def test_without_a_pool_there_is_nothing_to_do(self, root):
        assert chain.collect(root, set(), 0) == []


class TestStorage:
    @pytest.mark.parametrize("point", ["fsync", "replace"])
    def test_an_atomic_write_that_fails_leaves_the_old_file(self, root, monkeypatch, point):
        path = root / "file"
        storage.write_atomic(path, [b"old"])

        def fail(*_, **__):
            raise OSError(28, "disk full")

        with monkeypatch.context() as patched:
            patched.setattr(f"lcjax.storage.os.{point}", fail)
            with pytest.raises(OSError, match="disk full"):
                storage.write_atomic(path, [b"new"])
        assert path.read_bytes() == b"old"
        assert [p.name for p in root.iterdir()] == ["file"]

    def test_an_error_that_is_not_about_links_is_not_hidden(self, root, monkeypatch):
        (root / "a").write_bytes(b"")

        def fail(*_, **__):
            raise OSError(28, "disk full")

        monkeypatch.setattr("lcjax.storage.os.link", fail)
        with pytest.raises(OSError, match="disk full"):
            storage.link(root / "a", root / "b")

    def test_a_file_that_shrinks_while_it_is_read_is_corrupt(self, root):
        made = container()
        storage.write_container(root / "f", made)
        with storage.File(root / "f") as file:
            os.truncate(root / "f", 40)
            with pytest.raises(errors.CorruptDataError, match="f: chunk 0"):
                file.reader.chunk(0)

    @pytest.mark.parametrize("name", ["none", "none/below", "directory"])
    def test_what_is_no_file_is_missing(self, root, name):
        (root / "directory").mkdir()
        with pytest.raises(errors.MissingFileError, match=name):
            storage.File(root / name)
