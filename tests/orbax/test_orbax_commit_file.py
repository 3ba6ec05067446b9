"""Orbax's commit-file mode: steps are written in place and count once a marker file is there."""

import orbax.checkpoint as ocp
import pytest
from orbax_helpers import LAYOUTS, Recorder, Training, is_key_frame, manager, same, save
from test_orbax_faults import Faults

MODE = {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath}
MARKER = "commit_success.txt"
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
def test_chains_keep_one(tmp_path, layout):
    training, recorder = Training(), Recorder(tmp_path)
    with manager(tmp_path, chain=LAYOUTS[layout], keep=1, **MODE) as m:
        for step in range(5):
            state = training.next()
            save(m, step, state)
            assert (tmp_path / str(step) / MARKER).exists()
            recorder.note(step, state)
            recorder.check(m)
    assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 2, 4: 3}


@layouts
@pytest.mark.parametrize("name", ["params2", "layer_1", "7b"])
def test_items_whose_names_end_in_a_number(tmp_path, layout, name):
    training, recorder = Training(), Recorder(tmp_path, name)
    with manager(tmp_path, chain=LAYOUTS[layout], keep=2, **MODE) as m:
        for step in range(4):
            state = training.next()
            m.save(step, args=ocp.args.Composite(**{name: ocp.args.StandardSave(state)}))
            m.wait_until_finished()
            recorder.note(step, state)
            same(m.restore(step)[name], recorder.expected[step])
    assert recorder.bases == {0: None, 1: 0, 2: 1, 3: 2}


@layouts
def test_an_uncommitted_step_is_never_built_on(tmp_path, layout):
    training, recorder = Training(), Recorder(tmp_path)
    with manager(tmp_path, chain=LAYOUTS[layout], **MODE) as m:
        for step in range(4):
            state = training.next()
            save(m, step, state)
            recorder.note(step, state)
            if step == 2:
                (tmp_path / "2" / MARKER).unlink()
        recorder.check(m, [0, 1, 3])
    assert recorder.bases[3] == 1


def test_the_only_step_uncommitted(tmp_path):
    training = Training()
    with manager(tmp_path, **MODE) as m:
        save(m, 0, training.next())
        (tmp_path / "0" / MARKER).unlink()
        state = training.next()
        save(m, 1, state)
        same(m.restore(1, args=ocp.args.StandardRestore(state)), state)
    assert is_key_frame(tmp_path, 1)


@layouts
def test_a_save_that_failed_half_way(tmp_path, monkeypatch, layout):
    faults, training, recorder = Faults(monkeypatch), Training(), Recorder(tmp_path)
    with manager(tmp_path, chain=LAYOUTS[layout], **MODE) as m:
        for step in range(2):
            state = training.next()
            save(m, step, state)
            recorder.note(step, state)
        faults.arm("write", 3)
        with pytest.raises(OSError, match="injected"):
            save(m, 2, training.next())
        faults.disarm()
        assert not (tmp_path / "2" / MARKER).exists()
        state = training.next()
        save(m, 3, state)
        recorder.note(3, state)
        recorder.check(m, [0, 1, 3])
    assert recorder.bases[3] == 1
    # After a restart the step that failed is saved again, over what is left of it.
    with manager(tmp_path, chain=LAYOUTS[layout], **MODE) as m:
        assert m.all_steps() == [0, 1, 3]
        same(m.restore(3), recorder.expected[3])
        state = training.next()
        save(m, 4, state)
        recorder.note(4, state)
        recorder.check(m, [0, 1, 3, 4])
    assert recorder.bases[4] == 3


@layouts
def test_a_step_is_written_again_over_its_uncommitted_remains(tmp_path, monkeypatch, layout):
    faults, training, recorder = Faults(monkeypatch), Training(), Recorder(tmp_path)
    with manager(tmp_path, chain=LAYOUTS[layout], **MODE) as m:
        state = training.next()
        save(m, 0, state)
        recorder.note(0, state)
        faults.arm("write", 3)
        with pytest.raises(OSError, match="injected"):
            save(m, 1, training.next())
        faults.disarm()
    with manager(tmp_path, chain=LAYOUTS[layout], **MODE) as m:
        same(m.restore(0), recorder.expected[0])
        state = training.next()
        save(m, 1, state)
        recorder.note(1, state)
        recorder.check(m)
        assert m.all_steps() == [0, 1]
    assert recorder.bases[1] == 0


@layouts
@pytest.mark.parametrize("mode", [{}, MODE], ids=["rename", "commit file"])
def test_orbax_cleans_up_and_spares_the_pool(tmp_path, layout, mode):
    training, recorder = Training(), Recorder(tmp_path)
    for step in range(3):
        with manager(tmp_path, chain=LAYOUTS[layout], cleanup_tmp_directories=True, **mode) as m:
            if step:
                same(m.restore(step - 1), recorder.expected[step - 1])
            state = training.next()
            save(m, step, state)  # waits for the clean-up
            recorder.note(step, state)
            recorder.check(m)
            assert m.all_steps() == [*range(step + 1)]
