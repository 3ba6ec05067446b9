import dataclasses
import json
import math
import os

import numpy as np
import pytest

from lcjax import cli
from lcjax.demo import data, figures, files, journal, run
from lcjax.demo.model import Config, parameter_count
from lcjax.demo.settings import Settings, quick

FIGURES = (
    "params_ratio",
    "state_ratio",
    "loss_uninterrupted",
    "loss_resumed",
    "bytes_lcjax",
    "bytes_orbax",
    "save_s_lcjax",
    "save_s_orbax",
    "restore_s_lcjax",
    "restore_s_orbax",
)


@pytest.fixture(scope="module")
def corpus():
    return data.load_corpus()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder and the figures of one quick run."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    target = folder.parent / "figures" / "demo.json"
    assert cli.main(["demo", "--quick", "--out", str(folder), "--json", str(target)]) == 0
    return folder, json.loads(target.read_text())


def test_all_figures_are_finite_and_positive(demo):
    _, results = demo
    for name in FIGURES:
        assert math.isfinite(results[name]), name
        assert results[name] > 0, name


def test_the_killed_run_resumed_from_a_saved_step_and_reached_the_end(demo):
    folder, results = demo
    settings = quick(Settings())
    assert results["resumed_from_step"] > 0
    assert results["resumed_from_step"] % settings.save_every == 0
    assert results["killed_at_step"] >= results["resumed_from_step"]
    events = journal.Tail(folder / "killed.jsonl").read()
    assert [e["step"] for e in events if e["event"] == "start"] == [0, results["resumed_from_step"]]
    assert events[-1] == {
        "event": "done",
        "step": settings.steps,
        "validation_loss": results["loss_resumed"],
    }


def test_all_saves_but_the_first_are_deltas_also_after_the_kill(demo):
    _, results = demo
    settings = quick(Settings())
    assert results["delta_saves"] == 2 * (settings.steps // settings.save_every - 1)


def test_the_picture_is_drawn(demo):
    folder, _ = demo
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_lcjax_and_orbax_run_train_alike(demo):
    _, results = demo
    assert results["loss_uninterrupted"] == results["loss_orbax"]
    assert abs(results["loss_resumed"] - results["loss_uninterrupted"]) < 0.1


def test_a_second_demo_may_use_the_folder_of_the_first(demo, tmp_path):
    run.prepare(tmp_path, quick(Settings()))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed.jsonl").write_text("{}\n")
    run.prepare(tmp_path, quick(Settings()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "settings.json"]


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("draft")
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_wrong_preset_is_refused_before_anything_runs(tmp_path, capsys):
    new = tmp_path / "new"
    assert cli.main(["demo", "--preset", "lossless", "--bits", "3", "--out", str(new)]) == 2
    assert "lossless" in capsys.readouterr().err
    assert not new.exists()


def test_too_few_steps_are_refused(tmp_path):
    assert cli.main(["demo", "--steps", "10", "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_default_model_has_about_two_million_parameters():
    assert 1_800_000 <= parameter_count(Config()) <= 2_200_000


def test_settings_survive_their_file(tmp_path):
    settings = dataclasses.replace(Settings(), bits=4, model=Config(depth=2))
    settings.dump(tmp_path / "s.json")
    assert Settings.load(tmp_path / "s.json") == settings


def test_the_two_sides_of_the_corpus_are_disjoint(corpus):
    assert set(corpus.train_files).isdisjoint(corpus.validation_files)
    assert len(set(corpus.train_files)) == len(corpus.train_files)
    assert len(corpus.train) + len(corpus.validation) <= data.MAX_BYTES
    assert len(corpus.validation) > 100_000


def test_the_corpus_is_the_same_each_time(corpus):
    again = data.load_corpus()
    assert again.train_files == corpus.train_files
    np.testing.assert_array_equal(again.validation, corpus.validation)


def test_a_batch_depends_on_seed_and_step_alone(corpus):
    first = data.batch(corpus.train, 3, 7, 4, 32)
    data.batch(corpus.train, 3, 8, 4, 32)
    np.testing.assert_array_equal(first, data.batch(corpus.train, 3, 7, 4, 32))
    assert first.shape == (4, 33)
    assert not np.array_equal(first, data.batch(corpus.train, 3, 8, 4, 32))
    assert not np.array_equal(first, data.batch(corpus.train, 4, 7, 4, 32))


def test_validation_sequences_do_not_overlap(corpus):
    settings = Settings()
    assert settings.validation_sequences >= 256
    positions = np.arange(len(corpus.validation))
    cut = data.validation_set(positions, settings.validation_sequences, settings.model.length)
    assert len(np.unique(cut)) == settings.validation_sequences * (settings.model.length + 1)


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="hold no 8 sequences"):
        data.validation_set(np.zeros(100, np.uint8), 8, 32)


def test_an_interpreter_without_source_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python source"):
        data.load_corpus(stdlib=tmp_path)


def test_a_link_to_an_earlier_file_is_not_written_again(tmp_path):
    ledger = files.Ledger(tmp_path)
    for step in (1, 2):
        (tmp_path / str(step) / "params").mkdir(parents=True)
    (tmp_path / "1/params/base").write_bytes(bytes(1000))
    (tmp_path / "1/note").write_bytes(bytes(7))
    assert ledger.new_bytes(1) == {"params": 1000, "other": 7}
    os.link(tmp_path / "1/params/base", tmp_path / "2/params/base")
    (tmp_path / "2/params/delta").write_bytes(bytes(10))
    assert ledger.new_bytes(2) == {"params": 10}
    assert files.bytes_on_disk(tmp_path) == 1017


def test_a_half_written_line_is_dropped(tmp_path):
    path = tmp_path / "j.jsonl"
    tail = journal.Tail(path)
    assert tail.read() == []
    journal.Journal(path).write("step", step=1)
    with path.open("a") as file:
        file.write('{"event": "st')
    assert [e["step"] for e in tail.read()] == [1]
    journal.Journal(path).write("step", step=2)
    assert [e["step"] for e in tail.read()] == [2]


def test_a_run_tells_deltas_from_key_frames():
    whole = figures.Run()
    for step, size in ((10, 4000), (20, 100), (30, 3900)):
        whole.take({"event": "save", "step": step, "blocked_s": 0.1})
        written = {"params": size, "train": 1000}
        commit = {"save_s": 0.5, "written": written, "delta": step == 20}
        whole.take({"event": "commit", "step": step, **commit})
    assert [save.step for save in whole.deltas()] == [20]
    assert [save.state_bytes for save in whole.saves] == [5000, 1100, 4900]
